"""The producer on a real broker: refusals, recovery and stored messages."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka.admin import AclOperation

from aioshard.errors import (
    AuthenticationError,
    AuthorizationError,
    ClientLostError,
    ConnectError,
    MessageTooLargeError,
    TransportError,
)
from aioshard.kafka import producer as producing
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.requests import METADATA, PRODUCE
from aioshard.kafka.wire.start import connect
from aioshard.ports import Message
from aioshard.settings import Settings
from tests.support.access import allow, create_scram_user, deny
from tests.support.brokers import SharedKafka
from tests.support.cluster import KafkaCluster
from tests.support.kafka import KafkaBroker
from tests.support.kafka_properties import Credentials

Make = Callable[..., KafkaProducer]

NOT_ENOUGH_REPLICAS = 19
NOWHERE = "127.0.0.1:1"
"""An address where nobody listens."""


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes producers that are closed at the end; arguments are settings."""
    made: list[KafkaProducer] = []

    def make(bootstrap: str, **settings: Any) -> KafkaProducer:
        made.append(KafkaProducer(Settings(bootstrap_servers=bootstrap, **settings)))
        return made[-1]

    yield make
    for producer in made:
        async with asyncio.timeout(5):
            await producer.close()


@pytest.fixture
def producer(kafka: SharedKafka, make: Make) -> KafkaProducer:
    return make(kafka.bootstrap)


@pytest.fixture
async def user(kafka: SharedKafka, topic: str) -> Credentials:
    """A user that nobody else uses and that may do nothing."""
    credentials = Credentials(f"user-of-{topic}"[:60], "secret")
    await create_scram_user(kafka, credentials)
    return credentials


def login(kafka: SharedKafka, user: Credentials) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(kafka.certificates.ca_file),
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": user.username,
        "sasl_password": user.password,
    }


def client_of(producer: KafkaProducer) -> Cluster:
    client = producer._cluster
    assert client is not None
    return client


def count_requests(producer: KafkaProducer, api: Api) -> list[float]:
    """When each request of a kind was sent from now on."""
    pool = client_of(producer)._pool
    ask = pool.ask
    sent: list[float] = []

    def noting(target: Any, request: Request, **options: Any) -> Any:
        if request.api is api:
            sent.append(time.monotonic())
        return ask(target, request, **options)

    pool.ask = noting  # type: ignore[method-assign]
    return sent


async def trouble_of(producer: KafkaProducer) -> str:
    async with asyncio.timeout(5):
        while (trouble := producer.trouble) is None:  # noqa: ASYNC110 - it is asked, it does not call
            await asyncio.sleep(0.02)
    return trouble


async def values(cluster: KafkaCluster, topic: str) -> list[bytes | None]:
    return [record.value for record in await cluster.read(topic)]


# Batches and connections -----------------------------------------------------------------


async def test_concurrent_messages_share_requests(kafka: SharedKafka, topic: str, producer: KafkaProducer) -> None:
    await kafka.create_topic(topic, 4)
    await producer.publish(Message(topic, b"first"))
    requests = count_requests(producer, PRODUCE)

    await asyncio.gather(*(producer.publish(Message(topic, bytes(100), b"%d" % key)) for key in range(2000)))

    assert 0 < len(requests) < 40


async def test_keys_use_the_partitions_of_the_java_client(
    kafka: SharedKafka, topic: str, producer: KafkaProducer
) -> None:
    await kafka.create_topic(topic, 7)
    keys = [b"", b"a", "å".encode(), *(b"key-%d" % number for number in range(100))]

    for key in keys:
        await producer.publish(Message(topic, b"ours", key))
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as other:
        for key in keys:
            await other.send_and_wait(topic, b"theirs", key=key)

    placed = {(record.key, record.partition) for record in await kafka.read(topic)}
    assert len(placed) == len(keys)


@pytest.mark.parametrize("key", [None, b"the only one"])
async def test_round_robin_messages_spread_evenly(
    kafka: SharedKafka, topic: str, producer: KafkaProducer, key: bytes | None
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        await kafka.create_topic(name, 8)

    async def publish() -> None:
        for _ in range(25):
            for name in (topic, other):
                await producer.publish(Message(name, b"v", key, partitioner="key" if key is None else "round_robin"))

    await asyncio.gather(*(publish() for _ in range(32)))

    ends = (await kafka.end_offsets(topic)).values()
    assert (len(ends), sum(ends)) == (8, 800)
    assert max(ends) <= 1.3 * 100


async def test_the_first_callers_share_one_connection_attempt(
    kafka: SharedKafka, topic: str, producer: KafkaProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.create_topic(topic)
    attempts: list[str] = []

    async def counting(settings: Settings) -> Cluster:
        attempts.append(topic)
        return await connect(settings)

    monkeypatch.setattr(producing, "connect", counting)

    calls = [asyncio.create_task(producer.publish(Message(topic, b"%d" % number))) for number in range(50)]
    await asyncio.sleep(0)
    calls[0].cancel()  # It began to connect.
    await asyncio.wait(calls)

    assert [call.result() for call in calls[1:]] == list(range(49))
    assert len(attempts) == 1


async def test_an_unreachable_broker_fails_every_caller_at_once(make: Make) -> None:
    producer = make(NOWHERE)

    async with asyncio.timeout(5):
        calls = (producer.publish(Message("t", b"v")) for _ in range(20))
        ended = await asyncio.gather(*calls, return_exceptions=True)

    assert {type(end) for end in ended} == {ConnectError}
    assert NOWHERE in str(ended[0])
    assert all(isinstance(end, ConnectError) and end.retriable for end in ended)


async def test_a_silent_server_is_named_in_time(make: Make) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()[:2]
    async with silent, asyncio.timeout(10):
        with pytest.raises(ConnectError, match="no answer within 3 s"):
            await make(f"{host}:{port}").publish(Message("t", b"v"))


# Refusals by the brokers -----------------------------------------------------------------


async def test_a_refusal_does_not_break_the_partition(kafka: SharedKafka, topic: str, producer: KafkaProducer) -> None:
    """aiokafka's own producer would fail with OutOfOrderSequenceNumber from here on; see the canary tests."""
    await kafka.create_topic(topic, 1, {"max.message.bytes": "2000"})
    await producer.publish(Message(topic, b"before"))

    for number in range(3):
        with pytest.raises(MessageTooLargeError, match=rf"of 5003 bytes is too large for topic '{topic}'"):
            await producer.publish(Message(topic, bytes(5000), b"key"))
        await producer.publish(Message(topic, b"after %d" % number))

    assert await values(kafka, topic) == [b"before", b"after 0", b"after 1", b"after 2"]


async def test_a_refused_message_does_not_fail_its_batch(
    kafka: SharedKafka, topic: str, producer: KafkaProducer
) -> None:
    """A broker refuses batches; a message among others is refused for its own fault, or for one of the batch."""
    await kafka.create_topic(topic, 1, {"max.message.bytes": "2000"})
    sizes = [300] * 20
    sizes[7] = 5000

    ended = await asyncio.gather(
        *(producer.publish(Message(topic, bytes([number]) * size)) for number, size in enumerate(sizes)),
        return_exceptions=True,
    )

    assert isinstance(ended.pop(7), MessageTooLargeError)
    assert sorted(offset for offset in ended if isinstance(offset, int)) == list(range(19))
    assert sorted((value or b"")[0] for value in await values(kafka, topic)) == [*range(7), *range(8, 20)]


async def test_a_compacted_topic_refuses_a_message_without_a_key(
    kafka: SharedKafka, topic: str, producer: KafkaProducer
) -> None:
    await kafka.create_topic(topic, 1, {"cleanup.policy": "compact"})

    keyless, keyed = await asyncio.gather(
        producer.publish(Message(topic, b"v")), producer.publish(Message(topic, b"v", b"k")), return_exceptions=True
    )

    assert isinstance(keyless, TransportError)
    assert not keyless.retriable
    assert "no record without a key" in str(keyless)
    assert keyed == 0


async def test_a_refused_timestamp_is_reported(kafka: SharedKafka, topic: str, producer: KafkaProducer) -> None:
    await kafka.create_topic(topic, 1, {"message.timestamp.before.max.ms": "60000"})

    with pytest.raises(TransportError, match="INVALID_TIMESTAMP") as caught:
        await producer.publish(Message(topic, b"v", timestamp=1_700_000_000.0))

    assert not caught.value.retriable
    assert await producer.publish(Message(topic, b"v")) == 0


async def test_a_message_too_large_for_any_request_is_refused_by_the_client(
    kafka: SharedKafka, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker just closes the connection on it, and it would be resent forever."""
    await kafka.create_topic(topic)
    producer = make(kafka.bootstrap)
    monkeypatch.setattr(producing, "MOST_MESSAGE_BYTES", 3000)

    with pytest.raises(MessageTooLargeError, match=r"at most 3000 bytes"):
        await producer.publish(Message(topic, bytes(3001)))

    assert await producer.publish(Message(topic, bytes(2900))) == 0


async def test_the_message_size_limit_is_that_of_the_broker(
    kafka: SharedKafka, topic: str, producer: KafkaProducer
) -> None:
    await kafka.create_topic(topic, 1, {"max.message.bytes": str(8 * 1024 * 1024)})

    assert await producer.publish(Message(topic, bytes(4 * 1024 * 1024))) == 0


async def test_publishing_is_refused_until_write_is_granted(
    kafka: SharedKafka, topic: str, make: Make, user: Credentials
) -> None:
    """And again when it is taken away; another topic is not affected."""
    other = f"{topic}-other"
    for name in (topic, other):
        await kafka.create_topic(name)
    await allow(kafka, user, "topic", topic, AclOperation.DESCRIBE)
    await allow(kafka, user, "topic", other, AclOperation.WRITE, AclOperation.DESCRIBE)
    producer = make(kafka.secure_bootstrap, **login(kafka, user))

    async def refused() -> None:
        with pytest.raises(AuthorizationError, match=rf"write to topic '{topic}'"):
            await producer.publish(Message(topic, b"refused"))

    for _ in range(2):
        await asyncio.gather(refused(), refused(), producer.publish(Message(other, b"v")))
    await allow(kafka, user, "topic", topic, AclOperation.WRITE)
    for number in range(3):
        assert await producer.publish(Message(topic, b"v")) == number
    await deny(kafka, user, "topic", topic, AclOperation.WRITE)
    await refused()

    assert len(await values(kafka, other)) == 2


async def test_publishing_without_describe_permission_is_refused_at_once(
    kafka: SharedKafka, topic: str, make: Make, user: Credentials
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        await kafka.create_topic(name)
    await allow(kafka, user, "topic", other, AclOperation.WRITE)
    producer = make(kafka.secure_bootstrap, **login(kafka, user))

    for _ in range(2):
        async with asyncio.timeout(3):
            with pytest.raises(AuthorizationError, match=rf"write to topic '{topic}'"):
                await producer.publish(Message(topic, b"v"))

    assert await producer.publish(Message(other, b"v")) == 0


async def test_publishing_without_any_write_permission_is_refused_until_granted(
    kafka: SharedKafka, topic: str, make: Make, user: Credentials
) -> None:
    await kafka.create_topic(topic)
    producer = make(kafka.secure_bootstrap, **login(kafka, user))

    with pytest.raises(AuthorizationError, match=rf"write to topic '{topic}'"):
        await producer.publish(Message(topic, b"v"))
    await allow(kafka, user, "topic", topic, AclOperation.WRITE)

    assert await producer.publish(Message(topic, b"v")) == 0


async def test_a_wrong_password_is_reported(kafka: SharedKafka, topic: str, make: Make, user: Credentials) -> None:
    producer = make(kafka.secure_bootstrap, **{**login(kafka, user), "sasl_password": "wrong"})

    with pytest.raises(AuthenticationError, match=f"refused user '{user.username}'"):
        await producer.publish(Message(topic, b"v"))


# Topics that are not there ---------------------------------------------------------------


async def test_a_missing_topic_is_reported_to_all_waiters_at_once(
    kafka: SharedKafka, topic: str, producer: KafkaProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.5)
    there = f"{topic}-there"
    await kafka.create_topic(there)

    async with asyncio.timeout(3):
        calls = [asyncio.create_task(producer.publish(Message(topic, b"v"))) for _ in range(20)]
        assert await producer.publish(Message(there, b"v")) == 0
        ended = await asyncio.gather(*calls, return_exceptions=True)

    for end in ended:
        assert isinstance(end, TransportError)
        assert f"topic '{topic}' does not exist" in str(end)
    await kafka.create_topic(topic)
    assert await producer.publish(Message(topic, b"v")) == 0


async def test_a_topic_that_appears_meanwhile_is_found(kafka: SharedKafka, topic: str, producer: KafkaProducer) -> None:
    call = asyncio.create_task(producer.publish(Message(topic, b"v")))
    await asyncio.sleep(0)

    await kafka.create_topic(topic)

    assert await call == 0


async def test_a_deleted_topic_is_reported_without_a_busy_loop(
    kafka: SharedKafka, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka would request the metadata some 2,000 times a second, with a line in the log for each."""
    monkeypatch.setattr("aioshard.kafka.produce.REQUEST_TIMEOUT", 1.0)
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.5)
    there = f"{topic}-there"
    for name in (topic, there):
        await kafka.create_topic(name)
    producer = make(kafka.bootstrap)
    for name in (topic, there):
        await producer.publish(Message(name, b"v"))
    requests = count_requests(producer, METADATA)

    await kafka.delete_topic(topic)
    call = asyncio.create_task(producer.publish(Message(topic, b"v")))
    for number in range(1, 20):
        assert await producer.publish(Message(there, b"v")) == number
    with pytest.raises(TransportError, match="does not exist"):
        await call
    with pytest.raises(TransportError, match="does not exist"):
        await producer.publish(Message(topic, b"v"))

    assert 0 < len(requests) < 40
    await kafka.create_topic(topic)
    assert await producer.publish(Message(topic, b"v")) == 0


async def test_new_partitions_are_found_when_one_is_named(
    kafka: SharedKafka, topic: str, producer: KafkaProducer
) -> None:
    await kafka.create_topic(topic)
    await producer.publish(Message(topic, b"v"))
    await kafka.add_partitions(topic, 3)

    assert await producer.publish(Message(topic, b"v", partition=2)) == 0


# Brokers that are gone -------------------------------------------------------------------


@pytest.mark.chaos
async def test_publishing_waits_for_a_broker_restart(
    breakable_kafka: KafkaBroker, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "_QUIET", 0.3)
    await breakable_kafka.create_topic(topic)
    producer = make(breakable_kafka.bootstrap)
    await producer.publish(Message(topic, b"before"))

    await breakable_kafka.stop()
    calls = [asyncio.create_task(producer.publish(Message(topic, b"%d" % number))) for number in range(10)]
    trouble = await trouble_of(producer)
    assert trouble.startswith(f"messages not acknowledged by the brokers: 10; the oldest, for topic '{topic}'")
    assert trouble.endswith(f"no connection to a broker of {breakable_kafka.bootstrap} is open")
    await breakable_kafka.start()

    assert await asyncio.gather(*calls) == list(range(1, 11))
    assert producer.trouble is None
    assert await values(breakable_kafka, topic) == [b"before", *(b"%d" % number for number in range(10))]


@pytest.mark.chaos
async def test_an_abandoned_message_is_not_sent_later(
    breakable_kafka: KafkaBroker, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "_PATIENCE", 1.0)
    await breakable_kafka.create_topic(topic)
    producer = make(breakable_kafka.bootstrap)
    await producer.publish(Message(topic, b"before"))

    await breakable_kafka.kill()
    calls = (producer.publish(Message(topic, b"given up")) for _ in range(5))
    ended = await asyncio.gather(*calls, return_exceptions=True)
    for end in ended:
        assert isinstance(end, TransportError)
        assert end.retriable
        assert "acknowledged nothing for 1 s" in str(end)
    with pytest.raises(ConnectError):
        await producer.publish(Message(topic, b"not tried"))
    await breakable_kafka.start()
    monkeypatch.undo()

    assert await producer.publish(Message(topic, b"after")) == 1
    assert await values(breakable_kafka, topic) == [b"before", b"after"]


async def test_a_hanging_broker_is_trouble_and_does_not_delay_closing(
    breakable_kafka: KafkaBroker, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "_QUIET", 0.3)
    await breakable_kafka.create_topic(topic)
    producer = make(breakable_kafka.bootstrap)
    await producer.publish(Message(topic, b"before"))

    breakable_kafka.freeze()
    try:
        call = asyncio.create_task(producer.publish(Message(topic, b"v")))
        assert (await trouble_of(producer)).endswith("acknowledged nothing since")
        async with asyncio.timeout(4):
            await producer.close()
        with pytest.raises(ClientLostError, match="closed"):
            await call
    finally:
        breakable_kafka.thaw()


async def test_only_the_stalled_partition_is_abandoned(
    kafka: SharedKafka, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few replicas in sync: its messages end, others are stored, and it resumes when it can."""
    monkeypatch.setattr(producing, "_PATIENCE", 1.0)
    monkeypatch.setattr(producing, "_QUIET", 0.3)
    stuck = f"{topic}-stuck"
    await kafka.create_topic(topic)
    await kafka.create_topic(stuck)
    producer = make(kafka.bootstrap)
    for name in (topic, stuck):
        await producer.publish(Message(name, b"before"))
    client = client_of(producer)
    holding, attempts = hold_back(client, stuck)

    call = asyncio.create_task(producer.publish(Message(stuck, b"given up")))
    troubles = set()
    number = 0
    while not call.done():
        number += 1
        assert await producer.publish(Message(topic, b"v")) == number
        troubles.add(producer.trouble and producer.trouble.rpartition("; ")[2])
    assert number > 3 * len(attempts), "others are not sent only when it is tried again"
    with pytest.raises(TransportError, match="while others were") as caught:
        await call
    assert caught.value.retriable
    assert any("others were acknowledged meanwhile" in trouble for trouble in troubles if trouble)
    holding.clear()

    assert await producer.publish(Message(stuck, b"after")) == 1
    assert await values(kafka, stuck) == [b"before", b"after"]
    assert client_of(producer) is client


def hold_back(client: Cluster, topic: str) -> tuple[set[str], list[float]]:
    """Answers for a topic as a broker does that has too few replicas of it, while the topic is in the set."""
    holding = {topic}
    attempts: list[float] = []
    ask = client.ask

    async def answering(node: int, request: Request, **options: Any) -> Any:
        if request.api is not PRODUCE:
            return await ask(node, request, **options)
        topics = request.values["topics"]
        held = [refused(part, NOT_ENOUGH_REPLICAS) for part in topics if part["topic"] in holding]
        attempts.extend(time.monotonic() for _ in held)
        sent = [part for part in topics if part["topic"] not in holding]
        answer = SimpleNamespace(topics=[], throttle_ms=0, endpoints=None)
        if sent:
            values = {**request.values, "topics": sent}
            answer = await ask(node, request._replace(values=values), **options)
        return SimpleNamespace(topics=[*answer.topics, *held], throttle_ms=0, endpoints=None)

    client.ask = answering  # type: ignore[method-assign]
    return holding, attempts


def refused(topic: Any, code: int) -> Any:
    """The part of an answer about a topic of a request, all of whose batches are refused."""
    parts = [
        SimpleNamespace(partition=part["partition"], error=code, offset=-1, leader=None) for part in topic["partitions"]
    ]
    return SimpleNamespace(topic=topic["topic"], partitions=parts)


# Clients that are lost -------------------------------------------------------------------


async def test_a_client_whose_task_ended_is_replaced(kafka: SharedKafka, topic: str, producer: KafkaProducer) -> None:
    await kafka.create_topic(topic)
    await producer.publish(Message(topic, b"v"))
    client = client_of(producer)
    ended = client._refreshing
    assert ended is not None

    ended.cancel()
    await asyncio.wait([ended])

    assert await producer.publish(Message(topic, b"v")) == 1
    assert client_of(producer) is not client


async def test_a_broken_client_fails_its_waiting_messages(
    kafka: SharedKafka, topic: str, producer: KafkaProducer
) -> None:
    await kafka.create_topic(topic)
    await producer.publish(Message(topic, b"v"))

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    client_of(producer).ask = broken  # type: ignore[assignment]
    ended = await asyncio.gather(*(producer.publish(Message(topic, b"v")) for _ in range(5)), return_exceptions=True)

    assert {type(end) for end in ended} == {ClientLostError}
    assert await producer.publish(Message(topic, b"v")) == 1


@pytest.mark.parametrize("code", [45, 59, 47])
async def test_a_message_whose_numbers_are_rejected_is_sent_with_new_ones(
    kafka: SharedKafka, topic: str, producer: KafkaProducer, code: int
) -> None:
    await kafka.create_topic(topic)
    await producer.publish(Message(topic, b"before"))
    client = client_of(producer)
    ask = client.ask

    async def answering(node: int, request: Request, **options: Any) -> Any:
        if request.api is not PRODUCE:
            return await ask(node, request, **options)
        client.ask = ask  # type: ignore[method-assign]
        topics = [refused(part, code) for part in request.values["topics"]]
        return SimpleNamespace(topics=topics, throttle_ms=0, endpoints=None)

    client.ask = answering  # type: ignore[method-assign]

    assert await producer.publish(Message(topic, b"rejected")) == 1
    assert await producer.publish(Message(topic, b"after")) == 2
    assert await values(kafka, topic) == [b"before", b"rejected", b"after"]
