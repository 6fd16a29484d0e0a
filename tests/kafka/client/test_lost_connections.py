"""Connections that break during a request count as a broker outage, under uvloop too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka_errors
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.errors import CommitError
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.aiokafka.options import consumer_options
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka
from tests.support.loops import NewLoop, run_on


def lose_all(client: Any) -> None:
    """Do to a client's connections what the loop does when the other side resets them."""
    for connection in client._conns.values():
        if connection.connected():
            connection._writer.transport._force_close(ConnectionResetError("reset by peer"))


@contextlib.asynccontextmanager
async def consuming(settings: Settings) -> AsyncIterator[Any]:
    options = consumer_options(settings, "lost-connections")
    (assignor,) = options["partition_assignment_strategy"]
    internals = Internals(AIOKafkaConsumer(**options), assignor, "lost-connections")
    await internals.begin()
    try:
        yield internals.client
    finally:
        await internals.tear_down()


LOOPS = pytest.mark.parametrize(
    "new_loop",
    [pytest.param(asyncio.new_event_loop, marks=pytest.mark.chaos), uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
)


@LOOPS
def test_a_request_on_a_lost_connection_fails_like_any_outage(
    kafka: SharedKafka,
    new_loop: NewLoop,
) -> None:
    """Between the loss and the client's own discovery uvloop refuses a write with an error that is not an OSError."""

    async def test() -> None:
        async with consuming(Settings(bootstrap_servers=kafka.bootstrap)) as client:
            node = client.get_random_node()
            await client.send(node, MetadataRequest([]))
            lose_all(client)
            await asyncio.sleep(0)  # The loop has closed them, and the client has not yet seen it.
            assert all(connection.connected() for connection in client._conns.values())
            with pytest.raises(kafka_errors.KafkaConnectionError):
                await client.send(node, MetadataRequest([]))

            await client.send(node, MetadataRequest([]))

    run_on(new_loop, test())


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
                lose_transports(producer)
                assert await call == number
        finally:
            await producer.close()
        assert [record.value for record in await kafka.read(topic)] == [b"%d" % number for number in range(rounds)]

    run_on(new_loop, test())


def lose_transports(producer: KafkaProducer) -> None:
    """Do to a producer's connections what the loop does when the other side resets them."""
    if producer._cluster is None:
        return
    for link in producer._cluster._pool._links.values():
        for connection in link.connections:
            transport: Any = connection._transport
            if transport is not None and not transport.is_closing():
                transport._force_close(ConnectionResetError("reset by peer"))


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
        client = one.transport._internals.client  # type: ignore[union-attr]
        for done in range(rounds):
            await read_one(one, partitions[0], done + 1)
            lose_all(client)
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


async def test_a_connection_lost_during_its_setup_means_the_broker_is_not_ready(
    kafka: SharedKafka,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the broker goes away between two steps of SASL."""

    async def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    async with consuming(Settings(bootstrap_servers=kafka.bootstrap)) as client:
        node = client.get_random_node()
        for each in list(client._conns):
            client._conns.pop(each).close()
        with monkeypatch.context() as away:
            away.setattr("aiokafka.client.create_conn", lost)
            with pytest.raises(kafka_errors.NodeNotReadyError):
                await client.send(node, MetadataRequest([]))

        await client.send(node, MetadataRequest([]))
