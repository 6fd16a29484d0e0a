"""Rate limits of a whole consumer group: each member has the share of the partitions that it owns."""

import asyncio
from contextlib import AsyncExitStack
from typing import cast

import pytest

from aioshard import App, Limit, PartitionInfo, Record, TopicPartition
from aioshard.errors import AuthorizationError
from aioshard.ports import Transport
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import engine_of, publish, until
from tests.engine.starts import Starts, keeps

LIMIT = Limit("stripe", 10.0, burst=4, per="group")


def with_two_topics() -> InMemoryBroker:
    """A broker with two topics of four partitions each."""
    broker = InMemoryBroker()
    broker.create_topic("orders", 4)
    broker.create_topic("refunds", 4)
    return broker


def make(starts: Starts, *topics: str, limit: Limit = LIMIT, pattern: str | None = None) -> App:
    app = App("paced", auto_offset_reset="earliest", metadata_max_age=1.0)

    @app.consume(*topics, pattern=pattern, limit=limit)
    async def handle(record: Record) -> None:
        starts.note(record)

    return app


def share_of(app: App) -> float | None:
    (limit,) = app.statistics().limits
    return limit.share


def publish_all(broker: InMemoryBroker, count: int, *, partitions: int = 4) -> None:
    for number in range(count):
        broker.publish("orders", b"", key=b"%d" % number, partition=number % partitions)


def test_a_group_keeps_its_limit_while_members_join_and_leave() -> None:
    starts = Starts()
    seconds = 0.0

    async def test() -> None:
        nonlocal seconds
        broker = InMemoryBroker(partitions=6)
        broker.create_topic("orders", 6)
        publish_all(broker, 6_000, partitions=6)
        began = asyncio.get_running_loop().time()
        async with AsyncExitStack() as members:
            apps = [make(starts, "orders") for _ in range(3)]
            await members.enter_async_context(TestClient(apps[0], broker=broker))
            await asyncio.sleep(30.0)
            assert share_of(apps[0]) == 1.0
            for app in apps[1:]:
                await members.enter_async_context(TestClient(app, broker=broker))
                await asyncio.sleep(30.0)
            assert [share_of(app) for app in apps] == [1 / 3] * 3
            async with TestClient(make(starts, "orders"), broker=broker):
                await asyncio.sleep(30.0)
            await asyncio.sleep(30.0)
        seconds = asyncio.get_running_loop().time() - began

    run(test())
    assert keeps(LIMIT, starts.all, members=4)
    assert len(starts.all) >= 0.98 * 10.0 * seconds


def test_a_member_without_partitions_uses_nothing_and_joins_without_a_burst() -> None:
    first, second = Starts(), Starts()

    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 1)
        publish_all(broker, 200, partitions=1)
        apps = [make(first, "orders"), make(second, "orders")]
        async with TestClient(apps[0], broker=broker):
            async with TestClient(apps[1], broker=broker):
                await asyncio.sleep(8.0)
                shares = [share_of(app) for app in apps]
                assert sorted(shares, key=float) == [0.0, 1.0]  # type: ignore[arg-type]
            await asyncio.sleep(8.0)

    run(test())
    together = sorted(first.all + second.all)
    assert keeps(LIMIT, together, members=2)
    assert len(together) == pytest.approx(160, abs=3)


def test_the_partitions_of_all_topics_of_all_handlers_count() -> None:
    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 4)
        broker.create_topic("refunds", 2)
        broker.create_topic("other-1", 2)
        app = make(Starts(), "orders")
        app.consume("refunds", limit=LIMIT)(_handle)
        app.consume(pattern="other-.*", limit=LIMIT)(_handle)
        app.consume("unlimited")(_handle)
        async with TestClient(app, broker=broker) as client:
            assert share_of(app) == 1.0
            await client.revoke("refunds", 0)
            await until(lambda: share_of(app) == 7 / 8)
            await client.revoke("other-1", 1)
            await until(lambda: share_of(app) == 6 / 8)
            await client.revoke("refunds", 1)
            await until(lambda: share_of(app) == 5 / 8)
            await client.revoke("unlimited", 0)
            await client.assign("refunds", 0)
            await until(lambda: share_of(app) == 6 / 8)

    run(test())


def test_new_partitions_of_other_members_are_taken_up_with_the_metadata() -> None:
    async def test() -> None:
        broker = with_two_topics()
        app = make(Starts(), "orders", "refunds")
        async with TestClient(app, broker=broker) as client:
            await client.revoke("refunds", 0)
            await until(lambda: share_of(app) == 7 / 8)
            broker.group("paced").withheld |= {TopicPartition("refunds", number) for number in range(4, 8)}
            broker.add_partitions("refunds", 4)
            await until(lambda: share_of(app) == 7 / 12, timeout=2.0)

    run(test())


def test_a_partition_counts_until_it_is_drained() -> None:
    """A smaller share at the beginning of a drain would slow down the records that the drain waits for."""
    app = App("paced", auto_offset_reset="earliest")
    shares: list[float | None] = []
    ends = asyncio.Event()

    @app.consume("orders", limit=LIMIT)
    async def handle(_: Record) -> None:
        await ends.wait()
        await asyncio.sleep(1.0)
        engine = engine_of(app)
        engine.shares.divide(engine.rebalance.partitions)  # as when another partition ends
        shares.append(share_of(app))

    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 2)
        async with TestClient(app, broker=broker) as client:
            await publish(client, 1)
            await until(lambda: app.statistics().handlers[0].busy == 1)
            ends.set()
            await client.revoke("orders", 0)
            await until(lambda: shares)
            await until(lambda: share_of(app) == 0.5)

    run(test())
    assert shares == [0.5], "the other partition is idle"


def test_a_topic_that_is_denied_holds_back_no_other() -> None:
    async def test() -> None:
        broker = with_two_topics()
        app = make(Starts(), "orders", "refunds")
        async with TestClient(app, broker=broker) as client:
            await client.revoke("orders", 0)
            await until(lambda: share_of(app) == 7 / 8)
            engine = engine_of(app)
            await engine.shares.look_up(cast("Transport", _DeniesRefunds()), 1.0)
            engine.shares.divide(engine.rebalance.partitions)
            assert share_of(app) == 7 / 10

    run(test())


class _DeniesRefunds:
    """A client whose user may not see topic refunds, and to which orders seems to have six partitions."""

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        if topic == "refunds":
            raise AuthorizationError("not allowed")
        return {number: PartitionInfo(number) for number in range(6)}


def test_a_member_takes_in_only_what_its_share_lets_start_soon() -> None:
    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 10)
        publish_all(broker, 2_000, partitions=10)
        app = make(Starts(), "orders")
        app.configure(assign={"orders": [0]})
        async with TestClient(app, broker=broker):
            await asyncio.sleep(5.0)
            assert app.statistics().buffered_records <= 2 * 10

    run(test())


@pytest.mark.parametrize("event", ["revoked", "lost"])
def test_a_share_ends_before_the_group_may_give_the_partitions_to_others(event: str) -> None:
    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 4)
        app = make(Starts(), "orders")
        async with TestClient(app, broker=broker):
            rebalance = engine_of(app).rebalance
            names = [TopicPartition("orders", number) for number in range(3)]
            if event == "revoked":
                await rebalance.revoked([*names, TopicPartition("orders", 3)])
                assert share_of(app) == 0.0
            else:
                rebalance.lost(names)
                assert share_of(app) == 1 / 4

    run(test())


def test_a_manual_assignment_has_the_share_of_its_partitions_also_when_the_topic_grows() -> None:
    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 8)
        app = make(Starts(), "orders")
        app.configure(assign={"orders": [0, 3]})
        async with TestClient(app, broker=broker):
            assert share_of(app) == 2 / 8
            broker.add_partitions("orders", 2)  # nothing rebalances
            await until(lambda: share_of(app) == 2 / 10, timeout=2.0)

    run(test())


def test_a_lost_client_loses_the_share_and_gains_no_token() -> None:
    starts = Starts()

    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 4)
        publish_all(broker, 400)
        async with TestClient(make(starts, "orders"), broker=broker):
            for _ in range(10):
                await asyncio.sleep(2.0)
                broker.group("paced").lose()

    run(test())
    assert keeps(LIMIT, starts.all)
    assert len(starts.all) >= 0.8 * 20 * 10


def test_a_share_of_the_group_is_explained() -> None:
    async def test() -> None:
        broker = InMemoryBroker()
        broker.create_topic("orders", 4)
        app = make(Starts(), "orders", limit=Limit("stripe", 0.1, burst=1, per="group"))
        app.consume("refunds", limit=Limit("stripe", 0.1, burst=1, per="group"))(_handle)
        async with TestClient(app, broker=broker) as client:
            await publish(client, 5)
            await asyncio.sleep(1.0)
            heads = [partition.head for partition in app.diagnose().partitions]
            (head,) = [head for head in heads if head is not None]
            assert head.state == "limited"
            for part in ("'stripe'", "0.1 per second", "group", "_handle", "in 9 s"):
                assert part in head.reason
            (limit,) = app.statistics().limits
            assert (limit.share, limit.waiting) == (1.0, 1)

    run(test())


async def _handle(record: Record) -> None: ...
