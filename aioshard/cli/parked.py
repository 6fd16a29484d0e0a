"""What a side topic of parked records holds, by key."""

import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from aioshard.cli.progress import Progress
from aioshard.cli.selection import Selection
from aioshard.cli.sides import SideTopic
from aioshard.records import Record
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    Place,
    ReleaseEnded,
    ReleaseRequest,
    Removed,
    read_parked,
)

__all__ = ["Parked", "ParkedKey", "ParkedTopic"]


class Parked(NamedTuple):
    """A parked record, without its value."""

    at: Coordinates
    """Where it came from."""
    places: tuple[Place, ...]
    """Under which keys it is stored: more than one after a member was slow to notice that it had lost the partition."""
    key: bytes | None
    failure: Failure
    due: float
    replays: int


class ParkedKey(NamedTuple):
    """The parked records of one key and partition; a record without a key is alone.

    Invariants:
        * The first one of `records` comes first when the key is run again.
    """

    records: tuple[Parked, ...]
    requested: bool
    """Whether somebody has asked for its release, and nobody has answered yet."""

    @property
    def first(self) -> Parked:
        """The record that failed; the others wait behind it."""
        return self.records[0]


class ParkedTopic:
    """Reads what is parked in an open side topic. Owned by one command."""

    def __init__(self, side: SideTopic) -> None:
        self.strange = 0
        """Records that say nothing of parking."""
        self._side = side
        self._stored: dict[Coordinates, dict[Place, ParkedRecord]] = {}
        """By generation; without values."""
        self._requests: set[Coordinates] = set()
        self._read = 0

    def __len__(self) -> int:
        """How many records are parked."""
        return len(self._stored)

    async def read(self) -> None:
        """Read the topic from its start to its end.

        Raises:
            TransportError: It cannot be read.
        """
        async with Progress(f"reading {self._side.name}", lambda: self._read):
            async for records in self._side.reader.read():
                for record in records:
                    self._take(record)

    def _take(self, record: Record) -> None:
        self._read += 1
        match read_parked(record):
            case ParkedRecord() as parked:
                known = self._stored.setdefault(parked.coordinates, {})
                known[parked.place] = parked._replace(original=parked.original._replace(value=None, headers=()))
            case Removed(place):
                known = self._stored.get(place.coordinates, {})
                known.pop(place, None)
                if not known:
                    self._stored.pop(place.coordinates, None)
            case ReleaseRequest(coordinates):
                self._requests.add(coordinates)
            case ReleaseEnded(coordinates):
                self._requests.discard(coordinates)
            case None:
                self.strange += 1

    def _all(self) -> Iterator[Parked]:
        """What is parked, in order; of a record that is stored twice, as it was parked last."""
        for at, known in sorted(self._stored.items(), key=operator.itemgetter(0)):
            last = known[max(known)]
            yield Parked(at, tuple(sorted(known)), last.original.key, last.failure, last.due, last.replays)

    def keys(self, selection: Selection) -> list[ParkedKey]:
        """The keys of which a record is selected, with all their records; the one that waits longest comes first."""
        chosen = {_identity(one) for one in self._all() if _is_selected(one, selection)}
        by_key: dict[object, list[Parked]] = {}
        for one in self._all():
            identity = _identity(one)
            if identity in chosen:
                by_key.setdefault(identity, []).append(one)
        keys = [ParkedKey(tuple(records), self._is_requested(records)) for records in by_key.values()]
        return sorted(keys, key=lambda key: (key.first.failure.failed_at, key.first.at))

    def _is_requested(self, records: Iterable[Parked]) -> bool:
        return any(one.at in self._requests for one in records)

    def records(self, selection: Selection) -> Iterator[Parked]:
        """The selected records themselves, in order."""
        return (one for one in self._all() if _is_selected(one, selection))


def _identity(one: Parked) -> object:
    return one.at if one.key is None else (one.at.topic, one.at.partition, one.key)


def _is_selected(one: Parked, selection: Selection) -> bool:
    return selection.takes(Record(*one.at, one.key, None, (), 0.0), one.failure)
