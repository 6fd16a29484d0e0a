"""The producer behind a proxy that loses, forges and delays answers: no acknowledged message is lost or doubled."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from aioshard.errors import AuthorizationError, MessageTooLargeError, TransportError
from aioshard.kafka import producer as producing
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.wire.requests import PRODUCE
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.brokers import SharedKafka
from tests.support.cluster import KafkaCluster
from tests.support.kafka import KafkaBroker
from tests.support.proxies import Proxies, Request, Rule
from tests.unit.kafka.wire.messages import as_dictionaries

INVALID_EPOCH = 47
PATIENCE = 3.0
"""Seconds after which a message is given up here."""


@contextlib.asynccontextmanager
async def producer_of(bootstrap: str) -> AsyncIterator[KafkaProducer]:
    producer = KafkaProducer(Settings(bootstrap_servers=bootstrap))
    try:
        yield producer
    finally:
        await producer.close()


@pytest.fixture
async def proxies(breakable_kafka: KafkaBroker) -> AsyncIterator[Proxies]:
    async with Proxies({1: (breakable_kafka.ports.proxy, breakable_kafka.ports.proxied)}) as proxies:
        yield proxies


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers that are made after this give up after less time."""
    monkeypatch.setattr(producing, "_PATIENCE", PATIENCE)


@pytest.fixture
async def producer(breakable_kafka: KafkaBroker, topic: str, proxies: Proxies) -> AsyncIterator[KafkaProducer]:
    """A producer that reaches the broker through the proxies, and has stored one message."""
    del proxies  # they must listen
    await breakable_kafka.create_topic(topic)
    async with producer_of(f"127.0.0.1:{breakable_kafka.ports.proxy}") as producer:
        await producer.publish(Message(topic, b"0"))
        yield producer


async def values(cluster: KafkaCluster, topic: str) -> list[bytes | None]:
    return [record.value for record in await cluster.read(topic)]


def code_of(request: Request, frame: bytes) -> int:
    """The error code of the only partition in the answer to a Produce request."""
    (topic,) = PRODUCE.decode(request.api_version, frame, _body(request)).topics
    (part,) = topic.partitions
    code: int = part.error
    return code


def forged(request: Request, frame: bytes, code: int) -> bytes:
    """The same answer with another error code."""
    answer = as_dictionaries(PRODUCE.decode(request.api_version, frame, _body(request)))
    (topic,) = answer["topics"]
    (part,) = topic["partitions"]
    part["error"] = code
    return frame[: _body(request)] + PRODUCE.encode_response(request.api_version, answer)


def _body(request: Request) -> int:
    """Where the body of an answer begins, behind the correlation id."""
    return 5 if PRODUCE.is_flexible(request.api_version) else 4


async def limit_messages(cluster: KafkaCluster, topic: str, size: int) -> None:
    """Lower `max.message.bytes`; return when the broker refuses larger ones."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    [changed] = admin.incremental_alter_configs([resource]).values()
    await asyncio.to_thread(changed.result, 10)
    other = f"{topic}-other"
    await cluster.create_topic(other)
    async with producer_of(cluster.bootstrap) as probe:
        # The broker applies changes in order: this topic, created later, is there.
        await probe.publish(Message(other, b"v"))


async def test_a_retry_that_is_refused_does_not_free_its_numbers(
    breakable_kafka: KafkaBroker, topic: str, proxies: Proxies, producer: KafkaProducer
) -> None:
    """The broker stores a message and its answer gets lost; when it is sent again, the topic's limit is lower."""
    held: list[Rule] = []

    def lose(request: Request, frame: bytes) -> None:
        assert code_of(request, frame) == 0
        losing.lift()
        held.append(proxies.hold(api_key=PRODUCE.key))

    losing = proxies.answer(lose, api_key=PRODUCE.key)
    call = asyncio.create_task(producer.publish(Message(topic, bytes(5000))))
    await losing.lifted.wait()
    await held[0].met.wait()
    await limit_messages(breakable_kafka, topic, 1000)
    held[0].lift()
    with pytest.raises(TransportError) as caught:
        await call
    assert caught.value.retriable, "it is stored"

    assert await producer.publish(Message(topic, b"2")) == 2
    assert await values(breakable_kafka, topic) == [b"0", bytes(5000), b"2"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (-1, TransportError),
        (10, MessageTooLargeError),
        (29, AuthorizationError),
        (31, AuthorizationError),
        (32, TransportError),
        (45, TransportError),
        (87, TransportError),
    ],
)
async def test_an_acknowledged_message_is_in_the_log_whatever_the_retry_before_it_heard(
    breakable_kafka: KafkaBroker,
    topic: str,
    proxies: Proxies,
    producer: KafkaProducer,
    code: int,
    error: type[Exception],
) -> None:
    answers = itertools.count()

    def change(request: Request, frame: bytes) -> bytes | None:
        return forged(request, frame, code) if next(answers) else None

    rule = proxies.answer(change, api_key=PRODUCE.key)
    with pytest.raises(error):
        await producer.publish(Message(topic, b"1"))
    rule.lift()

    assert await producer.publish(Message(topic, b"2")) == 2
    assert await values(breakable_kafka, topic) == [b"0", b"1", b"2"]


async def test_an_unknown_error_for_a_stored_message_is_asked_again(
    breakable_kafka: KafkaBroker, topic: str, proxies: Proxies, producer: KafkaProducer
) -> None:
    def change(request: Request, frame: bytes) -> bytes:
        rule.lift()
        return forged(request, frame, -1)

    rule = proxies.answer(change, api_key=PRODUCE.key)
    assert await producer.publish(Message(topic, b"1")) == 1
    assert await producer.publish(Message(topic, b"2")) == 2
    assert await values(breakable_kafka, topic) == [b"0", b"1", b"2"]


@pytest.mark.usefixtures("impatient")
async def test_a_message_that_was_given_up_is_not_stored_behind_later_ones(
    breakable_kafka: KafkaBroker, topic: str, proxies: Proxies, producer: KafkaProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is still on the way when its caller gives up, publishes it again, and publishes another."""
    stranded = proxies.strand(api_key=PRODUCE.key)
    call = asyncio.create_task(producer.publish(Message(topic, b"1")))
    await stranded.met.wait()
    cut = proxies.cut(api_key=PRODUCE.key)
    with pytest.raises(TransportError) as caught:
        await call
    assert caught.value.retriable
    cut.lift()
    monkeypatch.undo()

    assert await producer.publish(Message(topic, b"1")) == 1
    assert await producer.publish(Message(topic, b"2")) == 2
    answer = await stranded.arrive()
    assert code_of(stranded.requests[0], answer) == INVALID_EPOCH
    assert await values(breakable_kafka, topic) == [b"0", b"1", b"2"]


async def test_numbers_begin_again_after_the_last_one(kafka: SharedKafka, topic: str) -> None:
    """Inside a batch, and for a copy of it."""
    await kafka.create_topic(topic, 2)
    async with producer_of(kafka.bootstrap) as producer:
        await producer.publish(Message(topic, b"v", partition=1))
        # A broker accepts any first number of a producer that it does not know.
        name = TopicPartition(topic, 0)
        producer._partitions[name] = producing._Partition(name, identity=producer._identity, sequence=2**31 - 2)

        calls = (producer.publish(Message(topic, b"%d" % number, partition=0)) for number in range(5))
        assert await asyncio.gather(*calls) == list(range(5))
        assert await producer.publish(Message(topic, b"5", partition=0)) == 5


async def test_two_messages_that_together_exceed_a_request_do_not_block_each_other(tmp_path: Path, topic: str) -> None:
    """A broker closes the connection on a request above its limit, and the same one would be built again and again."""
    broker = KafkaBroker(tmp_path, properties={"socket.request.max.bytes": str(10_000_000)})
    await broker.start()
    try:
        await broker.create_topic(topic, 2, {"max.message.bytes": str(7_000_000)})
        async with producer_of(broker.bootstrap) as producer:
            calls = (producer.publish(Message(topic, bytes(6_000_000), partition=number)) for number in range(2))
            assert await asyncio.gather(*calls) == [0, 0]
    finally:
        await broker.kill()
