"""Fetch assigned partitions: one loop per broker, bounded by what is taken.

It serves group members, manual assignment, side topics and backfills. What a response means is decided in
`aioshard.kafka.wire.fetch_answers`, what a broker still knows of earlier requests in
`aioshard.kafka.wire.fetch_session`, and records are decoded in `aioshard.kafka.wire.records`. This module sends the
requests and keeps the positions.
"""

import asyncio
import logging
import uuid
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aioshard.core.flow import fetch_limits
from aioshard.errors import (
    CorruptRecordError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    StateError,
    TopicRecreatedError,
    TransportError,
)
from aioshard.kafka.errors import no_leader, request_error
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.epochs import UNKNOWN, EpochStart, Position, epoch_before
from aioshard.kafka.wire.errors import ConnectionLostError, IncompleteResponseError, RequestTimedOutError, WireError
from aioshard.kafka.wire.fetch_answers import (
    Deliver,
    Diverged,
    FetchDecision,
    InFlight,
    OutOfRange,
    Redirect,
    Retry,
    Standstill,
    Step,
    belongs,
    decide_fetch,
    passing_error,
)
from aioshard.kafka.wire.fetch_session import (
    FIRST_BY_ID,
    FetchSession,
    PartitionRequest,
    SessionFetch,
    fetch_request,
)
from aioshard.kafka.wire.metadata import Broker, Leader
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.records import UNPACK_LIMIT, Chunk
from aioshard.kafka.wire.requests import FETCH
from aioshard.ports import Allowance, AllowanceOf, Fault, FetchedBatch, Oversized
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.kafka.fetcher")

RECORDS_PER_POLL = 500
"""Maximum records per poll. If more records are alive than the garbage collector's first threshold of 700, each
record costs a quarter more."""
FAULT_INTERVAL = 1.0
"""Seconds until an unreadable partition is tried, and reported, again."""
_HURRIED_WAIT = 0.01
_IDLE_WAIT = 0.5
"""Seconds; Kafka's default of `fetch.max.wait.ms`."""
_ACTIVE = 1.0
"""Seconds after a take during which we expect to take more from the same partition."""
_MARGIN, _LONGEST_MARGIN = 5.0, 30.0
"""Seconds that a broker may take to answer a fetch beyond the time for which we let it wait for records. They double
each time it takes longer, because a broker that is only slow would otherwise never answer."""
_LEAST_PAUSE = 0.1
_MOST_PAUSE = 1.0
"""Seconds until a partition or a broker that could not answer is asked again; it doubles with each failure."""
_CLOSE_GRACE = 1.0
"""Seconds for the tasks to end, and for brokers to forget our sessions."""
_GATHER, _LONGEST_GATHER = 1e-4, 0.1
"""Seconds per partition, and at most, to wait for more drained partitions before the next fetch: a fetch costs several
times as much as a partition in it."""
_REPLICA_AGE = 300.0
"""Seconds after which a follower is given up for the leader, which may name a better one."""
_SUBSTITUTE_AGE = 10.0
"""Seconds after which the leader is asked again, of which we have received a batch that cannot be read."""
_LEADER_AGE = 10.0
"""Seconds for which the leader must serve a partition itself after a follower could not: otherwise it would name the
same follower again at once."""


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


@dataclass(slots=True, eq=False)
class _Partition:
    """One assigned partition."""

    name: TopicPartition
    topic_id: uuid.UUID | None = None
    """The id of the topic to whose log the position belongs; None if it is unknown."""
    position: Position | None = None
    """The next offset to return; None before the first `seek`."""
    begin: Position | None = None
    """The position that was set last."""
    life: int = 0
    """Counts the positions that were set: an answer to a request from before the latest one does not count."""
    paused: bool = True
    chunk: Chunk | None = None
    """Records that were fetched and not taken yet."""
    chunk_bytes: int = 0
    epoch_starts: list[EpochStart] = field(default_factory=list)
    """The leader epochs of the records that were returned since the position was set."""
    newest_epoch: int = UNKNOWN
    """The newest leader epoch of the log that was read, also before a position was set."""
    stable_end: int | None = None
    high_watermark: int | None = None
    fault: TransportError | None = None
    """Why it cannot be read. It is reported once, and tried again after a while."""
    fault_is_reported: bool = False
    retry_at: float = 0.0
    """Loop time before which it is not fetched, after an error."""
    retry_pause: float = 0.0
    """Seconds of the latest such pause."""
    replica: int | None = None
    """The follower to fetch from: the leader has named it, or has a damaged copy itself."""
    replica_until: float = 0.0
    replica_epoch: int = UNKNOWN
    """The leader epoch since when it is used."""
    fetched_from: int | None = None
    """The broker that answered last."""
    corrupt_at: int | None = None
    """The position for which another replica was asked, because the batch there could not be read."""
    without_epoch: bool = False
    """Whether the next fetch must not say in which epoch the position was read: the broker has forgotten that epoch."""
    standstill: Standstill = field(default_factory=Standstill)
    taken_at: float = 0.0
    """When something was last taken, or the position last set; loop time."""
    oversized_is_reported: bool = False
    source: "_Broker | None" = None
    """The broker that is asked for it now."""
    served_by_leader_until: float = 0.0
    """Loop time until which the leader must not name a follower."""
    failure: TransportError | WireError | None = None
    """Why nothing can be read; None after an answer without an error."""
    failing_since: float = 0.0
    """Loop time of the first of its failures in a row."""


@dataclass(slots=True, eq=False)
class _Broker:
    """The fetches from one broker."""

    node: int
    session: FetchSession = field(default_factory=FetchSession)
    fetchable: dict[TopicPartition, _Partition] = field(default_factory=dict)
    """The partitions to ask for; those that were added last come last."""
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to ask for."""
    granted: int = 0
    """Bytes that the response to the fetch in flight may have."""
    planned: "_Planned | None" = None
    """The parts of its next fetch, as last decided."""
    delivered_after: int = -1
    """The `take` after which it last returned records."""
    is_held: bool = False
    """Whether it is asked for more only after the next `take`."""
    pause: float = 0.0
    """Seconds of the latest pause after a failed fetch."""
    margin: float = _MARGIN
    """Seconds that it may take to answer, beyond the time for which it may wait."""


class Trouble(NamedTuple):
    """Why nothing can be read from a partition."""

    error: TransportError
    """Retriable if it may end by itself."""
    since: float
    """Loop time of the first failure in a row."""


class _Sent(NamedTuple):
    """The part of a request about a partition."""

    partition: _Partition
    state: InFlight
    request: PartitionRequest


class _Planned(NamedTuple):
    """The parts of a fetch from one broker; they hold as long as no partition changes."""

    changes: int
    """The number of changes of partitions before it."""
    limit: int
    """Bytes for each partition."""
    wanted: Mapping[TopicPartition, PartitionRequest]
    sent: Mapping[TopicPartition, _Sent]


class Fetcher:
    """The positions of assigned partitions, and the records fetched for them. Owned by one event loop.

    Nothing is fetched of a partition before `seek` and `resume`, while it is paused, or while fetched records of it
    have not been taken.

    Invariants:
        * A position advances in the same step that returns its records, and passes what has no record for us.
        * An answer counts only for the position for which it was requested.
        * While nothing is taken, what is fetched stays below the bound, but for a response of each broker. If the
          bound is reached by partitions that are not taken, the others are still fetched, one batch after the other.
        * An error of one partition, or of one broker, does not delay the others.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        read_committed: bool,
        max_bytes: int,
        max_wait: float,
        min_bytes: int = 1,
        may_wait_longer: bool = False,
        rack: str = "",
    ) -> None:
        """Fetch nothing yet.

        Args:
            cluster: The cluster, started. It must follow the topics.
            read_committed: Whether to hide records of open and aborted transactions.
            max_bytes: Bytes that may be fetched and not taken.
            max_wait: Seconds that a broker may wait for records.
            min_bytes: Bytes of records for which a broker waits.
            may_wait_longer: Whether it may wait longer if there are many partitions, and all are idle.
            rack: Where we are; the leader may then name a nearer replica. Empty: fetch from leaders only.
        """
        self._cluster = cluster
        self._read_committed = read_committed
        self._max_bytes = max_bytes
        self._max_wait = max_wait
        self._min_bytes = min_bytes
        self._may_wait_longer = may_wait_longer
        self._rack = rack
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._ready: dict[_Partition, None] = {}
        """Partitions with something to return; the one served last is at the end."""
        self._brokers: dict[int, _Broker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffered = 0
        """Bytes of all chunks."""
        self._takes = 0
        """Counts the calls of `take`."""
        self._changes = 0
        """Counts what may change a request: idle brokers are asked for the same again and again."""
        self._closed = False
        self._leaderless: set[_Partition] = set()
        """Partitions that should be fetched and have no known leader."""
        self._fetched_at = 0.0
        """When something was last fetched; loop time."""
        self.answered_at = 0.0
        """When a broker last answered a fetch, at first when the fetcher was started; loop time."""
        self._left_over = False
        """Whether the latest `take` left records that will probably be taken soon."""
        self.readable = asyncio.Event()
        """Set when `take` may return more than the last time."""
        self.failure: BaseException | None = None
        """The error that ended a task; nothing is fetched any more."""

    def start(self) -> None:
        """Begin to follow the metadata of the cluster."""
        self.answered_at = asyncio.get_running_loop().time()
        self._spawn(self._follow_metadata(), "leaders of fetched partitions")

    async def close(self) -> None:
        """End all fetches, and forget all partitions; takes at most 1 s.

        Brokers forget our sessions. They would keep them for minutes otherwise, and have room for a limited number.
        """
        self._closed = True
        for task in self._tasks:
            task.cancel()
        ending: set[asyncio.Task[None]] = set(self._tasks)
        for broker in self._brokers.values():
            if broker.session.closing() is not None:
                ending.add(asyncio.create_task(self._end_session(broker), name=f"end fetches from {broker.node}"))
        self.remove(self.partitions)  # so that no timer begins anything again
        try:
            if ending:
                await asyncio.wait(ending, timeout=_CLOSE_GRACE)
        finally:
            for task in ending:
                task.cancel()

    async def _end_session(self, broker: _Broker) -> None:
        """Let a broker forget a session."""
        fetch = broker.session.closing()
        if fetch is None:
            return
        try:
            # The other connection may be waiting for records.
            request = fetch_request(fetch, max_bytes=1, wait=0.0, read_committed=self._read_committed)
            await self._cluster.ask(broker.node, request, timeout=_CLOSE_GRACE)
        except WireError as error:
            logger.debug("broker %d may keep a fetch session: %s", broker.node, error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if not self._closed:
            self.failure = error or ConnectionLostError(f"the task for {task.get_name()} ended")
            self.readable.set()

    # The assignment -------------------------------------------------------------------

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The assigned partitions."""
        return tuple(self._partitions)

    def __contains__(self, topic_partition: object) -> bool:
        return topic_partition in self._partitions

    def add(self, partitions: Collection[TopicPartition]) -> None:
        """Add assigned partitions; each is paused until it has a position. Those that we have stay as they are."""
        for name in partitions:
            self._partitions.setdefault(name, _Partition(name))

    def remove(self, partitions: Collection[TopicPartition]) -> None:
        """Forget partitions, with what was fetched for them."""
        for name in partitions:
            partition = self._partitions.pop(name, None)
            if partition is not None:
                partition.life += 1
                partition.paused = True
                self._drop(partition)

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """The next offset to return; None before the first `seek`."""
        partition = self._partitions.get(topic_partition)
        return None if partition is None or partition.position is None else partition.position.offset

    def epoch_at(self, topic_partition: TopicPartition, offset: int) -> int:
        """The leader epoch of the record before an offset up to the position; -1 if it is unknown."""
        partition = self._partitions.get(topic_partition)
        if partition is None or partition.begin is None or partition.position is None:
            return UNKNOWN
        # 1. Positions have their epochs.
        for position in (partition.position, partition.begin):
            if offset == position.offset:
                return position.epoch
        # 2. Nobody has read up to there: another leader may have written the record.
        if offset > partition.position.offset:
            return UNKNOWN
        return epoch_before(partition.epoch_starts, offset)

    def newest_epoch(self, topic_partition: TopicPartition) -> int:
        """The newest leader epoch that was read, also before the position that was set last; -1 if it is unknown."""
        partition = self._partitions.get(topic_partition)
        return UNKNOWN if partition is None else partition.newest_epoch

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """The end of the log according to the latest fetch; None if it is unknown."""
        partition = self._partitions.get(topic_partition)
        if partition is None:
            return None
        return partition.stable_end if self._read_committed else partition.high_watermark

    def trouble(self, topic_partition: TopicPartition) -> Trouble | None:
        """Return why nothing can be read from a partition, although it should be; None if nothing is wrong."""
        partition = self._partitions.get(topic_partition)
        if partition is None or partition.failure is None:
            return None
        error = partition.failure
        if isinstance(error, WireError):
            cause = error.cause._replace(topics=(topic_partition.topic,))
            error = request_error(cause, f"return the records of {topic_partition}")
        return Trouble(error, partition.failing_since)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop fetching and returning these partitions; what was fetched stays."""
        for name in partitions:
            partition = self._partitions.get(name)
            if partition is not None:
                partition.paused = True
                partition.failure = None
                self._place(partition)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Resume these partitions.

        Raises:
            StateError: A partition has no position yet.
        """
        for name in partitions:
            partition = self._partitions.get(name)
            if partition is None:
                continue
            if partition.position is None:
                raise StateError(f"{name} was resumed before it was seeked: it has no position yet")
            partition.paused = False
            self._place(partition)
            self.readable.set()

    def seek(self, topic_partition: TopicPartition, offset: int, epoch: int = UNKNOWN) -> None:
        """Set a position.

        Args:
            topic_partition: The partition; ignored if it is not assigned.
            offset: The next offset to return.
            epoch: The leader epoch of the record before it, if it is known: the broker then notices if its log is not
                the one in which that record was.
        """
        partition = self._partitions.get(topic_partition)
        if partition is None:
            return
        topic_id = self._cluster.metadata.topic_id(topic_partition.topic)
        is_back = partition.position is not None and offset <= partition.position.offset
        if not is_back or topic_id != partition.topic_id:
            partition.newest_epoch = UNKNOWN  # of offsets that were not read, or of another log
        partition.newest_epoch = max(partition.newest_epoch, epoch)
        self._move(partition, Position(offset, epoch))
        partition.topic_id = topic_id
        partition.replica = None
        self._place(partition)

    def _move(self, partition: _Partition, position: Position) -> None:
        """Set the position; what was fetched for another one does not count."""
        partition.life += 1
        partition.begin = position
        partition.position = position
        partition.epoch_starts.clear()
        partition.fault = None
        partition.retry_at = 0.0
        partition.retry_pause = 0.0
        partition.without_epoch = False
        partition.corrupt_at = None
        partition.standstill = Standstill()
        partition.failure = None
        partition.taken_at = asyncio.get_running_loop().time()
        if partition.high_watermark is not None and partition.high_watermark < position.offset:
            partition.high_watermark = None
            partition.stable_end = None
        self._drop(partition)

    def _drop(self, partition: _Partition) -> None:
        """Drop what was fetched."""
        self._ready.pop(partition, None)
        self._buffered -= partition.chunk_bytes
        partition.chunk = None
        partition.chunk_bytes = 0
        partition.oversized_is_reported = False
        self._place(partition)

    # Records --------------------------------------------------------------------------

    def take(self, allowance_of: AllowanceOf) -> PollResult:
        """Take fetched records, as many as the allowances permit, and advance the positions in the same step.

        Allowances are those at the start of this call: records taken from one partition count against the others.
        """
        self.readable.clear()
        result = PollResult(asyncio.get_running_loop().time())
        self._left_over = False
        for partition in list(self._ready):
            if partition.paused:
                continue
            if partition.fault is not None:
                self._report(partition, result)
                continue
            self._take_from(partition, allowance_of, result)
            if result.records and result.records >= result.most:
                self._left_over = True
                break  # The limit is reached for all; calling `allowance_of` costs more than a record.
        self._takes += 1
        for broker in self._brokers.values():
            if broker.is_held:
                broker.wanted.set()
        return result

    def _take_from(self, partition: _Partition, allowance_of: AllowanceOf, result: PollResult) -> None:
        chunk = partition.chunk
        position = partition.position
        if chunk is None or position is None:
            return
        allowance = allowance_of(partition.name)
        if allowance.records <= 0:
            self._left_over = self._left_over or partition.taken_at > result.at - _ACTIVE
            return
        limit, room, alone = result.left_of(allowance)
        if limit <= 0:
            return
        records, sizes = chunk.take(limit, room, alone=alone)
        if chunk.error is None:
            partition.failure = None
        self._measure(partition, chunk)
        if chunk.next_offset != position.offset:
            self._advance(partition, chunk, result.at)
            undecodable = chunk.undecodable or None
            result.add(FetchedBatch(partition.name, records, sizes, chunk.next_offset, undecodable=undecodable))
        # 1. Everything was taken: the next fetch may be sent.
        if chunk.drained:
            self._drop(partition)
            self._check_progress(partition, chunk)
        # 2. The next record does not fit.
        elif chunk.oversized > allowance.bytes:
            oversized = Oversized(partition.name, chunk.oversized)
            (result.repeated if partition.oversized_is_reported else result.new).append(oversized)
            partition.oversized_is_reported = True
        # 3. The next batch cannot be decoded. The records before it were returned first.
        elif chunk.error is not None:
            self._fail_corrupt(partition, chunk.error)
            if not records:
                self._report(partition, result)
        # 4. The rest must wait its turn.
        else:
            self._left_over = True
            self._ready.pop(partition, None)
            self._ready[partition] = None

    def _measure(self, partition: _Partition, chunk: Chunk) -> None:
        """Count the memory of what was fetched; it changes with the batch that is unpacked."""
        size = chunk.size + chunk.unpacked_bytes
        self._buffered += size - partition.chunk_bytes
        partition.chunk_bytes = size

    def _advance(self, partition: _Partition, chunk: Chunk, now: float) -> None:
        """Move the position to that of its chunk."""
        known = partition.epoch_starts
        for start in chunk.epoch_starts:
            if not known or start.epoch > known[-1].epoch:
                known.append(start)
                partition.newest_epoch = max(partition.newest_epoch, start.epoch)
        epoch = epoch_before(known, chunk.next_offset)
        if epoch == UNKNOWN and partition.position is not None:
            epoch = partition.position.epoch
        partition.position = Position(chunk.next_offset, epoch)
        partition.without_epoch = False
        partition.taken_at = now
        partition.oversized_is_reported = False

    def _check_progress(self, partition: _Partition, chunk: Chunk) -> None:
        """Notice data that do not move the position: asking for them again at once would spin."""
        decision = partition.standstill.note(partition.name, chunk.next_offset, chunk.size, moved=not chunk.stalled)
        if decision is not None:
            self._apply(partition, decision)

    # Errors ---------------------------------------------------------------------------

    def _fail(self, partition: _Partition, error: TransportError, *, retries: bool = True) -> None:
        """Record why a partition cannot be read; drop what was fetched, report it once, and try again after a while."""
        partition.fault = error
        partition.fault_is_reported = False
        self._note_failure(partition, error)
        self._drop(partition)
        self._ready[partition] = None
        self.readable.set()
        if retries:
            loop = asyncio.get_running_loop()
            loop.call_later(FAULT_INTERVAL, self._try_again, partition, error)

    def _fail_corrupt(self, partition: _Partition, error: CorruptRecordError) -> None:
        """Ask another replica once for a batch that cannot be read; report it if that does not help.

        The copy of one broker may be damaged, or only the response.
        """
        position = partition.position
        other = self._another_replica(partition)
        if position is None or other is None or partition.corrupt_at == position.offset:
            partition.replica = None
            self._fail(partition, error)
            return
        logger.warning(
            "the batch at offset %d of %s cannot be read as broker %s returned it; trying the copy of broker %d",
            position.offset, partition.name, partition.fetched_from, other,
        )  # fmt: skip
        partition.corrupt_at = position.offset
        self._note_failure(partition, error)
        self._drop(partition)
        leader = self._cluster.metadata.leader(partition.name)
        if leader is not None and leader.node == other:
            self._give_up_follower(partition)
        else:
            self._use_follower(partition, other, _SUBSTITUTE_AGE)

    def _another_replica(self, partition: _Partition) -> int | None:
        """Return a replica other than the one that answered last, if possible the leader; None if none is in sync."""
        metadata = self._cluster.metadata
        known = metadata.partition(partition.name)
        if known is None:
            return None
        usable = [node for node in known.in_sync if node in metadata.brokers and node not in known.offline]
        others = [node for node in usable if node != partition.fetched_from]
        return min(others, key=lambda node: node != known.leader, default=None)

    def _try_again(self, partition: _Partition, fault: TransportError) -> None:
        if partition.fault is fault:
            partition.fault = None
            self._ready.pop(partition, None)
            self._place(partition)

    def _note_failure(self, partition: _Partition, error: TransportError | WireError) -> None:
        if partition.failure is None:
            partition.failing_since = asyncio.get_running_loop().time()
        partition.failure = error

    def _report(self, partition: _Partition, result: PollResult) -> None:
        if partition.fault is not None and not partition.fault_is_reported:
            partition.fault_is_reported = True
            result.new.append(Fault(partition.name, partition.fault))

    def _postpone(self, partition: _Partition) -> None:
        """Leave a partition out of the next fetches: it would be answered in the same way at once."""
        loop = asyncio.get_running_loop()
        partition.retry_pause = min(max(2 * partition.retry_pause, _LEAST_PAUSE), _MOST_PAUSE)
        partition.retry_at = loop.time() + partition.retry_pause
        self._place(partition)
        loop.call_at(partition.retry_at, self._end_pause, partition, partition.retry_at)

    def _end_pause(self, partition: _Partition, retry_at: float) -> None:
        if partition.retry_at == retry_at:
            partition.retry_at = 0.0  # a timer may be early by the resolution of the clock
            self._place(partition)

    # Whom to ask ----------------------------------------------------------------------

    async def _follow_metadata(self) -> None:
        """Ask the leaders that the latest metadata name; notice topics that were created again."""
        metadata = self._cluster.metadata
        pause: float | None = None
        while True:
            version = metadata.version
            for partition in list(self._partitions.values()):
                self._check_topic(partition)
                self._check_replica(partition)
                self._place(partition)
            pause = min(2 * pause if pause else _LEAST_PAUSE, _MOST_PAUSE) if self._leaderless else None
            try:
                async with asyncio.timeout(pause):
                    await self._cluster.updated_after(version)
            except TimeoutError:
                self._cluster.request_refresh()  # up to date, but a leader may be elected, or the topic created, soon

    def _check_topic(self, partition: _Partition) -> None:
        topic_id = self._cluster.metadata.topic_id(partition.name.topic)
        if topic_id is None or partition.position is None or topic_id == partition.topic_id:
            return
        if partition.topic_id is None:
            partition.topic_id = topic_id
            return
        if not isinstance(partition.fault, TopicRecreatedError):
            error = TopicRecreatedError(partition.name, partition.position.offset)
            self._fail(partition, error, retries=False)  # only a seek makes sense of the new log

    def _check_replica(self, partition: _Partition) -> None:
        """Return to the leader if new metadata say that its follower cannot serve the partition as well as before.

        A follower that is behind reports no error, only an earlier end of the log. The leader decides anew: it may know
        better than these metadata.
        """
        if partition.replica is None:
            return
        known = self._cluster.metadata.partition(partition.name)
        if (
            known is None
            or known.epoch != partition.replica_epoch
            or partition.replica in known.offline
            or partition.replica not in known.in_sync
        ):
            partition.replica = None

    def _place(self, partition: _Partition) -> None:
        """Let the broker that is to be asked for a partition know of it, and no other."""
        self._changes += 1
        is_wanted = self._is_wanted(partition)
        node = self._node_for(partition) if is_wanted else None
        if is_wanted and node is None:
            self._miss_leader(partition)
        else:
            self._leaderless.discard(partition)
        source = partition.source
        if source is not None and source.node != node:
            source.fetchable.pop(partition.name, None)
            partition.source = None
        if node is None:
            return
        broker = self._brokers.get(node) or self._begin(node)
        broker.fetchable.setdefault(partition.name, partition)
        partition.source = broker
        broker.wanted.set()

    def _is_wanted(self, partition: _Partition) -> bool:
        """Whether a partition is to be fetched now."""
        if partition.position is None or partition.paused or partition.chunk is not None or partition.fault is not None:
            return False
        is_ours = self._partitions.get(partition.name) is partition
        return is_ours and asyncio.get_running_loop().time() >= partition.retry_at

    def _node_for(self, partition: _Partition) -> int | None:
        """Return the broker to ask for a partition; None if it has no known leader."""
        metadata = self._cluster.metadata
        if partition.replica is not None:
            now = asyncio.get_running_loop().time()
            if now < partition.replica_until and partition.replica in metadata.brokers:
                return partition.replica
            partition.replica = None
        leader = metadata.leader(partition.name)
        return None if leader is None else leader.node

    def _miss_leader(self, partition: _Partition) -> None:
        """Note that nobody can be asked for a partition, and look up its leader."""
        is_denied = partition.name.topic in self._cluster.metadata.denied
        self._note_failure(partition, no_leader(partition.name, is_denied=is_denied))
        if partition not in self._leaderless:
            self._leaderless.add(partition)
            self._cluster.request_refresh()

    def _begin(self, node: int) -> _Broker:
        broker = self._brokers[node] = _Broker(node)
        self._spawn(self._fetch_from(broker), f"fetches from broker {node}")
        return broker

    # Fetches --------------------------------------------------------------------------

    async def _fetch_from(self, broker: _Broker) -> None:
        """Fetch from one broker, one request at a time."""
        while True:
            await broker.wanted.wait()
            if self._ready:
                # Drained partitions come one by one.
                await asyncio.sleep(min(_GATHER * len(self._partitions), _LONGEST_GATHER))
            broker.wanted.clear()
            # Records left after a `take` may stay for long, and must not stop the other partitions.
            broker.is_held = self._buffered >= self._max_bytes and broker.delivered_after == self._takes
            if broker.is_held or not broker.fetchable:
                continue
            try:
                ids_allowed = await self._cluster.supports(broker.node, FETCH, FIRST_BY_ID, purpose=Purpose.FETCH)
                fetch, sent = self._plan(broker, ids_allowed=ids_allowed)
                wait = self._wait()
                request = fetch_request(
                    fetch,
                    max_bytes=broker.granted,
                    min_bytes=self._min_bytes,
                    wait=wait,
                    read_committed=self._read_committed,
                    rack=self._rack_for(broker),
                )
                response = await self._cluster.ask(
                    broker.node, request, purpose=Purpose.FETCH, timeout=wait + broker.margin
                )
            except WireError as error:
                self._note_silence(broker, error)
                await self._rest(broker)
                continue
            finally:
                broker.granted = 0
            await self._accept(broker, fetch, sent, response)

    def _note_silence(self, broker: _Broker, error: WireError) -> None:
        """Note that a broker did not answer."""
        logger.debug("broker %d did not answer a fetch: %s", broker.node, error)
        broker.session = broker.session.unanswered()
        if isinstance(error, RequestTimedOutError):
            broker.margin = min(2 * broker.margin, _LONGEST_MARGIN)
        self._note_failures(broker, error)
        for partition in list(broker.fetchable.values()):
            if partition.replica == broker.node:
                self._give_up_follower(partition)

    def _use_follower(self, partition: _Partition, node: int, seconds: float) -> None:
        """Ask a follower for a partition, for at most so long."""
        leader = self._cluster.metadata.leader(partition.name)
        partition.replica = node
        partition.replica_until = asyncio.get_running_loop().time() + seconds
        partition.replica_epoch = UNKNOWN if leader is None else leader.epoch
        self._place(partition)

    def _give_up_follower(self, partition: _Partition) -> None:
        """Ask the leader for a partition that a follower could not serve, and let it serve it itself for a while."""
        partition.replica = None
        partition.served_by_leader_until = asyncio.get_running_loop().time() + _LEADER_AGE
        self._place(partition)

    def _note_failures(self, broker: _Broker, error: WireError) -> None:
        for partition in broker.fetchable.values():
            self._note_failure(partition, error)

    async def _accept(
        self, broker: _Broker, fetch: SessionFetch, sent: Mapping[TopicPartition, _Sent], response: Any
    ) -> None:
        """Take over what a broker answered."""
        self.answered_at = asyncio.get_running_loop().time()
        broker.margin = _MARGIN
        outcome = broker.session.answered(fetch, response)
        broker.session = outcome.session
        if outcome.parts is None:
            logger.debug("a fetch from broker %d does not count: %s", broker.node, outcome.problem)
        if outcome.pause:
            self._note_failures(broker, IncompleteResponseError(outcome.problem))
            await self._rest(broker)
            return
        broker.pause = 0.0
        for endpoint in response.endpoints or ():
            self._cluster.learn_broker(Broker(*endpoint))
        for name, part in (outcome.parts or {}).items():
            known = sent.get(name)
            if known is None or not belongs(known.state, self._state(known.partition)):
                continue
            known.partition.fetched_from = broker.node
            leader = self._cluster.metadata.leader(name)
            decision = decide_fetch(
                name,
                part,
                known.request,
                node=broker.node,
                leader=broker.node if leader is None else leader.node,
                brokers=self._cluster.metadata.brokers,
                read=known.partition.epoch_starts,
            )
            self._apply(known.partition, decision)
        broker.wanted.set()

    def _state(self, partition: _Partition) -> InFlight | None:
        """Return what an answer about a partition must have been requested for."""
        if partition.position is None or partition.source is None:
            return None
        leader = self._cluster.metadata.leader(partition.name)
        return InFlight(
            ownership=partition.life,
            offset=partition.position.offset,
            fetched_epoch=UNKNOWN if partition.without_epoch else partition.position.epoch,
            leader_epoch=UNKNOWN if leader is None else leader.epoch,
            session=partition.source.node,
        )

    def _apply(self, partition: _Partition, decision: FetchDecision) -> None:
        """Act on what an answer about a partition means."""
        # 1. Records, or none that are new.
        if isinstance(decision, Deliver):
            self._deliver(partition, decision)
            return
        # 2. Another replica is nearer.
        if isinstance(decision, Redirect):
            self._use_follower(partition, decision.replica, _REPLICA_AGE)
            return
        partition.replica = None
        # 3. The same position again, after something else.
        if isinstance(decision, Retry):
            self._retry(partition, decision)
        # 4. The log differs from the one that we have read.
        elif isinstance(decision, Diverged):
            self._diverge(partition, decision)
        # 5. The position is not in the log.
        elif isinstance(decision, OutOfRange):
            self._fail(partition, OffsetOutOfRangeError(partition.name, decision.offset))
        # 6. The broker cannot read its copy.
        elif isinstance(decision.error, CorruptRecordError):
            self._fail_corrupt(partition, decision.error)
        # 7. The partition cannot be read.
        else:
            self._fail(partition, decision.error)

    def _diverge(self, partition: _Partition, decision: Diverged) -> None:
        """Act on a log that may differ from the one that was read."""
        # 1. It has all records before the position, as far as anybody can tell, but not their epoch: compaction may
        # have removed the others. With the same epoch, the answer would be the same again and again.
        if partition.position is not None and decision.position.offset == partition.position.offset:
            partition.position = decision.position
            self._place(partition)
            return
        # 2. The cluster has lost records that we have read: a seek decides what to do about it.
        error = LogTruncatedError(partition.name, decision.position.offset, decision.lost_until)
        self._fail(partition, error, retries=False)

    def _deliver(self, partition: _Partition, decision: Deliver) -> None:
        partition.retry_pause = 0.0
        if not decision.records or not isinstance(partition.failure, CorruptRecordError):
            partition.failure = None
        if decision.from_leader:
            partition.high_watermark = decision.high_watermark
            partition.stable_end = decision.stable_end
        elif decision.high_watermark is not None and decision.stable_end is not None:
            partition.high_watermark = max(decision.high_watermark, partition.high_watermark or 0)
            partition.stable_end = max(decision.stable_end, partition.stable_end or 0)
        if not decision.records or partition.position is None:
            return
        partition.chunk = Chunk(
            partition.name,
            decision.records,
            partition.position.offset,
            aborted=decision.aborted if self._read_committed else (),
            unpack_limit=max(UNPACK_LIMIT, self._max_bytes),
        )
        self._measure(partition, partition.chunk)
        if partition.source is not None:
            partition.source.delivered_after = self._takes
        self._fetched_at = asyncio.get_running_loop().time()
        self._ready[partition] = None
        self._place(partition)
        self.readable.set()

    def _retry(self, partition: _Partition, decision: Retry) -> None:
        if decision.step is Step.LEADER:
            self._give_up_follower(partition)
            return
        if decision.step is Step.WITHOUT_EPOCH:
            partition.without_epoch = True
            self._place(partition)
            return
        if decision.code:
            self._note_failure(partition, passing_error(decision.code, partition.name))
        if decision.step is Step.METADATA:
            self._cluster.request_refresh()
            hint = decision.leader
            if hint is not None and self._cluster.metadata.learn_leader(partition.name, Leader(*hint)):
                self._place(partition)
                return
        self._postpone(partition)

    async def _rest(self, broker: _Broker) -> None:
        """Leave a broker alone for a while that could not answer."""
        broker.pause = min(max(2 * broker.pause, _LEAST_PAUSE), _MOST_PAUSE)
        await asyncio.sleep(broker.pause)
        broker.wanted.set()

    def _plan(self, broker: _Broker, *, ids_allowed: bool) -> tuple[SessionFetch, Mapping[TopicPartition, _Sent]]:
        """Decide what to ask a broker for."""
        limits = fetch_limits(self._max_bytes, self._used(), len(self._partitions), self._idle_brokers())
        broker.granted = limits.response
        planned = broker.planned
        if planned is None or (planned.changes, planned.limit) != (self._changes, limits.partition):
            planned = broker.planned = self._requests(broker, limits.partition)
        return broker.session.plan(planned.wanted, ids_allowed=ids_allowed), planned.sent

    def _requests(self, broker: _Broker, limit: int) -> _Planned:
        """Decide what to ask a broker for of each partition."""
        wanted: dict[TopicPartition, PartitionRequest] = {}
        sent: dict[TopicPartition, _Sent] = {}
        for name, partition in broker.fetchable.items():
            state = self._state(partition)
            if state is None:
                continue
            request = PartitionRequest(partition.topic_id, state.offset, state.leader_epoch, state.fetched_epoch, limit)
            wanted[name] = request
            sent[name] = _Sent(partition, state, request)
        return _Planned(self._changes, limit, wanted, sent)

    def _rack_for(self, broker: _Broker) -> str:
        """Return where a broker is to believe that we are."""
        if self._rack:
            now = asyncio.get_running_loop().time()
            if any(now < partition.served_by_leader_until for partition in broker.fetchable.values()):
                return ""
        return self._rack

    def _used(self) -> int:
        """Return the bytes that are fetched and not taken, with those that fetches in flight may return."""
        return self._buffered + sum(broker.granted for broker in self._brokers.values())

    def _idle_brokers(self) -> int:
        """Return how many brokers may be asked now, at least one."""
        return max(sum(1 for broker in self._brokers.values() if broker.fetchable and not broker.granted), 1)

    def _wait(self) -> float:
        """Return for how many seconds a broker may hold a fetch that has nothing to return."""
        is_idle = (
            self._may_wait_longer
            and not self._ready
            and self._fetched_at < asyncio.get_running_loop().time() - _ACTIVE
            and not any(partition.paused for partition in self._partitions.values())
        )
        return fetch_wait(self._max_wait, len(self._partitions), left_over=self._left_over, idle=is_idle)


def fetch_wait(usual: float, partitions: int, *, left_over: bool, idle: bool) -> float:
    """Return for how many seconds brokers may hold a fetch that has nothing to return.

    A broker gets only one fetch at a time. A partition that is drained or resumed while the fetch of its idle
    neighbours is held must wait for that fetch. So while a partition is being drained, fetches are held only briefly.
    Each partition in a fetch costs a few microseconds: if all partitions are idle, every fetch contains all of them, so
    with many partitions the wait is longer. Arriving records end the wait.

    Args:
        usual: The setting `fetch_max_wait`.
        partitions: The number of assigned partitions.
        left_over: Whether a fetched partition is still being drained.
        idle: Whether no partition is paused and none had records lately.

    Example:
        >>> [fetch_wait(0.1, 2_000, left_over=left_over, idle=not left_over) for left_over in (True, False)]
        [0.1, 0.5]
    """
    if left_over:
        return min(usual, max(_HURRIED_WAIT, partitions / 10_000))
    return max(usual, min(partitions / 4000, _IDLE_WAIT)) if idle else usual
