"""The pump, which calls the client, and the fetch task of each assigned partition."""

import asyncio
import bisect
import logging
import operator
from collections import deque
from collections.abc import Callable, Mapping

from aioshard.core.finished_offsets import beyond, holds
from aioshard.core.flow import Usage, minimum
from aioshard.engine.admission import Admission
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.feed import Feed
from aioshard.engine.log_fields import partition_fields
from aioshard.errors import OffsetOutOfRangeError, OffsetRegressionError
from aioshard.ports import Fault, FetchedBatch, Transport
from aioshard.records import TopicPartition

__all__ = ["Fetcher", "Pump"]

logger = logging.getLogger("aioshard.engine.fetcher")

_POLL_TIMEOUT = 1.0
_LOOK_INTERVAL = 0.5


class Fetcher:
    """The fetch task of one partition: turns batches into deliveries and feeds them to the shards.

    When a fixed shard is full, only this partition waits.
    """

    def __init__(self, epoch: Epoch, feed: Feed, clock: Callable[[], float]) -> None:
        self.epoch = epoch
        self.feed = feed
        self._clock = clock
        self._batches: deque[list[Delivery]] = deque()
        self._waiting: deque[Delivery] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[object] | None = None
        self._called_back = False

    @property
    def wanted(self) -> int:
        """See `Feed.wanted`."""
        return self.feed.wanted

    def when_wanted(self, wake: Callable[[], None]) -> int:
        """See `Feed.when_wanted`."""
        return self.feed.when_wanted(wake)

    def no_room(self) -> None:
        """See `Feed.no_room`."""
        self.feed.no_room()

    @property
    def has_unfed(self) -> bool:
        """Whether the task has batches left to feed; False while it waits for a full shard."""
        return bool(self._batches) and not self._waiting

    def accept(self, batch: FetchedBatch) -> int:
        """Track a batch before anything can await, and leave the rest to the task.

        Returns:
            How many of its records this process had run before.
        """
        epoch = self.epoch
        now = self._clock()
        if epoch.shed or epoch.fetching_again:
            self._feed(epoch.take_back(batch, now))
            batch = _after(batch, epoch.tracker.position)
        deliveries = [
            Delivery(record, epoch, None, size, now) for record, size in zip(batch.records, batch.sizes, strict=True)
        ]
        if batch.places is not None:
            epoch.one_way = True
            for delivery, place in zip(deliveries, batch.places, strict=True):
                delivery.offset = place
        epoch.take_in(batch, deliveries)
        epoch.trouble = None
        self._feed(deliveries)
        rerun = epoch.rerun
        if rerun is None:
            return 0
        if batch.next_offset > rerun.highest_started:
            epoch.rerun = None
        return sum(1 for record in batch.records if rerun.counts(record))

    def _feed(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._batches.append(deliveries)
            self._arrived.set()

    async def run(self) -> None:
        """Feed accepted records to the shards until cancelled."""
        self._task = task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a task
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._batches or self._waiting:
                try:
                    if self._waiting:
                        await self.feed.put_waiting(self._waiting)
                    else:
                        await self.feed.put(self._batches.popleft(), self._waiting)
                except asyncio.CancelledError:
                    if not self._called_back or task.uncancel():
                        raise
                    self._called_back = False

    def give_back(self, least: Usage) -> int:
        """Evict the queued records beyond *least*, because the partition cannot advance.

        Returns:
            How many records were evicted; they are fetched again when it can advance.
        """
        first = self.epoch.shed_from(least)
        deliveries = self.feed.give_back(self.epoch, first)
        # Also evict records on their way to a shard; otherwise they would arrive there before the evicted ones.
        if self._waiting and self._task is not None and not self._called_back:
            self._called_back = True
            self._task.cancel()
        for on_its_way in (self._waiting, *self._batches):
            deliveries += [delivery for delivery in on_its_way if delivery.offset >= first]
            kept = [delivery for delivery in on_its_way if delivery.offset < first]
            on_its_way.clear()
            on_its_way.extend(kept)
        self.epoch.give_back(deliveries)
        return len(deliveries)


def _after(batch: FetchedBatch, position: int) -> FetchedBatch:
    """The part of a batch that is new to an epoch at *position*."""
    first = bisect.bisect_left(batch.records, position, key=operator.attrgetter("offset"))
    return FetchedBatch(
        batch.topic_partition, batch.records[first:], batch.sizes[first:], max(batch.next_offset, position)
    )


class Pump:
    """The one task that calls the client, for all partitions.

    With a `getmany` per partition, every response would wake all of them: free up to about 32 partitions, seven times
    the cost at 512. The pump hands each batch to its partition's fetch task.
    """

    def __init__(
        self,
        buffer: Buffer,
        fetchers: Mapping[TopicPartition, Fetcher],
        clock: Callable[[], float],
        admission: Admission,
        out_of_range: Callable[[Epoch, OffsetOutOfRangeError | OffsetRegressionError], None],
    ) -> None:
        """Make a pump; `run` is its task, once per life of a client.

        Args:
            buffer: The records buffered for all partitions.
            fetchers: Fetchers of the assigned partitions; owned by the rebalance.
            clock: Loop time.
            admission: Decides how much of each partition may be taken in.
            out_of_range: Called when an epoch cannot continue because its position is not in the log.
        """
        self.replayed = 0
        """Records taken in that this process had run before."""
        self.already_done = 0
        """Records fetched but not taken in, because a commit had noted them as finished."""
        self.turns = 0
        """How often a poll of the client has returned."""
        self._buffer = buffer
        self._fetchers = fetchers
        self._clock = clock
        self._admission = admission
        self._out_of_range = out_of_range
        self._look_at = 0.0

    async def run(self, transport: Transport) -> None:
        """Poll until cancelled, or until the client is lost.

        Raises:
            TransportError: From `Transport.poll`.
        """
        while True:
            self._make_room(transport)
            taken = await transport.poll(self._admission.allowance, _POLL_TIMEOUT)
            self.turns += 1
            for item in taken:
                fetcher = self._fetchers.get(item.topic_partition)
                if fetcher is None or not fetcher.epoch.is_open:
                    continue
                if isinstance(item, FetchedBatch):
                    self._accept(fetcher, item)
                elif isinstance(item, Fault):
                    self._fault(fetcher.epoch, item)
                else:
                    self._admission.keep_room_for(item, fetcher.epoch)
            if taken:
                await asyncio.sleep(0)  # a client that has data never suspends

    def _make_room(self, transport: Transport) -> None:
        """Evict records of partitions that cannot advance, down to a minimum; fetch them again once there is room."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_INTERVAL
        least = minimum(self._buffer.bounds)
        for topic_partition, fetcher in self._fetchers.items():
            epoch = fetcher.epoch
            if not epoch.is_open or epoch.one_way:
                continue
            stuck, held = self._admission.stuck(epoch), epoch.held_usage
            has_room = held.records < least.records and held.bytes < least.bytes
            if epoch.shed and (has_room or not stuck) and not epoch.fetching_again:
                epoch.fetching_again = True
                transport.seek(topic_partition, min(epoch.shed))
            if stuck and (held.records > 2 * least.records or held.bytes > 2 * least.bytes):
                records = fetcher.give_back(least)
                if records:
                    fields = partition_fields("gave_back", topic_partition, records=records)
                    message = "%s cannot advance and gives back %d record(s)"
                    logger.warning(message, topic_partition, records, extra=fields)

    def _accept(self, fetcher: Fetcher, batch: FetchedBatch) -> None:
        epoch = fetcher.epoch
        self._admission.taken(epoch)
        if epoch.inherited:
            batch = self._without_finished(epoch, batch)
        try:
            self.replayed += fetcher.accept(batch)
        except OffsetRegressionError as error:
            self._out_of_range(epoch, error)

    def _without_finished(self, epoch: Epoch, batch: FetchedBatch) -> FetchedBatch:
        """Remove the records that a commit had noted as finished from a batch: they are skipped like a hole."""
        kept = [place for place, record in enumerate(batch.records) if not holds(epoch.inherited, record.offset)]
        self.already_done += len(batch.records) - len(kept)
        epoch.inherited = beyond(epoch.inherited, batch.next_offset)
        records = [batch.records[place] for place in kept]
        return batch._replace(records=records, sizes=[batch.sizes[place] for place in kept])

    def _fault(self, epoch: Epoch, fault: Fault) -> None:
        if isinstance(fault.error, OffsetOutOfRangeError):
            self._out_of_range(epoch, fault.error)
        elif epoch.note_fault(str(fault.error), self._clock()):
            fields = partition_fields("unreadable", epoch.topic_partition)
            logger.error("%s cannot be read: %s", epoch.topic_partition, fault.error, extra=fields)
