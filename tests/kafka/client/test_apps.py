"""Apps on a real broker: seeks during rebalances, new topics, lag."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.errors import StateError
from aioshard.kafka.clients import kafka_clients
from aioshard.records import PartitionInfo, TopicPartition
from tests.engine.live_apps import engine_of
from tests.kafka.client.members import PATIENCE
from tests.kafka.faults.intercepting import Interceptor
from tests.support.brokers import SharedKafka

RECORDS = 50

CLASSIC: dict[str, Any] = {}
EAGER: dict[str, Any] = {"assignor": "sticky"}
CONSUMER: dict[str, Any] = {"group_protocol": "consumer"}

PROTOCOLS = pytest.mark.parametrize(
    "protocol",
    [CLASSIC, pytest.param(EAGER, marks=pytest.mark.chaos), CONSUMER],
    ids=["classic", "eager", "consumer"],
)
ONE_PROTOCOL_QUICKLY = pytest.mark.parametrize(
    "protocol",
    [CLASSIC, *(pytest.param(protocol, marks=pytest.mark.chaos) for protocol in (EAGER, CONSUMER))],
    ids=["classic", "eager", "consumer"],
)
"""The same protocols; only the first one is in the plain run."""
INCREMENTAL = pytest.mark.parametrize(
    "protocol", [CONSUMER, pytest.param(CLASSIC, marks=pytest.mark.chaos)], ids=["consumer", "classic"]
)
"""The protocols in which the group takes single partitions; only the first one is in the plain run."""


class Process:
    """An app of the group, and its processed records; records of the offsets in `hanging` run until they are let go."""

    def __init__(self, kafka: SharedKafka, group: str, **options: Any) -> None:
        quick: dict[str, Any] = {"session_timeout": 6, "heartbeat_interval": 0.2}
        if options.get("group_protocol") == "consumer":
            quick = {}
        self.app = App(
            group,
            bootstrap_servers=kafka.bootstrap,
            auto_offset_reset="earliest",
            commit_interval=0.2,
            fetch_max_wait=0.05,
            metadata_max_age=1.0,
            drain_timeout=3.0,
            **(quick | options),
        )
        self.done: Counter[tuple[int, int]] = Counter()
        self.hanging: set[int] = set()
        self.release = asyncio.Event()

    async def handle(self, record: Record) -> None:
        if record.offset in self.hanging:
            await self.release.wait()
        self.done[record.partition, record.offset] += 1


async def until(condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - nothing in the process tells what another one sees
            await asyncio.sleep(0.02)


async def fill(kafka: SharedKafka, topic: str, partitions: int) -> None:
    await kafka.create_topic(topic, partitions)
    for partition in range(partitions):
        await kafka.produce(topic, [(b"%d-%d" % (partition, number), b"") for number in range(RECORDS)], partition)


@ONE_PROTOCOL_QUICKLY
async def test_a_seek_moves_a_partition_and_reprocesses_it(
    kafka: SharedKafka, topic: str, group: str, protocol: dict[str, Any]
) -> None:
    await fill(kafka, topic, 1)
    process = Process(kafka, group, **protocol)
    process.app.consume(topic, concurrency=10)(process.handle)
    app = process.app
    async with app:
        await until(lambda: process.done.total() == RECORDS)

        assert await app.seek(topic, 0, "beginning") == 0
        await until(lambda: process.done.total() == 2 * RECORDS)
        assert set(process.done.values()) == {2}

        assert await app.seek(topic, 0, RECORDS - 10) == RECORDS - 10
        await until(lambda: process.done.total() == 2 * RECORDS + 10)

        assert await app.seek(topic, 0, time.time() + 3600) == RECORDS
        assert await app.committed(topic, 0) == RECORDS == app.position(topic, 0)
        assert await app.seek(topic, 0, time.time() - 3600) == 0
        await until(lambda: process.done.total() == 3 * RECORDS + 10)
        assert await app.partitions(topic) == (PartitionInfo(0, 1, (1,), (1,)),)
        assert topic in await app.topics()
    assert process.done.total() == 3 * RECORDS + 10


@ONE_PROTOCOL_QUICKLY
async def test_a_seek_survives_a_rebalance_only_if_the_partition_stays(
    kafka: SharedKafka, topic: str, group: str, protocol: dict[str, Any]
) -> None:
    await fill(kafka, topic, 2)
    first, second = Process(kafka, group, **protocol), Process(kafka, group, **protocol)
    for process in (first, second):
        process.app.consume(topic, concurrency=10)(process.handle)
    first.hanging = {7}
    async with first.app:
        await until(lambda: first.done.total() == 2 * (RECORDS - 1))
        partitions = engine_of(first.app).rebalance.partitions
        await until(lambda: all(owned.commits.completed == RECORDS - 1 for owned in partitions))
        seeking = [asyncio.create_task(first.app.seek(topic, number, "beginning")) for number in (0, 1)]
        await until(lambda: first.app.assignment() == ())
        first.done.clear()

        async with second.app:
            await until(lambda: [len(app.assignment()) for app in (first.app, second.app)] == [1, 1])
            ended = await asyncio.gather(*seeking, return_exceptions=True)
            first.release.set()
            (kept,), (moved,) = first.app.assignment(), second.app.assignment()

            assert {kept, moved} == {TopicPartition(topic, 0), TopicPartition(topic, 1)}
            assert ended[kept.partition] == 0
            given_away = ended[moved.partition]
            if given_away != 0:  # it was done before the group took it
                assert isinstance(given_away, StateError)
                assert "the group assigned it to another member" in str(given_away)
            await until(lambda: len([at for at in first.done if at[0] == kept.partition]) == RECORDS)
            await until(lambda: first.app.statistics().partitions[0].committed == RECORDS)
            await until(lambda: second.app.statistics().partitions[0].committed == RECORDS)
    assert (first.done + second.done)[moved.partition, 7] >= 1


@PROTOCOLS
async def test_a_pattern_reads_a_new_topic_from_its_start(
    kafka: SharedKafka, topic: str, group: str, protocol: dict[str, Any]
) -> None:
    await fill(kafka, f"{topic}-a", 1)
    process = Process(kafka, group, **protocol)
    process.app.consume(pattern=f"{topic}-[ab]", concurrency=10)(process.handle)
    async with process.app as app:
        assert app.assignment() == (TopicPartition(f"{topic}-a", 0),)
        await until(lambda: process.done.total() == RECORDS)

        await fill(kafka, f"{topic}-c", 1)
        await fill(kafka, f"{topic}-b", 2)

        await until(lambda: len(app.assignment()) == 3)
        await until(lambda: process.done.total() == 3 * RECORDS)
        assert {topic_partition.topic for topic_partition in app.assignment()} == {f"{topic}-a", f"{topic}-b"}
    assert process.done.total() == 3 * RECORDS


@ONE_PROTOCOL_QUICKLY
async def test_the_lag_of_a_paused_partition_grows(
    kafka: SharedKafka, topic: str, group: str, protocol: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch tells the end of a log, and nothing is fetched of it."""
    monkeypatch.setattr("aioshard.engine.runtime._LOG_END_INTERVAL", 0.2)
    await fill(kafka, topic, 1)
    process = Process(kafka, group, **protocol)
    process.app.consume(topic)(process.handle)
    async with process.app as app:

        def lag() -> int | None:
            return app.statistics().partitions[0].lag

        await until(lambda: lag() == 0)
        app.pause(topic, 0)
        for more in (1, 2):
            await kafka.produce(topic, [(b"key", b"")] * RECORDS, 0)
            await until(lambda more=more: lag() == more * RECORDS)  # type: ignore[misc]
        app.resume(topic, 0)
        await until(lambda: lag() == 0)


@INCREMENTAL
async def test_partitions_open_although_others_are_revoked_meanwhile(
    kafka: SharedKafka, topic: str, group: str, protocol: dict[str, Any]
) -> None:
    """A member starts while another one looks up where its partitions begin."""
    await fill(kafka, topic, 2)
    first, second = Process(kafka, group, start_timeout=None, **protocol), Process(kafka, group, **protocol)
    for process in (first, second):
        process.app.consume(topic, concurrency=10)(process.handle)
    interceptor = Interceptor(kafka_clients(first.app.settings, group).transport)
    interceptor.questions.clear()
    async with first.app.started(interceptor):
        await until(lambda: len(assigned_of(interceptor)) == 1)
        async with second.app:
            await until(lambda: second.done.total() == RECORDS)
            assert first.done.total() == 0
            before = len(assigned_of(interceptor))
            interceptor.questions.set()
            await until(lambda: first.done.total() == RECORDS)
            assert len(assigned_of(interceptor)) == before
            assert len(first.app.assignment()) == len(second.app.assignment()) == 1
            assert not first.done.keys() & second.done.keys()


def assigned_of(interceptor: Interceptor) -> list[Any]:
    return [event for event in interceptor.events if event[0] == "assigned" and event[1]]
