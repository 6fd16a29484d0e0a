"""Plain functions run in threads, and a cancelled run ends with its thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aioshard import App, Batch, Context, Record, Retry
from aioshard.attempts import run_in_thread, run_to_end
from aioshard.errors import NotDrainedError
from aioshard.testing import InMemoryBroker, InMemoryTransport


async def wait_until(condition: object, timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # type: ignore[operator] # noqa: ASYNC110 - threads have no event of this loop
            await asyncio.sleep(0.01)


def make_app() -> App:
    return App("threads", auto_offset_reset="earliest", commit_interval=0.05, drain_timeout=0.2, shutdown_timeout=2.0)


async def test_a_plain_function_runs_beside_the_event_loop_up_to_its_concurrency() -> None:
    app, broker = make_app(), InMemoryBroker(partitions=1)
    meeting = threading.Barrier(3, timeout=10.0)
    seen: list[tuple[int, int]] = []

    @app.consume("orders", concurrency=3)
    def handle(record: Record, context: Context) -> None:
        meeting.wait()
        seen.append((record.offset, context.attempt))

    for number in range(6):
        broker.publish("orders", b"", key=b"k%d" % number)
    async with app.started(lambda: InMemoryTransport(broker, "threads")):
        await wait_until(lambda: broker.committed("threads", "orders", 0) == 6)

    assert sorted(seen) == [(number, 1) for number in range(6)]


async def test_a_thread_that_outlives_its_epoch_keeps_its_key_occupied() -> None:
    """A thread cannot be cancelled: the next record of its key must not run concurrently (I4)."""
    app, broker = make_app(), InMemoryBroker(partitions=1)
    release, began = threading.Event(), threading.Event()
    running: set[bytes | None] = set()
    overlaps: list[int] = []
    runs: list[int] = []

    @app.consume("orders", concurrency=4)
    def handle(record: Record) -> None:
        if record.key in running:
            overlaps.append(record.offset)
        running.add(record.key)
        runs.append(record.offset)
        if record.offset == 0:
            began.set()
            release.wait(10.0)
        running.discard(record.key)

    for _ in range(3):
        broker.publish("orders", b"", key=b"slow")
    async with app.started(lambda: InMemoryTransport(broker, "threads")):
        await wait_until(began.is_set)
        broker.group("threads").lose()
        await wait_until(lambda: app.statistics().rebalances == 2)
        broker.publish("orders", b"", key=b"other")
        await wait_until(lambda: 3 in runs)
        assert runs == [0, 3], "the key of the thread waits, another one does not"
        assert app.statistics().handlers[0].outliving == ("orders/0/0",)
        release.set()
        await wait_until(lambda: broker.committed("threads", "orders", 0) == 4)

    assert overlaps == []
    assert runs == [0, 3, 0, 1, 2]


Next = Callable[[Any, Any], Awaitable[object]]


async def plain(argument: Any, context: Any, call_next: Next) -> object:
    return await call_next(argument, context)


async def in_a_task(argument: Any, context: Any, call_next: Next) -> object:
    """Up to Python 3.11, a second cancellation leaves the inner task alone while it ends."""
    return await asyncio.wait_for(call_next(argument, context), 60.0)


async def with_an_anyio_timeout(argument: Any, context: Any, call_next: Next) -> object:
    """anyio cancels again in each iteration of the event loop."""
    with anyio.fail_after(0.1):
        return await call_next(argument, context)


async def that_fails_first(argument: Any, context: Any, call_next: Next) -> object:
    async def fail() -> None:
        await asyncio.sleep(0.1)
        raise LookupError

    return await asyncio.gather(call_next(argument, context), fail())


@pytest.mark.parametrize("batch", [None, Batch(linger=0.0)], ids=["records", "batches"])
@pytest.mark.parametrize("around", [plain, in_a_task, with_an_anyio_timeout, that_fails_first])
async def test_a_thread_that_outlives_its_timeout_and_its_partition_keeps_its_key_occupied(
    around: Any, batch: Batch | None
) -> None:
    """Its run is cancelled by the timeout, and again when the partition is revoked (I4)."""
    app, broker = make_app(), InMemoryBroker(partitions=1)
    release, began = threading.Event(), threading.Event()
    running: set[bytes | None] = set()
    overlaps: list[int] = []
    runs: list[int] = []

    app.middleware(around)

    @app.consume("orders", concurrency=4, timeout=0.2, batch=batch, retry=Retry(attempts=10, initial=0.01))
    def handle(given: Any) -> None:
        for record in [given] if isinstance(given, Record) else given:
            overlaps.extend([record.offset] if record.key in running else [])
            running.add(record.key)
            runs.append(record.offset)
            if record.offset == 0 and not began.is_set():
                began.set()
                release.wait(30.0)
            running.discard(record.key)

    broker.publish("orders", b"", key=b"slow")
    async with app.started(lambda: InMemoryTransport(broker, "threads")):
        await wait_until(lambda: app.statistics().handlers[0].outliving == ("orders/0/0",))
        for rebalances in (2, 3):
            broker.group("threads").rebalance()
            await wait_until(lambda: app.statistics().rebalances == rebalances)  # noqa: B023 - awaited at once
        broker.publish("orders", b"", key=b"other")
        await wait_until(lambda: 1 in runs)
        assert runs.count(0) == 1, "the key of the thread waits, another one does not"
        assert app.statistics().handlers[0].outliving == ("orders/0/0",)
        release.set()
        if around is not that_fails_first:
            await wait_until(lambda: broker.committed("threads", "orders", 0) == 2)

    assert overlaps == []


async def test_an_app_ends_although_a_thread_outlives_two_cancellations() -> None:
    app, broker = make_app(), InMemoryBroker(partitions=1)
    release, began = threading.Event(), threading.Event()

    @app.consume("orders", timeout=0.1)
    def handle(_: Record) -> None:
        began.set()
        release.wait(30.0)

    broker.publish("orders", b"", key=b"slow")
    try:
        with pytest.raises(NotDrainedError, match="orders/0/0"):
            async with app.started(lambda: InMemoryTransport(broker, "threads")):
                await wait_until(lambda: app.statistics().handlers[0].outliving)
        workers = [task for task in asyncio.all_tasks() if "worker" in task.get_name()]
        assert workers == [], "the event loop can close"
    finally:
        release.set()


@pytest.mark.parametrize("swallow", [True, False])
async def test_a_run_that_ends_after_its_cancellation_completes_nothing(swallow: bool) -> None:
    app, broker = make_app(), InMemoryBroker(partitions=1)
    runs: list[int] = []
    hang = asyncio.Event()

    @app.consume("orders")
    async def handle(record: Record) -> None:
        runs.append(record.offset)
        if len(runs) == 1:
            try:
                await hang.wait()
            except asyncio.CancelledError:
                if not swallow:
                    raise

    broker.publish("orders", b"", key=b"k")
    async with app.started(lambda: InMemoryTransport(broker, "threads")):
        await wait_until(lambda: runs)
        broker.group("threads").rebalance()
        await wait_until(lambda: broker.committed("threads", "orders", 0) == 1)

    assert runs == [0, 0]


async def test_a_plain_function_that_only_makes_a_coroutine_has_processed_nothing() -> None:
    """A plain wrapper around an `async def` handler: nobody would await it (I2)."""
    app, broker = make_app(), InMemoryBroker(partitions=1)

    async def handle(record: Record) -> None: ...

    @app.consume("orders", retry=Retry(attempts=1))
    def wrapped(record: Record) -> object:
        return handle(record)

    broker.publish("orders", b"")
    async with app.started(lambda: InMemoryTransport(broker, "threads")):
        await wait_until(lambda: app.statistics().handlers[0].halted == 1)
        assert "which is never awaited" in app.explain()

    assert broker.committed("threads", "orders", 0) == 0


async def test_a_run_cancelled_before_its_thread_starts_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody will ever say that the thread has ended."""
    ran: list[bool] = []

    async def all_threads_are_busy(work: Callable[[], None], **_: object) -> None:
        try:
            await asyncio.sleep(1_000.0)
        finally:
            asyncio.get_running_loop().call_soon(work)  # a thread is free, too late

    monkeypatch.setattr(anyio.to_thread, "run_sync", all_threads_are_busy)
    run = asyncio.create_task(run_in_thread(lambda: ran.append(True), anyio.CapacityLimiter(1)), name="run")
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait([run], timeout=5.0)
    await asyncio.sleep(0)

    assert run.cancelled()
    assert ran == []


async def test_a_run_to_the_end_outlasts_cancellations_before_its_thread_begins() -> None:
    limiter, other = anyio.CapacityLimiter(1), object()
    limiter.acquire_on_behalf_of_nowait(other)
    ran: list[bool] = []

    run = asyncio.create_task(run_to_end(lambda: ran.append(True), limiter), name="run")
    for _ in range(3):
        await asyncio.sleep(0)
        run.cancel()
    await asyncio.sleep(0)
    assert not run.done()
    limiter.release_on_behalf_of(other)
    with pytest.raises(asyncio.CancelledError):
        await run

    assert ran == [True]
