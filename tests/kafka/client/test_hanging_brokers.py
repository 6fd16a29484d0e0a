"""Clients start while one of several brokers accepts connections and never responds."""

import asyncio
import random
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard.errors import ConnectError
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.wire.metadata import Broker, ClusterMetadata, Update
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.kafka.wire.start import START_TIMEOUT, connect
from aioshard.ports import Message
from aioshard.settings import Settings
from tests.support.brokers import SharedKafka

HANGING = 99
"""The node id of the broker that hangs."""


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
async def advertised(kafka: SharedKafka, topic: str, hanging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hanging broker is one of the cluster, and the first that the client tries each time."""
    await kafka.create_topic(topic)
    broker = broker_at(hanging)
    accept = ClusterMetadata.update

    def update_ours(self: ClusterMetadata, response: Any, now: float) -> Update:
        changes = accept(self, response, now)
        self.brokers = {HANGING: broker, **self.brokers}
        return changes

    monkeypatch.setattr(ClusterMetadata, "update", update_ours)
    first = SimpleNamespace(
        shuffle=lambda nodes: nodes.sort(key=str, reverse=True),
        choice=max,
        sample=random.sample,
        uniform=random.uniform,
    )
    monkeypatch.setattr("aioshard.kafka.wire.cluster.random", first)


def broker_at(address: str) -> Broker:
    host, _, port = address.partition(":")
    return Broker(HANGING, host, int(port), None)


def settings_for(servers: str) -> Settings:
    return Settings(bootstrap_servers=servers, auto_offset_reset="earliest")


async def test_a_hanging_bootstrap_server_delays_nothing(kafka: SharedKafka, hanging: str) -> None:
    async with asyncio.timeout(CONNECT_TIMEOUT - 1.0):
        cluster = await connect(settings_for(f"{hanging},{kafka.bootstrap},{hanging}"))
    await cluster.close()


@pytest.mark.usefixtures("advertised")
async def test_a_producer_starts_despite_a_hanging_advertised_broker(
    kafka: SharedKafka, hanging: str, topic: str
) -> None:
    producer = KafkaProducer(settings_for(f"{hanging},{kafka.bootstrap}"))
    try:
        async with asyncio.timeout(2 * START_TIMEOUT):
            await producer.publish(Message(topic, b"1", partition=0))
        cluster = producer._cluster
        assert cluster is not None
        assert HANGING in cluster.metadata.brokers
        async with asyncio.timeout(1.0):  # of a broker to which a connection is open
            await cluster.look_up([topic])
    finally:
        await producer.close()


@pytest.mark.chaos
async def test_an_advertised_address_that_hangs_is_named(
    kafka: SharedKafka, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = ClusterMetadata.update
    broker = broker_at(hanging)

    def update(self: ClusterMetadata, response: Any, now: float) -> Update:
        changes = accept(self, response, now)
        self.brokers = {HANGING: broker}
        return changes

    monkeypatch.setattr(ClusterMetadata, "update", update)

    with pytest.raises(ConnectError, match=rf"{hanging}: no answer within .* advertised\.listeners"):
        await connect(settings_for(kafka.bootstrap))
