"""Parked records of a side topic: read, released and dropped, with an audit log."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence

from aioshard.core.parking import NEVER
from aioshard.core.text import as_json_value
from aioshard.dead_letters.audit import audit
from aioshard.dead_letters.filters import Filters
from aioshard.kafka.publisher import Publisher
from aioshard.kafka.side_topics import TopicReader
from aioshard.records import Record, counted
from aioshard.serde.side_records import (
    Coordinates,
    ParkedRecord,
    ReleaseRequest,
    Removed,
    StorageKey,
    read_parked,
    release,
    tombstone,
)

ParkedKey = list[ParkedRecord]
"""The parked records of one key and partition, in order, without values; a record without a key is alone. The first
one failed, and the others wait behind it."""


@dataclasses.dataclass(slots=True)
class ParkedTopic:
    """The content of a side topic, as far as it was read."""

    filters: Filters
    """Which records are selected."""
    read: int = 0
    """Number of records of the side topic."""
    records: dict[Coordinates, dict[StorageKey, ParkedRecord]] = dataclasses.field(default_factory=dict)
    """By the keys under which they are stored: several if a stale member parked a record too."""
    requests: set[Coordinates] = dataclasses.field(default_factory=set)
    """Unanswered requests to release a key."""
    _matching: set[StorageKey] = dataclasses.field(default_factory=set)
    """Those that match the filters: only whole records tell."""

    async def read_from(self, reader: TopicReader) -> None:
        """Read a side topic from its start to its end.

        Raises:
            TransportError: It cannot be read.
        """
        async for records in reader.read():
            for record in records:
                self.add(record)

    def add(self, record: Record) -> None:
        """Add the next record of the side topic."""
        self.read += 1
        match read_parked(record):
            case ParkedRecord() as parked:
                slim = parked._replace(original=parked.original._replace(value=None, headers=()))
                self.records.setdefault(parked.coordinates, {})[parked.storage_key] = slim
                if self.filters.match(parked.original, parked.failure):
                    self._matching.add(parked.storage_key)
                else:
                    self._matching.discard(parked.storage_key)
            case Removed(storage_key):
                stored = self.records.get(storage_key.coordinates, {})
                stored.pop(storage_key, None)
                if not stored:
                    self.records.pop(storage_key.coordinates, None)
            case ReleaseRequest(coordinates, answered=True):
                self.requests.discard(coordinates)
            case ReleaseRequest(coordinates):
                self.requests.add(coordinates)

    def latest(self) -> list[ParkedRecord]:
        """Return all parked records in order, each as it was parked last."""
        return [stored[max(stored)] for _, stored in sorted(self.records.items(), key=operator.itemgetter(0))]

    def selected(self) -> list[ParkedRecord]:
        """Return the records that match the filters, in order."""
        return [record for record in self.latest() if record.storage_key in self._matching]

    def keys(self) -> list[ParkedKey]:
        """Return the keys with a selected record, the one that has waited longest first."""
        chosen = set(map(_identity, self.selected()))
        by_key: dict[object, ParkedKey] = {}
        for record in self.latest():
            if _identity(record) in chosen:
                by_key.setdefault(_identity(record), []).append(record)
        return sorted(by_key.values(), key=lambda key: (key[0].failure.failed_at, key[0].coordinates))

    def is_requested(self, key: ParkedKey) -> bool:
        """Return whether a request to release a key is pending."""
        return any(record.coordinates in self.requests for record in key)


def _identity(record: ParkedRecord) -> object:
    key = record.original.key
    return record.coordinates if key is None else (record.coordinates.topic, record.coordinates.partition, key)


def key_as_object(parked: ParkedTopic, key: ParkedKey, *, payload: bool = True) -> dict[str, object]:
    """Return a parked key for JSON.

    Args:
        parked: The side topic.
        key: Its parked records.
        payload: Whether to include the key and the message of the error; otherwise they are None.
    """
    first = key[0]
    failure = first.failure._asdict()
    if not payload:
        failure["message"] = None
    return {
        "key": as_json_value(first.original.key) if payload else None,
        "topic": first.coordinates.topic,
        "partition": first.coordinates.partition,
        "offsets": [record.coordinates.offset for record in key],
        "due": None if first.due >= NEVER else first.due,
        "retries": first.retries,
        "release_requested": parked.is_requested(key),
        **failure,
    }


async def release_keys(publisher: Publisher, topic: str, keys: Sequence[ParkedKey], *, who: str) -> None:
    """Request that parked keys are retried now; the owners of their partitions answer.

    Args:
        publisher: Writes the requests.
        topic: The side topic.
        keys: The keys.
        who: The operator, for the audit log.

    Raises:
        TransportError: Some requests were not written.
    """
    if keys:
        firsts = [key[0].coordinates for key in keys]
        audit("release", topic, _named(firsts), who, f"{counted(len(keys), 'key')} to be released")
        await publisher.publish([release(topic, coordinates) for coordinates in firsts])


async def drop_records(publisher: Publisher, parked: ParkedTopic, topic: str, *, who: str) -> None:
    """Remove the selected records for good: they are never processed, and later ones of their keys continue.

    Args:
        publisher: Writes the tombstones.
        parked: The side topic, with filters.
        topic: Its name.
        who: The operator, for the audit log.

    Raises:
        TransportError: Some were not removed.
    """
    coordinates = [record.coordinates for record in parked.selected()]
    if coordinates:
        audit("drop", topic, _named(coordinates), who, f"{counted(len(coordinates), 'parked record')} to be dropped")
        stored = [storage_key for at in coordinates for storage_key in sorted(parked.records[at])]
        await publisher.publish([tombstone(topic, storage_key) for storage_key in stored])


def _named(coordinates: Iterable[Coordinates]) -> str:
    return ",".join(map(str, coordinates))
