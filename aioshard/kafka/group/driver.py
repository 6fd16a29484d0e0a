"""Runs a member of the consumer protocol in a thread, so that a blocked event loop does not cost the membership.

`MemberLoop` has the clock, the connections and the look-ups of a member, in one event loop. `GroupDriver` gives it a
thread with an event loop, and is what the engine's event loop uses:

    driver = GroupDriver("billing", member, lambda: new_cluster(settings), on_event)
    driver.start()
    driver.ownership.owns(partition, driver.clock())   # before each record and each commit
    driver.released(event.life, event.partitions)      # after a `Revoked`
    await driver.close(timeout=5.0, reason="closing")
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer, heartbeat_answer, heartbeat_request
from aioshard.kafka.group.member import COORDINATOR_MOVED, Assigned, Backoff, Ended, Event, Ownership
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import BrokerError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import CONSUMER_GROUP_HEARTBEAT, DESCRIBE_CONFIGS
from aioshard.kafka.wire.responses import ResourceKind, described_settings
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.kafka.group")

Clock = Callable[[], float]

_SESSION: Final = "consumer.session.timeout.ms"
_INTERVAL: Final = "consumer.heartbeat.interval.ms"
_TIMES_MAX_AGE: Final = 300.0
"""Seconds after which the times of the group are looked up again: an operator may change them."""
_FLUSH: Final = 0.5
"""Seconds in which the last requests, such as a leave, are sent when the member is stopped."""
_LEAST_REQUEST_TIMEOUT: Final = 1.0
_PULSE: Final = 0.25
"""Seconds between two signs of life of the engine's event loop."""
_CLOSE_GRACE: Final = 3.0
"""Seconds in which a thread that was told to stop closes its connections."""


def boot_time() -> float:
    """Return the seconds of a clock that also counts while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


# In one event loop ------------------------------------------------------------------------


class MemberLoop:
    """The clock, the connections and the look-ups of a member. All methods are called in one event loop.

    Invariants:
        * Events are delivered before the requests that follow from them are sent.
        * Requests are written in the order in which the member makes them.
    """

    def __init__(
        self,
        group_id: str,
        member: ConsumerMember,
        cluster: Cluster,
        on_event: Callable[[Event], object],
        clock: Clock = boot_time,
    ) -> None:
        """Do nothing yet; see `run`.

        Args:
            group_id: The group.
            member: The member; nobody else calls it from now on.
            cluster: For its requests alone.
            on_event: Called with each event, in order.
            clock: Returns the time.
        """
        self._group_id = group_id
        self._member = member
        self._cluster = cluster
        self._on_event = on_event
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._woken = asyncio.Event()
        self._order = asyncio.Lock()
        """Held from the look-up of the coordinator to the sending of a request."""
        self._naming: asyncio.Task[None] | None = None
        self._times_wanted = asyncio.Event()
        self._life_of_times = 0
        self._has_warned = False

    async def run(self) -> None:
        """Be a member until it has left, or may never join."""
        self._times_wanted.set()
        self.spawn(self._watch_times(), "look up the times of a group")
        try:
            while not self._member.ended:
                self._woken.clear()
                self._act()
                await self._sleep_until(self._member.deadline)
                if self._failure is not None:
                    raise self._failure
        finally:
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
                async with self._order:
                    pass

    def command(self, act: Callable[[ConsumerMember, float], None]) -> None:
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
            self._deliver(event)
        for request in requests:
            self.spawn(self._send(request), "heartbeat of a group member")
        if self._member.unnamed and self._naming is None:
            self._naming = self.spawn(self._name_topics(), "look up names of topics")

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Assigned) and event.life != self._life_of_times:
            self._life_of_times = event.life
            self._times_wanted.set()
        self._on_event(event)

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

    @property
    def _request_timeout(self) -> float:
        """Seconds for a heartbeat: there is time for another one before the session ends."""
        return max(self._member.session / 3, _LEAST_REQUEST_TIMEOUT)

    async def _send(self, request: Heartbeat) -> None:
        try:
            answer = await self._ask(request)
        except (WireError, TimeoutError) as error:
            why = f"no answer to a heartbeat: {error}" if str(error) else "no answer to a heartbeat in time"
            self.command(lambda member, now: member.failed(request, now, why))
        else:
            self.command(lambda member, now: member.answered(request, answer, now))

    async def _ask(self, request: Heartbeat) -> HeartbeatAnswer:
        """Send a request to the coordinator.

        Raises:
            WireError: It did not answer, or it is unknown.
            TimeoutError: The same, in time.
        """
        timeout = self._request_timeout
        node: int | None = None
        try:
            async with asyncio.timeout(timeout):
                async with self._order:
                    node = await self._cluster.coordinator(CoordinatorKind.GROUP, self._group_id)
                    api = CONSUMER_GROUP_HEARTBEAT
                    if not await self._cluster.supports(node, api, api.lowest, purpose=Purpose.HEARTBEAT):
                        return HeartbeatAnswer(UnsupportedVersionError.code, "the broker does not have the protocol")
                response = await self._cluster.ask(
                    node, heartbeat_request(self._group_id, request), purpose=Purpose.HEARTBEAT, timeout=timeout
                )
            answer = heartbeat_answer(response)
        except BrokerError as error:  # of the look-up of the coordinator
            return HeartbeatAnswer(error.code, str(error))
        except (WireError, TimeoutError):
            self._forget_coordinator(node)
            raise
        if answer.error in COORDINATOR_MOVED:
            self._forget_coordinator(node)
        return answer

    def _forget_coordinator(self, node: int | None) -> None:
        if node is not None:
            self._cluster.forget_coordinator(CoordinatorKind.GROUP, self._group_id, node)

    # Look-ups -------------------------------------------------------------------------

    async def _name_topics(self) -> None:
        """Look up the names of assigned topics until all are known; a new topic may be unknown to some brokers."""
        backoff = Backoff(random.Random())  # noqa: S311 - no secret
        while unnamed := self._member.unnamed:
            try:
                names = await self._cluster.names_of(unnamed)
            except WireError as error:
                logger.debug("the names of assigned topics are unknown: %s", error)
                names = {}
            if names:
                self._learn_names(names)
            if self._member.unnamed:
                await asyncio.sleep(backoff.next())
        self._naming = None

    def _learn_names(self, names: Mapping[uuid.UUID, str]) -> None:
        self.command(lambda member, now: member.name_topics(names, now))

    async def _watch_times(self) -> None:
        """Look up the times of the group after each join, and every few minutes."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TIMES_MAX_AGE):
                    await self._times_wanted.wait()
            self._times_wanted.clear()
            await self._learn_times()

    async def _learn_times(self) -> None:
        resource = {"kind": ResourceKind.GROUP, "name": self._group_id, "keys": [_SESSION, _INTERVAL]}
        request = DESCRIBE_CONFIGS(resources=[resource], synonyms=False, documentation=False)
        try:
            response = await self._cluster.ask_any(request)
            values = described_settings(response, ResourceKind.GROUP, self._group_id, [_SESSION, _INTERVAL])
            session = int(values[_SESSION]) / 1000
            interval = int(values[_INTERVAL]) / 1000
        except (WireError, ValueError) as error:
            self._report_unknown_times(error)
            return
        self.command(lambda member, now: member.times(session, interval, now))

    def _report_unknown_times(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_warned or getattr(error, "retriable", False) else logging.WARNING
        self._has_warned |= level == logging.WARNING
        logger.log(
            level,
            "the session timeout of group %s cannot be read (%s), so %g s are assumed: grant DESCRIBE_CONFIGS on the "
            "group, and set consumer.session.timeout.ms of the group to this value",
            self._group_id,
            error,
            self._member.session,
        )


# In a thread ------------------------------------------------------------------------------


class GroupDriver:
    """A member in a thread. All methods are called in the engine's event loop; any thread may read `ownership`.

    The thread keeps the membership while the engine's event loop is blocked, but no longer than the rebalance timeout:
    then the member leaves, and joins again when the event loop runs.
    """

    def __init__(
        self,
        group_id: str,
        member: ConsumerMember,
        new_cluster: Callable[[], Cluster],
        on_event: Callable[[Event], object],
        *,
        rebalance_timeout: float = 300.0,
        clock: Clock = boot_time,
    ) -> None:
        """Do nothing yet; see `start`.

        Args:
            group_id: The group.
            member: The member; nobody else calls it from now on.
            new_cluster: Makes the cluster for the thread alone; called in the thread's event loop.
            on_event: Called in the engine's event loop with each event, in order.
            rebalance_timeout: Seconds that the engine's event loop may be blocked.
            clock: Returns the time.
        """
        self.clock = clock
        self._group_id = group_id
        self._member = member
        self._new_cluster = new_cluster
        self._on_event = on_event
        self._rebalance_timeout = rebalance_timeout
        self._engine = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._engine.create_future()
        self._pulse_at = clock()
        self._pulse_timer: asyncio.TimerHandle | None = None
        self._is_suspended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"heartbeats of group {group_id}", daemon=True)
        # In the thread:
        self._members: MemberLoop | None = None
        self._early: list[Callable[[ConsumerMember, float], None]] = []
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

    def subscribe(self, topics: Collection[str], patterns: Collection[str]) -> None:
        """Subscribe to other topics."""
        self._command(lambda member, now: member.subscribe(topics, patterns, now))

    def heartbeat_now(self) -> None:
        """Ask for the newest epoch: a commit was refused because of the epoch."""
        self._command(lambda member, now: member.heartbeat_now(now))

    async def close(self, timeout: float, reason: str, *, for_good: bool = False) -> None:
        """Leave the group, and end the thread.

        Args:
            timeout: Seconds in which to leave; the leave is sent also if it is 0. Closing takes at most 3 s more.
            reason: Why, for `Lost`.
            for_good: Whether a static member gives its partitions to others now, and not after a session.
        """
        self._command(lambda member, now: member.leave(now, reason, for_good=for_good))
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

    def _command(self, act: Callable[[ConsumerMember, float], None]) -> None:
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
        cluster = self._new_cluster()
        cluster.start()
        try:
            self._members = MemberLoop(self._group_id, self._member, cluster, self._deliver, self.clock)
            for act in self._early:
                self._members.command(act)
            self._members.spawn(self._watch_engine(self._members), "watch the engine's event loop")
            await self._members.run()
        except asyncio.CancelledError:
            self._give_up("the member was stopped before it had left")
        except Exception as error:
            logger.exception("the heartbeats of group %s have ended", self._group_id)
            self._give_up(f"the heartbeats have ended: {error!r}")
        finally:
            self._is_over = True
            await cluster.close()

    def _give_up(self, reason: str) -> None:
        self._member.suspend(self.clock(), reason)
        for event in self._member.take_events():
            self._deliver(event)
        if not self._member.ended:
            self._deliver(Ended(-1, reason))

    async def _watch_engine(self, members: MemberLoop) -> None:
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

    def _accept(self, act: Callable[[ConsumerMember, float], None]) -> None:
        if self._is_over:
            return
        if self._members is None:
            self._early.append(act)
        else:
            self._members.command(act)

    def _stop(self) -> None:
        if self._main is not None:
            self._main.cancel()

    def _deliver(self, event: Event) -> None:
        self._post(lambda: self._on_event(event))

    def _post(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the engine's event loop is closed
            self._engine.call_soon_threadsafe(act)
