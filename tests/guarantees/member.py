"""The app of the scenarios' processes: `python -m aioshard run tests.guarantees.member:app`.

The environment chooses its behavior; see `behaviour`. It reports each step of each record; see
`observations`. And it reports its statistics all the time; see `Report`.
"""

import asyncio
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

from aioshard import App, Context, Record, Retry
from aioshard.core.sharding import ShardBy
from aioshard.errors import StateError
from tests.guarantees.behaviour import POISON, VARIABLE, Behaviour
from tests.guarantees.observations import Kind, Recorder

SAMPLE_INTERVAL = 0.04
RELEASE_INTERVAL = 0.02


class Ownerships:
    """Numbers the ownerships of partitions: each has its own `Context.revoked`."""

    def __init__(self) -> None:
        self._numbers: dict[asyncio.Event, int] = {}

    def number(self, context: Context) -> int:
        """Counted from 1 over all partitions."""
        return self._numbers.setdefault(context.revoked, len(self._numbers) + 1)


class Orders:
    """Orders of the test: files `<process>.<number>.order`, each answered by one that ends in `.answer`.

    An order is the name of a method of the app and its arguments; the answer is the exception, or null.
    """

    def __init__(self, app: App, behaviour: Behaviour) -> None:
        self._app = app
        self._stem = str(Path(behaviour.directory, behaviour.process))
        self._next = 1

    def obey(self) -> None:
        """Does what has been asked since."""
        while (order := Path(f"{self._stem}.{self._next}.order")).exists():
            name, arguments = json.loads(order.read_text())
            refusal = None
            try:
                getattr(self._app, name)(*arguments)
            except StateError as error:
                refusal = str(error)
            written = order.with_suffix(".new")
            written.write_text(json.dumps(refusal))
            written.replace(order.with_suffix(".answer"))
            self._next += 1


class Report:
    """Samples the statistics into the file `<process>.json`, from a thread, until closed.

    The file always holds one whole sample. Ends the process when its parent has ended.
    """

    def __init__(self, app: App, behaviour: Behaviour) -> None:
        self._app = app
        self._explains = behaviour.explains
        self._orders = Orders(app, behaviour)
        self._file = Path(behaviour.directory, f"{behaviour.process}.json")
        self._peaks = {"buffered_records": 0, "buffered_bytes": 0}
        self._samples = 0
        self._rss_at_start = _memory("VmRSS")
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(SAMPLE_INTERVAL):
            if os.getppid() != self._parent:
                os._exit(1)
            self._orders.obey()
            self._sample()
        self._sample()

    def _sample(self) -> None:
        statistics = self._app.statistics()
        for name, peak in self._peaks.items():
            self._peaks[name] = max(peak, getattr(statistics, name))
        self._samples += 1
        sample = {
            "at": time.monotonic_ns(),
            "samples": self._samples,
            "peaks": self._peaks,
            "rss_at_start": self._rss_at_start,
            "rss_peak": _memory("VmHWM"),
            "statistics": statistics.asdict(),
            "explanation": self._app.explain() if self._explains else "",
        }
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps(sample))
        written.replace(self._file)


def _memory(name: str) -> int:
    """Bytes, from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


class Unhashable:
    """A shard key that has no hash."""

    def __hash__(self) -> int:
        raise RuntimeError("the hash of this key is broken")


class Incomparable:
    """A shard key that cannot be compared with another one; all of them have the same hash."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this key cannot be compared")


def _sharding(behaviour: Behaviour, recorder: Recorder) -> ShardBy:
    def reported(record: Record) -> bytes | None:
        recorder.note(Kind.TAKEN_IN, (record.partition, record.offset), 0, record.key)
        return record.key

    def broken(record: Record) -> Any:
        if not (record.value or b"").startswith(POISON):
            return record.key
        match behaviour.shard_by:
            case "cannot be hashed":
                return Unhashable()
            case "cannot be compared":
                return Incomparable()
        raise KeyError("no tenant")

    if behaviour.report_intake:
        return reported
    return "key" if behaviour.shard_by == "key" else broken


def make_app(behaviour: Behaviour) -> App:
    """The app of one member."""

    @contextlib.asynccontextmanager
    async def reporting(app: App) -> AsyncIterator[None]:
        with Report(app, behaviour):
            yield

    app = App(behaviour.group, resources=reporting, **behaviour.settings)
    for each in behaviour.all:
        _consume(app, each)
    return app


def _consume(app: App, behaviour: Behaviour) -> None:
    recorder = Recorder(Path(behaviour.directory), behaviour.process)
    retry = Retry(**behaviour.retry)
    handlers = _Handlers(behaviour, recorder, retry)
    forms: dict[str, Callable[..., object]] = {
        "context": handlers.with_context,
        "record": handlers.with_record,
        "thread": handlers.in_thread,
        "process": in_process,
    }
    app.consume(
        behaviour.topic,
        concurrency=behaviour.concurrency if behaviour.shards is None else None,
        shards=behaviour.shards,
        shard_queue_size=behaviour.shard_queue_size,
        shard_by=_sharding(behaviour, recorder),
        timeout=behaviour.timeout,
        retry=retry,
        on_failure=behaviour.policy,
        run_in="process" if behaviour.form == "process" else None,
    )(forms[behaviour.form])


class Run:
    """One run of the handler."""

    counts = True
    """Whether what it returns is expected to count."""


class _Handlers:
    """The handler in each of its forms."""

    def __init__(self, behaviour: Behaviour, recorder: Recorder, retry: Retry) -> None:
        self._behaviour = behaviour
        self._recorder = recorder
        self._retry = retry
        self._ownerships = Ownerships()

    @contextlib.contextmanager
    def _reported(self, record: Record, context: Context | None) -> Iterator[Run]:
        record_id = record.partition, record.offset
        epoch = 0 if context is None else self._ownerships.number(context)
        run = Run()
        self._recorder.note(Kind.STARTED, record_id, epoch, record.key)
        try:
            yield run
        except BaseException as error:
            kind = Kind.EXHAUSTED if self._was_the_last(context, error) else Kind.ENDED
            self._recorder.note(kind, record_id, epoch, record.key)
            raise
        self._recorder.note(Kind.FINISHED if run.counts else Kind.ENDED, record_id, epoch, record.key)

    def _was_the_last(self, context: Context | None, error: BaseException) -> bool:
        """Whether a run that raised was an attempt that failed, and the last one."""
        if context is None or context.attempt < self._retry.attempts:
            return False
        if isinstance(error, asyncio.CancelledError):
            return context.deadline is not None and asyncio.get_running_loop().time() > context.deadline
        return True

    async def with_context(self, record: Record, context: Context) -> None:
        behaviour = self._behaviour
        with self._reported(record, context) as run:
            if behaviour.hangs_at(record):
                run.counts = await _hang(behaviour)
                return
            if (seconds := behaviour.duration(record)) > 0:
                await asyncio.sleep(seconds)
            if behaviour.hangs_until_cancelled(record, context.attempt):
                await asyncio.Event().wait()
            behaviour.fail(record, context.attempt)
            if behaviour.output is not None:
                await context.publish(behaviour.output, record.value, key=context.idempotency_key)

    async def with_record(self, record: Record) -> None:
        with self._reported(record, None):
            if (seconds := self._behaviour.duration(record)) > 0:
                await asyncio.sleep(seconds)

    def in_thread(self, record: Record, context: Context) -> None:
        with self._reported(record, context) as run:
            if self._behaviour.hangs_at(record):
                run.counts = _hang_in_thread(self._behaviour, context)
            elif (seconds := self._behaviour.duration(record)) > 0:
                time.sleep(seconds)

    def in_process(self, record: Record) -> None:
        with self._reported(record, None):
            if (seconds := self._behaviour.duration(record)) > 0:
                time.sleep(seconds)
            if self._behaviour.hangs_at(record):
                while True:
                    pass


def in_process(record: Record) -> None:
    """The handler in a worker process, which imports this module and finds the same environment."""
    _handlers_here().in_process(record)


@functools.cache
def _handlers_here() -> _Handlers:
    behaviour = Behaviour.from_json(os.environ[VARIABLE])
    return _Handlers(behaviour, Recorder(Path(behaviour.directory), behaviour.process), Retry(**behaviour.retry))


async def _hang(behaviour: Behaviour) -> bool:
    """Returns whether it was left alone; a run that swallowed its cancellation must count for nothing."""
    if behaviour.hangs == "until cancelled":
        await asyncio.Event().wait()
    left_alone = True
    while not behaviour.released():
        try:
            await asyncio.sleep(RELEASE_INTERVAL)
        except asyncio.CancelledError:
            left_alone = False
    return left_alone


def _hang_in_thread(behaviour: Behaviour, context: Context) -> bool:
    """Returns whether it was left alone; a thread hears of its cancellation only by its partition's leaving."""
    left_alone = True
    while not behaviour.released():
        time.sleep(RELEASE_INTERVAL)
        left_alone = left_alone and not context.revoked.is_set()
    return left_alone


app = make_app(Behaviour.from_json(os.environ[VARIABLE]))
