"""`start_timeout`: which conditions end a start, and which it waits for."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.errors import ConnectError, StartError
from aioshard.records import PartitionInfo
from aioshard.testing import InMemoryBroker, InMemoryTransport, run


def make_app() -> App:
    app = App("billing", auto_offset_reset="earliest", start_timeout=2.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    return app


def make_broker() -> InMemoryBroker:
    broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
    broker.create_topic("orders", 2)
    return broker


async def start(app: App, broker: InMemoryBroker) -> float:
    """Start the app, end it, and return how long the start took."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with app.started(lambda: InMemoryTransport(broker, "billing", latency=lambda _: 0.5)):
        return clock() - began


def refused(act: Callable[[InMemoryBroker], Any]) -> str:
    async def test() -> str:
        broker = make_broker()
        act(broker)
        with pytest.raises(StartError) as error:
            await start(make_app(), broker)
        return str(error.value)

    return run(test())


def test_a_start_without_brokers_ends_in_time() -> None:
    def nobody_answers(broker: InMemoryBroker) -> None:
        broker.available = False

    assert "start_timeout=2 s" in refused(nobody_answers)


def test_a_start_survives_an_outage_once_a_broker_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> float:
        broker = make_broker()

        async def go_away() -> None:
            await broker.until(lambda: bool(broker.group("billing").members))
            broker.available = False
            broker.fail_next_poll(ConnectError("the broker is away"))
            await asyncio.sleep(20.0)
            broker.available = True

        away = asyncio.create_task(go_away(), name="outage")
        took = await start(make_app(), broker)
        await away
        return took

    with caplog.at_level(logging.WARNING, "aioshard"):
        assert run(test()) > 20.0
    waited = [record.seconds for record in caplog.records if getattr(record, "event", "") == "starting"]  # type: ignore[attr-defined]
    assert len(waited) > 1
    assert waited == sorted(set(waited)), "each line says how long the start has lasted"


def test_a_start_waits_for_a_slow_rebalance() -> None:
    async def test() -> float:
        broker = make_broker()
        for partition in range(2):
            broker.group("billing").revoke(("orders", partition))  # type: ignore[arg-type]

        async def assign_later() -> None:
            await asyncio.sleep(10.0)
            for name in sorted(broker.group("billing").withheld):
                broker.group("billing").assign(name)

        later = asyncio.create_task(assign_later(), name="assign")
        took = await start(make_app(), broker)
        await later
        return took

    assert run(test()) < 12.0


def test_a_missing_topic_ends_a_start_although_brokers_respond() -> None:
    async def test() -> str:
        broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        app = make_app()
        with pytest.raises(StartError) as error:
            async with app.started(lambda: Slow(broker, "billing")):
                """It does not start."""
        return str(error.value)

    assert "start_timeout=2 s" in run(test())


class Slow(InMemoryTransport):
    """A client whose group gives out nothing, because its topic does not exist."""

    async def _take_next_step(self, _: Any) -> None:
        await asyncio.sleep(3600.0)

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:  # noqa: ARG002 - no topic exists
        return {}
