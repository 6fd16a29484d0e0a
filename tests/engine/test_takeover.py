"""How the next owner uses metadata stored with a committed offset."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from aioshard import App, Record
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, run
from tests.engine.live_apps import until

TP = TopicPartition("orders", 0)


class Deployment:
    """One partition, and owners that come one after the other."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        self.ran: list[int] = []

    def publish(self, count: int) -> None:
        for number in range(count):
            self.broker.publish("orders", b"", key=b"%d" % number)

    def app(self, policy: Literal["earliest", "latest", "error"] = "earliest") -> App:
        app = App("group", auto_offset_reset=policy, commit_interval=0.1)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            self.ran.append(record.offset)

        return app

    @asynccontextmanager
    async def owner(
        self,
        policy: Literal["earliest", "latest", "error"] = "earliest",
        latency: Callable[[str], float] | None = None,
    ) -> AsyncIterator[App]:
        app = self.app(policy)
        async with app.started(lambda: InMemoryTransport(self.broker, "group", latency=latency)):
            await until(lambda: self.broker.committed("group", "orders", 0) == self.broker.log("orders", 0).end)
            yield app

    @property
    def commit_metadata(self) -> CommitMetadata:
        found = self.broker.group("group").committed(TP)
        assert found is not None
        return CommitMetadata.read(found.metadata, found.offset)


def test_the_next_owner_keeps_the_first_commit_marker() -> None:
    """Else a member that is slower to begin on another partition would take the group for an old one."""

    async def test() -> None:
        world = Deployment()
        world.publish(5)
        async with world.owner("latest"):
            first = world.commit_metadata
        assert first.first is not None
        assert first.first.partitions == 1
        world.publish(5)

        async with world.owner("latest"):
            assert world.commit_metadata == first
        assert world.ran == [5, 6, 7, 8, 9]

    run(test())


def test_metadata_of_an_offset_outside_the_log_is_ignored() -> None:
    """A recreated topic whose first records were deleted: nobody has run the others."""

    async def test() -> None:
        world = Deployment()
        world.publish(20)
        world.broker.recreate("orders", forget_commits=False)
        world.publish(100)
        world.broker.log("orders", 0).truncate_before(10)
        text = CommitMetadata(finished=(Run(4, 90),)).text(3)
        world.broker.group("group").commit_from_outside({TP: 3}, metadata=text)

        async with world.owner():
            assert sorted(world.ran) == list(range(10, 100))

    run(test())


@pytest.mark.parametrize("policy", ["earliest", "latest"])
@pytest.mark.parametrize("forgotten", [True, False])
def test_a_recreated_topic_is_read_from_its_start_even_if_the_position_is_in_its_log(
    policy: Literal["earliest", "latest"], *, forgotten: bool
) -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(5)
        async with world.owner(policy) as app:
            await until(lambda: world.broker.committed("group", "orders", 0) is not None)
            world.ran.clear()
            world.broker.recreate("orders", forget_commits=forgotten)
            world.publish(20)
            await until(lambda: world.broker.committed("group", "orders", 0) == 20)
            assert app.statistics().partitions[0].committed == 20
        assert sorted(world.ran) == list(range(20))

    run(test())


@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_a_commit_under_way_while_a_topic_is_recreated_skips_nothing_of_the_new_one(
    policy: Literal["earliest", "latest"],
) -> None:
    """It names no topic id, so it is stored for the new topic, before the app asks for the offset there."""

    async def test() -> None:
        world = Deployment()
        world.publish(5)
        sent = asyncio.Event()

        def latency(operation: str) -> float:
            if operation == "commit":
                sent.set()
            return {"commit": 1.0, "committed": 2.0}.get(operation, 0.0)

        async with world.owner(policy, latency):
            world.ran.clear()
            sent.clear()
            world.publish(1)
            await sent.wait()
            world.broker.recreate("orders")
            world.publish(20)
            await until(lambda: world.broker.committed("group", "orders", 0) == 20)
        assert any(request.applied and request.offsets[TP].offset == 6 for request in world.broker.commits)
        assert sorted(world.ran) == sorted([5, *range(20)])

    run(test())


def test_a_recreated_topic_ends_an_app_that_may_not_choose_a_position() -> None:
    async def test() -> None:
        world = Deployment()
        world.publish(5)
        world.broker.group("group").commit_from_outside({TP: 0})
        async with world.owner("error") as app:
            world.broker.recreate("orders")
            world.publish(20)
            await until(lambda: app.statistics().state == "failed")
            assert "deleted and created again" in app.explain()
        assert sorted(world.ran) == [0, 1, 2, 3, 4]

    run(test())


def test_a_new_partition_of_a_recreated_topic_starts_at_its_beginning() -> None:
    """The brokers have forgotten what the group had committed there; who consumed it all the time has not."""

    async def test() -> None:
        world = Deployment()
        world.publish(5)
        async with world.owner("latest") as app:
            world.broker.recreate("orders")
            world.broker.add_partitions("orders", 1)
            for number in range(3):
                world.broker.publish("orders", b"", key=b"%d" % number, partition=1)
            await until(lambda: len(app.statistics().partitions) == 2)
            await until(lambda: world.broker.committed("group", "orders", 1) == 3)
        assert sorted(world.ran) == [0, 1, 2]

    run(test())
