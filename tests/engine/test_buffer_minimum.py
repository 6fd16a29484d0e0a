"""A partition that cannot advance keeps a minimum of the memory and evicts the rest (I6)."""

import asyncio

from aioshard import App, Record, Retry, TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run

PER_PARTITION = 900


def published(broker: InMemoryBroker, partitions: int) -> None:
    broker.create_topic("orders", partitions)
    for partition in range(partitions):
        for number in range(PER_PARTITION):
            broker.publish("orders", b"%d" % number, key=b"hot" if number % 10 else b"other", partition=partition)


def test_halted_partitions_leave_most_memory_to_the_others() -> None:
    """However many records they had buffered before they halted."""
    app = App("memory", max_buffered_records=1000, shutdown_timeout=2.0)
    halted: set[int] = set()

    @app.consume("orders", shard_by=lambda record: (record.partition, record.key), retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.001)
        if record.partition in halted and record.key == b"hot":
            raise ValueError

    async def test() -> None:
        broker = InMemoryBroker()
        published(broker, 4)
        halted.update({0, 1, 2})
        async with TestClient(app, broker=broker):
            await asyncio.sleep(30.0)
            statistics = app.statistics()
            stuck = [partition for partition in statistics.partitions if partition.partition in halted]
            assert [partition.incomplete > 0 for partition in stuck] == [True] * 3
            assert all(partition.buffered_records <= 20 for partition in stuck), stuck
            assert statistics.buffered_records <= 60
            assert "minimum share" in str(stuck[0].paused) or "evicted" in app.explain()
            assert broker.committed("memory", "orders", 3) == PER_PARTITION

    run(test())


def test_evicted_records_are_processed_once_in_order_when_the_partition_resumes() -> None:
    app = App("memory", max_buffered_records=1000, stuck_after=5.0, shutdown_timeout=2.0, auto_offset_reset="earliest")
    release = asyncio.Event()
    runs: list[int] = []
    most_back = 0

    @app.consume("orders", concurrency=8)
    async def handle(record: Record) -> None:
        if record.offset == 1:
            await release.wait()
        runs.append(record.offset)

    async def test() -> None:
        nonlocal most_back
        broker = InMemoryBroker(clock=lambda: 0.0)
        published(broker, 1)
        async with app.started(lambda: InMemoryTransport(broker, "memory")):
            await asyncio.sleep(20.0)
            partition = app.statistics().partitions[0]
            most_back = partition.incomplete - partition.buffered_records
            assert partition.buffered_records <= 20
            release.set()
            async with asyncio.timeout(60.0):
                await broker.until(lambda: broker.committed("memory", "orders", 0) == PER_PARTITION)

    run(test())

    assert most_back > 100, "nothing was given back: the test shows nothing"
    assert sorted(runs) == list(range(PER_PARTITION)), "each record once"
    hot = [offset for offset in runs if offset % 10]
    assert hot == sorted(hot)


def test_a_record_waiting_for_room_is_dropped_with_its_epoch() -> None:
    """Otherwise the requested room would be kept free forever."""
    app = App("memory", max_buffered_bytes=24_000, shutdown_timeout=2.0, drain_timeout=1.0)
    release = asyncio.Event()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        if record.value == b"holds":
            await release.wait()

    async def test() -> None:
        broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        broker.publish("orders", b"holds", partition=1)
        async with TestClient(app, broker=broker) as client:
            await asyncio.sleep(1.0)
            await client.publish("orders", b"x" * 30_000, partition=0)
            await asyncio.sleep(2.0)
            assert "waits for room" in str(app.statistics().partitions[1].paused)
            client.group.commit_from_outside({TopicPartition("orders", 0): 1})
            client.group.lose()
            await broker.until(lambda: bool(client.group.members) and not client.group.rebalancing)
            release.set()
            for _ in range(5):
                await client.publish("orders", b"small", partition=1)
            await client.settle(timeout=30.0)

    run(test())


def test_a_large_record_of_a_halted_partition_delays_no_other() -> None:
    """It admits no further records, so the room others leave for that record would stay free forever."""
    app = App("memory", max_buffered_bytes=1_000_000, shutdown_timeout=2.0)

    @app.consume("orders", shard_by="partition", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        if record.partition == 0:
            raise ValueError

    async def test() -> None:
        broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
        broker.publish("orders", b"x" * 3_000, partition=0)
        async with TestClient(app, broker=broker):
            await asyncio.sleep(5.0)
            for _ in range(10):
                broker.publish("orders", b"x" * 3_000, partition=0)
            await asyncio.sleep(5.0)
            assert app.statistics().partitions[0].incomplete < 11, "all of them fitted: the test shows nothing"
            for _ in range(50):
                broker.publish("orders", b"x" * 3_000, partition=1)
            async with asyncio.timeout(10.0):
                await broker.until(lambda: broker.committed("memory", "orders", 1) == 50)
            assert app.statistics().partitions[1].paused is None

    run(test())


def test_a_refetch_ends_below_the_buffered_records() -> None:
    """Records above the last evicted one are complete or running, and arrive again with the second fetch."""
    app = App("memory", max_buffered_records=1000, stuck_after=5.0, shutdown_timeout=2.0, auto_offset_reset="earliest")
    release = asyncio.Event()
    runs: list[int] = []

    @app.consume("orders", concurrency=8)
    async def handle(record: Record) -> None:
        if record.offset == 1:
            await release.wait()
        runs.append(record.offset)

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for number in range(500):
            broker.publish("orders", b"", key=b"hot" if number < 200 else b"%d" % number)
        async with app.started(lambda: InMemoryTransport(broker, "memory", max_batch_records=50)):
            await asyncio.sleep(20.0)
            partition = app.statistics().partitions[0]
            assert partition.incomplete > partition.buffered_records, "nothing was given back"
            release.set()
            async with asyncio.timeout(60.0):
                await broker.until(lambda: broker.committed("memory", "orders", 0) == 500)
            assert app.statistics().replayed == 0

    run(test())

    assert sorted(runs) == list(range(500)), "each record once"


def test_evicted_records_are_not_in_memory() -> None:
    app = App("memory", max_buffered_records=1000, shutdown_timeout=2.0)

    @app.consume("orders", shard_by="partition", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:  # noqa: ARG001
        raise ValueError

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for _ in range(PER_PARTITION):
            broker.publish("orders", b"", headers=[("h", b"")])
        async with TestClient(app, broker=broker):
            await asyncio.sleep(5.0)
            engine = app._engine
            assert engine is not None
            (partition,) = engine.rebalance.partitions
            assert len(partition.evicted) > 100
            kept = [delivery for delivery in partition.tracker.values() if delivery.record.value is not None]
            assert len(kept) == partition.held_usage.records
            assert all(delivery.record.headers == () for delivery in partition.evicted.values())

    run(test())


def fixed_shards(app: App, release: asyncio.Event, runs: list[tuple[int, int]]) -> None:
    """Half of the partitions cannot advance; each has a fixed shard for itself, and it is full."""

    @app.consume("orders", shards=64, shard_by=lambda record: record.partition, retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        if record.partition < 2 and record.offset == 20:
            await release.wait()
        runs.append((record.partition, record.offset))


def test_records_waiting_for_a_full_fixed_shard_are_evicted_too() -> None:
    app = App("memory", max_buffered_records=1000, stuck_after=5.0, shutdown_timeout=2.0, auto_offset_reset="earliest")
    release = asyncio.Event()
    runs: list[tuple[int, int]] = []
    fixed_shards(app, release, runs)

    async def test() -> None:
        broker = InMemoryBroker(clock=lambda: 0.0)
        published(broker, 4)
        async with app.started(lambda: InMemoryTransport(broker, "memory", max_batch_records=70)):
            await asyncio.sleep(20.0)
            partitions = app.statistics().partitions
            assert [partition.committed for partition in partitions] == [20, 20, PER_PARTITION, PER_PARTITION]
            assert all(partition.buffered_records <= 20 for partition in partitions), partitions
            assert partitions[0].incomplete > 100, "nothing was given back: the test shows nothing"
            broker.group("memory").rebalance()
            await asyncio.sleep(1.0)
            release.set()
            async with asyncio.timeout(60.0):
                await broker.until(lambda: broker.committed("memory", "orders", 0) == PER_PARTITION)
                await broker.until(lambda: broker.committed("memory", "orders", 1) == PER_PARTITION)

    run(test())

    for partition in range(4):
        offsets = [offset for number, offset in runs if number == partition]
        assert offsets == list(range(PER_PARTITION)), "each once, and in order"
