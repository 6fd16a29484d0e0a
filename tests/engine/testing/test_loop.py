"""Virtual time, seeded order of steps, named deadlocks, threads."""

import asyncio
import queue
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import pytest

from aioshard.errors import StateError
from aioshard.testing import DeadlockError, VirtualTimeLoop, run, waiting_place


async def spin() -> None:
    """Never suspend for longer than a pass."""
    while True:  # noqa: ASYNC110 - what is tested is a task that does not wait for anything
        await asyncio.sleep(0)


async def beat() -> None:
    while True:  # noqa: ASYNC110 - a heartbeat
        await asyncio.sleep(1.0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def never() -> None:
    await asyncio.Event().wait()


# Time --------------------------------------------------------------------------------------


def test_a_day_of_sleep_takes_no_time() -> None:
    async def scenario() -> float:
        await asyncio.sleep(86_400.0)
        return now()

    before = time.monotonic()

    assert run(scenario(), time_limit=100_000.0) == 86_400.0
    assert time.monotonic() - before < 5.0


def test_timers_fire_when_they_are_due_and_in_order() -> None:
    async def scenario() -> list[tuple[str, float]]:
        fired: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, now()))

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 3.0), ("a", 0.1), ("b", 2.5)):
                group.create_task(sleeper(name, seconds), name=name)
        return fired

    assert run(scenario()) == [("a", 0.1), ("b", 2.5), ("c", 3.0)]


def test_timeouts_of_asyncio_and_anyio_are_exact() -> None:
    async def scenario() -> list[float]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await never()
        times = [now()]
        with anyio.move_on_after(12.5):
            await never()
        return [*times, now()]

    assert run(scenario()) == [30.0, 42.5]


def test_time_stops_while_callbacks_are_ready() -> None:
    async def scenario() -> float:
        sleeping = asyncio.ensure_future(asyncio.sleep(0.001))
        for _ in range(1000):
            await asyncio.sleep(0)
        before = now()
        await sleeping
        return before

    assert run(scenario()) == 0.0


def test_a_busy_program_does_not_stop_the_clock_forever() -> None:
    """As in a busy process, a timeout next to a busy task fires eventually."""

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(spin(), 1.0)

    run(scenario())


# The order of steps --------------------------------------------------------------------------


async def race() -> str:
    """Four tasks that always become ready together."""
    order: list[str] = []

    async def runner(name: str) -> None:
        for _ in range(4):
            await asyncio.sleep(1.0)
            order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(runner(name), name=name)
    return "".join(order)


def test_without_a_seed_callbacks_run_in_asyncio_order() -> None:
    async def steps() -> list[str]:
        order: list[str] = []

        async def runner(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                order.append(name)

        await asyncio.gather(*(runner(name) for name in "abcd"))
        return order

    assert run(steps()) == asyncio.run(steps()) == list("abcdabcdabcd")


def test_a_seed_determines_the_order() -> None:
    orders = {seed: run(race(), seed=seed) for seed in range(10)}

    assert {seed: run(race(), seed=seed) for seed in range(10)} == orders
    assert len(set(orders.values())) > 5


def test_an_iteration_runs_only_callbacks_ready_at_its_start() -> None:
    """Every task gets its turn before any gets a second one: a permuted pass is still asyncio's."""
    for seed in range(20):
        order = run(race(), seed=seed)
        assert all(sorted(order[start : start + 4]) == list("abcd") for start in range(0, 16, 4)), (seed, order)


def test_call_soon_callbacks_keep_their_order_under_every_seed() -> None:
    async def scenario() -> list[int]:
        called: list[int] = []
        loop = asyncio.get_running_loop()
        busy = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(5)]
        for number in range(10):
            loop.call_soon(called.append, number)
        await asyncio.gather(*busy)
        return called

    assert all(run(scenario(), seed=seed) == list(range(10)) for seed in range(20))


def test_a_seed_also_seeds_random_and_restores_its_state() -> None:
    async def scenario() -> float:
        return random.random()

    before = random.getstate()

    assert run(scenario(), seed=1) == run(scenario(), seed=1) != run(scenario(), seed=2)
    assert random.getstate() == before


def test_a_seed_reveals_a_race_that_plain_order_hides() -> None:
    async def scenario() -> int:
        balance = 0

        async def pay_in(*, turns: int) -> None:
            nonlocal balance
            seen = balance
            for _ in range(turns):
                await asyncio.sleep(0)
            balance = seen + 1

        async def read() -> int:
            await asyncio.sleep(0)
            return balance

        paying = asyncio.ensure_future(pay_in(turns=1))
        reading = asyncio.ensure_future(read())
        await paying
        return await reading

    assert run(scenario()) == 1
    assert {run(scenario(), seed=seed) for seed in range(10)} == {0, 1}


def test_locks_and_queues_work_under_every_seed() -> None:
    async def scenario() -> tuple[list[int], int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        lock = asyncio.Lock()
        received: list[int] = []
        inside = most = 0

        async def consume() -> None:
            nonlocal inside, most
            while True:
                value = await queue.get()
                async with lock:
                    inside += 1
                    most = max(most, inside)
                    await asyncio.sleep(0)
                    received.append(value)
                    inside -= 1
                queue.task_done()

        consumers = [asyncio.ensure_future(consume()) for _ in range(3)]
        for value in range(20):
            await queue.put(value)
        await queue.join()
        for consumer in consumers:
            consumer.cancel()
        await asyncio.wait(consumers)
        return sorted(received), most

    assert all(run(scenario(), seed=seed) == (list(range(20)), 1) for seed in range(20))


# Named errors --------------------------------------------------------------------------------


def test_a_deadlock_names_every_task_and_where_it_waits() -> None:
    async def scenario() -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        waiting = asyncio.get_running_loop().create_task(lock.acquire(), name="second owner")
        await asyncio.wait([waiting])

    with pytest.raises(DeadlockError) as caught:
        run(scenario())

    message = str(caught.value)
    assert message.startswith("nothing can proceed: no callback is ready and no timer is set")
    assert "testing/test_loop.py" in message
    assert " in scenario > asyncio/tasks.py" in message
    assert "task 'second owner' waits at asyncio/locks.py" in message


def test_an_endless_sleep_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="in sleep"):
        run(asyncio.sleep(float("inf")))


def test_a_periodic_task_does_not_hide_an_endless_test() -> None:
    async def scenario() -> None:
        beating = asyncio.get_running_loop().create_task(beat(), name="heart")
        await never()
        beating.cancel()

    with pytest.raises(DeadlockError, match=r"is still waiting after 60 s of virtual time(?s:.*)task 'heart' waits at"):
        run(scenario(), time_limit=60.0)


def test_a_program_that_never_idles_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.testing.loop._BUSY_LIMIT", 5000)

    with pytest.raises(DeadlockError, match="the program never rests: 5000 passes"):
        run(spin())


@pytest.mark.parametrize(
    ("hash_seed", "named"),
    [("5", "seed=7 and PYTHONHASHSEED=5"), ("random", "seed=7 and PYTHONHASHSEED=random")],
)
def test_a_failure_carries_its_seed(monkeypatch: pytest.MonkeyPatch, hash_seed: str, named: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)

    async def scenario() -> None:
        message = "broken"
        raise ValueError(message)

    with pytest.raises(ValueError, match="broken") as with_seed:
        run(scenario(), seed=7)
    with pytest.raises(ValueError, match="broken") as without:
        run(scenario())

    assert re.search(named, with_seed.value.__notes__[0])
    assert not hasattr(without.value, "__notes__")


def test_a_hanging_cleanup_does_not_hide_the_failure() -> None:
    async def scenario() -> None:
        async def stubborn() -> None:
            try:
                await never()
            finally:
                await never()

        task = asyncio.get_running_loop().create_task(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        tasks.append(task)
        message = "the failure"
        raise ValueError(message)

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(ValueError, match="the failure") as caught:
        run(scenario())

    assert "task 'stubborn' waits at" in caught.value.__notes__[0]
    tasks[0].get_coro().close()  # It never ends by itself.


def test_sockets_are_refused() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(StateError, match="no sockets, pipes or subprocesses"):
            loop.add_reader(0, print)

    run(scenario())


def test_a_waiting_task_is_described_by_its_innermost_await() -> None:
    async def outer() -> None:
        await never()

    async def scenario() -> str:
        task = asyncio.ensure_future(outer())
        await asyncio.sleep(0)
        place = waiting_place(task)
        task.cancel()
        await asyncio.wait([task])
        return place

    place = run(scenario())
    assert [part.rpartition(" in ")[2] for part in place.split(" > ")] == ["outer", "never", "wait"]


# Every step ----------------------------------------------------------------------------------


def test_on_step_is_called_after_every_callback() -> None:
    state = 0
    seen: list[int] = []

    async def scenario() -> None:
        nonlocal state
        for number in range(1, 4):
            state = number
            await asyncio.sleep(0)

    run(scenario(), on_step=lambda: seen.append(state))

    assert seen[:3] == [1, 2, 3]
    assert len(seen) > 3


def test_an_exception_in_on_step_ends_the_run_and_tasks_clean_up() -> None:
    steps = 0
    cleaned: list[str] = []

    def check() -> None:
        nonlocal steps
        steps += 1
        assert steps < 5, "an invariant"

    async def scenario() -> None:
        try:
            await beat()
        finally:
            await asyncio.sleep(1.0)
            cleaned.append("yes")

    with pytest.raises(AssertionError, match="an invariant") as caught:
        run(scenario(), on_step=check, seed=3)

    assert cleaned == ["yes"]
    assert steps == 5
    assert caught.value.__notes__


# Threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "in_thread",
    [asyncio.to_thread, anyio.to_thread.run_sync],
    ids=["asyncio", "anyio"],
)
def test_time_does_not_jump_while_a_thread_works(in_thread: Callable[..., Awaitable[object]]) -> None:
    """Otherwise its timeout of a virtual second would expire immediately."""

    def work() -> str:
        time.sleep(0.05)
        return "done"

    async def scenario() -> tuple[object, float]:
        async with asyncio.timeout(1.0):
            result = await in_thread(work)
        return result, now()

    assert run(scenario()) == ("done", 0.0)


def test_time_waits_for_a_thread_that_lingers_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of anyio's is busy for a moment after it has returned its result, and wakes nobody when that is over."""
    task_done = queue.Queue.task_done

    def lingering(of: queue.Queue[object]) -> None:
        time.sleep(0.05)
        task_done(of)

    monkeypatch.setattr(queue.Queue, "task_done", lingering)

    async def scenario() -> float:
        await anyio.to_thread.run_sync(int)
        await asyncio.sleep(1.0)
        async with asyncio.timeout(1.0):
            await anyio.to_thread.run_sync(time.sleep, 0.2)
        return now()

    began = time.monotonic()
    assert run(scenario()) == 1.0
    assert time.monotonic() - began < 0.45, "the loop waited to no effect"


def test_a_hanging_thread_does_not_stop_time() -> None:
    release = threading.Event()

    async def scenario() -> float:
        hanging = asyncio.ensure_future(asyncio.to_thread(release.wait))
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(30.0):
                    await asyncio.shield(hanging)
            return now()
        finally:
            release.set()
            await hanging

    assert run(scenario()) == 30.0


def test_a_call_from_another_thread_wakes_the_loop() -> None:
    async def scenario() -> bool:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        await asyncio.to_thread(lambda: loop.call_soon_threadsafe(event.set))
        await event.wait()
        return event.is_set()

    assert run(scenario())


def test_the_loop_can_be_used_without_run() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.sleep(5.0))
        assert runner.get_loop().time() == 5.0
