"""Messages that real brokers refuse in a transaction: only the run that published one fails."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from aioshard import Context, DeadLetter, Record, Retry
from tests.kafka.faults.support import quick_app
from tests.support.brokers import SharedKafka

POISON = b"7"


def poison_of(kind: str, topic: str) -> dict[str, Any]:
    """The arguments of a message that the brokers refuse."""
    messages: dict[str, dict[str, Any]] = {
        "a missing partition": {"topic": f"{topic}-out", "value": b"x", "partition": 77},
        "a missing topic": {"topic": f"{topic}-missing", "value": b"x"},
        "an internal topic": {"topic": "__consumer_offsets", "value": b"x"},
        "a size above the topic's limit": {"topic": f"{topic}-out", "value": bytes(5_000), "partition": 0},
        "no key in a compacted topic": {"topic": f"{topic}-compacted", "value": b"x", "partition": 0},
    }
    return messages[kind]


KINDS = [
    "a missing partition",
    "a missing topic",
    "an internal topic",
    "a size above the topic's limit",
    "no key in a compacted topic",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_run_fails_whose_message_is_refused(
    kafka: SharedKafka, topic: str, group: str, kind: str
) -> None:
    await kafka.create_topic(topic, 2)
    await kafka.create_topic(f"{topic}-dead", 1)
    await kafka.create_topic(f"{topic}-out", 1, {"max.message.bytes": "2000"})
    await kafka.create_topic(f"{topic}-compacted", 1, {"cleanup.policy": "compact"})
    poison = poison_of(kind, topic)
    records = [(b"%d" % number, b"%d" % number) for number in range(40)]
    await kafka.produce(topic, records)
    app = quick_app(
        kafka,
        group,
        processing_guarantee="exactly_once",
        rebalance_timeout=30,
        transaction_timeout=20,
    )

    @app.consume(topic, retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter(f"{topic}-dead", breaker=None))
    async def on_record(record: Record, context: Context) -> None:
        await context.publish(f"{topic}-out", record.value)
        await context.publish(f"{topic}-compacted", record.value, key=record.key)
        if record.value == POISON:
            await context.publish(**poison)

    async with asyncio.timeout(90), app:
        await kafka.wait_for_lag(group, topic)
    outputs = [record.value for record in await kafka.read(f"{topic}-out")]
    dead_letters = [record.value for record in await kafka.read(f"{topic}-dead")]
    assert dead_letters == [POISON]
    assert Counter(outputs) == Counter(value for _, value in records if value != POISON)


async def test_a_large_message_is_written_if_its_topic_takes_it(kafka: SharedKafka, topic: str, group: str) -> None:
    """It is larger than the default limit of topics, and more than one does not fit into a request of that size."""
    await kafka.create_topic(topic, 1)
    await kafka.create_topic(f"{topic}-out", 1, {"max.message.bytes": "5000000"})
    await kafka.produce(topic, [(b"%d" % number, b"%d" % number) for number in range(3)])
    app = quick_app(kafka, group, processing_guarantee="exactly_once", rebalance_timeout=30)

    @app.consume(topic)
    async def on_record(record: Record, context: Context) -> None:
        await context.publish(f"{topic}-out", (record.value or b"") * 4_000_000)

    async with asyncio.timeout(60), app:
        await kafka.wait_for_lag(group, topic)
    outputs = [record.value or b"" for record in await kafka.read(f"{topic}-out")]
    assert sorted((value[:1], len(value)) for value in outputs) == [(b"%d" % number, 4_000_000) for number in range(3)]
