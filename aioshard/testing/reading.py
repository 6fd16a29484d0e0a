"""The reading side of one client: its partitions, their positions, and the next records."""

from collections.abc import Collection
from typing import Literal, NamedTuple

from aioshard.errors import OffsetOutOfRangeError, StateError, TransportError
from aioshard.ports import Allowance, AllowanceOf, Fault, FetchedBatch, LogRange, Oversized, record_size
from aioshard.records import Record, TopicPartition
from aioshard.testing.broker import InMemoryBroker
from aioshard.testing.log import PartitionLog

__all__ = ["Found", "IsolationLevel", "Reading"]

IsolationLevel = Literal["read_committed", "read_uncommitted"]

_FAULT_INTERVAL = 1.0
"""Seconds after which a persistent fault is reported again; a client retries a failed fetch with backoff."""


class Found(NamedTuple):
    """The result of scanning all partitions."""

    new: list[FetchedBatch | Fault | Oversized]
    known: list[FetchedBatch | Fault | Oversized]
    """Oversized records that were reported before; they do not end a poll."""


class Reading:
    """The partitions assigned to a client, and its position in each.

    Synchronous, owned by one `InMemoryTransport`.

    Invariants:
        * A newly assigned partition is paused and has no position.
        * Records are returned and the position is moved in one step.
    """

    def __init__(
        self,
        broker: InMemoryBroker,
        isolation_level: IsolationLevel,
        max_batch_records: int,
        max_fetch_offsets: int | None,
    ) -> None:
        self._broker = broker
        self._read_committed = isolation_level == "read_committed"
        self._max_batch_records = max_batch_records
        self._max_fetch_offsets = max_fetch_offsets
        self._positions: dict[TopicPartition, int | None] = {}
        self._paused: set[TopicPartition] = set()
        self._ends: dict[TopicPartition, int] = {}
        self._quiet_until: dict[TopicPartition, float] = {}
        self._oversized: dict[TopicPartition, int] = {}

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The currently assigned partitions, sorted."""
        return tuple(sorted(self._positions))

    def give(self, partitions: Collection[TopicPartition]) -> None:
        """Replace the assignment; all partitions start paused."""
        self.take_all()
        self._positions = dict.fromkeys(partitions)
        self._paused = set(partitions)

    def take_all(self) -> None:
        """Drop every partition."""
        self._positions = {}
        self._paused = set()
        self._ends = {}
        self._quiet_until = {}
        self._oversized = {}

    def position(self, topic_partition: TopicPartition) -> int | None:
        """Return the next offset to read; None before a `seek`."""
        return self._positions.get(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """Return the readable end of the log as of the last scan."""
        return self._ends.get(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading these partitions until they are resumed."""
        self._paused.update(partition for partition in partitions if partition in self._positions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Resume reading these partitions.

        Raises:
            StateError: One of them is assigned but has no position.
        """
        for topic_partition in partitions:
            if topic_partition in self._positions and self._positions[topic_partition] is None:
                message = f"{topic_partition} was resumed before it was seeked: seek to where it goes on first"
                raise StateError(message)
        self._paused.difference_update(partitions)

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set a position."""
        if topic_partition in self._positions:
            self._positions[topic_partition] = offset
            self._quiet_until.pop(topic_partition, None)

    def log_range(self, topic_partition: TopicPartition) -> LogRange:
        """Return the current start and readable end of a log."""
        log = self._broker.log(*topic_partition)
        return LogRange(log.start, self._readable_end(log))

    def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """Return the first readable offset at or after a time, or None."""
        log = self._broker.log(*topic_partition)
        readable = log.read(log.start, self._readable_end(log))
        return next((record.offset for record in readable if record.timestamp >= timestamp), None)

    def next_look(self, now: float) -> float | None:
        """Return when a fault is due to be reported again, or None."""
        return min((when for when in self._quiet_until.values() if when > now), default=None)

    def collect(self, allowance: AllowanceOf, now: float) -> Found:
        """Fetch the readable records of every partition that is not paused, within their allowances.

        Records fetched from one partition count against the allowances of the others, because all allowances are those
        of this moment. A partition with more records than could be fetched goes last the next time.
        """
        found = Found([], [])
        taken = Allowance(0, 0)
        for topic_partition in tuple(self._positions):
            if topic_partition in self._paused or not self._broker.has_leader(topic_partition):
                continue
            log = self._broker.log(*topic_partition)
            position = self._positions[topic_partition]
            error = self._error(log, position)
            if error is not None:
                self._report(topic_partition, error, allowance, now, found)
                continue
            self._quiet_until.pop(topic_partition, None)
            allowed = allowance(topic_partition)
            if not allowed.records and topic_partition in self._ends:
                continue  # like a client with a full buffer: it fetches nothing, and learns no end
            end = self._ends[topic_partition] = self._readable_end(log)
            if position is None or position >= end:
                continue
            item = self._take(log, position, end, allowed, taken)
            if isinstance(item, FetchedBatch):
                taken = Allowance(taken.records + len(item.records), taken.bytes + sum(item.sizes))
                found.new.append(item)
            elif item is not None:
                known = self._oversized.get(topic_partition) == position
                (found.known if known else found.new).append(item)
                self._oversized[topic_partition] = position
        return found

    def _report(
        self, topic_partition: TopicPartition, error: TransportError, allowance: AllowanceOf, now: float, found: Found
    ) -> None:
        if now >= self._quiet_until.get(topic_partition, now) and allowance(topic_partition).records > 0:
            self._quiet_until[topic_partition] = now + _FAULT_INTERVAL
            found.new.append(Fault(topic_partition, error))

    def _error(self, log: PartitionLog, position: int | None) -> TransportError | None:
        topic_partition = log.topic_partition
        if (fault := self._broker.fault(topic_partition)) is not None:
            return fault
        if position is not None and not log.start <= position <= log.end:
            return OffsetOutOfRangeError(topic_partition, position)
        return None

    def _take(
        self, log: PartitionLog, position: int, end: int, room: Allowance, taken: Allowance
    ) -> FetchedBatch | Oversized | None:
        topic_partition = log.topic_partition
        limit = min(room.records - taken.records, self._max_batch_records)
        if limit < 1:
            return None
        if self._max_fetch_offsets is not None:
            end = min(end, position + self._max_fetch_offsets)
        records: list[Record] = []
        sizes: list[int] = []
        free = room.bytes - taken.bytes
        next_offset = end
        for record in log.read(position, end):
            size = record_size(record.key, record.value, record.headers)
            fits = size <= free or (room.alone and not records and not taken.records)
            if not fits and not records:
                # Other partitions may have used up the room in this step; this needs no report.
                return Oversized(topic_partition, size) if size > room.bytes else None
            if not fits or len(records) >= limit:
                next_offset = records[-1].offset + 1
                self._positions.pop(topic_partition)
                break
            records.append(record)
            sizes.append(size)
            free -= size
        self._positions[topic_partition] = next_offset
        return FetchedBatch(topic_partition, records, sizes, next_offset)

    def _readable_end(self, log: PartitionLog) -> int:
        return log.stable_end if self._read_committed else log.end
