"""Manual assignment on the in-memory broker."""

import asyncio
from typing import Any

import pytest

from aioshard import App, Record, TopicPartition
from aioshard.errors import ClientLostError, GroupHasMembersError, StartError, StateError
from aioshard.testing import InMemoryBroker, TestClient, run


def app_of(seen: list[tuple[int, int]], assign: Any, group: str = "billing") -> App:
    app = App(group, assign=assign)

    @app.consume("orders")
    async def on_order(record: Record) -> None:
        await asyncio.sleep(0.01)
        seen.append((record.partition, record.offset))

    return app


async def publish(client: TestClient, *partitions: int) -> None:
    for partition in partitions:
        await client.publish("orders", b"paid", partition=partition)


def test_only_assigned_partitions_are_read_and_committed() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        async with TestClient(app_of(seen, {"orders": [1, 3]})) as client:
            await publish(client, 0, 1, 1, 2, 3)
            await client.settle()

            assert client.app.assignment() == (TopicPartition("orders", 1), TopicPartition("orders", 3))
            assert [client.committed("orders", number) for number in range(4)] == [None, 2, None, 1]
            assert client.group.members == ()
            statistics = client.app.statistics()
            assert (statistics.state, statistics.member_id, statistics.rebalances) == ("running", None, 1)
            assert all(commit.owned for commit in client.broker.commits)

    run(scenario())
    assert sorted(seen) == [(1, 0), (1, 1), (3, 0)]


def test_the_next_run_resumes_at_the_commits() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        broker = InMemoryBroker()
        for _ in range(2):
            async with TestClient(app_of(seen, {"orders": [1]}), broker=broker) as client:
                await publish(client, 1, 1)
                await client.settle()

    run(scenario())
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_lost_client_is_rebuilt_with_the_same_partitions() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        async with TestClient(app_of(seen, {"orders": [1]})) as client:
            await publish(client, 1)
            await client.settle()
            before = client.transports[-1].membership()
            client.transports[-1].kill(ClientLostError("cut"))
            await publish(client, 1)
            await client.settle()

            assert len(client.transports) == 2
            assert client.transports[-1].membership() != before, (
                "an answer of one life must not pass for one of the next"
            )
            assert client.app.assignment() == (TopicPartition("orders", 1),)
            assert client.app.statistics().client_losses == 1

    run(scenario())
    assert seen == [(1, 0), (1, 1)]


def test_a_missing_partition_ends_the_start() -> None:
    async def scenario() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 2)
        with pytest.raises(StartError, match=r"'orders' has partitions 0 to 1 and not 5"):
            async with TestClient(app_of([], {"orders": [0, 5]}), broker=broker):
                raise AssertionError

    run(scenario())


def test_a_missing_topic_is_created_with_enough_partitions() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        async with TestClient(app_of(seen, {"orders": [9]})) as client:
            await publish(client, 9)
            await client.settle()

    run(scenario())
    assert seen == [(9, 0)]


def test_a_group_with_members_ends_the_start() -> None:
    async def scenario() -> None:
        broker = InMemoryBroker()
        async with TestClient(app_of([], None), broker=broker):
            with pytest.raises(GroupHasMembersError, match=r"group 'billing' has members .*manual assignment"):
                async with TestClient(app_of([], {"orders": [0]}), broker=broker):
                    raise AssertionError

    run(scenario())


def test_members_that_join_later_end_the_app_at_its_next_commit() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        broker = InMemoryBroker()
        async with TestClient(app_of(seen, {"orders": [0]}), broker=broker) as client:
            async with TestClient(app_of([], None), broker=broker):
                await publish(client, 0)
                with pytest.raises(GroupHasMembersError, match=r"group 'billing' has members"):
                    await asyncio.wait_for(client.app.running_engine().failed, 5)
            assert client.app.statistics().state == "failed"

    run(scenario())
    assert seen == [(0, 0)]


def test_a_rebalance_cannot_be_requested() -> None:
    async def scenario() -> None:
        async with TestClient(app_of([], {"orders": [0]})) as client:
            with pytest.raises(StateError, match="with assign no rebalance moves partitions"):
                await client.revoke("orders", 0)
            with pytest.raises(StateError, match="with assign no rebalance moves partitions"):
                await client.assign("orders", 0)

    run(scenario())


def test_a_manual_assignment_can_seek() -> None:
    seen: list[tuple[int, int]] = []

    async def scenario() -> None:
        async with TestClient(app_of(seen, {"orders": [0]})) as client:
            await publish(client, 0, 0)
            await client.settle()
            await client.app.seek("orders", 0, 1)
            await client.settle()

    run(scenario())
    assert seen == [(0, 0), (0, 1), (0, 1)]
