"""The pump, which polls the client, and the limits on how much of each partition it may take in."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from aioshard.core.flow import NONE, Usage, minimum, room_for
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Gate
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.partition import Partition
from aioshard.errors import OffsetOutOfRangeError, OffsetRegressionError
from aioshard.ports import NOTHING, Allowance, Fault, FetchedBatch, Oversized, Transport
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.engine.intake")

_POLL_TIMEOUT = 1.0
_EVICTION_INTERVAL = 0.5
_CHUNKS = 4
"""A partition takes in nothing until a quarter of its fair share is free; otherwise a full buffer would lead to polls
of single records."""
_EVERYTHING = 1 << 62


class _Waiting(NamedTuple):
    """A record that did not fit, and the position of its partition at that time."""

    oversized: Oversized
    partition: Partition
    position: int

    @property
    def lasts(self) -> bool:
        """Whether it is still the next record of an open partition."""
        return self.partition.gate is Gate.OPEN and self.partition.tracker.position == self.position


class Limit(NamedTuple):
    """The reason why a partition has no room."""

    reason: str
    """A clause with figures."""
    what_to_do: str | None


class Intake:
    """The one task that polls the client, for all partitions, within the bounds of the buffer.

    This task, the pump, hands each batch to its partition. With one `getmany` call per partition instead, every
    response would wake all of them: no difference up to about 32 partitions, but seven times the cost at 512.

    A record that does not fit stays with the client, and nothing else is taken in until it fits or can be admitted
    alone. Otherwise small records would use up all the room that becomes free (I6).
    """

    def __init__(
        self,
        buffer: Buffer,
        partitions: Mapping[TopicPartition, Partition],
        clock: Callable[[], float],
        *,
        stuck_after: float,
        metadata_limit: Callable[[], int],
        out_of_range: Callable[[Partition, OffsetOutOfRangeError | OffsetRegressionError], None],
    ) -> None:
        """Make an intake; `run` is its task, once per life of a client.

        Args:
            buffer: The records buffered for all partitions.
            partitions: The assigned partitions; owned by the rebalance.
            clock: Loop time.
            stuck_after: Seconds after which a partition with an incomplete record counts as one that cannot advance.
            metadata_limit: Returns the longest metadata that the broker stores with a commit.
            out_of_range: Called when a partition cannot continue because its position is not in the log.
        """
        self.replayed = 0
        """Records taken in that this process had run before."""
        self.already_done = 0
        """Records fetched but not taken in, because committed metadata lists them as finished."""
        self.turns = 0
        """Number of polls of the client that have returned."""
        self._buffer = buffer
        self._partitions = partitions
        self._clock = clock
        self._stuck_after = stuck_after
        self._metadata_limit = metadata_limit
        self._out_of_range = out_of_range
        self._waiting: _Waiting | None = None
        self._evict_at = 0.0

    # The pump -----------------------------------------------------------------------

    async def run(self, transport: Transport) -> None:
        """Poll until cancelled, or until the client is lost.

        Raises:
            TransportError: From `Transport.poll`.
        """
        while True:
            self.make_room(transport)
            items = await transport.poll(self.allowance, _POLL_TIMEOUT)
            self.turns += 1
            for item in items:
                partition = self._partitions.get(item.topic_partition)
                if partition is None or not partition.is_open:
                    continue
                if isinstance(item, FetchedBatch):
                    self._accept(partition, item)
                elif isinstance(item, Fault):
                    self._fault(partition, item)
                else:
                    self.keep_room_for(item, partition)
            if items:
                await asyncio.sleep(0)  # a client that has data never suspends

    def make_room(self, transport: Transport) -> None:
        """Evict records of partitions that cannot advance, down to a minimum; fetch them again once there is room.

        Without eviction, partitions that halt one after another each keep half of the room that is left: with eight of
        them, the last one had 39 of 10,000 records.
        """
        now = self._clock()
        if now < self._evict_at:
            return
        self._evict_at = now + _EVICTION_INTERVAL
        least = minimum(self._buffer.bounds)
        for topic_partition, partition in self._partitions.items():
            if partition.pending or not partition.is_seekable:  # a drain needs its records
                continue
            stuck, buffered = self._is_stuck(partition), partition.held_usage
            has_room = buffered.records < least.records and buffered.bytes < least.bytes
            if partition.is_open and partition.evicted and (has_room or not stuck) and not partition.fetching_again:
                partition.fetching_again = True
                transport.seek(topic_partition, min(partition.evicted))
            if stuck and (buffered.records > 2 * least.records or buffered.bytes > 2 * least.bytes):
                records = partition.evict_beyond(least)
                if records:
                    fields = partition_fields("gave_back", topic_partition, records=records)
                    message = "%s cannot advance: %d of its queued records were evicted and will be fetched again"
                    logger.warning(message, topic_partition, records, extra=fields)

    def _accept(self, partition: Partition, batch: FetchedBatch) -> None:
        if self._waiting is not None and self._waiting.partition is partition:
            self._waiting = None
        if partition.finished_ahead:
            fetched = len(batch.records)
            batch = partition.without_finished(batch)
            self.already_done += fetched - len(batch.records)
        try:
            self.replayed += partition.accept(batch)
        except OffsetRegressionError as error:
            self._out_of_range(partition, error)

    def _fault(self, partition: Partition, fault: Fault) -> None:
        if isinstance(fault.error, OffsetOutOfRangeError):
            self._out_of_range(partition, fault.error)
        elif partition.report_fault(str(fault.error)):
            fields = partition_fields("unreadable", partition.topic_partition)
            logger.error("%s cannot be read: %s", partition.topic_partition, fault.error, extra=fields)

    # How much is taken in -----------------------------------------------------------

    def keep_room_for(self, oversized: Oversized, partition: Partition) -> None:
        """Remember that the next record of a partition did not fit."""
        self._waiting = _Waiting(oversized, partition, partition.tracker.position)

    def allowance(self, topic_partition: TopicPartition) -> Allowance:
        """How much the pump may take in of a partition; without room, the pump is woken when there may be some.

        No more than the handler needs soon: a record that waits long in memory costs twice as much as one that starts
        soon, because the garbage collector visits it repeatedly.
        """
        partition = self._partitions.get(topic_partition)
        allowance = NOTHING if partition is None else self._allowance(partition)
        if not allowance.records:
            self._buffer.arm()
            if partition is not None and partition.gate is Gate.OPEN and not self._is_stuck(partition):
                partition.feed.no_room()
        if partition is None or not allowance.records or allowance.alone:
            return allowance
        wanted = partition.feed.wanted
        if wanted <= 0:
            self._buffer.arm(partition.feed.when_wanted(self._buffer.wake))
            return NOTHING
        return allowance._replace(records=min(allowance.records, wanted))

    def _allowance(self, partition: Partition) -> Allowance:
        if partition.gate is not Gate.OPEN:
            return self._for_probing(partition)
        if partition.evicted and not partition.fetching_again:
            return NOTHING  # evicted records come before new ones
        buffer, stuck = self._buffer, self._is_stuck(partition)
        waiting = self._waits_for_room()
        if waiting is not None and not stuck:
            return self._for_oversized(waiting.oversized) if waiting.partition is partition else NOTHING
        buffered = partition.held_usage
        room = room_for(buffer.bounds, Usage(buffer.records, buffer.bytes), buffered, stuck=stuck)
        if buffered.records and not stuck:
            shares = _CHUNKS * (len(self._partitions) + 1)
            if room.records < buffer.bounds.records // shares or room.bytes < buffer.bounds.bytes // shares:
                room = NONE
        committable = partition.metadata_room(self._metadata_limit())
        if committable is not None and committable < room.records:
            room = Usage(committable, room.bytes) if committable else NONE
        return Allowance(room.records, room.bytes)

    def _for_probing(self, partition: Partition) -> Allowance:
        """Some records of a paused partition, however full the buffer is: without a probe it might never resume."""
        again_first = partition.evicted and not partition.fetching_again
        if partition.gate is not Gate.PAUSED or not partition.probe_room or again_first:
            return NOTHING
        return Allowance(
            partition.probe_room,
            max(self._buffer.bounds.bytes - self._buffer.bytes, 0),
            alone=not self._buffer.records,
        )

    def _waits_for_room(self) -> _Waiting | None:
        """The record for which others leave room; None if its partition cannot advance, as it might wait forever."""
        waiting = self._waiting
        return waiting if waiting is not None and waiting.lasts and not self._is_stuck(waiting.partition) else None

    def _for_oversized(self, oversized: Oversized) -> Allowance:
        """The free room for a record that did not fit, or unlimited room if it is alone.

        Records of partitions that cannot advance do not count: they might stay forever.
        """
        free = self._buffer.bounds.bytes - self._buffer.bytes
        if oversized.size <= free:
            return Allowance(1, free)
        if any(other.held_usage.records and not self._is_stuck(other) for other in tuple(self._partitions.values())):
            return NOTHING
        return Allowance(1, _EVERYTHING, alone=True)

    def _is_stuck(self, partition: Partition) -> bool:
        return partition.stuck(self._clock(), self._stuck_after)

    # Explanations; safe from any thread -----------------------------------------------

    def reason(self, partition: Partition) -> str | None:
        """Why no records of a partition are taken in now; None if they are."""
        limit = self.limit(partition)
        if limit is not None:
            return limit.reason
        if partition.gate is not Gate.OPEN or partition.feed.wanted > 0:
            return None
        return "its handler has enough queued that no worker has started yet"

    def limit(self, partition: Partition) -> Limit | None:
        """The limit that leaves a partition no room; None if it has some."""
        if partition.gate is not Gate.OPEN or self._allowance(partition).records:
            return None
        buffer, waiting, tracker = self._buffer, self._waits_for_room(), partition.tracker
        if self._is_stuck(partition):
            return Limit(
                f"it cannot advance past record {tracker.oldest!r} and already holds {partition.held_usage.records} "
                "records, its minimum share of the buffer",
                "find out what that record waits for: more is taken in once it is complete",
            )
        if partition.evicted:
            return Limit(
                f"{len(partition.evicted)} records from offset {min(partition.evicted, default=0)} on were evicted "
                "while it could not advance, and are fetched again first",
                None,
            )
        if waiting is not None:
            which = (
                "its next record"
                if waiting.partition is partition
                else f"a record of {waiting.partition.topic_partition}"
            )
            return Limit(
                f"{which}, of {waiting.oversized.size} bytes, waits for room in the buffer",
                "wait: records that complete make room; if records of this size are common, raise max_buffered_bytes",
            )
        if partition.metadata_room(self._metadata_limit()) == 0:
            return Limit(
                f"a commit has no room for more completions beyond offset {tracker.committable}: {len(tracker)} "
                f"records, far apart, are incomplete, and the first one is {tracker.oldest!r}",
                "find out what the oldest records wait for: more is taken in once some of them are complete",
            )
        return Limit(
            f"the buffer is full: {buffer.records} of {buffer.bounds.records} records and {buffer.bytes} of "
            f"{buffer.bounds.bytes} bytes, {partition.held_usage.records} records of it from this partition",
            "find out what the oldest records wait for; if many keys are slow, raise max_buffered_records or "
            "max_buffered_bytes",
        )
