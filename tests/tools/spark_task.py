"""Where the CPU time of one backfill task goes, without Spark: `python -m tests.tools.spark_task`.

It fills a topic as P10 does, runs the task several times in this process, and writes its rows to a socket that a child
process reads, as Spark's Java does. The CPU time of the event loop's thread is read every 5,000 records. On a machine
that does other work too, the tenth percentile of these figures is steady when the mean is not.
"""

import asyncio
import itertools
import os
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any
from unittest import mock

import click
import pyarrow as pa
from rich.console import Console

from aioshard import App, Record
from aioshard.engine.handler import Completed, Handler
from aioshard.kafka.ranges import RangeTransport
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.spark.outcomes import Outcomes
from aioshard.spark.task import run_handlers
from aioshard.spark.work import Work
from benchmarks.p1 import CONCURRENCY, KEYS, numbered_messages
from benchmarks.stage import stage

_RECORDS = 200_000
_SLICE = 5_000
_MODULE = "spark_task_app"


class _NoOutcomes(Outcomes):
    """Completions are dropped."""

    def observe(self, spec: Handler) -> Completed:  # noqa: ARG002 - the signature of `Observe`
        return lambda _: None


class _NoBatches(Outcomes):
    """Rows are collected, and dropped before they become a batch."""

    def collect(self) -> None:
        for processed in self._handlers:
            processed.collect()
            processed.rows = type(processed.rows)(processed.spec.name, fixed_shards=False)


class _NotPassedOn(Outcomes):
    """Batches are made and dropped."""

    def __init__(self, full: Callable[[pa.RecordBatch], None], rows: int, ahead: float) -> None:  # noqa: ARG002
        super().__init__(lambda _: None, rows, ahead)


_PARTS: dict[str, type[Outcomes]] = {
    "the engine and the handler": _NoOutcomes,
    "with rows": _NoBatches,
    "with batches": _NotPassedOn,
    "the whole task": Outcomes,
}


def _make_app(bootstrap: str, topic: str) -> list[float]:
    """Make the app of the task importable; return the list of the CPU times at which its slices ended."""
    app = App("spark-task", bootstrap_servers=bootstrap)
    ends: list[float] = []
    count = 0

    async def handler(_record: Record) -> None:
        nonlocal count
        count += 1
        if not count % _SLICE:
            ends.append(time.thread_time())

    app.consume(topic, concurrency=CONCURRENCY)(handler)
    module = types.ModuleType(_MODULE)
    vars(module)["app"] = app
    sys.modules[_MODULE] = module
    return ends


@contextmanager
def _reader() -> Iterator[IO[bytes]]:
    """Provide a stream that a child process reads."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        with theirs.makefile("rb") as stream:
            while stream.read(1 << 20):
                pass
        os._exit(0)
    theirs.close()
    with ours, ours.makefile("wb") as stream:
        yield stream
    os.waitpid(child, 0)


def _run(bootstrap: str, topic: str, stream: IO[bytes]) -> tuple[float, float]:
    """Run the task; return the CPU seconds of Spark's thread, and all seconds until the first rows."""
    ranges = {TopicPartition(topic, number): LogRange(0, _RECORDS // 2) for number in (0, 1)}
    work = Work(app=f"{_MODULE}:app", settings={"bootstrap_servers": bootstrap})
    used, began = time.thread_time(), time.perf_counter()
    first = 0.0
    writer: Any = None
    for batch in run_handlers(work, lambda app: RangeTransport(app.settings, ranges)):
        first = first or time.perf_counter() - began
        writer = writer or pa.RecordBatchStreamWriter(stream, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
    return time.thread_time() - used, first


async def _measure(rounds: int) -> None:
    console = Console()
    async with stage(None, quick=False, progress=Console(stderr=True)) as here:
        topic = await here.fill("task", 2, numbered_messages(3 * _RECORDS // 2, KEYS))
        bootstrap = here.cluster.bootstrap
        ends = _make_app(bootstrap, topic.name)
        with _reader() as stream:
            await asyncio.to_thread(_run, bootstrap, topic.name, stream)
            for name, kind in _PARTS.items():
                slices: list[float] = []
                others: list[tuple[float, float]] = []
                with mock.patch("aioshard.spark.task.Outcomes", kind):
                    for _ in range(rounds):
                        ends.clear()
                        others.append(await asyncio.to_thread(_run, bootstrap, topic.name, stream))
                        slices += [end - begin for begin, end in itertools.pairwise(ends)]
                slices.sort()
                loop = slices[len(slices) // 10] / _SLICE * 1e6
                thread = min(used for used, _ in others) / _RECORDS * 1e6
                first = min(first for _, first in others)
                console.print(
                    f"{name}: {loop:.2f} µs/record in the event loop, {thread:.2f} µs/record in Spark's thread, first "
                    f"rows after {first * 1000:.0f} ms"
                )


@click.command()
@click.option("--rounds", default=5, show_default=True, help="How often each part runs.")
def main(rounds: int) -> None:
    """Measure the parts of one backfill task of P10."""
    asyncio.run(_measure(rounds))


if __name__ == "__main__":
    main()
