"""Tests of a handler without Kafka: the real engine on an in-memory broker. Run them with pytest."""

import asyncio

import pytest

from aioshard import App, Record, Retry
from aioshard.testing import TestClient, run


class Payments:
    """Stands for a remote service."""

    def __init__(self) -> None:
        self.available = True
        self.charged: list[tuple[bytes | None, bytes | None]] = []

    async def charge(self, customer: bytes | None, item: bytes | None) -> None:
        await asyncio.sleep(0.5)
        if not self.available:
            raise ConnectionError("the payment service is away")
        self.charged.append((customer, item))


app = App("billing")
payments = Payments()


@app.consume("orders", retry=Retry(attempts=5, initial=10.0))
async def on_order(record: Record) -> None:
    await payments.charge(record.key, record.value)


@pytest.fixture(autouse=True)
def fresh_service() -> None:
    payments.available = True
    payments.charged.clear()


def test_orders_of_a_customer_are_charged_in_order() -> None:
    async def scenario() -> None:
        async with TestClient(app) as client:
            first = await client.publish("orders", "book", key="alice")
            await client.publish("orders", "pen", key="alice")
            await client.settle()
            assert client.committed("orders", first.partition) == 2

    run(scenario())  # virtual time: waiting takes no real time
    assert payments.charged == [(b"alice", b"book"), (b"alice", b"pen")]


def test_an_outage_is_waited_for_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        payments.available = False
        async with TestClient(app) as client:
            record = await client.publish("orders", "book", key="alice")
            await asyncio.sleep(5.0)
            assert client.committed("orders", record.partition) == 0
            assert "waits for its next attempt" in app.explain()

            payments.available = True
            await client.settle(timeout=60.0)
            assert client.committed("orders", record.partition) == 1

    run(scenario())
    assert payments.charged == [(b"alice", b"book")]


def test_a_rebalance_in_the_middle_repeats_nothing() -> None:
    async def scenario() -> None:
        async with TestClient(app) as client:
            for number in range(20):
                await client.publish("orders", f"item {number}", key=f"customer {number % 5}")
            await asyncio.sleep(1.0)
            client.group.rebalance()
            await client.settle()

    run(scenario())
    assert len(payments.charged) == len(set(payments.charged)) == 20
