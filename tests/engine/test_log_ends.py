"""Consumer lag keeps growing when nothing is fetched, and has an age."""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.engine.partition import LogEnd
from aioshard.engine.runtime import Engine
from aioshard.errors import TransportError
from aioshard.observe import PartitionStatistics
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import until

NEVER_OLDER = 15.0


class World:
    """An app on one partition, and its broker."""

    def __init__(self, clock: Callable[[], float] = time.time, commit_interval: float = 0.1) -> None:
        self.broker = InMemoryBroker(partitions=1, clock=clock)
        self.app = App("group", commit_interval=commit_interval)
        self.held: int | None = None
        self.released = asyncio.Event()
        self.seen: list[PartitionStatistics] = []

        @self.app.consume("orders", concurrency=1)
        async def handle(record: Record) -> None:
            self.seen.append(self.partition)
            if record.offset == self.held:
                await self.released.wait()

    @property
    def partition(self) -> PartitionStatistics:
        (found,) = self.app.statistics().partitions
        return found

    async def publish(self, client: TestClient, count: int) -> None:
        for _ in range(count):
            await client.publish("orders", b"", partition=0)


def test_lag_grows_while_a_partition_is_paused() -> None:
    async def test() -> None:
        world = World()
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, 5)
            await client.settle(30.0)
            assert (world.partition.end_offset, world.partition.lag, world.partition.lag_seconds) == (5, 0, 0.0)
            world.app.pause("orders", 0, why="maintenance")
            for more in (10, 20):
                await world.publish(client, 10)
                await asyncio.sleep(NEVER_OLDER)
                assert (world.partition.end_offset, world.partition.lag) == (5 + more, more)
                assert world.partition.lag_seconds is None  # no record in flight would tell
            assert world.app.diagnose().partitions[0].verdict != "up to date"
            world.app.resume("orders", 0)
            await client.settle(30.0)
            assert (world.partition.lag, world.partition.lag_seconds) == (0, 0.0)

    run(test())


def test_a_silent_broker_keeps_the_last_known_end() -> None:
    async def test() -> None:
        world = World()
        async with TestClient(world.app, broker=world.broker) as client:
            await client.settle(30.0)
            world.app.pause("orders", 0)
            await world.publish(client, 3)
            await asyncio.sleep(NEVER_OLDER)
            world.broker.available = False
            await asyncio.sleep(2 * NEVER_OLDER)
            assert world.partition.lag == 3
            assert any(task.get_name() == "log ends" for task in asyncio.all_tasks())
            world.broker.available = True
            await world.publish(client, 4)
            await asyncio.sleep(2 * NEVER_OLDER)
            assert world.partition.lag == 7

    run(test())


def test_lag_seconds_is_the_age_of_the_oldest_incomplete_record() -> None:
    """Not by when it came in: it may have waited in the log."""

    async def test() -> None:
        world = World(clock=lambda: time.time() - 1000.0)
        world.held = 2
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, 5)
            await until(lambda: world.partition.committed == 2)
            assert world.partition.lag_seconds == pytest.approx(1000.0, abs=60.0)
            assert world.partition.lag == 3
            world.released.set()
            await client.settle(30.0)
            assert world.partition.lag_seconds == 0.0

    run(test())


def test_a_record_without_a_timestamp_has_no_age() -> None:
    async def test() -> None:
        world = World(clock=lambda: -0.001)
        world.held = 0
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, 1)
            await until(lambda: world.partition.incomplete == 1)
            assert world.partition.lag_seconds is None
            assert world.partition.lag == 1
            world.released.set()

    run(test())


def test_lag_counts_from_the_committed_offset() -> None:
    async def test() -> None:
        world = World(commit_interval=5.0)
        async with TestClient(world.app, broker=world.broker) as client:
            await world.publish(client, 1)
            await client.settle(30.0)
            await world.publish(client, 4)
            await client.settle(30.0)
            at_the_last = world.seen[-1]
            assert (at_the_last.committed, at_the_last.committable, at_the_last.lag) == (1, 4, 4)

    run(test())


# The poller on its own ------------------------------------------------------------------

ORDERS = TopicPartition("orders", 0)


class Client:
    """Answers as a client would, or not at all."""

    def __init__(self) -> None:
        self.fetched: int | None = None
        self.end = 10
        self.asked: list[Sequence[TopicPartition]] = []
        self.fails: BaseException | None = None
        self.hangs = False

    def end_offset(self, _: TopicPartition) -> int | None:
        return self.fetched

    async def log_ranges(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, LogRange]:
        self.asked.append(partitions)
        if self.hangs:
            await asyncio.sleep(3600.0)
        if self.fails is not None:
            raise self.fails
        return {partition: LogRange(3, self.end) for partition in partitions}


class Asking:
    """The poller of log ends, with one partition at a position."""

    def __init__(self) -> None:
        self.client = Client()
        self.partition: Any = SimpleNamespace(
            topic_partition=ORDERS, tracker=SimpleNamespace(position=0), log_end=LogEnd(lambda: 0.0)
        )
        self.engine: Any = SimpleNamespace(
            client=SimpleNamespace(transport=self.client), rebalance=SimpleNamespace(partitions=[self.partition])
        )

    @property
    def end(self) -> int | None:
        return Engine.log_end(self.engine, self.partition)

    async def run(self) -> None:
        await Engine._query_log_ends(self.engine)


def test_the_highest_known_offset_is_the_end() -> None:
    async def test() -> None:
        asking = Asking()
        client = asking.client
        assert asking.end is None
        client.fetched = 7
        assert asking.end == 7
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(asking.run())
            await asyncio.sleep(NEVER_OLDER)
            assert asking.end == 10
            client.fetched = 12
            assert asking.end == 12
            asking.partition.tracker.position = 13
            assert asking.end == 13
            asking.engine.client.transport = None  # it was lost
            assert asking.end == 13
            task.cancel()

    run(test())


@pytest.mark.parametrize("how", ["hangs", "fails", "is too slow by itself"])
def test_a_bad_answer_neither_stops_nor_delays_the_polling(how: str) -> None:
    async def test() -> None:
        asking = Asking()
        client = asking.client
        client.hangs = how == "hangs"
        client.fails = TransportError("no") if how == "fails" else TimeoutError() if how != "hangs" else None
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(asking.run())
            await asyncio.sleep(2 * NEVER_OLDER)
            assert len(client.asked) >= 2
            client.hangs, client.fails = False, None
            await asyncio.sleep(NEVER_OLDER)
            assert asking.end == 10
            task.cancel()

    run(test())
