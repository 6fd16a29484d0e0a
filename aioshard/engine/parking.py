"""`on_failure=Park(...)`: failed records, and later records of the same key, wait in a side topic."""

import asyncio
import functools
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence

from aioshard.core.options import Park
from aioshard.core.parking import NEVER, ParkedEntry
from aioshard.core.sharding import ShardKey, identity, record_key, shown
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.engine.parked_partition import ParkedPartition, Replay
from aioshard.engine.recoveries import Send, failure_of
from aioshard.engine.replays import Replays
from aioshard.engine.shards import Shards
from aioshard.errors import SideTopicError, TransportError
from aioshard.log_fields import get_logger
from aioshard.observe import ParkedKey
from aioshard.ports import UNKNOWN_OFFSET, Message, Publish, SideTopics
from aioshard.records import Record, TopicPartition, counted
from aioshard.serde.side_records import (
    Failure,
    park,
)

logger = get_logger("aioshard.engine.parking")

_POLL_TIMEOUT = 1.0
_BACKOFF = 1.0
_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 60.0
"""Seconds from one look for due records to the next, at least and at most."""
_MOST_PARKED = 100_000
"""Maximum parked records of one partition; each costs memory, so more are refused until some are gone."""


class Parking:
    """Parked records of one handler, over all partitions that we own.

    Workers call `divert` before they start a delivery, and take `recovery` when its attempts are exhausted. The
    rebalance calls `restore` and `believe` when a partition arrives; the sharder calls `forget` when it ends. The task
    `read` follows the side topic, and `Replays` runs due records again. Owned by the event loop.

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
        batch_workers: int | None,
        publish: Publish,
        send: Send,
        exactly_once: bool,
        side_topics: SideTopics,
        buffer: Buffer,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        """Create the parking of one handler; `read`, and `run` of its `replays`, are its tasks.

        Args:
            policy: Topic, delay and attempts.
            group: Consumer group, for the headers of parked records.
            handler: Name of the handler, for the headers of parked records.
            shards: Shards of the handler.
            shard_key: Maps a record to its shard key.
            fixed: Whether the shards are fixed; if so, deliveries carry the number of their shard as key.
            batch_workers: Number of workers of a batch handler; None for a handler of single records.
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
        self._fixed = fixed
        self._identity = functools.partial(identity, shard_key, shards=len(shards) if fixed else None)
        self._publish = publish
        self._send_for = send
        self._exactly_once = exactly_once
        self._side = side_topics
        self._buffer = buffer
        self._clock = clock
        self._partitions: dict[Epoch, ParkedPartition] = {}
        self._ensured = 0
        self._unreadable: str | None = None
        """Why the side topic cannot be followed now."""
        self._refused: dict[Message, str] = {}
        """Replies that could not be written and are being retried, each with the reason."""
        self._epoch_time = now() - clock()
        topic = policy.topic
        self._behind = Recovery(f"its key is parked, and it is written to {topic} behind it", self._park)
        self.recovery = Recovery(f"it is parked in {topic}", self._park)
        """Recovery for a record whose attempts are exhausted."""
        self.drop = Recovery(f"it is removed from {topic} without being processed", self._drop)
        """Recovery for giving up a record that was halted in a replay."""
        self.replays = Replays(
            shards=shards,
            fixed=fixed,
            batch_workers=batch_workers,
            exactly_once=exactly_once,
            side_topics=side_topics,
            buffer=buffer,
            finished=Recovery(f"its run succeeded, and it is removed from {topic}", self._remove),
            clock=clock,
            now=self._now,
        )
        """Runs due records again."""

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
        # 1. Nothing can be parked, or it is the first parked record of its key: its epoch is that of the replays.
        if parked is None:
            return
        # 2. It was to be parked behind its key.
        if delivery.recovery is self._behind:
            if self._key_of(delivery) not in parked.keys:
                delivery.withdraw_recovery()
        # 3. It was to run. Most partitions have no parked keys.
        elif delivery.recovery is None and parked.keys and self._key_of(delivery) in parked.keys:
            delivery.divert(self._behind)

    def _key_of(self, delivery: Delivery) -> ShardKey:
        """Return the shard key of a delivery; those of fixed shards carry the number of their shard instead."""
        return self._identity(delivery.record) if self._fixed else delivery.key

    def release(self, topic_partition: TopicPartition, offset: int) -> bool:
        """Replay the key of a parked record now, unless it is already running; return whether the record exists.

        Nothing is written: if we lose the partition before that, the request is lost.
        """
        for parked in self.partitions:
            entry = parked.keys.get(offset) if parked.source.topic_partition == topic_partition else None
            if entry is not None:
                parked.keys.release(entry.key)
                self.replays.wake()
                return True
        return False

    def _park(self, delivery: Delivery) -> Awaitable[Outcome]:
        return self._park_until(None, delivery)

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
        key = self._key_of(delivery)
        if delivery.recovery is self._behind:
            failure = parked.failures[key]
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
        entry = ParkedEntry(delivery.offset, key, generation=generation, stored_at=stored_at, due=due, retries=0)
        if parked.add(entry, failure):
            self.replays.wake()
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
            # Until it is known where the copy is, a tombstone may be older or newer.
            entry.stored_at = UNKNOWN_OFFSET
            entry.stored_at = await self._write(
                delivery, failure, generation=entry.generation, due=due, retries=retries
            )
            entry.retries = retries
            entry.due = due
        if parked.keys.get(entry.offset) is entry:
            await self._answer(delivery, parked.failed_again(entry, failure))
        self.replays.wake()
        return Outcome.RETURNED

    def _due_after(self, retries: int) -> float:
        """Return when a key is due that was retried *retries* times, by the policy."""
        delay = self.policy.delay_after(retries)
        return NEVER if delay is None else self._now() + delay

    def _write(
        self, delivery: Delivery, failure: Failure, *, generation: int, due: float, retries: int
    ) -> Awaitable[int]:
        """Write the record of a delivery to the side topic; return the offset, or -1 until its transaction ends."""
        message = park(self.policy.topic, delivery.record, failure, generation=generation, due=due, retries=retries)
        return self._send_for(delivery, message)

    async def _remove(self, delivery: Delivery) -> Outcome:
        assert isinstance(delivery, Replay)  # noqa: S101 - only replays get this recovery
        parked = delivery.parked
        entry = delivery.entry
        await self._send_for(delivery, parked.tombstone(entry.offset, entry.generation))
        await self._answer(delivery, parked.remove(entry.offset))
        self.replays.wake()
        return Outcome.PROCESSED

    async def _answer(self, delivery: Replay, answers: Iterable[Message]) -> None:
        """Answer requests to release the key of a replay that has ended.

        With exactly once, in its transaction: if that fails, the next owner must find the requests.
        """
        if not self._exactly_once:
            delivery.parked.write_later(answers)
            return
        for answer in answers:
            await self._send_for(delivery, answer)

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
        self.replays.add(parked)
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
            self.replays.remove(parked)
            self._watch()

    # Tasks --------------------------------------------------------------------------

    async def read(self) -> None:
        """Follow the side topic until cancelled: parked and dropped records, and release requests."""
        async with asyncio.TaskGroup() as writing:
            while True:
                try:
                    self._read(await self._side.poll(_POLL_TIMEOUT))
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

    def _read(self, records: Sequence[Record]) -> None:
        stored_in: defaultdict[TopicPartition, list[ParkedPartition]] = defaultdict(list)
        for parked in self.partitions:
            stored_in[parked.topic_partition].append(parked)
        for record in records:
            for parked in stored_in[record.topic_partition]:
                parked.read(record)
        if records:
            self.replays.wake()

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
