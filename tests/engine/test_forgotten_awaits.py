"""A forgotten `await` fails the run: nothing of the handler, or of a message, would ever have happened (I2)."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, BatchError, Context, DeadLetter, Record, Retry
from aioshard.engine.unawaited import AwaitedCall
from aioshard.engine.worker import SERVING
from aioshard.observe import HandlerStatistics
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, TestClient, run

ONCE = Retry(attempts=1)

# As an error, Python's own warning would keep the dropped coroutine alive.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


def halted(app: App) -> tuple[HandlerStatistics, str, int | None]:
    """Statistics, explanation and committed offset after a record has been published to topic orders."""

    async def test() -> tuple[HandlerStatistics, str, int | None]:
        async with TestClient(app) as client:
            await client.publish("orders", b"", key=b"k", partition=0)
            with pytest.raises(TimeoutError):
                await client.settle()
            return app.statistics().handlers[0], app.explain(), client.committed("orders", 0)

    return run(test())


async def process(record: Record) -> None:
    """The handler that a wrapper forgets to await."""


async def process_all(records: list[Record]) -> None:
    """The same for batches."""


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(argument: Any) -> object:
        return function(argument)

    return wrapper


@pytest.mark.parametrize("batch", [None, Batch(max_records=2, linger=0.0)], ids=["records", "batches"])
def test_a_wrapper_that_does_not_await_the_handler_processes_nothing(batch: Batch | None) -> None:
    app = App("awaits", auto_offset_reset="earliest")
    app.consume("orders", batch=batch, retry=ONCE)(undecorated(process if batch is None else process_all))

    statistics, explanation, committed = halted(app)

    assert (statistics.processed, statistics.halted, committed) == (0, 1, 0)
    assert "coroutine, which is never awaited" in explanation


def test_a_middleware_that_drops_the_result_does_not_hide_it() -> None:
    app = App("awaits", auto_offset_reset="earliest")

    @app.middleware
    async def around(record: Any, context: Any, call_next: Any) -> None:
        await call_next(record, context)

    app.consume("orders", retry=ONCE)(undecorated(process))

    statistics, _, committed = halted(app)

    assert (statistics.processed, statistics.halted, committed) == (0, 1, 0)


def test_an_awaitable_is_not_published() -> None:
    app = App("awaits", auto_offset_reset="earliest")
    app.consume("orders", retry=ONCE, publish_to="copies")(undecorated(process))

    statistics, explanation, _ = halted(app)

    assert (statistics.processed, statistics.halted) == (0, 1)
    assert "coroutine, which is never awaited" in explanation


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_dropped_context_publish_fails_the_run(guarantee: Any) -> None:
    app = App("awaits", auto_offset_reset="earliest", processing_guarantee=guarantee)

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record, context: Context) -> None:
        context.publish("copies", record.value)  # type: ignore[unused-coroutine]
        await asyncio.sleep(0.01)

    statistics, explanation, committed = halted(app)

    assert (statistics.processed, statistics.halted, committed) == (0, 1, 0)
    assert "context.publish('copies') was called at" in explanation
    assert "test_forgotten_awaits.py:" in explanation


def test_a_dropped_app_publish_fails_the_run() -> None:
    app = App("awaits", auto_offset_reset="earliest")

    @app.consume("orders", retry=ONCE)
    async def handle(record: Record) -> None:
        unused = app.publish("copies", record.value)
        assert unused is not None

    statistics, explanation, _ = halted(app)

    assert (statistics.processed, statistics.halted) == (0, 1)
    assert "app.publish('copies') was called at" in explanation


async def test_a_plain_handler_that_drops_a_publish_fails() -> None:
    app = App("awaits", auto_offset_reset="earliest")

    @app.consume("orders", retry=ONCE)
    def handle(record: Record, context: Context) -> None:
        context.publish("copies", record.value)  # type: ignore[unused-coroutine]

    async with TestClient(app) as client:
        await client.publish("orders", b"")
        with pytest.raises(TimeoutError):
            await client.settle(1.0)
        assert app.statistics().handlers[0].halted == 1
        assert client.records("copies") == []


def test_the_next_run_of_the_worker_is_not_blamed() -> None:
    app = App("awaits", auto_offset_reset="earliest")
    runs: list[int] = []

    @app.consume("orders", concurrency=1, retry=Retry(attempts=2, initial=0.1))
    async def handle(record: Record, context: Context) -> None:
        runs.append(record.offset)
        if len(runs) == 1:
            context.publish("copies", record.value)  # type: ignore[unused-coroutine]
        else:
            await context.publish("copies", record.value)

    async def test() -> list[bytes]:
        async with TestClient(app) as client:
            await client.publish("orders", b"a", key=b"a", partition=0)
            await client.publish("orders", b"b", key=b"b", partition=0)
            await client.settle()
            return sorted(record.value or b"" for record in client.records("copies"))

    assert run(test()) == [b"a", b"b"]
    assert sorted(runs) == [0, 0, 1]


def test_a_published_message_may_be_awaited_in_a_task() -> None:
    app = App("awaits", auto_offset_reset="earliest")

    @app.consume("orders", retry=ONCE)
    async def handle(_: Record, context: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(context.publish("copies", b"1"))
            group.create_task(context.publish("copies", b"2"))
        await asyncio.gather(context.publish("copies", b"3"), app.publish("copies", b"4"))

    async def test() -> int:
        async with TestClient(app) as client:
            await client.publish("orders", b"")
            await client.settle()
            return len(client.records("copies"))

    assert run(test()) == 4


def test_a_batch_error_does_not_hide_a_dropped_publish() -> None:
    """The records that it does not name would be complete, without the message of the run."""
    app = App("awaits", auto_offset_reset="earliest")

    @app.consume("orders", batch=Batch(max_records=2, linger=0.1), retry=ONCE)
    async def handle(records: list[Record], context: BatchContext) -> None:
        context.publish("copies", b"")  # type: ignore[unused-coroutine]
        if len(records) > 1:
            raise BatchError({records[1]: ValueError()})

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(2):
                await client.publish("orders", b"", key=b"%d" % number, partition=0)
            with pytest.raises(TimeoutError):
                await client.settle()
            assert app.statistics().handlers[0].processed == 0
            assert client.committed("orders", 0) == 0

    run(test())


def test_the_next_attempt_is_not_blamed() -> None:
    app = App("awaits", auto_offset_reset="earliest")
    kept: list[object] = []

    @app.consume("orders", concurrency=1, retry=Retry(attempts=2, initial=0.1))
    async def handle(record: Record, context: Context) -> None:
        if context.attempt == 1:
            kept.append(context.publish("copies", record.value))
            raise ValueError("bad")
        kept.clear()

    async def test() -> int:
        async with TestClient(app) as client:
            await client.publish("orders", b"")
            await client.settle()
            return app.statistics().handlers[0].processed

    assert run(test()) == 1


def test_a_call_that_is_dropped_during_the_recovery_does_not_fail_the_recovery() -> None:
    """The attempt that made the call has failed already, and the dead letter is written once."""
    app = App("awaits", auto_offset_reset="earliest")
    kept: list[object] = []

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record, context: Context) -> None:
        kept.append(context.publish("copies", record.value))
        raise ValueError("bad")

    def latency() -> float:
        kept.clear()
        return 0.0

    async def test() -> Sequence[Record]:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        transport = partial(InMemoryTransport, broker, "awaits")
        async with app.started(transport, lambda: InMemoryProducer(broker, latency=latency)):
            broker.publish("orders", b"")
            await broker.until(lambda: broker.committed("awaits", "orders", 0) == 1)
            return broker.records("orders.dlt")

    assert len(run(test())) == 1


def test_a_thread_that_outlives_its_run_may_make_the_call() -> None:
    """The event loop may end the run while the thread makes the call."""

    class Ending:
        """A worker whose run ends right after a thread has looked at it."""

        def __init__(self) -> None:
            self.left: list[object] = [SimpleNamespace(starts=1)]

        @property
        def delivery(self) -> object:
            return self.left.pop() if self.left else None

    async def test() -> None:
        SERVING.set(Ending())  # type: ignore[arg-type]
        call = AwaitedCall("context.publish", "copies", depth=1)
        call.begin()

    run(test())
