"""The producer on three brokers: leaders move, die and hang while it publishes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.settings import Settings
from tests.support.proxies import PRODUCE
from tests.support.three_brokers import ThreeBrokers


@pytest.fixture
async def producer(brokers: ThreeBrokers) -> AsyncIterator[KafkaProducer]:
    producer = KafkaProducer(Settings(bootstrap_servers=brokers.proxied_bootstrap))
    yield producer
    await producer.close()


class Publishing:
    """Publishes numbers to a partition, a few at a time, until it is ended."""

    def __init__(self, producer: KafkaProducer, topic: str, partition: int = 0) -> None:
        self.offsets: list[int] = []
        self.ended = False
        self._producer = producer
        self._topic = topic
        self._partition = partition

    async def run(self) -> None:
        number = 0
        while not self.ended:
            numbers = range(number, number + 5)
            number = numbers.stop
            self.offsets += await asyncio.gather(*(self._publish(each) for each in numbers))

    async def _publish(self, number: int) -> int:
        return await self._producer.publish(Message(self._topic, b"%d" % number, partition=self._partition))

    async def until(self, count: int) -> None:
        """Return when *count* messages are acknowledged."""
        while len(self.offsets) < count:  # noqa: ASYNC110 - it publishes all the time
            await asyncio.sleep(0.01)


async def assert_each_once_in_order(brokers: ThreeBrokers, topic: str, publishing: Publishing) -> None:
    values = [int(record.value or b"") for record in await brokers.read(topic)]
    assert values == list(range(len(publishing.offsets)))
    assert publishing.offsets == values


@pytest.mark.timeout(240)
async def test_messages_follow_a_leader_that_moves(brokers: ThreeBrokers, topic: str, producer: KafkaProducer) -> None:
    await brokers.create_topic(topic)
    publishing = Publishing(producer, topic)
    async with asyncio.TaskGroup() as group:
        group.create_task(publishing.run())
        await publishing.until(50)
        for _ in range(4):
            await brokers.move_leader(topic)
            await publishing.until(len(publishing.offsets) + 50)
        publishing.ended = True
    await assert_each_once_in_order(brokers, topic, publishing)


@pytest.mark.timeout(240)
async def test_messages_survive_a_leader_that_dies(brokers: ThreeBrokers, topic: str, producer: KafkaProducer) -> None:
    await brokers.create_topic(topic)
    leader = await brokers.leader_of(topic)
    assert leader is not None
    publishing = Publishing(producer, topic)
    async with asyncio.TaskGroup() as group:
        group.create_task(publishing.run())
        await publishing.until(50)
        await brokers.kill(leader)
        await publishing.until(len(publishing.offsets) + 50)
        publishing.ended = True
    await brokers.start(leader)
    await assert_each_once_in_order(brokers, topic, publishing)


@pytest.mark.timeout(240)
async def test_a_request_that_hangs_delays_no_messages_for_other_brokers(
    brokers: ThreeBrokers, topic: str, producer: KafkaProducer
) -> None:
    new = f"{topic}-new"
    await brokers.create_topic(topic, assignment={0: [1, 2], 1: [2, 1]})
    await brokers.create_topic(new, assignment={0: [1, 2]})
    for partition in range(2):
        await producer.publish(Message(topic, b"0", partition=partition))
    held = brokers.proxies.hold(node=2, api_key=PRODUCE)
    hanging = asyncio.create_task(producer.publish(Message(topic, b"1", partition=1)))
    await held.met.wait()

    publishing = Publishing(producer, new)
    async with asyncio.TaskGroup() as group:
        group.create_task(publishing.run())
        await publishing.until(500)
        publishing.ended = True
    assert not hanging.done()
    held.lift()

    assert await hanging == 1
    await assert_each_once_in_order(brokers, new, publishing)
