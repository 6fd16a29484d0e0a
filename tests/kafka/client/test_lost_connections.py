"""Connections that break during a request count as a broker outage, under uvloop too."""

import asyncio
import contextlib
from typing import Any

import pytest
import uvloop

from aioshard.errors import CommitError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka
from tests.support.loops import NewLoop, run_on

LOOPS = pytest.mark.parametrize(
    "new_loop",
    [pytest.param(asyncio.new_event_loop, marks=pytest.mark.chaos), uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
)


def reset_all(pool: Any) -> None:
    """Do to the connections of a client what the loop does when the other side resets them."""
    for link in pool._links.values():
        for connection in link.connections:
            transport = connection._transport
            if transport is not None and not transport.is_closing():
                transport._force_close(ConnectionResetError("reset by peer"))


@LOOPS
def test_a_producer_with_flapping_connections_stores_each_message_once(
    kafka: SharedKafka, topic: str, new_loop: NewLoop
) -> None:
    rounds = 40

    async def test() -> None:
        await kafka.create_topic(topic)
        producer = KafkaProducer(Settings(bootstrap_servers=kafka.bootstrap))
        try:
            for number in range(rounds):
                call = asyncio.create_task(producer.publish(Message(topic, b"%d" % number)))
                for _ in range(number % 4):  # at different moments of the request
                    await asyncio.sleep(0)
                if producer._cluster is not None:
                    reset_all(producer._cluster._pool)
                assert await call == number
        finally:
            await producer.close()
        assert [record.value for record in await kafka.read(topic)] == [b"%d" % number for number in range(rounds)]

    run_on(new_loop, test())


@LOOPS
def test_a_member_with_flapping_connections_stays_and_keeps_reading(
    kafka: SharedKafka, topic: str, group: str, new_loop: NewLoop
) -> None:
    rounds = 40

    async def test() -> None:
        await kafka.create_topic(topic)
        one = Member(settings_for(kafka.bootstrap, heartbeat_interval=0.05, session_timeout=30), group)
        try:
            await read_on(one)
        finally:
            await one.transport.close()

    async def read_on(one: Member) -> None:
        (partitions, membership) = await one.join(topic)
        for done in range(rounds):
            await read_one(one, partitions[0], done + 1)
            reset_all(one.transport._cluster._pool)
            await asyncio.sleep(0)
            with contextlib.suppress(CommitError):
                await one.transport.commit({partitions[0]: Committed(done + 1, "")}, membership)

        await read_one(one, partitions[0], rounds + 1)
        async with asyncio.timeout(10):
            await one.transport.commit({partitions[0]: Committed(rounds + 1, "")}, membership)
        assert one.transport.membership() == membership

    async def read_one(one: Member, partition: TopicPartition, end: int) -> None:
        await kafka.produce(topic, [(None, b"v")])
        await one.read_to({partition: end})

    run_on(new_loop, test())
