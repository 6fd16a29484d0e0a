"""Events between the revocation of a partition and its next assignment."""

import asyncio

from aioshard import App, Record, TopicPartition
from aioshard.engine.epoch import Gate
from aioshard.errors import CommitError, OffsetRegressionError
from aioshard.testing import TestClient, run

NAME = TopicPartition("orders", 0)


def test_a_late_commit_does_not_overwrite_a_moved_offset() -> None:
    """The commit of the hand-over failed, and offsets were set before we could look at them again (I9)."""
    app = App("handing", drain_timeout=1.0, commit_timeout=1.0)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        client = TestClient(app, latency=lambda operation: 0.5 if operation == "log ranges" else 0.0)
        client.broker.create_topic("orders", 1)
        async with client:
            for _ in range(5):
                await client.publish("orders", b"")
            await client.settle()
            assert app._engine is not None
            (partition,) = app._engine.rebalance.partitions
            client.broker.available = False
            partition.tracker.track([], [], 6)  # more is done than the client could commit
            for _ in range(5):
                client.broker.publish("orders", b"")
            client.group.rebalance()
            await client.broker.until(lambda: not client.group.rebalancing)
            client.group.commit_from_outside({NAME: 8})
            client.broker.available = True
            await client.settle()
            sent = [request.offsets[NAME].offset for request in client.broker.commits if NAME in request.offsets]
            assert 6 not in sent
            assert client.committed("orders", 0) == 10

    run(test())


def test_a_partition_being_resolved_does_not_open_during_a_revoke() -> None:
    app = App("handing", drain_timeout=5.0)
    runs: list[tuple[int, float]] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:
        runs.append((record.partition, asyncio.get_running_loop().time()))
        if record.partition == 0:
            await asyncio.sleep(4.0)

    async def test() -> None:
        slow = [0.0]
        client = TestClient(app, latency=lambda operation: slow[0] if operation == "log ranges" else 0.0)
        client.broker.create_topic("orders", 2)
        async with client:
            assert app._engine is not None
            rebalance = app._engine.rebalance
            await client.publish("orders", b"", partition=0)
            await asyncio.sleep(0.5)
            slow[0] = 1.0
            lost = rebalance.partitions[TopicPartition("orders", 1)]
            rebalance.reset_position(lost, OffsetRegressionError(1, 2))
            await client.publish("orders", b"", partition=1)
            await asyncio.sleep(0.1)
            client.group.rebalance()
            await asyncio.sleep(2.5)
            assert app._engine.client.transport is not None
            assert [owned.gate for owned in rebalance.partitions] == [Gate.CLOSED]
            assert [partition for partition, _ in runs] == [0], "the hand-over is under way"
            await client.settle(timeout=20.0)
            assert [partition for partition, _ in runs] == [0, 1]

    run(test())


def test_runs_of_a_lost_partition_are_cancelled() -> None:
    app = App("handing", shutdown_timeout=2.0)
    cancelled: list[int] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:
        if not cancelled:
            try:
                await asyncio.sleep(1_000.0)
            except asyncio.CancelledError:
                cancelled.append(record.offset)
                raise

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await asyncio.sleep(1.0)
            client.group.lose()
            await client.settle()
            assert cancelled == [0]

    run(test())


def test_an_uncommitted_first_position_is_dropped_at_a_rebalance() -> None:
    """By the time that it could be, the group may have another one (I9)."""
    app = App("handing")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        client = TestClient(app, latency=lambda operation: 1.0 if operation == "log ranges" else 0.0)
        client.broker.create_topic("orders", 1)
        async with client:
            for _ in range(10):
                await client.publish("orders", b"")
            await client.settle()
            client.group.commit_from_outside({NAME: None})
            client.group.lose()
            for _ in range(10):
                client.fail_next_commit(CommitError("no time"))
            await asyncio.sleep(1.5)  # the position was resolved, and every commit of it fails
            assert app.statistics().commit_failures
            client.group.rebalance()
            await client.broker.until(lambda: not client.group.rebalancing)
            before = len(client.broker.commits)
            client.group.commit_from_outside({NAME: 8})
            await client.settle()
            sent = [request.offsets[NAME].offset for request in client.broker.commits[before:] if request.applied]
            assert sent == [10]

    run(test())
