"""The client is lost and replaced."""

import asyncio

from aioshard import App, Record
from aioshard.errors import ClientLostError
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run


class Hanging(InMemoryTransport):
    """A client that does not come to an end when it is closed the first time."""

    closing = 0

    async def close(self) -> None:
        Hanging.closing += 1
        if Hanging.closing == 1:
            self.crash()
            await asyncio.sleep(1_000_000.0)
        await super().close()


def test_a_client_that_does_not_close_does_not_delay_its_replacement() -> None:
    app = App("losses", auto_offset_reset="earliest", commit_timeout=3.0)
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with app.started(lambda: Hanging(broker, "losses", session_timeout=1.0)):
            broker.fail_next_poll(ClientLostError("it died"))
            await asyncio.sleep(5.0)
            assert app.statistics().client_losses == 1
            broker.publish("orders", b"")
            async with asyncio.timeout(5.0):
                await broker.until(lambda: broker.committed("losses", "orders", 0) == 1)

    run(test())


def test_a_client_lost_after_working_is_replaced_at_once() -> None:
    """Only attempts that fail one after the other are further and further apart."""
    app = App("losses")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(10):
                client.broker.fail_next_poll(ClientLostError("it died"))
                await client.publish("orders", b"", partition=0)
                async with asyncio.timeout(2.0):
                    await client.broker.until(
                        lambda number=number: client.committed("orders", 0) == number + 1  # type: ignore[misc]
                    )
                await asyncio.sleep(0.5)
            assert app.statistics().client_losses == 10

    run(test())
