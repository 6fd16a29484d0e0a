"""An in-memory member of a consumer group: the `Transport` port without a network."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from aioshard.errors import (
    ClientLostError,
    CommitError,
    CommitRefusedError,
    ConnectError,
    StateError,
    TransportError,
)
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Oversized,
)
from aioshard.records import TopicPartition
from aioshard.testing.broker import InMemoryBroker
from aioshard.testing.group import Subscription
from aioshard.testing.reading import Found, IsolationLevel, Reading

__all__ = ["InMemoryTransport", "Latency", "Operation"]

logger = logging.getLogger("aioshard.testing.transport")

Operation = Literal[
    "start", "heartbeat", "join", "fetch", "commit", "commit reply", "committed", "log ranges", "partitions", "close"
]
"""The requests of a member. The latency of `heartbeat` is the time until the member notices a rebalance or its own
loss, that of `join` the time from the new generation to its `assigned`, and that of `fetch` the time between two
responses with records; that of `commit` passes before the offsets are stored and that of `commit reply` after."""

_TO_COORDINATOR = frozenset[Operation](["start", "commit", "commit reply", "committed"])

Outcome = Literal["woken", "changed", "time"]

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
        isolation_level: IsolationLevel = "read_committed",
        latency: Latency | None = None,
        max_batch_records: int = 500,
        max_fetch_offsets: int | None = None,
        rebalance_timeout: float = 60.0,
        session_timeout: float = 45.0,
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
        """
        self.prefetch: tuple[int, int] | None = None
        """Partitions and bytes of the last `adjust_prefetch`."""
        self._broker = broker
        self._group = broker.group(group_id)
        self._latency = latency
        self._reading = Reading(broker, isolation_level, max_batch_records, max_fetch_offsets)
        self._rebalance_timeout = rebalance_timeout
        self._session_timeout = session_timeout
        self._listener: GroupListener | None = None
        self._subscription = Subscription(frozenset())
        self._membership = NOT_A_MEMBER
        self._member_id = ""
        self._revoking = False
        self._fetch_due = 0.0
        self._waiter: asyncio.Future[Outcome] | None = None
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unwatch: Callable[[], None] | None = None
        self._reachable = asyncio.Event()
        """Set unless the client is cut off from the coordinator."""
        self._reachable.set()
        self._removal: asyncio.TimerHandle | None = None
        self._ending = False
        self._crashed = False
        self._lost: TransportError | None = None

    # Lifecycle -------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:
        """Join the group; see `Transport.start`. Topics that do not exist are created.

        Raises:
            StateError: The client was started before.
            TransportError: The broker is not available, or a test scripted the error.
        """
        if self._listener is not None:
            raise StateError("this client was started before: make a new one with the transport factory")
        self._listener = listener
        await self._take("start")
        self._broker.check_start()
        for topic in topics:
            self._broker.ensure_topic(topic)
        self._subscription = Subscription(frozenset(topics), pattern)
        self._unwatch = self._broker.watch(self._changed)
        self._member_id = self._group.join(self._subscription, self._stirred.set)
        name = f"in-memory client {self._member_id}"
        self._task = asyncio.get_running_loop().create_task(self._follow_group(), name=name)

    async def close(self) -> None:
        """Leave the group; wait for a running `revoked`. See `Transport.close`."""
        self._ending = True
        self._stirred.set()
        if self._unwatch is not None:
            self._unwatch()
        try:
            if self._task is not None:
                await self._task
            if not self._crashed:
                await self._take("close")
        finally:
            if not self._crashed and self._reachable.is_set():
                self._group.leave(self._member_id)
            self._membership = NOT_A_MEMBER
            self._reading.take_all()
            if self._lost is None:
                self.kill(ClientLostError("the client is closed: make a new one with the transport factory"))

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
        self._stirred.set()
        if self._unwatch is not None:
            self._unwatch()
        asyncio.get_running_loop().call_later(self._session_timeout, self._group.leave, self._member_id)

    def cut_off(self) -> None:
        """Leave every request to the coordinator unanswered, including heartbeats and commits; fetches continue.

        `session_timeout` seconds later the group removes the member. The client then gives up its partitions by
        itself, because the broker cannot reach it.
        """
        if self._ending or not self._reachable.is_set():
            return
        self._reachable.clear()
        loop = asyncio.get_running_loop()
        self._removal = loop.call_later(self._session_timeout, self._group.leave, self._member_id)
        self._stirred.set()

    def reconnect(self) -> None:
        """Undo `cut_off`: the client is still a member, or joins again. A closed client stays closed."""
        if self._ending or self._removal is None:
            return
        self._removal.cancel()
        self._reachable.set()
        self._stirred.set()

    # The group -------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if not self._broker.available:
            return "the in-memory broker is not available: the test has said so"
        return None if self._reachable.is_set() else "the coordinator does not answer: the test has cut the client off"

    def membership(self) -> Membership:
        """See `Transport.membership`."""
        return self._membership

    async def _follow_group(self) -> None:
        try:
            while not self._ending:
                self._stirred.clear()
                if not self._reachable.is_set():
                    await self._hear_nothing()
                    continue
                duty = self._group.duty(Membership(self._member_id, self._membership.generation))
                if duty == "nothing":
                    await self._stirred.wait()
                elif duty == "rejoin":
                    await self._take("heartbeat")
                    await self._give_back()
                elif duty == "join anew":
                    await self._take("heartbeat")
                    await self._join_anew()
                else:
                    await self._take("join")
                    self._adopt()
        except Exception as error:
            # A listener must not raise. A client of a real broker would continue in an undefined state; a test must
            # notice.
            logger.exception("the group listener of %s raised", self._member_id)
            self._lost = ClientLostError(f"the group listener raised {type(error).__name__}: {error}")
            self._lost.__cause__ = error
            self._group.leave(self._member_id)
            self._changed()

    async def _hear_nothing(self) -> None:
        """Wait for the coordinator, and give up all partitions when the session expires."""
        removal = self._removal if self._membership != NOT_A_MEMBER else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(removal.when() if removal is not None else None):
                await self._stirred.wait()
                return
        self._membership = NOT_A_MEMBER
        await self._revoke(lost=True)

    async def _give_back(self) -> None:
        loop = asyncio.get_running_loop()
        leave = self._group.leave_unless_rejoined
        remove = loop.call_later(self._rebalance_timeout, leave, self._member_id, self._group.generation)
        try:
            await self._revoke(lost=False)
        finally:
            remove.cancel()
        # Another member may own the released partitions before we notice.
        self._membership = NOT_A_MEMBER
        if not self._ending and self._reachable.is_set():
            self._group.rejoin(self._member_id)

    async def _join_anew(self) -> None:
        self._membership = NOT_A_MEMBER
        await self._revoke(lost=True)
        if not self._ending and self._reachable.is_set():
            self._member_id = self._group.join(self._subscription, self._stirred.set)

    async def _revoke(self, *, lost: bool) -> None:
        partitions = self._reading.partitions
        if not partitions or self._ending:
            return
        self._revoking = True
        try:
            await self._heard.revoked(partitions, lost=lost)
        finally:
            self._revoking = False
        self._reading.take_all()

    def _adopt(self) -> None:
        # While the answer was on its way, the group may have moved on, or the client may have been closed or cut off.
        unheard = self._ending or not self._reachable.is_set()
        if unheard or self._group.duty(Membership(self._member_id, self._membership.generation)) != "adopt":
            return
        partitions = self._group.assignment(self._member_id)
        self._membership = self._group.adopt(self._member_id)
        self._reading.give(partitions)
        self._heard.assigned(partitions, self._membership)

    @property
    def _heard(self) -> GroupListener:
        if self._listener is None:
            raise StateError("this client has no listener: await start first")
        return self._listener

    # Records ---------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`.

        An `Oversized` record ends a poll once; later polls repeat it when they end for another reason, including
        timeout and `wake`.

        Raises:
            ClientLostError: The client was killed, has crashed, or its listener raised.
            TransportError: A test scripted the error.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        outcome: Outcome = "changed"
        while True:
            self._check_alive()
            found = self._fetch(allowance, loop.time())
            if found.new:
                return found.new + found.known
            if outcome == "woken" or (outcome == "time" and loop.time() >= deadline):
                return found.known
            outcome = await self._wait(deadline)

    def _fetch(self, allowance: AllowanceOf, now: float) -> Found:
        if self._revoking or not self._broker.available or now < self._fetch_due:
            return Found([], [])
        found = self._reading.collect(allowance, now)
        if found.new and self._latency is not None:
            self._fetch_due = now + self._latency("fetch")
        return found

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._end_wait("woken")

    def _check_alive(self) -> None:
        if self._lost is None:
            try:
                self._broker.check_poll()
            except ClientLostError as error:
                self._lost = error
        if self._lost is not None:
            raise self._lost

    async def _wait(self, deadline: float) -> Outcome:
        loop = asyncio.get_running_loop()
        now = loop.time()
        looks = (deadline, self._fetch_due if now < self._fetch_due else None, self._reading.next_look(now))
        self._waiter = loop.create_future()
        timer = loop.call_at(min(when for when in looks if when is not None), self._end_wait, "time")
        try:
            return await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _changed(self) -> None:
        self._end_wait("changed")

    def _end_wait(self, outcome: Outcome) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(outcome)

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return self._reading.position(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`."""
        return self._reading.end_offset(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        self._reading.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`.

        Raises:
            StateError: An assigned partition has no position yet.
        """
        self._reading.resume(partitions)
        self._changed()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        self._reading.seek(topic_partition, offset)
        self._changed()

    # Requests --------------------------------------------------------------------------

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """See `Transport.commit`.

        Raises:
            CommitRefusedError: *membership* is no longer ours, or a test scripted the error.
            CommitError: The broker is not available, or a test scripted the error.
        """
        if not offsets:
            return
        if membership != self._membership or membership == NOT_A_MEMBER:
            message = f"the commit was made under {membership} and the client is {self._membership} now: plan it anew"
            raise CommitRefusedError(message)
        await self._take("commit")
        if self._crashed:
            raise CommitError("the commit was not acknowledged: the client has crashed")
        try:
            self._broker.commit(self._group.group_id, offsets, membership)
        except ConnectError as error:
            raise CommitError(f"the commit was not acknowledged: {error}") from error
        await self._take("commit reply")
        self._broker.notify()  # waiters may wait for the acknowledgement of the commit

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`; raises `ConnectError` while the broker is not available."""
        await self._ask("committed")
        return {partition: self._group.committed(partition) for partition in partitions}

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`; raises `ConnectError` while the broker is not available."""
        await self._ask("log ranges")
        return {name: self._reading.log_range(name) for name in partitions if self._broker.has_leader(name)}

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `Transport.partitions`; raises `ConnectError` while the broker is not available."""
        await self._ask("partitions")
        return frozenset(range(self._broker.topics().get(topic, 0)))

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`; raises `ConnectError` while the broker is not available."""
        await self._ask("partitions")
        return frozenset(self._broker.topics())

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`; raises `ConnectError` while the broker is not available."""
        await self._ask("log ranges")
        if not self._broker.has_leader(topic_partition):
            raise TransportError(f"{topic_partition} has no leader: the test has taken it away")
        return self._reading.offset_at(topic_partition, timestamp)

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """See `Transport.adjust_prefetch`; nothing is prefetched here, so the values are only stored."""
        self.prefetch = (partitions, max_bytes)

    async def _ask(self, operation: Operation) -> None:
        await self._take(operation)
        if self._crashed:
            raise ConnectError("the client has crashed: nothing reaches the broker any more")
        self._broker.check_available()

    async def _take(self, operation: Operation) -> None:
        """Let the duration of an operation pass; a request always lets other tasks run, as a network would."""
        await asyncio.sleep(0 if self._latency is None else self._latency(operation))
        if operation in _TO_COORDINATOR:
            await self._reachable.wait()
