"""Behavior of aiokafka that we rely on, or that is why we do it ourselves: if a test fails, review our code."""

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.partitioner import murmur2

from tests.support.brokers import SharedKafka


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


def test_murmur2_matches_java() -> None:
    """The vectors of Kafka's own tests."""
    assert [murmur2(key) - 2**32 for key in (b"21", b"foobar")] == [-973932308, -790332482]
