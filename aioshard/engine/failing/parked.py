"""What is parked of one partition: read from its side topic, run again when it is due."""

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator

from aioshard.core.finished_offsets import holds
from aioshard.core.parking import ParkedEntry, ParkedKeys
from aioshard.core.sharding import ShardKey, identity, shard_number
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.ports import FetchedBatch, Message, record_size
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    Place,
    ReleaseRequest,
    Removed,
    read_parked,
    released,
    tombstone,
)

__all__ = ["Lot", "Replay", "of_a_fixed_shard"]

_WHO = "parking"
_LOOKED_AT = 1_000
"""Requests that are looked at in one go: somebody may have asked for all that is parked."""


class Replay(Delivery):
    """A parked record that is run again; it belongs to the lot's own epoch, which nothing is committed for."""

    __slots__ = ("entry", "lot")

    def __init__(self, record: Record, key: ShardKey, size: int, *, lot: "Lot", entry: ParkedEntry, now: float) -> None:
        super().__init__(record, lot.replays, key, size, now)
        self.offset = lot.replays.tracker.position
        self.lot = lot
        self.entry = entry


class Lot:
    """The parked records of one partition while it is ours.

    A replay is a delivery like any other, but not of the partition's epoch: its offset was committed long ago. It
    belongs to an epoch of its own that opens, closes and ends with that of the partition, so that a drain waits for
    it and a result that comes too late changes nothing.

    Invariants:
        * What is parked is what the side topic says: of records that this process parked, what was acknowledged.
        * A record that the partition delivers again is not parked: it comes by itself, in order.
    """

    def __init__(
        self,
        source: Epoch,
        stored_in: TopicPartition,
        generation: int,
        *,
        buffer: Buffer,
        shard_key: Callable[[Record], ShardKey],
    ) -> None:
        """Make what is known of a partition's parked records; nothing is, yet."""
        self.source = source
        """The epoch of the partition."""
        self.stored_in = stored_in
        """Where its parked records are kept."""
        self.generation = generation
        """Of the group, when the partition became ours; what is parked here is stored under it."""
        self.replays = Epoch(stored_in, source.number, 0, buffer, source.counts)
        """The epoch of what is run again."""
        self.keys = ParkedKeys()
        self.writing: set[int] = set()
        """Offsets of what is on its way to the side topic."""
        self.read_to = 0
        """Where to go on in the side topic."""
        self.restored = False
        """Whether everything was read that was there when the partition became ours."""
        self.failures: dict[Hashable, Failure] = {}
        """What the first record of each key failed with."""
        self._start = source.tracker.position
        self._later: dict[Place, tuple[ParkedEntry, Failure]] = {}
        """What was parked under a later generation than ours."""
        self._superseded: dict[int, list[tuple[ParkedEntry, Failure]]] = {}
        """While everything is read: what is stored under an earlier generation too than that which counts."""
        self._to_write: list[Message] = []
        self._doubtful: set[int] = set()
        """Offsets that were seen in the side topic as parked by us, and not acknowledged to us."""
        self._requests: list[Coordinates] = []
        self._asked: dict[Coordinates, Hashable] = {}
        """Requests that are being done, each with its key."""
        self._shard_key = shard_key

    def identity(self, record: Record) -> ShardKey:
        """The shard key of a record; None when it has none, and is parked alone."""
        return identity(self._shard_key, record)

    # What is read -------------------------------------------------------------------

    def read(self, record: Record) -> Message | None:
        """Take note of a record of the side topic; returns what is to be written in answer to it, if anything."""
        if not self.restored or record.offset < self.read_to:
            return None  # it is, or was, read by `restore`
        self.read_to = record.offset + 1
        return self._take_note(record)

    def restore(self, record: Record) -> str | None:
        """Take note of what was there when the partition became ours.

        Returns:
            The group that has parked it; None of what was not parked.
        """
        found = read_parked(record)
        self._take_note(record)
        return found.failure.group if isinstance(found, ParkedRecord) else None

    def _take_note(self, record: Record) -> Message | None:
        found = read_parked(record)
        ours = self.source.topic_partition
        if found is None or TopicPartition(found.coordinates.topic, found.coordinates.partition) != ours:
            return None
        match found:
            case ParkedRecord() if not self.restored:
                self._find(found, record.offset)
            case Removed() if not self.restored:
                self._lose(found.place)
            case ParkedRecord():
                return self._parked(found, record.offset)
            case Removed() if found.by is not None and found.by > self.generation:
                pass  # its next owner runs it, which we are not yet told of: what follows it must not run here
            case Removed():
                self._later.pop(found.place, None)
                entry = self.keys.get(found.coordinates.offset)
                # What we have parked since comes later in the side topic than this.
                same = entry is not None and entry.generation == found.place.generation
                if entry is not None and same and entry.stored_at < record.offset:
                    self.remove(entry.offset)
            case ReleaseRequest() if self.restored:
                return self._release(found.coordinates)
            case ReleaseRequest():
                self._requests.append(found.coordinates)
        return None

    def _find(self, found: ParkedRecord, stored_at: int) -> None:
        """Take in what was there before us: as it was written last, and under the latest generation."""
        entry = self.entry(found.original, found.generation, stored_at, found.due, found.replays)
        known = self.keys.get(entry.offset)
        if entry.generation > self.generation:
            self._later[found.place] = entry, found.failure
        elif known is not None and known.generation > entry.generation:
            self._superseded.setdefault(entry.offset, []).append((entry, found.failure))
        else:
            if known is not None and known.generation < entry.generation:
                older = copy.copy(known), self.failures[known.key]
                self._superseded.setdefault(entry.offset, []).append(older)
            self.add(entry, found.failure)

    def _lose(self, place: Place) -> None:
        """What was there before us was taken out, before us too; what is stored of it elsewhere counts then."""
        self._later.pop(place, None)
        offset = place.coordinates.offset
        others = [other for other in self._superseded.pop(offset, ()) if other[0].generation != place.generation]
        entry = self.keys.get(offset)
        if entry is not None and entry.generation == place.generation:
            self.remove(offset)
            if others:
                last = max(others, key=lambda other: other[0].generation)
                others.remove(last)
                self.add(*last)
        if others:
            self._superseded[offset] = others

    def _parked(self, found: ParkedRecord, stored_at: int) -> Message | None:
        """What others write now is none of the partition's any more."""
        offset, generation = found.coordinates.offset, found.generation
        known = self.keys.get(offset)
        if known is not None and known.generation == generation:
            known.stored_at = max(known.stored_at, stored_at)
        elif generation == self.generation:
            self._doubtful.add(offset)
        elif generation < self.generation:
            return self.tombstone(found.place)
        return None  # a later generation is that of somebody who has the partition after us

    def stale(self) -> Iterator[Message]:
        """What takes out records whose park was not acknowledged, but stored, and that have ended otherwise since.

        And what answers requests.
        """
        yield from self._answered()
        yield from self._to_write
        self._to_write.clear()
        for offset in list(self._doubtful):
            if offset in self.writing or offset in self.source.tracker:
                continue  # its end is not known yet
            self._doubtful.discard(offset)
            if self.keys.get(offset) is None:
                yield self.tombstone(Place(self._coordinates(offset), self.generation))

    def _coordinates(self, offset: int) -> Coordinates:
        return Coordinates(*self.source.topic_partition, offset)

    def entry(self, record: Record, generation: int, stored_at: int, due: float, replays: int) -> ParkedEntry:
        """What is kept of a parked record."""
        key = self.identity(record)
        return ParkedEntry(record.offset, key, generation=generation, stored_at=stored_at, due=due, replays=replays)

    def place(self, entry: ParkedEntry) -> Place:
        """Under which key a parked record is stored."""
        return Place(self._coordinates(entry.offset), entry.generation)

    def tombstone(self, place: Place) -> Message:
        """What takes a record out, in our name."""
        return tombstone(self.stored_in.topic, place, by=self.generation)

    def _release(self, coordinates: Coordinates) -> Message | None:
        entry = self.keys.get(coordinates.offset)
        if entry is None:
            return released(self.stored_in.topic, coordinates)
        self.release(entry.key)
        self._asked[coordinates] = entry.key
        return None

    def _answered(self) -> Iterator[Message]:
        """Answer what was asked for when it was done: till then the next owner would do it."""
        for coordinates in list(itertools.islice(self._asked, _LOOKED_AT)):
            key = self._asked.pop(coordinates)
            if key in self.keys and not self.keys.waits_for_time(key):
                self._asked[coordinates] = key  # behind the others
            else:
                yield released(self.stored_in.topic, coordinates)

    def finish_restoring(self) -> Iterator[Message]:
        """Everything was read: what the partition delivers again is not parked, and releases are answered.

        What is stored under several generations is parked once, under the latest. The others were written by who
        had lost the partition and did not know it: left there, they would be taken for parked by a later owner, and
        run again behind records of their key that have been processed since.

        Returns:
            What is to be written.
        """
        self.restored = True
        for entry in [entry for entry in self.keys if self._comes_again(entry.offset)]:
            self.remove(entry.offset)
            yield self.tombstone(self.place(entry))
        for others in self._superseded.values():
            for entry, _ in others:
                yield self.tombstone(self.place(entry))
        self._superseded.clear()
        for coordinates in self._requests:
            if (answer := self._release(coordinates)) is not None:
                yield answer
        self._requests.clear()

    def _comes_again(self, offset: int) -> bool:
        """Whether the partition delivers a record that was there when it became ours."""
        return offset >= self._start and not holds(self.source.inherited, offset)

    @property
    def in_doubt(self) -> bool:
        """Whether something was parked under a later generation than ours: the group has moved on, or began anew."""
        return bool(self._later)

    def believe(self) -> int:
        """Our generation is the group's, which therefore began anew since (it was deleted, or has expired).

        Returns:
            How many records are taken in by that.
        """
        later, self._later = self._later, {}
        taken_in = 0
        for place, (entry, failure) in later.items():
            if self._comes_again(entry.offset) or self.keys.get(entry.offset) is not None:
                self._to_write.append(self.tombstone(place))
            else:
                self.add(entry, failure)
                taken_in += 1
        return taken_in

    # What is parked -----------------------------------------------------------------

    def add(self, entry: ParkedEntry, failure: Failure) -> None:
        """A record is parked, and acknowledged."""
        self.keys.add(entry)
        head = self.keys.head(entry.key)
        if head is not None and head.offset == entry.offset:
            self.failures[entry.key] = failure

    def remove(self, offset: int) -> None:
        """A record is not parked any more."""
        entry = self.keys.remove(offset)
        if entry is not None and entry.key not in self.keys:
            self.failures.pop(entry.key, None)

    def release(self, key: Hashable) -> None:
        """Run a key again now, unless that is being done."""
        if self.keys.waits(key):
            self.keys.postpone(key, 0.0)

    # What is run again --------------------------------------------------------------

    @property
    def may_replay(self) -> bool:
        """Whether what is due may be run again now: everything was read, and both gates are open."""
        return self.restored and self.source.gate is Gate.OPEN and self.replays.gate is Gate.OPEN

    def replay(self, entry: ParkedEntry, record: Record, key: ShardKey, now: float) -> Replay:
        """Make the delivery of a parked record, tracked by the lot's epoch."""
        size = record_size(record.key, record.value, record.headers)
        replay = Replay(record, key, size, lot=self, entry=entry, now=now)
        batch = FetchedBatch(self.stored_in, [record], [size], replay.offset + 1)
        self.replays.take_in(batch, [replay])
        return replay

    def close(self, running: set[Delivery]) -> None:
        """The gate of the partition has closed: what runs again is waited for, and nothing else is started."""
        if self.replays.is_open:
            self.replays.pause(_WHO, "its partition is being taken away")
            self.replays.close(running)

    def open(self) -> None:
        """The gate of the partition has opened."""
        self.replays.pauses.pop(_WHO, None)
        self.replays.open()

    def end(self) -> None:
        """The partition is not ours any more."""
        self.replays.end()


def of_a_fixed_shard(shard_key: Callable[[Record], ShardKey], shards: int) -> Callable[[Record], ShardKey]:
    """A sharding function that raises for what is no key of a fixed shard, as it does where the record comes in."""

    def checked(record: Record) -> ShardKey:
        key = shard_key(record)
        if key is not None:
            shard_number(key, shards)
        return key

    return checked
