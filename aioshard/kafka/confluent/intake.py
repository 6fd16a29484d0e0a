"""Buffers between the client and the engine: records, positions, and which partitions to fetch."""

from collections.abc import Collection, Sequence
from typing import Any

from confluent_kafka import KafkaError

from aioshard.errors import OffsetOutOfRangeError, StateError
from aioshard.kafka.confluent.held import Held
from aioshard.kafka.confluent.member import Change
from aioshard.kafka.confluent.translate import fetch_error
from aioshard.ports import RECORD_OVERHEAD, AllowanceOf, Fault, FetchedBatch, Oversized
from aioshard.records import Record, TopicPartition

__all__ = ["Found", "Intake"]

_RECORDS_PER_POLL = 500
"""Maximum records per poll."""
_PATIENCE = 0.25
"""Seconds to pause reading while a buffer is full, before we stop fetching its partition. Stopping discards the records
that the client has prefetched; but while nothing is read, we do not notice rebalances."""
_SHORT_PATIENCE = 0.02
"""The same while the buffer of another fetched partition is empty."""
_FAULT_INTERVAL = 1.0
"""Seconds until an unreadable partition is tried again."""

_FAILURES = 20
"""Failed attempts, 50 ms each, to change what the client does with a partition before we assume it has given up."""

_new_record = tuple.__new__
"""Builds a `Record` from a tuple in half the time of calling the class."""


class Found:
    """The result of one pass over the buffers."""

    __slots__ = ("bytes", "most", "new", "records", "repeated")

    def __init__(self) -> None:
        self.new: list[FetchedBatch | Fault | Oversized] = []
        self.repeated: list[FetchedBatch | Fault | Oversized] = []
        """Reported records that still do not fit."""
        self.records = 0
        self.bytes = 0
        self.most = 0
        """The largest record limit of any partition."""


class Intake:
    """Our partitions, with a small buffer each.

    Reads everything in the order of the client's queue, even records that the engine does not want yet, because
    rebalance events are in the same queue. If a buffer stays above its share, we stop fetching its partition until
    less than half of the share is left.

    Invariants:
        * Buffered records lie between `position` and `reach`; the client always resumes at `reach`.
        * A buffer exceeds its share by at most the records that the client had in its own queue.
    """

    def __init__(self, share: int, *, incremental: bool = True) -> None:
        """Buffer about *share* bytes per partition; *incremental*: whether partitions can be assigned individually."""
        self.share = share
        self._incremental = incremental
        self._partitions: dict[tuple[str, int], Held] = {}
        self._ready: dict[Held, None] = {}
        """Partitions with something to return; the one served last is at the end."""

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The assigned partitions."""
        return tuple(partition.name for partition in self._partitions.values())

    def __contains__(self, topic_partition: object) -> bool:
        return topic_partition in self._partitions

    # The assignment -------------------------------------------------------------------

    def add(self, partitions: Collection[TopicPartition]) -> None:
        """Add assigned partitions; each is paused until it gets its position."""
        self._send_again()
        for name in partitions:
            self._partitions[name] = Held(name)

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Remove revoked partitions and drop their buffers."""
        for name in partitions:
            partition = self._partitions.pop(name, None)
            if partition is not None:
                self._ready.pop(partition, None)
        self._send_again()

    def _send_again(self) -> None:
        # During a rebalance, the client also stops fetching the partitions we keep. Records that it holds at that
        # moment do not count, and its fetcher thread resumes only up to a second later, or on a seek.
        for partition in self._partitions.values():
            if partition.fetching:
                partition.moved = True

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """The next offset to return; None before the first `seek`."""
        partition = self._partitions.get(topic_partition)
        return partition.position if partition is not None and partition.placed else None

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """The last known end of the log."""
        partition = self._partitions.get(topic_partition)
        return None if partition is None else partition.end

    def note_end(self, topic_partition: TopicPartition, end: int) -> None:
        """Record the end of a log that was queried from the brokers."""
        partition = self._partitions.get(topic_partition)
        if partition is not None:
            partition.end = max(end, partition.end or 0)

    def behind(self) -> tuple[TopicPartition, ...]:
        """Return the partitions that are not known to be at their end."""
        return tuple(p.name for p in self._partitions.values() if p.placed and p.reach != p.end)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and returning these partitions; their buffers stay."""
        for name in partitions:
            partition = self._partitions.get(name)
            if partition is not None:
                partition.paused = True

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Resume these partitions.

        Raises:
            StateError: A partition has no position yet.
        """
        for name in partitions:
            partition = self._partitions.get(name)
            if partition is None:
                continue
            if not partition.placed:
                raise StateError(f"{name} was resumed before it was seeked: it has no position yet")
            partition.paused = False

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set a position and drop the buffer."""
        partition = self._partitions.get(topic_partition)
        if partition is not None:
            partition.placed = partition.moved = True
            partition.position = partition.reach = offset
            partition.end = None if partition.end is not None and partition.end < offset else partition.end
            partition.drop()
            self._ready.pop(partition, None)

    # Changes for the client -----------------------------------------------------------

    def changes(self, now: float) -> list[Change]:
        """Return the changes that the caller must make in the client before its next read."""
        changes = []
        for partition in self._partitions.values():
            wanted = partition.placed and not partition.paused and partition.fault is None
            if wanted and partition.full_since is not None:
                wanted = partition.fetching and not self._is_long_full(partition, now)
            if partition.fault is not None and now >= partition.retry_at:
                partition.fault = None
                partition.moved = True
                wanted = partition.placed and not partition.paused
            if wanted and partition.broken and not self._incremental:
                continue  # before the next read, all partitions start over
            if wanted and (partition.moved or not partition.fetching):
                partition.moved = False
                partition.fetching = True
                changes.append(Change(partition.name, partition.reach, partition.broken))
                partition.broken = False
            elif not wanted and partition.fetching:
                partition.fetching = False
                partition.moved = True
                changes.append(Change(partition.name, None))
        return changes

    def not_changed(self, change: Change) -> None:
        """Schedule again a change that the client could not make yet."""
        partition = self._partitions.get(change.topic_partition)
        if partition is not None:
            partition.moved = True
            partition.fetching = change.fetch_from is None
            partition.failures += 1
            if partition.failures >= _FAILURES:
                partition.failures = 0
                partition.broken = True

    def start_over(self) -> bool:
        """Return whether the client has given up on a partition; if so, mark all partitions for another seek."""
        wanted = [p for p in self._partitions.values() if p.broken and p.placed and not p.paused and p.fault is None]
        if not wanted:
            return False
        for partition in self._partitions.values():
            partition.broken = partition.fetching = False
            partition.moved = True
        return True

    def _is_long_full(self, partition: Held, now: float) -> bool:
        return partition.full_since is not None and now >= partition.full_since + self._patience()

    def _patience(self) -> float:
        starving = any(p.fetching and not p.records and p.full_since is None for p in self._partitions.values())
        return _SHORT_PATIENCE if starving else _PATIENCE

    def crowded(self, now: float) -> float:
        """Return the seconds to pause reading because buffers of fetched partitions are full; 0 means read."""
        full = [p.full_since for p in self._partitions.values() if p.fetching and p.full_since is not None]
        return max(min(full) + self._patience() - now, 0.0) if full else 0.0

    # From the client ------------------------------------------------------------------

    def accept(  # noqa: C901, PLR0912 - a call in this loop would cost more than anything else in it
        self, messages: Sequence[Any], now: float
    ) -> list[Any]:
        """Put messages into the buffers; return the errors that do not belong to an assigned partition."""
        others: list[Any] = []
        partition: Held | None = None
        last_topic: str | None = None
        last_number = -1
        for message in messages:
            topic = message.topic()
            number = message.partition()
            if number != last_number or topic != last_topic:
                if partition is not None:
                    self._filled(partition, now)
                last_topic, last_number = topic, number
                partition = self._partitions.get((topic, number))
            error = message.error()
            if error is not None:
                if partition is None:
                    others.append(message)
                elif not partition.moved:
                    self._accept_error(partition, message, error, now)
                continue
            if partition is None or partition.moved or partition.fault is not None:
                continue
            offset = message.offset()
            if offset < partition.reach:
                continue
            key = message.key()
            value = message.value()
            headers = message.headers()
            size = RECORD_OVERHEAD
            if key is not None:
                size += len(key)
            if value is not None:
                size += len(value)
            if headers:
                headers = tuple(headers)
                size += sum([len(name) + len(content or b"") for name, content in headers])
            else:
                headers = ()
            stamp = message.timestamp()[1] / 1000
            partition.records.append(_new_record(Record, (topic, number, offset, key, value, headers, stamp)))
            partition.sizes.append(size)
            partition.bytes += size
            partition.reach = offset + 1
        if partition is not None:
            self._filled(partition, now)
        return others

    def _filled(self, partition: Held, now: float) -> None:
        if partition.records:
            partition.failures = 0
            if partition.end is None or partition.end < partition.reach:
                partition.end = partition.reach
            self._ready.setdefault(partition)
            if partition.bytes >= self.share and partition.full_since is None:
                partition.full_since = now

    def _accept_error(self, partition: Held, message: Any, error: KafkaError, now: float) -> None:
        offset = message.offset()
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - that is how the client names it
            # With a fault, records before this end were dropped; they are read again from `reach`.
            if offset is not None and offset >= partition.reach and partition.fault is None:
                # The client passed markers and aborted batches, which contain no records.
                partition.reach = partition.end = offset
                self._ready.setdefault(partition)
            return
        partition.fault = fetch_error(error, partition.name, partition.reach)
        partition.broken |= isinstance(partition.fault, OffsetOutOfRangeError)
        partition.retry_at = now + _FAULT_INTERVAL
        self._ready.setdefault(partition)

    # To the engine --------------------------------------------------------------------

    def take(self, allowance_of: AllowanceOf) -> Found:
        """Take buffered records, as many as the allowances permit, and advance the positions in the same step."""
        found = Found()
        for partition in list(self._ready):
            if partition.paused or not partition.placed:
                continue
            if not partition.records:
                self._pass_over(partition, found)
                continue
            limit, room, alone = allowance_of(partition.name)
            if limit <= 0:
                continue
            limit = min(limit, _RECORDS_PER_POLL)
            found.most = max(found.most, limit)
            limit -= found.records
            if limit <= 0:
                break
            self._take_from(partition, found, limit, room, alone=alone and not found.records)
            if found.records >= found.most:
                break  # The limit is reached for all; calling `allowance_of` costs more than a record.
        return found

    def _take_from(self, partition: Held, found: Found, limit: int, room: int, *, alone: bool) -> None:
        left = room - found.bytes
        sizes = partition.sizes
        if len(sizes) <= limit and partition.bytes <= left:
            count, taken_bytes = len(sizes), partition.bytes
        else:
            count = taken_bytes = 0
            for size in sizes[:limit]:
                if taken_bytes + size > left and not (alone and not count):
                    break
                count += 1
                taken_bytes += size
        if not count:
            size = sizes[0]
            if size > room:
                oversized = Oversized(partition.name, size)
                (found.repeated if partition.reported else found.new).append(oversized)
                partition.reported = True
            return
        records = partition.records
        if count == len(records):
            partition.records, partition.sizes = [], []
            partition.position = partition.reach
        else:
            partition.records, partition.sizes = records[count:], sizes[count:]
            records, sizes = records[:count], sizes[:count]
            partition.position = records[-1].offset + 1
        partition.bytes -= taken_bytes
        partition.reported = False
        if partition.full_since is not None and partition.bytes < self.share // 2:
            partition.full_since = None
        found.new.append(FetchedBatch(partition.name, records, sizes, partition.position))
        found.records += count
        found.bytes += taken_bytes
        self._ready.pop(partition, None)
        if partition.records or partition.fault is not None:
            self._ready[partition] = None

    def _pass_over(self, partition: Held, found: Found) -> None:
        """Report a position that moved without records, and an error."""
        self._ready.pop(partition, None)
        if partition.position != partition.reach:
            partition.position = partition.reach
            found.new.append(FetchedBatch(partition.name, (), (), partition.reach))
        if partition.fault is not None:
            found.new.append(Fault(partition.name, partition.fault))

    def clear(self) -> None:
        """Forget everything."""
        self._partitions.clear()
        self._ready.clear()
