"""Eviction of records by a partition that cannot advance, and their refetch."""

import asyncio

from aioshard.core.flow import Usage
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.outcomes import Block
from aioshard.engine.sharder import Sharder
from aioshard.engine.shards import Shards
from aioshard.ports import FetchedBatch
from aioshard.records import Record, TopicPartition
from aioshard.testing import run
from tests.engine.deliveries import halting, make_buffer, make_epoch, make_intake, make_partition, make_sharder, start

HALTED = Block(halted=True, error="ValueError", since=0.0)


class Client:
    """Only `seek` is asked for."""

    def __init__(self) -> None:
        self.sought: list[tuple[TopicPartition, int]] = []

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        self.sought.append((topic_partition, offset))


def test_large_records_are_evicted_by_their_bytes() -> None:
    epoch, _ = make_epoch(["a"] * 5, size=400)
    assert epoch.first_to_evict(Usage(100, 1_000)) == 2
    assert epoch.first_to_evict(Usage(3, 100_000)) == 3
    assert epoch.first_to_evict(Usage(100, 100_000)) == 5, "nothing is too much"


def test_the_age_of_a_refetched_record_starts_at_its_refetch() -> None:
    """Otherwise a partition that has just resumed would count as stuck."""
    epoch, deliveries = make_epoch(["a"] * 3, arrived=0.0)
    epoch.evict(deliveries[1:])
    epoch.complete(deliveries[0])
    records = [delivery.record for delivery in deliveries[1:]]

    assert epoch.readmit(FetchedBatch(epoch.topic_partition, records, [10, 10], 3), 100.0) == deliveries[1:]

    assert not epoch.stuck(101.0, 60.0)
    assert epoch.stuck(161.0, 60.0)
    assert epoch.held_usage == Usage(2, 20)


def test_a_partition_whose_oldest_record_was_evicted_is_not_stuck() -> None:
    """It has to be refetched, otherwise it would be stuck forever."""
    epoch, deliveries = make_epoch(["a"] * 3)
    epoch.evict(deliveries)
    assert not epoch.stuck(1_000.0, 60.0)


def test_refetched_records_are_delivered_once() -> None:
    """Fetched together with records that are not: each is delivered once."""

    async def test() -> None:
        buffer = make_buffer()
        shards = Shards()
        partition, deliveries = make_partition(
            ["a", "a", "b", "a"], buffer=buffer, sharder=make_sharder(shards), clock=lambda: 9.0
        )
        await shards.put(deliveries)
        first = start(shards.take())
        partition.evict(shards.evict(partition, 3))
        partition.fetching_again = True
        again = [delivery.record for delivery in deliveries[2:]]
        new = again[-1]._replace(offset=5)

        partition.accept(FetchedBatch(partition.topic_partition, [*again, new], [10, 10, 10], 6))

        assert [delivery.offset for delivery in partition.tracker.values()] == [0, 1, 2, 3, 5]
        assert (partition.tracker.position, len(partition.evicted), partition.fetching_again) == (6, 0, False)
        assert buffer.records == 5
        assert first is deliveries[0]

    run(test())


def test_a_revoked_partition_neither_refetches_nor_evicts_during_its_drain() -> None:
    """After the drain it evicts: it may wait long for a leader, and other partitions would find no room."""

    async def test() -> None:
        buffer = make_buffer(records=100)
        shards = Shards()
        sharder = make_sharder(shards)
        halted, deliveries = make_partition(["a"] * 50, buffer=buffer, sharder=sharder)
        released, others = make_partition(["b"] * 50, partition=1, buffer=buffer, sharder=sharder)
        released.evict(others[10:])
        await shards.put(deliveries)
        shards.block(start(shards.take()), HALTED)
        intake = make_intake(halted, released, buffer=buffer)
        client = Client()
        for partition in (halted, released):
            sharder.close(partition)

        halted.pending = {1: deliveries[1]}
        intake.make_room(client)  # type: ignore[arg-type]
        assert (client.sought, len(halted.evicted)) == ([], 0)

        halted.pending = {}
        intake._evict_at = 0.0
        intake.make_room(client)  # type: ignore[arg-type]
        assert (client.sought, len(halted.evicted)) == ([], 49)

        for partition in (halted, released):
            partition.open()
        intake._evict_at = 0.0
        intake.make_room(client)  # type: ignore[arg-type]
        assert (client.sought, len(halted.evicted)) == ([(released.topic_partition, 10)], 49)

    run(test())


def test_records_evicted_during_a_refetch_are_refetched_from_their_start() -> None:
    """Else the next batch begins above it, and it would pass for deleted: lost."""
    epoch, deliveries = make_epoch(["a"] * 5)
    epoch.evict(deliveries[3:])
    epoch.fetching_again = True
    epoch.evict([])
    assert epoch.fetching_again, "nothing was evicted: it continues"
    epoch.evict(deliveries[1:3])
    assert not epoch.fetching_again, "the client has to be sent back again"


def test_a_fetch_task_continues_after_an_eviction_and_can_be_cancelled() -> None:
    async def test() -> None:
        shards = Shards(1)
        partition, _ = make_partition(
            sharder=Sharder(lambda _: 0, [shards], fixed=True, workers=1, failures=halting([shards]))
        )
        partition.task = task = asyncio.create_task(partition.run(), name="shard")
        records = [Record(*partition.topic_partition, offset, None, b"", (), 0.0) for offset in range(4)]
        partition.accept(FetchedBatch(partition.topic_partition, records, [10] * 4, 4))
        await asyncio.sleep(1.0)
        assert partition.evict_beyond(Usage(1, 1_000)) == 3
        await asyncio.sleep(1.0)
        assert not task.done()

        partition.fetching_again = True
        partition.accept(FetchedBatch(partition.topic_partition, records[1:], [10] * 3, 4))
        await asyncio.sleep(1.0)
        assert partition.evict_beyond(Usage(1, 1_000)) == 3
        task.cancel()
        await asyncio.sleep(1.0)
        assert task.cancelled()

    run(test())


def test_batches_waiting_for_the_fetch_task_are_evicted_too() -> None:
    """Otherwise their records would start before the evicted ones."""

    async def test() -> None:
        shards = Shards(1)
        partition, _ = make_partition(
            sharder=Sharder(lambda _: 0, [shards], fixed=True, workers=1, failures=halting([shards]))
        )
        partition.task = task = asyncio.create_task(partition.run(), name="shard")
        records = [Record(*partition.topic_partition, offset, None, b"", (), 0.0) for offset in range(6)]
        partition.accept(FetchedBatch(partition.topic_partition, records[:4], [10] * 4, 4))
        await asyncio.sleep(1.0)
        partition.accept(FetchedBatch(partition.topic_partition, records[4:], [10] * 2, 6))

        assert partition.evict_beyond(Usage(1, 1_000)) == 5

        assert list(partition.evicted) == [1, 2, 3, 4, 5]
        task.cancel()
        await asyncio.wait([task])

    run(test())


def test_records_the_client_cannot_refetch_are_not_evicted() -> None:
    """Records that come with positions of their own instead of the offsets of one log."""

    async def test() -> None:
        buffer = make_buffer(records=100)
        partition, _ = make_partition(buffer=buffer)
        records = [Record(*partition.topic_partition, 99 - offset, b"k", b"", (), 0.0) for offset in range(50)]
        partition.accept(FetchedBatch(partition.topic_partition, records, [10] * 50, 50, positions=range(50)))
        intake = make_intake(partition, buffer=buffer, now=100.0)
        client = Client()

        intake.make_room(client)  # type: ignore[arg-type]

        assert partition.stuck(100.0, 60.0)
        assert (client.sought, len(partition.evicted)) == ([], 0)
        assert [(delivery.offset, delivery.record.offset) for delivery in partition.tracker.values()] == [
            (n, 99 - n) for n in range(50)
        ]

    run(test())


def test_an_evicted_probe_is_followed_by_another() -> None:
    """Nothing would try its paused partition any more (found by a seed)."""
    epoch = Epoch(TopicPartition("orders", 0), 1, 0, make_buffer(100, 10_000))
    records = [Record("orders", 0, offset, b"k", b"", (), 0.0) for offset in range(3)]
    deliveries = [Delivery(record, epoch, None, 10, 0.0) for record in records]
    epoch.take_in(FetchedBatch(epoch.topic_partition, records, [10] * 3, 3), deliveries)
    outcomes: list[bool] = []
    epoch.probe, epoch.probed = deliveries[2], outcomes.append

    epoch.evict(deliveries[1:])

    assert epoch.probe is None
    assert outcomes == [False]
