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
from aioshard.core import loop_block
from aioshard.core.loop_block import ExecutedCode
from aioshard.engine import loop_watch
from aioshard.engine.loop_watch import LoopWatch
from aioshard.testing import TestClient, run
from tests.engine.deliveries import no_handlers
from tests.engine.live_apps import until, watch_of
from tests.support.loops import LOOPS, NewLoop, run_on

THREAD = "aioshard loop watch"
LOGGER = "aioshard.engine.loop_watch"


def make_app() -> App:
    return App("watched", auto_offset_reset="earliest", drain_timeout=1.0, shutdown_timeout=5.0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    with caplog.at_level(logging.INFO, LOGGER):
        yield lambda: [(record.levelno, record.getMessage()) for record in caplog.records if record.name == LOGGER]


Logged = Callable[[], list[tuple[int, str]]]


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
            block = self._app.statistics().blocked
            self.seen = None if block is None else str(block)
        time.sleep(0.2)  # for the log
        self._over.set()

    async def until_seen(self) -> str:
        await asyncio.to_thread(self._asking.join)
        assert self.seen is not None
        return self.seen


@LOOPS
def test_a_blocking_handler_is_named_with_its_line(
    new_loop: NewLoop, logged: Logged, caplog: pytest.LogCaptureFixture
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
            await until(lambda: len(logged()) == 2, 10.0)
            assert app.statistics().blocked is None

        what = (
            "handler on_order blocks without an await, with record orders/2/0, "
            f"at {__file__}:{line_of('it blocks here')} in Blocking.__call__ in threading.Event.wait"
        )
        reason = rf"{re.escape(what)}(; in addition, the machine gave .*)?"
        assert re.fullmatch(rf"the event loop has been blocked for \d+\.\d s: {reason}", seen)
        (began, first), (ended, second) = logged()
        assert began == ended == logging.WARNING
        lines = [vars(record) for record in caplog.records if record.name == LOGGER]
        assert [line["event"] for line in lines] == ["loop_blocked", "loop_resumed"]
        for line in lines:
            assert f" {line['seconds']} s: " in line["message"]
        assert re.fullmatch(rf"the event loop has been blocked for \d+\.\d s: {reason}", first)
        assert re.fullmatch(rf"the event loop runs again after \d+\.\d s: {reason}", second)
        assert "alice" not in "".join(text for _, text in logged())

    run_on(new_loop, main())


async def test_the_end_of_a_block_names_the_code_that_later_looks_miss(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    blocks = Blocking(app)
    find_code = LoopWatch.find_code
    missed = threading.Event()

    def find_until_seen(watch: LoopWatch) -> ExecutedCode | None:
        if blocks.seen is None:
            return find_code(watch)
        missed.set()
        return None

    monkeypatch.setattr(LoopWatch, "find_code", find_until_seen)

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        blocks()
        missed.wait(20.0)

    async with TestClient(app) as client:
        await client.publish("orders", "x", key="alice", partition=2)
        await until(lambda: len(logged()) == 2, 20.0)

    for _, text in logged():
        assert "handler on_order blocks without an await, with record orders/2/0, at" in text


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
            findings = [finding.sentence for finding in app.diagnose().findings if finding.kind == "event loop"]
            head = next((partition.head for partition in app.diagnose().partitions if partition.head is not None), None)
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
    assert "handler on_order blocks" in finding
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
        assert "handler on_order blocks without an await, with record orders/1/0" in await blocks.until_seen()


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
        assert "task 'report', which is not a handler, blocks without an await, at" in await blocks.until_seen()
        released.set()


async def test_a_handler_is_not_blamed_because_it_executes_at_one_moment() -> None:
    app = make_app()
    explained: list[str] = []
    stacks: list[bool] = []

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        explained.append(app.explain())
        (head,) = [partition.head for partition in app.diagnose().partitions if partition.head is not None]
        assert head.stack is not None
        stacks.append(head.stack.executing)
        explained.append(f"{head.reason} {head.what_to_do}")

    async with TestClient(app) as client:
        await client.publish("orders", "x", partition=1)
        await client.settle()
    assert stacks == [True]
    for text in explained:
        assert "on_order" in text
        assert "without an await" not in text
        assert "to_thread" not in text


async def test_a_blocking_line_is_logged_once_a_minute(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_block, "BLOCKED_AFTER", 0.3)
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", 0.3)
    monkeypatch.setattr(loop_watch, "_FIRST_LOOK", 0.2)
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        time.sleep(0.5)  # noqa: ASYNC251 - that is the fault

    async with TestClient(app) as client:
        for _ in range(3):
            await client.publish("orders", "x", partition=1)
            await client.settle()
        await until(lambda: len(logged()) == 2, 5.0)
        assert ["has been blocked" in text for _, text in logged()] == [True, False]
        monkeypatch.setattr(loop_watch, "_AGAIN_AFTER", 0.0)
        await client.publish("orders", "x", partition=1)
        await client.settle()
        await until(lambda: len(logged()) == 4, 5.0)


def hold_the_lock() -> None:
    """Compute as a call into a library that does not let other threads run."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000.0)
    try:
        end = time.thread_time() + 2.0
        while time.thread_time() < end:
            pass
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(("in_a_thread", "cause"), [(False, "computes"), (True, "interpreter lock")])
async def test_a_call_that_holds_the_gil_is_reported_afterwards(
    logged: Logged, caplog: pytest.LogCaptureFixture, cause: str, *, in_a_thread: bool
) -> None:
    app = make_app()

    if in_a_thread:

        @app.consume("orders")
        def in_thread(_: Record) -> None:
            hold_the_lock()

    else:

        @app.consume("orders")
        async def in_loop(_: Record) -> None:
            hold_the_lock()

    async with TestClient(app) as client:
        await client.publish("orders", "x", partition=1)
        await client.settle(20.0)
        await until(logged, 10.0)
    assert [level for level, _ in logged()] == [logging.WARNING]
    (line,) = (vars(record) for record in caplog.records if record.name == LOGGER)
    assert (line["event"], line["cause"]) == ("loop_resumed", cause)
    assert "without an await" not in line["message"], "no line is known"


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
    watch = LoopWatch(no_handlers())
    running = asyncio.create_task(watch.run(), name="watch")
    await asyncio.sleep(0)
    assert watch.standing() > 0.0
    running.cancel()
    await asyncio.wait([running])
    assert watch.standing() == 0.0
    assert watch.blocked() is None


def test_the_watch_thread_ends_with_a_discarded_loop() -> None:
    async def main() -> None:
        task = asyncio.create_task(LoopWatch(no_handlers()).run(), name="loop watch")
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
