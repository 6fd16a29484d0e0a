"""What one client reads: its partitions with their positions, and the records that come next."""

from collections.abc import Collection
from typing import Literal

from aioshard.errors import OffsetOutOfRangeError, TransportError
from aioshard.ports import AllowanceOf, Batch, Fault, LogRange, Oversized, record_size
from aioshard.records import Record, TopicPartition
from aioshard.testing.broker import InMemoryBroker
from aioshard.testing.log import PartitionLog

__all__ = ["IsolationLevel", "Reading"]

IsolationLevel = Literal["read_committed", "read_uncommitted"]

_FAULT_INTERVAL = 1.0
"""Seconds after which a fault that goes on is reported again; a client retries a failed fetch with backoff."""


class Reading:
    """The partitions that a client was given, and where it reads each.

    Synchronous, owned by one `InMemoryTransport`.

    Invariants:
        * A partition that was just given is paused and has no position.
        * Records are taken and the position moved in one step.
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

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """What was given and not taken away, sorted."""
        return tuple(sorted(self._positions))

    def give(self, partitions: Collection[TopicPartition]) -> None:
        """Take over an assignment, all of it paused."""
        self.take_all()
        self._positions = dict.fromkeys(partitions)
        self._paused = set(partitions)

    def take_all(self) -> None:
        """Forget every partition."""
        self._positions = {}
        self._paused = set()
        self._ends = {}
        self._quiet_until = {}

    def position(self, topic_partition: TopicPartition) -> int | None:
        """The next offset to read; None without a `seek`."""
        return self._positions.get(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """Where the readable part of the log ended when it was last looked at."""
        return self._ends.get(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Read nothing of these, until they are resumed."""
        self._paused.update(partition for partition in partitions if partition in self._positions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Go on with these."""
        self._paused.difference_update(partitions)

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set a position."""
        if topic_partition in self._positions:
            self._positions[topic_partition] = offset
            self._quiet_until.pop(topic_partition, None)

    def log_range(self, topic_partition: TopicPartition) -> LogRange:
        """Start and readable end of a log now."""
        log = self._broker.log(*topic_partition)
        return LogRange(log.start, self._readable_end(log))

    def next_look(self, now: float) -> float | None:
        """When a fault is due to be reported again, if one is."""
        return min((when for when in self._quiet_until.values() if when > now), default=None)

    def collect(self, allowance: AllowanceOf, now: float) -> list[Batch | Fault | Oversized]:
        """Take what is readable and allowed, of every partition that is not paused."""
        found = []
        for topic_partition in self._positions:
            if topic_partition not in self._paused:
                item = self._collect_from(topic_partition, allowance, now)
                if item is not None:
                    found.append(item)
        return found

    def _collect_from(
        self, topic_partition: TopicPartition, allowance: AllowanceOf, now: float
    ) -> Batch | Fault | Oversized | None:
        log = self._broker.log(*topic_partition)
        position = self._positions[topic_partition]
        error = self._error(log, position)
        if error is not None:
            if now < self._quiet_until.get(topic_partition, now) or allowance(topic_partition).records < 1:
                return None
            self._quiet_until[topic_partition] = now + _FAULT_INTERVAL
            return Fault(topic_partition, error)
        self._quiet_until.pop(topic_partition, None)
        end = self._readable_end(log)
        self._ends[topic_partition] = end
        if position is None or position >= end:
            return None
        return self._take(log, position, end, allowance)

    def _error(self, log: PartitionLog, position: int | None) -> TransportError | None:
        topic_partition = log.topic_partition
        if (fault := self._broker.fault(topic_partition)) is not None:
            return fault
        if position is None:
            return TransportError(f"{topic_partition} was resumed without a position: seek before resume")
        if not log.start <= position <= log.end:
            return OffsetOutOfRangeError(topic_partition, position)
        return None

    def _take(self, log: PartitionLog, position: int, end: int, allowance: AllowanceOf) -> Batch | Oversized | None:
        topic_partition = log.topic_partition
        room = allowance(topic_partition)
        if room.records < 1:
            return None
        if self._max_fetch_offsets is not None:
            end = min(end, position + self._max_fetch_offsets)
        records: list[Record] = []
        sizes: list[int] = []
        free = room.bytes
        next_offset = end
        for record in log.read(position, end):
            size = record_size(record.key, record.value, record.headers)
            fits = size <= free or (room.alone and not records)
            if not fits and not records:
                return Oversized(topic_partition, size)
            if not fits or len(records) >= min(room.records, self._max_batch_records):
                next_offset = records[-1].offset + 1
                break
            records.append(record)
            sizes.append(size)
            free -= size
        self._positions[topic_partition] = next_offset
        return Batch(topic_partition, records, sizes, next_offset)

    def _readable_end(self, log: PartitionLog) -> int:
        return log.stable_end if self._read_committed else log.end
