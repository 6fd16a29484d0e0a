"""The app that the scenarios run in processes of their own: `python -m aioshard run tests.guarantees.member:app`.

What it does is chosen by the environment; see `behaviour`. It reports each step of each record; see
`observations`. And it reports its statistics all the time; see `Report`.
"""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Self

from aioshard import App, Context, Record
from aioshard.core.sharding import ShardBy
from tests.guarantees.behaviour import VARIABLE, Behaviour
from tests.guarantees.observations import Kind, Recorder

__all__ = ["Report", "app", "make_app"]

SAMPLE_INTERVAL = 0.04
RELEASE_INTERVAL = 0.02


class Ownerships:
    """Numbers the ownerships of partitions: each has one `Context.revoked` of its own."""

    def __init__(self) -> None:
        self._numbers: dict[asyncio.Event, int] = {}

    def number(self, context: Context) -> int:
        """Counted from 1 over all partitions."""
        return self._numbers.setdefault(context.revoked, len(self._numbers) + 1)


class Report:
    """Samples the statistics into the file `<process>.json`, from a thread, until closed.

    The file always holds one whole sample. Ends the process when its parent has ended.
    """

    def __init__(self, app: App, behaviour: Behaviour) -> None:
        self._app = app
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


def make_app(behaviour: Behaviour) -> App:
    """The app of one member."""
    recorder = Recorder(Path(behaviour.directory), behaviour.process)

    @contextlib.asynccontextmanager
    async def reporting(app: App) -> AsyncIterator[None]:
        with Report(app, behaviour):
            yield

    def key_of(record: Record) -> bytes | None:
        recorder.note(Kind.TAKEN_IN, (record.partition, record.offset), 0, record.key)
        return record.key

    app = App(behaviour.group, resources=reporting, **behaviour.settings)
    handlers = _Handlers(behaviour, recorder)
    forms: dict[str, Callable[..., object]] = {
        "context": handlers.with_context,
        "record": handlers.with_record,
        "thread": handlers.in_thread,
    }
    shard_by: ShardBy = key_of if behaviour.report_intake else "key"
    app.consume(behaviour.topic, concurrency=behaviour.concurrency, shard_by=shard_by)(forms[behaviour.form])
    return app


class Run:
    """One run of the handler."""

    counts = True
    """Whether what it returns is expected to count."""


class _Handlers:
    """The handler in each of its forms."""

    def __init__(self, behaviour: Behaviour, recorder: Recorder) -> None:
        self._behaviour = behaviour
        self._recorder = recorder
        self._ownerships = Ownerships()

    @contextlib.contextmanager
    def _reported(self, record: Record, context: Context | None) -> Iterator[Run]:
        place = record.partition, record.offset
        epoch = 0 if context is None else self._ownerships.number(context)
        run = Run()
        self._recorder.note(Kind.STARTED, place, epoch, record.key)
        try:
            yield run
        except BaseException:
            self._recorder.note(Kind.ENDED, place, epoch, record.key)
            raise
        self._recorder.note(Kind.FINISHED if run.counts else Kind.ENDED, place, epoch, record.key)

    async def with_context(self, record: Record, context: Context) -> None:
        with self._reported(record, context) as run:
            if self._behaviour.hangs_at(record):
                run.counts = await _hang(self._behaviour)
            elif (seconds := self._behaviour.duration(record)) > 0:
                await asyncio.sleep(seconds)

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
