"""While the app stops."""

import asyncio

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, InMemoryTransport, run


def test_an_assignment_that_comes_while_the_app_drains_starts_nothing() -> None:
    """Nobody would wait for what it starts."""
    app = App("stopping", auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
    started: list[tuple[int, int]] = []
    completed: list[tuple[int, int]] = []

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        started.append((record.partition, record.offset))
        await asyncio.sleep(3.0)
        completed.append((record.partition, record.offset))

    async def test() -> None:
        for _ in range(5):
            broker.publish("orders", b"", partition=0)
        async with app.started(lambda: InMemoryTransport(broker, "stopping")):
            await asyncio.sleep(1.0)
            asyncio.get_running_loop().call_later(0.5, broker.lose)
            asyncio.get_running_loop().call_later(1.0, broker.publish, "orders", b"")

    run(test())

    assert started == [(0, 0)]
