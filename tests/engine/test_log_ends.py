"""The lag goes on growing where nothing is fetched, and says since when."""

import asyncio
import time

from aioshard import App, Record
from aioshard.observe import PartitionStatistics
from aioshard.testing import InMemoryBroker, TestClient, run

NEVER_OLDER = 15.0


class World:
    """An app on one partition, and its broker."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=1, clock=time.time)
        self.app = App("group", commit_interval=0.1)

        @self.app.consume("orders", concurrency=1)
        async def handle(record: Record) -> None: ...

    @property
    def partition(self) -> PartitionStatistics:
        (found,) = self.app.statistics().partitions
        return found

    async def publish(self, client: TestClient, count: int) -> None:
        for _ in range(count):
            await client.publish("orders", b"", partition=0)


def test_it_grows_while_a_partition_is_paused() -> None:
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
            assert world.app.diagnose().partitions[0].verdict != "up to date"
            world.app.resume("orders", 0)
            await client.settle(30.0)
            assert (world.partition.lag, world.partition.lag_seconds) == (0, 0.0)

    run(test())


def test_a_broker_that_does_not_answer_leaves_the_last_answer() -> None:
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
