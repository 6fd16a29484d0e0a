"""Commands read the side topics of a running app, and the app acts on the commands."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.ports import Message
from tests.support.brokers import SharedKafka

Aioshard = Callable[..., Awaitable[Any]]
Publish = Callable[..., Awaitable[list[tuple[int, int]]]]

DEADLINE = 40.0
QUICK: dict[str, Any] = {"auto_offset_reset": "earliest", "commit_interval": 0.1, "fetch_max_wait": 0.02}


class Handler:
    """Fails for the values that a test says, and keeps what it was given."""

    def __init__(self) -> None:
        self.bad: set[bytes] = set()
        self.processed: list[bytes] = []
        self._changed = asyncio.Event()

    async def __call__(self, record: Record) -> None:
        assert record.value is not None
        if record.value in self.bad:
            raise ValueError("no such customer")
        self.processed.append(record.value)
        self._changed.set()

    async def has_processed(self, *values: bytes) -> None:
        """Waits for exactly these, in this order."""
        async with asyncio.timeout(DEADLINE):
            while len(self.processed) < len(values):
                self._changed.clear()
                await self._changed.wait()
        assert self.processed == list(values)


@pytest.fixture
def handler() -> Handler:
    return Handler()


async def json_of(aioshard: Aioshard, kafka: SharedKafka, *arguments: str) -> Any:
    ended = await aioshard(*arguments, "--json", "--bootstrap-servers", kafka.bootstrap)
    assert ended.code == 0, ended
    return json.loads(ended.output)


async def test_a_dead_letter_of_an_app_is_shown_and_republished_to_it(
    aioshard: Aioshard, kafka: SharedKafka, topic: str, group: str, publish: Publish, handler: Handler
) -> None:
    await kafka.create_topic(topic, 1)
    await kafka.create_topic(f"{topic}.dlt", 1)
    app = App(group, bootstrap_servers=kafka.bootstrap, **QUICK)
    app.consume(topic, retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter(f"{topic}.dlt"))(handler)
    handler.bad = {b"2"}
    async with app:
        await publish(*(Message(topic, value, b"alice", (("trace", b"7"),)) for value in (b"1", b"2", b"3")))
        await handler.has_processed(b"1", b"3")
        async with asyncio.timeout(DEADLINE):
            while not (shown := await json_of(aioshard, kafka, "dlt", "show", f"{topic}.dlt"))["dead_letters"]:
                pass
        handler.bad = set()

        replayed = await json_of(aioshard, kafka, "dlt", "replay", f"{topic}.dlt", "--yes")

        await handler.has_processed(b"1", b"3", b"2")
    (letter,) = shown["dead_letters"]
    assert (letter["group"], letter["handler"], letter["attempts"]) == (group, "Handler", 2)
    assert (letter["error"], letter["message"]) == ("ValueError", "no such customer")
    assert letter["record"] == {
        "topic": topic,
        "partition": 0,
        "offset": 1,
        "timestamp": letter["record"]["timestamp"],
        "key": "alice",
        "value": "2",
        "headers": [["trace", "7"]],
    }
    assert replayed["done"] == {topic: 1}


async def test_a_parked_key_of_an_app_is_listed_and_runs_in_order_when_it_is_released(
    aioshard: Aioshard, kafka: SharedKafka, topic: str, group: str, publish: Publish, handler: Handler
) -> None:
    await kafka.create_topic(topic, 1)
    app = App(group, bootstrap_servers=kafka.bootstrap, **QUICK)
    park = Park(f"{topic}.parked", delay=3600.0)
    app.consume(topic, retry=Retry(attempts=1), on_failure=park)(handler)
    handler.bad = {b"2"}
    async with app:
        values = (b"1", b"2", b"3", b"4")
        await publish(*(Message(topic, value, b"alice") for value in values), Message(topic, b"5", b"bob"))
        await handler.has_processed(b"1", b"5")
        async with asyncio.timeout(DEADLINE):
            while (listed := await json_of(aioshard, kafka, "park", "list", park.topic))["records"] < 3:
                pass
        handler.bad = set()

        await json_of(aioshard, kafka, "park", "release", park.topic, "--key", "alice")

        await handler.has_processed(b"1", b"5", b"2", b"3", b"4")
        async with asyncio.timeout(DEADLINE):
            while (await json_of(aioshard, kafka, "park", "list", park.topic))["records"]:
                pass
    (key,) = listed["parked"]
    assert (key["key"], key["offsets"], key["group"], key["retries"]) == ("alice", [1, 2, 3], group, 0)
    assert not key["release_requested"]


async def test_records_behind_a_dropped_one_resume_without_it(
    aioshard: Aioshard, kafka: SharedKafka, topic: str, group: str, publish: Publish, handler: Handler
) -> None:
    await kafka.create_topic(topic, 1)
    app = App(group, bootstrap_servers=kafka.bootstrap, **QUICK)
    park = Park(f"{topic}.parked", delay=3600.0)
    app.consume(topic, retry=Retry(attempts=1), on_failure=park)(handler)
    handler.bad = {b"1"}
    async with app:
        await publish(*(Message(topic, value, b"alice") for value in (b"1", b"2", b"3")))
        async with asyncio.timeout(DEADLINE):
            while (await json_of(aioshard, kafka, "park", "list", park.topic))["records"] < 3:
                pass

        await json_of(aioshard, kafka, "park", "drop", park.topic, "--record", f"{topic}/0/0", "--yes")

        await handler.has_processed(b"2", b"3")
