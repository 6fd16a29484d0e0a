"""What a drain waits for, and what it does not: each of these would have it last until its deadline."""

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


def test_nothing_started_means_nothing_to_wait_for() -> None:
    epoch, _ = draining("a", "b", highest_started=-1)

    assert drained(epoch)


def test_only_what_runs_is_waited_for() -> None:
    """The commit lists what has finished beyond it, so that the next owner runs only what is queued."""
    epoch, deliveries = make_epoch(["a", "b", "a", "b"])
    epoch.highest_started = 3

    epoch.close({deliveries[1], make_epoch(["a"], partition=1)[1][0]})

    assert list(epoch.pending) == [1]
    assert epoch.may_start(deliveries[1])
    assert not epoch.may_start(deliveries[3])


def test_what_is_queued_below_the_highest_started_offset_is_waited_for_where_no_commit_can_list_the_rest() -> None:
    """Each is a hole in what can be committed; what is above has not begun."""
    epoch, (a, b, c, _) = draining("a", "a", "c", "d", highest_started=2)

    assert list(epoch.pending.values()) == [a, b, c]


def test_it_is_done_when_all_of_that_has_ended() -> None:
    epoch, deliveries = draining("a", "b", highest_started=1)

    epoch.settle(deliveries[1])
    assert not drained(epoch)
    epoch.complete(deliveries[0])
    assert drained(epoch)


def test_a_failure_takes_its_shard_out_of_the_wait() -> None:
    epoch, _ = draining("a", "b", "a", "b", highest_started=3)

    epoch.block("a")

    assert set(epoch.pending) == {1, 3}


def test_records_without_order_do_not_block_each_other() -> None:
    epoch, deliveries = draining(None, None, highest_started=1)

    epoch.settle(deliveries[0])
    epoch.block(None)

    assert set(epoch.pending) == {1}


def test_ending_twice_changes_nothing() -> None:
    epoch, deliveries = draining("a", highest_started=0)

    epoch.settle(deliveries[0])
    epoch.block("a")

    assert drained(epoch)


def test_it_does_not_wait_for_what_waits_behind_a_record_that_fails_meanwhile() -> None:
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


def test_it_does_not_wait_for_what_waits_behind_a_record_that_had_failed() -> None:
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


def test_it_does_not_wait_for_what_waits_behind_a_record_of_another_partition_that_fails() -> None:
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


def test_it_does_not_wait_for_what_was_evicted() -> None:
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


def test_a_record_without_a_key_that_is_cancelled_is_not_waited_for() -> None:
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


def test_a_record_without_a_key_that_fails_is_not_waited_for() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (delivery,) = await started(shards, [None])
        epoch.close(below=True)
        shards.close(epoch)
        assert not drained(epoch)
        shards.block(delivery, FAILED)
        assert drained(epoch)

    run(test())


def test_it_is_over_when_its_epoch_ends() -> None:
    """The client was lost, and the group that waits for the drain is another one."""

    async def test() -> None:
        epoch, _ = await started(Shards(), ["a"])
        epoch.close(below=True)
        assert not drained(epoch)
        epoch.end()
        assert drained(epoch)

    run(test())


def test_handlers_see_that_a_partition_is_being_taken_away_only_while_it_is() -> None:
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


def test_it_waits_for_what_runs_and_for_the_holes_below() -> None:
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
