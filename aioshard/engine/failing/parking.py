"""`on_failure=Park(...)`: failed records, and later records of the same key, wait in a side topic."""

import asyncio
import copy
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

import anyio

from aioshard.core.finished_offsets import holds
from aioshard.core.parking import NEVER, ParkedEntry, ParkedKeys
from aioshard.core.recourse import Park
from aioshard.core.sharding import ShardKey, fixed_shard, identity, shard_number
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failing.recourse import Publish, failure_of
from aioshard.engine.failing.settling import Verdict
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.outcomes import Detour, Outcome
from aioshard.engine.shards import Shards
from aioshard.errors import SideTopicError, TransportError
from aioshard.ports import FetchedBatch, Message, SideTopics, record_size
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    Place,
    ReleaseRequest,
    Removed,
    park,
    read_parked,
    released,
    tombstone,
)

__all__ = ["Lot", "Parking", "Replay", "Retrieval", "Shelf", "of_a_fixed_shard"]

_MOST = 8
"""Maximum number of cached reads, over all partitions. A read returns about a megabyte."""


class Shelf:
    """Cache of the last few reads, without the records that were taken out since.

    Replays come from a few places at a time: the first records of several keys, and the records behind each of them.
    With only one read cached per partition, each replay would read and decode a record and all its neighbours again.

    Example:
        >>> shelf, at = Shelf(), TopicPartition("parked", 0)
        >>> shelf.keep(at, [Record("parked", 0, 7, b"orders/0/41", b"", (), 0.0)])
        >>> shelf.take(at, 7).key, shelf.take(at, 7)
        (b'orders/0/41', None)
    """

    def __init__(self) -> None:
        self._reads: OrderedDict[int, tuple[TopicPartition, dict[int, Record]]] = OrderedDict()
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        """Whether the cache holds anything."""
        return bool(self._reads)

    def take(self, topic_partition: TopicPartition, offset: int) -> Record | None:
        """Remove a record from the cache and return it; None if it is not cached."""
        for number, (at, records) in reversed(self._reads.items()):
            if at == topic_partition and offset in records:
                record = records.pop(offset)
                self._reads.move_to_end(number)
                if not records:
                    del self._reads[number]
                return record
        return None

    def keep(self, topic_partition: TopicPartition, records: Iterable[Record]) -> None:
        """Cache the records of a read; if the cache is full, evict the least recently used read."""
        self._reads[next(self._numbers)] = topic_partition, {record.offset: record for record in records}
        if len(self._reads) > _MOST:
            self._reads.popitem(last=False)

    def clear(self) -> None:
        """Empty the cache."""
        self._reads.clear()


_WHO = "parking"
_LOOKED_AT = 1_000
"""Maximum number of requests checked in one go: there may be one for every parked record."""


class Replay(Delivery):
    """A parked record that runs again; it belongs to a separate epoch, for which nothing is committed."""

    __slots__ = ("entry", "lot")

    def __init__(self, record: Record, key: ShardKey, size: int, *, lot: "Lot", entry: ParkedEntry, now: float) -> None:
        super().__init__(record, lot.replays, key, size, now)
        self.offset = lot.replays.tracker.position
        self.lot = lot
        self.entry = entry


class Lot:
    """Parked records of one partition, for as long as we own it.

    A replay is a delivery like any other, but it is not part of the partition's epoch: its offset was committed long
    ago. It belongs to a separate epoch, which opens, closes and ends together with the partition's. So a drain waits
    for it, and a late result changes nothing.

    Invariants:
        * The side topic determines which records are parked. A record parked by this process counts once its write
          is acknowledged.
        * A record that the partition delivers again is not parked: it arrives anyway, in order.
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
        """Start without known parked records."""
        self.source = source
        """Epoch of the partition."""
        self.stored_in = stored_in
        """Side-topic partition that stores its parked records."""
        self.generation = generation
        """Group generation in which we got the partition; records parked here are stored under it."""
        self.replays = Epoch(stored_in, source.number, 0, buffer, source.counts)
        """Epoch of the replays."""
        self.keys = ParkedKeys()
        self.writing: set[int] = set()
        """Offsets of the records being written to the side topic."""
        self.read_to = 0
        """Next offset to read in the side topic."""
        self.restored = False
        """Whether the initial read is complete: all that the side topic held when we got the partition."""
        self.failures: dict[Hashable, Failure] = {}
        """Failure of the first record of each key."""
        self._start = source.tracker.position
        self._later: dict[Place, tuple[ParkedEntry, Failure]] = {}
        """Records parked under a later generation than ours."""
        self._superseded: dict[int, list[tuple[ParkedEntry, Failure]]] = {}
        """During the initial read: copies of records stored under an earlier generation than the one that counts."""
        self._to_write: list[Message] = []
        self._doubtful: set[int] = set()
        """Offsets seen in the side topic as parked by us, but not acknowledged to us."""
        self._requests: list[Coordinates] = []
        self._asked: dict[Coordinates, Hashable] = {}
        """Release requests in progress, each with its key."""
        self._shard_key = shard_key

    def identity(self, record: Record) -> ShardKey:
        """Return the shard key of a record; None if it has none and is parked alone."""
        return identity(self._shard_key, record)

    # Reading the side topic ---------------------------------------------------------

    def read(self, record: Record) -> Message | None:
        """Process a record of the side topic; return the message to write in reply, if any."""
        if not self.restored or record.offset < self.read_to:
            return None  # `restore` reads it, or has read it
        self.read_to = record.offset + 1
        return self._take_note(record)

    def restore(self, record: Record) -> str | None:
        """Process a record that was in the side topic when we got the partition.

        Returns:
            The group that parked the record; None if this is not a parked record.
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
                pass  # removed by the next owner, still unknown to us: later records of its key must not run here
            case Removed():
                self._later.pop(found.place, None)
                entry = self.keys.get(found.coordinates.offset)
                # Anything that we have parked since comes later in the side topic.
                same = entry is not None and entry.generation == found.place.generation
                if entry is not None and same and entry.stored_at < record.offset:
                    self.remove(entry.offset)
            case ReleaseRequest() if self.restored:
                return self._release(found.coordinates)
            case ReleaseRequest():
                self._requests.append(found.coordinates)
        return None

    def _find(self, found: ParkedRecord, stored_at: int) -> None:
        """Add a record parked before our time: its last write, under the latest generation."""
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
        """Drop a record that was parked and removed before our time; a copy of another generation counts then."""
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
        """Process a record parked after we got the partition; remove it again if a stale member parked it."""
        offset, generation = found.coordinates.offset, found.generation
        known = self.keys.get(offset)
        if known is not None and known.generation == generation:
            known.stored_at = max(known.stored_at, stored_at)
        elif generation == self.generation:
            self._doubtful.add(offset)
        elif generation < self.generation:
            return self.tombstone(found.place)
        return None  # a later generation belongs to the next owner of the partition

    def stale(self) -> Iterator[Message]:
        """Yield what is to be written: replies to release requests, and tombstones for copies that must not run.

        Among the latter are copies whose write was stored but not acknowledged, if the record ended otherwise since.
        """
        yield from self._answered()
        yield from self._to_write
        self._to_write.clear()
        for offset in list(self._doubtful):
            if offset in self.writing or offset in self.source.tracker:
                continue  # its outcome is not known yet
            self._doubtful.discard(offset)
            if self.keys.get(offset) is None:
                yield self.tombstone(Place(self._coordinates(offset), self.generation))

    def _coordinates(self, offset: int) -> Coordinates:
        return Coordinates(*self.source.topic_partition, offset)

    def entry(self, record: Record, generation: int, stored_at: int, due: float, replays: int) -> ParkedEntry:
        """Return the in-memory entry for a parked record."""
        key = self.identity(record)
        return ParkedEntry(record.offset, key, generation=generation, stored_at=stored_at, due=due, replays=replays)

    def place(self, entry: ParkedEntry) -> Place:
        """Return the place of a parked record; it is stored under that key."""
        return Place(self._coordinates(entry.offset), entry.generation)

    def tombstone(self, place: Place) -> Message:
        """Return the message that removes a parked record, in our name."""
        return tombstone(self.stored_in.topic, place, by=self.generation)

    def _release(self, coordinates: Coordinates) -> Message | None:
        entry = self.keys.get(coordinates.offset)
        if entry is None:
            return released(self.stored_in.topic, coordinates)
        self.release(entry.key)
        self._asked[coordinates] = entry.key
        return None

    def _answered(self) -> Iterator[Message]:
        """Yield replies to finished requests; the next owner would repeat an unanswered one."""
        for coordinates in list(itertools.islice(self._asked, _LOOKED_AT)):
            key = self._asked.pop(coordinates)
            if key in self.keys and not self.keys.waits_for_time(key):
                self._asked[coordinates] = key  # move it behind the others
            else:
                yield released(self.stored_in.topic, coordinates)

    def finish_restoring(self) -> Iterator[Message]:
        """Complete the initial read: drop records that the partition delivers again, and handle release requests.

        A record stored under several generations is parked once, under the latest one. A stale member, which had lost
        the partition without knowing it, wrote the other copies. If they stayed, a later owner would consider them
        parked and run them again, after later records of their key were processed.

        Yields:
            The messages to write.
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
        """Return whether the partition delivers again a record that was parked when we got it."""
        return offset >= self._start and not holds(self.source.inherited, offset)

    @property
    def in_doubt(self) -> bool:
        """Whether records are parked under a later generation than ours: the group moved on, or was recreated."""
        return bool(self._later)

    def believe(self) -> int:
        """Accept our generation as the group's: the group was recreated since, after it was deleted or had expired.

        Returns:
            Number of records that become ours.
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

    # Parked records -----------------------------------------------------------------

    def add(self, entry: ParkedEntry, failure: Failure) -> None:
        """Add a record that is parked and acknowledged."""
        self.keys.add(entry)
        head = self.keys.head(entry.key)
        if head is not None and head.offset == entry.offset:
            self.failures[entry.key] = failure

    def remove(self, offset: int) -> None:
        """Remove a record that is no longer parked."""
        entry = self.keys.remove(offset)
        if entry is not None and entry.key not in self.keys:
            self.failures.pop(entry.key, None)

    def release(self, key: Hashable) -> None:
        """Replay a key now, unless it is already running."""
        if self.keys.waits(key):
            self.keys.postpone(key, 0.0)

    # Replays ------------------------------------------------------------------------

    @property
    def may_replay(self) -> bool:
        """Whether due records may be replayed now: the initial read is complete, and both gates are open."""
        return self.restored and self.source.gate is Gate.OPEN and self.replays.gate is Gate.OPEN

    def replay(self, entry: ParkedEntry, record: Record, key: ShardKey, now: float) -> Replay:
        """Create the delivery of a parked record, tracked by the epoch of the replays."""
        size = record_size(record.key, record.value, record.headers)
        replay = Replay(record, key, size, lot=self, entry=entry, now=now)
        batch = FetchedBatch(self.stored_in, [record], [size], replay.offset + 1)
        self.replays.take_in(batch, [replay])
        return replay

    def close(self, running: set[Delivery]) -> None:
        """Close together with the partition's gate: wait for running replays, and start no others."""
        if self.replays.is_open:
            self.replays.pause(_WHO, "its partition is being taken away")
            self.replays.close(running)

    def open(self) -> None:
        """Open together with the partition's gate."""
        self.replays.pauses.pop(_WHO, None)
        self.replays.open()

    def end(self) -> None:
        """End the replays: we no longer own the partition."""
        self.replays.end()


def of_a_fixed_shard(shard_key: Callable[[Record], ShardKey], shards: int) -> Callable[[Record], ShardKey]:
    """Wrap a sharding function to raise for invalid keys of fixed shards, as intake does."""

    def checked(record: Record) -> ShardKey:
        key = shard_key(record)
        if key is not None:
            shard_number(key, shards)
        return key

    return checked


class Retrieval:
    """Fetches the payloads of parked records, which are not kept in memory while they wait."""

    def __init__(self, side_topics: SideTopics) -> None:
        """Create the retrieval of one handler."""
        self._side = side_topics
        self._shelf = Shelf()
        self._missing: dict[ParkedEntry, Lot] = {}
        """Records not found where they were stored."""
        self._failure: str | None = None

    @property
    def holds_some(self) -> bool:
        """Whether any reads are cached."""
        return bool(self._shelf)

    def forget(self) -> None:
        """Drop the cached reads."""
        self._shelf.clear()

    def trouble(self) -> str | None:
        """Explain in a sentence why a record cannot be fetched; None if every fetch succeeded."""
        self._missing = {entry: lot for entry, lot in self._missing.items() if lot.keys.get(entry.offset) is entry}
        for entry, lot in self._missing.items():
            return (
                f"parked record {lot.place(entry).coordinates} is not in {lot.stored_in} at offset {entry.stored_at} "
                "any more, and its key waits for it: not compaction has deleted it; 'aioshard park drop' "
                "gives it up"
            )
        return self._failure

    async def fetch(self, lot: Lot, entry: ParkedEntry) -> Record | None:
        """Return the original of a parked record; None if it cannot be read now or was replaced by another."""
        stored = self._shelf.take(lot.stored_in, entry.stored_at)
        if stored is None:
            try:
                found = await self._side.read(lot.stored_in, entry.stored_at)
            except TransportError as error:
                self._failure = str(error)
                return None
            self._failure = None
            self._shelf.keep(lot.stored_in, found)
            stored = self._shelf.take(lot.stored_in, entry.stored_at)
        parked = None if stored is None else read_parked(stored)
        if not isinstance(parked, ParkedRecord):
            self._missing[entry] = lot
            return None
        self._missing.pop(entry, None)
        return parked.original


logger = logging.getLogger("aioshard.engine.parking")

_POLL_TIMEOUT = 1.0
_BACKOFF = 1.0
_MOST_PARKED = 100_000
"""Maximum parked records of one partition; each costs memory, so more are refused until some are gone."""
_LONGEST_WAIT = 60.0
_SHELF_LASTS = 1.0
"""Seconds without due records after which the cached reads are dropped."""


class Parking:
    """Parked records of one handler, over all partitions that we own.

    Workers call `divert` before they start a delivery, and `decide` when its attempts are used up. The feed reports
    when a partition arrives, closes, opens and ends. Two tasks run: `read` follows the side topic, and `replay` runs
    due records again. Owned by the event loop.

    Invariants:
        * While a key is parked, only its first parked record may start (I4).
        * A parked record completes when the brokers have acknowledged it (I2). A record that succeeded in a replay is
          removed from the side topic before the next one of its key starts.
    """

    def __init__(
        self,
        policy: Park,
        *,
        group: str,
        handler: str,
        shards: Sequence[Shards],
        shard_key: Callable[[Record], ShardKey],
        fixed: bool,
        workers: int,
        publish: Publish,
        side_topics: SideTopics,
        buffer: Buffer,
        clock: Callable[[], float],
    ) -> None:
        """Create the parking of one handler; `read` and `replay` are its tasks.

        Args:
            policy: Topic, delay and attempts.
            group: Consumer group, for the headers of parked records.
            handler: Name of the handler, for the headers of parked records.
            shards: Shards of the handler.
            shard_key: Maps a record to its shard key.
            fixed: Whether the shards are fixed; if so, deliveries carry the number of their shard as key.
            workers: Number of workers that serve the shards.
            publish: Writes to the side topic.
            side_topics: Reads the side topic; the caller closes it.
            buffer: Buffer shared by all partitions.
            clock: Returns the loop time.
        """
        self.policy = policy
        self.trouble: str | None = None
        """Why the side topic cannot be read or answered now; None if it can."""
        self._group = group
        self._handler = handler
        self._shards = shards
        self._shard_key = of_a_fixed_shard(shard_key, len(shards)) if fixed else shard_key
        self._fixed = fixed
        self._at_once = max(2 * workers, 16)
        self._publish = publish
        self._side = side_topics
        self._buffer = buffer
        self._clock = clock
        self._lots: dict[Epoch, Lot] = {}
        self._ensured = 0
        self._retrieval = Retrieval(side_topics)
        self._refused: set[Message] = set()
        """Replies that could not be written and are being retried."""
        self._due = asyncio.Event()
        self._epoch_time = time.time() - clock()
        self._behind = Detour(f"its key is parked, and it is written to {policy.topic} behind it", self._park_behind)
        self._first = Detour(f"it is parked in {policy.topic}", self._park)
        self._again = Detour(f"it is parked in {policy.topic} again", self._park_again)
        self.drop = Detour(f"it is taken out of {policy.topic} without being processed", self._drop)
        """Detour for giving up a record that was halted in a replay."""
        self._finished = Detour(f"it is taken out of {policy.topic}, its run succeeded", self._remove)

    def _now(self) -> float:
        """Return the Unix time by the loop's clock, which virtual time moves too."""
        return self._epoch_time + self._clock()

    @property
    def lots(self) -> Collection[Lot]:
        """Parked records of each partition that we own."""
        return self._lots.values()

    # Workers ------------------------------------------------------------------------

    def divert(self, delivery: Delivery) -> None:
        """Assign a detour to a delivery whose key is parked, and withdraw it once the key is no longer parked."""
        lot = self._lots.get(delivery.epoch)
        if lot is None or isinstance(delivery, Replay):
            return
        if delivery.detour is self._behind:
            if lot.identity(delivery.record) not in lot.keys:
                delivery.detour = None
        elif delivery.detour is None and lot.keys.keys and lot.identity(delivery.record) in lot.keys:
            delivery.divert(self._behind)

    def decide(self, delivery: Delivery) -> Verdict:
        """See `Recourse.decide`."""
        return self._again if isinstance(delivery, Replay) else self._first

    def release(self, lot: Lot, offset: int) -> bool:
        """Replay the key of a parked record now, unless it is already running; return whether the record exists.

        Nothing is written: if we lose the partition before that, the request is lost.
        """
        entry = lot.keys.get(offset)
        if entry is not None:
            lot.release(entry.key)
            self._due.set()
        return entry is not None

    async def _park(self, delivery: Delivery) -> Outcome:
        failure = failure_of(delivery, self._group, self._handler)
        return await self._store(delivery, failure, self._now() + self.policy.delay)

    async def _park_behind(self, delivery: Delivery) -> Outcome:
        lot = self._lots[delivery.epoch]
        key = lot.identity(delivery.record)
        head = lot.keys.head(key)
        assert head is not None  # noqa: S101 - `divert` has just checked
        return await self._store(delivery, lot.failures[key], head.due)

    async def _store(self, delivery: Delivery, failure: Failure, due: float) -> Outcome:
        lot = self._lots[delivery.epoch]
        if len(lot.keys) >= _MOST_PARKED:
            raise SideTopicError(
                f"{len(lot.keys)} records of {delivery.epoch.topic_partition} are parked, the most that a process "
                "keeps track of: release or drop some"
            )
        record = delivery.record
        lot.writing.add(record.offset)
        try:
            message = park(self.policy.topic, record, failure, generation=lot.generation, due=due)
            stored_at = await self._publish(message)
        finally:
            lot.writing.discard(record.offset)
        lot.add(lot.entry(record, lot.generation, stored_at, due, 0), failure)
        self._due.set()
        return Outcome.PARKED

    async def _park_again(self, delivery: Delivery) -> Outcome:
        assert isinstance(delivery, Replay)  # noqa: S101 - only replays get this detour
        lot, entry = delivery.lot, delivery.entry
        replays = entry.replays + 1
        over = self.policy.attempts is not None and replays >= self.policy.attempts
        due = NEVER if over else self._now() + self.policy.delay
        failure = failure_of(delivery, self._group, self._handler)
        if lot.keys.get(entry.offset) is None:
            return Outcome.RETURNED  # dropped in the meantime
        lot.writing.add(entry.offset)
        try:
            message = park(
                self.policy.topic,
                delivery.record,
                failure,
                generation=entry.generation,
                due=due,
                replays=replays,
            )
            entry.stored_at = await self._publish(message)
        finally:
            lot.writing.discard(entry.offset)
        entry.replays, entry.due = replays, due
        if lot.keys.get(entry.offset) is entry:  # not dropped in the meantime
            lot.failures[entry.key] = failure
            lot.keys.postpone(entry.key, due)
        self._due.set()
        return Outcome.RETURNED

    async def _remove(self, delivery: Delivery) -> Outcome:
        assert isinstance(delivery, Replay)  # noqa: S101 - only replays get this detour
        lot = delivery.lot
        await self._publish(lot.tombstone(lot.place(delivery.entry)))
        lot.remove(delivery.entry.offset)
        self._due.set()
        return Outcome.PROCESSED

    async def _drop(self, delivery: Delivery) -> Outcome:
        await self._remove(delivery)
        return Outcome.SKIPPED

    # Partitions ---------------------------------------------------------------------

    async def restore(self, epoch: Epoch, partitions: int, generation: int) -> bool:
        """Find out which records of a partition are parked, before any of its records starts.

        Args:
            epoch: A new, closed epoch.
            partitions: Number of partitions of the topic.
            generation: Group generation in which we got the partition.

        Returns:
            Whether records are parked under a later generation; they are left alone until `believe`.

        Raises:
            TransportError: If the side topic cannot be read or written now.
        """
        if partitions > self._ensured:
            await self._side.ensure(self.policy.topic, partitions)
            self._ensured = partitions
        stored_in = TopicPartition(self.policy.topic, epoch.topic_partition.partition)
        lot = Lot(epoch, stored_in, generation, buffer=self._buffer, shard_key=self._shard_key)
        self._lots[epoch] = lot
        self._watch()
        await self._read_all(lot)
        await asyncio.gather(*(self._publish(message) for message in lot.finish_restoring()))
        if lot.keys.keys:
            fields = partition_fields("parked", epoch.topic_partition, records=len(lot.keys), keys=lot.keys.keys)
            message = "%s: %d record(s) of %d key(s) are parked in %s"
            logger.info(message, epoch.topic_partition, len(lot.keys), lot.keys.keys, self.policy.topic, extra=fields)
        return lot.in_doubt

    def believe(self, epoch: Epoch) -> None:
        """Accept our generation: the brokers accepted a commit since `restore`, so nobody owned the partition later."""
        lot = self._lots.get(epoch)
        if lot is not None and lot.in_doubt:
            message = (
                "%s: %d record(s) in %s were parked under a later generation than that of group %r now, which began "
                "anew since then (it was deleted, or its offsets have expired): they are ours too"
            )
            records = lot.believe()
            fields = partition_fields("parked", epoch.topic_partition, records=records, group=self._group)
            logger.warning(message, epoch.topic_partition, records, self.policy.topic, self._group, extra=fields)

    def _watch(self) -> None:
        self._side.watch(list(dict.fromkeys(lot.stored_in for lot in self._lots.values())))

    async def _read_all(self, lot: Lot) -> None:
        """Read a side partition from its start, without a gap to the position from which `read` follows it."""
        at = 0
        while True:
            end = await self._side.end(lot.stored_in)
            while at < end and (records := await self._side.read(lot.stored_in, at)):
                for record in records:
                    group = lot.restore(record)
                    if group not in (None, self._group):
                        raise SideTopicError(
                            f"{lot.stored_in} holds records that group {group!r} has parked, and group {self._group!r} "
                            "would overwrite them: give each group a topic of its own"
                        )
                at = records[-1].offset + 1
            if self._side.position(lot.stored_in) <= max(at, end):
                lot.read_to = max(at, end)
                return

    def side_of(self, epoch: Epoch) -> Epoch | None:
        """Return the epoch of a partition's replays; None if the partition is unknown."""
        lot = self._lots.get(epoch)
        return lot.replays if lot is not None else None

    def close(self, epoch: Epoch, running: Collection[Delivery]) -> None:
        """Stop replays of a partition whose gate has closed."""
        lot = self._lots.get(epoch)
        if lot is not None:
            lot.close(set(running))
            for shards in self._shards:
                shards.close(lot.replays)

    def reopen(self, epoch: Epoch) -> None:
        """Resume replays of a partition whose gate has opened."""
        lot = self._lots.get(epoch)
        if lot is not None:
            if epoch.is_open and not lot.replays.is_open:
                lot.open()
            for shards in self._shards:
                shards.reopen(lot.replays)
            self._due.set()

    def purge(self, epoch: Epoch) -> None:
        """Drop the parked records of a partition whose epoch has ended; the side topic keeps them."""
        lot = self._lots.pop(epoch, None)
        if lot is not None:
            lot.end()
            for shards in self._shards:
                shards.purge(lot.replays)
            self._watch()
            self._due.set()

    # Tasks --------------------------------------------------------------------------

    async def read(self) -> None:
        """Follow the side topic until cancelled: parked and dropped records, and release requests."""
        async with asyncio.TaskGroup() as answering:
            while True:
                try:
                    records = await self._side.poll(_POLL_TIMEOUT)
                    answers = [answer for record in records for answer in self._read(record)]
                    answers += [(lot, message) for lot in self.lots for message in lot.stale()]
                    for lot, message in answers:
                        # A partition that cannot be written must not keep us from following the others.
                        answering.create_task(self._answer(lot, message), name=f"answer in {lot.stored_in}")
                    if not self._refused:
                        self.trouble = self._retrieval.trouble()
                except TransportError as error:
                    if self.trouble is None:
                        fields = {"event": "trouble", "topic": (topic := self.policy.topic)}
                        logger.error("topic %s cannot be read or answered: %s", topic, error, extra=fields)  # noqa: TRY400
                    self.trouble = str(error)
                    await asyncio.sleep(_BACKOFF)

    def _read(self, record: Record) -> Iterator[tuple[Lot, Message]]:
        for lot in self.lots:
            if lot.stored_in == record.topic_partition and (answer := lot.read(record)) is not None:
                yield lot, answer
        self._due.set()

    async def _answer(self, lot: Lot, message: Message) -> None:
        try:
            while lot.replays.gate is not Gate.ENDED:
                try:
                    await self._publish(message)
                except TransportError as error:
                    self._refused.add(message)
                    self.trouble = str(error)
                    await asyncio.sleep(_BACKOFF)
                else:
                    return
        finally:
            self._refused.discard(message)

    async def replay(self) -> None:
        """Replay due records until cancelled."""
        while True:
            self._due.clear()
            for lot in list(self._lots.values()):
                await self._replay_due(lot)
            wait = self._until_due()
            with anyio.move_on_after(min(wait, _SHELF_LASTS) if self._retrieval.holds_some else wait) as waited:
                await self._due.wait()
            if waited.cancelled_caught:
                self._retrieval.forget()

    def _until_due(self) -> float:
        dues = [due for lot in self._lots.values() if lot.may_replay and (due := lot.keys.next_due) is not None]
        running = sum(len(lot.replays.tracker) for lot in self._lots.values())
        if not dues or running >= self._at_once:
            return _LONGEST_WAIT  # a replay that ends wakes us
        return min(max(min(dues) - self._now(), 0.01), _LONGEST_WAIT)

    async def _replay_due(self, lot: Lot) -> None:
        while lot.may_replay:
            if sum(len(other.replays.tracker) for other in self._lots.values()) >= self._at_once:
                return
            entry = lot.keys.take_due(self._now())
            if entry is None:
                return
            record = await self._retrieval.fetch(lot, entry)
            if lot.keys.get(entry.offset) is not entry:
                continue
            if record is None or not lot.replays.is_open or not self._fits(record):
                lot.keys.postpone(entry.key, self._now() + _BACKOFF)
                return  # each of its keys may take as long; other partitions must not wait for all of them
            key = lot.identity(record)
            number = fixed_shard(key, len(self._shards), entry.offset) if self._fixed else 0
            replay = lot.replay(entry, record, number if self._fixed else key, self._clock())
            replay.then, replay.aside = self._finished, True
            self._shards[number].put_first([replay])

    def _fits(self, record: Record) -> bool:
        """Return whether there is room for a record, or no running replay that it could wait for."""
        buffer = self._buffer
        size = record_size(record.key, record.value, record.headers)
        return buffer.bytes + size <= buffer.bounds.bytes or not any(len(lot.replays.tracker) for lot in self.lots)
