"""Rerunning records of a run."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioshard.errors import PlanError
from aioshard.spark import redrive
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
]  # a session of Spark starts in it, and the machine may be busy

RECORDS = 200
HANDLERS = """
import asyncio, pathlib, uuid
from aioshard import Retry

@app.consume({topic!r}, shard_by={shard_by}, retry=Retry(attempts=1), on_failure=DeadLetter({dead!r}, breaker=None))
async def handle(record: Record):
    await asyncio.sleep(0.002)
    (pathlib.Path({calls!r}) / uuid.uuid4().hex).touch()
    if record.offset % 10 == 3 and not pathlib.Path({fixed!r}).exists():
        raise ValueError("not yet")
    return [record.partition, record.offset, len(record.headers)]
"""


@pytest.fixture
async def begin(
    spark: "SparkSession",
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
) -> Callable[[str], HistoryRun]:
    """Makes a run over a topic with records in two partitions; every tenth fails until `fixed` exists."""
    await kafka.create_topic(topic, partitions=2)
    for partition in (0, 1):
        values = [(b"%d" % (n % 7), b"%d" % n) for n in range(RECORDS // 2)]
        await kafka.produce(topic, values, partition, headers=[("h", b"1")])
    (tmp_path / "calls").mkdir()

    def begin(shard_by: str) -> HistoryRun:
        source = HANDLERS.format(
            topic=topic,
            shard_by=shard_by,
            dead=f"{topic}.dead",
            calls=str(tmp_path / "calls"),
            fixed=str(tmp_path / "fixed"),
        )
        app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source)
        return HistoryRun(spark, kafka, topic, app, tmp_path / app.name)

    return begin


def names(directory: Path) -> list[str]:
    return sorted(found.name for found in directory.rglob("*"))


async def test_dead_letters_of_a_run_can_be_rerun_from_its_rows(
    begin: Callable[[str], HistoryRun], kafka: SharedKafka, tmp_path: Path
) -> None:
    run = begin('"key"')
    await run.plan()
    with pytest.raises(PlanError, match="run it first"):
        redrive(run.spark, run.directory, out=tmp_path / "again")
    await run.drain()
    before = names(run.directory)
    (tmp_path / "fixed").touch()
    await kafka.delete_records(run.topic, {0: 100, 1: 100})

    again = await asyncio.to_thread(redrive, run.spark, run.directory, out=tmp_path / "again")

    rows: list[Any] = await asyncio.to_thread(again.orderBy("partition", "offset").collect)
    assert [(row["partition"], row["offset"]) for row in rows] == [(p, n) for p in (0, 1) for n in range(3, 100, 10)]
    assert {row["status"] for row in rows} == {"processed"}
    assert [json.loads(row["result"]) for row in rows] == [[row["partition"], row["offset"], 1] for row in rows]
    assert len(names(tmp_path / "calls")) == RECORDS + 20
    assert names(run.directory) == before


async def test_only_rows_with_the_record_can_be_rerun(begin: Callable[[str], HistoryRun], tmp_path: Path) -> None:
    run = begin('"key"')
    (tmp_path / "fixed").touch()
    await run.plan()
    await run.drain()

    with pytest.raises(PlanError, match=r"status=\['processed'\]: expected dead_lettered or skipped"):
        redrive(run.spark, run.directory, out=tmp_path / "again", status="processed")
    with pytest.raises(PlanError, match="has no records with the status dead_lettered"):
        await asyncio.to_thread(redrive, run.spark, run.directory, out=tmp_path / "again")
