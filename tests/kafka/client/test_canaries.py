"""Undocumented aiokafka behavior that we rely on: if a test fails, review our code before upgrading.

Each private attribute that `aioshard.kafka.aiokafka` uses stands in the table below with the object that has it.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.partitioner import murmur2
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.kafka import aiokafka
from aioshard.kafka.aiokafka.client import BareClient
from aioshard.kafka.aiokafka.connections import connected
from aioshard.kafka.aiokafka.options import client_options
from aioshard.settings import Settings
from tests.kafka.client.members import Member
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]

ATTRIBUTES = {
    "client": {
        "_conns",
        "_get_conn",
        "_get_conn_lock_value",
        "_md_update_fut",
        "_sync_task",
    },
    "connection": {"_versions", "_writer"},
}
"""Names as in our code."""

INHERITED = {
    "BareClient": {"_get_conn", "_metadata_update", "_sync_task", "_topics"},
}
"""Attributes that our subclasses use of themselves."""


def test_the_client_version_is_the_reviewed_one() -> None:
    assert importlib.metadata.version("aiokafka").startswith("0.14.")


def test_the_table_lists_every_private_attribute_that_aioshard_uses() -> None:
    used: dict[str, set[str]] = {}
    for module in Path(*aiokafka.__path__).glob("*.py"):
        for name, attribute in re.findall(r"\b([a-z]+)\.(_[a-z][a-z_]*)", module.read_text()):
            if name != "self":
                used.setdefault(name, set()).add(attribute)
    assert used == ATTRIBUTES


def test_the_table_lists_every_private_attribute_that_our_client_uses() -> None:
    used = set(re.findall(r"\bself\.(_[a-z][a-z_]*)", inspect.getsource(BareClient)))
    ours = {"_creates_topics"}

    assert used - ours == INHERITED["BareClient"]


# Other clients --------------------------------------------------------------------------


async def test_a_reader_has_the_attributes_that_we_use(kafka: SharedKafka) -> None:
    settings = Settings(bootstrap_servers=kafka.bootstrap)
    client = await connected(settings, client_options(settings, request_timeout=5), BareClient)
    missing = [name for name in INHERITED["BareClient"] | ATTRIBUTES["client"] if not hasattr(client, name)]
    await client.tear_down()

    assert missing == []


async def test_their_producer_still_breaks_a_partition_after_a_refusal(kafka: SharedKafka, topic: str) -> None:
    """Why ours is our own. Theirs would do once this fails."""
    await kafka.create_topic(topic, 1, {"max.message.bytes": "2000"})
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, enable_idempotence=True, max_request_size=1 << 20)
    async with producer:
        await producer.send_and_wait(topic, b"v")
        with pytest.raises(kafka_errors.MessageSizeTooLargeError):
            await producer.send_and_wait(topic, bytes(5000))
        with pytest.raises(kafka_errors.OutOfOrderSequenceNumber):
            await producer.send_and_wait(topic, b"v")


def test_their_metadata_lookup_would_create_topics() -> None:
    assert "MetadataRequest(list(topics) if topics else None)" in inspect.getsource(AIOKafkaClient._metadata_update)
    assert inspect.signature(MetadataRequest).parameters["allow_auto_topic_creation"].default is None


def test_murmur2_matches_java() -> None:
    """The vectors of Kafka's own tests."""
    assert [murmur2(key) - 2**32 for key in (b"21", b"foobar")] == [-973932308, -790332482]
