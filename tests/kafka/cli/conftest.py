"""The command line in this process: quicker than a process of its own, and measured by coverage; and records for it."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from aioshard.cli.main import main
from aioshard.ports import Message
from tests.support.shared_kafka import SharedKafka

DEADLINE = 30.0


class Ended(NamedTuple):
    """What became of a command."""

    code: int
    output: str
    errors: str


Run = Callable[..., Awaitable[Ended]]


@pytest.fixture
def aioshard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `aioshard` with these arguments in a thread, beside the loop of the test."""
    for variable in [name for name in os.environ if name.startswith("AIOSHARD_") and "TEST" not in name]:
        monkeypatch.delenv(variable)

    def call(arguments: tuple[str, ...]) -> int:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert isinstance(ended.value.code, int)
        return ended.value.code

    async def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = await asyncio.to_thread(call, arguments)
        return Ended(code, *capsys.readouterr())

    return run


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
        return [(one.partition, one.offset) for one in stored]

    async with asyncio.timeout(DEADLINE):
        await producer.start()
    try:
        yield send
    finally:
        await producer.stop()
