"""Which records a drain waits for. Every mistake here would make it last until its deadline."""

import asyncio
from collections.abc import Hashable, Sequence

from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.outcomes import Block
from aioshard.engine.shards import Shards
from aioshard.testing import run
from tests.engine.deliveries import make_epoch, start

FAILED = Block(halted=True, error="ValueError", since=0.0)


def drained(epoch: Epoch) -> bool:
    assert epoch.drained.is_set() == (not epoch.pending)
    return epoch.drained.is_set()


async def started(shards: Shards, keys: Sequence[Hashable]) -> tuple[Epoch, list[Delivery]]:
    """An epoch of which the first record of each key runs."""
    epoch, deliveries = make_epoch(keys)
    await shards.put(deliveries)
    for _ in set(keys):
        start(shards.take())
    return epoch, deliveries


def draining(*keys: Hashable, highest_started: int) -> tuple[Epoch, list[Delivery]]:
    epoch, deliveries = make_epoch(keys)
    epoch.highest_started = highest_started
    epoch.close(below=True)
    return epoch, deliveries


def test_a_drain_without_started_records_has_nothing_to_wait_for() -> None:
    epoch, _ = draining("a", "b", highest_started=-1)

    assert drained(epoch)


def test_a_drain_waits_only_for_running_records() -> None:
    """The commit lists what has finished beyond it, so that the next owner runs only what is queued."""
    epoch, deliveries = make_epoch(["a", "b", "a", "b"])
    epoch.highest_started = 3

    epoch.close({deliveries[1], make_epoch(["a"], partition=1)[1][0]})

    assert list(epoch.pending) == [1]
    assert epoch.may_start(deliveries[1])
    assert not epoch.may_start(deliveries[3])


def test_without_metadata_a_drain_waits_for_queued_records_below_started_ones() -> None:
    """Each is a hole in what can be committed; what is above has not begun."""
    epoch, (a, b, c, _) = draining("a", "a", "c", "d", highest_started=2)

    assert list(epoch.pending.values()) == [a, b, c]


def test_a_drain_is_done_when_its_records_have_ended() -> None:
    epoch, deliveries = draining("a", "b", highest_started=1)

    epoch.settle(deliveries[1])
    assert not drained(epoch)
    epoch.complete(deliveries[0])
    assert drained(epoch)


def test_a_drain_does_not_wait_for_a_failed_shard() -> None:
    epoch, _ = draining("a", "b", "a", "b", highest_started=3)

    epoch.block("a")

    assert set(epoch.pending) == {1, 3}


def test_unordered_records_do_not_block_each_other_in_a_drain() -> None:
    epoch, deliveries = draining(None, None, highest_started=1)

    epoch.settle(deliveries[0])
    epoch.block(None)

    assert set(epoch.pending) == {1}


def test_ending_twice_changes_nothing() -> None:
    epoch, deliveries = draining("a", highest_started=0)

    epoch.settle(deliveries[0])
    epoch.block("a")

    assert drained(epoch)


def test_a_drain_skips_records_behind_one_that_fails_meanwhile() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (first, _, other) = await started(shards, ["a", "a", "b"])
        epoch.close(below=True)
        shards.close(epoch)
        epoch.complete(other)
        assert not drained(epoch)
        shards.block(first, FAILED)
        assert drained(epoch)

    run(test())


def test_a_drain_skips_records_behind_one_that_failed_before() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (first, _, other) = await started(shards, ["a", "a", "b"])
        shards.block(first, FAILED)
        epoch.close(below=True)
        shards.close(epoch)
        assert not drained(epoch)
        epoch.complete(other)
        assert drained(epoch)

    run(test())


def test_a_drain_skips_records_behind_a_failed_one_of_another_partition() -> None:
    async def test() -> None:
        shards = Shards()
        elsewhere, (failing,) = make_epoch(["a"], partition=1)
        await shards.put([failing])
        start(shards.take())
        epoch, deliveries = make_epoch(["a", "b"])
        await shards.put(deliveries)
        epoch.complete(start(shards.take()))
        epoch.close(below=True)
        shards.close(epoch)
        assert not drained(epoch)
        shards.block(failing, FAILED)
        assert drained(epoch)
        assert not elsewhere.gate

    run(test())


def test_a_drain_does_not_wait_for_evicted_records() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (first, evicted, last) = await started(shards, ["a", "a", "b"])
        epoch.evict(shards.evict(epoch, evicted.offset))
        epoch.close(below=True)
        shards.close(epoch)
        epoch.complete(last)
        assert not drained(epoch)
        epoch.complete(first)
        assert drained(epoch)

    run(test())


def test_a_drain_does_not_wait_for_a_cancelled_keyless_record() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, deliveries = make_epoch([None])
        await shards.put(deliveries)
        running = start(shards.take())
        epoch.close(below=True)
        shards.close(epoch)
        assert not drained(epoch)
        shards.again(running)
        assert drained(epoch)

    run(test())


def test_a_drain_does_not_wait_for_a_failed_keyless_record() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (delivery,) = await started(shards, [None])
        epoch.close(below=True)
        shards.close(epoch)
        assert not drained(epoch)
        shards.block(delivery, FAILED)
        assert drained(epoch)

    run(test())


def test_a_drain_ends_with_its_epoch() -> None:
    """The client was lost, and the group that waits for the drain is another one."""

    async def test() -> None:
        epoch, _ = await started(Shards(), ["a"])
        epoch.close(below=True)
        assert not drained(epoch)
        epoch.end()
        assert drained(epoch)

    run(test())


def test_handlers_see_revoked_only_during_a_revoke() -> None:
    async def test() -> None:
        epoch, _ = make_epoch(["a"])
        assert not epoch.revoked.is_set()
        epoch.close(below=True)
        assert epoch.revoked.is_set()
        epoch.open()
        assert not epoch.revoked.is_set()
        epoch.end()
        assert epoch.revoked.is_set()

    run(test())


def test_a_drain_waits_for_running_records_and_the_holes_below() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (first, second, other, above) = await started(shards, ["a", "a", "b", "b"])
        epoch.close(below=True)
        shards.close(epoch)
        epoch.complete(other)
        assert shards.next_after(other) is None, f"{above} had not to be waited for and started"
        epoch.complete(first)
        assert shards.next_after(first) is second
        await asyncio.sleep(0)
        assert not drained(epoch)
        epoch.complete(second)
        assert drained(epoch)

    run(test())


def test_a_cancelled_record_is_not_overtaken_by_a_later_record_of_its_key() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (first, _, other) = await started(shards, ["a", "a", "b"])
        epoch.close(below=True)
        shards.close(epoch)

        shards.again(first)
        epoch.complete(other)

        assert shards.next_after(other) is None
        assert drained(epoch)

    run(test())
