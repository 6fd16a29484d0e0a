"""`on_failure=Park(...)`: failed records, and later records of the same key, wait in a side topic."""

import asyncio
import functools
import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

import anyio

from aioshard.core.finished_offsets import holds
from aioshard.core.options import Park
from aioshard.core.parking import NEVER, ParkedEntry, ParkedKeys
from aioshard.core.sharding import ShardKey, fixed_shard, identity, record_key, shown
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch, Gate, Outputs
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.engine.recoveries import Send, failure_of
from aioshard.engine.shards import Shards
from aioshard.errors import SideTopicError, TransportError
from aioshard.log_fields import get_logger
from aioshard.observe import ParkedKey
from aioshard.ports import UNKNOWN_OFFSET, FetchedBatch, Message, Publish, SideTopics, record_size
from aioshard.records import Record, TopicPartition, counted
from aioshard.serde.header_names import undecodable
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    ReleaseRequest,
    Removed,
    StorageKey,
    park,
    read_parked,
    release,
    tombstone,
)

logger = get_logger("aioshard.engine.parking")

_POLL_TIMEOUT = 1.0
_BACKOFF = 1.0
_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 60.0
"""Seconds from one look for due records to the next, at least and at most."""
_MOST_PARKED = 100_000
"""Maximum parked records of one partition; each costs memory, so more are refused until some are gone."""


class Replay(Delivery):
    """A parked record that runs again."""

    __slots__ = ("entry", "parked")

    def __init__(
        self, record: Record, key: ShardKey, size: int, *, parked: "ParkedPartition", entry: ParkedEntry, now: float
    ) -> None:
        super().__init__(record, parked, key, size, now)
        self.offset = parked.tracker.position
        self.parked = parked
        self.entry = entry


class ParkedPartition(Epoch):
    """Parked records of one partition, for as long as we own it, and the epoch of those that run again.

    A replay is a delivery like any other, but it is not part of the partition's own epoch: its offset was committed
    long ago. This epoch opens, closes and ends together with the partition's. So a drain waits for a replay, and a
    late result changes nothing.

    Invariants:
        * The side topic determines which records are parked. A record parked by this process counts once its write
          is acknowledged.
        * A record that the partition delivers again is not parked: it arrives anyway, in order.
    """

    def __init__(
        self,
        source: Epoch,
        topic: str,
        generation: int,
        *,
        buffer: Buffer,
        identity: Callable[[Record], ShardKey],
        exactly_once: bool,
    ) -> None:
        """Start without known parked records.

        Args:
            source: Epoch of the partition.
            topic: Side topic; its partition with the same number stores the parked records.
            generation: Group generation in which we got the partition; records parked here are stored under it.
            buffer: Buffer shared by all partitions.
            identity: Returns the shard key of a record; None if it has none and is parked alone.
            exactly_once: Whether our records and tombstones are in transactions, so that none is ever in doubt.
        """
        super().__init__(
            TopicPartition(topic, source.topic_partition.partition), source.number, 0, buffer, source.counts
        )
        self.source = source
        self.generation = generation
        self.identity = identity
        self.keys = ParkedKeys()
        self.failures: dict[Hashable, Failure] = {}
        """Failure of the first record of each key."""
        self.unread: dict[int, str] = {}
        """Parked records that could not be read when they were due, by offset, each with the reason."""
        self.read_to = sys.maxsize
        """Next offset of the side topic to process; beyond any offset until the initial read is complete."""
        self._start = source.tracker.position
        self._stored: dict[StorageKey, tuple[ParkedEntry, Failure]] = {}
        """Records that were in the side topic when we got the partition, until it is clear whether they are parked."""
        self._unacknowledged: set[int] = set()
        """Offsets seen in the side topic as parked by us, but not acknowledged to us."""
        self._stored_keys: dict[int, Hashable] = {}
        """During the initial read: the key of each offset that was ever parked."""
        self._requested: dict[Coordinates, None] = {}
        """During the initial read: unanswered release requests."""
        self._releasing: dict[Hashable, list[Coordinates]] = {}
        """Release requests in progress, by key; the next owner must repeat them unless they are answered."""
        self._outgoing: list[Message] = []
        self._exactly_once = exactly_once

    # Reading the side topic ---------------------------------------------------------

    def restore(self, record: Record) -> str | None:
        """Process a record that was in the side topic when we got the partition.

        Returns:
            The group that parked the record; None if this is not a parked record.
        """
        decoded = read_parked(record)
        match decoded:
            case ParkedRecord() if self._is_ours(decoded):
                entry = self.entry(
                    decoded.original,
                    generation=decoded.generation,
                    stored_at=record.offset,
                    due=decoded.due,
                    retries=decoded.retries,
                )
                self._stored[decoded.storage_key] = (entry, decoded.failure)
                self._stored_keys[entry.offset] = entry.key
            case Removed() if self._is_ours(decoded):
                self._stored.pop(decoded.storage_key, None)
            case ReleaseRequest(answered=True):
                self._requested.pop(decoded.coordinates, None)
            case ReleaseRequest() if self._is_ours(decoded):
                self._requested[decoded.coordinates] = None
        return decoded.failure.group if isinstance(decoded, ParkedRecord) else None

    def finish_restoring(self, newest: float) -> None:
        """Decide which of the stored records are parked, and handle release requests.

        A record stored under several generations is parked once, under the latest one. A stale member, which had lost
        the partition without knowing it, wrote the other copies. If they stayed, a later owner would consider them
        parked and run them again, after later records of their key were processed. One case is left: a copy arrives
        late, and the owner, which has finished the record, dies within the second before it would have removed it.

        Args:
            newest: Generation up to which records are ours; the others stay undecided.
        """
        latest_first = sorted(self._stored.items(), key=lambda item: item[0].generation, reverse=True)
        undecided: dict[StorageKey, tuple[ParkedEntry, Failure]] = {}
        for storage_key, (entry, failure) in latest_first:
            # 1. Somebody may own the partition later than we do.
            if entry.generation > newest:
                undecided[storage_key] = (entry, failure)
            # 2. It is not parked: the partition delivers the record again, or a later copy counts.
            elif self._comes_again(entry.offset) or self.keys.get(entry.offset) is not None:
                self._outgoing.append(self.tombstone(entry.offset, entry.generation))
            # 3. It is parked.
            else:
                self.add(entry, failure)
        self._stored = undecided
        for coordinates in self._requested:
            # The previous owner may have run the record that was named, and not those behind it.
            self._release(coordinates, self._stored_keys.get(coordinates.offset))
        self._stored_keys.clear()
        self._requested.clear()

    def _comes_again(self, offset: int) -> bool:
        """Return whether the partition delivers a record that was parked before we got it."""
        return offset >= self._start and not holds(self.source.finished_ahead, offset)

    @property
    def in_doubt(self) -> bool:
        """Whether records are parked under a later generation than ours: the group moved on, or was recreated."""
        return bool(self._stored)

    def read(self, record: Record) -> None:
        """Process a record of the side topic that was written after we got the partition."""
        decoded = read_parked(record)
        if record.offset < self.read_to or not self._is_ours(decoded):
            return
        self.read_to = record.offset + 1
        match decoded:
            # 1. A record was parked, by us or by a stale member.
            case ParkedRecord():
                self._parked(decoded, record.offset)
            # 2. A record was removed. If a later owner did it, we are a stale member, and must not run those behind it.
            case Removed() if decoded.by is None or decoded.by <= self.generation:
                self._stored.pop(decoded.storage_key, None)
                self._removed(decoded.storage_key, record.offset)
            # 3. An operator wants a key to run again.
            case ReleaseRequest(answered=False):
                entry = self.keys.get(decoded.coordinates.offset)
                self._release(decoded.coordinates, None if entry is None else entry.key)

    def _is_ours(self, decoded: ParkedRecord | Removed | ReleaseRequest | None) -> bool:
        return decoded is not None and decoded.coordinates[:2] == self.source.topic_partition

    def _parked(self, parked: ParkedRecord, stored_at: int) -> None:
        """Process a record parked after we got the partition; remove it again if a stale member parked it."""
        offset = parked.coordinates.offset
        generation = parked.generation
        known = self.keys.get(offset)
        # 1. It counts as parked already.
        if known is not None and known.generation == generation:
            known.stored_at = max(known.stored_at, stored_at)
        # 2. Only transactions park and remove: a tombstone outside of them could be visible without the outputs.
        elif self._exactly_once:
            return
        # 3. We have parked it, and the acknowledgment is on its way or lost.
        elif generation == self.generation:
            self._unacknowledged.add(offset)
        # 4. A stale member has parked it. (A later generation belongs to the next owner of the partition.)
        elif generation < self.generation:
            self._outgoing.append(self.tombstone(offset, generation))

    def _removed(self, storage_key: StorageKey, removed_at: int) -> None:
        """Process a tombstone of the side topic, unless the record was parked again after it."""
        entry = self.keys.get(storage_key.coordinates.offset)
        if entry is not None and entry.generation == storage_key.generation and entry.stored_at < removed_at:
            self.remove(entry.offset)

    def _release(self, coordinates: Coordinates, key: Hashable) -> None:
        if key in self.keys:
            self.keys.release(key)
            self._releasing.setdefault(key, []).append(coordinates)
        else:
            self._confirm([coordinates])

    def _confirm(self, requests: Iterable[Coordinates]) -> None:
        # Only when the key is gone or has failed again: a request confirmed earlier would be lost in a deploy.
        self._outgoing += [release(self.topic_partition.topic, coordinates, answered=True) for coordinates in requests]

    def outgoing(self) -> list[Message]:
        """Return the messages to write: replies to release requests, and tombstones for copies that must not run."""
        for offset in [offset for offset in self._unacknowledged if offset not in self.source.tracker.incomplete]:
            self._unacknowledged.discard(offset)
            # It was stored but not acknowledged, and the record ended in another way.
            if self.keys.get(offset) is None:
                self._outgoing.append(self.tombstone(offset, self.generation))
        messages = self._outgoing
        self._outgoing = []
        return messages

    def entry(self, record: Record, *, generation: int, stored_at: int, due: float, retries: int) -> ParkedEntry:
        """Return the in-memory entry for a parked record."""
        return ParkedEntry(
            record.offset,
            self.identity(record),
            generation=generation,
            stored_at=stored_at,
            due=due,
            retries=retries,
        )

    def tombstone(self, offset: int, generation: int) -> Message:
        """Return the message that removes a record parked under a generation; it names us as the remover."""
        storage_key = StorageKey(Coordinates(*self.source.topic_partition, offset), generation)
        return tombstone(self.topic_partition.topic, storage_key, by=self.generation)

    # Parked records -----------------------------------------------------------------

    def add(self, entry: ParkedEntry, failure: Failure) -> None:
        """Add a record that is parked and acknowledged."""
        if self.keys.add(entry):
            self.failures[entry.key] = failure

    def remove(self, offset: int) -> None:
        """Remove a record that is no longer parked."""
        entry = self.keys.remove(offset)
        self.unread.pop(offset, None)
        if entry is not None and entry.key not in self.keys:
            self.failures.pop(entry.key, None)
            self._confirm(self._releasing.pop(entry.key, ()))

    def failed_again(self, entry: ParkedEntry, failure: Failure) -> None:
        """Make a key whose replay failed wait until its first record is due."""
        self.failures[entry.key] = failure
        self.keys.postpone(entry.key, entry.due)
        self._confirm(self._releasing.pop(entry.key, ()))

    # Replays ------------------------------------------------------------------------

    @property
    def may_replay(self) -> bool:
        """Whether due records may be replayed now."""
        return self.source.gate is Gate.OPEN and self.gate is Gate.OPEN

    def replay(self, entry: ParkedEntry, record: Record, key: ShardKey, now: float) -> Replay:
        """Create the delivery of a parked record."""
        size = record_size(record.key, record.value, record.headers)
        replay = Replay(record, key, size, parked=self, entry=entry, now=now)
        self.take_in(FetchedBatch(self.topic_partition, [record], [size], replay.offset + 1), [replay])
        return replay

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`; the messages of a replay belong to the transactions of the partition."""
        if not super().complete(delivery):
            return False
        if delivery.outgoing:
            self.source.send_later(Outputs.of(delivery))
        return True

    def close(self, running: Collection[Delivery] = (), *, below: bool = False) -> None:  # noqa: ARG002
        """See `Epoch.close`; a drain does not wait for replays that are only queued."""
        super().close(running)


class Parking:
    """Parked records of one handler, over all partitions that we own.

    Workers call `divert` before they start a delivery, and take `recovery` when its attempts are exhausted. The
    rebalance calls `restore` and `believe` when a partition arrives; the sharder calls `forget` when it ends and `wake`
    when it opens. Two tasks run: `read` follows the side topic, and `replay` runs due records again. Owned by the event
    loop.

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
        send: Send,
        exactly_once: bool,
        side_topics: SideTopics,
        buffer: Buffer,
        clock: Callable[[], float],
        now: Callable[[], float],
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
            send: Writes to the side topic for a delivery that completes after that.
            exactly_once: Whether `send` makes messages visible in the transaction that commits the completion.
            side_topics: Reads the side topic; the caller closes it.
            buffer: Buffer shared by all partitions.
            clock: Returns the loop time.
            now: Returns the time of day, in seconds since the Unix epoch.
        """
        self.policy = policy
        self._group = group
        self._handler = handler
        self._shards = shards
        self._identity = functools.partial(identity, shard_key, shards=len(shards) if fixed else None)
        self._fixed = fixed
        self._at_once = max(2 * workers, 16)
        self._publish = publish
        self._send_for = send
        self._exactly_once = exactly_once
        self._side = side_topics
        self._buffer = buffer
        self._clock = clock
        self._partitions: dict[Epoch, ParkedPartition] = {}
        self._ensured = 0
        self._cached: dict[tuple[TopicPartition, int], Record] = {}
        """Unused records of the latest read: records that are due are often neighbours."""
        self._unreadable: str | None = None
        """Why the side topic cannot be followed now."""
        self._refused: dict[Message, str] = {}
        """Replies that could not be written and are being retried, each with the reason."""
        self._due = asyncio.Event()
        self._epoch_time = now() - clock()
        topic = policy.topic
        self._behind = Recovery(f"its key is parked, and it is written to {topic} behind it", self._park)
        self.recovery = Recovery(f"it is parked in {topic}", self._park)
        """Recovery for a record whose attempts are exhausted."""
        self.drop = Recovery(f"it is removed from {topic} without being processed", self._drop)
        """Recovery for giving up a record that was halted in a replay."""
        self._finished = Recovery(f"its run succeeded, and it is removed from {topic}", self._remove)

    @property
    def trouble(self) -> str | None:
        """Why the side topic cannot be read or written now; None if it can."""
        reasons = list(self._refused.copy().values())
        for parked in tuple(self.partitions):
            reasons += parked.unread.copy().values()
        return reasons[0] if reasons else self._unreadable

    def _now(self) -> float:
        """Return the Unix time by the loop's clock, which virtual time moves too."""
        return self._epoch_time + self._clock()

    @property
    def partitions(self) -> Collection[ParkedPartition]:
        """Parked records of each partition that we own."""
        return self._partitions.values()

    @property
    def key_count(self) -> int:
        """Number of parked keys. Safe from any thread."""
        return sum(parked.keys.keys for parked in tuple(self.partitions))

    def parked_keys(self, most: int, *, show_keys: bool) -> Iterator[ParkedKey]:
        """Yield parked keys, each described by its first record. Safe from any thread.

        Args:
            most: Maximum number per partition.
            show_keys: Whether to show keys as they are, instead of a hash.
        """
        for parked in tuple(self.partitions):
            for entry in parked.keys.heads(most):
                described = self._describe(parked, entry, show_keys=show_keys)
                if described is not None:
                    yield described

    def _describe(self, parked: ParkedPartition, entry: ParkedEntry, *, show_keys: bool) -> ParkedKey | None:
        """Describe a parked key by its first record; None if the key raises when it is hashed."""
        try:
            failure = parked.failures.get(entry.key)
            waits = parked.keys.waits(entry.key)
        except Exception:  # noqa: BLE001 - a key of the application
            return None
        topic, partition = parked.source.topic_partition
        due = None
        if waits and entry.due < NEVER:
            due = max(entry.due - self._now(), 0.0)
        failed_at = None
        error = None
        if failure is not None:
            failed_at = failure.failed_at
            error = f"{failure.error}: {failure.message}"
        key = None if entry.alone else shown(record_key(entry.key, topic), show_keys=show_keys)
        return ParkedKey(
            handler=self._handler,
            stored_in=self.policy.topic,
            topic=topic,
            partition=partition,
            offset=entry.offset,
            key=key,
            retries=entry.retries,
            due=due,
            in_flight=not waits,
            failed_at=failed_at,
            error=error,
        )

    # Workers ------------------------------------------------------------------------

    def divert(self, delivery: Delivery) -> None:
        """Assign a recovery to a delivery whose key is parked, and withdraw it once the key is no longer parked."""
        parked = self._partitions.get(delivery.epoch)
        # 1. Nothing can be parked, or it is the first parked record of its key.
        if parked is None or isinstance(delivery, Replay):
            return
        # 2. It was to be parked behind its key.
        if delivery.recovery is self._behind:
            if parked.identity(delivery.record) not in parked.keys:
                delivery.withdraw_recovery()
        # 3. It was to run. Most partitions have no parked keys, so no key is computed.
        elif delivery.recovery is None and parked.keys.keys and parked.identity(delivery.record) in parked.keys:
            delivery.divert(self._behind)

    def release(self, topic_partition: TopicPartition, offset: int) -> bool:
        """Replay the key of a parked record now, unless it is already running; return whether the record exists.

        Nothing is written: if we lose the partition before that, the request is lost.
        """
        for parked in self.partitions:
            entry = parked.keys.get(offset) if parked.source.topic_partition == topic_partition else None
            if entry is not None:
                parked.keys.release(entry.key)
                self.wake()
                return True
        return False

    async def _park(self, delivery: Delivery) -> Outcome:
        return await self._park_until(None, delivery)

    def recovery_in(self, seconds: float) -> Recovery:
        """Return the recovery for a record that its handler parks for a number of seconds."""
        due = min(self._now() + seconds, NEVER)
        return Recovery(
            f"it is parked in {self.policy.topic} for {seconds:g} s", functools.partial(self._park_until, due)
        )

    async def _park_until(self, due: float | None, delivery: Delivery) -> Outcome:
        """Write a record to the side topic; its key is retried at *due*, or after the delay of the policy."""
        if isinstance(delivery, Replay):
            return await self._park_again(due, delivery)
        parked = self._partitions[delivery.epoch]
        record = delivery.record
        if delivery.recovery is self._behind:
            failure = parked.failures[parked.identity(record)]
        else:
            failure = failure_of(delivery, self._group, self._handler)
        if len(parked.keys) >= _MOST_PARKED:
            raise SideTopicError(
                f"{len(parked.keys)} records of {delivery.epoch.topic_partition} are parked, the maximum that a "
                "process keeps track of: release or drop some"
            )
        generation = parked.generation
        due = self._due_after(0) if due is None else due
        stored_at = await self._write(delivery, failure, generation=generation, due=due, retries=0)
        parked.add(parked.entry(record, generation=generation, stored_at=stored_at, due=due, retries=0), failure)
        self.wake()
        return Outcome.PARKED

    async def _park_again(self, due: float | None, delivery: Replay) -> Outcome:
        parked = delivery.parked
        entry = delivery.entry
        failure = failure_of(delivery, self._group, self._handler)
        retries = entry.retries + 1
        due_by_policy = self._due_after(retries)
        if due is None or due_by_policy == NEVER:
            due = due_by_policy
        # An operator may drop it while it runs, and while it is written.
        if parked.keys.get(entry.offset) is entry:
            stored_at = await self._write(delivery, failure, generation=entry.generation, due=due, retries=retries)
            entry.stored_at = max(entry.stored_at, stored_at)
            entry.retries = retries
            entry.due = due
        if parked.keys.get(entry.offset) is entry:
            parked.failed_again(entry, failure)
        self.wake()
        return Outcome.RETURNED

    def _due_after(self, retries: int) -> float:
        """Return when a key is due that was retried *retries* times, by the policy."""
        delay = self.policy.delay_after(retries)
        return NEVER if delay is None else self._now() + delay

    async def _write(self, delivery: Delivery, failure: Failure, *, generation: int, due: float, retries: int) -> int:
        """Write the record of a delivery to the side topic; return the offset, or -1 until its transaction ends."""
        message = park(self.policy.topic, delivery.record, failure, generation=generation, due=due, retries=retries)
        return await self._send_for(delivery, message)

    async def _remove(self, delivery: Delivery) -> Outcome:
        assert isinstance(delivery, Replay)  # noqa: S101 - only replays get this recovery
        parked = delivery.parked
        entry = delivery.entry
        await self._send_for(delivery, parked.tombstone(entry.offset, entry.generation))
        parked.remove(entry.offset)
        self.wake()
        return Outcome.PROCESSED

    async def _drop(self, delivery: Delivery) -> Outcome:
        await self._remove(delivery)
        return Outcome.SKIPPED

    # Partitions ---------------------------------------------------------------------

    async def restore(self, epoch: Epoch, partitions: int, generation: int) -> bool:
        """Find out which records of a partition are parked, before any of its records starts.

        Args:
            epoch: A new, closed epoch.
            partitions: Number of partitions that the side topic needs.
            generation: Group generation in which we got the partition.

        Returns:
            Whether records are parked under a later generation; they are left alone until `believe`.

        Raises:
            TransportError: If the side topic cannot be read or written now.
        """
        if partitions > self._ensured:
            await self._side.ensure(self.policy.topic, partitions)
            self._ensured = partitions
        parked = ParkedPartition(
            epoch,
            self.policy.topic,
            generation,
            buffer=self._buffer,
            identity=self._identity,
            exactly_once=self._exactly_once,
        )
        self._partitions[epoch] = parked
        epoch.replays = parked
        self._watch()
        await self._read_all(parked)
        parked.finish_restoring(newest=generation)
        await asyncio.gather(*(self._publish(message) for message in parked.outgoing()))
        if parked.keys.keys:
            logger.debug(
                "%s: %s holds %s of %s",
                epoch.topic_partition,
                self.policy.topic,
                counted(len(parked.keys), "parked record"),
                counted(parked.keys.keys, "key"),
                extra=partition_fields(
                    "parked", epoch.topic_partition, records=len(parked.keys), keys=parked.keys.keys
                ),
            )
        return parked.in_doubt

    def believe(self, epoch: Epoch) -> None:
        """Accept our generation: the brokers accepted a commit since `restore`, so nobody owned the partition later."""
        parked = self._partitions.get(epoch)
        if parked is not None and parked.in_doubt:
            before = len(parked.keys)
            parked.finish_restoring(newest=math.inf)
            records = len(parked.keys) - before
            logger.warning(
                "%s: adopted %s in %s that were parked under a later generation than the current one of group %r; the "
                "group was recreated since (it was deleted, or its offsets expired)",
                epoch.topic_partition,
                counted(records, "record"),
                self.policy.topic,
                self._group,
                extra=partition_fields("parked", epoch.topic_partition, records=records, group=self._group),
            )

    def _watch(self) -> None:
        self._side.watch(list(dict.fromkeys(parked.topic_partition for parked in self.partitions)))

    async def _read_all(self, parked: ParkedPartition) -> None:
        """Read a side partition from its start, without a gap to the position from which `read` follows it.

        It does not rewind `read`: that may already have fetched later records, after which earlier ones are ignored.
        """
        position = 0
        while True:
            end = await self._side.end(parked.topic_partition)
            position = await self._read_until(parked, position, end)
            read_to = max(position, end)
            # Otherwise `read` has passed this position meanwhile, and some records would be missing.
            if self._side.position(parked.topic_partition) <= read_to:
                parked.read_to = read_to
                return

    async def _read_until(self, parked: ParkedPartition, position: int, end: int) -> int:
        """Restore the records of a side partition from *position* to *end*; return the position after the last one."""
        while position < end:
            records = await self._side.read(parked.topic_partition, position)
            # Compaction has removed the rest.
            if not records:
                break
            for record in records:
                group = parked.restore(record)
                if group not in (None, self._group):
                    raise SideTopicError(
                        f"{parked.topic_partition} holds records that group {group!r} has parked, and group "
                        f"{self._group!r} would overwrite them: use a separate topic for each group"
                    )
            position = records[-1].offset + 1
        return position

    def forget(self, epoch: Epoch) -> None:
        """End the replays of a partition whose epoch has ended; the side topic keeps its parked records."""
        parked = self._partitions.pop(epoch, None)
        if parked is not None:
            parked.end()
            self._watch()
            self.wake()

    def wake(self) -> None:
        """Look for due records now: something has changed."""
        self._due.set()

    # Tasks --------------------------------------------------------------------------

    async def read(self) -> None:
        """Follow the side topic until cancelled: parked and dropped records, and release requests."""
        async with asyncio.TaskGroup() as writing:
            while True:
                try:
                    for record in await self._side.poll(_POLL_TIMEOUT):
                        self._read(record)
                    for parked in self.partitions:
                        for message in parked.outgoing():
                            # A partition that cannot be written must not keep us from following the others.
                            writing.create_task(self._send(parked, message), name=f"write to {parked.topic_partition}")
                    self._unreadable = None
                except TransportError as error:
                    if self._unreadable is None:
                        logger.error(  # noqa: TRY400 - the brokers' error, which has no use for a traceback
                            "topic %s cannot be read: %s",
                            self.policy.topic,
                            error,
                            extra={"event": "trouble", "topic": self.policy.topic},
                        )
                    self._unreadable = str(error)
                    await asyncio.sleep(_BACKOFF)

    def _read(self, record: Record) -> None:
        for parked in self.partitions:
            if parked.topic_partition == record.topic_partition:
                parked.read(record)
        self.wake()

    async def _send(self, parked: ParkedPartition, message: Message) -> None:
        try:
            while parked.gate is not Gate.ENDED:
                try:
                    await self._publish(message)
                except TransportError as error:
                    self._refused[message] = str(error)
                    await asyncio.sleep(_BACKOFF)
                else:
                    return
        finally:
            self._refused.pop(message, None)

    async def replay(self) -> None:
        """Replay due records until cancelled."""
        while True:
            self._due.clear()
            for parked in list(self.partitions):
                await self._replay_due(parked)
            with anyio.move_on_after(self._until_due()):
                await self._due.wait()

    @property
    def _running(self) -> int:
        return sum(len(parked.tracker) for parked in self.partitions)

    def _until_due(self) -> float:
        """Return the seconds until the next key is due; `wake` ends the wait earlier."""
        due_times: list[float] = []
        for parked in self.partitions:
            due = parked.keys.next_due if parked.may_replay else None
            if due is not None:
                due_times.append(due)
        # A replay that ends, or a partition that opens, wakes us.
        if not due_times or self._running >= self._at_once:
            return _LONGEST_WAIT
        seconds = min(due_times) - self._now()
        return min(max(seconds, _SHORTEST_WAIT), _LONGEST_WAIT)

    async def _replay_due(self, parked: ParkedPartition) -> None:
        """Replay the first record of each due key of a partition, as long as its gate is open and there is room."""
        while parked.may_replay and self._running < self._at_once:
            entry = parked.keys.take_due(self._now())
            # 1. No key is due.
            if entry is None:
                return
            record = await self._fetch(parked, entry)
            # 2. An operator dropped the record while it was fetched.
            if parked.keys.get(entry.offset) is not entry:
                parked.unread.pop(entry.offset, None)
            # 3. It can be replayed.
            elif record is not None and parked.is_open and self._fits(record):
                self._queue(parked, entry, record)
            # 4. It cannot be replayed now. Each further key may take as long, and other partitions must not wait for
            # all of them.
            else:
                parked.keys.postpone(entry.key, self._now() + _BACKOFF)
                return

    def _queue(self, parked: ParkedPartition, entry: ParkedEntry, record: Record) -> None:
        """Queue a parked record for its replay, ahead of the records that arrive."""
        shard_key = parked.identity(record)
        number = 0
        delivery_key = shard_key
        if self._fixed:
            number = fixed_shard(shard_key, len(self._shards), entry.offset)
            delivery_key = number
        replay = parked.replay(entry, record, delivery_key, self._clock())
        replay.finish_with(self._finished)
        if self._exactly_once:
            # The messages of a batch belong to one completion.
            replay.isolate()
        error = undecodable(record)
        if error is not None:
            replay.refuse(error)
        # Unlike other records, it may run again in the epoch in which its message was refused.
        parked.source.fail_refused([replay])
        parked.source.refused.pop(record.offset, None)
        self._shards[number].put_first([replay])

    async def _fetch(self, parked: ParkedPartition, entry: ParkedEntry) -> Record | None:
        """Return the original of a parked record; None if it cannot be read now or was replaced by another."""
        # 1. It is not known where it is, because the transaction that parks it has not ended.
        if entry.stored_at == UNKNOWN_OFFSET:
            return None
        position = (parked.topic_partition, entry.stored_at)
        # 2. The side topic cannot be read.
        if position not in self._cached:
            try:
                records = await self._side.read(parked.topic_partition, entry.stored_at)
            except TransportError as error:
                parked.unread[entry.offset] = str(error)
                return None
            self._cached = {(parked.topic_partition, record.offset): record for record in records}
        stored = self._cached.pop(position, None)
        decoded = None if stored is None else read_parked(stored)
        # 3. It is gone.
        if not isinstance(decoded, ParkedRecord):
            parked.unread[entry.offset] = (
                f"parked record {parked.source.topic_partition}/{entry.offset} is not in {parked.topic_partition} at "
                f"offset {entry.stored_at}: something other than compaction deleted it. Its key waits; 'aioshard park "
                "drop' gives the record up"
            )
            return None
        # 4. It is there.
        parked.unread.pop(entry.offset, None)
        return decoded.original

    def _fits(self, record: Record) -> bool:
        """Return whether there is room for a record, or no running replay that it could wait for."""
        size = record_size(record.key, record.value, record.headers)
        return not self._running or self._buffer.bytes + size <= self._buffer.bounds.bytes
