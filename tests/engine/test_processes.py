"""Handlers that run in worker processes: real processes on the in-memory broker."""

import asyncio
import contextlib
import copy
import ctypes
import dataclasses
import json
import multiprocessing
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aioshard import (
    App,
    Batch,
    BatchContext,
    BatchError,
    Context,
    DeadLetter,
    Limit,
    Message,
    Record,
    Retry,
    processes,
)
from aioshard.errors import DecodeError, NotDrainedError, StartError, StateError
from aioshard.processes import Processes
from aioshard.testing import InMemoryBroker, InMemoryProducer, TestClient, run
from tests.engine.live_apps import engine_of, until
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

PATIENCE = 30.0


# Reports from the handlers ---------------------------------------------------------


class Reports(asyncio.DatagramProtocol):
    """Receives the reports of handlers in the order in which they send them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._words: asyncio.Queue[list[str]] = asyncio.Queue()

    def datagram_received(self, data: bytes, _: object) -> None:
        self._words.put_nowait(data.decode().split())

    async def next(self) -> list[str]:
        async with asyncio.timeout(PATIENCE):
            return await self._words.get()

    async def take(self, count: int) -> list[list[str]]:
        return [await self.next() for _ in range(count)]


@pytest.fixture
async def reports(tmp_path: Path) -> AsyncIterator[Reports]:
    path = str(tmp_path / "reports")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(path)
        bound.settimeout(0)
        transport, reports = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Reports(path), sock=bound
        )
        yield reports
        transport.close()


def tell(record: Record, *words: object) -> None:
    """Tell the test; the value of the record begins with the path of its socket."""
    path = (record.value or b"").decode().split("|")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(" ".join(map(str, words)).encode(), path)


async def ended(pid: int) -> None:
    """Wait until a process has ended."""
    with contextlib.suppress(ProcessLookupError):  # ended, and reaped by the app
        process = os.pidfd_open(pid)
        try:
            readable, *_ = await asyncio.to_thread(select.select, [process], [], [], PATIENCE)
            assert readable, f"process {pid} still runs"
        finally:
            os.close(process)


def make_app(count: int = 2, **settings: Any) -> App:
    times = {"drain_timeout": 0.5, "shutdown_timeout": 5.0}
    return App("computing", processes=count, **{**times, **settings})


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    """An app that has ended leaves no process."""
    before = children()
    yield
    assert children() <= before


# Order and cores ---------------------------------------------------------------------------


def numbered(record: Record) -> None:
    tell(record, os.getpid(), "begins", (record.key or b"").decode(), record.offset)
    sum(range(20_000))
    tell(record, os.getpid(), "ends", (record.key or b"").decode(), record.offset)


async def test_keys_stay_in_order_and_spread_over_all_processes(reports: Reports) -> None:
    app = make_app()
    app.consume("orders", run_in="process")(numbered)
    async with TestClient(app) as client:
        for number in range(60):
            await client.publish("orders", reports.path, key=f"k{number % 5}", partition=0)
        steps = await reports.take(120)
        await client.settle(PATIENCE)
        assert app.statistics().handlers[0].concurrency == 2

    for key in range(5):
        offsets = [str(offset) for offset in range(60) if offset % 5 == key]
        ran = [(what, offset) for _, what, of, offset in steps if of == f"k{key}"]
        assert ran == [(what, offset) for offset in offsets for what in ("begins", "ends")]
    assert len({pid for pid, *_ in steps}) == 2
    assert str(os.getpid()) not in {pid for pid, *_ in steps}


async def test_fixed_shards_share_the_processes(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", shards=4, run_in="process", timeout=PATIENCE)(numbered)
    async with TestClient(app) as client:
        for number in range(12):
            await client.publish("orders", reports.path, key=f"k{number}")
        steps = await reports.take(24)
        await client.settle(PATIENCE)

    assert [what for _, what, *_ in steps] == ["begins", "ends"] * 12


async def test_a_run_in_a_process_does_not_begin_while_another_member_may_own_its_partition(reports: Reports) -> None:
    """The event loop may be blocked while the run waits for a process."""
    app = make_app(1)
    client = TestClient(app)
    is_late = True

    @app.middleware
    async def late(record: Record, context: Context, call_next: Callable[..., Any]) -> object:
        if is_late:
            client.transports[-1].owned_until = 0.0
        return await call_next(record, context)

    app.consume("orders", run_in="process")(numbered)
    async with client:
        await client.publish("orders", reports.path, partition=0)
        lease = engine_of(app).handlers.workers[0].lease
        await until(lambda: lease._waiting, PATIENCE)
        before = children()
        await client.revoke("orders", 0)  # the run that waits is cancelled, and its process is free
        is_late = False
        await client.assign("orders", 0)
        (pid, *begins), ends = await reports.take(2)
        await client.settle(PATIENCE)
        assert children() == before, "no process was killed"

    assert (begins, ends[1:]) == (["begins", "0"], ["ends", "0"])
    assert int(pid) in before


# Failures ------------------------------------------------------------------------------------


class PaymentError(Exception):
    """Pickle takes it."""


class OddError(Exception):
    """It cannot be made from its message alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """It refuses to be changed, and so a note too."""

    code: int


class SlotsError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int, *, reason: str) -> None:
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


class LockError(Exception):
    """It holds something that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class RefusingError(Exception):
    """It refuses a note, to be pickled and to be shown."""

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("nothing may be set")

    def __reduce__(self) -> Any:
        raise RuntimeError("not pickled")

    def __str__(self) -> str:
        raise RuntimeError("not shown")


class LosingError(Exception):
    """Unpickling it makes something else."""

    def __reduce__(self) -> Any:
        return str, ("not an exception",)


class NotInTheAppError(Exception):
    """Only the process that raised it can make it."""

    def __reduce__(self) -> Any:
        return _make_in_a_worker_process, (NotInTheAppError, *self.args)


class NotInTheApp:
    """A result that cannot reach the app."""

    def __reduce__(self) -> Any:
        return _make_in_a_worker_process, (NotInTheApp,)


def _make_in_a_worker_process(kind: Callable[..., object], *arguments: object) -> object:
    if os.getpid() == int(os.environ["PID_OF_THE_APP"]):
        raise RuntimeError("not here")
    return kind(*arguments)


def declines(record: Record, context: Context) -> None:
    tell(record, "attempt", context.attempt)
    if context.attempt < 3:
        raise PaymentError("declined")


async def test_a_failed_attempt_is_retried_as_its_exception_asks(reports: Reports) -> None:
    app = make_app()
    app.consume("orders", run_in="process", retry=Retry(initial=0.01, retry_on=(PaymentError,)))(declines)
    async with TestClient(app) as client:
        await client.publish("orders", reports.path)
        assert await reports.take(3) == [["attempt", str(attempt)] for attempt in (1, 2, 3)]
        await client.settle(PATIENCE)
        assert app.statistics().handlers[0].retried == 2


def _with_a_note(error: FrozenError) -> FrozenError:
    object.__setattr__(error, "__notes__", ["a note"])
    return error


ODD: dict[str, Callable[[], Exception]] = {
    "odd": lambda: OddError(7, "odd"),
    "frozen": lambda: FrozenError(code=7),
    "frozen with a note": lambda: _with_a_note(FrozenError(7)),
    "slots": lambda: SlotsError(7, reason="gone"),
    "group": lambda: ExceptionGroup("several", [OddError(7, "odd"), FrozenError(8)]),
    "lock": lambda: LockError("locked"),
    "refuses": RefusingError,
    "loses": lambda: LosingError("text"),
    "not in the app": lambda: NotInTheAppError("text"),
}


KILLED = {"crashes": signal.SIGSEGV, "real-time signal": signal.SIGRTMIN + 1}


def raises(record: Record) -> Any:
    match (record.value or b"").decode():
        case "payment":
            raise PaymentError("declined")
        case odd if odd in ODD:
            raise ODD[odd]()  # noqa: RSE102 - it makes the exception
        case "cancelled":
            raise asyncio.CancelledError
        case "result not in the app":
            return NotInTheApp()
        case "generator":
            return (number for number in range(3))
        case "coroutine":
            return asyncio.sleep(0)
        case "exits":
            os._exit(3)
        case "sys.exit":
            raise SystemExit(4)
        case killed if killed in KILLED:
            os.kill(os.getpid(), KILLED[killed])
    return None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("payment", "PaymentError", "declined"),
        ("odd", "OddError", r"odd \(7\)$"),
        ("frozen", "FrozenError", ""),
        ("frozen with a note", "FrozenError", "7"),
        ("slots", "SlotsError", "7: gone"),
        ("group", "ExceptionGroup", r"several \(2 sub-exceptions\)"),
        ("lock", "ProcessError", r"the handler raised \S*LockError: locked"),
        ("refuses", "RefusingError", "its message cannot be shown"),
        ("loses", "LosingError", "text"),
        ("not in the app", "ProcessError", r"the handler raised \S*NotInTheAppError: text"),
        ("result not in the app", "ProcessError", "the app cannot unpickle what the handler returned"),
        ("cancelled", "CancelledRunError", "the handler raised CancelledError by itself"),
        ("generator", "TypeError", "cannot pickle 'generator' object"),
        ("coroutine", "HandlerError", "the handler returned coroutine, which is never awaited"),
        ("exits", "ProcessError", r"the worker process \d+ ended with exit code 3 during the run"),
        ("sys.exit", "ProcessError", r"the worker process \d+ ended with exit code 4 during the run"),
        ("crashes", "ProcessError", r"the worker process \d+ was killed by SIGSEGV during the run"),
        ("real-time signal", "ProcessError", r"the worker process \d+ was killed by signal \d+ during the run"),
    ],
)
async def test_a_failure_in_a_process_is_the_error_of_the_attempt(
    value: str, error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PID_OF_THE_APP", str(os.getpid()))
    app = make_app(1)
    app.consume("orders", run_in="process", retry=Retry(attempts=1), on_failure=DeadLetter("dead"))(raises)
    async with TestClient(app) as client:
        await client.publish("orders", value)
        await client.settle(PATIENCE)
        await client.publish("orders", "nothing")  # the process, or the next one, takes the next record
        await client.settle(PATIENCE)
        (letter,) = client.records("dead")
        headers = {name: (content or b"").decode() for name, content in letter.headers}

    assert headers["aioshard.error"] == error
    assert re.match(message, headers["aioshard.message"])


async def test_the_traceback_of_the_process_is_added_as_an_exception_note(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", retry=Retry(attempts=1), on_failure="skip")(raises)
    async with TestClient(app) as client:
        await client.publish("orders", "payment")
        await client.settle(PATIENCE)

    assert 'raise PaymentError("declined")' in caplog.text


def loops(record: Record) -> None:
    tell(record, os.getpid())
    if (record.value or b"").endswith(b"|loops"):
        while True:
            pass


async def test_a_run_that_loops_forever_is_killed_at_its_timeout(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", timeout=0.2, retry=Retry(attempts=1), on_failure=DeadLetter("dead"))(loops)
    async with TestClient(app) as client:
        await client.publish("orders", f"{reports.path}|loops")
        (first,) = await reports.next()
        await client.settle(PATIENCE)
        await ended(int(first))
        await client.publish("orders", reports.path)
        (second,) = await reports.next()
        await client.settle(PATIENCE)
        (letter,) = client.records("dead")

    assert second != first
    assert ("aioshard.error", b"AttemptTimeoutError") in letter.headers


def ends_a_program(record: Record) -> None:
    """Report the signal that ended a program, or a forked process, that the handler has started and terminated."""
    _, kind, name = (record.value or b"").decode().split("|")
    number = signal.Signals[name]
    match kind:
        case "program":
            code = _end_a_program(number)
        case "asyncio":
            code = asyncio.run(_end_in_a_loop(number))
        case _:
            code = _end_a_fork()
    tell(record, signal.Signals(-code).name)


def _end_a_program(number: signal.Signals) -> int:
    program = subprocess.Popen(["/bin/sleep", "600"])
    program.send_signal(number)
    try:
        return program.wait(PATIENCE / 3)
    finally:
        program.kill()


async def _end_in_a_loop(number: signal.Signals) -> int:
    program = await asyncio.create_subprocess_exec("/bin/sleep", "600")
    program.send_signal(number)
    try:
        async with asyncio.timeout(PATIENCE / 3):
            return await program.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.kill()


def _end_a_fork() -> int:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe()
    process = fork.Process(target=_begin_and_wait, args=(sender,))
    process.start()
    assert receiver.recv() == "begun"
    process.terminate()
    try:
        process.join(PATIENCE / 3)
        return process.exitcode or 0
    finally:
        process.kill()


def _begin_and_wait(sender: Any) -> None:
    sender.send("begun")
    signal.pause()
    signal.pause()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("program", "SIGTERM"), ("program", "SIGINT"), ("asyncio", "SIGTERM"), ("asyncio", "SIGINT"), ("fork", "SIGTERM")],
)
async def test_signals_end_the_programs_that_a_handler_starts(reports: Reports, kind: str, name: str) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", retry=Retry(attempts=1), on_failure="skip")(ends_a_program)
    async with TestClient(app) as client:
        await client.publish("orders", f"{reports.path}|{kind}|{name}")
        await client.settle(PATIENCE)
        assert app.statistics().handlers[0].processed == 1
        assert await reports.next() == [name]


def waits(record: Record) -> None:
    tell(record, os.getpid())
    if (record.value or b"").endswith(b"|waits"):
        time.sleep(PATIENCE)


async def test_waiting_for_a_process_does_not_count_towards_the_timeout(reports: Reports) -> None:
    app = make_app(1)
    app.consume("slow", run_in="process", retry=Retry(attempts=1), on_failure="skip")(waits)
    app.consume("quick", run_in="process", timeout=0.2, retry=Retry(attempts=1))(loops)
    async with TestClient(app) as client:
        await client.publish("slow", f"{reports.path}|waits")
        (slow,) = await reports.next()
        await client.publish("quick", reports.path)
        await asyncio.sleep(0.5)  # longer than the timeout: nothing may happen
        assert app.statistics().handlers[1].halted == 0
        os.kill(int(slow), signal.SIGKILL)
        await reports.next()
        await client.settle(PATIENCE)
        assert app.statistics().handlers[1].retried == 0


async def test_a_killed_process_fails_its_attempt_and_no_other(reports: Reports) -> None:
    app = make_app(2)
    failures: list[str] = []

    @app.middleware
    async def failing(record: Record, context: Context, call_next: Callable[..., Any]) -> object:
        try:
            return await call_next(record, context)
        except Exception as error:
            failures.append(f"{record.key!r} {error}")
            raise

    app.consume("orders", run_in="process", retry=Retry(initial=0.01))(until_released)
    async with TestClient(app) as client:
        for key in ("a", "b"):
            await client.publish("orders", reports.path, key=key, partition=0)
        pids = {key: pid for key, _, pid in await reports.take(2)}
        os.kill(int(pids["a"]), signal.SIGKILL)
        key, attempt, pid = await reports.next()
        assert (key, attempt) == ("a", "2")
        assert pid not in pids.values()
        for number in (pid, pids["b"]):
            os.kill(int(number), signal.SIGUSR1)
        await client.settle(PATIENCE)

    assert failures == [f"b'a' the worker process {pids['a']} was killed by SIGKILL during the run"]


def until_released(record: Record, context: Context) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    tell(record, (record.key or b"").decode(), context.attempt, os.getpid())
    signal.sigwait({signal.SIGUSR1})


def forking(record: Record) -> None:
    child = os.fork()
    if not child:
        signal.pause()
    tell(record, child)
    signal.pause()


@pytest.mark.chaos
async def test_a_process_forked_by_a_handler_does_not_keep_its_run_alive(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", timeout=0.5, retry=Retry(attempts=1), on_failure="skip")(forking)
    async with TestClient(app) as client:
        await client.publish("orders", f"{reports.path}|")
        (child,) = await reports.next()
        try:
            await client.settle(PATIENCE)
        finally:
            os.kill(int(child), signal.SIGKILL)
        assert app.statistics().handlers[0].skipped == 1


async def test_a_killed_idle_process_is_replaced_without_a_failure(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", retry=Retry(attempts=1))(loops)
    async with TestClient(app) as client:
        await client.publish("orders", reports.path)
        (first,) = await reports.next()
        await client.settle(PATIENCE)
        os.kill(int(first), signal.SIGKILL)
        await ended(int(first))
        await client.publish("orders", reports.path)
        assert await reports.next() != [first]
        await client.settle(PATIENCE)
        assert app.statistics().handlers[0].retried == 0


async def test_a_run_that_outlasts_a_rebalance_is_killed_and_rerun_elsewhere(reports: Reports) -> None:
    app, broker = make_app(1, drain_timeout=0.1, shutdown_timeout=0.5), InMemoryBroker(partitions=1)
    app.consume("orders", run_in="process")(loops)
    with pytest.raises(NotDrainedError):  # noqa: PT012 - leaving the client raises
        async with TestClient(app, broker=broker) as client:
            await client.publish("orders", f"{reports.path}|loops", partition=0)
            (pid,) = await reports.next()
            await client.revoke("orders", 0)
            await ended(int(pid))
            await client.assign("orders", 0)
            (again,) = await reports.next()
            assert again != pid
    await ended(int(again))
    assert broker.committed("computing", "orders", 0) in (None, 0)


# Results that are published ----------------------------------------------------------------


def doubles(record: Record) -> dict[str, int]:
    tell(record, record.offset)
    return {"offset": record.offset}


def reads_pipe(record: Record) -> str:
    tell(record, (record.key or b"").decode())
    return Path((record.value or b"").decode().split("|")[1]).read_text()


class Acknowledgements:
    """Holds the acknowledgements of the topic `paid` until the test sends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: asyncio.Queue[int] = asyncio.Queue()
        """The offsets whose results wait for their acknowledgement."""
        self._sent: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        publish = InMemoryProducer.publish

        async def held(producer: InMemoryProducer, outgoing: Message) -> int:
            if outgoing.topic == "paid":
                offset = json.loads(outgoing.value or b"")["offset"]
                self.waiting.put_nowait(offset)
                await self._sent[offset].wait()
            return await publish(producer, outgoing)

        monkeypatch.setattr(InMemoryProducer, "publish", held)

    def send(self, *offsets: int) -> None:
        for offset in offsets:
            self._sent[offset].set()


@pytest.fixture
def acknowledgements(monkeypatch: pytest.MonkeyPatch) -> Acknowledgements:
    return Acknowledgements(monkeypatch)


async def test_a_process_takes_the_next_record_before_a_result_is_acknowledged(
    reports: Reports, acknowledgements: Acknowledgements
) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", publish_to="paid")(doubles)
    async with TestClient(app) as client:
        await client.publish("orders", reports.path, key="a", partition=0)
        assert await reports.next() == ["0"]
        assert await acknowledgements.waiting.get() == 0
        await client.publish("orders", reports.path, key="b", partition=0)
        assert await reports.next() == ["1"]
        assert await acknowledgements.waiting.get() == 1
        acknowledgements.send(0, 1)
        await client.settle(PATIENCE)
        assert client.committed("orders", 0) == 2


async def test_the_next_record_of_a_key_waits_for_the_acknowledgement(
    reports: Reports, acknowledgements: Acknowledgements
) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", publish_to="paid")(doubles)
    async with TestClient(app) as client:
        for key in ("a", "a", "b"):
            await client.publish("orders", reports.path, key=key, partition=0)
        assert await reports.take(2) == [["0"], ["2"]]
        acknowledgements.send(0)
        assert await reports.next() == ["1"]
        acknowledgements.send(1, 2)
        await client.settle(PATIENCE)


async def test_concurrency_bounds_the_records_whose_results_are_not_acknowledged(
    reports: Reports, acknowledgements: Acknowledgements
) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", publish_to="paid", concurrency=2)(doubles)
    async with TestClient(app) as client:
        for key in ("a", "b", "c"):
            await client.publish("orders", reports.path, key=key, partition=0)
        assert await reports.take(2) == [["0"], ["1"]]
        assert [await acknowledgements.waiting.get() for _ in range(2)] == [0, 1]
        handler = app.statistics().handlers[0]
        assert (handler.busy, handler.queued) == (2, 1)
        acknowledgements.send(1)
        assert await reports.next() == ["2"]
        acknowledgements.send(0, 2)
        await client.settle(PATIENCE)


@pytest.mark.parametrize("limit", [None, Limit("pace", 1_000.0)])
async def test_records_that_wait_for_a_process_are_not_in_flight(reports: Reports, limit: Limit | None) -> None:
    app, pipe = make_app(1), Path(reports.path).with_name("pipe")
    os.mkfifo(pipe)
    app.consume("orders", run_in="process", publish_to="paid", limit=limit)(reads_pipe)
    async with TestClient(app, broker=InMemoryBroker(partitions=2)) as client:
        await client.publish("orders", f"{reports.path}|{pipe}", key="a", partition=0)
        assert await reports.next() == ["a"]
        for key in ("b", "c"):
            await client.publish("orders", f"{reports.path}|{pipe}", key=key, partition=1)
        await until(lambda: app.statistics().handlers[0].queued == 2)
        assert app.statistics().handlers[0].busy == 1
        head = app.diagnose().partitions[1].head
        assert head is not None
        assert head.state == "queued"
        assert "processes=" in (head.what_to_do or "")

        for key in ("b", "c"):
            await asyncio.to_thread(pipe.write_text, "go")
            assert await reports.next() == [key]
        await asyncio.to_thread(pipe.write_text, "go")
        await client.settle(PATIENCE)


async def test_a_middleware_that_waits_after_the_run_keeps_no_process(reports: Reports) -> None:
    app, stored = make_app(1), asyncio.Event()

    @app.middleware
    async def stores(record: Record, context: Context, call_next: Callable[..., Any]) -> object:
        await call_next(record, context)
        await stored.wait()
        return None

    app.consume("orders", run_in="process")(doubles)
    async with TestClient(app) as client:
        for key in ("a", "b"):
            await client.publish("orders", reports.path, key=key, partition=0)
        assert await reports.take(2) == [["0"], ["1"]]
        stored.set()
        await client.settle(PATIENCE)


def doubles_all(records: list[Record]) -> None:
    for record in records:
        tell(record, record.offset)


async def test_batches_take_the_next_process_while_a_middleware_waits(reports: Reports) -> None:
    app, stored = make_app(1), asyncio.Event()

    @app.middleware
    async def stores(records: list[Record], context: BatchContext, call_next: Callable[..., Any]) -> object:
        await call_next(records, context)
        await stored.wait()
        return None

    app.consume("orders", run_in="process", batch=Batch(max_records=2, linger=PATIENCE))(doubles_all)
    async with TestClient(app) as client:
        for key in ("a", "b", "c", "d"):
            await client.publish("orders", reports.path, key=key, partition=0)
        assert await reports.take(4) == [["0"], ["1"], ["2"], ["3"]]
        stored.set()
        await client.settle(PATIENCE)


def fails_first(record: Record) -> dict[str, int]:
    if record.offset < 2:
        raise PaymentError("no money")
    return doubles(record)


async def test_a_failed_run_frees_its_process(reports: Reports, acknowledgements: Acknowledgements) -> None:
    app = make_app(1)
    once = Retry(attempts=1)
    app.consume("orders", run_in="process", publish_to="paid", retry=once, on_failure="skip")(fails_first)
    async with TestClient(app) as client:
        for key in ("a", "b", "c"):
            await client.publish("orders", reports.path, key=key, partition=0)
        assert await reports.next() == ["2"]
        acknowledgements.send(2)
        await client.settle(PATIENCE)
        assert app.statistics().handlers[0].skipped == 2


async def test_a_middleware_that_does_not_call_the_handler_frees_its_place(reports: Reports) -> None:
    app = make_app(1)

    @app.middleware
    async def skips(record: Record, context: Context, call_next: Callable[..., Any]) -> object:
        return await call_next(record, context) if record.key == b"b" else None

    app.consume("orders", run_in="process")(doubles)
    async with TestClient(app) as client:
        for key in ("a", "a", "b"):
            await client.publish("orders", reports.path, key=key, partition=0)
        assert await reports.next() == ["2"]
        await client.settle(PATIENCE)


# The context, payloads and batches -----------------------------------------------------------


def shows(record: Record, context: Context) -> None:
    late = None if context.deadline is None else 0 < context.deadline - time.monotonic() <= 20.0
    assert context.record == record
    tell(record, context.attempt, context.idempotency_key, context.replay, late, "Event" in repr(context))
    for use in (lambda: context.state, lambda: context.revoked, lambda: context.publish("topic", b"")):
        try:
            use()
        except StateError as error:
            tell(record, error)


async def test_the_context_works_in_a_process(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", timeout=20.0)(shows)
    async with TestClient(app) as client:
        await client.publish("orders", reports.path, partition=2)
        assert await reports.next() == ["1", "orders/2/0", "False", "True", "False"]
        for words in await reports.take(3):
            assert "belong to the process of the app" in " ".join(words)
        await client.settle(PATIENCE)


def shows_batch(records: list[Record], context: BatchContext) -> None:
    keys = [context.idempotency_key(record) for record in context.records]
    tell(records[0], len(records), context.attempt, *keys)
    if context.attempt == 1:
        raise BatchError({records[1]: OddError(1, "the second"), records[2]: PaymentError("the third")})


def make_double() -> Callable[[int, object], int]:
    return lambda number, _: 2 * number


@pytest.mark.parametrize("program", ["/does/not/exist", "/bin/false"], ids=["cannot be started", "ends at once"])
async def test_a_process_that_cannot_start_is_not_the_failure_of_a_record(
    reports: Reports, program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", retry=Retry(attempts=1))(loops)
    async with TestClient(app) as client:
        await client.publish("orders", reports.path)
        (first,) = await reports.next()
        await client.settle(PATIENCE)
        python = sys.executable
        monkeypatch.setattr(sys, "executable", program)
        os.kill(int(first), signal.SIGKILL)
        await ended(int(first))
        for key in ("a", "b"):
            await client.publish("orders", reports.path, key=key)
        await until(lambda: app.statistics().trouble, PATIENCE)
        trouble = app.statistics().trouble
        explanation = app.explain()
        kinds = [finding.kind for finding in app.diagnose().findings]
        assert app.statistics().restart_cures == ()

        monkeypatch.setattr(sys, "executable", python)
        assert first not in {pid for (pid,) in await reports.take(2)}
        await client.settle(PATIENCE)
        statistics = app.statistics()

    assert "1 of 1 worker processes do not start" in (trouble or "")
    assert "worker processes do not start" in explanation
    assert "processes" in kinds
    assert statistics.trouble is None
    (handler,) = statistics.handlers
    assert (handler.processed, handler.retried, handler.halted) == (3, 0, 0)
    events = [record.event for record in caplog.records if record.name == "aioshard.processes"]  # type: ignore[attr-defined]
    assert (events[0], events[-1]) == ("process_not_started", "process_started")


async def test_a_record_takes_another_process_while_one_does_not_start(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(2)
    app.consume("orders", run_in="process", retry=Retry(attempts=1))(loops)
    async with TestClient(app) as client:
        await client.publish("orders", reports.path)
        (first,) = await reports.next()
        await client.settle(PATIENCE)
        monkeypatch.setattr(sys, "executable", "/does/not/exist")
        os.kill(int(first), signal.SIGKILL)
        await ended(int(first))
        await client.publish("orders", reports.path)
        assert await reports.next() != [first]
        await client.settle(PATIENCE)
        assert "1 of 2 worker processes do not start" in (app.statistics().trouble or "")


async def test_a_stop_leaves_a_record_without_a_process_incomplete(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(1, shutdown_timeout=0.5)
    app.consume("orders", run_in="process", retry=Retry(attempts=1))(loops)
    client = TestClient(app)

    async def stop_without_a_process() -> None:
        async with client:
            await client.publish("orders", reports.path, partition=0)
            (first,) = await reports.next()
            await client.settle(PATIENCE)
            monkeypatch.setattr(sys, "executable", "/does/not/exist")
            os.kill(int(first), signal.SIGKILL)
            await ended(int(first))
            await client.publish("orders", reports.path, partition=0)
            await until(lambda: app.statistics().trouble, PATIENCE)

    with pytest.raises(NotDrainedError):
        await stop_without_a_process()
    assert client.committed("orders", 0) == 1


async def at_once() -> None:
    """Do not wait: the partitions are ours."""


@pytest.mark.chaos
async def test_a_process_with_an_interrupted_start_is_started_again() -> None:
    async with Processes({0: pickle.dumps(make_double)}, 1) as pool:
        (process,) = pool._processes
        process.kill()
        process.spawn()  # and nothing else: the run that did this was cancelled
        assert await pool.run(0, 21, None, timeout=PATIENCE, until_ours=at_once) == 42


async def test_a_process_that_hangs_while_it_starts_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(processes, "_SLOW_START", 0.1)
    async with Processes({0: pickle.dumps(make_double)}, 1) as pool:
        pool._processes[0].kill()
        monkeypatch.setattr(sys, "executable", str(hanging))
        running = asyncio.create_task(pool.run(0, 21, None, timeout=None, until_ours=at_once), name="run")
        await until(lambda: pool.trouble, PATIENCE)
        assert "1 of 1 worker processes do not start" in (pool.trouble or "")
        assert "they still import the handlers" in (pool.trouble or "")
        running.cancel()


async def test_a_copied_context_keeps_everything_on_the_event_loop() -> None:
    record = Record("orders", 0, 0, None, None, (), 0.0)
    context = Context(record=record, attempt=1, deadline=2.0, revoked=asyncio.Event(), replay=False, state="state")
    copied = copy.copy(context)
    assert (copied, copied.state, copied.deadline, copied.revoked) == (context, "state", 2.0, context.revoked)


async def test_a_batch_runs_in_a_process_and_names_the_records_that_failed(reports: Reports) -> None:
    app = make_app(1)
    batch = Batch(max_records=3, linger=5.0)
    app.consume("orders", run_in="process", batch=batch, shard_by="record", retry=Retry(attempts=1), on_failure="skip")(
        shows_batch
    )
    async with TestClient(app) as client:
        for _ in range(3):
            await client.publish("orders", reports.path, partition=0)
        assert await reports.next() == ["3", "1", "orders/0/0", "orders/0/1", "orders/0/2"]
        await client.settle(PATIENCE)
        handler = app.statistics().handlers[0]

    assert (handler.processed, handler.skipped) == (1, 2)


class Order(NamedTuple):
    path: str
    total: int


def decodes(order: Order | None) -> None:
    if order is not None:
        tell(Record("", 0, 0, None, order.path.encode(), (), 0.0), os.getpid(), order.total)


def decode_text(record: Record) -> Order | None:
    path, _, total = (record.value or b"").decode().partition("|")
    return Order(path, int(total) + os.getpid())


def decodes_batch(orders: list[Order]) -> None:
    for order in orders:
        decodes(order)


async def test_a_typed_payload_is_decoded_in_the_process(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", on_failure=DeadLetter("dead"))(decodes)
    async with TestClient(app) as client:
        await client.publish("orders", [reports.path, 7], key="a")
        await client.publish("orders", None, key="a")
        await client.publish("orders", b"no json", key="a")
        assert (await reports.next())[1] == "7"
        await client.settle(PATIENCE)
        (letter,) = client.records("dead")

    assert ("aioshard.error", DecodeError.__name__.encode()) in letter.headers
    assert ("aioshard.attempts", b"1") in letter.headers


async def test_a_decoder_function_runs_in_the_process(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", decode=decode_text)(decodes)
    async with TestClient(app) as client:
        await client.publish("orders", f"{reports.path}|0")
        pid, total = await reports.next()
        await client.settle(PATIENCE)

    assert total == pid != str(os.getpid())


async def test_a_record_that_cannot_be_decoded_fails_alone_in_its_batch(reports: Reports) -> None:
    app = make_app(1)
    app.consume(
        "orders",
        run_in="process",
        batch=Batch(max_records=3, linger=5.0),
        shard_by="record",
        on_failure=DeadLetter("dead"),
    )(decodes_batch)
    async with TestClient(app) as client:
        for value in ([reports.path, 1], "no json", [reports.path, 2]):
            await client.publish("orders", value, partition=0)
        assert {total for _, total in await reports.take(2)} == {"1", "2"}
        await client.settle(PATIENCE)
        (letter,) = client.records("dead")

    assert letter.value == b"no json"


def returns(record: Record) -> Any:
    return {"paid": (record.value or b"").decode()}


async def test_middleware_gets_the_result_and_may_replace_the_record() -> None:
    app, results = make_app(1), []

    @app.middleware
    async def around(record: Record, context: Context, call_next: Callable[..., Any]) -> object:
        results.append(await call_next(record._replace(value=b"other"), context))
        return None

    app.consume("orders", run_in="process")(returns)
    async with TestClient(app) as client:
        await client.publish("orders", b"book")
        await client.settle(PATIENCE)

    assert results == [{"paid": "other"}]


# The life of the processes ---------------------------------------------------------------------


async def test_processes_start_before_the_first_record_and_end_with_the_app() -> None:
    app, before = make_app(3), children()
    app.consume("orders", run_in="process")(returns)
    async with TestClient(app):
        ours = children() - before
        # The imports of the handler are done: the process has mapped what only this module uses.
        assert len(ours) == 3
        assert all("libffi" in mapped(pid) for pid in ours)
    assert children() == before


@pytest.mark.chaos
async def test_a_handler_has_no_more_workers_than_there_are_processes() -> None:
    app = make_app(2)
    app.consume("orders", run_in="process", concurrency=64)(numbered)
    async with TestClient(app):
        assert app.statistics().handlers[0].concurrency == 2


async def test_an_app_without_such_a_handler_starts_no_process() -> None:
    app, before = make_app(3), children()

    @app.consume("orders")
    def in_thread(record: Record) -> None: ...

    async with TestClient(app):
        assert children() == before


def test_a_virtual_time_loop_refuses_processes() -> None:
    app = make_app(1)
    app.consume("orders", run_in="process")(returns)

    async def enter() -> None:
        async with TestClient(app):
            pass

    with pytest.raises(StateError, match="a loop with virtual time has no sockets"):
        run(enter())


async def test_a_failed_start_leaves_no_process() -> None:
    @contextlib.asynccontextmanager
    async def broken(_: App) -> AsyncIterator[None]:
        raise PaymentError("no database")
        yield

    app = App("computing", processes=2, resources=broken)
    app.consume("orders", run_in="process")(returns)
    with pytest.raises(PaymentError):
        async with TestClient(app):
            pass


class Unwelcome:
    """An object that its process cannot make."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()

    def __call__(self, record: Record) -> None: ...


def _refuse() -> None:
    raise ModuleNotFoundError("no module named 'shop'")


async def test_an_unimportable_handler_fails_the_start() -> None:
    app = make_app(2)
    app.consume("orders", run_in="process")(Unwelcome())
    with pytest.raises(StartError, match="a worker process did not start: ModuleNotFoundError: no module named 'shop'"):
        async with TestClient(app):
            pass


def keeps_the_interpreter(record: Record) -> None:
    tell(record, os.getpid())
    ctypes.PyDLL(None).pause()  # unlike CDLL it does not release the interpreter


async def test_a_run_that_holds_the_gil_can_be_killed_too(reports: Reports) -> None:
    app = make_app(1)
    app.consume("orders", run_in="process", timeout=0.2, retry=Retry(attempts=1), on_failure="skip")(
        keeps_the_interpreter
    )
    async with TestClient(app) as client:
        await client.publish("orders", reports.path)
        (pid,) = await reports.next()
        await client.settle(PATIENCE)
        await ended(int(pid))


# Programs ------------------------------------------------------------------------------------

PROGRAM = """
import asyncio
import ctypes
import os
import signal

from aioshard import App, Record
from aioshard.testing import TestClient

app = App("program", bootstrap_servers="localhost:1", processes=1)
print("imported as", __name__, flush=True)


@app.consume("orders", run_in="process")
def on_order(record: Record) -> None:
    print("runs in", os.getpid(), __name__, flush=True)
    {work}


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with TestClient(app) as client:
        await client.publish("orders", "book", partition=0)
        await stop.wait()
        print("drains", flush=True)
    print("committed", client.committed("orders", 0), flush=True)


{start}
"""
GUARDED = 'if __name__ == "__main__":\n    asyncio.run(main())'


@contextlib.asynccontextmanager
async def program(
    directory: Path, work: str = "pass", start: str = GUARDED
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `python app.py` in its own process group, as a terminal does."""
    (directory / "app.py").write_text(PROGRAM.format(work=work, start=start))
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "app.py"),
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.communicate()


async def line(running: asyncio.subprocess.Process) -> str:
    assert running.stdout is not None
    return (await running.stdout.readline()).decode().strip()


async def test_a_handler_in_the_main_module_is_imported_from_it(tmp_path: Path) -> None:
    async with program(tmp_path) as running:
        assert await line(running) == "imported as __main__"
        assert await line(running) == "imported as __mp_main__"
        assert (await line(running)).endswith("__mp_main__")


@pytest.mark.chaos
@pytest.mark.parametrize("start", ["asyncio.run(main())", "app.run()"])
async def test_a_main_module_that_starts_the_app_at_import_is_refused(tmp_path: Path, start: str) -> None:
    """Otherwise each process would start an app, with processes that start an app."""
    async with program(tmp_path, start=start) as running:
        output, errors = await running.communicate()

    assert output.decode().splitlines() == ["imported as __main__", "imported as __mp_main__"]
    assert running.returncode == 1
    assert "StateError: a worker process imports the main module, which starts the app again" in errors.decode()
    assert "if __name__ == '__main__': app.run()" in errors.decode()


@pytest.mark.parametrize("work", ["while True: pass", "ctypes.PyDLL(None).pause()"], ids=["computes", "keeps the GIL"])
async def test_kill_9_of_the_app_ends_a_process_in_mid_run(tmp_path: Path, work: str) -> None:
    async with program(tmp_path, work) as running:
        await line(running)
        await line(running)
        pid = int((await line(running)).split()[2])
        running.kill()
        await ended(pid)


async def test_ctrl_c_drains_the_app_without_reaching_its_processes(tmp_path: Path) -> None:
    work = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); signal.sigwait({signal.SIGUSR1})"
    async with program(tmp_path, work) as running:
        await line(running)
        await line(running)
        pid = int((await line(running)).split()[2])
        os.killpg(running.pid, signal.SIGINT)
        assert await line(running) == "drains"
        os.kill(pid, signal.SIGUSR1)
        assert await line(running) == "committed 1"
        assert await running.wait() == 0
        await ended(pid)
