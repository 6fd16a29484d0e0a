"""The shards of a handler, one situation each; `tests/unit/properties/` has what chance finds."""

import asyncio
import gc
import weakref
from collections import deque
from typing import Any

import pytest

from aioshard.engine.epoch import Delivery
from aioshard.engine.outcomes import Block
from aioshard.engine.pacing import LimitedShards, StartLimits
from aioshard.engine.sharder import Sharder
from aioshard.engine.shards import Shards
from aioshard.testing import run
from tests.engine.deliveries import add, halting, make_epoch, start

RETRY = Block(halted=False, error="ValueError", since=0.0)


def test_a_due_retry_starts_before_records_behind_a_busy_key() -> None:
    """Else a hot key keeps the one worker, and older records wait for as long as it has any."""

    async def test() -> None:
        shards = Shards()
        epoch, (failing, hot, waiting) = make_epoch(["a", "hot", "hot"])
        await shards.put([failing, hot, waiting])
        start(shards.take())
        shards.block(failing, RETRY, 1.0)
        assert start(shards.take()) is hot
        assert shards.take() is None
        await asyncio.sleep(2.0)
        epoch.complete(hot)
        assert shards.next_after(hot) is failing
        epoch.complete(failing)
        assert shards.next_after(failing) is waiting

    run(test())


def test_eviction_starts_at_the_first_record_beyond_the_limit() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, deliveries = make_epoch(["a", "a", "b", "a", None])
        other, others = make_epoch(["a", "c"], partition=1)
        await shards.put(deliveries)
        await shards.put(others)
        assert start(shards.take()) is deliveries[0]

        back = shards.evict(epoch, 2)

        assert sorted(delivery.offset for delivery in back) == [2, 3, 4]
        assert {delivery.epoch for delivery in back} == {epoch}
        assert other.gate is epoch.gate

    run(test())


def test_a_retry_of_an_ended_epoch_does_not_fall_due() -> None:
    async def test() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        shards = Shards()
        epoch, deliveries = make_epoch(["a"])
        await shards.put(deliveries)
        shards.block(start(shards.take()), RETRY, 1.0)
        epoch.end()
        shards.purge(epoch)
        assert len(shards) == 0
        await asyncio.sleep(5.0)
        assert shards.take() is None
        assert complaints == []

    run(test())


def test_an_ended_epoch_is_dropped_from_the_shards() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, deliveries = make_epoch(["a", "b"])
        await shards.put(deliveries)
        epoch.close()
        shards.close(epoch)
        assert shards.take() is None, "it is set aside"
        epoch.end()
        shards.purge(epoch)
        forgotten = weakref.ref(epoch.revoked)
        del epoch, deliveries
        gc.collect()
        assert forgotten() is None

    run(test())


def test_a_worker_cancelled_at_wake_up_passes_its_turn_on() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, _ = make_epoch([])
        woken = [asyncio.create_task(shards.wait(), name=f"worker {number}") for number in range(2)]
        await asyncio.sleep(0)
        await shards.put(add(epoch, [None]))
        await asyncio.sleep(0)  # the first was woken, and has not run yet
        woken[0].cancel()
        await asyncio.sleep(1.0)
        assert [task.cancelled() for task in woken] == [True, False]
        assert woken[1].done()

    run(test())


def test_no_more_workers_wake_than_there_are_records() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, _ = make_epoch([])
        found: list[Delivery | None] = []

        async def work() -> None:
            await shards.wait()
            found.append(shards.take())

        workers = [asyncio.create_task(work(), name=f"worker {number}") for number in range(64)]
        await asyncio.sleep(0)
        deliveries = add(epoch, [None] * 40)
        await shards.put(deliveries)
        await asyncio.sleep(1.0)
        assert found == deliveries
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)

    run(test())


def test_a_fixed_shard_continues_when_a_retry_falls_due_in_a_closed_partition() -> None:
    """Its one worker sleeps, and its queued record is of another partition."""

    async def test() -> None:
        shards = Shards(4)
        closed, (failing,) = make_epoch([0])
        await shards.put([failing])
        shards.block(start(shards.take()), RETRY, 1.0)
        _, others = make_epoch([0], partition=1)
        await shards.put(others)
        waiting = asyncio.create_task(shards.wait(), name="worker")
        await asyncio.sleep(0)
        closed.close()
        shards.close(closed)
        async with asyncio.timeout(5.0):
            await waiting
        assert shards.take() is others[0]

    run(test())


def test_records_without_a_key_are_spread_over_fixed_shards() -> None:
    async def test() -> None:
        parts = [Shards(10) for _ in range(3)]
        _, deliveries = make_epoch([None] * 9)
        await Sharder(lambda record: record.key, parts, fixed=True, workers=3, failures=halting(parts)).put(
            deliveries, deque()
        )
        assert [sum(1 for delivery in deliveries if delivery.key == number) for number in range(3)] == [3, 3, 3]
        assert [part.take() is not None for part in parts] == [True] * 3

    run(test())


def test_a_paused_retry_runs_before_younger_records_of_its_partition() -> None:
    """A key is one shard across partitions: while its first record is set aside, one of another partition runs."""

    async def test() -> None:
        shards = Shards()
        paused, (failing,) = make_epoch(["k"])
        other, (between,) = make_epoch(["k"], partition=1)
        await shards.put([failing, between])
        start(shards.take())
        (younger,) = add(paused, ["k"])
        await shards.put([younger])
        assert shards.take() is None
        shards.block(failing, RETRY, 1.0)
        paused.pause("the test", "why not")
        await asyncio.sleep(2.0)  # it comes due, and is set aside
        assert start(shards.take()) is between
        paused.resume("the test")
        shards.reopen(paused)
        assert shards.take() is None
        other.complete(between)
        assert shards.next_after(between) is failing
        assert shards.next_after(failing) is younger

    run(test())


def test_held_records_of_a_key_resume_in_offset_order() -> None:
    """The later record is held first, because it arrives while the earlier one waits in its shard."""

    async def test() -> None:
        shards = Shards()
        epoch, (running, earlier) = make_epoch(["k", "k"])
        await shards.put([running, earlier])
        assert start(shards.take()) is running
        assert shards.take() is None
        epoch.pause("the test", "why not")
        (later,) = add(epoch, ["k"])
        await shards.put([later])
        assert shards.take() is None
        epoch.complete(running)
        assert shards.next_after(running) is None

        epoch.resume("the test")
        shards.reopen(epoch)

        assert start(shards.take()) is earlier
        assert shards.take() is None
        epoch.complete(earlier)
        assert shards.next_after(earlier) is later

    run(test())


def test_a_retry_without_delay_has_a_due_time_on_uvloop_too() -> None:
    """Its handle for a delay that rounds to 0 ms has no `when`."""
    uvloop = pytest.importorskip("uvloop")

    async def test() -> None:
        shards = Shards()
        _, (first, second) = make_epoch(["a", "b"])
        await shards.put([first, second])
        before = asyncio.get_running_loop().time()
        for delivery, delay in ((start(shards.take()), 0.0), (start(shards.take()), 0.0001)):
            shards.block(delivery, RETRY, delay)
            due = shards.due(delivery)
            assert due is not None
            assert before <= due <= asyncio.get_running_loop().time() + delay
        await asyncio.sleep(0.01)
        assert shards.take() is first
        assert shards.due(first) is None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def test_workers_beyond_the_limit_stay_idle_until_it_is_raised() -> None:
    async def test() -> None:
        shards = LimitedShards(StartLimits(None, None), None)
        running: list[Delivery] = []
        ends = asyncio.Event()
        waits = 0

        async def serve() -> None:
            nonlocal waits
            while True:
                delivery = shards.take()
                if delivery is None:
                    waits += 1
                    await shards.wait()
                    continue
                running.append(delivery)
                await ends.wait()
                running.remove(delivery)
                shards.release(delivery)

        async with asyncio.TaskGroup() as workers:
            tasks = [workers.create_task(serve(), name=f"worker {number}") for number in range(8)]
            await turns()
            _, deliveries = make_epoch([None] * 40)
            shards.limit_workers(2, 8)
            await shards.put(deliveries)
            await turns()
            assert (len(running), waits) == (2, 8), "nobody was woken in vain"
            shards.limit_workers(5, 8)
            await turns()
            assert (len(running), waits) == (5, 8)
            shards.limit_workers(1, 8)
            ends.set()
            await turns()
            assert len(running) == 0
            assert shards.unseen == 0, "one worker has run all others"
            for task in tasks:
                task.cancel()

    asyncio.run(test())


async def turns(count: int = 60) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)
