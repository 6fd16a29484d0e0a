"""A partition without a leader delays no other partition and no start."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.engine.control import caught_up
from aioshard.errors import StateError, TransportError
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.live_apps import until

AWAY = TopicPartition("orders", 1)


class Shop:
    """A broker whose partition `AWAY` has no leader, and an app that reads it with another one."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        self.broker.create_topic("orders", 2)
        self.broker.set_leader("orders", 1, available=False)
        self.app = App("billing", auto_offset_reset="earliest", commit_timeout=1.0)
        self.seen: list[int] = []
        self.offsets: list[int] = []
        self.latency: dict[str, float] = {}

        @self.app.consume("orders")
        async def handle(record: Record) -> None:
            self.seen.append(record.partition)
            self.offsets.append(record.offset)

    def connect(self) -> InMemoryTransport:
        return InMemoryTransport(self.broker, "billing", latency=lambda operation: self.latency.get(operation, 0.0))

    def publish(self) -> None:
        for partition in range(2):
            self.broker.publish("orders", b"", partition=partition)


def scenario(test: Callable[[Shop], Any]) -> None:
    async def live() -> None:
        await test(Shop())

    run(live())


def test_an_app_starts_without_a_leader_and_reads_the_other_partitions() -> None:
    async def test(shop: Shop) -> None:
        async with shop.app.started(shop.connect):
            shop.publish()
            await until(lambda: shop.seen == [0])
            assert shop.app.statistics().state == "running"
            await until(lambda: str(AWAY) in str(shop.app.statistics().trouble))
            assert str(AWAY) in shop.app.explain()

            shop.broker.set_leader("orders", 1, available=True)
            await until(lambda: shop.seen == [0, 1] and shop.app.statistics().trouble is None)

    scenario(test)


def test_a_rebalance_resumes_the_other_partitions() -> None:
    async def test(shop: Shop) -> None:
        shop.broker.set_leader("orders", 1, available=True)
        async with shop.app.started(shop.connect):
            shop.broker.set_leader("orders", 1, available=False)
            shop.broker.group("billing").rebalance()
            await until(lambda: shop.app.statistics().rebalances == 2)
            shop.publish()
            began = asyncio.get_running_loop().time()
            await until(lambda: shop.seen == [0])
            assert asyncio.get_running_loop().time() - began < 1

            shop.broker.set_leader("orders", 1, available=True)
            await until(lambda: shop.seen == [0, 1])

    scenario(test)


def test_reading_to_the_end_waits_for_the_leader() -> None:
    """The end of that log is not known: what it holds counts."""

    async def test(shop: Shop) -> None:
        shop.publish()
        async with shop.app.started(shop.connect):
            assert shop.app._engine is not None
            ended = asyncio.create_task(caught_up(shop.app._engine))
            await until(lambda: shop.seen == [0])
            done, _ = await asyncio.wait([ended], timeout=5)
            assert not done
            shop.broker.set_leader("orders", 1, available=True)
            await ended
            assert shop.seen == [0, 1]

    scenario(test)


def test_a_seek_reports_that_the_partition_has_no_leader() -> None:
    async def test(shop: Shop) -> None:
        shop.broker.set_leader("orders", 1, available=True)
        async with shop.app.started(shop.connect):
            shop.broker.set_leader("orders", 1, available=False)
            with pytest.raises(TransportError, match=str(AWAY)):
                await shop.app.seek("orders", 1, "end")
        with pytest.raises(StateError):
            await shop.app.seek("orders", 1, "end")

    scenario(test)


@pytest.mark.parametrize("tenths", range(16))
def test_a_seek_opens_another_partition_once(tenths: int) -> None:
    """At any step of the leader lookup: two concurrent lookups once made two epochs of the partition."""

    async def test(shop: Shop) -> None:
        shop.latency = {"committed": 0.2, "log ranges": 0.4, "commit": 0.3}
        async with shop.app.started(shop.connect):
            for _ in range(10):
                shop.broker.publish("orders", b"", partition=0)
            await until(lambda: len(shop.offsets) == 10)
            await asyncio.sleep(5 + tenths / 10)
            (before,) = shop.app.statistics().partitions

            await shop.app.seek("orders", 0, 3)

            await asyncio.sleep(4)
            assert shop.offsets[10:] == list(range(3, 10))
            (after,) = shop.app.statistics().partitions
            assert after.epoch == before.epoch + 1

    scenario(test)


def test_a_partition_without_a_leader_can_be_revoked_and_reassigned() -> None:
    async def test(shop: Shop) -> None:
        async with shop.app.started(shop.connect):
            await until(lambda: shop.app.statistics().trouble is not None)
            shop.broker.group("billing").revoke(TopicPartition("orders", 1))
            await until(lambda: shop.app.statistics().trouble is None)
            shop.publish()
            await until(lambda: shop.seen == [0])

            shop.broker.group("billing").assign(TopicPartition("orders", 1))
            await until(lambda: str(AWAY) in str(shop.app.statistics().trouble))
            shop.broker.set_leader("orders", 1, available=True)
            await until(lambda: shop.seen == [0, 1])

    scenario(test)


def test_an_added_partition_opens_while_another_has_no_leader() -> None:
    async def test(shop: Shop) -> None:
        async with shop.app.started(shop.connect):
            await until(lambda: shop.app.statistics().trouble is not None)
            shop.broker.add_partitions("orders", 1)
            await until(lambda: len(shop.app.statistics().partitions) == 2)
            shop.broker.publish("orders", b"", partition=2)
            await until(lambda: shop.seen == [2])
            assert str(AWAY) in str(shop.app.statistics().trouble)

    scenario(test)


def test_a_partition_recovers_its_deleted_position_while_another_has_no_leader() -> None:
    async def test(shop: Shop) -> None:
        async with shop.app.started(shop.connect):
            await until(lambda: shop.app.statistics().trouble is not None)
            for _ in range(3):
                shop.broker.publish("orders", b"", partition=0)
            shop.broker.log("orders", 0).truncate_before(2)

            await until(lambda: shop.offsets == [2])
            assert str(AWAY) in str(shop.app.statistics().trouble)

    scenario(test)
