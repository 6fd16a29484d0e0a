"""The intake: the task that polls the client, and the limits on how much of each partition it may take in."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from aioshard.core.flow import NONE, Usage, minimum, room_for
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Gate
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.partition import Partition
from aioshard.engine.rebalance import Rebalance
from aioshard.errors import OffsetOutOfRangeError, OffsetRegressionError, TopicRecreatedError
from aioshard.log_fields import get_logger
from aioshard.ports import NOTHING, Allowance, Fault, FetchedBatch, Oversized, Transport
from aioshard.records import TopicPartition

logger = get_logger("aioshard.engine.intake")

_POLL_TIMEOUT = 1.0
_EVICTION_INTERVAL = 0.5
_EVICTION_INTERVAL_PER_PARTITION = 0.001
"""Seconds between two searches for records to evict, at least, and for each partition."""
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


class IntakeStatistics(NamedTuple):
    """The intake's part of the statistics of an app."""

    already_done: int
    buffered_records: int
    buffered_bytes: int


class Limit(NamedTuple):
    """The reason why a partition has no room."""

    reason: str
    """A clause with figures."""
    what_to_do: str | None


class Intake:
    """The one task that polls the client, for all partitions, within the bounds of the buffer.

    It hands each batch to its partition. With one `getmany` call per partition instead, every response would wake all
    of them: no difference up to about 32 partitions, but seven times the cost at 512.

    A record that does not fit stays with the client, and nothing else is taken in until it fits or can be admitted
    alone. Otherwise small records would use up all the room that becomes free (I6).
    """

    def __init__(
        self,
        buffer: Buffer,
        rebalance: Rebalance,
        committer: Committer,
        clock: Callable[[], float],
        *,
        stuck_after: float,
    ) -> None:
        """Make an intake; `run` is its task, once per life of a client.

        Args:
            buffer: The records buffered for all partitions.
            rebalance: Owns the partitions, and finds out where one resumes whose position is not in its log.
            committer: Knows how long the text of a commit may be: all completions must fit into it.
            clock: Loop time.
            stuck_after: Seconds after which a partition with an incomplete record counts as one that cannot advance.
        """
        self.already_done = 0
        """Records fetched but not taken in, because committed metadata lists them as finished."""
        self.turns = 0
        """Number of polls of the client that have returned."""
        self._buffer = buffer
        self._rebalance = rebalance
        self._partitions = rebalance.partitions
        self._committer = committer
        self._clock = clock
        self._stuck_after = stuck_after
        self._waiting: _Waiting | None = None
        self._evict_at = 0.0

    # The task -----------------------------------------------------------------------

    async def run(self, transport: Transport) -> None:
        """Poll until cancelled, or until the client is lost.

        Raises:
            TransportError: From `Transport.poll`.
        """
        while True:
            self.make_room(transport)
            items = await transport.poll(self.request, _POLL_TIMEOUT)
            self.turns += 1
            for item in items:
                partition = self._partitions.get(item.topic_partition)
                if partition is not None:
                    self._take(item, partition)
            if items:
                await asyncio.sleep(0)  # a client that has data never suspends

    def _take(self, item: FetchedBatch | Fault | Oversized, partition: Partition) -> None:
        """Act on what a poll returned about a partition."""
        # 1. Its log is another one. This counts also while it drains: it must not continue in place.
        if isinstance(item, Fault) and isinstance(item.error, TopicRecreatedError):
            self._rebalance.reset_position(partition, item.error)
        # 2. It is being revoked, or is not certainly ours: its records will be fetched again.
        elif not partition.is_open:
            return
        # 3. It is ours.
        elif isinstance(item, FetchedBatch):
            self._accept(partition, item)
        elif isinstance(item, Fault):
            self._fault(partition, item)
        else:
            self.keep_room_for(item, partition)

    def make_room(self, transport: Transport) -> None:
        """Evict records of partitions that cannot advance, down to a minimum; fetch them again once there is room.

        Without eviction, partitions that halt one after another each keep half of the room that is left: with eight of
        them, the last one had 39 of 10,000 records.
        """
        now = self._clock()
        if now < self._evict_at:
            return
        self._evict_at = now + max(_EVICTION_INTERVAL, _EVICTION_INTERVAL_PER_PARTITION * len(self._partitions))
        least = minimum(self._buffer.bounds)
        for partition in self._partitions:
            if not partition.pending and partition.is_seekable:  # a drain needs its records
                self._make_room_in(partition, least, transport)

    def _make_room_in(self, partition: Partition, least: Usage, transport: Transport) -> None:
        """Evict records of a partition if it cannot advance, or fetch evicted ones again if they fit."""
        name = partition.topic_partition
        stuck = self._is_stuck(partition)
        buffered = partition.held_usage
        has_room = not stuck or (buffered.records < least.records and buffered.bytes < least.bytes)
        if has_room and partition.is_open and partition.evicted and not partition.fetching_again:
            partition.fetching_again = True
            transport.seek(name, min(partition.evicted))
        if stuck and (buffered.records > 2 * least.records or buffered.bytes > 2 * least.bytes):
            records = partition.evict_beyond(least)
            if records:
                fields = partition_fields("records_evicted", name, records=records)
                message = "%s cannot advance: %d of its queued records were evicted and will be fetched again"
                logger.warning(message, name, records, extra=fields)

    def _accept(self, partition: Partition, batch: FetchedBatch) -> None:
        if self._waiting is not None and self._waiting.partition is partition:
            self._waiting = None
        if partition.finished_ahead:
            fetched = len(batch.records)
            batch = partition.without_finished(batch)
            self.already_done += fetched - len(batch.records)
        try:
            partition.accept(batch)
        except OffsetRegressionError as error:
            self._rebalance.reset_position(partition, error)

    def _fault(self, partition: Partition, fault: Fault) -> None:
        if isinstance(fault.error, OffsetOutOfRangeError):
            self._rebalance.reset_position(partition, fault.error)
        elif partition.fault.report(str(fault.error)):
            fields = partition_fields("unreadable", partition.topic_partition)
            logger.error("%s cannot be read: %s", partition.topic_partition, fault.error, extra=fields)

    # How much is taken in -----------------------------------------------------------

    def keep_room_for(self, oversized: Oversized, partition: Partition) -> None:
        """Remember that the next record of a partition did not fit."""
        self._waiting = _Waiting(oversized, partition, partition.tracker.position)

    def allowance(self, topic_partition: TopicPartition) -> Allowance:
        """Return how much may be taken in of a partition now.

        No more than the handler needs soon: a record that waits long in memory costs twice as much as one that starts
        soon, because the garbage collector visits it repeatedly.
        """
        partition = self._partitions.get(topic_partition)
        return NOTHING if partition is None else _wanted(partition, self._room(partition))

    def request(self, topic_partition: TopicPartition) -> Allowance:
        """Return how much to take in of a partition now; if nothing, the poll ends when that may change."""
        partition = self._partitions.get(topic_partition)
        room = NOTHING if partition is None else self._room(partition)
        if partition is None or not room.records:
            self._buffer.arm()
            if partition is not None and partition.gate is Gate.OPEN and not self._is_stuck(partition):
                partition.sharder.no_room()
            return room
        allowance = _wanted(partition, room)
        if not allowance.records:
            self._buffer.arm(partition.sharder.when_wanted(self._buffer.wake))
        return allowance

    def _room(self, partition: Partition) -> Allowance:
        """Return how much of a partition fits, whatever its handler needs."""
        # 1. Its gate is not open: at most a few records for a probe.
        if partition.gate is not Gate.OPEN:
            return self._for_probing(partition)
        # 2. Evicted records come before new ones.
        if partition.evicted and not partition.fetching_again:
            return NOTHING
        # 3. A record waits for room: nothing else is taken in.
        stuck = self._is_stuck(partition)
        waiting = self._waits_for_room()
        if waiting is not None and not stuck:
            return self._for_oversized(waiting.oversized) if waiting.partition is partition else NOTHING
        # 4. A share of the buffer.
        room = self._share(partition, stuck=stuck)
        # 5. Outputs that wait for evicted records must not keep them from being fetched.
        if partition.fetching_again and not partition.held_usage.records and not room.records:
            room = Usage(1, 1)
        # 6. All completions have to fit into a commit.
        committable = partition.commits.room(self._committer.metadata_limit)
        if committable is not None and committable < room.records:
            room = Usage(committable, room.bytes) if committable else NONE
        return Allowance(room.records, room.bytes)

    def _share(self, partition: Partition, *, stuck: bool) -> Usage:
        """Return how much more a partition may hold of the buffer."""
        bounds = self._buffer.bounds
        held = partition.held_usage
        # Outputs that wait for a transaction count too: a record that is stuck may hold back any number of them.
        held = Usage(held.records, held.bytes + partition.unsent_bytes)
        room = room_for(bounds, Usage(self._buffer.records, self._buffer.bytes), held, stuck=stuck)
        if held.records and not stuck:
            shares = _CHUNKS * (len(self._partitions) + 1)
            if room.records < bounds.records // shares or room.bytes < bounds.bytes // shares:
                return NONE
        return room

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
        if any(other.held_usage.records and not self._is_stuck(other) for other in self._partitions):
            return NOTHING
        return Allowance(1, _EVERYTHING, alone=True)

    def _is_stuck(self, partition: Partition) -> bool:
        return partition.stuck(self._clock(), self._stuck_after)

    # Statistics and explanations; safe from any thread ---------------------------------

    def statistics(self) -> IntakeStatistics:
        """Return its counts and the use of the buffer."""
        return IntakeStatistics(self.already_done, self._buffer.records, self._buffer.bytes)

    def reason(self, partition: Partition) -> str | None:
        """Why no records of a partition are taken in now; None if they are."""
        limit = self.limit(partition)
        if limit is not None:
            return limit.reason
        if partition.gate is not Gate.OPEN or partition.sharder.wanted > 0:
            return None
        return "its handler has enough queued that no worker has started yet"

    def limit(self, partition: Partition) -> Limit | None:
        """The limit that leaves a partition no room; None if it has some."""
        if partition.gate is not Gate.OPEN or self._room(partition).records:
            return None
        buffer = self._buffer
        waiting = self._waits_for_room()
        tracker = partition.tracker
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
        if partition.commits.room(self._committer.metadata_limit) == 0:
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


def _wanted(partition: Partition, room: Allowance) -> Allowance:
    """Return the part of *room* that the handler of a partition needs soon."""
    if not room.records or room.alone:
        return room
    wanted = partition.sharder.wanted
    return room._replace(records=min(room.records, wanted)) if wanted > 0 else NOTHING
