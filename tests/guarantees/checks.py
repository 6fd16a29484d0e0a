"""The guarantees as objects: each checks whether the history of a run kept it.

A scenario names the guarantees that it claims and passes them to `verify`. The numbers (I1 to I12) are
those of the documentation. Every check has tests in which a tampered history makes it fail.
"""

import functools
import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from aioshard.core.finished_offsets import Run, holds
from tests.guarantees.observations import Kind, RecordId, Seen

SHOWN = 5
"""Breaches that a message spells out."""

FOREVER = 1 << 62

ENDS = (Kind.FINISHED, Kind.ENDED, Kind.EXHAUSTED)
"""How runs end."""


class CommitsAt(NamedTuple):
    """The group's committed offsets as the broker reported them."""

    asked: int
    """Nanoseconds of the monotonic clock."""
    answered: int
    offsets: Mapping[int, int]
    side_ends: Mapping[int, int] = {}
    """The ends of the partitions of the side topic, where there is one; asked for after that."""
    completions: Mapping[int, Sequence[Run]] = {}
    """The completions stored beyond the committed offsets."""


class Apart(NamedTuple):
    """A process that cannot know what the group does: it stood still, or was cut off from its coordinator."""

    process: str
    since: int = 0
    """Nanoseconds of the monotonic clock."""
    until: int = FOREVER

    def excuses(self, process: str, since: int, until: int) -> bool:
        """Whether all that a process did in a time was done apart from the group."""
        return process == self.process and self.since <= since and until <= self.until


@dataclass(frozen=True)
class History:
    """All that is known of a run once it is over.

    Attributes:
        produced: The key of each record from the group's first position on.
        seen: The reports of the members.
        commits: Committed offsets, sampled from the broker during the run and at its end, in that order.
        ends: The end of each partition's log.
        passed: When it is known that a commit may pass a record that has not finished: it was skipped, or its dead
            letter or parked copy is in the side topic.
        let_go: From when on later records of the key of such a record may start; one that is parked is not let go.
    """

    produced: Mapping[RecordId, str]
    seen: Sequence[Seen]
    commits: Sequence[CommitsAt]
    ends: Mapping[int, int]
    passed: Mapping[RecordId, int] = field(default_factory=dict)
    let_go: Mapping[RecordId, int] = field(default_factory=dict)

    def of(self, kind: Kind) -> list[Seen]:
        """The observations of one kind, in order of time."""
        return sorted(seen for seen in self.seen if seen.kind is kind)

    def first_finished(self) -> dict[RecordId, int]:
        """When each record's first run that counts has finished."""
        times: dict[RecordId, int] = {}
        for seen in self.of(Kind.FINISHED):
            times.setdefault(seen.record_id, seen.at)
        return times

    def first_terminal(self) -> dict[RecordId, int]:
        """When each record has finished, or was let go: the first of both."""
        return _earliest(self.first_finished(), self.let_go)

    def first_passable(self) -> dict[RecordId, int]:
        """When each record has finished, or may be passed by a commit: the first of both."""
        return _earliest(self.first_finished(), self.passed)

    @functools.cached_property
    def begin(self) -> int:
        """When the first observation was made."""
        return min(seen.at for seen in self.seen)

    def after(self, at: int) -> str:
        """A time as seconds since the first observation."""
        return f"+{(at - self.begin) / 1e9:.3f} s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _earliest(first: Mapping[RecordId, int], second: Mapping[RecordId, int]) -> dict[RecordId, int]:
    record_ids = first.keys() | second.keys()
    return {record_id: min(first.get(record_id, FOREVER), second.get(record_id, FOREVER)) for record_id in record_ids}


class Guarantee(Protocol):
    """Something that a history keeps or breaks."""

    def breaches(self, history: History) -> Iterator[str]:
        """Sentences, one for each time that it was broken."""


def verify(history: History, *guarantees: Guarantee) -> None:
    """Fails with everything that the history breaks."""
    found = []
    for guarantee in guarantees:
        breaches = list(guarantee.breaches(history))
        if breaches:
            name = type(guarantee).__name__
            found += [f"{name} was broken {_times(len(breaches))}:", *(f"  - {text}" for text in breaches[:SHOWN])]
    if found:
        raise AssertionError("\n".join(found))


@dataclass(frozen=True)
class NothingLost:
    """I3: every record was processed, or let go as its handler's policy has it, and nothing else was."""

    def breaches(self, history: History) -> Iterator[str]:
        """Records that never finished, and observations of records that were not produced."""
        for record_id in sorted(history.produced.keys() - history.first_terminal().keys()):
            runs = sum(1 for seen in history.seen if seen.record_id == record_id and seen.kind is Kind.STARTED)
            key = history.produced[record_id]
            yield f"record {_name(record_id)} (key {key}) never finished; it was started {_times(runs)}"
        for seen in history.of(Kind.STARTED):
            expected = history.produced.get(seen.record_id)
            if expected is None:
                yield f"{seen.process} started {_name(seen.record_id)}, a record that it should not have had"
            elif expected != seen.key:
                started = f"{seen.process} started {_name(seen.record_id)}"
                yield f"{started} with key {seen.key}, produced with key {expected}"


@dataclass(frozen=True)
class KeyOrder:
    """I4: the records of one key start in offset order; those without a key in any.

    Over all processes: no record starts before every earlier record of its key has finished at least once, or was
    skipped or dead-lettered.
    So a skip breaks it, in any process, and so does a hand-over that leaves something behind:

        1 2 3 | 3 4     kept: 3 had not finished when the partition moved, and ran again
        1 3 2           broken
        1 2 | 4 3       broken: the new owner began with 4

    Within one ownership: offsets only ascend. The same one comes again only when its run did not count.

        1 2 2 3         kept if the first run of 2 failed or was cancelled
        1 2 3 2         broken: a rewind without a change of owner
    """

    def breaches(self, history: History) -> Iterator[str]:
        """Starts that came too early, or went back."""
        yield from self._too_early(history)
        yield from self._going_back(history)

    def _too_early(self, history: History) -> Iterator[str]:
        finished = history.first_terminal()
        ready: dict[RecordId, tuple[int, RecordId | None]] = {}
        """When all earlier records of the key had finished, and which was the last of them."""
        latest: dict[tuple[int, str], tuple[int, RecordId | None]] = {}
        for record_id in sorted(record_id for record_id, key in history.produced.items() if key):
            lane = record_id[0], history.produced[record_id]
            ready[record_id] = latest.get(lane, (0, None))
            latest[lane] = max(
                ready[record_id], (finished.get(record_id, FOREVER), record_id), key=lambda entry: entry[0]
            )
        for seen in history.of(Kind.STARTED):
            at, before = ready.get(seen.record_id, (0, None))
            if before is not None and seen.at < at:
                when = "has never finished" if at == FOREVER else f"finished at {history.after(at)}"
                yield (
                    f"{seen.process} started {_name(seen.record_id)} (key {seen.key}) at {history.after(seen.at)} "
                    f"although {_name(before)} of the same key {when}"
                )

    def _going_back(self, history: History) -> Iterator[str]:
        reached: dict[tuple[str, int, int, str], int] = {}
        counted: set[tuple[str, int, RecordId]] = set()
        for seen in sorted(history.seen):
            ownership = seen.process, seen.epoch, seen.record_id
            if seen.kind is Kind.FINISHED:
                counted.add(ownership)
            if seen.kind is not Kind.STARTED or not seen.key:
                continue
            lane = seen.process, seen.partition, seen.epoch, seen.key
            before = reached.get(lane, -1)
            reached[lane] = max(before, seen.offset)
            if seen.offset < before:
                started = f"{seen.process} started {_name(seen.record_id)} (key {seen.key})"
                yield f"{started} after offset {before} of the key"
            elif ownership in counted:
                yield f"{seen.process} started {_name(seen.record_id)} again in the ownership in which it had finished"


@dataclass(frozen=True)
class OneAtATimePerKey:
    """I4: in a process never two concurrent runs of one key, also across ownerships and cancelled runs."""

    def breaches(self, history: History) -> Iterator[str]:
        """Runs that began during another run of their key."""
        running: dict[tuple[str, str], Seen] = {}
        for seen in sorted(history.seen):
            lane = seen.process, seen.key
            if not seen.key:
                continue
            if seen.kind is Kind.STARTED:
                if (other := running.get(lane)) is not None:
                    yield (
                        f"{seen.process} started {_name(seen.record_id)} (key {seen.key}) at {history.after(seen.at)} "
                        f"while {_name(other.record_id)} of the same key ran, since {history.after(other.at)}"
                    )
                running[lane] = seen
            elif seen.kind in ENDS and running.get(lane, seen).record_id == seen.record_id:
                running.pop(lane, None)


@dataclass(frozen=True)
class OneProcessPerKey:
    """I4: a key of a partition never runs in two processes concurrently; runs that a kill ended are not looked at.

    Attributes:
        apart: Processes that do not know yet that a partition is another's.
    """

    apart: Collection[Apart] = ()

    def breaches(self, history: History) -> Iterator[str]:
        """Runs that began while another process ran the key."""
        running: dict[tuple[str, RecordId], int] = {}
        runs: dict[tuple[int, str], list[tuple[int, int, str, RecordId]]] = defaultdict(list)
        for seen in sorted(history.seen):
            if seen.kind is Kind.STARTED:
                running[seen.process, seen.record_id] = seen.at
            elif seen.kind in ENDS and seen.key:
                began = running.pop((seen.process, seen.record_id), seen.at)
                runs[seen.partition, seen.key].append((began, seen.at, seen.process, seen.record_id))
        for lane in runs.values():
            last: dict[str, tuple[int, int, str, RecordId]] = {}
            for run in sorted(lane):
                began, ended, process, record_id = run
                for _, until, other, before in last.values():
                    until = min(until, ended)  # noqa: PLW2901
                    if process != other and began < until and not self._excuse(process, other, began, until):
                        yield (
                            f"{process} started {_name(record_id)} at {history.after(began)} while {other} ran "
                            f"{_name(before)} of the same key, until {history.after(until)}"
                        )
                last[process] = run

    def _excuse(self, process: str, other: str, since: int, until: int) -> bool:
        return any(exception.excuses(each, since, until) for exception in self.apart for each in (process, other))


@dataclass(frozen=True)
class NeverAhead:
    """I1, I2: at the moment of each sample every record below the committed offset had a terminal outcome.

    It had finished, or was skipped, or its dead letter or parked copy had been in the side topic. The same for the
    completions stored beyond it.
    """

    def breaches(self, history: History) -> Iterator[str]:
        """Committed offsets that had passed a record that was not finished, and notes of such a record."""
        finished = history.first_passable()
        yield from _stored_ahead(history, finished)
        offsets: dict[int, list[int]] = defaultdict(list)
        slowest: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """For each record of a partition: which of it and those before it finished last, and when."""
        for partition, offset in sorted(history.produced):
            latest = slowest[partition][-1:] or [(0, -1)]
            offsets[partition].append(offset)
            slowest[partition].append(max(*latest, (finished.get((partition, offset), FOREVER), offset)))
        reported: set[tuple[int, int]] = set()
        for commits in history.commits:
            for partition, committed in commits.offsets.items():
                below = bisect_left(offsets[partition], committed)
                at, offset = slowest[partition][below - 1] if below else (0, -1)
                if at > commits.answered and (partition, committed) not in reported:
                    reported.add((partition, committed))
                    when = "never finished" if at == FOREVER else f"finished only at {history.after(at)}"
                    yield (
                        f"partition {partition} was committed at {committed} by {history.after(commits.answered)}, and "
                        f"record {_name((partition, offset))} {when}"
                    )


def _stored_ahead(history: History, finished: Mapping[RecordId, int]) -> Iterator[str]:
    looked_at: set[tuple[int, Run]] = set()
    for commits in history.commits:
        for partition, runs in commits.completions.items():
            for run in runs:
                if (partition, run) in looked_at:
                    continue
                looked_at.add((partition, run))
                for offset in range(*run):
                    record_id = (partition, offset)
                    if record_id in history.produced and finished.get(record_id, FOREVER) > commits.answered:
                        yield (
                            f"record {_name(record_id)} was stored as finished by "
                            f"{history.after(commits.answered)}, too early"
                        )


@dataclass(frozen=True)
class CommitsOnlyAdvance:
    """I9: only owners of a partition commit for it: committed offsets never go back."""

    def breaches(self, history: History) -> Iterator[str]:
        """Committed offsets below those of an earlier sample."""
        for earlier, later in itertools.pairwise(history.commits):
            for partition, before in earlier.offsets.items():
                after = later.offsets.get(partition, -1)
                if after < before:
                    yield (
                        f"partition {partition} was committed at {before} and then at {after}, by "
                        f"{history.after(later.answered)}"
                    )


@dataclass(frozen=True)
class OnlyUncommittedAgain:
    """I12: nothing starts that was already committed, or stored as finished beyond the commit.

    Attributes:
        apart_from: Records that were parked: they are run again after they were committed.
        apart: Processes that do not know yet what others have committed since.
    """

    apart_from: Collection[RecordId] = ()
    apart: Collection[Apart] = ()

    def breaches(self, history: History) -> Iterator[str]:
        """Starts below an offset that was committed before them, or that was stored with the offset."""
        known: dict[int, list[tuple[int, int]]] = defaultdict(list)
        completions: dict[int, list[Sequence[Run]]] = defaultdict(list)
        for commits in history.commits:
            for partition, offset in commits.offsets.items():
                known[partition].append((commits.answered, offset))
                completions[partition].append(commits.completions.get(partition, ()))
        for seen in history.of(Kind.STARTED):
            if seen.record_id in self.apart_from or any(
                exception.excuses(seen.process, seen.at, seen.at) for exception in self.apart
            ):
                continue
            known_commits = known[seen.partition]
            before = bisect_left(known_commits, (seen.at, -1)) - 1
            if before >= 0 and seen.offset < known_commits[before][1]:
                yield (
                    f"{seen.process} started {_name(seen.record_id)} at {history.after(seen.at)}, after the commit of "
                    f"{known_commits[before][1]} at {history.after(known_commits[before][0])}"
                )
            elif before >= 0 and holds(completions[seen.partition][before], seen.offset):
                yield (
                    f"{seen.process} started {_name(seen.record_id)} at {history.after(seen.at)}, after it was stored "
                    f"as finished at {history.after(known_commits[before][0])}"
                )


@dataclass(frozen=True)
class NoDuplicates:
    """I12: at most *budget* starts beyond each record's first.

    Attributes:
        budget: How many there may be.
        apart_from: Records whose runs are not counted.
    """

    budget: int = 0
    apart_from: Collection[RecordId] = ()

    def breaches(self, history: History) -> Iterator[str]:
        """All starts beyond the first, when there are more than the budget allows."""
        first: dict[RecordId, Seen] = {}
        again: list[str] = []
        for seen in history.of(Kind.STARTED):
            before = first.setdefault(seen.record_id, seen)
            if before is not seen and seen.record_id not in self.apart_from:
                again.append(
                    f"{_name(seen.record_id)} (key {seen.key}) was started in {before.process} "
                    f"at {history.after(before.at)} and again in {seen.process} at {history.after(seen.at)}"
                )
        if len(again) > self.budget:
            yield from again


@dataclass(frozen=True)
class TakenInOnce:
    """I5: the engine of a process was given nothing twice, of partitions that stayed with it.

    Attributes:
        process: The process of the observations.
        partitions: Those that stayed.
    """

    process: str
    partitions: Collection[int]

    def breaches(self, history: History) -> Iterator[str]:
        """Offsets that came in after one that was not below them, and partitions of which nothing came in."""
        reached: dict[int, int] = {}
        for seen in history.seen:
            if seen.kind is not Kind.TAKEN_IN or seen.process != self.process or seen.partition not in self.partitions:
                continue
            before = reached.get(seen.partition, -1)
            reached[seen.partition] = max(before, seen.offset)
            if seen.offset <= before:
                yield f"{seen.process} took in {_name(seen.record_id)} after offset {before}"
        for partition in sorted(set(self.partitions) - reached.keys()):
            yield f"{self.process} took in nothing of partition {partition}: this shows nothing"


@dataclass(frozen=True)
class LagZero:
    """I10, and the end of every scenario: the last committed offsets are the ends of the logs."""

    def breaches(self, history: History) -> Iterator[str]:
        """Partitions that are not committed to their end."""
        last: Mapping[int, int] = history.commits[-1].offsets if history.commits else {}
        for partition, end in sorted(history.ends.items()):
            committed = last.get(partition)
            if committed != end and not (committed is None and end == 0):
                yield f"partition {partition} ends at {end} and is committed at {committed}"


def _name(record_id: RecordId) -> str:
    return "/".join(map(str, record_id))


def names(record_ids: Iterable[RecordId]) -> str:
    """Records as messages name them."""
    return ", ".join(map(_name, sorted(record_ids)))


SAFE: tuple[Guarantee, ...] = (
    NothingLost(),
    KeyOrder(),
    OneAtATimePerKey(),
    NeverAhead(),
    CommitsOnlyAdvance(),
    OnlyUncommittedAgain(),
    LagZero(),
)
"""Guarantees of every scenario, crashes included."""

DEPLOYED: tuple[Guarantee, ...] = (*SAFE, NoDuplicates())
"""Guarantees of a clean deploy."""


def safe_when_parked(parked: Collection[RecordId]) -> tuple[Guarantee, ...]:
    """The same for handlers that park: those records run again after they were committed."""
    others = [guarantee for guarantee in SAFE if not isinstance(guarantee, OnlyUncommittedAgain)]
    return (*others, OnlyUncommittedAgain(apart_from=parked))
