"""A commit over a lost connection that reaches the brokers after a newer one, and puts the offset back (I12)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.errors import CommitError, CommitRefusedError
from aioshard.kafka.memory.broker import CommitRequest
from aioshard.records import TopicPartition
from aioshard.testing import TestClient, run
from tests.engine.live_apps import until

ORDERS = TopicPartition("orders", 0)
LOST = CommitError("the connection was lost")


class LateCommit:
    """An app whose second commit is lost on its way, and can still arrive; the third one is acknowledged.

    Attributes:
        starts: How often each record has started.
    """

    def __init__(self, **settings: Any) -> None:
        self.app = App("late", commit_interval=0.1, **settings)
        self.client = TestClient(self.app)
        self.starts: dict[int, int] = {}

        @self.app.consume("orders")
        async def handle(record: Record) -> None:
            self.starts[record.offset] = self.starts.get(record.offset, 0) + 1

    @property
    def committed(self) -> int | None:
        return self.client.committed("orders", 0)

    @property
    def requests(self) -> list[CommitRequest]:
        """All commits of the partition that have reached the brokers in time."""
        return [commit for commit in self.client.broker.commits if ORDERS in commit.offsets]

    async def lose_one(self) -> Callable[[], None]:
        """Publish three records; return the arrival of the commit of the second one."""
        await self.finish(1)
        before = len(self.requests)
        self.client.broker.fail_next_commit(LOST)
        await self.client.publish("orders", b"", partition=0)
        await until(lambda: len(self.requests) > before, look_every=0.01)
        late = self.requests[before]
        await self.finish(1)
        return lambda: self.client.broker.group("late").commit(late.offsets, late.membership)

    async def finish(self, records: int) -> None:
        """Publish records, and wait until they are committed."""
        for _ in range(records):
            await self.client.publish("orders", b"", partition=0)
        end = self.client.broker.log("orders", 0).end
        await until(lambda: self.committed == end, look_every=0.01)

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def live() -> None:
            async with self.client:
                await test()

        run(live())


@pytest.mark.parametrize("settings", [{}, {"assign": {"orders": [0]}}], ids=["member", "manual assignment"])
def test_a_stop_leaves_the_newest_commit(settings: dict[str, Any]) -> None:
    late = LateCommit(**settings)

    async def test() -> None:
        arrive = await late.lose_one()
        arrive()
        assert late.committed == 2, "it has put the offset back"

    late.run(test)

    assert late.committed == 3


def test_a_handed_over_partition_has_its_newest_commit() -> None:
    late = LateCommit()

    async def test() -> None:
        arrive = await late.lose_one()
        arrive()
        late.client.broker.group("late").rebalance()
        await late.finish(1)

    late.run(test)

    assert set(late.starts.values()) == {1}


def test_the_newest_commit_is_repeated_once_nothing_can_arrive_any_more() -> None:
    late = LateCommit()

    async def test() -> None:
        arrive = await late.lose_one()
        await asyncio.sleep(29)
        arrive()
        await asyncio.sleep(2)
        assert late.committed == 3
        repeated = len(late.requests)
        await asyncio.sleep(100)
        assert len(late.requests) == repeated

    late.run(test)


def test_a_newer_commit_is_repeated_only_if_nothing_was_committed_since() -> None:
    late = LateCommit()

    async def test() -> None:
        await late.lose_one()
        for _ in range(31):
            await asyncio.sleep(1)
            await late.finish(1)
        requests = len(late.requests)
        await asyncio.sleep(100)
        assert len(late.requests) == requests

    late.run(test)


def test_a_commit_that_the_brokers_refused_does_not_arrive_later() -> None:
    late = LateCommit()

    async def test() -> None:
        await late.finish(1)
        late.client.broker.fail_next_commit(CommitRefusedError("the group has moved on"))
        await late.finish(1)
        requests = len(late.requests)
        await asyncio.sleep(100)
        assert len(late.requests) == requests

    late.run(test)


def test_a_position_that_was_seeked_to_is_repeated_too() -> None:
    """The late commit is of records that were to run again."""
    late = LateCommit()

    async def test() -> None:
        arrive = await late.lose_one()
        late.app.pause("orders")
        await late.app.seek("orders", 0, 0)
        assert late.committed == 0
        arrive()
        assert late.committed == 2

    late.run(test)

    assert late.committed == 0
