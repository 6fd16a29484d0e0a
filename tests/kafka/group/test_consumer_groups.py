"""Members of the consumer protocol in a real group: who owns what, and how soon."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.driver import GroupDriver
from aioshard.kafka.group.member import Assigned, Ended, Event, Lost, Revoked
from aioshard.kafka.wire.start import new_cluster
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, settings_for
from tests.support.brokers import SharedKafka

pytestmark = pytest.mark.kafka


class Engine:
    """The engine's side of a member: it releases what is revoked, unless it *holds*."""

    def __init__(self, bootstrap: str, group: str, *, rebalance_timeout: float = 30.0, **options: Any) -> None:
        settings = settings_for(bootstrap)
        member = ConsumerMember(random.SystemRandom(), rebalance_timeout=rebalance_timeout, **options)
        self.events: list[Event] = []
        self.holds = False
        self._changed = asyncio.Event()
        self.driver = GroupDriver(
            group, member, lambda: new_cluster(settings), self.handle, rebalance_timeout=rebalance_timeout
        )
        self.driver.start()

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Revoked) and not self.holds:
            self.driver.released(event.life, event.partitions)
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Waits for something that follows from an event; a release has none, so it also looks now and then."""
        async with asyncio.timeout(seconds):
            while not condition():
                try:
                    async with asyncio.timeout(0.05):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    @property
    def owned(self) -> frozenset[TopicPartition]:
        own = self.driver.ownership
        return own.partitions if self.driver.clock() < own.alive_until else frozenset()

    def saw(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


Join = Callable[..., Engine]


@pytest.fixture
async def join(kafka: SharedKafka) -> AsyncIterator[Join]:
    """Makes members, and lets those that are left leave."""
    engines: list[Engine] = []

    def make(group: str, *topics: str, **options: Any) -> Engine:
        engine = Engine(kafka.bootstrap, group, topics=topics, **options)
        engines.append(engine)
        return engine

    yield make
    await asyncio.gather(*(engine.driver.close(5.0, "the test is over", for_good=True) for engine in engines))


def all_of(topic: str, partitions: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(topic, number) for number in range(partitions))


async def until_shared(engines: Collection[Engine], partitions: frozenset[TopicPartition]) -> None:
    """Waits until the members own all partitions, each of them some."""
    first = next(iter(engines))
    await first.until(
        lambda: frozenset().union(*(engine.owned for engine in engines)) == partitions
        and all(engine.owned for engine in engines)
    )


async def test_a_member_joins_shares_and_takes_over(kafka: SharedKafka, join: Join) -> None:
    topic, group = "group-shares", "group-shares"
    await kafka.create_topic(topic, 4)
    one = join(group, topic)
    began = time.monotonic()
    await until_shared([one], all_of(topic, 4))
    print("first", time.monotonic() - began)
    began = time.monotonic()
    two = join(group, topic)
    await until_shared([one, two], all_of(topic, 4))
    print("second", time.monotonic() - began)
    assert not one.owned & two.owned
    assert not one.saw(Lost)
    began = time.monotonic()
    await two.driver.close(5.0, "closing")
    print("closed", time.monotonic() - began)
    assert [event.code for event in two.saw(Ended)] == [0]
    assert not two.driver.is_alive
    await until_shared([one], all_of(topic, 4))
    print("back", time.monotonic() - began)
    print([ (type(e).__name__, getattr(e,'code','')) for e in one.events])
