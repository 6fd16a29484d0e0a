"""Handlers over a DataFrame run once, however their outcomes are used."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from aioshard.errors import HaltedError, PlanError
from aioshard.spark import apply_handlers
from tests.spark.apps import AppModule, write_app
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)  # a session of Spark starts in it, and the machine may be busy

RECORDS = 60


def names(directory: Path) -> list[str]:
    return sorted(found.name for found in directory.iterdir())


COUNTING = """
import pathlib, uuid

@app.consume({topic!r}, shard_by=lambda record: record.value[:1])
async def handle(record: Record):
    (pathlib.Path({calls!r}) / uuid.uuid4().hex).touch()
    if record.value == b"poison":
        raise ValueError("it is poison")
    return record.offset
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A directory with a file for each call of the handler."""
    directory = tmp_path / "calls"
    directory.mkdir()
    return directory


@pytest.fixture
def counting(
    spark_modules: Path, monkeypatch: pytest.MonkeyPatch, kafka: SharedKafka, group: str, topic: str, calls: Path
) -> AppModule:
    """An app whose handler leaves a file for each call."""
    source = "from aioshard import Retry\n" + COUNTING.format(topic=topic, calls=str(calls))
    return write_app(spark_modules, monkeypatch, kafka, group, handlers=source)


@pytest.fixture
async def frame(spark: "SparkSession", kafka: SharedKafka, topic: str) -> "Callable[..., Any]":
    """The records of a topic as a DataFrame; lazy, as DataFrames are."""

    async def make(last: bytes = b"last") -> "DataFrame":
        await kafka.create_topic(topic, partitions=2)
        for partition in (0, 1):
            values = [b"%d" % n for n in range(RECORDS // 2 - 1)] + [last if partition else b"other"]
            await kafka.produce(topic, [(None, value) for value in values], partition)
        read = spark.read.format("aioshard").options(bootstrap_servers=kafka.bootstrap, topics=topic)
        return await asyncio.to_thread(read.load)

    return make


async def test_handlers_run_once_however_outcomes_are_used(
    frame: Callable[..., Any], counting: AppModule, calls: Path, tmp_path: Path
) -> None:
    records = await frame()

    outcomes = await asyncio.to_thread(apply_handlers, records, counting.target, out=tmp_path / "out", tasks=2)

    assert len(names(calls)) == RECORDS

    def use() -> tuple[int, int]:
        outcomes.show(5)
        limited = len(outcomes.limit(7).collect())
        for sink in ("one", "two"):
            outcomes.write.parquet(str(tmp_path / sink))
        return limited, outcomes.count()

    assert await asyncio.to_thread(use) == (7, RECORDS)
    assert len(names(calls)) == RECORDS
    assert pq.read_table(tmp_path / "one").num_rows == pq.read_table(tmp_path / "out").num_rows == RECORDS


async def test_existing_rows_are_not_overwritten(
    frame: Callable[..., Any], counting: AppModule, calls: Path, tmp_path: Path
) -> None:
    records = await frame()
    out = tmp_path / "out"
    out.mkdir()
    (out / "part-0.parquet").write_bytes(b"rows of an earlier run")

    with pytest.raises(PlanError, match="exists"):
        await asyncio.to_thread(apply_handlers, records, counting.target, out=out)

    assert not names(calls)
    assert [name for name in names(tmp_path) if name.startswith("out")] == ["out"]
    assert (out / "part-0.parquet").read_bytes() == b"rows of an earlier run"


@pytest.mark.chaos
async def test_a_halted_record_is_named_and_leaves_no_complete_output(
    frame: Callable[..., Any], counting: AppModule, tmp_path: Path, topic: str
) -> None:
    records = await frame(b"poison")

    with pytest.raises(HaltedError, match=f"{topic}/1/{RECORDS // 2 - 1} .*it is poison"):
        await asyncio.to_thread(apply_handlers, records, counting.target, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

    skipped = await asyncio.to_thread(apply_handlers, records, counting.target, out=tmp_path / "out", on_failure="skip")
    counts = await asyncio.to_thread(skipped.groupBy("status").count().collect)
    assert {row["status"]: row["count"] for row in counts} == {"processed": RECORDS - 1, "skipped": 1}


@pytest.mark.chaos
async def test_rows_that_are_not_records_are_refused(
    frame: Callable[..., Any], counting: AppModule, calls: Path, tmp_path: Path
) -> None:
    records = await frame()

    with pytest.raises(PlanError, match="column 'timestamp' is missing"):
        await asyncio.to_thread(apply_handlers, records.drop("timestamp"), counting.target, out=tmp_path / "out")
    with pytest.raises(PlanError, match="no handler of the app takes"):
        await asyncio.to_thread(
            apply_handlers,
            records.selectExpr("'elsewhere' AS topic", "partition", "offset", "key", "value", "timestamp"),
            counting.target,
            out=tmp_path / "out",
        )
    stream = await asyncio.to_thread(records.sparkSession.readStream.format("rate").load)
    with pytest.raises(PlanError, match="found a stream"):
        await asyncio.to_thread(apply_handlers, stream, counting.target, out=tmp_path / "out")
    assert not names(calls)
