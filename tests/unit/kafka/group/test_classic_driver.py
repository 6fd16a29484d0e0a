"""The driver of a classic member: on which connections its requests travel, and when they are given up.

`MemberLoop` runs with model brokers on a network in memory, with virtual time; `ClassicDriver` in a real thread, where
its brokers are away.
"""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember, Elected
from aioshard.kafka.group.classic_driver import ClassicDriver, ClassicProtocol
from aioshard.kafka.group.classic_messages import (
    ClassicRequest,
    HeartbeatRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    Synced,
    SyncRequest,
)
from aioshard.kafka.group.driver import MemberLoop
from aioshard.kafka.group.member import Ended, Lost, Refused, Troubled
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.consumer_protocol import write_assignment
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import (
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    SYNC_GROUP,
)
from aioshard.kafka.wire.start import connect, new_cluster
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received, hold
from tests.support.model_classic_group import ModelClassicGroup
from tests.support.model_cluster import ModelCluster

SESSION, INTERVAL, REBALANCE = 6.0, 1.0, 60.0
ALL = frozenset(TopicPartition("orders", number) for number in range(2))

Loop = MemberLoop[ClassicMember, ClassicEvent]


def new_member(kind: type[ClassicMember] = ClassicMember, instance: str | None = None) -> ClassicMember:
    return kind(
        ["orders"],
        [GroupAssignor("cooperative-sticky")],
        random.Random(1),
        session_timeout=SESSION,
        heartbeat_interval=INTERVAL,
        rebalance_timeout=REBALANCE,
        instance_id=instance,
    )


class Scene:
    """A member in an event loop, which leads its group, and the broker that coordinates it."""

    def __init__(self, model: ModelCluster, member: ClassicMember, cluster: Cluster) -> None:
        self.broker = model.brokers[1]
        self.member = member
        self.group = ModelClassicGroup()
        self.events: list[ClassicEvent] = []
        self.broker.on(FIND_COORDINATOR, lambda request: request.reply(node=1, host="kafka-1", port=9092))
        for api in (JOIN_GROUP, SYNC_GROUP, HEARTBEAT, LEAVE_GROUP):
            self.broker.on(api, self.handle)
        self.loop: Loop = MemberLoop(ClassicProtocol("billing", member), cluster, self.on_event, lambda: self.now)
        self.running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.running = asyncio.create_task(self.loop.run())

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def owned(self) -> frozenset[TopicPartition]:
        own = self.member.ownership
        return own.partitions if self.now < own.alive_until else frozenset()

    def saw(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def on_event(self, event: ClassicEvent) -> None:
        self.events.append(event)
        if isinstance(event, Elected):
            assignments = dict.fromkeys(event.members, ALL)
            self.do(lambda member, now: member.lead(event, assignments, {"orders": [0, 1]}, now))

    def do(self, act: Callable[[ClassicMember, float], None]) -> None:
        asyncio.get_running_loop().call_soon(self.loop.command, act)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)

    def hold(self, api: Api) -> list[Received]:
        """Answer no further requests of a kind."""
        held: list[Received] = []
        self.broker.on(api, hold(held))
        return held

    def handle(self, received: Received) -> None:
        self.group.handle(request_of(received), lambda answer: received.reply(**fields_of(answer)), self.now)


def request_of(received: Received) -> ClassicRequest:
    """The request that has arrived."""
    values = received.values
    if received.api is LEAVE_GROUP:
        return LeaveRequest(member_id=values.members[0].member, reason="", timeout=0)
    common = {"member_id": values.member, "instance_id": values.instance, "timeout": 0}
    if received.api is HEARTBEAT:
        return HeartbeatRequest(generation=values.generation, **common)
    if received.api is SYNC_GROUP:
        assignments = {part.member: part.assignment for part in values.assignments}
        return SyncRequest(generation=values.generation, protocol=values.protocol, assignments=assignments, **common)
    return JoinRequest(
        session_timeout=values.session_timeout_ms / 1000,
        rebalance_timeout=values.rebalance_timeout_ms / 1000,
        protocols=tuple((part.name, part.metadata) for part in values.protocols),
        reason="",
        **common,
    )


def fields_of(answer: Any) -> dict[str, Any]:
    """The fields of the response."""
    match answer:
        case Joined():
            members = [{"member": name, "instance": None, "metadata": data} for name, data in answer.members.items()]
            return {
                "error": answer.error,
                "member": answer.member_id,
                "generation": answer.generation,
                "protocol": answer.protocol,
                "leader": answer.leader,
                "members": members,
            }
        case Synced():
            return {"error": answer.error, "assignment": write_assignment(answer.assignment)}
        case _:
            return {"error": answer.error, "members": []}


def scenario(
    test: Callable[[Scene], Awaitable[None]],
    *,
    prepare: Callable[[Scene], None] = lambda _: None,
    instance: str | None = None,
) -> None:
    """Runs a test with a member that joins."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 1)
        model.create("orders", 2)
        cluster = await connect(model.settings)
        scene = Scene(model, new_member(instance=instance), cluster)
        prepare(scene)
        scene.start()
        assert scene.running is not None
        try:
            async with asyncio.timeout(100):
                await test(scene)
        finally:
            scene.running.cancel()
            await asyncio.wait([scene.running])
            await cluster.close()
            await model.close()

    run_on_network(live)


# Requests ---------------------------------------------------------------------------------


def test_a_member_joins_leads_and_stays() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        await asyncio.sleep(10 * SESSION)
        assert scene.owned == ALL
        assert [type(event).__name__ for event in scene.events] == ["Elected", "Assigned"]

    scenario(test)


def test_a_static_member_asks_who_is_in_the_group_before_it_joins() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        kinds = [request.api for request in scene.broker.requests]
        assert kinds.index(DESCRIBE_GROUPS) < kinds.index(JOIN_GROUP)
        assert len(scene.group.completed) == 1, "it knows that it has no predecessor"

    def describe(scene: Scene) -> None:
        group = {"error": 0, "group": "billing", "state": "Empty", "kind": "consumer", "protocol": "", "members": []}
        scene.broker.on(DESCRIBE_GROUPS, lambda request: request.reply(groups=[group]))

    scenario(test, prepare=describe, instance="one")


def test_heartbeats_do_not_wait_behind_an_unanswered_join() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        joins = scene.hold(JOIN_GROUP)
        scene.do(lambda member, now: member.rejoin(now, "for a test"))
        await asyncio.sleep(2 * SESSION)
        (join,) = joins
        beat = scene.broker.received(HEARTBEAT)[-1]
        assert beat.session is not join.session
        assert beat.at > join.at + SESSION
        assert scene.owned == ALL

    scenario(test)


def test_heartbeats_do_not_wait_for_the_connection_of_a_join() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        supports = scene.loop.cluster.supports

        async def hang(node: int, api: Api, version: int, *, purpose: Purpose = Purpose.GENERAL) -> bool:
            if purpose is Purpose.JOIN:
                await asyncio.Event().wait()
            return await supports(node, api, version, purpose=purpose)

        scene.loop.cluster.supports = hang  # type: ignore[method-assign]
        began = scene.now
        scene.do(lambda member, now: member.rejoin(now, "for a test"))
        await scene.until(lambda: scene.saw(Troubled))
        assert SESSION < scene.now - began < REBALANCE / 2, "it is not the time of the answer that has passed"
        assert scene.owned == ALL

    scenario(test)


def test_the_answer_to_a_join_may_take_the_rebalance_timeout() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        joins = scene.hold(JOIN_GROUP)
        scene.do(lambda member, now: member.rejoin(now, "for a test"))
        await scene.until(lambda: joins)
        await asyncio.sleep(REBALANCE - 1)
        scene.handle(joins[0])
        await scene.until(lambda: scene.member.ownership.epoch == scene.group.generation)
        assert scene.group.generation == 2
        assert not scene.saw(Troubled)

    scenario(test)


def test_a_silent_coordinator_is_noticed_within_the_session() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        beats = scene.hold(HEARTBEAT)
        await scene.until(lambda: scene.saw(Troubled))
        assert scene.now - beats[0].at <= SESSION / 4 + 0.1
        assert HEARTBEAT.name in scene.saw(Troubled)[0].message
        assert scene.owned == ALL

    scenario(test)


def test_a_join_that_replaces_an_unanswered_one_closes_its_connection() -> None:
    """The broker reads nothing behind a join that it holds."""

    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        joins = scene.hold(JOIN_GROUP)
        scene.do(lambda member, now: member.rejoin(now, "for a test"))
        await scene.until(lambda: joins)
        scene.group.remove(scene.member.ownership.member_id, scene.now)
        await scene.until(lambda: len(joins) == 2)
        assert not joins[0].session.is_open
        assert joins[1].session.is_open
        scene.broker.on(JOIN_GROUP, scene.handle)
        scene.handle(joins[1])
        await scene.until(lambda: scene.owned == ALL)

    scenario(test)


# Ending -----------------------------------------------------------------------------------


def test_a_broker_without_the_requests_is_not_asked() -> None:
    async def test(scene: Scene) -> None:
        assert scene.running is not None
        await scene.running
        assert [type(event) for event in scene.events] == [Refused]
        assert not scene.broker.received(JOIN_GROUP)

    def remove(scene: Scene) -> None:
        del scene.broker.versions[JOIN_GROUP]

    scenario(test, prepare=remove)


def test_a_group_that_this_user_may_not_see_ends_the_member() -> None:
    async def test(scene: Scene) -> None:
        assert scene.running is not None
        await scene.running
        (ended,) = scene.events
        assert isinstance(ended, Ended)
        assert ended.code == 30

    def deny(scene: Scene) -> None:
        scene.broker.on(FIND_COORDINATOR, lambda request: request.reply(error=30))

    scenario(test, prepare=deny)


def test_run_returns_when_the_member_has_left_although_its_join_is_unanswered() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        joins = scene.hold(JOIN_GROUP)
        scene.do(lambda member, now: member.rejoin(now, "for a test"))
        await scene.until(lambda: joins)
        began = scene.now
        scene.do(lambda member, now: member.leave(now, "closing"))
        assert scene.running is not None
        await scene.running
        assert scene.now - began < 0.1
        assert [type(event) for event in scene.events[-2:]] == [Lost, Ended]
        assert not scene.group.members

    scenario(test)


def test_a_join_that_waits_for_its_connection_is_not_sent_at_the_end() -> None:
    async def test(scene: Scene) -> None:
        lookups = scene.hold(FIND_COORDINATOR)
        await scene.until(lambda: lookups)
        assert scene.running is not None
        scene.running.cancel()
        await asyncio.sleep(0)
        lookups[0].reply(node=1, host="kafka-1", port=9092)
        await asyncio.wait([scene.running])
        await asyncio.sleep(1.0)
        assert not scene.broker.received(JOIN_GROUP)

    scenario(test)


# In a thread ------------------------------------------------------------------------------


async def test_a_member_stays_away_while_the_event_loop_of_its_engine_is_blocked() -> None:
    suspended, resumed = threading.Event(), threading.Event()

    class Observed(ClassicMember):
        def suspend(self, now: float, reason: str) -> None:
            super().suspend(now, reason)
            suspended.set()

        def resume(self, now: float) -> None:
            super().resume(now)
            resumed.set()

    settings = Settings(bootstrap_servers="127.0.0.1:1")
    driver = ClassicDriver(
        ClassicProtocol("billing", new_member(Observed)),
        lambda: new_cluster(settings),
        lambda _: None,
        rebalance_timeout=0.5,
    )
    driver.start()
    try:
        assert suspended.wait(30.0), "the blocked event loop is not noticed"
        assert await asyncio.to_thread(resumed.wait, 30.0), "the member has not come back"
    finally:
        await driver.close(0.0, "closing")
    assert not driver.is_alive
