"""Members of the consumer protocol when the coordinator of their group moves, dies or hangs."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from aioshard.kafka.group.member import Lost, Recovered
from aioshard.records import TopicPartition
from tests.kafka.group.engines import Engine
from tests.support.three_brokers import ThreeBrokers

PARTITIONS = 4

Engines = list[Engine]


@pytest.fixture
async def engines(brokers: ThreeBrokers, topic: str, group: str) -> AsyncIterator[Engines]:
    """Two members that share a topic."""
    await brokers.create_topic(topic, PARTITIONS)
    made = [Engine(brokers.bootstrap, group, topics=[topic]) for _ in range(2)]
    await made[0].until(lambda: shares(made) == [PARTITIONS // 2] * 2)
    yield made
    await asyncio.gather(*(engine.driver.close(5.0, "the test is over") for engine in made))


def shares(engines: Engines) -> list[int]:
    return [len(engine.owned) for engine in engines]


async def watch(engines: Engines, over: Callable[[], object]) -> None:
    """Looks for partitions with two owners until something is true."""
    async with asyncio.timeout(60.0):
        while not over():
            common: frozenset[TopicPartition] = engines[0].owned & engines[1].owned
            assert not common
            await asyncio.sleep(0.01)


async def test_a_moved_coordinator_costs_no_partition(brokers: ThreeBrokers, group: str, engines: Engines) -> None:
    before = [engine.driver.ownership for engine in engines]
    await brokers.move_coordinator(group)
    await watch(engines, lambda: all(engine.saw(Recovered) for engine in engines))
    for engine, own in zip(engines, before, strict=True):
        assert not engine.saw(Lost)
        assert engine.driver.ownership.member_id == own.member_id
        assert engine.owned == own.partitions


async def test_a_killed_coordinator_is_replaced(brokers: ThreeBrokers, group: str, engines: Engines) -> None:
    await brokers.kill(await brokers.coordinator_of(group))
    await watch(engines, lambda: all(engine.saw(Recovered) for engine in engines))
    await watch(engines, lambda: shares(engines) == [PARTITIONS // 2] * 2)


async def test_a_frozen_coordinator_is_replaced(brokers: ThreeBrokers, group: str, engines: Engines) -> None:
    node = await brokers.coordinator_of(group)
    await brokers.freeze(node)
    await watch(engines, lambda: all(engine.saw(Recovered) for engine in engines))
    await watch(engines, lambda: shares(engines) == [PARTITIONS // 2] * 2)
    await brokers.thaw(node)
    await engines[0].driver.close(5.0, "closing")
    await watch(engines, lambda: shares(engines) == [0, PARTITIONS])
