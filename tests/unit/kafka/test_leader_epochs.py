"""A member that commits and starts: the leader epoch travels with the offset, and tells what the cluster has lost.

The brokers are models on a network in memory, with virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard.kafka.group.member import Ownership
from aioshard.kafka.group.transport import MemberTransport
from aioshard.kafka.wire.requests import OFFSET_FOR_LEADER_EPOCH
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import reach
from aioshard.ports import Allowance, Committed, FetchedBatch, Membership
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster, ModelLog
from tests.support.model_group import ModelGroup

ORDERS = TopicPartition("orders", 0)
US = Membership("us", 4)


class World:
    """A log, a member that has it, and the offsets of the group."""

    def __init__(self, model: ModelCluster, group: ModelGroup, log: ModelLog) -> None:
        self.model = model
        self.group = group
        self.log = log
        model.brokers[1].on(OFFSET_FOR_LEADER_EPOCH, self.answer)
        self.end_of_epoch: tuple[int, int] | None = None
        """The answer about an epoch: the epoch, and where it ends. None for the truth."""
        transport: Any = MemberTransport(model.settings, "billing")
        ownership = Ownership(0, US.member_id, US.generation, frozenset({ORDERS}), 1e9)
        transport._driver = SimpleNamespace(ownership=ownership, clock=lambda: 0.0, is_alive=False)
        transport._membership = US
        transport._lifetime.is_started = True
        self.transport = transport

    def answer(self, request: Received) -> None:
        """Says where an epoch ends."""
        (topic,) = request.values.topics
        (part,) = topic.partitions
        epoch, end = self.end_of_epoch or self.log.epoch_end(part.epoch) or (-1, -1)
        answer = {"error": 0, "partition": part.partition, "epoch": epoch, "end": end}
        request.reply(topics=[{"topic": topic.topic, "partitions": [answer]}])

    async def start(self) -> None:
        await reach(self.transport._cluster, self.model.settings, {ORDERS.topic})
        self.transport._fetcher.start()
        self.transport._fetcher.add([ORDERS])

    async def read(self, count: int) -> None:
        """Take *count* records."""
        taken = 0
        while taken < count:
            for found in await self.transport.poll(lambda _: Allowance(count, 1 << 20), 1.0):
                assert isinstance(found, FetchedBatch), found
                taken += len(found.records)

    @property
    def fetched(self) -> list[Any]:
        """The parts of all fetches about the partition, in order."""
        return [part for fetch in self.model.fetches() for topic in fetch.topics for part in topic.partitions]

    def write(self, *epochs: int) -> None:
        """Append a record of each of these epochs."""
        for epoch in epochs:
            self.log.epoch = epoch
            self.log.append(b"")

    async def stored(self, offset: int, epoch: int) -> dict[TopicPartition, Committed]:
        """Find an offset that was committed with an epoch."""
        self.group.committed = {ORDERS: CommittedOffset(offset, epoch, "")}
        commits: dict[TopicPartition, Committed] = await self.transport.committed([ORDERS])
        return commits

    def begin(self, offset: int) -> None:
        self.transport.seek(ORDERS, offset)
        self.transport.resume([ORDERS])


def scenario(test: Callable[[World], Awaitable[None]]) -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        (log,) = model.create("orders")
        world = World(model, ModelGroup(model), log)
        log.epoch = 7
        await world.start()
        try:
            async with asyncio.timeout(1_000):
                await test(world)
        finally:
            await world.transport._fetcher.close()
            await world.transport._cluster.close()
            await model.close()

    run_on_network(live)


# Commits ----------------------------------------------------------------------------------


def test_a_commit_carries_the_epoch_of_the_newest_record_that_was_read_and_not_that_of_the_leader() -> None:
    async def test(world: World) -> None:
        world.write(3, 5)
        world.log.epoch = 7
        await world.transport._cluster.look_up([ORDERS.topic])
        world.begin(0)
        await world.read(2)
        await world.transport.commit({ORDERS: Committed(2, "")}, US)
        assert world.group.committed == {ORDERS: CommittedOffset(2, 5, "")}

    scenario(test)


def test_a_commit_carries_the_epoch_that_the_group_has_now_and_not_that_of_the_assignment() -> None:
    """The brokers raise it whenever the group changes, and refuse commits under an older one."""

    async def test(world: World) -> None:
        world.write(3)
        world.transport._driver.ownership = Ownership(0, US.member_id, 9, frozenset({ORDERS}), 1e9)
        await world.transport.commit({ORDERS: Committed(1, "")}, US)
        [(request, _)] = world.group.commits
        assert (request.member, request.generation) == (US.member_id, 9)

    scenario(test)


# Starts -----------------------------------------------------------------------------------


def test_the_epoch_of_a_commit_says_what_the_cluster_has_lost_while_nobody_read() -> None:
    """An unclean election: the log that was read to 4 in epoch 5 had only 3 records, and is longer now."""

    async def test(world: World) -> None:
        world.write(5, 5, 5, 7, 7, 7)
        commits = await world.stored(4, 5)
        assert await world.transport.truncations(commits) == {ORDERS: 3}

    scenario(test)


def test_a_commit_without_an_epoch_does_not_hold_back_its_partition() -> None:
    """Services that know no epochs, and old clients, store none."""

    async def test(world: World) -> None:
        world.write(5, 7)
        commits = await world.stored(1, -1)
        assert await world.transport.truncations(commits) == {ORDERS: None}
        assert not world.group.received(OFFSET_FOR_LEADER_EPOCH)

    scenario(test)


@pytest.mark.parametrize(
    "answer", [(-1, -1), (6, 2)], ids=["the leader has no history of the epoch", "it answers about a newer one"]
)
def test_a_leader_that_does_not_know_the_epoch_has_lost_nothing(answer: tuple[int, int]) -> None:
    async def test(world: World) -> None:
        world.write(5, 5, 5, 7)
        world.end_of_epoch = answer
        commits = await world.stored(3, 5)
        assert await world.transport.truncations(commits) == {ORDERS: None}

    scenario(test)


def test_a_log_that_is_shorter_without_an_election_is_another_one() -> None:
    """Its topic was created again."""

    async def test(world: World) -> None:
        world.write(7)
        commits = await world.stored(4, 7)
        assert await world.transport.truncations(commits) == {ORDERS: None}

    scenario(test)


def test_the_epoch_of_another_offset_says_nothing_about_a_commit() -> None:
    """We may have read on since: records beyond the commit do not belong to it."""

    async def test(world: World) -> None:
        world.write(5, 5, 5, 7)
        await world.stored(4, 5)
        assert await world.transport.truncations({ORDERS: Committed(2, "")}) == {ORDERS: None}

    scenario(test)


def test_the_first_fetch_names_the_epoch_of_the_commit() -> None:
    """The leader then says itself if its log parts before that."""

    async def test(world: World) -> None:
        world.write(3, 5, 5)
        await world.stored(2, 5)
        world.begin(2)
        await world.read(1)
        first, *_ = world.fetched
        assert (first.offset, first.fetched_epoch) == (2, 5)

    scenario(test)


def test_a_partition_that_comes_back_continues_with_the_epoch_that_was_read() -> None:
    async def test(world: World) -> None:
        world.write(3, 5)
        world.begin(0)
        await world.read(2)
        world.transport._remove([ORDERS])
        fetched = len(world.fetched)
        world.transport._fetcher.add([ORDERS])
        world.write(6)
        world.begin(2)
        await world.read(1)
        again = world.fetched[fetched]
        assert (again.offset, again.fetched_epoch) == (2, 5)

    scenario(test)
