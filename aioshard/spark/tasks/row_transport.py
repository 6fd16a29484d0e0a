"""A transport over rows from Spark: it has no log, no offsets of a single partition, and no end known in advance."""

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

import anyio
import pyarrow as pa

from aioshard.core.flow import Usage
from aioshard.errors import DrainError, PlanError
from aioshard.handlers import Registration
from aioshard.kafka.groupless import Groupless
from aioshard.ports import (
    AllowanceOf,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Oversized,
    record_size,
)
from aioshard.records import Record, TopicPartition
from aioshard.spark.tasks.row_records import records_of

__all__ = ["RowFeed", "RowTransport"]

_ENDLESS = 1 << 62
"""End of a partition whose end is not known yet."""
_PART = Usage(2_000, 4 * 1024 * 1024)
"""Maximum size of the parts that a batch of rows is divided into: records, and bytes by their average size."""
_PARTS = 8
"""Parts that may wait between Spark's rows and the event loop."""
_IN_HAND = Usage(10_000, 32 * 1024 * 1024)
"""Records and bytes that may wait for room in the engine before reading pauses."""


class RowFeed:
    """Reads Spark's rows in its own thread, while Spark's thread takes the outcomes.

    Invariants:
        * Every record that was read is taken, in the order of the rows, unless the feed is finished earlier.
        * It reads ahead at most `_PARTS` parts of about `_PART`, plus one Spark batch.
    """

    def __init__(self, rows: Iterator[pa.RecordBatch]) -> None:
        """Wait for the first rows; a thread reads the rest."""
        self._ready: queue.Queue[list[Record] | None] = queue.Queue(_PARTS)
        self._unwanted = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None
        self.first = next(rows, None)
        """The first rows, or None for an empty input."""
        self._thread = threading.Thread(target=self._read, args=(rows,), name="aioshard rows", daemon=True)

    def start(self, arrived: asyncio.Event) -> None:
        """Start reading; call this in the event loop of *arrived*, which is set whenever rows arrive."""
        self._loop, self._arrived = asyncio.get_running_loop(), arrived
        self._thread.start()

    def _read(self, rows: Iterator[pa.RecordBatch]) -> None:
        try:
            for batch in rows:
                for part in _parts(batch):
                    if self._unwanted.is_set():
                        break  # skip the records, but read all rows to their end: Spark reuses the worker
                    self._put(records_of(part))
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            self._error = error
        finally:
            self._put(None)

    def _put(self, records: list[Record] | None) -> None:
        self._ready.put(records)
        if self._loop is not None and self._arrived is not None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed, so nothing waits any longer
                self._loop.call_soon_threadsafe(self._arrived.set)

    @property
    def empty(self) -> bool:
        """Whether all rows that have arrived so far were taken."""
        return self._ready.empty()

    def take(self) -> list[Record] | None:
        """Return the next records, or None at the end; call this only if the feed is not `empty`.

        Raises:
            DrainError: Spark's rows could not be read to the end.
        """
        found = self._ready.get_nowait()
        if found is None and self._error is not None:
            raise DrainError(f"Spark's rows ended before their end: {self._error!r}") from self._error
        return found

    def finish(self) -> None:
        """Read and discard the remaining rows; return once all are read."""
        self._unwanted.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.1)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide a batch into parts small enough to read ahead."""
    size = max(min(_PART.records, _PART.bytes * len(batch) // max(batch.nbytes, 1)), 1)
    return (batch.slice(begin, size) for begin in range(0, len(batch), size))


class _Lane:
    """The records of one handler, numbered in order of arrival."""

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.waiting: deque[tuple[Record, int]] = deque()
        self.position = 0
        self.paused = True
        self.settled = False
        """Whether the engine has opened the partition, which it does by resuming it."""

    @property
    def end(self) -> int:
        """Number of records that have arrived so far."""
        return self.position + len(self.waiting)

    def take(self, allowance: AllowanceOf) -> FetchedBatch | Oversized | None:
        """Take the waiting records that the allowance permits."""
        if self.paused or not self.waiting:
            return None
        allowed = allowance(self.topic_partition)
        if allowed.records <= 0:
            return None
        room, alone = allowed.bytes, allowed.alone
        records: list[Record] = []
        sizes: list[int] = []
        waiting = self.waiting
        while waiting and len(records) < allowed.records and (waiting[0][1] <= room or alone):
            record, size = waiting.popleft()
            records.append(record)
            sizes.append(size)
            room, alone = room - size, False
        if not records:
            return Oversized(self.topic_partition, waiting[0][1])
        places = range(self.position, self.position + len(records))
        self.position = places.stop
        return FetchedBatch(self.topic_partition, records, sizes, places.stop, places)


class RowTransport(Groupless):
    """Presents rows to the engine as one partition per handler; implements `aioshard.ports.Transport`.

    Shuffled rows come from any partition, so their offsets do not show how far a task has progressed. Instead, each
    record gets a position in the order of arrival, and the engine tracks these positions. Handlers see the records
    with their own coordinates.

    Invariants:
        * The records of a handler arrive in the order of the rows.
        * A position is never delivered twice: nothing can be read again.
    """

    def __init__(self, feed: RowFeed, handlers: Sequence[Registration]) -> None:
        """Create a transport; nothing is read yet.

        Args:
            feed: The rows.
            handlers: The handlers of the app; each topic of the rows belongs to one of them.
        """
        super().__init__("rows", {})
        self._feed = feed
        self._handlers = handlers
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._unassigned: list[_Lane] = []
        self._records = self._bytes = 0  # waiting in the lanes
        self._listener: GroupListener | None = None
        self._exhausted = False
        self._woken = False
        self._arrived = asyncio.Event()

    # Progress ---------------------------------------------------------------------------

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the ends of the partitions once the last row has arrived; empty before that."""
        return {lane.topic_partition: lane.end for lane in self._lanes.values()} if self._exhausted else {}

    @property
    def waiting(self) -> bool:
        """Whether the engine is waiting for Spark."""
        return not self._exhausted and self._feed.empty and not any(lane.waiting for lane in self._lanes.values())

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        return None

    # Life -------------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:  # noqa: ARG002
        """See `Transport.start`; ignores *topics* and *pattern* and reads the rows.

        Raises:
            PlanError: The rows belong to a topic that no handler takes.
        """
        self._listener = listener
        if self._feed.first is None:
            self._exhausted = True
        else:
            self._sort(records_of(self._feed.first))
            self._feed.start(self._arrived)
        self._assign()

    async def close(self) -> None:
        """See `Transport.close`."""

    def _assign(self) -> None:
        """Assign lanes whose first records have arrived to the engine, one assignment after another."""
        assert self._listener is not None  # noqa: S101 - started
        lanes, self._unassigned = self._unassigned, []
        self._listener.assigned([lane.topic_partition for lane in lanes], self.membership())

    # Records ----------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`.

        Raises:
            DrainError: Spark's rows could not be read to the end.
            PlanError: The rows belong to a topic that no handler takes.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        while True:
            self._arrived.clear()
            self._read_on()
            # One lane per call, because its records reduce the room left for the others. The lanes take turns.
            for name, lane in tuple(self._lanes.items()):
                taken = lane.take(allowance)
                if taken is not None:
                    self._lanes[name] = self._lanes.pop(name)
                    if isinstance(taken, FetchedBatch):
                        self._records -= len(taken.records)
                        self._bytes -= sum(taken.sizes)
                    return [taken]
            remaining = deadline - loop.time()
            if self._woken or remaining <= 0:
                return ()
            with anyio.move_on_after(remaining):
                await self._arrived.wait()

    def _read_on(self) -> None:
        while not self._exhausted and not self._feed.empty:
            if self._records >= _IN_HAND.records or self._bytes >= _IN_HAND.bytes:
                break
            records = self._feed.take()
            if records is None:
                self._exhausted = True
            else:
                self._sort(records)
        if self._unassigned and all(lane.settled for lane in self._lanes.values() if lane not in self._unassigned):
            self._assign()

    def _sort(self, records: list[Record]) -> None:
        """Add each record to the lane of its handler."""
        lanes = self._lane_of
        for record in records:
            lane = lanes.get(record.topic) or self._find_lane(record.topic)
            size = record_size(record.key, record.value, record.headers)
            lane.waiting.append((record, size))
            self._bytes += size
        self._records += len(records)

    def _find_lane(self, topic: str) -> _Lane:
        handler = next((one for one in self._handlers if one.takes(topic)), None)
        if handler is None:
            _refuse(topic)
        lane = self._lanes.get(handler.name)
        if lane is None:
            lane = self._lanes[handler.name] = _Lane(TopicPartition(topic, 0))
            self._committed[lane.topic_partition] = Committed(0, "")
            self._unassigned.append(lane)
        self._lane_of[topic] = lane
        return lane

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        self._arrived.set()

    # Positions --------------------------------------------------------------------------

    def _named(self, partitions: Collection[TopicPartition]) -> Iterator[_Lane]:
        return (lane for lane in self._lanes.values() if lane.topic_partition in partitions)

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return next((lane.position for lane in self._named([topic_partition])), None)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`; None until the last row has arrived."""
        return self.ends().get(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        for lane in self._named(partitions):
            lane.paused = True

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`."""
        for lane in self._named(partitions):
            lane.paused, lane.settled = False, True
        self._arrived.set()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`; does nothing, because the engine only seeks to the current position."""

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """See `Transport.adjust_prefetch`; does nothing, because reading ahead has its own limits."""

    # Group and topic metadata -------------------------------------------------------------

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`; the end is unknown until the last row has arrived."""
        ends = self.ends()
        return {name: LogRange(0, ends.get(name, _ENDLESS)) for name in partitions}

    async def partitions(self, topic: str) -> frozenset[int]:  # noqa: ARG002
        """See `Transport.partitions`; each handler has one."""
        return frozenset([0])

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`; rows do not have topics that could be listed."""
        return frozenset()


def _refuse(topic: str) -> NoReturn:
    raise PlanError(
        f"rows of topic {topic!r} were found, which no handler of the app takes: leave them out, or give the topic to "
        "a handler"
    )
