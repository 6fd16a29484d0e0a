"""Clients start while one of several brokers accepts connections and never responds."""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.cluster import ClusterMetadata
from aiokafka.structs import BrokerMetadata

from aioshard.kafka.aiokafka import connections
from aioshard.kafka.aiokafka.connections import CONNECT_TIMEOUT, START_TIMEOUT, find_broker, why_unreachable
from aioshard.kafka.aiokafka.options import client_options
from aioshard.kafka.aiokafka.producer import KafkaProducer
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
    update = ClusterMetadata.update_metadata
    host, _, port = hanging.partition(":")

    def update_metadata(self: Any, metadata: Any) -> None:
        update(self, metadata)
        self._brokers[HANGING] = BrokerMetadata(HANGING, host, int(port), None)

    monkeypatch.setattr(ClusterMetadata, "update_metadata", update_metadata)
    first = SimpleNamespace(shuffle=lambda nodes: nodes.sort(key=str, reverse=True), choice=max)
    monkeypatch.setattr("aiokafka.client.random", first)


def options_of(servers: str) -> tuple[Settings, dict[str, Any]]:
    settings = Settings(bootstrap_servers=servers, auto_offset_reset="earliest")
    return settings, client_options(settings, request_timeout=30.0)


async def test_a_hanging_bootstrap_server_delays_nothing(kafka: SharedKafka, hanging: str) -> None:
    settings, options = options_of(f"{hanging},{kafka.bootstrap},{hanging}")
    async with asyncio.timeout(CONNECT_TIMEOUT - 1.0):
        assert await find_broker(settings, options) == kafka.bootstrap.split(",")[0]


@pytest.mark.chaos
@pytest.mark.usefixtures("advertised")
async def test_a_producer_starts_despite_a_hanging_advertised_broker(
    kafka: SharedKafka, hanging: str, topic: str
) -> None:
    settings, _ = options_of(f"{hanging},{kafka.bootstrap}")
    producer = KafkaProducer(settings)
    try:
        async with asyncio.timeout(2 * START_TIMEOUT):
            await producer.publish(Message(topic, b"1", partition=0))
    finally:
        await producer.close()


async def test_the_hint_names_the_hanging_broker_and_not_the_listeners(
    kafka: SharedKafka, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT", 1.0)
    settings, options = options_of(kafka.bootstrap)
    addresses = [
        (host, int(port))
        for host, _, port in (address.partition(":") for address in (kafka.bootstrap.split(",")[0], hanging))
    ]

    mixed = str(await why_unreachable(settings, options, addresses))
    unreachable = str(await why_unreachable(settings, options, addresses[1:]))

    assert hanging in mixed
    assert "advertised.listeners" not in mixed
    assert "advertised.listeners" in unreachable
