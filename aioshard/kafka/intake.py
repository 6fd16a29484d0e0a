"""Turn fetched data into batches: which partition is next, how much of it, and which errors to report."""

import asyncio
from collections.abc import Collection
from typing import Any

from aiokafka import errors as kafka

from aioshard.errors import OffsetOutOfRangeError, StateError, TransportError
from aioshard.kafka.chunk import Chunk
from aioshard.kafka.internals import FetchResult, Internals
from aioshard.kafka.translate import corrupt_record, request_error
from aioshard.ports import AllowanceOf, Fault, FetchedBatch, Oversized
from aioshard.records import TopicPartition

__all__ = ["Found", "Intake"]

_RECORDS_PER_POLL = 500
"""Maximum records per poll. If more records are alive than the garbage collector's first threshold of 700, each
record costs a quarter more."""
_ACTIVE = 1.0
"""Seconds after a take during which we expect to take more from the same partition."""
_FAULT_INTERVAL = 1.0
"""Seconds until an unreadable partition is tried, and reported, again."""


class Found:
    """The result of one pass over the client's buffer."""

    __slots__ = ("at", "bytes", "left_over", "most", "new", "records", "repeated")

    def __init__(self, at: float) -> None:
        self.at = at
        self.new: list[FetchedBatch | Fault | Oversized] = []
        self.repeated: list[FetchedBatch | Fault | Oversized] = []
        """Reported records that still do not fit."""
        self.records = 0
        self.bytes = 0
        self.most = 0
        """The largest record limit of any partition."""
        self.left_over = False
        """Whether fetched records stay behind that will probably be taken soon."""


class _Partition:
    """One assigned partition."""

    __slots__ = ("chunk", "name", "placed", "reported", "state", "taken_at")

    def __init__(self, name: TopicPartition, state: Any) -> None:
        self.name = name
        self.state = state
        self.placed = False
        """Whether the engine has set a position."""
        self.chunk: Chunk | None = None
        self.taken_at = 0.0
        """When something was last taken, or the engine last set the position; loop time."""
        self.reported: Any = None
        """The fetch error that was reported last."""


class Intake:
    """The positions of our partitions and the records fetched for them.

    Owned by the transport. Has partitions only between `begin` and `end`; for others, every method is a no-op.
    """

    def __init__(
        self, internals: Internals, group_id: str, *, read_committed: bool, may_wait_longer: bool = False
    ) -> None:
        """Read the client's fetches; *may_wait_longer* allows longer waits in fetches of idle partitions."""
        self._internals = internals
        self._may_wait_longer = may_wait_longer
        self._fetched_at = 0.0
        """When something was last fetched; loop time."""
        self._group_id = group_id
        self._read_committed = read_committed
        self._assignment: Any = None
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._retries: set[asyncio.TimerHandle] = set()

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The assigned partitions."""
        return tuple(self._partitions)

    def __contains__(self, topic_partition: object) -> bool:
        return topic_partition in self._partitions

    # The assignment -------------------------------------------------------------------

    def begin(self, assignment: Any) -> None:
        """Start an assignment: pause every partition until it gets its position."""
        self.end()
        self._assignment = assignment
        for name, state in self._internals.states(assignment).items():
            # The client neither fetches nor resets a partition that is paused and has a position, even a dummy one.
            state.pause()
            state.seek(0)
            self._internals.discard(name)
            self._partitions[name] = _Partition(name, state)
        self._internals.hold_fetches(len(self._partitions))

    def end(self) -> None:
        """Forget the assignment."""
        self._assignment = None
        self._partitions.clear()
        for retry in self._retries:
            retry.cancel()
        self._retries.clear()

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """The next offset to return; None before the first `seek`."""
        partition = self._partitions.get(topic_partition)
        return int(partition.state.position) if partition is not None and partition.placed else None

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """The end of the log according to the latest fetch."""
        partition = self._partitions.get(topic_partition)
        if partition is None:
            return None
        end: int | None = partition.state.lso if self._read_committed else partition.state.highwater
        return end

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and returning these partitions."""
        for name in partitions:
            partition = self._partitions.get(name)
            if partition is not None:
                partition.state.pause()
        self._internals.hold_fetches(len(self._partitions))

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
            partition.state.resume()
        self._internals.nudge_fetcher()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set a position."""
        partition = self._partitions.get(topic_partition)
        if partition is not None:
            partition.placed = True
            partition.taken_at = asyncio.get_running_loop().time()
            partition.state.seek(offset)
            self._drop(partition)

    # Records --------------------------------------------------------------------------

    def take(self, allowance_of: AllowanceOf) -> Found:
        """Take fetched records, as many as the allowances permit, and advance the positions in the same step.

        Allowances are those at the start of this call: records taken from one partition count against the others.
        """
        found = Found(asyncio.get_running_loop().time())
        internals = self._internals
        assignment = self._assignment
        if assignment is None or not assignment.active or internals.rebalancing:
            return found
        for key, entry in list(internals.buffered.items()):
            partition = self._partitions.get(key)
            if partition is None or partition.state.paused:
                continue
            if type(entry) is FetchResult:
                chunk = partition.chunk
                if chunk is None or chunk.result is not entry:
                    if not internals.belongs(entry, assignment):
                        continue
                    chunk = partition.chunk = Chunk(partition.name, entry)
                self._take_from(partition, chunk, allowance_of, found)
                if found.records and found.records >= found.most:
                    break  # The limit is reached for all; calling `allowance_of` costs more than a record.
            elif partition.reported is not entry:
                self._report_error(partition, entry, found)
        if found.new or internals.buffered:
            self._fetched_at = found.at
        internals.hold_fetches(
            len(self._partitions), left_over=found.left_over, idle=self._may_wait_longer and self._is_idle(found.at)
        )
        return found

    def _is_idle(self, now: float) -> bool:
        """Whether all partitions are being fetched, and had no records for a while."""
        return self._fetched_at < now - _ACTIVE and not any(
            partition.state.paused for partition in self._partitions.values()
        )

    def _take_from(self, partition: _Partition, chunk: Chunk, allowance_of: AllowanceOf, found: Found) -> None:
        state = partition.state
        if state.position != chunk.next_offset:
            self._drop(partition)
            return
        if chunk.error is not None:
            self._report_corrupt(partition, chunk, found)
            return
        limit, room, alone = allowance_of(partition.name)
        if limit <= 0:
            self._internals.release_broker(chunk.result)
            found.left_over |= partition.taken_at > found.at - _ACTIVE
            return
        limit = min(limit, _RECORDS_PER_POLL)
        found.most = max(found.most, limit)
        limit -= found.records
        if limit <= 0:
            return
        taken = chunk.take(limit, room - found.bytes, alone=alone and not found.records)
        next_offset = chunk.next_offset
        if next_offset != state.position:
            partition.taken_at = found.at
            state.consumed_to(next_offset)
            found.new.append(FetchedBatch(partition.name, taken.records, taken.sizes, next_offset))
            found.records += len(taken.records)
            found.bytes += sum(taken.sizes)
        if chunk.drained:
            self._drop(partition)
        elif taken.oversized > room:
            self._internals.release_broker(chunk.result)
            (found.repeated if chunk.reported else found.new).append(Oversized(partition.name, taken.oversized))
            chunk.reported = True
        elif chunk.error is not None and not taken.records:
            self._report_corrupt(partition, chunk, found)
        else:
            found.left_over = True
            self._internals.serve_last(partition.name)

    def _drop(self, partition: _Partition) -> None:
        partition.chunk = None
        partition.reported = None
        self._internals.discard(partition.name)

    # Read errors ----------------------------------------------------------------------

    def _report_corrupt(self, partition: _Partition, chunk: Chunk, found: Found) -> None:
        if chunk.reported or chunk.error is None:
            return
        chunk.reported = True
        found.new.append(Fault(partition.name, corrupt_record(chunk.error, partition.name, chunk.next_offset)))
        self._retry_later(partition, chunk.result)

    def _report_error(self, partition: _Partition, entry: Any, found: Found) -> None:
        partition.reported = entry
        found.new.append(Fault(partition.name, self._fault(partition, self._internals.error_of(entry))))
        self._retry_later(partition, entry)

    def _fault(self, partition: _Partition, error: Exception) -> TransportError:
        name = partition.name
        if isinstance(error, kafka.OffsetOutOfRangeError):
            return OffsetOutOfRangeError(name, partition.state.position)
        if isinstance(error, kafka.RecordTooLargeError):
            offset = error.args[2]
            partition.state.seek(offset)  # aiokafka has stepped over the record; without this it would be lost.
            return TransportError(
                f"the record at offset {offset} of {name} is larger than the broker returns in one fetch: "
                "raise max_buffered_bytes, or the broker's limits for a fetch"
            )
        return request_error(error, f"the records of {name}", self._group_id)

    def _retry_later(self, partition: _Partition, entry: Any) -> None:
        """Keep a failed entry for a while: until it is dropped, the client does not fetch the partition."""

        def retry() -> None:
            self._retries.discard(timer)
            if self._internals.buffered.get(partition.name) is entry:
                self._drop(partition)

        timer = asyncio.get_running_loop().call_later(_FAULT_INTERVAL, retry)
        self._retries.add(timer)
