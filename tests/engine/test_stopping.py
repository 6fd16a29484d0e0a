"""Assignments and lost partitions while the app stops."""

import asyncio

from aioshard import App, Record
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run


def test_an_assignment_during_a_drain_starts_nothing() -> None:
    """Nobody would wait for its tasks."""
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
            asyncio.get_running_loop().call_later(0.5, broker.group("stopping").lose)
            asyncio.get_running_loop().call_later(1.0, broker.publish, "orders", b"")

    run(test())

    assert started == [(0, 0)]


def test_a_run_of_a_lost_partition_that_ends_during_shutdown_is_not_late() -> None:
    """A handler that needs a round trip to end when it is cancelled, as database drivers do."""
    app = App("stopping", shutdown_timeout=5.0)
    cancelled: list[float] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:  # noqa: ARG001 - the first run hangs whatever comes
        try:
            await asyncio.sleep(0.0 if cancelled else 1_000.0)
        except asyncio.CancelledError:
            cancelled.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.2)
            raise

    async def test() -> float:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await asyncio.sleep(1.0)
            client.group.lose()
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop().time()

    ended = run(test())
    assert cancelled
    assert ended - cancelled[0] < 1.0


def test_a_loss_ends_the_final_drain() -> None:
    """A run that continued until the deadline would run beside those of the next owner."""
    app = App("stopping", auto_offset_reset="earliest", shutdown_timeout=60.0)
    cancelled: list[float] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:  # noqa: ARG001 - it hangs whatever comes
        try:
            await asyncio.sleep(1_000.0)
        except asyncio.CancelledError:
            cancelled.append(asyncio.get_running_loop().time())
            raise

    async def test() -> float:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await asyncio.sleep(1.0)
            loop = asyncio.get_running_loop()
            lost = loop.time() + 2.0
            loop.call_at(lost, client.group.lose)
        assert lost <= cancelled[0] < lost + 0.5
        return loop.time() - lost

    assert run(test()) < 1.0
