"""The side topics of a group, dead letters and parked records, with the time of each record."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aioshard import Record
from aioshard.serde.side_records import (
    Coordinates,
    DeadLetterRecord,
    ParkedRecord,
    ReleaseRequest,
    Removed,
    read_dead_letter,
    read_parked,
)
from tests.guarantees.checks import CommitsAt, History, names
from tests.guarantees.observations import Kind, RecordId


class There(NamedTuple):
    """When a record of the side topic was there, as far as samples tell; nanoseconds of the monotonic clock."""

    not_before: int
    """It was not there at this time."""
    by: int
    """It was there when the commits of this sample had been read, or right after."""


def there(commits: Sequence[CommitsAt]) -> Callable[[int, int], There | None]:
    """A function that says of a partition and offset of the side topic when it was there; None is never."""
    ends: dict[int, list[int]] = defaultdict(list)
    for sample in commits:
        for partition, end in sample.side_ends.items():
            ends[partition].append(end)

    def when(partition: int, offset: int) -> There | None:
        sampled = ends[partition]
        first = bisect_right(sampled, offset)
        if first == len(sampled):
            return None
        # The topic was there from the first sample on that has it.
        first += len(commits) - len(sampled)
        return There(commits[first - 1].answered if first else 0, commits[first].answered)

    return when


# Dead letters -------------------------------------------------------------------------


def ids_of_dead_letters(dead_letters: Sequence[Record]) -> Iterator[tuple[RecordId, Record]]:
    """Each record of a dead-letter topic with the id of the original."""
    for letter in dead_letters:
        read = read_dead_letter(letter)
        assert read is not None, f"{letter} is not a dead letter"
        yield (read.original.partition, read.original.offset), letter


@dataclass(frozen=True)
class DeadLettersExact:
    """I2: each of the expected records is in the dead-letter topic, as it was, and no other one is.

    Attributes:
        dead_letters: All records of the dead-letter topic.
        originals: All records of the topic.
        expected: Where those are that should have been dead-lettered.
        says: Whether what the headers say of the failure is right.
    """

    dead_letters: Sequence[Record]
    originals: Mapping[RecordId, Record]
    expected: Collection[RecordId]
    says: Callable[[DeadLetterRecord], bool]

    def breaches(self, history: History) -> Iterator[str]:  # noqa: ARG002 - one of several of one shape
        """Dead letters that are missing, that should not be, or that differ from their original."""
        found = list(ids_of_dead_letters(self.dead_letters))
        record_ids = {record_id for record_id, _ in found}
        if missing := set(self.expected) - record_ids:
            yield f"records without a dead letter: {len(missing)}: {names(missing)}"
        if surplus := record_ids - set(self.expected):
            yield f"records dead-lettered by mistake: {len(surplus)}: {names(surplus)}"
        for record_id, letter in found:
            original = self.originals.get(record_id)
            read = read_dead_letter(letter)
            assert read is not None
            if original is None or read.original != original:
                yield f"the dead letter of {names([record_id])} holds {read.original} instead of {original}"
            elif (letter.key, letter.value, letter.timestamp) != (original.key, original.value, original.timestamp):
                yield f"the dead letter of {names([record_id])} is {letter}, and the record was {original}"
            elif not self.says(read):
                yield f"the dead letter of {names([record_id])} says {read.failure}"


@dataclass(frozen=True)
class OneDeadLetterPerOwnership:
    """I12: a record has a second dead letter only where its partition has changed hands before the first was committed.

    That it was not committed is what `OnlyUncommittedAgain` looks at.

    Attributes:
        dead_letters: All records of the dead-letter topic.
    """

    dead_letters: Sequence[Record]

    def breaches(self, history: History) -> Iterator[str]:
        """Records with more dead letters than owners that gave them up, and those that an owner gave up twice."""
        owners: dict[RecordId, list[tuple[str, int]]] = defaultdict(list)
        for seen in history.of(Kind.EXHAUSTED):
            owners[seen.record_id].append((seen.process, seen.epoch))
        for record_id, gave_up in owners.items():
            if len(set(gave_up)) < len(gave_up):
                yield f"record {names([record_id])} failed for good twice in one ownership: {gave_up}"
        for record_id, count in Counter(record_id for record_id, _ in ids_of_dead_letters(self.dead_letters)).items():
            if count > len(owners[record_id]):
                yield f"record {names([record_id])} has {count} dead letters and failed for good in {owners[record_id]}"


# Parked records -----------------------------------------------------------------------


def parkings(records: Sequence[Record]) -> Iterator[tuple[RecordId, Record]]:
    """Each record of a park topic that parks one, with the id of the original."""
    for record in records:
        read = read_parked(record)
        if isinstance(read, ParkedRecord):
            yield _record_id(read.coordinates), record


def live(records: Sequence[Record]) -> dict[str, ParkedRecord]:
    """Return the latest copy of each parked record by key, as compaction would leave it."""
    found: dict[str, ParkedRecord] = {}
    for record in records:
        read, stored_under = read_parked(record), (record.key or b"").decode()
        if isinstance(read, ParkedRecord):
            found[stored_under] = read
        elif isinstance(read, Removed):
            found.pop(stored_under, None)
    return found


def requests(records: Sequence[Record]) -> dict[str, ReleaseRequest]:
    """The requests in a park topic that were not answered."""
    found: dict[str, ReleaseRequest] = {}
    for record in records:
        name = (record.key or b"").decode()
        found.pop(name, None)
        read = read_parked(record)
        if isinstance(read, ReleaseRequest) and not read.answered:
            found[name] = read
    return found


def _record_id(coordinates: Coordinates) -> RecordId:
    return coordinates.partition, coordinates.offset


@dataclass(frozen=True)
class ParkedExactly:
    """I2: what is parked now are the expected records, as they were, and no other one.

    Attributes:
        records: All that the park topic holds.
        originals: All records of the topic.
        expected: Where those are that should be parked.
    """

    records: Sequence[Record]
    originals: Mapping[RecordId, Record]
    expected: Collection[RecordId]

    def breaches(self, history: History) -> Iterator[str]:  # noqa: ARG002 - one of several of one shape
        """Records that are parked and should not be, the reverse, those stored twice, and those that differ."""
        parked = live(self.records)
        found = {_record_id(copy.coordinates): copy for copy in parked.values()}
        if len(found) < len(parked):
            yield f"{len(parked)} parked records are stored for {len(found)} records: {sorted(parked)}"
        if missing := set(self.expected) - found.keys():
            yield f"records not parked: {len(missing)}: {names(missing)}"
        if surplus := found.keys() - set(self.expected):
            yield f"records parked by mistake: {len(surplus)}: {names(surplus)}"
        for record_id, copy in found.items():
            if copy.original != self.originals.get(record_id):
                original = self.originals.get(record_id)
                yield f"what is parked of {names([record_id])} holds {copy.original}, not {original}"
