"""`App.drain` ends the app's membership while the process continues."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioshard import App, Context, Record
from aioshard.engine.tasks import outlast
from aioshard.errors import NotDrainedError, StateError
from aioshard.loops import tuned_gc
from aioshard.signals import Signals
from aioshard.testing import InMemoryBroker, InMemoryTransport, TestClient, run
from tests.engine.live_apps import engine_of, publish, until


class Slow:
    """An app whose runs take long, what they did, and a client for it."""

    def __init__(self, seconds: float = 3.0, **settings: Any) -> None:
        self.app = App("billing", **settings)
        self.client = TestClient(self.app)
        self.started: list[int] = []
        self.ended: list[int] = []

        @self.app.consume("orders", shard_by="record", concurrency=4)
        async def handle(record: Record) -> None:
            self.started.append(record.offset)
            await asyncio.sleep(seconds)
            self.ended.append(record.offset)


def test_a_drain_finishes_runs_commits_and_leaves_the_group() -> None:
    slow = Slow()

    async def test() -> None:
        async with slow.client as client:
            await publish(client, 20)
            await until(lambda: len(slow.started) == 4)
            draining = asyncio.create_task(slow.app.drain())
            await asyncio.sleep(0)
            assert slow.app.statistics().state == "draining", "not from the first moment on"

            await draining

            assert slow.app.statistics().state == "stopped"
            assert sorted(slow.ended) == slow.started == [0, 1, 2, 3]
            assert client.committed("orders", 0) == 4
            assert not client.group.members
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 0.1, "the end of the app waited for something"

    run(test())


def test_another_member_gets_the_partitions_of_a_drained_app() -> None:
    slow = Slow()
    other = App("billing", auto_offset_reset="earliest")
    taken_over: list[int] = []

    @other.consume("orders")
    async def handle(record: Record) -> None:
        taken_over.append(record.offset)

    async def test() -> None:
        async with slow.client as client:
            await publish(client, 10)
            async with other.started(lambda: InMemoryTransport(client.broker, "billing")):
                await asyncio.sleep(10)
                await slow.app.drain()
                await client.settle(timeout=60)

    run(test())

    assert sorted(slow.ended + taken_over) == list(range(10))


def test_concurrent_drain_calls_and_the_exit_wait_for_one_drain() -> None:
    slow = Slow()

    async def test() -> None:
        async with slow.client as client:
            await publish(client, 1)
            await until(lambda: slow.started)
            calls = [asyncio.create_task(slow.app.drain()) for _ in range(2)]
            await asyncio.sleep(1)
            calls[0].cancel()
            await asyncio.sleep(1)
            assert calls[0].cancelled()
            assert not calls[1].done()
            assert slow.ended == []
        assert slow.ended == [0], "the end of the app, or a call that was cancelled, has cut the drain short"
        await calls[1]

    run(test())


def test_cancelling_the_exit_of_an_app_cuts_the_drain_short() -> None:
    slow = Slow(seconds=1_000.0)

    async def end() -> None:
        async with slow.client as client:
            await publish(client, 1)
            await until(lambda: slow.started)

    async def test() -> None:
        ending = asyncio.create_task(end())
        await until(lambda: slow.app.statistics().state == "draining")
        began = asyncio.get_running_loop().time()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert asyncio.get_running_loop().time() - began < 5.0
        assert slow.app.statistics().state == "stopped"
        assert slow.ended == []

    run(test())


async def test_a_cancelled_waiter_raises_only_after_the_drain_has_ended() -> None:
    """`async with app` in a task that is cancelled: the task ends as cancelled, and the drain has ended by then."""
    drain = asyncio.create_task(asyncio.Event().wait(), name="drain")
    waiting = asyncio.create_task(outlast(drain, cut_short=True), name="end")
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert drain.cancelled()


def test_runs_that_outlast_the_drain_are_reported_and_stay_uncommitted() -> None:
    slow = Slow(seconds=1_000, shutdown_timeout=2.0)

    async def test() -> None:
        async with slow.client as client:
            await publish(client, 1)
            await until(lambda: slow.started)
            for _ in range(2):
                with pytest.raises(NotDrainedError, match="orders/0/0"):
                    await slow.app.drain()
            assert client.committed("orders", 0) in {None, 0}
            assert not client.group.members

    with pytest.raises(NotDrainedError, match="orders/0/0"):
        run(test())


def test_drain_does_nothing_before_the_start_and_after_the_end() -> None:
    slow = Slow()

    async def test() -> None:
        await slow.app.drain()
        async with slow.client as client:
            await publish(client, 1)
            await client.settle(timeout=60)
        await slow.app.drain()
        assert slow.app.statistics().state == "stopped"
        async with slow.client as client:  # and it may be started again
            await publish(client, 1)
            await client.settle(timeout=60)

    run(test())

    assert slow.ended == [0, 1]


def test_a_drain_during_startup_ends_the_start_without_error() -> None:
    """The hook of a pod that is taken away before it was ready."""
    app = App("billing", start_timeout=None, auto_offset_reset="earliest")

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        def never(operation: str) -> float:
            return 5_000.0 if operation == "start" else 0.0

        broker = InMemoryBroker(clock=lambda: 0.0)
        loop = asyncio.get_running_loop()
        for start_timeout in (None, 9_000.0):
            app.configure(start_timeout=start_timeout)
            began = loop.time()
            loop.call_later(1, lambda: draining.append(loop.create_task(app.drain())))
            async with app.started(lambda: InMemoryTransport(broker, "billing", latency=never)):
                await until(lambda: draining)
                await draining.pop()
                assert app.statistics().state == "stopped"
            assert loop.time() - began < 100

    draining: list[asyncio.Task[None]] = []
    run(test())


def test_a_drained_app_publishes_and_keeps_resources_but_refuses_control_calls() -> None:
    opened: list[str] = []

    class Pool:
        async def __aenter__(self) -> str:
            opened.append("open")
            return "pool"

        async def __aexit__(self, *_: object) -> None:
            opened.append("closed")

    app = App("billing", resources=lambda _: Pool())

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async def test() -> None:
        assert app.state is None
        async with TestClient(app) as client:
            await app.drain()

            assert await app.publish("receipts", b"1", partition=0) == 0
            assert len(client.records("receipts")) == 1
            assert app.state == "pool"
            orders: list[Callable[[], object]] = [
                lambda: app.pause("orders"),
                lambda: app.pause_handler("handle"),
                app.assignment,
            ]
            for order in orders:
                with pytest.raises(StateError, match="has drained"):
                    order()
            assert app.explain() == "The app has drained and no longer consumes.\n"
            assert app.diagnose().partitions == ()
            assert opened == ["open"]
        with pytest.raises(StateError, match="is not running"):
            await app.publish("receipts", b"2")

    run(test())

    assert opened == ["open", "closed"]


async def test_a_drain_can_be_awaited_in_another_event_loop() -> None:
    """That of the health server."""
    slow = Slow(seconds=0.2)
    states: list[str] = []

    def drain() -> None:
        asyncio.run(slow.app.drain())
        states.append(slow.app.statistics().state)

    async with slow.client as client:
        await publish(client, 1)
        await until(lambda: slow.started, 10)
        thread = threading.Thread(target=drain)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert client.committed("orders", 0) == 1
    await asyncio.to_thread(drain)

    assert states == ["stopped", "stopped"]


def test_a_handler_can_drain_the_app_in_its_own_task() -> None:
    app = App("billing")
    tasks: list[asyncio.Task[None]] = []

    @app.consume("orders")
    async def handle(record: Record, context: Context) -> None:  # noqa: ARG001
        tasks.append(asyncio.create_task(app.drain()))
        await asyncio.sleep(1)

    async def test() -> None:
        async with TestClient(app) as client:
            await publish(client, 1)
            await until(lambda: tasks)
            await tasks[0]
            assert client.committed("orders", 0) == 1

    run(test())


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_a_drain_does_not_wait_for_workers_cancelled_by_a_closing_loop(later: float) -> None:
    """`asyncio.run` cancels every task when a server is ended by force."""
    slow = Slow(seconds=1_000.0)

    async def test() -> None:
        async with slow.client as client:
            await publish(client, 10)
            await until(lambda: len(slow.started) == 4)
            began = asyncio.get_running_loop().time()
            for task in asyncio.all_tasks():
                if "worker" in task.get_name() or task.get_name() == "commit coordinator":
                    task.cancel()
            if later:
                await asyncio.sleep(later)
            with contextlib.suppress(NotDrainedError):
                await slow.app.drain()
            assert asyncio.get_running_loop().time() - began < 3.0
            assert client.committed("orders", 0) in {None, 0}

    with contextlib.suppress(NotDrainedError):
        run(test())


def test_serve_continues_after_a_drain_until_it_is_stopped() -> None:
    slow = Slow()

    async def test() -> None:
        async with slow.client as client:
            await publish(client, 1)
            await until(lambda: slow.started)
            serving = asyncio.create_task(slow.app.serve())
            await slow.app.drain()
            await asyncio.sleep(100)
            assert not serving.done()
            slow.app.stop()
            await serving

    run(test())


@pytest.fixture
def default_gc() -> Iterator[None]:
    """Garbage is collected as in a process that has just started; a Spark task leaves its thresholds behind."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("default_gc")
@pytest.mark.parametrize(
    ("serve", "settings", "tuned"),
    [
        (lambda app: app.serve_until_signal(Signals()), {}, True),
        (lambda app: app.serve_until_signal(Signals()), {"tune_gc": False}, False),
        (App.serve, {}, False),
    ],
    ids=["dedicated-process", "refused", "hosted"],
)
def test_a_dedicated_process_collects_garbage_less_often(
    serve: Callable[[App], Any], settings: dict[str, Any], tuned: bool
) -> None:
    slow = Slow(**settings)
    before, frozen = gc.get_threshold(), gc.get_freeze_count()

    async def test() -> None:
        async with slow.client as client:
            serving = asyncio.create_task(serve(slow.app))
            await publish(client, 1)
            await until(lambda: slow.started)
            assert (gc.get_threshold()[0] > before[0]) is tuned
            assert (gc.get_freeze_count() > frozen) is tuned
            slow.app.stop()
            await serving

    run(test())
    assert gc.get_threshold() == before
    assert not tuned or gc.get_freeze_count() == 0


@pytest.mark.parametrize("thresholds", [(0, 10, 10), (100_000, 20, 20)], ids=["off", "higher"])
def test_gc_thresholds_set_by_the_user_are_kept(thresholds: tuple[int, int, int]) -> None:
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        with tuned_gc():
            assert gc.get_threshold() == thresholds
        assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)


def test_a_failure_is_logged_even_without_serve(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()

    async def test() -> None:
        async with slow.client:
            engine_of(slow.app).lifecycle.fail(StateError("access was taken away"))
            await asyncio.sleep(0)
            assert slow.app.statistics().state == "failed"
            await slow.app.drain()
            assert slow.app.statistics().state == "failed", "a restart would help still"

    with caplog.at_level(logging.CRITICAL):
        run(test())

    assert [record.getMessage() for record in caplog.records] == [
        "app 'billing' has failed and no longer consumes: access was taken away"
    ]
