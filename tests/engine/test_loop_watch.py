"""A blocked event loop is reported from another thread: while it lasts and in the log afterwards."""

import asyncio
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aioshard import App, Batch, Record
from aioshard.engine import watch
from aioshard.engine.watch import LoopWatch
from aioshard.testing import TestClient, run
from tests.engine.running import until, watch_of
from tests.support.loops import LOOPS, NewLoop, run_on

THREAD = "aioshard loop watch"
LOGGER = "aioshard.engine.watch"


def make_app() -> App:
    return App("watched", auto_offset_reset="earliest", drain_timeout=1.0, shutdown_timeout=5.0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    with caplog.at_level(logging.INFO, LOGGER):
        yield lambda: [(one.levelno, one.getMessage()) for one in caplog.records if one.name == LOGGER]


Told = Callable[[], list[tuple[int, str]]]


class Blocking:
    """Blocks the loop that calls it until it was seen from another thread that the loop is blocked."""

    def __init__(self, app: App) -> None:
        self.seen: str | None = None
        self._app = app
        self._began = threading.Event()
        self._over = threading.Event()
        self._asking = threading.Thread(target=self._ask)
        self._asking.start()

    def __call__(self) -> None:
        self._began.set()
        self._over.wait(20.0)  # it blocks here

    def _ask(self) -> None:
        self._began.wait(20.0)
        end = time.monotonic() + 15.0
        while self.seen is None and time.monotonic() < end:
            time.sleep(0.02)
            self.seen = self._app.statistics().blocked
        time.sleep(0.2)  # for the log
        self._over.set()

    async def until_seen(self) -> str:
        await asyncio.to_thread(self._asking.join)
        assert self.seen is not None
        return self.seen


@LOOPS
def test_a_blocking_handler_is_named_with_its_line(
    new_loop: NewLoop, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    blocks: Blocking

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        blocks()

    async def main() -> None:
        nonlocal blocks
        blocks = Blocking(app)
        async with TestClient(app) as client:
            await client.publish("orders", "x", key="alice", partition=2)
            seen = await blocks.until_seen()
            await until(lambda: len(told()) == 2, 10.0)
            assert app.statistics().blocked is None

        what = (
            "handler on_order computes or blocks without an await, with record orders/2/0, "
            f"at {__file__}:{line_of('it blocks here')} in Blocking.__call__ in threading.Event.wait"
        )
        assert re.fullmatch(rf"the event loop has been blocked for 1\.\d s: {re.escape(what)}", seen)
        (began, first), (ended, second) = told()
        assert began == ended == logging.WARNING
        lines = [vars(one) for one in caplog.records if one.name == LOGGER]
        assert [one["event"] for one in lines] == ["loop_blocked", "loop_resumed"]
        for one in lines:
            assert f" {one['seconds']} s: " in one["message"]
        assert re.fullmatch(rf"the event loop has been blocked for 1\.\d s: {re.escape(what)}", first)
        assert re.fullmatch(rf"the event loop runs again after [12]\.\d s: {re.escape(what)}", second)
        assert "alice" not in "".join(text for _, text in told())

    run_on(new_loop, main())


@LOOPS
def test_explanations_count_seconds_while_the_event_loop_is_blocked(new_loop: NewLoop) -> None:
    app = make_app()
    explained: list[tuple[str, float]] = []
    over = threading.Event()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        over.wait(20.0)

    def ask() -> None:
        end = time.monotonic() + 15.0
        while not explained and time.monotonic() < end:
            time.sleep(0.05)
            findings = [one.sentence for one in app.diagnose().findings if one.kind == "event loop"]
            head = next((one.head for one in app.diagnose().partitions if one.head is not None), None)
            if findings and head is not None:
                explained.append((findings[0], head.age))
        over.set()

    async def main() -> None:
        asking = threading.Thread(target=ask)
        async with TestClient(app) as client:
            asking.start()
            await client.publish("orders", "x", partition=2)
            await client.settle(20.0)
            await asyncio.to_thread(asking.join)

    run_on(new_loop, main())

    ((finding, age),) = explained
    assert "handler on_order computes or blocks" in finding
    assert finding.endswith("; nothing else runs meanwhile")
    assert age >= 0.7, "the record has been in flight for as long as the loop has been blocked"


async def test_a_task_started_by_a_handler_counts_as_the_handler() -> None:
    app = make_app()
    blocks = Blocking(app)

    async def fetch() -> None:
        await asyncio.sleep(0)
        blocks()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        await asyncio.gather(asyncio.sleep(0), fetch())

    async with TestClient(app) as client:
        await client.publish("orders", "x", partition=1)
        assert (
            "handler on_order computes or blocks without an await, with record orders/1/0" in await blocks.until_seen()
        )


async def test_a_blocking_batch_names_its_first_record_and_the_rest_count() -> None:
    app = make_app()
    blocks = Blocking(app)

    @app.consume("orders", batch=Batch(max_records=3, linger=1.0))
    async def on_orders(_: list[Record]) -> None:
        blocks()

    async with TestClient(app) as client:
        for number in range(3):
            await client.publish("orders", str(number), key=str(number), partition=1)
        assert "with record orders/1/0 and 2 more of its batch" in await blocks.until_seen()


async def test_a_blocking_task_outside_handlers_is_not_blamed_on_one() -> None:
    app = make_app()
    blocks, released = Blocking(app), asyncio.Event()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        await released.wait()

    async def of_the_application() -> None:
        blocks()

    async with TestClient(app) as client:
        await client.publish("orders", "x", partition=1)
        await until(lambda: app.statistics().handlers[0].busy, 10.0)
        await asyncio.create_task(of_the_application(), name="report")
        assert (
            "task 'report', which is not a handler, computes or blocks without an await, at"
            in await blocks.until_seen()
        )
        released.set()


async def test_a_blocking_line_is_logged_once_a_minute(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BLOCKED_AFTER", 0.3)
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        time.sleep(0.5)  # noqa: ASYNC251 - that is the fault

    async with TestClient(app) as client:
        for _ in range(3):
            await client.publish("orders", "x", partition=1)
            await client.settle()
        await until(lambda: len(told()) == 2, 5.0)
        assert ["has been blocked" in text for _, text in told()] == [True, False]
        monkeypatch.setattr(watch, "_AGAIN_AFTER", 0.0)
        await client.publish("orders", "x", partition=1)
        await client.settle()
        await until(lambda: len(told()) == 4, 5.0)


async def test_a_call_that_holds_the_gil_is_reported_afterwards(told: Told) -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1_000.0)  # as a call into a library that does not let other threads run
        try:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                pass
        finally:
            sys.setswitchinterval(before)

    async with TestClient(app) as client:
        await client.publish("orders", "x", partition=1)
        await client.settle(20.0)
        await until(told, 10.0)
    ((level, text),) = told()
    # On a busy machine it may look as if the process itself had been kept from running.
    assert level in {logging.WARNING, logging.INFO}
    assert re.match(r"the event loop (was blocked|and all threads stood still) for [12]\.\d s", text)


async def test_event_loop_delays_are_counted() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        time.sleep(0.6)  # noqa: ASYNC251 - that is the fault

    async with TestClient(app) as client:
        await asyncio.sleep(0.6)
        before = app.statistics().loop_delays
        assert before is not None
        assert before.count >= 2
        await client.publish("orders", "x", partition=1)
        await client.settle()
        await asyncio.sleep(0.3)
        after = app.statistics().loop_delays
        assert after is not None
        late = [count - was for count, was in zip(after.counts, before.counts, strict=True)]
        assert sum(late[after.bounds.index(0.25) + 1 :]) >= 1
        assert after.total - before.total >= 0.3


# Its thread


async def test_the_watch_thread_runs_as_long_as_the_engine() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    for _ in range(2):
        async with TestClient(app):
            await until(lambda: len(threads()) == 1, 5.0)
            assert threads()[0].daemon
        await until(lambda: not threads(), 5.0)


async def test_an_unwatched_loop_is_not_reported_as_blocked() -> None:
    watch = LoopWatch(list)
    running = asyncio.create_task(watch.run(), name="watch")
    await asyncio.sleep(0)
    assert watch.ticked is not None
    running.cancel()
    await asyncio.wait([running])
    assert watch.standing() == 0.0
    assert watch.blocked() is None


def test_the_watch_thread_ends_with_a_discarded_loop() -> None:
    async def main() -> None:
        task = asyncio.create_task(LoopWatch(list).run(), name="loop watch")
        await asyncio.sleep(0.01)
        assert len(threads()) == 1
        assert not task.done()

    asyncio.run(main())  # cancels what is left
    for thread in threads():
        thread.join(5.0)
    assert not threads()


def test_virtual_time_has_no_loop_watch() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    async def test() -> None:
        async with TestClient(app):
            await asyncio.sleep(100.0)
            assert watch_of(app).loop is None
            assert not threads()
            statistics = app.statistics()
            assert (statistics.loop_delays, statistics.blocked) == (None, None)

    run(test())


async def test_a_replay_has_no_loop_watch() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    client = TestClient(app)
    async with app.started(client._make_transport, replay=True):
        assert watch_of(app).loop is None
        assert not threads()
