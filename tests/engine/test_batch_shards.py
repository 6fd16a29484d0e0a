"""Shards of batches, by themselves: what a drain may start of a shard whose batch has ended badly."""

from aioshard.core.batching import Batch
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.engine.shards import DeliveryBatch
from aioshard.testing import run
from tests.engine.deliveries import make_epoch, start


async def skip(_delivery: Delivery) -> Outcome:
    return Outcome.SKIPPED


async def drained_while_running() -> tuple[BatchShards, DeliveryBatch, Epoch, list[Delivery]]:
    """Three records of a key, two of them in a running batch, while their partition drains; a later one has run."""
    shards = BatchShards(Batch(max_records=2, linger=0.0), attempts=5)
    epoch, deliveries = make_epoch(["k", "k", "k", "x"])
    await shards.put(deliveries)
    batch = shards.take_batch()
    assert batch is not None
    assert batch.deliveries == deliveries[:2]
    other = shards.take_batch()
    assert other is not None
    assert other.deliveries == deliveries[3:]
    for delivery in (*batch.deliveries, *other.deliveries):
        start(delivery)
    epoch.close()
    shards.close(epoch)
    epoch.complete(deliveries[3])
    shards.end(other)
    assert set(epoch.pending) == {0, 1, 2}
    return shards, batch, epoch, deliveries


def test_nothing_overtakes_a_cancelled_batch_in_its_partition() -> None:
    async def test() -> None:
        shards, batch, epoch, _ = await drained_while_running()

        shards.put_back(batch)

        assert not epoch.pending
        assert shards.take_batch() is None

    run(test())


def test_nothing_overtakes_what_failed_behind_a_record_that_takes_a_recovery() -> None:
    async def test() -> None:
        shards, batch, _epoch, deliveries = await drained_while_running()

        (head,) = shards.end(batch, deliveries[:2])
        head.divert(Recovery("it is skipped", skip))
        shards.resume(head)

        while (following := shards.take_batch()) is not None:
            assert following.deliveries == [head]
            shards.end(following)

    run(test())
