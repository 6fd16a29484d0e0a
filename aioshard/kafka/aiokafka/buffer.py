"""The records that aiokafka has fetched: which partition is next, how much of it, and which errors to report."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import FetchResult

from aioshard.errors import StateError, TransportError
from aioshard.kafka.aiokafka.answers import cause_of, corrupt_record
from aioshard.kafka.aiokafka.decoder import Chunk
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.errors import fetch_error
from aioshard.ports import Allowance, AllowanceOf, Fault, FetchedBatch, Oversized
from aioshard.records import TopicPartition

RECORDS_PER_POLL = 500
"""Maximum records per poll. If more records are alive than the garbage collector's first threshold of 700, each
record costs a quarter more."""
_HURRIED_WAIT_MS = 10
_IDLE_WAIT_MS = 500
"""Kafka's default of `fetch.max.wait.ms`."""
_ACTIVE = 1.0
"""Seconds after a take during which we expect to take more from the same partition."""
_NUDGE_INTERVAL = 1e-4
"""Minimum seconds per partition between two checks of the fetcher; each costs 10 µs or more per partition."""
_LONGEST_NUDGE_INTERVAL = 0.1
FAULT_INTERVAL = 1.0
"""Seconds until an unreadable partition is tried, and reported, again."""


@dataclass(slots=True)
class PollResult:
    """The result of one pass over the fetched records, counted against the allowances of all partitions."""

    at: float = 0.0
    new: list[FetchedBatch | Fault | Oversized] = field(default_factory=list)
    repeated: list[FetchedBatch | Fault | Oversized] = field(default_factory=list)
    """Reported records that still do not fit."""
    records: int = 0
    bytes: int = 0
    most: int = 0
    """The largest record limit of any partition."""
    left_over: bool = False
    """Whether fetched records stay behind that will probably be taken soon."""

    def left_of(self, allowance: Allowance) -> Allowance:
        """Return what is left of an allowance, which was computed before anything was taken in this pass."""
        limit = min(allowance.records, RECORDS_PER_POLL)
        self.most = max(self.most, limit)
        return Allowance(limit, allowance.bytes, allowance.alone).less(self.records, self.bytes)

    def add(self, batch: FetchedBatch) -> None:
        """Add records taken from a partition."""
        self.new.append(batch)
        self.records += len(batch.records)
        self.bytes += sum(batch.sizes)


@dataclass(slots=True)
class _Partition:
    """One assigned partition."""

    name: TopicPartition
    state: Any
    placed: bool = False
    """Whether the engine has set a position."""
    chunk: Chunk | None = None
    taken_at: float = 0.0
    """When something was last taken, or the engine last set the position; loop time."""
    reported: Any = None
    """The failed entry that was reported last."""


class FetchBuffer:
    """The positions of our partitions and the records fetched for them.

    Owned by the transport. Has partitions only between `begin` and `end`; for others, every method is a no-op.
    """

    _internals: Internals
    """The client, from the first `begin` on."""

    def __init__(self, *, read_committed: bool, may_wait_longer: bool = False) -> None:
        """Make a buffer without partitions; *may_wait_longer* allows longer waits in fetches of idle partitions."""
        self._may_wait_longer = may_wait_longer
        self._fetched_at = 0.0
        """When something was last fetched; loop time."""
        self._read_committed = read_committed
        self._assignment: Any = None
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._nudge_at = 0.0
        """Loop time of the fetcher's next or latest check that we requested."""

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The assigned partitions."""
        return tuple(self._partitions)

    def __contains__(self, topic_partition: object) -> bool:
        return topic_partition in self._partitions

    # The assignment -------------------------------------------------------------------

    def begin(self, internals: Internals, assignment: Any) -> None:
        """Start an assignment: pause every new partition until it gets its position.

        The partitions of the assignment before it continue, unless `end` was called; those that are not assigned any
        more stay, paused, until they are removed.
        """
        self._internals, self._assignment = internals, assignment
        internals.fetched_bytes.clear()
        states = internals.states(assignment)
        for topic_partition, state in states.items():
            partition = self._partitions.setdefault(topic_partition, _Partition(topic_partition, state))
            before, partition.state = partition.state, state
            # The client neither fetches nor resets a partition that is paused and has a position, even a dummy one.
            state.pause()
            state.seek(before.position if partition.placed else 0)
            state.highwater, state.lso = before.highwater, before.lso
            if not before.paused:
                state.resume()
            self._drop(partition)
        self.pause(self._partitions.keys() - states.keys())
        self._hold_fetches()

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Forget some partitions."""
        for topic_partition in partitions:
            self._partitions.pop(topic_partition, None)

    def end(self) -> None:
        """Forget the assignment."""
        self._assignment = None
        self._partitions.clear()

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
        return partition.state.lso if self._read_committed else partition.state.highwater  # type: ignore[no-any-return]

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and returning these partitions."""
        for topic_partition in self._partitions.keys() & partitions:
            self._partitions[topic_partition].state.pause()
            self._hold_fetches()

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Resume these partitions.

        Raises:
            StateError: A partition has no position yet.
        """
        for topic_partition in self._partitions.keys() & partitions:
            partition = self._partitions[topic_partition]
            if not partition.placed:
                raise StateError(f"{topic_partition} was resumed before it was seeked: it has no position yet")
            partition.state.resume()
            self._nudge_fetcher()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Set a position."""
        if (partition := self._partitions.get(topic_partition)) is not None:
            partition.placed = True
            partition.taken_at = asyncio.get_running_loop().time()
            partition.state.seek(offset)
            self._drop(partition)

    # Records --------------------------------------------------------------------------

    def take(self, allowance_of: AllowanceOf) -> PollResult:
        """Take fetched records, as many as the allowances permit, and advance the positions in the same step.

        Allowances are those at the start of this call: records taken from one partition count against the others.
        """
        poll_result = PollResult(asyncio.get_running_loop().time())
        assignment = self._assignment
        if assignment is None or not assignment.active or self._internals.subscription.reassignment_in_progress:
            return poll_result
        internals = self._internals
        for key, result in list(internals.buffered.items()):
            partition = self._partitions.get(key)
            if partition is None or partition.state.paused:
                continue
            if type(result) is FetchResult:
                chunk = partition.chunk
                if chunk is None or chunk.result is not result:
                    if result._assignment is not assignment:
                        continue
                    data = internals.fetched_bytes.pop(partition.name, b"")
                    chunk = partition.chunk = Chunk(partition.name, result, data)
                self._take_from(partition, chunk, allowance_of, poll_result)
                if poll_result.records and poll_result.records >= poll_result.most:
                    break  # The limit is reached for all; calling `allowance_of` costs more than a record.
            else:
                self._report(partition, result, poll_result)
        if poll_result.new or internals.buffered:
            self._fetched_at = poll_result.at
        self._hold_fetches(
            left_over=poll_result.left_over,
            # All partitions are being fetched, and had no records for a while.
            idle=self._may_wait_longer
            and self._fetched_at < poll_result.at - _ACTIVE
            and not any(partition.state.paused for partition in self._partitions.values()),
        )
        return poll_result

    def _take_from(
        self, partition: _Partition, chunk: Chunk, allowance_of: AllowanceOf, poll_result: PollResult
    ) -> None:
        state = partition.state
        if state.position != chunk.next_offset:
            self._drop(partition)
            return
        if chunk.error is not None:
            self._report(partition, chunk.result, poll_result)
            return
        allowance = allowance_of(partition.name)
        if allowance.records <= 0:
            self._release_broker(chunk.result)
            poll_result.left_over |= partition.taken_at > poll_result.at - _ACTIVE
            return
        limit, room, alone = poll_result.left_of(allowance)
        if limit <= 0:
            return
        records, sizes = chunk.take(limit, room, alone=alone)
        next_offset = chunk.next_offset
        if next_offset != state.position:
            partition.taken_at = poll_result.at
            chunk.reported = False
            state.consumed_to(next_offset)
            undecodable = chunk.undecodable or None
            poll_result.add(FetchedBatch(partition.name, records, sizes, next_offset, undecodable=undecodable))
        if chunk.drained:
            self._drop(partition)
        elif chunk.oversized > allowance.bytes:
            self._release_broker(chunk.result)
            (poll_result.repeated if chunk.reported else poll_result.new).append(
                Oversized(partition.name, chunk.oversized)
            )
            chunk.reported = True
        elif chunk.error is not None and not records:
            self._report(partition, chunk.result, poll_result)
        else:
            poll_result.left_over = True
            self._internals.fetcher._records.move_to_end(partition.name)  # other partitions come first next time

    def _drop(self, partition: _Partition) -> None:
        partition.chunk = None
        partition.reported = None
        self._discard(partition.name)

    # The client's fetches -------------------------------------------------------------

    def _hold_fetches(self, *, left_over: bool = False, idle: bool = False) -> None:
        """Set how long brokers may hold a fetch that has nothing to return; see `fetch_wait`."""
        self._internals.fetcher._fetch_max_wait_ms = fetch_wait(
            self._internals.consumer._fetch_max_wait_ms, len(self._partitions), left_over=left_over, idle=idle
        )

    def _nudge_fetcher(self) -> None:
        """Make the fetcher check which partitions it may fetch, now or soon: the more partitions, the rarer."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._nudge_at <= now:
            pause = min(_NUDGE_INTERVAL * len(self._partitions), _LONGEST_NUDGE_INTERVAL)
            self._nudge_at = max(self._nudge_at + pause, now)
            fetcher = self._internals.fetcher
            loop.call_at(self._nudge_at, lambda: fetcher._notify(fetcher._wait_consume_future))

    def _release_broker(self, result: Any) -> None:
        """Let the client fetch other partitions of the same broker although *result* is not taken."""
        if result._backoff:
            result._backoff = 0
            self._nudge_fetcher()

    def _discard(self, topic_partition: TopicPartition) -> None:
        """Drop the fetched records of a partition; the client fetches it again from its position."""
        if self._internals.buffered.pop(topic_partition, None) is not None:
            self._nudge_fetcher()

    # Read errors ----------------------------------------------------------------------

    def _report(self, partition: _Partition, entry: Any, poll_result: PollResult) -> None:
        """Report a failed entry once, and keep it for a while: until then, the client does not fetch the partition."""
        if partition.reported is entry:
            return
        partition.reported = entry
        poll_result.new.append(Fault(partition.name, self._fault(partition, entry)))

        def retry() -> None:
            if self._internals.buffered.get(partition.name) is entry:
                self._drop(partition)

        asyncio.get_running_loop().call_later(FAULT_INTERVAL, retry)

    def _fault(self, partition: _Partition, entry: Any) -> TransportError:
        topic_partition, chunk = partition.name, partition.chunk
        if chunk is not None and chunk.result is entry and chunk.error is not None:
            return corrupt_record(chunk.error, topic_partition, chunk.next_offset)
        error = entry._error
        if isinstance(error, kafka.RecordTooLargeError):
            offset = error.args[2]
            partition.state.seek(offset)  # aiokafka has stepped over the record; without this it would be lost.
            return TransportError(
                f"the record at offset {offset} of {topic_partition} is larger than the broker returns in one fetch: "
                "raise max_buffered_bytes, or the broker's limits for a fetch"
            )
        return fetch_error(cause_of(error), topic_partition, partition.state.position)


def fetch_wait(usual: int, partitions: int, *, left_over: bool, idle: bool) -> int:
    """Return for how many milliseconds brokers may hold a fetch that has nothing to return.

    A broker gets only one fetch at a time. A partition that is drained or resumed while the fetch of its idle
    neighbours is held must wait for that fetch. So while a partition is being drained, fetches are held only briefly.
    Each partition in a fetch costs 10 µs: if all partitions are idle, every fetch contains all of them, so with many
    partitions the wait is longer. Arriving records end the wait.

    Args:
        usual: The setting `fetch_max_wait`.
        partitions: The number of assigned partitions.
        left_over: Whether a fetched partition is still being drained.
        idle: Whether no partition is paused and none had records lately.

    Example:
        >>> [fetch_wait(100, 2_000, left_over=left_over, idle=not left_over) for left_over in (True, False)]
        [100, 500]
    """
    if left_over:
        return min(usual, max(_HURRIED_WAIT_MS, partitions // 10))
    return max(usual, min(partitions // 4, _IDLE_WAIT_MS)) if idle else usual
