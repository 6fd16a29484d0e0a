"""The inbox examples in killed processes on a real broker: every effect happens once."""

import asyncio
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services.idempotence.processes import Member
from tests.services.idempotence.stores import Store, expected, order
from tests.support.brokers import SharedKafka

CUSTOMERS = 25

ASSIGNED = re.compile(r"is over \(.*, assigned [1-9]")
ASSIGNED_AGAIN = re.compile(r"is over \(the group membership was lost\).*, assigned [1-9]")


class Group:
    """A topic with orders, and the processes that handle them."""

    def __init__(self, kafka: SharedKafka, topic: str, group: str, store: Store, directory: Path) -> None:
        self.kafka = kafka
        self.topic = topic
        self.group = group
        self.store = store
        self._directory = directory
        self._numbers = itertools.count(1)

    async def create(self, partitions: int = 4) -> None:
        await self.kafka.create_topic(self.topic, partitions)

    async def produce(self, count: int, *, create: bool = True) -> None:
        if create:
            await self.create()
        orders = [(b"customer-%d" % (n % CUSTOMERS), order(n + 1, f"street {n}")) for n in range(count)]
        await self.kafka.produce(self.topic, orders)

    def start(self, *arguments: str, **settings: object) -> Member:
        what = {"address": self.store.address, "group": self.group, "topic": self.topic}
        log = self._directory / f"member-{next(self._numbers)}.log"
        return Member(what, log, "--bootstrap-servers", self.kafka.bootstrap, *arguments, **settings)

    async def verify(self) -> None:
        records = await self.kafka.read(self.topic)
        assert self.store.customers() == expected(records)
        assert len(self.store.inbox()) == len(records)
        assert await self.kafka.lag(self.group, self.topic) == 0


@pytest.fixture
def orders(kafka: SharedKafka, topic: str, group: str, store: Store, tmp_path: Path) -> Group:
    return Group(kafka, topic, group, store, tmp_path)


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait for the effect of other processes on a database."""
    async with asyncio.timeout(timeout):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "store",
    ["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgresql, pytest.mark.chaos])],
    indirect=True,
)
async def test_kill_9_between_database_and_offset_commit_applies_each_order_once(orders: Group) -> None:
    await orders.produce(400)
    with orders.start(commit_interval=600, commit_records=None) as first:
        await until(lambda: len(orders.store.inbox()) >= 150)
        first.kill()
    committed = await orders.kafka.committed(orders.group, orders.topic)
    done = len(orders.store.inbox())

    with orders.start("--until-caught-up") as second:
        assert await asyncio.to_thread(second.ended) == 0

    assert set(committed.values()) == {0}, "offsets were committed: the kill came too late"
    assert done >= 150
    await orders.verify()


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_repeated_kill_9_of_two_members_applies_each_order_once(orders: Group) -> None:
    count, rounds = 2_000, 6
    chance = random.Random(7)
    await orders.produce(count)
    members = [orders.start(), orders.start()]
    try:
        for turn in range(rounds):
            await until(lambda turn=turn: len(orders.store.inbox()) >= count * (turn + 1) // (rounds + 1))  # type: ignore[misc]
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            victim = chance.randrange(2)
            members[victim].kill()
            members[victim] = orders.start()
        await orders.kafka.wait_for_lag(orders.group, orders.topic, timeout=60.0)
    finally:
        for member in members:
            member.kill()

    await orders.verify()


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("store", [pytest.param("postgresql", marks=pytest.mark.postgresql)], indirect=True)
async def test_a_member_frozen_beyond_its_session_does_nothing_twice(orders: Group) -> None:
    """SQLite is left out: a process frozen in a transaction keeps its file locked."""
    await orders.create()
    with orders.start() as frozen, orders.start() as other:
        # Otherwise one could do most of the work before the other had anything to lose.
        await until(lambda: ASSIGNED.search(frozen.log) is not None and ASSIGNED.search(other.log) is not None)
        await orders.produce(3_000, create=False)
        await until(lambda: len(orders.store.inbox()) >= 500)
        frozen.freeze()
        at_standstill = len(orders.store.inbox())
        await orders.kafka.wait_for_lag(orders.group, orders.topic, timeout=60.0)
        frozen.thaw()
        await until(lambda: has_rejoined(frozen.log))
        assert [await asyncio.to_thread(member.stop) for member in (frozen, other)] == [0, 0]

    assert at_standstill < 3_000
    await orders.verify()


def has_rejoined(log: str) -> bool:
    """Whether it was given partitions after it had lost them, so that its records in flight have ended."""
    return ASSIGNED_AGAIN.search(log) is not None
