"""The group assigns partitions of a topic without a handler: an assignor, a pattern or another version does that."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, Operation, run
from tests.engine.live_apps import engine_of, until

FOREIGN = TopicPartition("refunds", 0)


class Shop:
    """An app that reads one topic, and whose group also assigns `FOREIGN`."""

    def __init__(self, **latency: float) -> None:
        self.latency = latency
        self.broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        for topic in ("orders", FOREIGN.topic):
            self.broker.create_topic(topic, 2)
            for partition in range(2):
                self.broker.publish(topic, b"", partition=partition)
        self.app = App("billing", auto_offset_reset="earliest", commit_timeout=1.0)
        self.seen: list[TopicPartition] = []
        self.transports: list[InMemoryTransport] = []
        group = self.broker.group("billing")
        assignment = group.assignment
        group.assignment = lambda member_id: (*assignment(member_id), FOREIGN)  # type: ignore[method-assign]

        @self.app.consume("orders")
        async def handle(record: Record) -> None:
            self.seen.append(record.topic_partition)

    def connect(self) -> InMemoryTransport:
        def latency(operation: Operation) -> float:
            return self.latency.get(operation, 0.0)

        self.transports.append(InMemoryTransport(self.broker, "billing", latency=latency))
        return self.transports[-1]

    async def rebalance(self) -> None:
        before = self.app.statistics().rebalances
        self.broker.group("billing").rebalance()
        await until(lambda: self.app.statistics().rebalances == before + 1)

    def change_no_assignment(self) -> None:
        """Let the group do nothing when the app subscribes to other topics."""
        self.transports[-1].subscribe = lambda *_: None  # type: ignore[method-assign]


def scenario(test: Callable[[Shop], Awaitable[Any]]) -> None:
    async def live() -> None:
        shop = Shop()
        async with shop.app.started(shop.connect):
            await until(lambda: FOREIGN in shop.transports[-1].assigned)
            await test(shop)

    run(live())


def warnings_about_foreign(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if FOREIGN.topic in record.getMessage()]


def test_it_is_left_alone_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(shop: Shop) -> None:
        await until(lambda: len(shop.seen) == 2)
        engine = engine_of(shop.app)
        assert engine.rebalance.all_resumed
        assert {partition.topic_partition.topic for partition in engine.rebalance.partitions} == {"orders"}
        assert shop.transports[-1].position(FOREIGN) is None

        for _ in range(3):
            await shop.rebalance()
        await until(lambda: engine.rebalance.all_resumed)
        shop.broker.publish("orders", b"", partition=1)
        await until(lambda: len(shop.seen) == 3)
        assert shop.broker.committed("billing", *FOREIGN) is None
        assert "no handler" in shop.app.explain()

    scenario(test)
    (text,) = warnings_about_foreign(caplog)
    assert "no handler" in text
    assert "add a handler" in text


def test_it_counts_as_left_when_the_others_are_revoked() -> None:
    """The transport does not know handlers: it calls `assigned` only when it has nothing left."""

    async def test(shop: Shop) -> None:
        await until(lambda: len(shop.seen) == 2)
        engine = engine_of(shop.app)
        await engine.rebalance.revoked([TopicPartition("orders", number) for number in range(2)])
        await until(lambda: engine.rebalance.all_resumed)
        assert not len(engine.rebalance.partitions)

    scenario(test)


def test_it_opens_when_a_handler_subscribes_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """The group may have nothing to change then."""

    async def test(shop: Shop) -> None:
        await until(lambda: len(shop.seen) == 2)
        shop.change_no_assignment()
        shop.app.subscribe("handle", FOREIGN.topic)
        await until(lambda: FOREIGN in shop.seen, timeout=10.0)
        assert "no handler" not in shop.app.explain()
        await until(lambda: shop.broker.committed("billing", *FOREIGN) == 1)

    scenario(test)
    assert len(warnings_about_foreign(caplog)) == 1


def test_a_topic_that_is_unsubscribed_while_it_opens_does_not_end_the_app(caplog: pytest.LogCaptureFixture) -> None:
    """The group has not taken it away yet."""

    async def test(shop: Shop) -> None:
        await until(lambda: len(shop.seen) == 2)
        shop.change_no_assignment()
        shop.latency["committed"] = 1.0
        shop.app.subscribe("handle", FOREIGN.topic)
        await asyncio.sleep(0.5)
        assert not engine_of(shop.app).rebalance.opened.is_set()
        shop.app.unsubscribe("handle", FOREIGN.topic)
        await asyncio.sleep(5.0)
        assert engine_of(shop.app).rebalance.all_resumed
        assert FOREIGN not in shop.seen

    scenario(test)
    assert len(warnings_about_foreign(caplog)) == 1, "the application has done that itself"
