"""Retention deletes records before they are read."""

import asyncio

import pytest

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, InMemoryTransport, run


@pytest.mark.parametrize("seconds", [0.0, 1.5], ids=["fast brokers", "slow brokers"])
def test_records_in_flight_continue_and_reading_resumes_after_the_deleted_ones(seconds: float) -> None:
    """A hole like any other: the epoch continues, and nothing runs twice. The partition is paused while brokers answer:
    another fault would restart the search for its position, and with slow brokers it would never end."""
    app = App("retention", auto_offset_reset="earliest", max_buffered_records=10)
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    runs: list[int] = []

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        await asyncio.sleep(1.0)
        runs.append(record.offset)

    async def test() -> None:
        for _ in range(60):
            broker.publish("orders", b"")
        latency = {"committed": seconds}
        transport = InMemoryTransport(broker, "retention", latency=lambda operation: latency.get(operation, 0.0))
        async with app.started(lambda: transport):
            await asyncio.sleep(2.5 + seconds)
            broker.log("orders", 0).truncate_before(50)
            async with asyncio.timeout(60.0):
                await broker.until(lambda: broker.committed("retention", "orders", 0) == 60)
            statistics = app.statistics()
            assert (statistics.partitions[0].epoch, statistics.replayed) == (1, 0)

    run(test())

    held = [offset for offset in runs if offset < 50]
    assert held == list(range(len(held)))
    assert 2 < len(held) < 20, "what had been read before was processed, and nothing else of it"
    assert runs[len(held) :] == list(range(50, 60))
