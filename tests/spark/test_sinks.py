"""Where rows go: topics, a database table, and files that others read."""

import asyncio
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
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, LongType, StringType, StructType

from aioshard.errors import DrainError, PlanError
from aioshard.records import Record
from aioshard.spark.source.data_source import OUTCOME_COLUMNS
from aioshard.spark.source.writer import StreamTopicWriter, TopicWriter
from tests.docs.pages import blocks
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.shared_kafka import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

HEADERS = "array<struct<key:string,value:binary>>"
STARTED = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)


# Topics -------------------------------------------------------------------------------


@pytest.fixture
async def write(kafka: SharedKafka, topic: str) -> "Callable[..., Any]":
    """Writes rows to a topic of the test's own with two partitions, and returns what is in it then."""
    await kafka.create_topic(topic, partitions=2, config={"max.message.bytes": "20000"})

    async def to_topic(rows: "DataFrame", **options: str) -> list[Record]:
        given = {"bootstrap_servers": kafka.bootstrap, "topic": topic} | options
        writer = rows.write.format("aioshard").options(**{name: text for name, text in given.items() if text})
        writer.mode("append").save()  # Spark looks for Python's data sources in the session of this thread only
        return await kafka.read(topic)

    return to_topic


async def test_rows_become_messages_with_key_value_headers_and_partition(
    spark: "SparkSession", write: Callable[..., Any]
) -> None:
    rows = spark.createDataFrame(
        [(b"k", b"v", [("a", b"1"), ("b", None)], 1), (None, None, None, 0)],
        f"key binary, value binary, headers {HEADERS}, partition int",
    )

    second, first = await write(rows)

    assert first[:2] + first[3:6] == (first.topic, 1, b"k", b"v", (("a", b"1"), ("b", None)))
    assert (second.partition, second.key, second.value, second.headers) == (0, None, None, ())


async def test_text_is_utf_8_and_each_row_may_name_its_topic(
    spark: "SparkSession", write: Callable[..., Any], topic: str
) -> None:
    rows = spark.createDataFrame(
        [("schlüssel", "wert €", topic, 7)], "key string, value string, topic string, more int"
    )

    (found,) = await write(rows, topic="")

    assert (found.key, found.value) == ("schlüssel".encode(), "wert €".encode())


async def test_rows_of_one_task_keep_their_order(spark: "SparkSession", write: Callable[..., Any]) -> None:
    """More than one wave of them."""
    rows = spark.range(0, 5000, numPartitions=1).selectExpr("string(id) AS value", "int(id % 2) AS partition")

    found = await write(rows)

    for partition in range(2):
        values = [int(one.value) for one in found if one.partition == partition]
        assert values == list(range(partition, 5000, 2))


async def test_what_became_of_a_record_names_it_in_a_header(spark: "SparkSession", write: Callable[..., Any]) -> None:
    """The key chooses the partition: that of the record is in another topic, which may have more of them."""
    rows = spark.createDataFrame(
        [("orders", 17, 41, b"k", b"done")], "topic string, partition int, offset long, key binary, value binary"
    )

    (found,) = await write(rows, message_id="message-id")

    assert (found.key, found.value, found.headers) == (b"k", b"done", (("message-id", b"orders/17/41"),))


async def test_what_the_brokers_refuse_fails_the_write(spark: "SparkSession", write: Callable[..., Any]) -> None:
    rows = spark.createDataFrame([(bytearray(30_000),)], "value binary")

    with pytest.raises(PySparkException, match="MessageTooLargeError"):
        await write(rows)


async def test_a_stream_is_written_whole(spark: "SparkSession", kafka: SharedKafka, topic: str, tmp_path: Path) -> None:
    await kafka.create_topic(topic)
    (tmp_path / "in").mkdir()
    rows = spark.range(30).selectExpr("string(id) AS key", "string(id) AS value")
    await asyncio.to_thread(rows.write.parquet, str(tmp_path / "in" / "files"))

    stream = spark.readStream.schema("key string, value string").parquet(str(tmp_path / "in" / "files"))
    query = (
        stream.writeStream.format("aioshard")
        .options(bootstrap_servers=kafka.bootstrap, topic=topic, checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    await asyncio.to_thread(query.awaitTermination)

    assert sorted(int(one.value or b"") for one in await kafka.read(topic)) == list(range(30))


VALUE = {"value": BinaryType()}


@pytest.mark.parametrize("kind", [TopicWriter, StreamTopicWriter])
@pytest.mark.parametrize(
    ("columns", "options", "overwrite", "expected"),
    [
        ({"key": BinaryType()}, {"topic": "t"}, False, "no column value"),
        ({"value": IntegerType()}, {"topic": "t"}, False, "column value is of type int, string or binary was expected"),
        (VALUE, {}, False, "no column topic"),
        (VALUE, {"topic": "no topic"}, False, "the name of a topic was expected"),
        (VALUE, {"topic": "t"}, True, "only appended to"),
        (VALUE, {"topic": "t", "acks": "0"}, False, "has no option 'acks'"),
        (VALUE | {"partition": StringType()}, {"topic": "t"}, False, "column partition is of type string"),
        (
            VALUE | {"headers": ArrayType(StringType())},
            {"topic": "t"},
            False,
            "column headers is of type array<string>",
        ),
        (VALUE, {"topic": "t", "message_id": "id"}, False, "no column topic"),
        (
            VALUE | {"topic": StringType(), "partition": IntegerType(), "offset": LongType()},
            {"message_id": "id"},
            False,
            "name the topic",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_with_a_sentence(
    kind: Callable[..., object],
    columns: dict[str, DataType],
    options: dict[str, str],
    *,
    overwrite: bool,
    expected: str,
) -> None:
    schema = StructType()
    for name, of_type in columns.items():
        schema = schema.add(name, of_type)

    with pytest.raises(PlanError, match=expected):
        kind(schema, options, overwrite=overwrite)


# A table ------------------------------------------------------------------------------


class Table:
    """The recipe of the documentation, and what it has written."""

    def __init__(self, url: str) -> None:
        self.url = url
        (block,) = (one for one in blocks("python") if "def write_outcomes" in one.text)
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
    (block,) = (one for one in blocks("sql") if "CREATE TABLE outcomes" in one.text)
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


def test_outcomes_are_in_the_table_once_as_the_latest_run_has_them(spark: "SparkSession", table: Table) -> None:
    table.write(
        _frame(spark, _outcome(1, "skipped"), _outcome(2, "skipped", error="tab\t and \\ line\n", result=None)), 0
    )
    table.write(_frame(spark, _outcome(1)), 0)
    table.write(_frame(spark, _outcome(1)), 0)

    first, second = table.stored("topic, partition, key, status, attempts, started, duration, result, error")
    assert first == ("orders", 0, b"k\x00", "processed", 1, STARTED, 0.25, b'{"paid":true}', None)
    assert second[-2:] == (None, "tab\t and \\ line\n")


def test_a_task_that_fails_leaves_nothing_of_its_rows(spark: "SparkSession", table: Table) -> None:
    rows = _frame(spark, _outcome(1), _outcome(2, error="nul \x00 is no text")).coalesce(1)

    with pytest.raises(PySparkException, match="NUL"):
        table.write(rows, 0)

    assert table.stored() == []


# A run --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_drain_writes_a_table_and_files_that_others_read_each_record_once_after_a_crash_too(
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

    with pytest.raises(DrainError, match="RuntimeError: the driver is lost"):
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
