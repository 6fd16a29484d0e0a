"""How soon an app with exactly-once processing commits again when its brokers have come back."""

import asyncio

import pytest

from aioshard import Context, Record
from tests.kafka.faults.support import messages, quick_app, until
from tests.support.kafka import KafkaBroker

RECORDS = 4_000
COMMITS_WITHIN = 5.0
"""Seconds from the return of the broker until the next transaction is committed."""


@pytest.mark.chaos
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("outage", [2.0, 20.0], ids=["short", "beyond the session"])
async def test_a_transaction_is_committed_soon_after_a_broker_has_come_back(
    own_kafka: KafkaBroker, topic: str, group: str, protocol: str, outage: float
) -> None:
    """Neither the group nor the transactional id has to wait for the end of a session or of a transaction."""
    out = f"{topic}.out"
    await own_kafka.create_topic(topic, 4)
    await own_kafka.create_topic(out, 4)
    await own_kafka.produce(topic, messages(RECORDS, keys=50))
    app = quick_app(
        own_kafka, group, processing_guarantee="exactly_once", group_protocol=protocol, rebalance_timeout=30
    )

    @app.consume(topic, concurrency=50)
    async def on_record(record: Record, context: Context) -> None:
        await asyncio.sleep(0.02)
        await context.publish(out, record.value, key=record.key)

    def committed() -> int:
        transactions = app.statistics().transactions
        assert transactions is not None
        return transactions.committed

    async with app:
        await until(lambda: committed() > 3, app.explain)
        await own_kafka.kill()
        await asyncio.sleep(outage)
        before = committed()
        await own_kafka.start()
        began = asyncio.get_running_loop().time()
        await until(lambda: committed() > before, app.explain)
        took = asyncio.get_running_loop().time() - began
        await own_kafka.wait_for_lag(group, topic)
    print(f"{took:.1f} s after an outage of {outage:g} s")
    assert took < COMMITS_WITHIN
