"""The command line in the test process, and records for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka import AIOKafkaProducer

from aioshard.ports import Message
from tests.support.brokers import SharedKafka
from tests.support.commands import aioshard as aioshard  # noqa: PLC0414 - a fixture of the tests beside this file

DEADLINE = 30.0

Publish = Callable[..., Awaitable[list[tuple[int, int]]]]


@pytest.fixture
async def publish(kafka: SharedKafka) -> AsyncIterator[Publish]:
    """Publishes messages, those of a partition in this order, and returns partition and offset of each."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all")

    async def send(*messages: Message) -> list[tuple[int, int]]:
        storing = []
        async with asyncio.timeout(DEADLINE):
            for message in messages:
                timestamp = None if message.timestamp is None else round(message.timestamp * 1000)
                storing.append(
                    await producer.send(
                        message.topic,
                        message.value,
                        key=message.key,
                        partition=message.partition,
                        timestamp_ms=timestamp,
                        headers=list(message.headers),
                    )
                )
            stored = await asyncio.gather(*storing)
        return [(record.partition, record.offset) for record in stored]

    async with asyncio.timeout(DEADLINE):
        await producer.start()
    try:
        yield send
    finally:
        await producer.stop()
