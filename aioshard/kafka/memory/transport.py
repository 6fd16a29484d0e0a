"""An in-memory member of a consumer group: the `Transport` port without a network."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from aioshard.errors import (
    ClientLostError,
    CommitError,
    CommitRefusedError,
    ConnectError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    StateError,
    TopicRecreatedError,
    TransportError,
)
from aioshard.kafka.groupless import manual_membership
from aioshard.kafka.memory.broker import InMemoryBroker, PartitionLog
from aioshard.ports import (
    NOT_A_MEMBER,
    Allowance,
    AllowanceOf,
    ChosenProtocol,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Message,
    Oversized,
    TransactionCounts,
    record_size,
)
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.serde.header_names import undecodable_among

logger = logging.getLogger("aioshard.kafka.memory.transport")

_FAULT_INTERVAL = 1.0
"""Seconds after which a persistent fault is reported again; a client retries a failed fetch with backoff."""


Items = list[FetchedBatch | Fault | Oversized]


@dataclasses.dataclass(slots=True)
class _Assigned:
    """An assigned partition; a new one is paused and has no position."""

    position: int | None = None
    paused: bool = True
    end: int | None = None
    """The readable end of the log as of the last scan."""
    log: PartitionLog | None = None
    """The log that was read last; another one after its topic was deleted and created again."""
    epoch: int = 0
    """The leader epoch of the log in which the record before the position was read."""
    quiet_until: float = 0.0
    """When a persistent fault is due to be reported again."""
    oversized_at: int | None = None
    """Offset of the last record that was reported as oversized."""


Operation = Literal[
    "start", "heartbeat", "join", "fetch", "commit", "commit reply", "committed", "log ranges", "partitions", "close"
]
"""The requests of a member. The latency of `heartbeat` is the time until the member notices a rebalance or its own
loss, that of `join` the time from the new generation to its `assigned`, and that of `fetch` the time between two
responses with records; that of `commit` passes before the offsets are stored and that of `commit reply` after."""

_TO_COORDINATOR = frozenset[Operation](["start", "commit", "commit reply", "committed"])

Latency = Callable[[Operation], float]
"""The seconds that an operation takes; called each time."""


class InMemoryTransport:
    """One client of an `InMemoryBroker`; implements `aioshard.ports.Transport`.

    Several clients of a group may run in one event loop. Each has one task that follows the group: it awaits the
    listener's `revoked`, rejoins and calls `assigned`.

    Invariants:
        * Records are returned and the position is moved in one step, so a cancelled poll loses nothing.
        * While `revoked` runs, no records are returned.
    """

    def __init__(
        self,
        broker: InMemoryBroker,
        group_id: str,
        *,
        isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed",
        latency: Latency | None = None,
        max_batch_records: int = 500,
        max_fetch_offsets: int | None = None,
        rebalance_timeout: float = 60.0,
        session_timeout: float = 45.0,
        assign: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Create a client that has not joined yet.

        Args:
            broker: Broker with its topics and its group.
            group_id: The group to join.
            isolation_level: Whether records of open and aborted transactions are read.
            latency: Duration of each operation; by default none takes time.
            max_batch_records: Maximum number of records in a batch.
            max_fetch_offsets: Number of offsets that one fetch of a partition covers, with or without records: a
                longer gap yields batches without records. By default everything readable.
            rebalance_timeout: Seconds after which a member that has not released its partitions is removed from
                the group.
            session_timeout: Seconds after which a crashed member is removed from the group.
            assign: Manual assignment: partition numbers by topic. The client takes them at the start and keeps them;
                it is not a member of the group, and its commits are stored as long as the group has no members.
        """
        self._broker = broker
        self._group = broker.group(group_id)
        self._latency = latency
        self._read_committed = isolation_level == "read_committed"
        self._max_batch_records = max_batch_records
        self._max_fetch_offsets = max_fetch_offsets
        self._rebalance_timeout = rebalance_timeout
        self._session_timeout = session_timeout
        self._assign = assign
        self._listener: GroupListener | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._topics: Collection[str] = ()
        self._pattern: str | None = None
        self._membership = NOT_A_MEMBER
        self._member_id = ""
        self._revoking = False
        self._assigned: dict[TopicPartition, _Assigned] = {}
        self._next_fetch = 0.0
        self._woken = False
        self._transactions = TransactionCounts()
        self._readable = asyncio.Event()
        self._group_changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reachable = asyncio.Event()
        """Set unless the client is cut off from the coordinator."""
        self._reachable.set()
        self._removal: asyncio.TimerHandle | None = None
        self._ending = False
        self._crashed = False
        self._lost: TransportError | None = None

    # Lifecycle -------------------------------------------------------------------------

    async def start(
        self,
        topics: Collection[str],
        pattern: str | None,
        listener: GroupListener,
        *,
        needs_all: bool = True,  # noqa: ARG002 - everybody may see everything
    ) -> None:
        """Join the group; see `Transport.start`. Topics that do not exist are created.

        Raises:
            StateError: The client was started before.
            GroupHasMembersError: Partitions are assigned manually, and the group has members.
            TransportError: An assigned partition does not exist, the broker is not available, or a test scripted the
                error.
        """
        if self._listener is not None:
            raise StateError("this client was started before: create a new one with the transport factory")
        self._clock = asyncio.get_running_loop().time
        self._listener = listener
        await self._pass_time("start")
        self._broker.check_available()
        if self._assign is not None:
            self._take_assigned(self._assign, listener)
            return
        for topic in topics:
            self._broker.ensure_topic(topic)
        self._topics, self._pattern = topics, pattern
        self._broker.watch(self._changed)
        self._member_id = self._group.join(topics, pattern)
        self._task = asyncio.create_task(self._follow_group(listener), name=f"in-memory client {self._member_id}")

    def subscribe(self, topics: Collection[str], pattern: str | None) -> None:
        """See `Transport.subscribe`. Topics that do not exist are created."""
        if self._task is None:
            raise ClientLostError("the client has not joined, or is closed")
        for topic in topics:
            self._broker.ensure_topic(topic)
        self._topics, self._pattern = topics, pattern
        self._group.subscribe(self._member_id, topics, pattern)

    def _take_assigned(self, assign: Mapping[str, Sequence[int]], listener: GroupListener) -> None:
        for topic, numbers in assign.items():
            self._broker.ensure_topic(topic, at_least=max(numbers) + 1)
            self._broker.log(topic, max(numbers))
        self._group.refuse_beside_members()
        self._broker.watch(self._changed)
        self._membership = manual_membership()
        partitions = [TopicPartition(topic, number) for topic, numbers in assign.items() for number in numbers]
        self._assigned = {partition: _Assigned() for partition in partitions}
        listener.assigned(partitions, self._membership)

    async def close(self) -> None:
        """Leave the group; wait for a running `revoked`. See `Transport.close`."""
        self._ending = True
        self._changed()
        self._broker.unwatch(self._changed)
        try:
            if self._task is not None:
                await self._task
            if not self._crashed:
                await self._pass_time("close")
        finally:
            if not self._crashed and self._reachable.is_set():
                self._group.leave(self._member_id)
            self._membership = NOT_A_MEMBER
            self._assigned = {}
            self.kill(ClientLostError("the client is closed: create a new one with the transport factory"))

    def kill(self, error: TransportError | None = None) -> None:
        """End the client's background work: every poll raises from now on, while the group still has the member."""
        self._lost = error or ClientLostError("the client's background work ended: the test has killed it")
        self._changed()

    def crash(self) -> None:
        """Act as after `kill -9`: nothing reaches the broker any more, not even leaving the group.

        The group removes the member `session_timeout` seconds later, or when a test calls `lose` on it.
        """
        self._crashed = self._ending = True
        self._reachable.set()
        self.kill()
        self._broker.unwatch(self._changed)
        self._leave_in(self._session_timeout)

    def _leave_in(self, seconds: float) -> asyncio.TimerHandle:
        """Remove the member from the group after some time, unless the timer is cancelled."""
        return asyncio.get_running_loop().call_later(seconds, self._group.leave, self._member_id)

    def cut_off(self) -> None:
        """Leave every request to the coordinator unanswered, including heartbeats and commits; fetches continue.

        `session_timeout` seconds later the group removes the member. The client then gives up its partitions by
        itself, because the broker cannot reach it.
        """
        if self._ending or not self._reachable.is_set():
            return
        self._reachable.clear()
        self._removal = self._leave_in(self._session_timeout)
        self.owned_until = self._removal.when()
        self._changed()

    def reconnect(self) -> None:
        """Undo `cut_off`: the client is still a member, or joins again. A closed client stays closed."""
        if self._ending or self._removal is None:
            return
        self._removal.cancel()
        if self._member_id in self._group.members:
            self.owned_until = math.inf
        self._reachable.set()
        self._changed()

    # The group -------------------------------------------------------------------------

    last_heartbeat: float | None = None
    slow_join: str | None = None
    inherits_within: float = 0.0
    group_protocol: ChosenProtocol | None = None

    owned_until: float = math.inf
    """Loop time from which on another member may own the partitions; `cut_off` sets it, and a test may."""

    @property
    def owned_for(self) -> float:
        """See `Transport.owned_for`."""
        return self.owned_until - self._clock()

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if self._ending:
            return None
        if not self._broker.available:
            return "the in-memory broker is not available: the test has set broker.available to False"
        return None if self._reachable.is_set() else "the coordinator does not answer: the test has cut the client off"

    @property
    def transaction_counts(self) -> TransactionCounts:
        """See `Transport.transaction_counts`."""
        return self._transactions

    @property
    def hang(self) -> str | None:
        """See `Transport.hang`: no transaction waits for longer than the test says."""
        return None

    @property
    def missing_topics(self) -> Sequence[str]:
        """See `Transport.missing_topics`; the in-memory broker creates topics when they are subscribed."""
        return ()

    def membership(self) -> Membership:
        """See `Transport.membership`."""
        return self._membership

    async def _follow_group(self, listener: GroupListener) -> None:
        try:
            while not self._ending:
                self._group_changed.clear()
                if self._reachable.is_set():
                    await self._take_next_step(listener)
                else:
                    await self._wait_for_coordinator(listener)
        except Exception as error:
            # A listener must not raise. A client of a real broker would continue in an undefined state; a test must
            # notice.
            logger.exception("the group listener of %s raised", self._member_id)
            lost = ClientLostError(f"the group listener raised {type(error).__name__}: {error}")
            lost.__cause__ = error
            self.kill(lost)
            self._group.leave(self._member_id)

    async def _wait_for_coordinator(self, listener: GroupListener) -> None:
        """Wait for the coordinator, and give up all partitions when the session expires."""
        removal = self._removal if self._membership != NOT_A_MEMBER else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(removal.when() if removal is not None else None):
                await self._group_changed.wait()
                return
        await self._release(listener, lost=True)

    async def _take_next_step(self, listener: GroupListener) -> None:
        duty = self._group.duty(self._member_id)
        if duty == "nothing":
            await self._group_changed.wait()
            return
        await self._pass_time("join" if duty == "adopt" else "heartbeat")
        if duty != "adopt":
            await self._release(listener, lost=duty == "join anew")
        # Meanwhile the group may have moved on, or the client may have been closed or cut off.
        if self._ending or not self._reachable.is_set():
            return
        if duty == "rejoin":
            self._group.rejoin(self._member_id)
        elif duty == "join anew":
            self._member_id = self._group.join(self._topics, self._pattern)
        elif self._group.duty(self._member_id) == "adopt":
            partitions = self._group.assignment(self._member_id)
            self._membership = self._group.adopt(self._member_id)
            self.owned_until = math.inf
            self._assigned = {partition: _Assigned() for partition in partitions}
            listener.assigned(partitions, self._membership)

    async def _release(self, listener: GroupListener, *, lost: bool) -> None:
        """Report all partitions as revoked or lost; afterwards another member may own them."""
        partitions = () if self._ending else self.assigned
        if partitions and not lost:
            remove = self._leave_in(self._rebalance_timeout)
            self._revoking = True
            try:
                await listener.revoked(partitions)
            finally:
                self._revoking = False
                remove.cancel()
        self._membership = NOT_A_MEMBER
        if partitions and lost:
            listener.lost(partitions)
        self._assigned = {}

    # Records ---------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`.

        An `Oversized` record ends a poll once; later polls repeat it when they end for another reason, including
        timeout and `wake`.

        Raises:
            ClientLostError: The client was killed, has crashed, or its listener raised.
            TransportError: A test scripted the error, which ends the client.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        while True:
            if self._lost is None and self._broker.poll_failures:
                self._lost = self._broker.poll_failures.popleft()
            if self._lost is not None:
                raise self._lost
            self._readable.clear()
            new, repeated = self._fetch(allowance, loop.time())
            if new or self._woken or loop.time() >= deadline:
                return new + repeated
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._readable.wait()

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        self._readable.set()

    def _changed(self) -> None:
        self._readable.set()
        self._group_changed.set()

    def _fetch(self, allowance: AllowanceOf, now: float) -> tuple[Items, Items]:
        """Fetch the readable records of every partition that is not paused, within their allowances.

        Records fetched from one partition count against the allowances of the others, because all allowances are those
        of this moment. A partition with more records than could be fetched goes last the next time.

        Returns:
            The new items, and the oversized records that were reported before; those do not end a poll.
        """
        new: Items = []
        repeated: Items = []
        if self._revoking or not self._broker.available or now < self._next_fetch:
            return new, repeated
        used_records = used_bytes = 0
        for topic_partition, assigned in tuple(self._assigned.items()):
            if assigned.paused or topic_partition in self._broker.leaderless:
                continue
            allowed = allowance(topic_partition)
            item = self._fetch_one(topic_partition, assigned, allowed, allowed.less(used_records, used_bytes), now)
            if isinstance(item, Oversized):
                (repeated if assigned.oversized_at == assigned.position else new).append(item)
                assigned.oversized_at = assigned.position
            elif item is not None:
                new.append(item)
            if isinstance(item, FetchedBatch):
                used_records += len(item.records)
                used_bytes += sum(item.sizes)
        if new and self._latency is not None:
            delay = self._latency("fetch")
            self._next_fetch = now + delay
            asyncio.get_running_loop().call_later(delay, self._readable.set)
        return new, repeated

    def _fetch_one(
        self, topic_partition: TopicPartition, assigned: _Assigned, allowed: Allowance, left: Allowance, now: float
    ) -> FetchedBatch | Fault | Oversized | None:
        log, position = self._broker.log(*topic_partition), assigned.position
        if position is None:
            return None
        error = self._broker.fetch_faults.get(topic_partition)
        known = assigned.log or log
        assigned.log = log
        if log is not known:
            return Fault(topic_partition, TopicRecreatedError(topic_partition, position))
        parts_at = log.parting(assigned.epoch)
        if parts_at is not None and parts_at < position:
            error = LogTruncatedError(topic_partition, parts_at, position)
        elif error is None and not log.start <= position <= log.end:
            error = OffsetOutOfRangeError(topic_partition, position)
        if error is not None and now >= assigned.quiet_until and allowed.records:
            assigned.quiet_until = now + _FAULT_INTERVAL
            asyncio.get_running_loop().call_later(_FAULT_INTERVAL, self._readable.set)
            return Fault(topic_partition, error)
        if error is not None or (not allowed.records and assigned.end is not None):
            return None  # like a client with a full buffer: it fetches nothing, so it does not learn the end either
        assigned.end = self._readable_end(log)
        offsets = range(position, assigned.end)[: self._max_fetch_offsets]
        return self._read(log, assigned, offsets, left, allowed.bytes) if offsets and left.records > 0 else None

    def _read(
        self, log: PartitionLog, assigned: _Assigned, offsets: range, left: Allowance, most_bytes: int
    ) -> FetchedBatch | Oversized | None:
        readable, end = log.read(offsets.start, offsets.stop), offsets.stop
        next_records = readable[: min(left.records, self._max_batch_records)]
        sizes = [record_size(record.key, record.value, record.headers) for record in next_records]
        count = left.admitted(sizes)
        if sizes and not count:
            # If it would fit into an empty buffer, other partitions have used the room: do not report it.
            return Oversized(log.topic_partition, sizes[0]) if sizes[0] > most_bytes else None
        if count < len(readable):
            end = readable[count - 1].offset + 1
            self._assigned[log.topic_partition] = self._assigned.pop(log.topic_partition)
        assigned.position = end
        assigned.epoch = max(assigned.epoch, log.epoch_of(end - 1))
        records = readable[:count]
        return FetchedBatch(log.topic_partition, records, sizes[:count], end, undecodable=undecodable_among(records))

    def _readable_end(self, log: PartitionLog) -> int:
        return log.stable_end if self._read_committed else log.end

    @property
    def assigned(self) -> tuple[TopicPartition, ...]:
        """The currently assigned partitions, sorted."""
        return tuple(sorted(self._assigned))

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return self._known(topic_partition).position

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`."""
        return self._known(topic_partition).end

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        for topic_partition in partitions:
            self._known(topic_partition).paused = True

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`.

        Raises:
            StateError: An assigned partition has no position yet.
        """
        for topic_partition in partitions:
            if topic_partition in self._assigned and self._assigned[topic_partition].position is None:
                raise StateError(f"{topic_partition} has no position: seek before you resume it")
            self._known(topic_partition).paused = False
        self._changed()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        assigned = self._assigned.get(topic_partition)
        if assigned is None:
            return
        assigned.position = offset
        assigned.quiet_until = 0.0
        assigned.epoch = self._epoch_at(topic_partition, offset)
        self._changed()

    def _epoch_at(self, topic_partition: TopicPartition, offset: int) -> int:
        """Return the leader epoch of the record before an offset: that of the commit there, or the latest one."""
        committed = self._group.committed(topic_partition)
        latest = len(self._broker.log(*topic_partition).cuts)
        if committed is None or committed.offset != offset:
            return latest
        return self._group.epochs.get(topic_partition, latest)

    def _known(self, topic_partition: TopicPartition) -> _Assigned:
        """Return an assigned partition, or a placeholder for any other."""
        return self._assigned.get(topic_partition) or _Assigned()

    # Requests --------------------------------------------------------------------------

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        """See `Transport.commit`.

        Raises:
            CommitRefusedError: *membership* is no longer ours, or a test scripted the error.
            CommitError: The broker is not available, or a test scripted the error.
        """
        if not offsets:
            return
        if membership != self._membership or membership == NOT_A_MEMBER:
            raise CommitRefusedError(
                f"the commit was made under {membership} and the client is {self._membership} now: check it again"
            )
        await self._pass_time("commit")
        if self._crashed:
            raise CommitError("the commit was not acknowledged: the client has crashed")
        earlier = len(self._broker.commits)
        try:
            self._broker.commit(self._group.group_id, offsets, membership, messages or ())
        except ConnectError as error:
            self._count(messages, is_committed=False)
            raise CommitError(f"the commit was not acknowledged: {error}") from error
        except TransportError:
            is_committed = any(commit.applied for commit in self._broker.commits[earlier:])
            self._count(messages, is_committed=is_committed, is_answered=False)
            raise
        self._count(messages, is_committed=True)
        self._group.epochs |= {name: self._known(name).epoch for name in offsets}
        await self._pass_time("commit reply")
        self._broker.notify()  # waiters may wait for the acknowledgement of the commit

    def _count(self, messages: Sequence[Message] | None, *, is_committed: bool, is_answered: bool = True) -> None:
        """Count a transaction, if the commit was one."""
        counts = self._transactions
        if messages is None:
            return
        if not is_committed:
            counts.aborted += 1
        elif is_answered:
            counts.committed += 1
        else:
            counts.decided_committed += 1

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`; raises `ConnectError` while the broker is not available."""
        await self._request("committed")
        return {partition: self._group.committed(partition) for partition in partitions}

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        """See `Transport.truncations`; raises `ConnectError` while the broker is not available."""
        await self._request("log ranges")
        found: dict[TopicPartition, int | None] = {}
        for name in commits:
            if name not in self._broker.leaderless:
                log = self._broker.log(*name)
                found[name] = log.parting(self._group.epochs.get(name, len(log.cuts)))
        return found

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`; raises `ConnectError` while the broker is not available."""
        await self._request("log ranges")
        logs = {name: self._broker.log(*name) for name in partitions if name not in self._broker.leaderless}
        return {name: LogRange(log.start, self._readable_end(log), log.end) for name, log in logs.items()}

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        """See `Transport.partitions`; raises `ConnectError` while the broker is not available."""
        await self._request("partitions")
        return {number: PartitionInfo(number, 1, (1,), (1,)) for number in range(self._broker.topics().get(topic, 0))}

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`; raises `ConnectError` while the broker is not available."""
        await self._request("partitions")
        return frozenset(self._broker.topics())

    async def creates_topics(self) -> bool | None:
        """See `Transport.creates_topics`; as `InMemoryBroker.creates_topics` says."""
        await self._request("partitions")
        return self._broker.creates_topics

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`; raises `ConnectError` while the broker is not available."""
        await self._request("log ranges")
        if topic_partition in self._broker.leaderless:
            raise TransportError(f"{topic_partition} has no leader: the test has taken it away")
        log = self._broker.log(*topic_partition)
        readable = log.read(log.start, self._readable_end(log))
        return next((record.offset for record in readable if record.timestamp >= timestamp), None)

    async def _request(self, operation: Operation) -> None:
        await self._pass_time(operation)
        if self._crashed:
            raise ConnectError("the client has crashed: nothing reaches the broker any more")
        self._broker.check_available()

    async def _pass_time(self, operation: Operation) -> None:
        """Let the duration of an operation pass; a request always lets other tasks run, as a network would."""
        await asyncio.sleep(0 if self._latency is None else self._latency(operation))
        if operation in _TO_COORDINATOR:
            await self._reachable.wait()
