"""A second assignment arrives while the first is being resolved, as in incremental rebalances."""

import asyncio

from aioshard import App, Record
from aioshard.ports import NOT_A_MEMBER, Membership
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.live_apps import engine_of, until

TAKES = 1.0
"""Seconds that the broker takes to tell a committed offset."""


def test_a_repeated_assignment_opens_each_partition_once() -> None:
    """A client whose group takes only what moves tells all that is ours again, under the same membership."""
    handled: list[tuple[int, int]] = []

    async def live() -> None:
        broker = InMemoryBroker(clock=lambda: 0.0)
        broker.create_topic("orders", 2)
        for number in range(20):
            broker.publish("orders", b"", key=b"%d" % number, partition=number % 2)
        app = App("group", auto_offset_reset="earliest", start_timeout=None)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            handled.append((record.partition, record.offset))

        def latency(operation: str) -> float:
            return TAKES if operation == "committed" else 0.0

        transport = InMemoryTransport(broker, "group", latency=latency)
        async with app.started(lambda: transport):
            engine = engine_of(app)
            await until(lambda: engine.rebalance._opening)
            partitions = transport.assigned
            for _ in range(3):
                await asyncio.sleep(TAKES / 2)
                engine.rebalance.assigned(partitions, transport.membership())
            await asyncio.wait_for(engine.rebalance.opened.wait(), 30)
            await until(lambda: len(handled) == 20)
            assert [owned.number for owned in engine.rebalance.partitions] == [1, 2]

    run(live())
    assert sorted(handled) == [(partition, offset) for partition in range(2) for offset in range(10)]


class Lapsing(InMemoryTransport):
    """A client that has left its generation before the engine learns of it."""

    lapsed = False

    def membership(self) -> Membership:
        return NOT_A_MEMBER if self.lapsed else super().membership()


def test_an_assignment_with_a_lapsed_membership_does_not_settle() -> None:
    """Else an app would end as caught up before it has opened a partition."""
    handled: list[int] = []

    async def live() -> None:
        broker = InMemoryBroker(clock=lambda: 0.0)
        broker.create_topic("orders", 1)
        for _ in range(5):
            broker.publish("orders", b"")
        app = App("group", auto_offset_reset="earliest", start_timeout=None)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            handled.append(record.offset)

        transport = Lapsing(broker, "group", latency=lambda operation: TAKES if operation == "committed" else 0.0)
        async with app.started(lambda: transport):
            engine = engine_of(app)
            await until(lambda: engine.rebalance._opening)
            transport.lapsed = True
            await asyncio.sleep(3 * TAKES)
            assert not engine.rebalance.opened.is_set()
            assert not engine.rebalance.all_resumed
            assert handled == []

            transport.lapsed = False
            engine.rebalance.assigned(transport.assigned, transport.membership())
            await asyncio.wait_for(engine.rebalance.opened.wait(), 30)
            await until(lambda: len(handled) == 5)

    run(live())


def test_partitions_open_after_a_pause_of_the_membership() -> None:
    """A classic member pauses while a rebalance lasts for too long; when nothing has changed for it, nobody says so."""
    handled: list[int] = []

    async def live() -> None:
        broker = InMemoryBroker(clock=lambda: 0.0)
        broker.create_topic("orders", 1)
        for _ in range(5):
            broker.publish("orders", b"")
        app = App("group", auto_offset_reset="earliest", start_timeout=None)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            handled.append(record.offset)

        transport = Lapsing(broker, "group", latency=lambda operation: TAKES if operation == "committed" else 0.0)
        async with app.started(lambda: transport):
            engine = engine_of(app)
            await until(lambda: engine.rebalance._opening)
            transport.lapsed = True
            await asyncio.sleep(3 * TAKES)
            assert handled == []

            transport.lapsed = False
            await asyncio.wait_for(engine.rebalance.opened.wait(), 30)
            await until(lambda: len(handled) == 5)

    run(live())
