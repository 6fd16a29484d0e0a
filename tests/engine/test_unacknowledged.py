"""A side topic that acknowledges nothing, as without in-sync replicas, while other topics work."""

import asyncio

import pytest

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.core.options import OnFailure
from aioshard.errors import NotDrainedError, TransportError
from aioshard.ports import Message
from aioshard.testing import InMemoryProducer, TestClient, run

PATIENCE = 30.0
"""Seconds after which the Kafka producer gives a message up."""
HEALTHY = 200


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", [DeadLetter("side", breaker=None), Park("side", delay=1_000.0)], ids=str)
def test_healthy_keys_continue_while_many_failed_records_wait_to_be_written(
    on_failure: OnFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = InMemoryProducer.publish

    async def slow(self: InMemoryProducer, message: Message) -> int:
        if message.topic == "side":
            await asyncio.sleep(PATIENCE)
            raise TransportError("not acknowledged")
        return await publish(self, message)

    monkeypatch.setattr(InMemoryProducer, "publish", slow)
    app = App("unacknowledged", shutdown_timeout=40.0)
    done: list[int] = []

    @app.consume("orders", concurrency=8, retry=Retry(attempts=1), on_failure=on_failure)
    async def handle(record: Record) -> None:
        if (record.key or b"").startswith(b"bad"):
            raise ValueError
        done.append(record.offset)

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(40):
                await client.publish("orders", b"", key=f"bad{number}", partition=0)
            for number in range(HEALTHY):
                await client.publish("orders", b"", key=f"k{number}", partition=0)
            await asyncio.sleep(10 * PATIENCE)

    with pytest.raises(NotDrainedError) as error:
        run(test())
    assert len(error.value.unrecovered) == 40, "also those that were held back"

    assert len(done) == HEALTHY
