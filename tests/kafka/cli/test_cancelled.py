"""Commands cancelled at any moment, as by SIGINT, end."""

import asyncio
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from aioshard import App
from aioshard.cli import brokers, demo
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.kafka.side_topics import TopicReader
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.cancelling import cancel_at_each_await

PARTITIONS = [TopicPartition("flights", number) for number in range(demo._PARTITIONS)]
GROUPS = itertools.count()


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    """Those of an embedded broker with some flights; its own loop is stopped while others run."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        broker = EmbeddedBroker()
        runner.run(broker.__aenter__())
        runner.run(broker.create_topic("flights", demo._PARTITIONS))
        settings = Settings(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
        runner.run(publish(settings))
        yield settings
        runner.run(broker.__aexit__(None, None, None))


async def publish(settings: Settings) -> None:
    messages = [Message("flights", b'{"number": 0}', b"N%d" % number) for number in range(3500)]
    await brokers.publish(settings, messages, "publishing", total=len(messages))


async def ask(settings: Settings) -> Any:
    async with KafkaAdmin(settings) as administration:
        return await administration.bounds(PARTITIONS), await administration.group_commits("delays", PARTITIONS)


async def read(settings: Settings) -> list[bytes | None]:
    async with TopicReader(settings, "flights", [0, 1, 2]) as reader:
        return [record.value async for records in reader.read() for record in records]


async def serve(settings: Settings) -> int:
    app = App(f"group {next(GROUPS)}", settings=settings)
    app.consume("flights")(demo.Flights().on_flight)
    await app.serve(until_caught_up=True)
    return sum(handler.processed for handler in app.statistics().handlers)


@pytest.mark.parametrize("make", [publish, demo._uncommitted, ask, read, pytest.param(serve, marks=pytest.mark.chaos)])
def test_a_cancellation_is_never_lost(settings: Settings, make: Any) -> None:
    """A client that is stopped must not take the cancellation of its caller for one of its own tasks."""
    swept = cancel_at_each_await(lambda: make(settings))

    assert swept.awaits >= 3
    assert swept.lost == []
    gc.collect()  # what is left open is reported here, and not by a later test
