"""A group that migrates from another library keeps its position: docs/coming-from.md."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from aioshard import App, Record
from tests.support.brokers import SharedKafka
from tests.support.cluster import POLL_INTERVAL

RECORDS = 120
FIRST = 45
"""At least this number is handled by the other library."""
DEADLINE = 40.0

RecordId = tuple[int, int]
Handled = Counter[RecordId]


async def with_aiokafka(bootstrap: str, group: str, topic: str, handled: Handled) -> None:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest")
    await consumer.start()
    try:
        while handled.total() < FIRST:
            record = await consumer.getone()
            handled[record.partition, record.offset] += 1
    finally:
        await consumer.stop()  # commits what was taken


async def with_confluent(bootstrap: str, group: str, topic: str, handled: Handled) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
    )

    def consume() -> None:
        consumer.subscribe([topic])
        while handled.total() < FIRST:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                handled[message.partition(), message.offset()] += 1
        consumer.close()

    await asyncio.to_thread(consume)


async def with_faststream(bootstrap: str, group: str, topic: str, handled: Handled) -> None:
    pytest.importorskip("faststream.kafka")
    from faststream import AckPolicy  # noqa: PLC0415 (a group of its own: bench)
    from faststream.kafka import KafkaBroker, KafkaMessage  # noqa: PLC0415

    broker = KafkaBroker(bootstrap, logger=None)
    enough = asyncio.Event()

    @broker.subscriber(topic, group_id=group, auto_offset_reset="earliest", ack_policy=AckPolicy.ACK)
    async def on_record(message: KafkaMessage) -> None:
        taken = message.raw_message
        assert not isinstance(taken, tuple)
        handled[taken.partition, taken.offset] += 1
        if handled.total() >= FIRST:
            enough.set()
            await asyncio.sleep(0.05)

    async with broker:
        await broker.start()
        await enough.wait()


LIBRARIES = {"aiokafka": with_aiokafka, "confluent-kafka": with_confluent, "faststream": with_faststream}


def an_app(bootstrap: str, group: str, topic: str, handled: Handled, assignor: Any = "sticky") -> App:
    settings = {"assignor": assignor, "heartbeat_interval": 0.5}
    app = App(group, bootstrap_servers=bootstrap, auto_offset_reset="earliest", **settings)

    @app.consume(topic, shard_by="key", concurrency=20)
    async def on_record(record: Record) -> None:
        handled[record.partition, record.offset] += 1

    return app


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_group_resumes_where_the_other_library_stopped(
    kafka: SharedKafka, topic: str, group: str, library: str
) -> None:
    await kafka.create_topic(topic, 4)
    await fill(kafka, topic)
    handled: Handled = Counter()
    consume: Callable[[str, str, str, Handled], Awaitable[None]] = LIBRARIES[library]

    async with asyncio.timeout(DEADLINE):
        await consume(kafka.bootstrap, group, topic, handled)
        before = handled.total()
        await an_app(kafka.bootstrap, group, topic, handled).serve(until_caught_up=True)

    assert FIRST <= before < RECORDS
    assert sorted(handled.values()) == [1] * RECORDS, "each record once: none lost, none repeated"


async def test_a_group_that_migrates_back_resumes_at_the_committed_offset(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, 4)
    await fill(kafka, topic)
    ours: Handled = Counter()
    theirs: Handled = Counter()

    async with asyncio.timeout(DEADLINE):
        await an_app(kafka.bootstrap, group, topic, ours).serve(until_caught_up=True)
        await fill(kafka, topic)
        await with_aiokafka(kafka.bootstrap, group, topic, theirs)

    assert ours.total() == RECORDS
    assert theirs.keys() & ours.keys() == set()


@pytest.mark.parametrize(("library", "assignor"), [("aiokafka", "roundrobin"), ("confluent-kafka", "range")])
async def test_a_group_can_run_both_libraries_for_a_while(
    kafka: SharedKafka, topic: str, group: str, library: str, assignor: str
) -> None:
    """With the assignor that the other library has by default."""
    await kafka.create_topic(topic, 4)
    handled: Handled = Counter()
    stopped = asyncio.Event()
    app = an_app(kafka.bootstrap, group, topic, handled, assignor)

    async with asyncio.timeout(DEADLINE), app:
        other = asyncio.create_task(MEMBERS[library](kafka.bootstrap, group, topic, stopped), name=library)
        await until_assigned(app, 2)
        stopped.set()
        await other
        await until_assigned(app, 4)


async def until_assigned(app: App, partitions: int) -> None:
    while len(app.assignment()) != partitions:  # noqa: ASYNC110  (the brokers' doing, which no event tells)
        await asyncio.sleep(POLL_INTERVAL)


async def member_of_aiokafka(bootstrap: str, group: str, topic: str, stopped: asyncio.Event) -> None:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=group, heartbeat_interval_ms=500)
    await consumer.start()
    try:
        await stopped.wait()
    finally:
        await consumer.stop()


async def member_of_confluent(bootstrap: str, group: str, topic: str, stopped: asyncio.Event) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "heartbeat.interval.ms": 500}
    )

    def consume() -> None:
        consumer.subscribe([topic])
        while not stopped.is_set():
            consumer.poll(0.1)
        consumer.close()

    await asyncio.to_thread(consume)


MEMBERS = {"aiokafka": member_of_aiokafka, "confluent-kafka": member_of_confluent}


async def fill(kafka: SharedKafka, topic: str) -> None:
    await kafka.produce(topic, [(b"customer-%d" % (number % 9), b"{}") for number in range(RECORDS)])
