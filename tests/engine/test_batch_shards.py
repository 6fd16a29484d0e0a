"""Batch shards on their own: which records a drain may start after a failed batch."""

from aioshard.core.options import Batch
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.engine.recoveries import skipping
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
    epoch.close(below=True)
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


def test_nothing_overtakes_failed_records_behind_a_recovery() -> None:
    async def test() -> None:
        shards, batch, _epoch, deliveries = await drained_while_running()

        (head,) = shards.end(batch, deliveries[:2])
        head.divert(Recovery("it is skipped", skip))
        shards.resume(head)

        while (following := shards.take_batch()) is not None:
            assert following.deliveries == [head]
            shards.end(following)

    run(test())


def test_batches_never_mix_records_of_two_epochs() -> None:
    """With exactly-once processing; the same key may be in both partitions, and records may have failed before."""

    async def test() -> None:
        shards = BatchShards(Batch(max_records=8, linger=0.0), attempts=5, per_epoch=True)
        _, first = make_epoch(["a", "k", None, "b"])
        _, second = make_epoch(["c", "k", None, "d"], partition=1)
        mixed = [delivery for pair in zip(first, second, strict=True) for delivery in pair]
        await shards.put(mixed)
        batches = [shards.take_batch(), shards.take_batch()]
        assert [batch.deliveries for batch in batches if batch] == [first, [second[0], *second[2:]]]
        assert shards.take_batch() is None, "its key runs in the other partition"

        for batch in batches:
            assert batch is not None
            for delivery in batch.deliveries:
                start(delivery).starts = 1
                delivery.fail(ValueError(), 0)
            for delivery in shards.end(batch, batch.deliveries):
                shards.again(delivery)
        again = []
        while (following := shards.take_batch()) is not None:
            again.append(following)
            for delivery in following.deliveries:
                assert delivery.epoch is following.deliveries[0].epoch
            shards.end(following)
        assert sum(len(batch.deliveries) for batch in again) == len(mixed)

    run(test())


def test_a_record_waiting_for_its_key_joins_no_batch_of_another_epoch() -> None:
    async def test() -> None:
        shards = BatchShards(Batch(max_records=8, linger=0.0), attempts=5, per_epoch=True)
        _, (one,) = make_epoch(["k"])
        _, (other,) = make_epoch(["k"], partition=1)
        await shards.put([one, other])
        batch = shards.take_batch()
        assert batch is not None
        assert batch.deliveries == [one]
        (head,) = shards.end(batch, [one])
        shards.again(head)

        batch = shards.take_batch()

        assert batch is not None
        assert batch.deliveries == [one]
        shards.end(batch)
        following = shards.take_batch()
        assert following is not None
        assert following.deliveries == [other]

    run(test())


async def test_no_recovery_overtakes_a_paused_record_of_its_key() -> None:
    shards = BatchShards(Batch(max_records=10, linger=0.0), 1)
    epoch, deliveries = make_epoch(["a"] * 3)
    await shards.put(deliveries)
    batch = shards.take_batch()
    assert batch is not None
    for delivery in (deliveries[0], deliveries[2]):
        delivery.divert(skipping("requested by the test"))
    batch.left_out, batch.deliveries = batch.deliveries, []
    for head in shards.end(batch, batch.left_out):
        shards.resume(head)
    epoch.pause("application", "requested by the test")

    first = shards.take_batch()
    assert first is not None
    assert first.deliveries == [deliveries[0]]
    epoch.complete(deliveries[0])
    shards.end(first)

    assert shards.take_batch() is None


async def test_no_recovery_of_a_cancelled_batch_starts_before_a_record_of_its_key_held_by_a_pause() -> None:
    shards = BatchShards(Batch(max_records=10, linger=0.0), 1)
    epoch, deliveries = make_epoch(["a", "a", None])
    await shards.put(deliveries)
    batch = shards.take_batch()
    assert batch is not None
    for delivery in deliveries[1:]:
        delivery.divert(skipping("requested by the test"))
    batch.deliveries, batch.left_out = deliveries[:1], deliveries[1:]
    shards.put_back(batch)
    epoch.pause("application", "requested by the test")

    alone = shards.take_batch()
    assert alone is not None
    assert alone.deliveries == deliveries[2:], "a record without a key has nothing to wait for"
    epoch.complete(deliveries[2])
    shards.end(alone)
    assert shards.take_batch() is None

    epoch.resume("application")
    shards.reopen(epoch)
    for delivery in deliveries[:2]:
        following = shards.take_batch()
        assert following is not None
        assert following.deliveries == [delivery]
        epoch.complete(delivery)
        shards.end(following)


async def test_the_cancelled_probe_of_a_pause_runs_again_before_later_records_of_its_key() -> None:
    shards = BatchShards(Batch(max_records=10, linger=0.0), 1)
    epoch, deliveries = make_epoch(["a", "a"])
    epoch.pause("the circuit breaker", "requested by the test")
    await shards.put(deliveries)
    assert shards.take_batch() is None
    assert shards.probe(epoch) is deliveries[0]
    batch = shards.take_batch()
    assert batch is not None

    shards.put_back(batch)

    again = shards.take_batch()
    assert again is not None
    assert again.deliveries == deliveries[:1]
