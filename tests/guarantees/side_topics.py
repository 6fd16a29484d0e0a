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
from tests.guarantees.observations import Kind, Place


class There(NamedTuple):
    """When a record of the side topic was there, as far as samples tell; nanoseconds of the monotonic clock."""

    not_before: int
    """It was not there at this time."""
    by: int
    """It was there when the commits of this sample had been told, or right after."""


def there(commits: Sequence[CommitsAt]) -> Callable[[int, int], There | None]:
    """A function that says of a partition and offset of the side topic when it was there; None is never."""
    ends: dict[int, list[int]] = defaultdict(list)
    for sample in commits:
        for partition, end in sample.side_ends.items():
            ends[partition].append(end)

    def when(partition: int, offset: int) -> There | None:
        told = ends[partition]
        first = bisect_right(told, offset)
        if first == len(told):
            return None
        # The topic was there from the first sample on in which it is told of.
        first += len(commits) - len(told)
        return There(commits[first - 1].answered if first else 0, commits[first].answered)

    return when


# Dead letters -------------------------------------------------------------------------


def places_of_dead_letters(letters: Sequence[Record]) -> Iterator[tuple[Place, Record]]:
    """Each record of a dead-letter topic with the place of the original."""
    for letter in letters:
        read = read_dead_letter(letter)
        assert read is not None, f"{letter} is no dead letter"
        yield (read.original.partition, read.original.offset), letter


@dataclass(frozen=True)
class LettersExact:
    """I2: each of the expected records is in the dead-letter topic, as it was, and no other one is.

    Attributes:
        letters: All that the dead-letter topic holds.
        originals: All records of the topic.
        expected: Where those are that should have been dead-lettered.
        says: Whether what the headers say of the failure is right.
    """

    letters: Sequence[Record]
    originals: Mapping[Place, Record]
    expected: Collection[Place]
    says: Callable[[DeadLetterRecord], bool]

    def breaches(self, history: History) -> Iterator[str]:  # noqa: ARG002 - one of several of one shape
        """Letters that are missing, that should not be, or that differ from their original."""
        found = list(places_of_dead_letters(self.letters))
        places = {place for place, _ in found}
        if missing := set(self.expected) - places:
            yield f"records without a dead letter: {len(missing)}: {names(missing)}"
        if surplus := places - set(self.expected):
            yield f"records dead-lettered by mistake: {len(surplus)}: {names(surplus)}"
        for place, letter in found:
            original = self.originals.get(place)
            read = read_dead_letter(letter)
            assert read is not None
            if original is None or read.original != original:
                yield f"the dead letter of {names([place])} holds {read.original} instead of {original}"
            elif (letter.key, letter.value, letter.timestamp) != (original.key, original.value, original.timestamp):
                yield f"the dead letter of {names([place])} is {letter}, and the record was {original}"
            elif not self.says(read):
                yield f"the dead letter of {names([place])} says {read.failure}"


@dataclass(frozen=True)
class OneLetterPerOwnership:
    """I12: a record has a second dead letter only where its partition has changed hands before the first was committed.

    That it was not committed is what `OnlyUncommittedAgain` looks at.

    Attributes:
        letters: All that the dead-letter topic holds.
    """

    letters: Sequence[Record]

    def breaches(self, history: History) -> Iterator[str]:
        """Records with more dead letters than owners that gave them up, and those that an owner gave up twice."""
        owners: dict[Place, list[tuple[str, int]]] = defaultdict(list)
        for seen in history.of(Kind.EXHAUSTED):
            owners[seen.place].append((seen.process, seen.epoch))
        for place, gave_up in owners.items():
            if len(set(gave_up)) < len(gave_up):
                yield f"record {names([place])} failed for good twice in one ownership: {gave_up}"
        for place, count in Counter(place for place, _ in places_of_dead_letters(self.letters)).items():
            if count > len(owners[place]):
                yield f"record {names([place])} has {count} dead letters and failed for good in {owners[place]}"


# Parked records -----------------------------------------------------------------------


def parkings(records: Sequence[Record]) -> Iterator[tuple[Place, Record]]:
    """Each record of a park topic that parks one, with the place of the original."""
    for record in records:
        read = read_parked(record)
        if isinstance(read, ParkedRecord):
            yield _place(read.coordinates), record


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


def _place(coordinates: Coordinates) -> Place:
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
    originals: Mapping[Place, Record]
    expected: Collection[Place]

    def breaches(self, history: History) -> Iterator[str]:  # noqa: ARG002 - one of several of one shape
        """Records that are parked and should not be, the reverse, those stored twice, and those that differ."""
        parked = live(self.records)
        found = {_place(one.coordinates): one for one in parked.values()}
        if len(found) < len(parked):
            yield f"{len(parked)} parked records are stored for {len(found)} records: {sorted(parked)}"
        if missing := set(self.expected) - found.keys():
            yield f"records not parked: {len(missing)}: {names(missing)}"
        if surplus := found.keys() - set(self.expected):
            yield f"records parked by mistake: {len(surplus)}: {names(surplus)}"
        for place, one in found.items():
            if one.original != self.originals.get(place):
                yield f"what is parked of {names([place])} holds {one.original}, not {self.originals.get(place)}"
