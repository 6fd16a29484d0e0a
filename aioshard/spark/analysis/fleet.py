"""What a candidate comes to: members of a group, the partitions that each has, and what follows a death.

Pure: `aioshard.spark.analysis.simulation` does the work, and nothing here knows of Spark.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aioshard.core.key_hash import key_hash
from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.simulation import NO_KEY, Engine, Runs, Work, simulate

__all__ = ["NO_TURN", "Prediction", "Recording", "best_possible", "predict", "quantile", "repartitioned"]

NO_TURN = -1
"""In place of a key's place among partitions: records without a key take turns."""


class Recording(NamedTuple):
    """The records of one handler as a journal has them, oldest first.

    All arrays have the length of those of *work*.
    """

    work: Work
    topic: "array[int]"
    """From 0."""
    place: "array[int]"
    """What a number of partitions is taken of to find the record's, or `NO_TURN`."""
    topics: tuple[str, ...]
    by_partition: bool
    """Whether the handler's shards are its partitions."""


class Prediction(NamedTuple):
    """What a candidate comes to; times are microseconds."""

    makespan: int
    """From the first record that was available to the last end."""
    wait: tuple[int, int, int]
    """From being taken in to the start: of half of the records, of 99 %, and of all, no longer than this."""
    total: tuple[int, int, int]
    """From being taken in to the end, in the same way."""
    since_available: tuple[int, int, int]
    """From being available at the broker to the end, in the same way."""
    busy: float
    """Share of all workers' time in which they ran a handler, from 0 to 1."""
    longest_in_hand: int
    """The longest that a member had a record in hand: beyond `stuck_after`, its partition would be given less room."""
    member_work: tuple[int, ...]
    """How long the handlers of each member ran in total."""
    by: str
    """`windows` or `events`: what found it."""


def predict(recording: Recording, candidate: Candidate) -> Prediction:
    """Process a recording as *candidate*, of which nothing is left open, says."""
    work = recording.work
    if candidate.partitions is not None:
        work = repartitioned(recording, candidate.partitions)
    engine = Engine(candidate.shards or 0, candidate.workers, candidate.max_buffered_records or 1)
    shares = _dealt(work, range(work.partitions), candidate.members)
    if candidate.dies_at is None:
        return _summed(work, [(share, simulate(_part(work, share), engine)) for share in shares], candidate)
    return _with_death(work, shares, engine, candidate)


def _with_death(work: Work, shares: list[list[int]], engine: Engine, candidate: Candidate) -> Prediction:
    """The member with the most work dies: what it had not finished is others' when its session has timed out."""
    assert candidate.dies_at is not None  # noqa: S101 - why we are here
    death = round(candidate.dies_at * 1_000_000)
    back_at = death + round(candidate.session_timeout * 1_000_000)
    shares.sort(key=lambda share: sum(work.service[record] for record in share), reverse=True)
    dead, *alive = shares
    last = simulate(_part(work, dead), engine, until=death)
    done = [place for place, finish in enumerate(last.finished) if finish >= 0]
    finished = Runs(*(array("q", [times[place] for place in done]) for times in last))
    left = [record for place, record in enumerate(dead) if last.finished[place] < 0]
    available = array("q", work.available)
    for record in left:
        available[record] = max(available[record], back_at)
    work = work._replace(available=available)
    if candidate.takeover == "standby":
        alive.append(left)
    elif candidate.takeover == "neighbour":
        alive[0] = sorted(alive[0] + left, key=lambda record: (available[record], record))
    else:
        dealt = _dealt(work, sorted({work.partition[record] for record in left}), len(alive), left)
        alive = [
            sorted(share + more, key=lambda record: (available[record], record))
            for share, more in zip(alive, dealt, strict=True)
        ]
    runs = [(share, simulate(_part(work, share), engine)) for share in alive]
    return _summed(work, [([dead[place] for place in done], finished), *runs], candidate)


def _dealt(
    work: Work, partitions: Iterable[int], members: int, records: Iterable[int] | None = None
) -> list[list[int]]:
    """Deal partitions out to members in turn; returns the records of each."""
    owner = {partition: turn % members for turn, partition in enumerate(partitions)}
    shares: list[list[int]] = [[] for _ in range(members)]
    for record in range(len(work.partition)) if records is None else records:
        shares[owner[work.partition[record]]].append(record)
    return shares


def _part(work: Work, records: Sequence[int]) -> Work:
    """Some records of *work*, with partitions from 0."""
    number: dict[int, int] = {}
    for partition in sorted({work.partition[record] for record in records}):
        number[partition] = len(number)
    return Work(
        array("q", [number[work.partition[record]] for record in records]),
        *(array("q", [column[record] for record in records]) for column in (work.available, work.service, work.key)),
    )


def repartitioned(recording: Recording, partitions: int) -> Work:
    """The same records in topics of another number of partitions; those without a key take turns."""
    turns = [0] * len(recording.topics)
    placed = array("q")
    for topic, place in zip(recording.topic, recording.place, strict=True):
        if place == NO_TURN:
            turns[topic] += 1
            place = turns[topic]  # noqa: PLW2901 - its turn is its place
        placed.append(topic * partitions + place % partitions)
    work = recording.work._replace(partition=placed)
    if not recording.by_partition:
        return work
    hashes = [
        key_hash((topic, partition)) or 0 for topic in recording.topics for partition in range(partitions)
    ]  # as a handler's shard key is then
    return work._replace(key=array("q", [hashes[partition] for partition in placed]))


def _summed(work: Work, members: Sequence[tuple[Sequence[int], Runs]], candidate: Candidate) -> Prediction:
    waits: list[int] = []
    totals: list[int] = []
    since: list[int] = []
    end = 0
    for records, runs in members:
        for record, arrived, started, finished in zip(records, *runs, strict=True):
            waits.append(started - arrived)
            totals.append(finished - arrived)
            since.append(finished - work.available[record])
            end = max(end, finished)
    makespan = end - min(work.available, default=0)
    service = sum(work.service)
    workers = candidate.workers * candidate.members
    return Prediction(
        makespan=makespan,
        wait=_levels(waits),
        total=_levels(totals),
        since_available=_levels(since),
        busy=service / (workers * makespan) if makespan else 0.0,
        longest_in_hand=max(totals, default=0),
        member_work=tuple(sum(work.service[record] for record in records) for records, _ in members),
        by="events",
    )


def _levels(values: list[int]) -> tuple[int, int, int]:
    values.sort()
    return (quantile(values, 0.5), quantile(values, 0.99), values[-1] if values else 0)


def quantile(ordered: Sequence[int], level: float) -> int:
    """The value of which so many, from 0 to 1, are no larger; of sorted values, and one of them.

    Example:
        >>> quantile(range(1, 101), 0.99)
        99
    """
    if not ordered:
        return 0
    return ordered[min(max(-(-len(ordered) * round(level * 1_000) // 1_000) - 1, 0), len(ordered) - 1)]


def best_possible(work: Work) -> tuple[int, int]:
    """How long it takes with workers without end, because each key is in order; and the key that takes that long.

    No number of workers, shards or partitions is quicker.

    Returns:
        Microseconds from the first record that is available to the last end, and the hash of the key of the record
        that ends last; `NO_KEY` for a record without one.
    """
    free: dict[int, int] = {}
    end, last = 0, NO_KEY
    for available, service, key in zip(work.available, work.service, work.key, strict=True):
        finished = (available if key == NO_KEY else max(available, free.get(key, 0))) + service
        if key != NO_KEY:
            free[key] = finished
        if finished > end:
            end, last = finished, key
    return end - min(work.available, default=0), last
