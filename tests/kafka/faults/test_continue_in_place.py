"""Partitions that return in a rebalance: when they continue in place and when not."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from aioshard import App
from aioshard.errors import CommitError
from aioshard.ports import Committed, TransportFactory
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport
from tests.kafka.client.members import generation_of, rejoin
from tests.kafka.faults.intercepting import InterceptedTransport, Interceptor
from tests.kafka.faults.support import (
    Ledger,
    messages,
    partition_of,
    quick_app,
    transport_of,
    until,
    visiting,
    with_both_protocols,
    with_classic_at_least,
)
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message

ROUNDS = 3
EAGER = "sticky"
"""An assignor that takes all partitions away in a rebalance; those that come back are looked at."""


# Beside another member -----------------------------------------------------------------------


@with_both_protocols
async def test_kept_partitions_continue_in_place_while_members_join_and_leave(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    """I4 and I12: nothing runs twice, nothing is given to the engine twice, and the order is kept."""
    await kafka.create_topic(topic, partitions=4)
    ledger = Ledger(pause=0.005)
    staying, coming = (quick_app(kafka, group, group_protocol=protocol) for _ in range(2))
    for app in (staying, coming):
        app.consume(topic, concurrency=16)(ledger.handle)
    interceptor = Interceptor(transport_of(staying))
    sent: list[Message] = []
    kept = {0, 1, 2, 3}
    async with staying.started(interceptor):
        # A group of the consumer protocol may not know a new topic yet.
        await until(lambda: len(staying.statistics().partitions) == 4, staying.explain)
        epochs = {p.partition: p.epoch for p in staying.statistics().partitions}
        for turn in range(ROUNDS):
            before, beside = (messages(1000, keys=40, start=2000 * turn + start) for start in (0, 1000))
            sent += before + beside
            await kafka.produce(topic, before)
            await ledger.until_more_than(2000 * turn + 100)
            async with coming:
                await until(lambda: len(coming.statistics().partitions) == 2, coming.explain)
                kept &= {p.partition for p in staying.statistics().partitions}
                await kafka.produce(topic, beside)
                await ledger.until_more_than(len(ledger.finished) + 100)
            await until(lambda: len(staying.statistics().partitions) == 4, staying.explain)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)

        assert kept
        assert {p.partition: p.epoch for p in staying.statistics().partitions if p.partition in kept} == {
            number: epochs[number] for number in kept
        }
        assert [name for name in interceptor.delivered_twice if int(name.split("/")[1]) in kept] == []
        assert staying.statistics().rebalances >= 1 + 2 * ROUNDS
        assert staying.statistics().replayed == 0
    assert ledger.duplicates == []
    ledger.assert_in_order()


@with_classic_at_least
async def test_a_rebalance_that_moves_nothing_has_no_effect(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    """A member with its own topic joins while handlers run, and leaves while they still do."""
    await kafka.create_topic(topic, partitions=2)
    await kafka.create_topic(f"{topic}.other")
    app, ledger = quick_app(kafka, group, group_protocol=protocol), Ledger()
    app.consume(topic)(ledger.handle)
    interceptor = Interceptor(transport_of(app))
    async with app.started(interceptor):
        before = app.statistics()
        sent = messages(100)
        ledger.hold(lambda record: record.offset == 3)
        await kafka.produce(topic, sent)
        await ledger.until_more_than(10)

        generation = generation_of(interceptor.transport)
        async with visiting(kafka, group, f"{topic}.other", group_protocol=protocol):
            ledger.release()
            await ledger.until_finished(sent)
        await until(lambda: generation_of(interceptor.transport) >= generation + 2, app.explain)
        await kafka.wait_for_lag(group, topic)

        after = app.statistics()
        assert [p.epoch for p in after.partitions] == [p.epoch for p in before.partitions]
        assert after.member_id == before.member_id
        assert after.rebalances == before.rebalances, "nothing has changed for the app"
        assert after.replayed == 0, "the two that were held were cancelled"
    assert interceptor.delivered_twice == []
    assert ledger.duplicates == []
    ledger.assert_in_order()


async def test_a_partition_with_unknown_offsets_is_named_and_continues_in_place(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """I11: the partition is assigned but paused, because its offsets are unknown; records in flight stay in flight."""
    await kafka.create_topic(topic)
    app, ledger = quick_app(kafka, group, assignor=EAGER, drain_timeout=0.3, commit_timeout=1), Ledger()
    app.consume(topic)(ledger.handle)
    interceptor = Interceptor(transport_of(app))
    async with app.started(interceptor):
        epoch = partition_of(app, 0).epoch
        ledger.hold(lambda record: record.offset == 3)
        sent = messages(20)
        await kafka.produce(topic, sent)
        await ledger.until_more_than(10)

        interceptor.questions.clear()
        rejoin(interceptor.transport)
        await until(lambda: f"{topic}/0" in str(app.statistics().trouble), app.explain)
        assert "do not answer" in app.explain()
        assert "rebalancing" in str(partition_of(app, 0).paused)
        assert app.statistics().state == "running"
        interceptor.questions.set()
        ledger.release()

        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)
        await until(lambda: app.statistics().trouble is None, app.explain)
        assert partition_of(app, 0).epoch == epoch
    assert interceptor.delivered_twice == []
    assert ledger.duplicates == []
    ledger.assert_in_order()


async def test_a_lost_commit_response_starts_a_new_epoch_and_repeats_nothing(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """The broker has another offset than the app has committed: it may be somebody else's, so the broker is right."""
    await kafka.create_topic(topic)
    app, ledger = quick_app(kafka, group, assignor=EAGER, drain_timeout=0.3, commit_timeout=0.5), Ledger()
    app.consume(topic)(ledger.handle)
    interceptor = Interceptor(transport_of(app))
    async with app.started(interceptor):
        epoch = partition_of(app, 0).epoch
        ledger.hold(lambda record: record.offset == 30)
        interceptor.lose_answers = [CommitError("the answer was lost")] * 1000
        sent = messages(40, keys=40)
        await kafka.produce(topic, sent)
        await ledger.until_more_than(38)

        rejoin(interceptor.transport)
        await until(lambda: app.statistics().rebalances == 2, app.explain)
        interceptor.lose_answers.clear()
        ledger.release()

        await until(lambda: partition_of(app, 0).epoch > epoch, app.explain)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)
        await until(lambda: app.statistics().trouble is None, app.explain)
    assert [name for name in ledger.duplicates if int(name.split("/")[-1]) <= 30] == []
    ledger.assert_in_order()


# The five conditions ----------------------------------------------------------------------------


class World(Protocol):
    """A broker, real or in memory, with one topic of one partition and one app."""

    app: App
    topic: str

    def make(self) -> TransportFactory: ...
    async def produce(self, sent: list[Message]) -> None: ...
    async def delete_before(self, offset: int) -> None: ...
    def committed(self) -> Awaitable[int | None]: ...
    def rebalance(self, transport: InterceptedTransport) -> None: ...


class RealPlace:
    def __init__(self, kafka: SharedKafka, topic: str, group: str) -> None:
        self.kafka, self.topic, self.group = kafka, topic, group
        self.app = quick_app(kafka, group, assignor=EAGER, drain_timeout=0.3)

    def make(self) -> TransportFactory:
        return transport_of(self.app)

    async def produce(self, sent: list[Message]) -> None:
        await self.kafka.produce(self.topic, sent)

    async def delete_before(self, offset: int) -> None:
        await self.kafka.delete_records(self.topic, before={0: offset})

    async def committed(self) -> int | None:
        return (await self.kafka.committed(self.group, self.topic)).get(0)

    def rebalance(self, transport: InterceptedTransport) -> None:
        rejoin(transport)


class MemoryPlace:
    def __init__(self, topic: str, group: str) -> None:
        self.broker, self.topic, self.group = InMemoryBroker(), topic, group
        self.broker.create_topic(topic, 1)
        self.app = quick_app("localhost:9092", group, drain_timeout=0.3)

    def make(self) -> TransportFactory:
        return lambda: InMemoryTransport(self.broker, self.group)

    async def produce(self, sent: list[Message]) -> None:
        for key, value in sent:
            self.broker.publish(self.topic, value, key=key, partition=0)

    async def delete_before(self, offset: int) -> None:
        self.broker.log(self.topic, 0).truncate_before(offset)

    async def committed(self) -> int | None:
        return self.broker.committed(self.group, self.topic, 0)

    def rebalance(self, _transport: InterceptedTransport) -> None:
        self.broker.group(self.group).rebalance()


@pytest.fixture(params=[pytest.param("kafka", marks=pytest.mark.kafka), "memory"])
def broker(request: pytest.FixtureRequest) -> SharedKafka | None:
    """The run's broker, or none: a separate fixture, because starting that broker needs its own loop."""
    found: SharedKafka | None = request.getfixturevalue("kafka") if request.param == "kafka" else None
    return found


@pytest.fixture
async def world(broker: SharedKafka | None, topic: str, group: str) -> World:
    if broker is None:
        return MemoryPlace(topic, group)
    await broker.create_topic(topic)
    return RealPlace(broker, topic, group)


class Scene:
    """Ten records done and committed, then twenty taken in of which some run: then the group rebalances."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app = world.app
        self.name = TopicPartition(world.topic, 0)
        self.ledger = Ledger()
        self.app.consume(world.topic, concurrency=4)(self.ledger.handle)
        self.interceptor = Interceptor(world.make())
        self.done, self.taken_in = messages(10), messages(20, start=10)

    async def play(self, between: Callable[[InterceptedTransport], Any]) -> tuple[int, int]:
        """Rebalance once, with *between* in the middle; returns the partition's epoch before and after."""
        ledger, app, interceptor = self.ledger, self.app, self.interceptor
        await self.world.produce(self.done)
        await ledger.until_finished(self.done)
        await until(lambda: partition_of(app, 0).committed == 10, app.explain)
        ledger.hold()
        await self.world.produce(self.taken_in)
        await until(lambda: partition_of(app, 0).incomplete == 20, app.explain)
        await ledger.until(lambda: len(ledger.started) == 14)
        before = partition_of(app, 0).epoch
        await self.rebalance(between)
        ledger.release()
        await ledger.until_finished(self.done + self.taken_in)
        await until(lambda: partition_of(app, 0).committed == 30, app.explain)
        assert await self.world.committed() == 30
        assert interceptor.events  # the interceptor was in between
        ledger.assert_in_order()
        return before, partition_of(app, 0).epoch

    async def rebalance(self, between: Callable[[InterceptedTransport], Any]) -> None:
        async def meddle(transport: InterceptedTransport) -> None:
            answer = between(transport)
            if answer is not None:
                await answer

        app, interceptor = self.app, self.interceptor
        rebalances = app.statistics().rebalances
        interceptor.after_revoked = meddle
        self.world.rebalance(interceptor.transport)
        await until(lambda: app.statistics().rebalances > rebalances, app.explain)
        interceptor.after_revoked = None


@pytest.fixture
def ended(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Why epochs ended, as the log has it."""
    caplog.set_level(logging.DEBUG, "aioshard.engine.rebalance")

    def reasons() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.getMessage().startswith("epoch ")]
        return [sentence.partition("ended: ")[2].partition(";")[0] for sentence in found]

    return reasons


async def test_a_partition_continues_in_place_when_all_five_conditions_hold(
    world: World, ended: Callable[[], list[str]]
) -> None:
    """The control of the tests below: the same scene, and nobody meddles."""
    scene = Scene(world)
    async with world.app.started(scene.interceptor):
        before, after = await scene.play(lambda _: None)

        assert after == before
        assert ended() == []
        assert scene.interceptor.delivered_twice == []
    assert scene.ledger.duplicates == []


async def test_a_partition_missing_from_the_last_assignment_starts_a_new_epoch(
    world: World, ended: Callable[[], list[str]]
) -> None:
    scene = Scene(world)
    async with world.app.started(scene.interceptor):

        async def leave_out(_: InterceptedTransport) -> None:
            scene.interceptor.kept_back = frozenset([scene.name])

        async def give_back() -> None:
            await until(lambda: ended() != [])
            scene.interceptor.kept_back = frozenset()
            world.rebalance(scene.interceptor.transport)

        original = scene.rebalance

        async def twice(between: Callable[[InterceptedTransport], Any]) -> None:
            await original(between)
            await give_back()
            await until(lambda: world.app.statistics().partitions, world.app.explain)

        scene.rebalance = twice  # type: ignore[method-assign]
        before, after = await scene.play(leave_out)

        assert after > before
        assert ended() == ["the partition was assigned to another member"]
    assert scene.ledger.duplicates == []


async def test_another_member_id_starts_a_new_epoch(world: World, ended: Callable[[], list[str]]) -> None:
    scene = Scene(world)
    async with world.app.started(scene.interceptor):

        def rename(_: InterceptedTransport) -> None:
            scene.interceptor.member_id = "somebody-else"

        before, after = await scene.play(rename)

        assert after > before
        assert ended() == ["the group has given us another member id"]
    assert scene.ledger.duplicates == []


async def test_a_missed_generation_starts_a_new_epoch(world: World, ended: Callable[[], list[str]]) -> None:
    """In between somebody may have had the partition, and given it back."""
    scene = Scene(world)
    async with world.app.started(scene.interceptor):

        def skip(_: InterceptedTransport) -> None:
            scene.interceptor.skipped_generations = 1

        before, after = await scene.play(skip)

        assert after > before
        (reason,) = ended()
        assert reason.startswith("the group's generation went from ")
    assert scene.ledger.duplicates == []


async def test_a_moved_committed_offset_starts_a_new_epoch(world: World, ended: Callable[[], list[str]]) -> None:
    """Behind our back and under our own membership: what was moved back is read again."""
    scene = Scene(world)
    async with world.app.started(scene.interceptor):

        async def move(transport: InterceptedTransport) -> None:
            inner = transport.inner
            await inner.commit({scene.name: Committed(4, "")}, inner.membership())

        before, after = await scene.play(move)

        assert after > before
        assert ended() == ["the committed offset is 4 and ours was 10"]
        assert world.app.statistics().replayed >= 6
    again = [record.offset for record in scene.ledger.finished].count
    assert [offset for offset in range(30) if again(offset) == 2] == [4, 5, 6, 7, 8, 9]
    assert [offset for offset in range(30) if again(offset) not in (1, 2)] == []


async def test_a_position_outside_the_log_starts_a_new_epoch(world: World, ended: Callable[[], list[str]]) -> None:
    """Retention passes it while the group rebalances; what is still there is read."""
    scene = Scene(world)
    async with world.app.started(scene.interceptor):
        app, ledger = scene.app, scene.ledger
        await world.produce(scene.done)
        await ledger.until_finished(scene.done)
        await until(lambda: partition_of(app, 0).committed == 10, app.explain)
        scene.interceptor.hand_out = False
        await world.produce(scene.taken_in)
        before = partition_of(app, 0).epoch

        await scene.rebalance(lambda _: world.delete_before(15))
        scene.interceptor.resume_delivery()

        await ledger.until_finished(scene.done + scene.taken_in[5:])
        await until(lambda: partition_of(app, 0).committed == 30, app.explain)
        assert partition_of(app, 0).epoch > before
        assert ended() == ["position 10 is outside the log (15 to 30)"]
    assert ledger.offsets(0) == [*range(10), *range(15, 30)]
