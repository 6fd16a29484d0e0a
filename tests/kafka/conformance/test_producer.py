"""The contract of `aioshard.ports.Producer`, tested on both implementations, and extras of the in-memory one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import pytest

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    ConnectError,
    MessageTooLargeError,
    TransportError,
)
from aioshard.kafka import producer as producing
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message, Producer
from aioshard.records import Record
from aioshard.settings import Settings
from aioshard.testing import InMemoryBroker, InMemoryProducer, run
from tests.support.brokers import SharedKafka


class Harness(Protocol):
    """A topic with two partitions that only this test uses, and one that takes no message of 100 bytes."""

    topic: str
    narrow: str

    async def prepare(self) -> None: ...

    def producer(self) -> Producer: ...

    async def records(self) -> Sequence[Record]: ...

    async def aclose(self) -> None: ...


class InMemoryHarness:
    topic = "messages"
    narrow = "narrow"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        del request
        self.broker = InMemoryBroker()
        self.producers: list[InMemoryProducer] = []

    async def prepare(self) -> None:
        self.broker.create_topic(self.topic, 2)
        self.broker.fail_publishes(self.narrow, MessageTooLargeError(f"too large for topic {self.narrow!r}"))

    def producer(self) -> InMemoryProducer:
        self.producers.append(InMemoryProducer(self.broker))
        return self.producers[-1]

    async def records(self) -> Sequence[Record]:
        return [record for partition in (0, 1) for record in self.broker.records(self.topic, partition)]

    async def aclose(self) -> None:
        for producer in self.producers:
            await producer.close()


class KafkaHarness:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.kafka: SharedKafka = request.getfixturevalue("kafka")
        self.topic: str = request.getfixturevalue("topic")
        self.narrow = f"{self.topic}-narrow"
        self.producers: list[KafkaProducer] = []
        # A partition that the brokers do not know could be a new one, and is waited for.
        request.getfixturevalue("monkeypatch").setattr(producing, "TOPIC_TIMEOUT", 0.5)

    async def prepare(self) -> None:
        # A time stamp of long ago is a reason to delete the record immediately, and one of the future to refuse it.
        options = {"retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
        await self.kafka.create_topic(self.topic, 2, options)
        await self.kafka.create_topic(self.narrow, 1, {"max.message.bytes": "120"})

    def producer(self) -> KafkaProducer:
        self.producers.append(KafkaProducer(Settings(bootstrap_servers=self.kafka.bootstrap)))
        return self.producers[-1]

    async def records(self) -> Sequence[Record]:
        return await self.kafka.read(self.topic)

    async def aclose(self) -> None:
        for producer in self.producers:
            await producer.close()


@pytest.fixture(
    params=[
        pytest.param(InMemoryHarness, id="in memory"),
        pytest.param(KafkaHarness, id="kafka", marks=pytest.mark.kafka),
    ]
)
def unprepared(request: pytest.FixtureRequest) -> Harness:
    """Not async: the broker's fixture is not."""
    made: Harness = request.param(request)
    return made


@pytest.fixture
async def harness(unprepared: Harness) -> AsyncIterator[Harness]:
    await unprepared.prepare()
    yield unprepared
    await unprepared.aclose()


# Both ------------------------------------------------------------------------------------


async def test_a_message_is_stored_as_it_is(harness: Harness) -> None:
    headers = (("trace", b"abc"), ("empty", b""), ("none", None))
    message = Message(harness.topic, b"value", b"key", headers, 1, 1_700_000_000.125)

    offset = await harness.producer().publish(message)

    [record] = await harness.records()
    assert record == Record(harness.topic, 1, offset, b"key", b"value", headers, 1_700_000_000.125)


async def test_a_missing_timestamp_is_now(harness: Harness) -> None:
    before = time.time()

    await harness.producer().publish(Message(harness.topic, b"v"))

    [record] = await harness.records()
    assert before - 0.001 <= record.timestamp <= time.time()


async def test_a_timestamp_may_be_the_last_one(harness: Harness) -> None:
    """As a float of seconds it is later than any that Kafka can store."""
    await harness.producer().publish(Message(harness.topic, b"v", timestamp=(2**63 - 1) / 1000))

    [record] = await harness.records()
    assert record.timestamp == (2**63 - 1) / 1000


UNENCODABLE: list[dict[str, Any]] = [
    {"topic": "no topic"},
    {"topic": "topic-\ud83d"},
    {"topic": b"topic"},
    {"partition": "0"},
    {"key": "text"},
    {"value": "text"},
    {"headers": ((b"trace", b"1"),)},
    {"headers": (("x-\ud83d", b"1"),)},
    {"headers": (("trace", "1"),)},
    {"headers": (("trace", 1),)},
    {"headers": ("id",)},
    {"timestamp": float("inf")},
    {"timestamp": float("nan")},
]


@pytest.mark.parametrize("changes", UNENCODABLE, ids=repr)
async def test_a_message_that_cannot_be_encoded_fails_alone_for_good(harness: Harness, changes: dict[str, Any]) -> None:
    """Middleware and the records of others can lead to such a message: those of its batch are stored."""
    producer = harness.producer()
    good = Message(harness.topic, b"good", b"key", (("trace", b"1"),), 0)

    *stored, refused = await asyncio.gather(
        *(producer.publish(good) for _ in range(3)), producer.publish(good._replace(**changes)), return_exceptions=True
    )

    assert stored == [0, 1, 2]
    assert isinstance(refused, TransportError)
    assert not refused.retriable
    assert await producer.publish(good) == 3
    assert {record.value for record in await harness.records()} == {b"good"}


@pytest.mark.parametrize("key", [b"key", None])
async def test_a_value_may_be_none_with_and_without_a_key(harness: Harness, key: bytes | None) -> None:
    await harness.producer().publish(Message(harness.topic, None, key, partition=0))

    [record] = await harness.records()
    assert (record.key, record.value) == (key, None)


async def test_messages_of_a_partition_are_stored_in_the_order_of_the_calls(harness: Harness) -> None:
    """From the very first on, which connects, and when a batch is full."""
    producer = harness.producer()
    values = [b"%04d" % number * 100 for number in range(1000)]

    offsets = await asyncio.gather(*(producer.publish(Message(harness.topic, value, partition=0)) for value in values))

    assert [record.value for record in await harness.records()] == values
    assert offsets == list(range(1000))


async def test_messages_published_while_others_wait_do_not_overtake(harness: Harness) -> None:
    """One after the other, whenever the client makes room for those that wait."""
    producer = harness.producer()
    waiting: list[asyncio.Task[int]] = []
    for number in range(400):
        message = Message(harness.topic, b"%04d" % number * 100, b"k", partition=0)
        waiting.append(asyncio.create_task(producer.publish(message)))
        await asyncio.sleep(0)

    assert await asyncio.gather(*waiting) == list(range(400))
    assert [int((record.value or b"")[:4]) for record in await harness.records()] == list(range(400))


async def test_a_key_always_goes_to_the_same_partition_and_keys_fill_all(harness: Harness) -> None:
    producer = harness.producer()
    keys = [b"key-%d" % (number % 20) for number in range(100)]

    await asyncio.gather(*(producer.publish(Message(harness.topic, b"v", key)) for key in keys))

    placed = {(record.key, record.partition) for record in await harness.records()}
    assert len(placed) == 20
    assert {partition for _, partition in placed} == {0, 1}


async def test_messages_without_a_key_fill_all_partitions(harness: Harness) -> None:
    producer = harness.producer()

    for _ in range(20):
        await asyncio.gather(*(producer.publish(Message(harness.topic, b"v")) for _ in range(100)))
        if {record.partition for record in await harness.records()} == {0, 1}:
            return
    pytest.fail("2,000 messages without a key went to one partition")


async def test_a_missing_partition_is_an_error(harness: Harness) -> None:
    producer = harness.producer()

    with pytest.raises(TransportError, match="0 to 1 and not 2"):
        await producer.publish(Message(harness.topic, b"v", partition=2))

    assert await producer.publish(Message(harness.topic, b"v", partition=1)) == 0


async def test_a_refusal_by_one_topic_does_not_affect_others(harness: Harness) -> None:
    producer = harness.producer()

    async def refused() -> None:
        with pytest.raises(MessageTooLargeError, match=harness.narrow) as caught:
            await producer.publish(Message(harness.narrow, bytes(1000)))
        assert not caught.value.retriable

    for _ in range(3):
        taken = [producer.publish(Message(harness.topic, b"v", partition=0)) for _ in range(5)]
        await asyncio.gather(refused(), refused(), *taken)

    assert len(await harness.records()) == 15


async def test_a_cancelled_call_does_not_affect_others(harness: Harness) -> None:
    producer = harness.producer()
    values = [b"%d" % number for number in range(20)]
    calls = [asyncio.create_task(producer.publish(Message(harness.topic, value, partition=0))) for value in values]
    await asyncio.sleep(0)

    for call in calls[::2]:
        call.cancel()
    await asyncio.wait(calls)

    assert all(call.cancelled() for call in calls[::2])
    found = [record.value or b"" for record in await harness.records()]
    assert set(values[1::2]) <= set(found)
    assert found == sorted(found, key=int)
    assert [call.result() for call in calls[1::2]] == [found.index(value) for value in values[1::2]]


async def test_an_idle_producer_has_no_trouble(harness: Harness) -> None:
    producer = harness.producer()
    assert producer.trouble is None

    await producer.publish(Message(harness.topic, b"v"))

    assert producer.trouble is None


async def test_after_close_nothing_is_published(harness: Harness) -> None:
    producer = harness.producer()
    await producer.publish(Message(harness.topic, b"v"))

    await producer.close()

    with pytest.raises(ClientLostError, match="closed"):
        await producer.publish(Message(harness.topic, b"w"))
    assert len(await harness.records()) == 1


async def test_messages_waiting_at_close_fail(harness: Harness) -> None:
    producer = harness.producer()
    calls = [asyncio.create_task(producer.publish(Message(harness.topic, b"v"))) for _ in range(10)]
    await asyncio.sleep(0)

    await producer.close()

    async with asyncio.timeout(5):
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ended} == {ClientLostError}


async def test_a_producer_that_was_not_used_can_be_closed(harness: Harness) -> None:
    await harness.producer().close()


# In memory -------------------------------------------------------------------------------


def make_producer(timeout: float = 60.0) -> tuple[InMemoryBroker, InMemoryProducer]:
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    return broker, InMemoryProducer(broker, timeout=timeout)


async def test_publishes_fail_until_allowed() -> None:
    broker, producer = make_producer()
    broker.fail_publishes("messages", AuthorizationError("not allowed"))

    for _ in range(2):
        with pytest.raises(AuthorizationError, match="not allowed"):
            await producer.publish(Message("messages", b"v"))
    await producer.publish(Message("others", b"v"))
    broker.fail_publishes("messages", None)

    assert await producer.publish(Message("messages", b"v")) == 0


async def test_an_acknowledgement_may_be_lost() -> None:
    broker, producer = make_producer()
    broker.fail_publishes("messages", TransportError("no answer"), stored=True)

    with pytest.raises(TransportError, match="no answer"):
        await producer.publish(Message("messages", b"v"))

    assert [record.value for record in broker.records("messages")] == [b"v"]


async def test_messages_wait_for_an_unavailable_broker_in_order() -> None:
    broker, producer = make_producer()
    broker.available = False
    calls = [asyncio.create_task(producer.publish(Message("messages", b"%d" % number))) for number in range(5)]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(calls[0]), 0.01)

    assert not any(call.done() for call in calls)
    assert "in-memory broker (5)" in (producer.trouble or "")
    broker.available = True

    assert await asyncio.gather(*calls) == list(range(5))
    assert producer.trouble is None


def test_messages_do_not_wait_forever() -> None:
    async def scenario() -> float:
        broker, producer = make_producer(timeout=30.0)
        broker.available = False
        with pytest.raises(ConnectError, match="within 30 s") as caught:
            await producer.publish(Message("messages", b"v"))
        assert caught.value.retriable
        broker.available = True
        await producer.publish(Message("messages", b"w"))
        assert [record.value for record in broker.records("messages")] == [b"w"]
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 30.0


def test_acknowledgements_take_the_latency_and_keep_order() -> None:
    async def scenario() -> list[float]:
        delays = iter([3.0, 1.0, 2.0, 2.0])
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        producer = InMemoryProducer(broker, latency=lambda: next(delays))
        ends: list[float] = []

        async def publish(value: bytes) -> None:
            await producer.publish(Message("messages", value))
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(publish(b"slow"), publish(b"quick"))
        assert [record.value for record in broker.records("messages")] == [b"slow", b"quick"]
        return ends

    assert run(scenario()) == [5.0, 5.0]


async def test_a_cancelled_message_is_still_stored() -> None:
    """A real one may be: a second publish must be idempotent."""
    broker, producer = make_producer()
    call = asyncio.create_task(producer.publish(Message("messages", b"v")))
    await asyncio.sleep(0)

    call.cancel()
    await broker.until(lambda: bool(broker.records("messages")))

    assert call.cancelled()
