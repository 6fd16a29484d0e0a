"""Buffers between the client and the engine: records, positions, and which partitions to fetch."""

import asyncio
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError

from aioshard.errors import DecodeError, OffsetOutOfRangeError, StateError, TransportError
from aioshard.kafka.confluent.consumer import Change
from aioshard.kafka.confluent.headers import headers_of
from aioshard.kafka.confluent.translate import cause_of
from aioshard.kafka.errors import fetch_error
from aioshard.kafka.fetcher import FAULT_INTERVAL, PollResult
from aioshard.ports import RECORD_OVERHEAD, Allowance, AllowanceOf, Fault, FetchedBatch, Oversized
from aioshard.records import Record, TopicPartition
from aioshard.serde.header_names import undecodable_among

_PATIENCE = 0.25
"""Seconds to pause reading while a buffer is full, before we stop fetching its partition. Stopping discards records
that the client has prefetched; but while reading is paused, we do not notice rebalances."""
_SHORT_PATIENCE = 0.02
"""The same while the buffer of another fetched partition is empty."""
_FAILURES = 20
"""Failed attempts, 50 ms each, to change what the client does with a partition before we assume it has given up."""
_STALL = 10.0
"""Seconds without anything from a partition that is not at its end before we assume the same. Rarely, librdkafka
accepts a seek and then fetches nothing, without an error."""

_new_record = tuple.__new__
"""Builds a `Record` from a tuple in half the time of calling the class."""


@dataclasses.dataclass(slots=True, eq=False)
class _Partition:
    """One assigned partition."""

    name: TopicPartition
    position: int | None = None
    """The next offset to return to the engine; None before its first seek."""
    reach: int = 0
    """The next offset that the client should deliver."""
    end: int | None = None
    """The last known end of the log."""
    paused: bool = True
    """Whether the engine has paused it."""
    fetching: bool = False
    """Whether the last change told the client to fetch it."""
    moved: bool = False
    """Whether the client must seek to `reach`; records that it delivers before that do not count."""
    broken: bool = False
    """Whether the client has given up on it; it cannot seek before it is assigned again."""
    failures: int = 0
    """Consecutive changes that the client could not make."""
    records: list[Record] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    bytes: int = 0
    """Their sum, kept up to date: summing up a full buffer for each record of a batch would take most of the time."""
    undecodable: Mapping[int, DecodeError] | None = None
    """The errors of the buffered records that no handler may see; see `FetchedBatch.undecodable`."""
    full_since: float | None = None
    """Since when the buffer exceeds its share."""
    fault: TransportError | None = None
    retry_at: float = 0.0
    """When a partition with a fault is tried again."""
    heard_at: float = 0.0
    """When the client last delivered something of it, or was last told to fetch it."""
    reported: bool = False
    """Whether the record that did not fit was reported."""

    def has_stalled(self, now: float) -> bool:
        """Whether the client should have delivered something of it by now."""
        is_behind = self.end is not None and self.reach != self.end
        return self.fetching and is_behind and not self.records and now >= self.heard_at + _STALL


class Buffers:
    """Our partitions, with a small buffer each.

    Accepts everything in the order of the client's queue, even records that the engine does not want yet, because
    rebalance events are in the same queue. If a buffer stays above its share, we stop fetching its partition until
    less than half of the share is left.

    Invariants:
        * Buffered records lie between `position` and `reach`; the client always resumes at `reach`.
        * A buffer exceeds its share by at most the records that the client had in its own queue.
        * `bytes` of a partition is the sum of its `sizes`.
    """

    def __init__(self, share: int) -> None:
        """Buffer about *share* bytes per partition."""
        self.share = share
        self.room = asyncio.Event()
        """Set when buffers may have room again."""
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._ready: dict[_Partition, None] = {}
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
        self._seek_again()
        self._partitions |= {topic_partition: _Partition(topic_partition) for topic_partition in partitions}

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Remove revoked partitions and drop their buffers."""
        for topic_partition in partitions:
            if (partition := self._partitions.pop(topic_partition, None)) is not None:
                self._ready.pop(partition, None)
        self._seek_again()

    def _seek_again(self) -> None:
        # During a rebalance, the client also stops fetching the partitions we keep. Records that it holds at that
        # moment do not count, and its fetcher thread resumes only up to a second later, or on a seek.
        for partition in self._partitions.values():
            partition.moved |= partition.fetching

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """The next offset to return; None before the first `seek`."""
        return self._known(topic_partition).position

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """The last known end of the log."""
        return self._known(topic_partition).end

    def note_end(self, topic_partition: TopicPartition, end: int) -> None:
        """Record the end of a log that was queried from the brokers."""
        partition = self._known(topic_partition)
        partition.end = max(end, partition.end or 0)

    def behind(self) -> tuple[TopicPartition, ...]:
        """Return the partitions that are not known to be at their end."""
        return tuple(p.name for p in self._partitions.values() if p.position is not None and p.reach != p.end)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and returning these partitions; their buffers stay."""
        for topic_partition in partitions:
            self._known(topic_partition).paused = True

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Resume these partitions.

        Raises:
            StateError: A partition has no position yet.
        """
        for topic_partition in partitions:
            partition = self._known(topic_partition)
            if partition.position is None and topic_partition in self._partitions:
                raise StateError(f"{topic_partition} was resumed before it was seeked: it has no position yet")
            partition.paused = False

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set a position and drop the buffer."""
        previous = self._partitions.get(topic_partition)
        if previous is None:
            return
        self._ready.pop(previous, None)
        self._partitions[topic_partition] = _Partition(
            topic_partition,
            position=offset,
            reach=offset,
            end=None if previous.end is not None and previous.end < offset else previous.end,
            paused=previous.paused,
            fetching=previous.fetching,
            moved=True,
            broken=previous.broken,
            failures=previous.failures,
        )

    def fail(self, topic_partition: TopicPartition, fault: TransportError) -> None:
        """Report a fault of a partition instead of its records, until the engine sets a position."""
        partition = self._known(topic_partition)
        position = partition.position
        if position is None:
            return
        self.seek(topic_partition, position)
        failed = self._known(topic_partition)
        failed.fault = fault
        failed.retry_at = math.inf
        self._ready[failed] = None

    def _known(self, topic_partition: TopicPartition) -> _Partition:
        """Return an assigned partition; for any other, one that has no effect."""
        return self._partitions.get(topic_partition) or _Partition(topic_partition)

    # Changes for the client -----------------------------------------------------------

    def changes(self, now: float) -> list[Change]:
        """Return the changes that the caller must make in the client before its next read."""
        changes = []
        for partition in self._partitions.values():
            if partition.fault is not None and now >= partition.retry_at:
                partition.fault = None
                partition.moved = True
            wanted = partition.position is not None and not partition.paused and partition.fault is None
            if wanted and partition.full_since is not None:
                wanted = partition.fetching and now < partition.full_since + self._patience()
            if wanted and partition.has_stalled(now):
                partition.broken = True
                partition.moved = True
            if wanted and (partition.moved or not partition.fetching):
                partition.moved = False
                partition.fetching = True
                partition.heard_at = now
                changes.append(Change(partition.name, partition.reach, partition.broken))
                partition.broken = False
            elif not wanted and partition.fetching:
                partition.fetching = False
                partition.moved = True
                changes.append(Change(partition.name, None))
        return changes

    def not_changed(self, change: Change) -> None:
        """Schedule again a change that the client could not make yet."""
        partition = self._known(change.topic_partition)
        partition.moved = True
        partition.fetching = change.fetch_from is None
        partition.failures += 1
        if partition.failures >= _FAILURES:
            partition.failures = 0
            partition.broken = True

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
        unassigned: list[Any] = []
        partition: _Partition | None = None
        last_topic: str | None = None
        last_number = -1
        all_headers, misnamed = headers_of(messages)
        for message, pairs in zip(messages, all_headers, strict=True):
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
                    unassigned.append(message)
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
            size = RECORD_OVERHEAD
            if key is not None:
                size += len(key)
            if value is not None:
                size += len(value)
            headers: tuple[tuple[str, bytes | None], ...] = ()
            if pairs:
                headers = tuple(pairs)
                size += sum([len(name) + len(content or b"") for name, content in headers])
            timestamp = message.timestamp()[1] / 1000
            partition.records.append(_new_record(Record, (topic, number, offset, key, value, headers, timestamp)))
            partition.sizes.append(size)
            partition.bytes += size
            partition.reach = offset + 1
        if partition is not None:
            self._filled(partition, now)
        if misnamed:
            for partition in self._ready:
                partition.undecodable = undecodable_among(partition.records)
        return unassigned

    def _filled(self, partition: _Partition, now: float) -> None:
        partition.heard_at = now
        if partition.records:
            partition.failures = 0
            if partition.end is None or partition.end < partition.reach:
                partition.end = partition.reach
            self._ready.setdefault(partition)
            if partition.full_since is None and partition.bytes >= self.share:
                partition.full_since = now

    def _accept_error(self, partition: _Partition, message: Any, error: KafkaError, now: float) -> None:
        partition.heard_at = now
        offset = message.offset()
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - that is how the client names it
            # With a fault, records before this end were dropped; they are read again from `reach`.
            if offset is not None and offset >= partition.reach and partition.fault is None:
                # The client passed markers and aborted batches, which contain no records.
                partition.reach = partition.end = offset
                self._ready.setdefault(partition)
            return
        partition.fault = fetch_error(cause_of(error), partition.name, partition.reach)
        partition.broken |= isinstance(partition.fault, OffsetOutOfRangeError)
        partition.retry_at = now + FAULT_INTERVAL
        self._ready.setdefault(partition)

    # To the engine --------------------------------------------------------------------

    def take(self, allowance_of: AllowanceOf) -> PollResult:
        """Take buffered records, as many as the allowances permit, and advance the positions in the same step."""
        result = PollResult()
        for partition in list(self._ready):
            if partition.paused or partition.position is None:
                continue
            if not partition.records:
                self._pass_over(partition, result)
                continue
            allowance = allowance_of(partition.name)
            if allowance.records <= 0:
                continue
            left = result.left_of(allowance)
            if left.records <= 0:
                break
            self._take_from(partition, result, left, allowance.bytes)
            if result.records >= result.most:
                break  # The limit is reached for all; calling `allowance_of` costs more than a record.
        return result

    def _take_from(self, partition: _Partition, result: PollResult, left: Allowance, most_bytes: int) -> None:
        count = left.admitted(partition.sizes)
        if not count:
            size = partition.sizes[0]
            if size > most_bytes:
                (result.repeated if partition.reported else result.new).append(Oversized(partition.name, size))
                partition.reported = True
            return
        records, partition.records = partition.records[:count], partition.records[count:]
        sizes, partition.sizes = partition.sizes[:count], partition.sizes[count:]
        partition.bytes -= sum(sizes)
        partition.position = records[-1].offset + 1 if partition.records else partition.reach
        partition.reported = False
        if partition.full_since is not None and partition.bytes < self.share // 2:
            partition.full_since = None
        result.add(FetchedBatch(partition.name, records, sizes, partition.position, undecodable=partition.undecodable))
        if partition.undecodable is not None:
            partition.undecodable = undecodable_among(partition.records)
        self.room.set()
        self._ready.pop(partition, None)
        if partition.records or partition.fault is not None:
            self._ready[partition] = None

    def _pass_over(self, partition: _Partition, result: PollResult) -> None:
        """Report a position that moved without records, and an error."""
        self._ready.pop(partition, None)
        if partition.position != partition.reach:
            partition.position = partition.reach
            result.new.append(FetchedBatch(partition.name, (), (), partition.reach))
        if partition.fault is not None:
            result.new.append(Fault(partition.name, partition.fault))
