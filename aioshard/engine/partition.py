"""A partition that is ours: its epoch, its sharding task, its commits, and what the brokers say about it."""

import asyncio
import bisect
import operator
import time
from collections import deque
from collections.abc import Callable

from aioshard.core.finished_offsets import Run, below, beyond, holds
from aioshard.core.flow import Usage
from aioshard.core.ownership import Claim
from aioshard.engine.buffer import Buffer
from aioshard.engine.commits import Commits
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch, Outputs, Rerun
from aioshard.engine.sharder import Sharder
from aioshard.engine.trouble import Trouble
from aioshard.observe import PartitionStatistics
from aioshard.ports import FetchedBatch, LogRange, Membership
from aioshard.records import TopicPartition

_FAULT_LASTS = 5.0
"""Seconds; a client tries to read an unreadable partition about once per second."""


class LogEnd:
    """The end of a partition's log, as the brokers report it."""

    __slots__ = ("_clock", "held_back", "held_since", "offset")

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without a report; *clock* is loop time."""
        self.offset: int | None = None
        """End of the log, as last requested; the client may know of a later one."""
        self.held_back = 0
        """How many offsets beyond that end cannot be read, because a transaction has been open since `held_since`."""
        self.held_since: float | None = None
        """Loop time at which the brokers first reported that end with offsets beyond it; None without any."""
        self._clock = clock

    def report(self, log: LogRange) -> None:
        """Note what the brokers report about the log now.

        Under `read_committed` a busy transactional producer always has a transaction open, each for a moment. One
        transaction holds records back only if the end stands still, which takes two reports to know.
        """
        unreadable = max(log.newest - log.end, 0)
        stands = self.held_since is not None and log.end == self.offset
        self.offset = log.end
        self.held_back = unreadable if stands else 0
        if not unreadable:
            self.held_since = None
        elif not stands:
            self.held_since = self._clock()


class ReadFault:
    """Why the client cannot read a partition. It ends when a batch arrives, or when nobody repeats it for a while."""

    __slots__ = ("_clock", "_reported_at", "_trouble")

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without a fault; *clock* is loop time."""
        self._clock = clock
        self._trouble = Trouble(clock)
        self._reported_at = 0.0

    def report(self, why: str) -> bool:
        """Record that the partition cannot be read; return whether that is new."""
        now = self._clock()
        if self.sentence(now) is None:
            self._trouble.end()
        self._reported_at = now
        return self._trouble.report(why)

    def end(self) -> None:
        """Record that the partition can be read."""
        self._trouble.end()

    def sentence(self, now: float) -> str | None:
        """Why the partition cannot be read at loop time *now*, and for how long; None if it can."""
        return None if now - self._reported_at > _FAULT_LASTS else self._trouble.sentence(now)


class Partition(Epoch):
    """One uninterrupted ownership of a partition: its records, its sharding task, its commits and our claim to it.

    The intake calls `accept`, the sharding task (`run`) queues records in shards, the committer sends what is due, and
    the rebalance opens, drains and ends it. A full fixed shard makes only this partition wait.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        number: int,
        start: int,
        *,
        buffer: Buffer,
        counts: TopicCounts,
        sharder: Sharder,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(topic_partition, number, start, buffer, counts)
        self.sharder = sharder
        self.task: asyncio.Task[object] | None = None
        """The sharding task."""
        self.commits = Commits(self, clock)
        self.membership: Membership | None = None
        """Membership of the latest assignment; None until the partition is certainly ours, and once it is revoked."""
        self.claim: Claim | None = None
        """Our knowledge of the partition when it was revoked."""
        self.rerun: Rerun | None = None
        """The records that this process had started before; None once it has passed them."""
        self.outside_log: int | None = None
        """A position that is not in the log, while the rebalance finds out where to resume; otherwise None."""
        self.lost_from: int | None = None
        """The first offset at which the log has lost what was read, and may have other records; None without one."""
        self.log_end = LogEnd(clock)
        self.fault = ReadFault(clock)
        self._clock = clock
        self._batches: deque[list[Delivery]] = deque()
        """Accepted records without a shard key."""
        self._waiting: deque[Delivery] = deque()
        """Records that wait for room in their fixed shard."""
        self._arrived = asyncio.Event()

    @property
    def may_start_runs(self) -> bool:
        """Whether runs of its records may start now, or after a pause: it is certainly ours, or it is drained."""
        return self.membership is not None or any(epoch.pending for epoch in self.epochs)

    # Fetched records ----------------------------------------------------------------

    @property
    def has_unsharded(self) -> bool:
        """Whether the sharding task has something to do; False while it waits for a full shard."""
        return bool(self._batches) and not self._waiting

    def accept(self, batch: FetchedBatch) -> None:
        """Track a batch before anything can await, and leave the rest to the sharding task.

        Raises:
            OffsetRegressionError: The client went back; see `OffsetTracker.track`.
        """
        now = self._clock()
        if self.evicted or self.fetching_again:
            self._add(self.readmit(batch, now))
            batch = _after(batch, self.tracker.position)
        deliveries = [
            Delivery(record, self, None, size, now) for record, size in zip(batch.records, batch.sizes, strict=True)
        ]
        if batch.positions is not None:
            self.is_seekable = False
            for delivery, position in zip(deliveries, batch.positions, strict=True):
                delivery.offset = position
        if batch.undecodable:
            for delivery in deliveries:
                error = batch.undecodable.get(delivery.record.offset)
                if error is not None:
                    delivery.refuse(error)
        self.fail_refused(deliveries)
        self.take_in(batch, deliveries)
        self.fault.end()
        self._add(deliveries)
        if self.rerun is not None:
            self._count_replayed(batch, self.rerun)

    def _count_replayed(self, batch: FetchedBatch, rerun: Rerun) -> None:
        """Count the records of a batch that this process had started before."""
        for record in batch.records:
            if rerun.counts(record):
                self.counts.replayed += 1
        if batch.next_offset > rerun.highest_started:
            self.rerun = None

    def without_finished(self, batch: FetchedBatch) -> FetchedBatch:
        """Return a batch without the records that the committed metadata lists as finished; they are holes now."""
        kept = [index for index, record in enumerate(batch.records) if not holds(self.finished_ahead, record.offset)]
        self.finished_ahead = beyond(self.finished_ahead, batch.next_offset)
        return batch._replace(
            records=[batch.records[index] for index in kept], sizes=[batch.sizes[index] for index in kept]
        )

    def _add(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._batches.append(deliveries)
            self._arrived.set()

    def finished(self) -> list[Run]:
        """See `Epoch.finished`; without offsets of records that the cluster has lost."""
        finished = super().finished()
        return finished if self.lost_from is None else list(below(finished, self.lost_from))

    async def run(self) -> None:
        """Queue accepted records in their shards until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._batches:
                await self.sharder.put(self._batches.popleft(), self._waiting)

    def evict_beyond(self, least: Usage) -> int:
        """Evict the queued records beyond *least*, because the partition cannot advance.

        Returns:
            How many records were evicted; they are fetched again when it can advance.
        """
        first = self.first_to_evict(least)
        deliveries = self.sharder.evict(self, first)
        # Also evict records on their way to a shard; otherwise they would arrive there before the evicted ones.
        for queue in (self._waiting, *self._batches):
            deliveries += [delivery for delivery in queue if delivery.offset >= first]
            kept = [delivery for delivery in queue if delivery.offset < first]
            queue.clear()
            queue.extend(kept)
        self.evict(deliveries)
        return len(deliveries)

    # Statistics ---------------------------------------------------------------------

    @property
    def oldest_age(self) -> float | None:
        """Seconds since the oldest incomplete record arrived; None if nothing is incomplete. Safe from any thread."""
        return self._age_of(self.tracker.oldest)

    def _age_of(self, oldest: Delivery | None) -> float | None:
        return None if oldest is None else max(self._clock() - oldest.arrived, 0.0)

    def statistics(self, end: int | None, in_flight: int, paused: str | None) -> PartitionStatistics:
        """Return its figures. Safe from any thread.

        Args:
            end: End of the log; None while unknown.
            in_flight: How many of its records workers are running.
            paused: Why nothing is fetched, as a sentence; None if it is.
        """
        tracker = self.tracker
        oldest = tracker.oldest
        base = self.commits.lag_base
        lag = None
        if end is not None:
            lag = max(end - base, 0)
        buffered = self.held_usage
        return PartitionStatistics(
            topic=self.topic_partition.topic,
            partition=self.topic_partition.partition,
            epoch=self.number,
            position=tracker.position,
            committed=self.commits.acknowledged,
            committable=tracker.committable,
            end_offset=end,
            lag=lag,
            lag_seconds=_lag_seconds(oldest, lag),
            incomplete=len(tracker),
            buffered_records=buffered.records,
            buffered_bytes=buffered.bytes,
            paused=paused,
            oldest_incomplete_age=self._age_of(oldest),
            fetched=tracker.arrived,
            in_flight=in_flight,
            queued=max(buffered.records - in_flight, 0),
            held_back=self.log_end.held_back,
        )


class ObservedPartition(Partition):
    """A partition that reports the outcomes of its deliveries, or keeps their messages; used only if needed."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        number: int,
        start: int,
        *,
        buffer: Buffer,
        counts: TopicCounts,
        sharder: Sharder,
        clock: Callable[[], float],
        completed: Callable[[Delivery], None] | None,
    ) -> None:
        """Make a partition; *completed* is called with each complete delivery."""
        super().__init__(topic_partition, number, start, buffer=buffer, counts=counts, sharder=sharder, clock=clock)
        self.completed = completed

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`."""
        if not Partition.complete(self, delivery):  # super() would make an object per record
            return False
        if delivery.outgoing:
            self.send_later(Outputs.of(delivery))
        if self.completed is not None:
            self.completed(delivery)
        return True


def _lag_seconds(oldest: Delivery | None, lag: int | None) -> float | None:
    """Return the age of the oldest incomplete record; None if nothing is in flight but records are left to read."""
    if oldest is None:
        return 0.0 if lag == 0 else None
    written = oldest.record.timestamp
    if written < 0.0:  # without a timestamp it is -1 ms
        return None
    return max(time.time() - written, 0.0)


def _after(batch: FetchedBatch, position: int) -> FetchedBatch:
    """The part of a batch that is new to an epoch at *position*."""
    first = bisect.bisect_left(batch.records, position, key=operator.attrgetter("offset"))
    return batch._replace(
        records=batch.records[first:], sizes=batch.sizes[first:], next_offset=max(batch.next_offset, position)
    )
