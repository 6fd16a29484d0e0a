"""A partition that is ours: its epoch, the fetch task that feeds the shards, and its commits."""

import asyncio
import bisect
import operator
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import beyond, holds, records_with_room
from aioshard.core.flow import Usage
from aioshard.core.ownership import Claim
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch, Rerun
from aioshard.engine.feed import Feed
from aioshard.engine.trouble import Trouble
from aioshard.ports import Committed, FetchedBatch, Membership
from aioshard.records import TopicPartition

_FAULT_LASTS = 5.0
"""Seconds; a client tries to read an unreadable partition about once per second."""
_METADATA_OVERHEAD = 195
"""Maximum characters of a metadata text besides the finished runs, including those that deflate may add."""


class Due(NamedTuple):
    """The commit to send for a partition, as of one moment."""

    committed: Committed
    completed: int
    """How many records had completed at that moment."""


class Partition(Epoch):
    """One uninterrupted ownership of a partition: its records, its fetch task, its commits and our claim to it.

    The pump calls `accept`, the fetch task (`run`) feeds the shards, the committer asks for the due commit, and the
    rebalance opens, drains and ends it. A full fixed shard makes only this partition wait.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        number: int,
        start: int,
        *,
        buffer: Buffer,
        counts: TopicCounts,
        feed: Feed,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(topic_partition, number, start, buffer, counts)
        self.feed = feed
        self.task: asyncio.Task[object] | None = None
        """The fetch task."""
        self.membership: Membership | None = None
        """Membership of the latest assignment; None until the partition is certainly ours, and once it is revoked."""
        self.claim: Claim | None = None
        """Our knowledge of the partition when it was revoked."""
        self.rerun: Rerun | None = None
        self.trouble = Trouble(clock)
        """Why the client cannot read the partition; see `fault`."""
        self.outside_log: int | None = None
        """A position that is not in the log, while the rebalance finds out where to resume; otherwise None."""
        self.log_end: int | None = None
        """End of the log, as last requested; the client may know of a later one."""
        self.held_back = 0
        """How many offsets beyond that end could not be read, because a transaction was open."""
        self.acknowledged: int | None = None
        """The committed offset that was last acknowledged to us; None without one."""
        self.first_commit: FirstCommit | None = None
        """First-commit marker that our commits carry besides the completions; see `aioshard.core.ownership`."""
        self.committed_completions = 0
        """How many records had completed as of the last acknowledged commit."""
        self.uncommitted = 0
        """How many records had finished without an acknowledged commit when the committer disowned the partition."""
        self._clock = clock
        self._reported_at = 0.0
        self._batches: deque[list[Delivery]] = deque()
        self._waiting: deque[Delivery] = deque()
        self._arrived = asyncio.Event()

    # Faults -------------------------------------------------------------------------

    def fault(self, now: float) -> str | None:
        """Why the partition cannot be read now; a fault ends when the client has not repeated it for a while."""
        return None if now - self._reported_at > _FAULT_LASTS else self.trouble.sentence(now)

    def report_fault(self, why: str) -> bool:
        """Record that the partition cannot be read; return whether that is new."""
        now = self._clock()
        if self.fault(now) is None:
            self.trouble.end()
        self._reported_at = now
        return self.trouble.report(why)

    # Fetching -----------------------------------------------------------------------

    @property
    def has_unfed(self) -> bool:
        """Whether the fetch task has batches left to feed; False while it waits for a full shard."""
        return bool(self._batches) and not self._waiting

    def accept(self, batch: FetchedBatch) -> int:
        """Track a batch before anything can await, and leave the rest to the fetch task.

        Returns:
            How many of its records this process had run before.

        Raises:
            OffsetRegressionError: The client went back; see `OffsetTracker.track`.
        """
        now = self._clock()
        if self.evicted or self.fetching_again:
            self._feed(self.readmit(batch, now))
            batch = _after(batch, self.tracker.position)
        deliveries = [
            Delivery(record, self, None, size, now) for record, size in zip(batch.records, batch.sizes, strict=True)
        ]
        if batch.places is not None:
            self.is_seekable = False
            for delivery, position in zip(deliveries, batch.places, strict=True):
                delivery.offset = position
        self.take_in(batch, deliveries)
        self.trouble.end()
        self._feed(deliveries)
        rerun = self.rerun
        if rerun is None:
            return 0
        if batch.next_offset > rerun.highest_started:
            self.rerun = None
        return sum(1 for record in batch.records if rerun.counts(record))

    def without_finished(self, batch: FetchedBatch) -> FetchedBatch:
        """Return a batch without the records that the committed metadata lists as finished; they are holes now."""
        kept = [index for index, record in enumerate(batch.records) if not holds(self.finished_ahead, record.offset)]
        self.finished_ahead = beyond(self.finished_ahead, batch.next_offset)
        return batch._replace(
            records=[batch.records[index] for index in kept], sizes=[batch.sizes[index] for index in kept]
        )

    def _feed(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._batches.append(deliveries)
            self._arrived.set()

    async def run(self) -> None:
        """Feed accepted records to the shards until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._batches:
                await self.feed.put(self._batches.popleft(), self._waiting)

    def evict_beyond(self, least: Usage) -> int:
        """Evict the queued records beyond *least*, because the partition cannot advance.

        Returns:
            How many records were evicted; they are fetched again when it can advance.
        """
        first = self.first_to_evict(least)
        deliveries = self.feed.evict(self, first)
        # Also evict records on their way to a shard; otherwise they would arrive there before the evicted ones.
        for queue in (self._waiting, *self._batches):
            deliveries += [delivery for delivery in queue if delivery.offset >= first]
            kept = [delivery for delivery in queue if delivery.offset < first]
            queue.clear()
            queue.extend(kept)
        self.evict(deliveries)
        return len(deliveries)

    # Committing ---------------------------------------------------------------------

    @property
    def lag_base(self) -> int:
        """The offset from which its lag counts."""
        return self.tracker.committable if self.acknowledged is None else self.acknowledged

    def is_due(self, metadata_limit: int) -> bool:
        """Whether there is an offset to commit, or completions beyond it.

        Args:
            metadata_limit: Longest text that the broker stores with an offset; 0 if it stores none.
        """
        tracker = self.tracker
        if tracker.committable != self.acknowledged or self.unsent:
            return True
        # The committable offset is unchanged, so all completions since then lie beyond it.
        return bool(
            tracker and tracker.completed != self.committed_completions and metadata_limit > 0 and self.is_seekable
        )

    def due(self, metadata_limit: int) -> Due:
        """Return the commit to send now: the offset and the records finished beyond it, from the same moment."""
        offset, text = self.tracker.committable, ""
        if metadata_limit:
            finished = tuple(self.finished()) if self.is_seekable else ()
            text = CommitMetadata(first=self.first_commit, finished=finished).text(offset, metadata_limit)
        return Due(Committed(offset, text), self.tracker.completed)

    def lists_all_finished(self, metadata_limit: int) -> bool:
        """Whether a commit sent now would list every record that has finished beyond the committable offset."""
        offset, text = self.due(metadata_limit).committed
        listed = CommitMetadata.read(text, offset).finished
        return metadata_limit > 0 and self.is_seekable and list(listed) == self.finished()

    def acknowledge(self, due: Due) -> None:
        """Record that the broker has stored a commit."""
        self.acknowledged = due.committed.offset
        self.committed_completions = due.completed

    def metadata_room(self, metadata_limit: int) -> int | None:
        """How many more records may be taken in so that all completions fit into a commit; None for any number."""
        if not metadata_limit or not self.is_seekable:
            return None
        tracker, ahead = self.tracker, self.finished_ahead
        end = max(tracker.position, ahead[-1].end) if ahead else tracker.position
        units = max(metadata_limit - _METADATA_OVERHEAD, 0)
        more = records_with_room(end - tracker.committable, len(tracker) + len(ahead), units)
        # Up to the end of an earlier owner's completions, the text does not grow: it already has the gaps there.
        return max(more, end - tracker.position)


class ObservedPartition(Partition):
    """A partition that reports the outcomes of its deliveries, or keeps their messages; used only if needed."""

    completed: Callable[[Delivery], None] | None

    def complete(self, delivery: Delivery) -> bool:
        """See `Epoch.complete`."""
        if not Partition.complete(self, delivery):  # super() would make an object per record
            return False
        if delivery.outgoing:
            self.send_later(delivery.outgoing)
        if self.completed is not None:
            self.completed(delivery)
        return True


def _after(batch: FetchedBatch, position: int) -> FetchedBatch:
    """The part of a batch that is new to an epoch at *position*."""
    first = bisect.bisect_left(batch.records, position, key=operator.attrgetter("offset"))
    return FetchedBatch(
        batch.topic_partition, batch.records[first:], batch.sizes[first:], max(batch.next_offset, position)
    )
