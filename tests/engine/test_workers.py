"""Workers survive everything handlers do, or the app reports that they did not."""

import asyncio
import contextlib
from typing import Any

import pytest

from aioshard import App, Batch, Record, Retry
from aioshard.engine.epoch import Delivery
from aioshard.engine.shards import Shards
from aioshard.engine.worker import RecordWorker
from aioshard.errors import NotDrainedError
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run
from tests.engine.deliveries import endless_lease, halting, make_epoch
from tests.engine.live_apps import publish


async def time_out_as_older_libraries_do() -> None:
    """Cancel the task that waits, swallow the cancellation, and do not take it back."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def await_something_cancelled() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("options", [{}, {"batch": Batch(max_records=5, linger=0.1)}], ids=["records", "batches"])
@pytest.mark.parametrize("concurrency", [1, 20])
def test_as_many_runs_are_active_as_there_are_workers(options: dict[str, Any], concurrency: int) -> None:
    app = App("workers")
    running = most = 0

    @app.consume("orders", concurrency=concurrency, **options)
    async def handle(_: list[Record] if options else Record) -> None:  # type: ignore[valid-type]
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 200)
            await asyncio.sleep(0.5)
            assert running == concurrency
            assert app.statistics().handlers[0].concurrency == concurrency
            await client.settle(timeout=300.0)

    run(test())
    assert most == concurrency


def test_a_timeout_that_leaks_its_cancellation_costs_no_worker() -> None:
    """Of the next record that awaits something cancelled the worker has to know that it is not meant itself."""
    app = App("workers")
    attempts: list[tuple[int, bool]] = []

    @app.consume("orders", concurrency=1, retry=Retry(attempts=2, jitter=0.0))
    async def handle(record: Record) -> None:
        first = (record.offset, True) not in attempts
        attempts.append((record.offset, first))
        if record.offset in (0, 2) and first:
            await time_out_as_older_libraries_do()
            if record.offset == 2:
                raise TimeoutError
        elif first:
            await await_something_cancelled()

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(5):
                await client.publish("orders", b"", key=b"k", partition=0)
            await client.settle(timeout=30.0)

    run(test())

    assert [offset for offset, _ in attempts] == [0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_timeout_that_leaks_its_cancellation_survives_a_rebalance() -> None:
    app = App("workers", drain_timeout=1.0, shutdown_timeout=3.0)
    runs: list[int] = []

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        runs.append(record.offset)
        await time_out_as_older_libraries_do()
        if len(runs) in (1, 3):
            with contextlib.suppress(asyncio.CancelledError if len(runs) == 3 else ZeroDivisionError):
                await asyncio.sleep(100.0)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(3):
                await client.publish("orders", b"", key=b"k", partition=0)
            for _ in range(2):
                await asyncio.sleep(1.0)
                client.group.rebalance()
                await asyncio.sleep(3.0)
            await client.settle(timeout=30.0)

    run(test())

    assert runs == [0, 0, 1, 1, 2]


def test_a_handler_that_cancels_its_own_worker_ends_the_app_with_a_reason() -> None:
    """Otherwise its shards would be stuck silently (I11)."""
    app = App("workers")

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:  # noqa: ARG001
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(1.0)
            assert app.statistics().state == "failed"
            assert app._engine is not None
            assert "handle worker 0" in str(app._engine.failed.exception())

    run(test())


def test_a_worker_ends_if_it_is_cancelled_together_with_its_run() -> None:
    """Otherwise a stop in the middle of a rebalance would wait for it."""

    async def hang(_: Delivery) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        shards = Shards()
        _, (delivery,) = make_epoch(["k"])
        clock = asyncio.get_running_loop().time
        worker = RecordWorker(
            "worker", shards, invoke=hang, failures=halting([shards]), lease=endless_lease(), clock=clock
        )
        worker.task = asyncio.create_task(worker.run(), name="worker")
        await shards.put([delivery])
        await asyncio.sleep(1.0)
        assert worker.deliveries == (delivery,)

        worker.interrupt()
        worker.task.cancel()

        await asyncio.wait([worker.task], timeout=1.0)
        assert worker.task.cancelled()
        assert shards.take() is delivery, "another worker may run it again"

    run(test())


def test_an_exception_whose_str_raises_halts_only_its_record() -> None:
    app = App("workers")

    class SpeechlessError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    @app.consume("orders", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        if record.offset == 0:
            raise SpeechlessError

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"a", partition=0)
            await client.publish("orders", b"", key=b"b", partition=0)
            await asyncio.sleep(1.0)
            statistics = app.statistics()
            assert (statistics.state, statistics.handlers[0].processed) == ("running", 1)
            assert "SpeechlessError: its message cannot be shown" in app.explain()

    run(test())


def test_a_taken_record_does_not_start_if_its_epoch_ends_meanwhile() -> None:
    """A handler that never suspends: its worker yields to the loop now and then while it holds the next record."""
    app = App("workers", auto_offset_reset="earliest", shutdown_timeout=2.0)
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    for _ in range(300):
        broker.publish("orders", b"", key=b"k")
    runs: list[int] = []
    ended_after: list[int] = []

    @app.consume("orders", concurrency=1)
    async def handle(record: Record) -> None:
        runs.append(record.offset)

    def end_it() -> None:
        engine = app._engine
        if engine is not None and engine.handlers[0].sharder.shards[0].yielding and not ended_after:
            engine.rebalance.end_all("the test says so")
            ended_after.append(len(runs))

    async def test() -> None:
        async with app.started(lambda: InMemoryTransport(broker, "workers")):
            await asyncio.sleep(5.0)

    with pytest.raises(NotDrainedError):  # it has not committed what it ran
        run(test(), on_step=end_it)

    assert ended_after == [len(runs)]


def test_a_readable_partition_clears_its_trouble() -> None:
    app = App("workers")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", partition=0)
            await client.settle()
            assert app._engine is not None
            app._engine.rebalance.partitions[TopicPartition("orders", 0)].fault.report("it is broken")
            assert "it is broken" in app.explain()
            await client.publish("orders", b"", partition=0)
            await client.settle()
            assert "it is broken" not in app.explain()

    run(test())


def test_a_failed_attempt_that_leaks_its_cancellation_costs_no_worker() -> None:
    """The next record, of another key, awaits something cancelled before anything else has ended well."""
    app = App("workers")
    failed: set[int] = set()

    @app.consume("orders", concurrency=1, retry=Retry(attempts=2, jitter=0.0))
    async def handle(record: Record) -> None:
        if record.offset in failed:
            return
        failed.add(record.offset)
        if record.offset == 0:
            await time_out_as_older_libraries_do()
            raise TimeoutError
        await await_something_cancelled()

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(2):
                await client.publish("orders", b"", key=b"%d" % number, partition=0)
            await client.settle(timeout=30.0)

    run(test())


def test_a_cancelled_run_that_leaks_a_cancellation_costs_no_worker() -> None:
    app = App("workers", drain_timeout=1.0, shutdown_timeout=3.0)
    runs = 0

    @app.consume("orders", concurrency=1, retry=Retry(attempts=2, jitter=0.0))
    async def handle(record: Record) -> None:  # noqa: ARG001
        nonlocal runs
        runs += 1
        if runs == 1:
            await time_out_as_older_libraries_do()
            await asyncio.sleep(100.0)
        elif runs == 2:
            await await_something_cancelled()

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            await asyncio.sleep(1.0)
            client.group.rebalance()
            await client.settle(timeout=30.0)

    run(test())

    assert runs == 3
