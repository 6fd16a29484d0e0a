"""The tasks of a shuffle: they compute the shards of records before it, and run handlers over the rows after it.

Such rows have no log, no offsets of a single partition, and no end known in advance.
"""

import asyncio
import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import anyio
import pyarrow as pa

from aioshard.core.flow import Usage
from aioshard.core.sharding import identity, key_bytes, shard_key_of
from aioshard.engine.handler import Handler
from aioshard.engine.runtime import Engine
from aioshard.errors import PlanError, RunError
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
from aioshard.records import PartitionInfo, Record, TopicPartition
from aioshard.spark.rows import records_of
from aioshard.spark.task import run_handlers
from aioshard.spark.work import Work

SHARD = "aioshard_shard"
"""Column: rows with the same value are processed by one task, in order."""
MOMENT = "aioshard_moment"
"""Column: the latest timestamp in the record's partition up to and including the record."""

_ENDLESS = 1 << 62
"""End of a partition whose end is not known yet."""
_PART = Usage(2_000, 4 * 1024 * 1024)
"""Maximum size of the parts that a batch of rows is divided into: records, and bytes by their average size. The next
part is read once the engine has taken the records of the last one."""


def with_shards(work: Work, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows with the shard and the moment of each record, for `mapInArrow`.

    Records are sorted by `MOMENT`. If the clocks of a partition's producers disagree, timestamps can go backwards. The
    latest timestamp so far never does, so the offset order within each partition is preserved.

    Args:
        work: The handlers.
        rows: Rows; those of a partition must arrive in offset order.
    """
    shard_of = functools.cache(functools.partial(_sharding, work.load().handlers))
    latest: dict[tuple[str, int], float] = {}
    for batch in rows:
        records = records_of(batch)
        shards = [shard_of(record.topic)(record) for record in records]
        moments = []
        for record in records:
            name = (record.topic, record.partition)
            latest[name] = moment = max(record.timestamp, latest.get(name, record.timestamp))
            moments.append(moment)
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, pa.array(shards, pa.int64()), pa.array(moments, pa.float64())],
            names=[*batch.schema.names, SHARD, MOMENT],
        )


def handlers_over_rows(work: Work, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run an app's handlers over ordered rows and yield outcome rows, for `mapInArrow`."""
    first = next(rows, None)
    if first is None:
        return
    transport = RowTransport(itertools.chain([first], rows), work.load().handlers)
    yield from run_handlers(work, lambda _: transport, transport.awaited_by)
    transport.finish()


def _sharding(handlers: Sequence[Handler], topic: str) -> Callable[[Record], int]:
    """Return the function that shards the records of a topic.

    Its numbers are equal for records that must be processed in order, and almost never for others.
    """
    number = _handler_of(handlers, topic)
    handler = handlers[number]
    shard_key = shard_key_of(handler.shard_by, one_topic=len(handler.topics) == 1 and handler.pattern is None)

    def shard(record: Record) -> int:
        key = identity(shard_key, record)  # if it fails, the record fails when it is processed, as in an app
        if key is None:
            name = b"r%d/%d/%s" % (record.partition, record.offset, topic.encode())
        else:
            name = b"%d:" % number + key_bytes(key)
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big", signed=True)

    return shard


def _handler_of(handlers: Sequence[Handler], topic: str) -> int:
    """Return the number of the handler that takes a topic.

    Raises:
        PlanError: No handler takes it.
    """
    for number, handler in enumerate(handlers):
        if handler.takes(topic):
            return number
    raise PlanError(f"no handler of the app takes rows of topic {topic!r}: leave them out, or add a handler")


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

    def take(self, allowance: AllowanceOf) -> FetchedBatch | Oversized | None:
        """Take the waiting records that the allowance permits."""
        if self.paused or not self.waiting:
            return None
        allowed = allowance(self.topic_partition)
        count = allowed.admitted(size for _, size in self.waiting)
        if not count:
            if allowed.records > 0:
                return Oversized(self.topic_partition, self.waiting[0][1])
            return None
        records, sizes = zip(*(self.waiting.popleft() for _ in range(count)), strict=True)
        first = self.position
        self.position += count
        return FetchedBatch(self.topic_partition, records, sizes, self.position, range(first, self.position))


class RowTransport(Groupless):
    """Presents rows to the engine as one partition per handler; implements `aioshard.ports.Transport`.

    Shuffled rows come from any partition, so their offsets do not show how far a task has progressed. Instead, each
    record gets a position in the order of arrival, and the engine tracks these positions. Handlers see the records
    with their own coordinates.

    A thread reads the rows, while Spark's thread takes the outcomes.

    Invariants:
        * The records of a handler arrive in the order of the rows.
        * A position is never delivered twice: nothing can be read again.
        * It reads ahead at most two parts of about `_PART`, and one Spark batch.
    """

    trouble = last_heartbeat = None
    """See `Transport.trouble` and `Transport.last_heartbeat`."""
    missing_topics = ()
    """See `Transport.missing_topics`."""
    slow_join = group_protocol = None
    """See `Transport.slow_join` and `Transport.group_protocol`."""

    def __init__(self, rows: Iterator[pa.RecordBatch], handlers: Sequence[Handler]) -> None:
        """Create a transport; nothing is read yet.

        Args:
            rows: The rows.
            handlers: The handlers of the app; each topic of the rows belongs to one of them.
        """
        super().__init__("rows", {})
        self._rows = rows
        self._parts = (records_of(part) for batch in rows for part in _parts(batch))
        self._handlers = handlers
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._lane_of = functools.cache(self._find_lane)
        self._exhausted = False
        self._woken = False
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "aioshard rows")
        self._reading: asyncio.Future[list[Record] | None] | None = None

    def finish(self) -> None:
        """Read and discard the remaining rows; otherwise the next task of this worker would read them."""
        self._thread.shutdown()
        deque(self._rows, maxlen=0)

    # Progress ---------------------------------------------------------------------------

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the ends of the partitions once the last row has arrived; empty before that."""
        if not self._exhausted:
            return {}
        return {name: lane.position + len(lane.waiting) for name, lane in self._lanes.items()}

    def awaited_by(self, engine: Engine) -> bool:
        """Return whether the engine has completed all records and more may arrive; give it the ends once known."""
        engine.rebalance.ends.update(self.ends())
        return not self._exhausted and not self._waiting() and not engine.buffer.records

    # Lifecycle --------------------------------------------------------------------------

    async def start(
        self,
        topics: Collection[str],  # noqa: ARG002
        pattern: str | None,  # noqa: ARG002
        listener: GroupListener,
        *,
        needs_all: bool = True,  # noqa: ARG002
    ) -> None:
        """See `Transport.start`; ignores *topics* and *pattern* and reads the rows.

        Raises:
            RunError: Spark's rows could not be read to the end.
            PlanError: The rows belong to a topic that no handler takes.
        """
        self._listener = listener
        self._read_ahead()
        await self._arrived.wait()
        self._read_ahead()
        if not self._lanes:
            listener.assigned([], self.membership())

    async def close(self) -> None:
        """See `Transport.close`."""

    # Records ----------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`.

        Raises:
            RunError: Spark's rows could not be read to the end.
            PlanError: The rows belong to a topic that no handler takes.
        """
        self._woken = False
        with anyio.move_on_after(timeout):
            while not self._woken:
                self._arrived.clear()
                self._read_ahead()
                # One lane per call, because its records reduce the room left for the others. The lanes take turns.
                for partition, lane in tuple(self._lanes.items()):
                    if (item := lane.take(allowance)) is not None:
                        self._lanes[partition] = self._lanes.pop(partition)
                        self._read_ahead()
                        return [item]
                await self._arrived.wait()
        return ()

    def _read_ahead(self) -> None:
        """Add the records that were read to the lanes of their handlers; read more unless some are waiting.

        New lanes are assigned to the engine.
        """
        if self._reading is not None and self._reading.done():
            try:
                records = self._reading.result()
            except Exception as error:
                raise RunError(f"Spark's rows could not be read to the end: {error!r}") from error
            self._reading = None
            self._exhausted = records is None
            assigned = len(self._lanes)
            for record in records or ():
                self._lane_of(record.topic).waiting.append(
                    (record, record_size(record.key, record.value, record.headers))
                )
            if len(self._lanes) > assigned:
                self._listener.assigned([*self._lanes], self.membership())
        if self._reading is None and not self._exhausted and not self._waiting():
            self._reading = asyncio.get_running_loop().run_in_executor(self._thread, next, self._parts, None)
            self._reading.add_done_callback(lambda _: self._arrived.set())

    def _waiting(self) -> bool:
        """Return whether records wait for room in the engine."""
        return any(lane.waiting for lane in self._lanes.values())

    def _find_lane(self, topic: str) -> _Lane:
        handler = self._handlers[_handler_of(self._handlers, topic)]
        lane = next((lane for name, lane in self._lanes.items() if handler.takes(name.topic)), None)
        if lane is None:
            name = TopicPartition(topic, 0)
            lane = self._lanes[name] = _Lane(name)
            self._committed[name] = Committed(0, "")
        return lane

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        self._arrived.set()

    # Positions --------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        lane = self._lanes.get(topic_partition)
        return None if lane is None else lane.position

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`; None until the last row has arrived."""
        return self.ends().get(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        for partition in partitions:
            self._lanes[partition].paused = True

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`."""
        for partition in partitions:
            self._lanes[partition].paused = False
        self._arrived.set()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`; does nothing, because the engine only seeks to the current position."""

    # Group and topic metadata -------------------------------------------------------------

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`; the end is unknown until the last row has arrived."""
        return {name: LogRange(0, ends.get(name, _ENDLESS)) for ends in (self.ends(),) for name in partitions}

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:  # noqa: ARG002
        """See `Transport.partitions`; each handler has one."""
        return {0: PartitionInfo(0)}

    async def creates_topics(self) -> None:
        """See `Transport.creates_topics`; rows come without brokers."""

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`; rows do not have topics that could be listed."""
        return frozenset()
