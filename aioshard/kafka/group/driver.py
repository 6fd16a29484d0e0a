"""Runs a member of a group in a thread, so that a blocked event loop does not cost the membership.

`MemberLoop` has the clock and the connections of a member, in one event loop. `GroupDriver` gives it a thread with an
event loop, and the engine calls it from its own. A `GroupProtocol` says what differs between the two protocols of
Kafka; `consumer_driver` and `classic_driver` have one each, and the driver with its commands:

    driver = ConsumerDriver(ConsumerProtocol("billing", member), lambda: new_cluster(settings), on_event)
    driver.start()
    driver.ownership.owns(partition, driver.clock())   # before each commit
    driver.released(event.life, event.partitions)      # after a `Revoked`
    await driver.close(timeout=5.0, reason="closing")
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from aioshard.kafka.group.member import COORDINATOR_MOVED, Ended, GroupMember, Ownership
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import BrokerError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.pool import Purpose
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.kafka.group")

Clock = Callable[[], float]

MemberT = TypeVar("MemberT", bound=GroupMember[Any, Any, Any])
EventT = TypeVar("EventT")

_FLUSH: Final = 0.5
"""Seconds in which the last requests, such as a leave, are sent when the member is stopped."""
_LONGEST_LOOK_UP: Final = 10.0
"""Seconds in which to find the coordinator and to connect to it. The answer to a join may take far longer."""
_PULSE: Final = 0.25
"""Seconds between two signs of life of the engine's event loop."""
_CLOSE_GRACE: Final = 3.0
"""Seconds in which a thread that was told to stop closes its connections."""


def boot_time() -> float:
    """Return the seconds of a clock that also counts while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


# Protocols --------------------------------------------------------------------------------


class GroupProtocol(Protocol[MemberT]):
    """A member, and how its requests travel: the difference between the protocols of Kafka."""

    @property
    def group_id(self) -> str:
        """The group."""

    @property
    def member(self) -> MemberT:
        """The member."""

    def purpose(self, request: Any) -> Purpose:
        """Return which connection a request takes."""

    def timeout(self, request: Any) -> float:
        """Return the seconds to wait for the answer to a request."""

    def message(self, request: Any) -> Request:
        """Return the message of a request."""

    def answer(self, request: Any, response: Any) -> Any:
        """Read the response to a request; the answer has the error code as its `error`.

        Raises:
            WireError: The response is incomplete.
        """

    def refusal(self, request: Any, code: int, message: str) -> Any:
        """Return the answer of a coordinator that refuses a request with an error code."""

    def look_up(self, loop: "MemberLoop[MemberT, Any]") -> None:
        """Begin the look-ups that the member needs now; called after each of its steps."""


# In one event loop ------------------------------------------------------------------------


class MemberLoop(Generic[MemberT, EventT]):
    """The clock and the connections of a member. All methods are called in one event loop.

    Invariants:
        * Events are delivered before the requests that follow from them are sent.
        * Requests of one purpose are written in the order in which the member makes them.
        * A join or sync that the member replaces by another is not waited for: its connection is closed.
    """

    def __init__(
        self,
        protocol: GroupProtocol[MemberT],
        cluster: Cluster,
        on_event: Callable[[EventT], object],
        clock: Clock = boot_time,
    ) -> None:
        """Do nothing yet; see `run`.

        Args:
            protocol: The member; nobody else calls it from now on.
            cluster: For its requests alone.
            on_event: Called with each event, in order.
            clock: Returns the time.
        """
        self.cluster = cluster
        """For the look-ups of the protocol."""
        self._protocol = protocol
        self._member = protocol.member
        self._on_event = on_event
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._woken = asyncio.Event()
        self._orders: defaultdict[Purpose, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Each is held from the look-up of the coordinator to the sending of a request."""
        self._join: asyncio.Task[None] | None = None
        """Sends the latest join or sync."""

    async def run(self) -> None:
        """Be a member until it has left, or may never join."""
        try:
            while not self._member.ended:
                self._woken.clear()
                self._act()
                await self._sleep_until(self._member.deadline)
                if self._failure is not None:
                    raise self._failure
        finally:
            self._cancel_join()  # we would not take part in its rebalance
            await self._flush()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _flush(self) -> None:
        """Let requests be sent that have not been yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH):
                await asyncio.sleep(0)  # their tasks may not have begun
                for order in list(self._orders.values()):
                    async with order:
                        pass

    def command(self, act: Callable[[MemberT, float], None]) -> None:
        """Call the member with the time, and do what follows from that. A mistake in it ends `run`."""
        try:
            act(self._member, self._clock())
            self._act()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._failure = error
        self._woken.set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do something until the end of `run`; if it fails, `run` ends with its error."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _act(self) -> None:
        requests = self._member.poll(self._clock())
        for event in self._member.take_events():
            self._on_event(event)
        for request in requests:
            is_join = self._protocol.purpose(request) is Purpose.JOIN
            if is_join:
                self._cancel_join()
            task = self.spawn(self._send(request), "request of a group member")
            if is_join:
                self._join = task
        self._protocol.look_up(self)

    def _cancel_join(self) -> None:
        """Give up an unanswered join or sync. The task of one that was just answered is the caller, and continues."""
        if self._join is not None and self._join is not asyncio.current_task():
            self._join.cancel()

    async def _sleep_until(self, deadline: float | None) -> None:
        seconds = None if deadline is None else max(deadline - self._clock(), 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._woken.set()

    # Requests -------------------------------------------------------------------------

    async def _send(self, request: Any) -> None:
        try:
            answer = await self._ask(request)
        except (WireError, TimeoutError) as error:
            name = self._protocol.message(request).api.name
            why = f"no answer to {name}: {error}" if str(error) else f"no answer to {name} in time"
            self.command(lambda member, now: member.failed(request, now, why))
        else:
            self.command(lambda member, now: member.answered(request, answer, now))

    async def _ask(self, request: Any) -> Any:
        """Send a request to the coordinator, and return its answer.

        Raises:
            WireError: It did not answer, or it is unknown.
            TimeoutError: The same, in time.
        """
        protocol = self._protocol
        message = protocol.message(request)
        purpose = protocol.purpose(request)
        timeout = protocol.timeout(request)
        node: int | None = None
        try:
            async with asyncio.timeout(timeout):
                async with asyncio.timeout(_LONGEST_LOOK_UP), self._orders[purpose]:
                    node = await self.cluster.coordinator(CoordinatorKind.GROUP, protocol.group_id)
                    if not await self.cluster.supports(node, message.api, message.api.lowest, purpose=purpose):
                        why = "the broker does not have the protocol"
                        return protocol.refusal(request, UnsupportedVersionError.code, why)
                response = await self.cluster.ask(node, message, purpose=purpose, timeout=timeout)
            answer = protocol.answer(request, response)
        except BrokerError as error:  # of the look-up of the coordinator
            return protocol.refusal(request, error.code, str(error))
        except (WireError, TimeoutError):
            self._forget_coordinator(node)
            raise
        if answer.error in COORDINATOR_MOVED:
            self._forget_coordinator(node)
        return answer

    def _forget_coordinator(self, node: int | None) -> None:
        if node is not None:
            self.cluster.forget_coordinator(CoordinatorKind.GROUP, self._protocol.group_id, node)


# In a thread ------------------------------------------------------------------------------


class GroupDriver(ABC, Generic[MemberT, EventT]):
    """A member in a thread. All methods are called in the engine's event loop; any thread may read `ownership`.

    The thread keeps the membership while the engine's event loop is blocked, but no longer than the rebalance timeout:
    then the member leaves, and joins again when the event loop runs.
    """

    @property
    @abstractmethod
    def protocol(self) -> Literal["classic", "consumer"]:
        """The group protocol of the member."""

    @property
    @abstractmethod
    def is_incremental(self) -> bool:
        """Whether the member keeps its partitions while the group rebalances."""

    @property
    @abstractmethod
    def session_text(self) -> str:
        """The session with the setting that it comes from, for messages."""

    @property
    @abstractmethod
    def inherits_within(self) -> float:
        """See `Transport.inherits_within`."""

    @property
    @abstractmethod
    def unnamed(self) -> Mapping[uuid.UUID, float]:
        """Ids of assigned topics that no broker names, each with the time since when, in seconds since the epoch."""

    @property
    @abstractmethod
    def watched(self) -> frozenset[str]:
        """The topics whose partitions the member has to know."""

    @abstractmethod
    def subscribe(self, topics: Collection[str]) -> None:
        """Subscribe to other topics. Partitions of topics that are not among them have to be released first."""

    @abstractmethod
    def commit_refused(self, ownership: Ownership, code: int) -> None:
        """Report that the coordinator refused a commit that was judged with this ownership."""

    def __init__(
        self,
        protocol: GroupProtocol[MemberT],
        new_cluster: Callable[[], Cluster],
        on_event: Callable[[EventT | Ended], object],
        *,
        rebalance_timeout: float = 300.0,
        clock: Clock = boot_time,
    ) -> None:
        """Do nothing yet; see `start`.

        Args:
            protocol: The member; nobody else calls it from now on.
            new_cluster: Makes the cluster for the thread alone; called in the thread's event loop.
            on_event: Called in the engine's event loop with each event, in order.
            rebalance_timeout: Seconds that the engine's event loop may be blocked.
            clock: Returns the time.
        """
        self.clock = clock
        self._protocol = protocol
        self._member = protocol.member
        self._new_cluster = new_cluster
        self._on_event = on_event
        self._rebalance_timeout = rebalance_timeout
        self._engine = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._engine.create_future()
        self._pulse_at = clock()
        self._pulse_timer: asyncio.TimerHandle | None = None
        self._is_suspended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"heartbeats of group {protocol.group_id}", daemon=True)
        # In the thread:
        self._members: MemberLoop[MemberT, EventT] | None = None
        self._early: list[Callable[[MemberT, float], None]] = []
        self._main: asyncio.Task[None] | None = None
        self._is_over = False
        """Whether the member has ended: a later command must not revive it."""

    @property
    def ownership(self) -> Ownership:
        """Our partitions now, and until when. Read it again before each use."""
        return self._member.ownership

    @property
    def session(self) -> float:
        """Seconds after which the coordinator removes a silent member, as far as we know."""
        return self._member.session

    @property
    def last_heartbeat(self) -> float | None:
        """See `Transport.last_heartbeat`. Any thread may read it."""
        age = self.clock() - self._member.answered_at
        return None if age == math.inf else self._engine.time() - age

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, and join the group."""
        self._pulse()
        self._thread.start()

    def released(self, life: int, partitions: Collection[TopicPartition]) -> None:
        """Give up the partitions of a `Revoked`; nothing works on them any more."""
        released = frozenset(partitions)
        self._command(lambda member, now: member.released(life, released, now))

    async def close(self, timeout: float, reason: str) -> None:
        """Leave the group, and end the thread.

        Args:
            timeout: Seconds in which to leave; the leave is sent also if it is 0. Closing takes at most 3 s more.
            reason: Why, for `Lost`.
        """
        self._command(lambda member, now: member.leave(now, reason))
        try:
            await asyncio.wait([self._ended], timeout=timeout)
        finally:
            self._stop_pulse()
            if not self._ended.done():
                self._call(self._stop)
        await asyncio.wait([self._ended], timeout=_CLOSE_GRACE)
        if self._ended.done():
            self._thread.join()

    # In the engine's event loop -------------------------------------------------------

    def _pulse(self) -> None:
        self._pulse_at = self.clock()
        self._pulse_timer = self._engine.call_later(_PULSE, self._pulse)
        if self._is_suspended:
            self._call(self._resume)

    def _stop_pulse(self) -> None:
        if self._pulse_timer is not None:
            self._pulse_timer.cancel()

    def _command(self, act: Callable[[MemberT, float], None]) -> None:
        self._call(lambda: self._accept(act))

    def _call(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(act)

    def _finish(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    # In the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._be_member())
        finally:
            self._post(self._finish)

    async def _be_member(self) -> None:
        self._main = asyncio.current_task()
        cluster: Cluster | None = None
        try:
            cluster = self._new_cluster()
            cluster.start()
            self._members = MemberLoop(self._protocol, cluster, self._deliver, self.clock)
            for act in self._early:
                self._members.command(act)
            self._members.spawn(self._watch_engine(self._members), "watch the engine's event loop")
            await self._members.run()
        except asyncio.CancelledError:
            self._give_up("the member was stopped before it had left")
        except Exception as error:
            logger.exception("the heartbeats of group %s have ended", self._protocol.group_id)
            self._give_up(f"the heartbeats have ended: {error!r}")
        finally:
            self._is_over = True
            if cluster is not None:
                await cluster.close()

    def _give_up(self, reason: str) -> None:
        self._member.suspend(self.clock(), reason)
        for event in self._member.take_events():
            self._deliver(event)
        if not self._member.ended:
            self._deliver(Ended(-1, reason))

    async def _watch_engine(self, members: MemberLoop[MemberT, EventT]) -> None:
        """Leave the group when the engine's event loop has been blocked for too long."""
        while True:
            if self._engine.is_closed():
                members.command(lambda member, now: member.leave(now, "the event loop of the engine is closed"))
                return
            quiet = self.clock() - self._pulse_at
            if quiet >= self._rebalance_timeout and not self._is_suspended:
                self._is_suspended = True
                members.command(
                    lambda member, now: member.suspend(now, "the event loop was blocked for the rebalance timeout")
                )
            await asyncio.sleep(min(max(self._rebalance_timeout - quiet, _PULSE / 10), _PULSE))

    def _resume(self) -> None:
        if self._is_suspended:
            self._is_suspended = False
            self._accept(lambda member, now: member.resume(now))

    def _accept(self, act: Callable[[MemberT, float], None]) -> None:
        if self._is_over:
            return
        if self._members is None:
            self._early.append(act)
        else:
            self._members.command(act)

    def _stop(self) -> None:
        """End the member; once, because its last request may be on its way already, and it may be closing."""
        if self._main is not None and not self._is_over and not self._main.cancelling():
            self._main.cancel()

    def _deliver(self, event: EventT | Ended) -> None:
        self._post(lambda: self._on_event(event))

    def _post(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the engine's event loop is closed
            self._engine.call_soon_threadsafe(act)
