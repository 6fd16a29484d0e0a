"""Sinks of rows: a database table and files for other readers."""

import datetime as dt
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import psycopg
import pyarrow.dataset as ds
import pytest
from pyspark.errors import PySparkException

from aioshard.errors import RunError
from aioshard.spark.source import OUTCOME_COLUMNS
from tests.project.docs.pages import blocks
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

STARTED = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)


class Table:
    """The recipe of the documentation, and its rows."""

    def __init__(self, url: str) -> None:
        self.url = url
        (block,) = (block for block in blocks("python") if "def write_outcomes" in block.text)
        # Spark sends functions by their values: the tasks have the same `connect`.
        names: dict[str, Any] = {"__name__": "recipe"}
        exec(block.text, names)
        names["connect"] = functools.partial(psycopg.connect, url)
        self.write: Callable[[DataFrame, int], None] = names["write_outcomes"]

    def stored(self, columns: str = '"offset", status') -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(f'SELECT {columns} FROM outcomes ORDER BY partition, "offset"').fetchall()


@pytest.fixture
def table(postgresql_url: str) -> Table:
    """An empty table of outcomes."""
    (block,) = (block for block in blocks("sql") if "CREATE TABLE outcomes" in block.text)
    with psycopg.connect(postgresql_url) as connection:
        connection.execute(block.text.encode())
    return Table(postgresql_url)


def _outcome(offset: int, status: str = "processed", **values: Any) -> tuple[Any, ...]:
    given: dict[str, Any] = dict.fromkeys(OUTCOME_COLUMNS.names)
    given |= {"topic": "orders", "partition": 0, "offset": offset, "key": b"k\x00", "status": status, "attempts": 1}
    given |= {"started": STARTED, "duration": 0.25, "handler": "on", "result": b'{"paid":true}'} | values
    return tuple(given.values())


def _frame(spark: "SparkSession", *rows: tuple[Any, ...]) -> "DataFrame":
    return spark.createDataFrame(rows, OUTCOME_COLUMNS)


def test_outcomes_are_in_the_table_once_as_of_the_latest_run(spark: "SparkSession", table: Table) -> None:
    table.write(
        _frame(spark, _outcome(1, "skipped"), _outcome(2, "skipped", error="tab\t and \\ line\n", result=None)), 0
    )
    table.write(_frame(spark, _outcome(1)), 0)
    table.write(_frame(spark, _outcome(1)), 0)

    first, second = table.stored("topic, partition, key, status, attempts, started, duration, result, error")
    assert first == ("orders", 0, b"k\x00", "processed", 1, STARTED, 0.25, b'{"paid":true}', None)
    assert second[-2:] == (None, "tab\t and \\ line\n")


def test_a_failed_task_leaves_no_rows(spark: "SparkSession", table: Table) -> None:
    rows = _frame(spark, _outcome(1), _outcome(2, error="nul \x00 is no text")).coalesce(1)

    with pytest.raises(PySparkException, match="NUL"):
        table.write(rows, 0)

    assert table.stored() == []


# A run --------------------------------------------------------------------------------


@pytest.mark.chaos
async def test_a_drain_writes_every_record_once_even_after_a_crash(
    spark: "SparkSession",
    spark_modules: Path,
    kafka: SharedKafka,
    topic: str,
    group: str,
    table: Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"")] * 40)
    app = write_app(spark_modules, monkeypatch, kafka, group, topic)
    run = HistoryRun(spark, kafka, topic, app, tmp_path / "run")
    await run.plan(max_rows_per_batch=20)
    calls = []

    def write(rows: "DataFrame", batch: int) -> None:
        table.write(rows, batch)
        calls.append(batch)
        if calls == [0, 1]:
            raise RuntimeError("the driver is lost")

    with pytest.raises(RunError, match="RuntimeError: the driver is lost"):
        await run.drain(foreach=write)
    await run.drain(foreach=write)

    assert calls == [0, 1, 1]
    expected = [(partition, offset) for partition in range(2) for offset in range(20)]
    assert table.stored('partition, "offset"') == expected
    read = ds.dataset(run.directory / "outcomes", partitioning="hive").to_table().to_pandas()
    assert sorted(zip(read["partition"], read["offset"], strict=True)) == expected
    assert set(read["batch"]) == {0, 1}
    files = f"{run.directory}/outcomes/*/*.parquet"
    query = f"SELECT partition, \"offset\" FROM '{files}' ORDER BY ALL"
    assert duckdb.execute(query).fetchall() == expected
