"""Live, on Spark, live again under a running producer: every record processed, none twice."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioshard import spark as history
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

HANDLER = """
import os
from aioshard import Context

@app.consume({topic!r}, concurrency=16)
async def handle(record: Record, context: Context) -> None:
    file = os.open({calls!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"%s %d\\n" % (record.value, context.replay))
    os.close(file)
"""


@contextlib.asynccontextmanager
async def producing(kafka: SharedKafka, topic: str) -> AsyncIterator[list[int]]:
    """Appends twenty records every 0.05 s; gives how many there are."""
    produced = [0]
    stop = asyncio.Event()

    async def produce() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            some = range(number * 20, number * 20 + 20)
            await kafka.produce(topic, [(b"k%d" % (n % 30), b"%d" % n) for n in some])
            produced[0] += len(some)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(produce(), name="producer")
    try:
        yield produced
    finally:
        stop.set()
        await task


async def test_live_then_spark_then_live_processes_every_record(
    spark: "SparkSession",
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await kafka.create_topic(topic, 3)
    calls = tmp_path / "calls"
    source = HANDLER.format(topic=topic, calls=str(calls))
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source)
    run = HistoryRun(spark, kafka, topic, app, tmp_path / "run")

    def seen(replay: int) -> list[int]:
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [int(number) for number, flag in map(str.split, lines) if int(flag) == replay]

    async with producing(kafka, topic) as produced:
        async with app.app, asyncio.timeout(60):
            while len(seen(0)) < 100:  # noqa: ASYNC110 - the handler writes a file
                await asyncio.sleep(0.02)
        live_first = len(seen(0))
        await asyncio.sleep(1.0)  # a backlog for the run
        plan = await run.plan(start="committed", max_rows_per_batch=150)
        await run.drain()
        assert (await run.verify()).ok
        done = await history.handover(run.directory)
        assert done.state == "handed-over"
        on_spark = len(seen(1))
        assert on_spark == plan.records > 0
        async with app.app, asyncio.timeout(60):
            while len(seen(0)) < live_first + 100:  # noqa: ASYNC110 - the handler writes a file
                await asyncio.sleep(0.02)
    async with asyncio.timeout(60):
        await app.app.serve(until_caught_up=True)

    counts = Counter(seen(0) + seen(1))
    assert sorted(counts) == list(range(produced[0]))
    assert set(counts.values()) == {1}
