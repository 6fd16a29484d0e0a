"""The driver of a member: look-ups, the order of requests, and how it ends.

`MemberLoop` runs with model brokers on a network in memory, with virtual time; `GroupDriver` in a real thread, where
its brokers are away.
"""

import asyncio
import functools
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_driver import ConsumerDriver, ConsumerProtocol
from aioshard.kafka.group.consumer_messages import Heartbeat, TopicIdPartition
from aioshard.kafka.group.driver import MemberLoop, boot_time
from aioshard.kafka.group.member import Assigned, Ended, Event, Lost, Recovered, Refused, Revoked, Troubled
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.requests import CONSUMER_GROUP_HEARTBEAT, DESCRIBE_CONFIGS, FIND_COORDINATOR, METADATA
from aioshard.kafka.wire.start import connect, new_cluster
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received, hold
from tests.support.model_cluster import ModelCluster
from tests.support.model_consumer_group import ModelConsumerGroup

SESSION = 6.0
ALL = frozenset(TopicPartition("orders", number) for number in range(2))


Loop = MemberLoop[ConsumerMember, Event]


class Scene:
    """A member in an event loop, the brokers, and the group at its coordinator.

    Attributes:
        coordinator: The node that answers heartbeats; others say that they are not the coordinator.
        log: Events, and the epochs of the heartbeats that arrive, in order.
    """

    def __init__(self, model: ModelCluster, member: ConsumerMember, loop_of: Callable[["Scene"], Loop]) -> None:
        self.model = model
        self.member = member
        self.coordinator = 1
        self.group = ModelConsumerGroup(random.Random(1), session=SESSION, interval=1.0)
        self.group.add_topic("orders", 2)
        self.group.ids = model.topic_ids
        self.log: list[Event | int] = []
        self.times: dict[str, str] = {
            "consumer.session.timeout.ms": str(int(SESSION * 1000)),
            "consumer.heartbeat.interval.ms": "1000",
        }
        self.times_error = 0
        for node, broker in model.brokers.items():
            broker.on(FIND_COORDINATOR, self.find_coordinator)
            broker.on(DESCRIBE_CONFIGS, self.describe_times)
            broker.on(CONSUMER_GROUP_HEARTBEAT, functools.partial(self.beat, node))
        self.protocol = ConsumerProtocol("billing", member)
        self.loop = loop_of(self)
        self.running = asyncio.create_task(self.loop.run())

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def owned(self) -> frozenset[TopicPartition]:
        own = self.member.ownership
        return own.partitions if self.now < own.alive_until else frozenset()

    def saw(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.log if isinstance(event, kind)]

    def arrived(self, node: int = 1) -> list[Received]:
        return self.model.brokers[node].received(CONSUMER_GROUP_HEARTBEAT)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)

    # The brokers ----------------------------------------------------------------------

    def find_coordinator(self, request: Received) -> None:
        request.reply(node=self.coordinator, host=f"kafka-{self.coordinator}", port=9092)

    def describe_times(self, request: Received) -> None:
        configs = [{"name": name, "value": value} for name, value in self.times.items()]
        request.reply(resources=[{"error": self.times_error, "kind": 32, "name": "billing", "configs": configs}])

    def beat(self, node: int, request: Received) -> None:
        self.log.append(request.values.epoch)
        if node != self.coordinator:
            request.reply(error=16)
            return
        answer = self.group.heartbeat(heartbeat_of(request.values), self.now)
        assignment = None
        if answer.assignment is not None:
            topics = [{"id": at.topic_id, "partitions": [at.partition]} for at in answer.assignment]
            assignment = {"topics": topics}
        request.reply(
            error=answer.error,
            epoch=answer.epoch,
            interval_ms=int(answer.interval * 1000),
            assignment=assignment,
        )


def heartbeat_of(values: Any) -> Heartbeat:
    """The heartbeat in a request."""
    owned = None
    if values.owned is not None:
        owned = frozenset(TopicIdPartition(topic.id, number) for topic in values.owned for number in topic.partitions)
    return Heartbeat(
        0,
        0.0,
        values.member,
        values.epoch,
        values.instance,
        values.rack,
        None if values.rebalance_timeout_ms < 0 else values.rebalance_timeout_ms / 1000,
        None if values.topics is None else tuple(values.topics),
        values.pattern,
        values.assignor,
        owned,
    )


def scenario(
    test: Callable[[Scene], Awaitable[None]],
    *,
    prepare: Callable[[ModelCluster], None] = lambda _: None,
    setting: Callable[[Scene], None] = lambda _: None,
    session: float = SESSION,
) -> None:
    """Runs a test with a member that joins."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 2)
        model.create("orders", 2)
        prepare(model)
        cluster = await connect(model.settings)
        clock = asyncio.get_running_loop().time
        member = ConsumerMember(random.Random(1), topics=["orders"], session=session)
        scene = Scene(
            model,
            member,
            lambda scene: MemberLoop(scene.protocol, cluster, scene.log.append, clock),
        )
        setting(scene)
        try:
            async with asyncio.timeout(10_000):
                await test(scene)
        finally:
            scene.running.cancel()
            await asyncio.wait([scene.running])
            await cluster.close()
            await model.close()

    run_on_network(live)


# Joining and heartbeats -----------------------------------------------------------------------


def test_a_member_joins_with_the_names_and_times_of_the_brokers() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        await scene.until(lambda: scene.member.session == SESSION)
        await asyncio.sleep(10 * SESSION)
        assert scene.owned == ALL
        assert not scene.saw(Troubled)

    scenario(test, session=45.0)


def test_a_lookup_of_names_is_repeated_until_a_broker_knows_them() -> None:
    async def test(scene: Scene) -> None:
        asked: list[float] = []

        def describe(request: Received) -> None:
            by_id = any(topic.name is None for topic in request.values.topics or ())
            asked.extend([scene.now] * by_id)
            if by_id and len(asked) <= 2:
                request.reply(
                    brokers=[{"node": 1, "host": "kafka-1", "port": 9092}],
                    topics=[{"error": 100, "name": None, "id": topic.id} for topic in request.values.topics],
                )
            else:
                scene.model.describe(request)

        for broker in scene.model.brokers.values():
            broker.on(METADATA, describe)
        await scene.until(lambda: scene.owned == ALL)
        assert len(asked) == 3
        assert scene.now - asked[0] < 1.0

    scenario(test)


def hide_names(scene: Scene) -> Callable[[], None]:
    """Lets the brokers know no topic by its id; returns what ends that."""
    hidden = [True]

    def describe(request: Received) -> None:
        by_id = [topic.id for topic in request.values.topics or () if topic.name is None]
        if not by_id or not hidden:
            scene.model.describe(request)
            return
        request.reply(
            brokers=[{"node": 1, "host": "kafka-1", "port": 9092}],
            topics=[{"error": 100, "name": None, "id": topic_id} for topic_id in by_id],
        )

    for broker in scene.model.brokers.values():
        broker.on(METADATA, describe)
    return hidden.clear


def test_a_topic_that_no_broker_names_is_noted_with_the_time_of_the_first_answer() -> None:
    async def test(scene: Scene) -> None:
        show = hide_names(scene)
        began = time.time()
        await scene.until(lambda: scene.protocol.unnamed)
        (found,) = scene.protocol.unnamed.items()
        assert found[0] == scene.model.topic_ids["orders"]
        assert began <= found[1] <= time.time()
        await asyncio.sleep(60.0)
        assert scene.protocol.unnamed == dict([found])
        assert not scene.owned

        show()
        await scene.until(lambda: scene.owned == ALL)
        await scene.until(lambda: not scene.protocol.unnamed)

    scenario(test)


def test_a_topic_is_not_noted_if_no_broker_answers() -> None:
    async def test(scene: Scene) -> None:
        for broker in scene.model.brokers.values():
            broker.on(METADATA, hold([]))
        await scene.until(lambda: scene.member.unnamed)
        await asyncio.sleep(120.0)
        assert scene.member.unnamed
        assert scene.protocol.unnamed == {}

    scenario(test)


def test_a_topic_that_is_not_assigned_any_more_is_not_noted() -> None:
    async def test(scene: Scene) -> None:
        hide_names(scene)
        await scene.until(lambda: scene.protocol.unnamed)
        scene.loop.command(lambda member, now: member.subscribe(["another"], [], now))
        await scene.until(lambda: not scene.protocol.unnamed)

    scenario(test)


def test_names_of_later_topics_are_looked_up() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        scene.model.create("refunds", 1)
        scene.group.add_topic("refunds", 1)
        scene.loop.command(lambda member, now: member.subscribe(["orders", "refunds"], [], now))
        await scene.until(lambda: scene.owned == ALL | {TopicPartition("refunds", 0)})

    scenario(test)


def test_a_broker_without_the_protocol_is_not_asked() -> None:
    async def test(scene: Scene) -> None:
        await scene.running
        assert [type(event) for event in scene.log] == [Refused]
        assert not scene.arrived()

    def remove(model: ModelCluster) -> None:
        for broker in model.brokers.values():
            del broker.versions[CONSUMER_GROUP_HEARTBEAT]

    scenario(test, prepare=remove)


def test_a_group_that_this_user_may_not_see_ends_the_member() -> None:
    async def test(scene: Scene) -> None:
        await scene.running
        (ended,) = scene.log
        assert isinstance(ended, Ended)
        assert ended.code == 30

    def deny(scene: Scene) -> None:
        for broker in scene.model.brokers.values():
            broker.on(FIND_COORDINATOR, lambda request: request.reply(error=30))

    scenario(test, setting=deny)


# The coordinator ------------------------------------------------------------------------------


def test_a_moved_coordinator_is_looked_up() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        scene.coordinator = 2
        await scene.until(lambda: scene.saw(Recovered))
        assert scene.arrived(2)
        assert not scene.saw(Lost)

    scenario(test)


def test_a_silent_coordinator_is_looked_up_within_the_session() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        scene.model.brokers[1].silent = True
        scene.coordinator = 2
        await scene.until(lambda: scene.saw(Recovered))
        assert not scene.saw(Lost)
        assert scene.owned == ALL

    scenario(test)


def test_requests_are_written_in_their_order_while_the_coordinator_is_looked_up() -> None:
    """A join that overtakes its own leave would be a member that nobody is."""

    lookups: list[Received] = []

    async def test(scene: Scene) -> None:
        await scene.until(lambda: lookups)
        scene.loop.command(lambda member, now: member.leave(now, "closing"))
        await scene.running
        assert [entry for entry in scene.log if isinstance(entry, int)] == [0, -1]
        assert not scene.group.entries

    def delay_the_first(request: Received) -> None:
        lookups.append(request)
        request.reply_later(0.5 if len(lookups) == 1 else 0.0, node=1, host="kafka-1", port=9092)

    def delay(scene: Scene) -> None:
        for broker in scene.model.brokers.values():
            broker.on(FIND_COORDINATOR, delay_the_first)

    scenario(test, setting=delay)


# Events and times -----------------------------------------------------------------------------


def test_losses_are_delivered_before_the_leave_is_sent() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        held: list[Received] = []
        scene.model.brokers[1].on(CONSUMER_GROUP_HEARTBEAT, hold(held))
        ask = scene.loop.cluster.ask

        async def logged(node: int, request: Any, **options: Any) -> Any:
            scene.log.append(request.values["epoch"])
            return await ask(node, request, **options)

        scene.loop.cluster.ask = logged  # type: ignore[method-assign]
        await scene.until(lambda: -1 in scene.log)
        (lost,) = scene.saw(Lost)
        assert scene.log.index(lost) < scene.log.index(-1)

    scenario(test)


def test_the_times_of_the_group_are_looked_up_again() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        scene.times["consumer.session.timeout.ms"] = "9000"
        scene.times["consumer.heartbeat.interval.ms"] = "250"
        given: list[tuple[float, float]] = []
        use = scene.member.times

        def note(session: float, interval: float, now: float) -> None:
            given.append((session, interval))
            use(session, interval, now)

        scene.member.times = note  # type: ignore[method-assign]
        await asyncio.sleep(301.0)
        assert given == [(9.0, 0.25)]
        assert scene.member.session == 9.0
        scene.times["consumer.session.timeout.ms"] = "7000"
        scene.group.entries.clear()
        await scene.until(lambda: len(scene.saw(Assigned)) > 1 and scene.owned == ALL)
        await asyncio.sleep(1.0)
        assert scene.member.session == 7.0, "the times were not looked up after another join"

    scenario(test)


async def test_partitions_of_dead_members_are_ours_a_heartbeat_after_their_session() -> None:
    driver = away(ConsumerMember(random.Random(1), session=45.0, interval=5.0), [])
    assert driver.inherits_within == 50.0
    driver._loop.close()


def test_times_that_this_user_may_not_see_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        await asyncio.sleep(1_000.0)
        assert scene.member.session == 20.0

    def deny(scene: Scene) -> None:
        scene.times_error = 30

    with caplog.at_level(logging.WARNING, "aioshard.kafka.group"):
        scenario(test, setting=deny, session=20.0)
    assert len(caplog.records) == 1
    assert "20 s" in caplog.text
    assert "`aioshard group configure billing --session-timeout 20`" in caplog.text


# Ending ---------------------------------------------------------------------------------------


def test_run_returns_when_the_member_has_left() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        scene.loop.command(lambda member, now: member.leave(now, "closing"))
        began = scene.now
        await scene.running
        assert scene.now - began < 0.1
        assert [type(event) for event in scene.log[-3:] if not isinstance(event, int)] == [Lost, Ended]

    scenario(test)


def test_a_leave_is_sent_although_the_loop_is_cancelled_with_it() -> None:
    """Here it has to look up the coordinator first."""

    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        scene.loop.cluster.forget_coordinator(CoordinatorKind.GROUP, "billing", 1)
        scene.loop.command(lambda member, now: member.leave(now, "closing"))
        scene.running.cancel()
        await asyncio.wait([scene.running])
        await asyncio.sleep(0.1)
        assert not scene.group.entries

    scenario(test)


def test_a_mistake_in_a_task_ends_the_loop() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        scene.member.answered = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(ZeroDivisionError):
            await scene.running

    scenario(test)


def test_a_release_is_heard_at_once() -> None:
    async def test(scene: Scene) -> None:
        await scene.until(lambda: scene.owned == ALL)
        entry = next(iter(scene.group.entries.values()))
        entry.target = frozenset(sorted(entry.target)[:1])
        scene.group.epoch += 1
        await scene.until(lambda: scene.saw(Revoked))
        (revoked,) = scene.saw(Revoked)
        began = scene.now
        scene.loop.command(lambda member, now: member.released(revoked.life, revoked.partitions, now))
        await scene.until(lambda: not entry.revoking)
        assert scene.now - began < 0.1

    scenario(test)


# The clock ------------------------------------------------------------------------------------


def test_the_clock_counts_while_the_machine_is_suspended_where_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {time.CLOCK_MONOTONIC: 10.0, -7: 9_000.0}
    monkeypatch.setattr(time, "clock_gettime", times.__getitem__)
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", -7, raising=False)
    assert boot_time() == 9_000.0
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert boot_time() == 10.0


# In a thread ----------------------------------------------------------------------------------


def away(member: ConsumerMember, events: list[Event], **options: Any) -> ConsumerDriver:
    """A driver whose brokers are away."""
    settings = Settings(bootstrap_servers="127.0.0.1:1")
    return ConsumerDriver(ConsumerProtocol("billing", member), lambda: new_cluster(settings), events.append, **options)


async def test_a_command_before_the_start_is_not_lost() -> None:
    events: list[Event] = []
    driver = away(ConsumerMember(random.Random(1), topics=["orders"]), events)
    closing = asyncio.create_task(driver.close(60.0, "closing"))
    await asyncio.sleep(0)
    driver.start()
    async with asyncio.timeout(30.0):
        await closing
    assert events == [Ended(0, "left the group")]
    assert not driver.is_alive


@pytest.mark.parametrize(
    ("code", "asks"), [(25, True), (69, True), (82, True), (110, True), (113, True), (7, False), (16, False)]
)
async def test_a_commit_that_the_group_refuses_asks_for_a_heartbeat(code: int, asks: bool) -> None:
    """It brings the newest epoch, under which the commit is repeated, or says that the membership has ended."""
    asked: list[int] = []

    class Observed(ConsumerMember):
        def heartbeat_now(self, now: float) -> None:
            asked.append(code)
            super().heartbeat_now(now)

    driver = away(Observed(random.Random(1), topics=["orders"]), [])
    closing = asyncio.create_task(driver.close(60.0, "closing"))
    await asyncio.sleep(0)
    driver.commit_refused(driver.ownership, code)
    driver.start()
    await closing
    assert bool(asked) == asks


async def test_a_mistake_in_the_thread_ends_the_ownership() -> None:
    class Broken(ConsumerMember):
        def poll(self, now: float) -> Sequence[Heartbeat]:
            self._holdings.renew(1, now + 1000.0, assigned=ALL)
            super().poll(now)
            raise ZeroDivisionError

    events: list[Event] = []
    driver = away(Broken(random.Random(1)), events)
    driver.start()
    async with asyncio.timeout(30.0):
        driver.commit_refused(driver.ownership, 113)
        while not any(isinstance(event, Ended) for event in events):  # noqa: ASYNC110 - the list tells nobody
            await asyncio.sleep(0.01)
        driver.commit_refused(driver.ownership, 113)
        await driver.close(60.0, "closing")
    assert driver.ownership.partitions == frozenset()
    assert [type(event) for event in events if isinstance(event, Lost | Ended)] == [Lost, Ended]
    assert not driver.is_alive


def test_the_thread_ends_with_the_event_loop_of_its_engine() -> None:
    async def start() -> ConsumerDriver:
        driver = away(ConsumerMember(random.Random(1), session=1.0), [])
        driver.start()
        return driver

    driver = asyncio.run(start())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "heartbeats of group billing"]
    thread.join(30.0)
    assert not driver.is_alive
