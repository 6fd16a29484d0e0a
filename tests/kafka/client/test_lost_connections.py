"""Connections that break during a request count as a broker outage, under uvloop too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from aiokafka import errors as kafka_errors
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.errors import CommitError, ConnectError, TransportError
from aioshard.kafka.aiokafka import producer as producing
from aioshard.kafka.aiokafka.client import BareClient
from aioshard.kafka.aiokafka.connections import connected as connect
from aioshard.kafka.aiokafka.options import client_options
from aioshard.kafka.aiokafka.producer import KafkaProducer
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka
from tests.support.loops import NewLoop, run_on

Connected = Callable[[Settings], contextlib.AbstractAsyncContextManager[Any]]


def lose_all(client: Any) -> None:
    """Do to a client's connections what the loop does when the other side resets them."""
    for connection in client._conns.values():
        if connection.connected():
            connection._writer.transport._force_close(ConnectionResetError("reset by peer"))


def reset_all(pool: Any) -> None:
    """The same for our own connections."""
    for link in pool._links.values():
        if link.is_connected:
            link._current._transport._force_close(ConnectionResetError("reset by peer"))


@contextlib.asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator[Any]:
    client = BareClient(client_options(settings, request_timeout=10))
    await client.bootstrap()
    try:
        yield client
    finally:
        await client.tear_down()


@contextlib.asynccontextmanager
async def sending(settings: Settings) -> AsyncIterator[Any]:
    producer = KafkaProducer(settings)
    try:
        with pytest.MonkeyPatch.context() as patched, contextlib.suppress(TransportError):
            patched.setattr(producing, "_TOPIC_TIMEOUT", 0.3)
            await producer.publish(Message("some-topic", b"v", partition=1_000))
        yield producer._client
    finally:
        await producer.close()


LOOPS = pytest.mark.parametrize(
    "new_loop",
    [pytest.param(asyncio.new_event_loop, marks=pytest.mark.chaos), uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
)
CLIENTS = pytest.mark.parametrize("connected", [reading, sending])
"""Every way in which a client of aiokafka's is started here."""


@LOOPS
@CLIENTS
def test_a_request_on_a_lost_connection_fails_like_any_outage(
    kafka: SharedKafka,
    connected: Connected,
    new_loop: NewLoop,
) -> None:
    """Between the loss and the client's own discovery uvloop refuses a write with an error that is not an OSError."""

    async def test() -> None:
        async with connected(Settings(bootstrap_servers=kafka.bootstrap)) as client:
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


@CLIENTS
async def test_a_connection_lost_during_its_setup_means_the_broker_is_not_ready(
    kafka: SharedKafka,
    connected: Connected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the broker goes away between two steps of SASL."""

    async def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    async with connected(Settings(bootstrap_servers=kafka.bootstrap)) as client:
        node = client.get_random_node()
        for each in list(client._conns):
            client._conns.pop(each).close()
        with monkeypatch.context() as away:
            away.setattr("aiokafka.client.create_conn", lost)
            with pytest.raises(kafka_errors.NodeNotReadyError):
                await client.send(node, MetadataRequest([]))
            settings = Settings(bootstrap_servers=kafka.bootstrap)
            with pytest.raises(ConnectError):
                await connect(settings, client_options(settings, request_timeout=10), BareClient)

        await client.send(node, MetadataRequest([]))
