"""The data source: found by name, its options, unchanged records, rows of handlers."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioshard.errors import PlanError
from aioshard.records import Record
from aioshard.spark.source import OUTCOME_COLUMNS, AioshardSource
from tests.spark.apps import write_app
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

HEADERS = [("trace", b"7"), ("empty", None), ("trace", b"8")]


def read(spark: "SparkSession", kafka: SharedKafka, topic: str, **options: str) -> "DataFrame":
    reader = spark.read.format("aioshard").options(bootstrap_servers=kafka.bootstrap, topics=topic, **options)
    return reader.load()


def as_record(row: "Row") -> Record:
    return Record(
        row.topic,
        row.partition,
        row.offset,
        None if row.key is None else bytes(row.key),
        None if row.value is None else bytes(row.value),
        tuple((header.key, None if header.value is None else bytes(header.value)) for header in row.headers or ()),
        row.timestamp.timestamp(),
    )


@pytest.mark.chaos
def test_the_data_source_is_found_by_name_and_names_missing_options() -> None:
    script = (
        "from aioshard.spark.session import local_session\n"
        "import os; os.environ['PYTHONPATH'] = os.pathsep.join(__import__('sys').path)\n"
        "local_session('local[1]').read.format('aioshard').load()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "format('aioshard') needs the option plan" in done.stderr


@pytest.mark.parametrize(("slots", "tasks"), [(None, 9), (1, 1), (2, 8), (3, 9)])
async def test_several_slots_get_four_tasks_each_and_a_single_one_gets_one(
    kafka: SharedKafka,
    topic: str,
    group: str,
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
    slots: int | None,
    tasks: int,
) -> None:
    await kafka.create_topic(topic, 9)
    await kafka.produce(topic, [(b"k%d" % n, b"") for n in range(200)])
    source = f"""
@app.consume({topic!r})
async def handle(record: Record) -> None:
    pass
"""
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source)
    options = {"app": app.target} if slots is None else {"app": app.target, "slots": str(slots)}

    reader = await asyncio.to_thread(lambda: AioshardSource(options).reader(OUTCOME_COLUMNS))

    found = [getattr(task, "ranges") for task in reader.partitions()]  # noqa: B009 - Spark's type does not have it
    assert len(found) == tasks
    assert sorted(partition.partition for ranges in found for partition in ranges) == list(range(9))


@pytest.mark.parametrize("tasks", [1, 4, 16])
async def test_records_are_read_unchanged_with_any_number_of_tasks(
    spark: "SparkSession", kafka: SharedKafka, topic: str, tasks: int
) -> None:
    await kafka.create_topic(topic, 3)
    await kafka.produce(topic, [(b"k%d" % (n % 20), b"%d" % n) for n in range(200)])
    await kafka.produce(topic, [(None, b"no key"), (b"k", None), (b"", b"")], headers=HEADERS)

    frame = read(spark, kafka, topic, tasks=str(tasks))
    found = sorted(map(as_record, frame.collect()))

    assert found == sorted(await kafka.read(topic))
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]


async def test_reading_covers_start_to_end_within_the_log(
    spark: "SparkSession", kafka: SharedKafka, topic: str
) -> None:
    await kafka.create_topic(topic, 1)
    await kafka.produce(topic, [(b"k", b"%d" % n) for n in range(50)])

    part = read(spark, kafka, topic, start=json.dumps({topic: {"0": 10}}), end=json.dumps({topic: {"0": 13}}))
    beyond = read(spark, kafka, topic, start=json.dumps({topic: {"0": 48}}), end=json.dumps({topic: {"0": 10**9}}))

    assert [row.offset for row in part.orderBy("offset").collect()] == [10, 11, 12]
    assert [row.offset for row in beyond.orderBy("offset").collect()] == [48, 49]


async def test_a_start_before_the_log_is_an_error(spark: "SparkSession", kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 1)
    await kafka.produce(topic, [(b"k", b"%d" % n) for n in range(50)])
    await kafka.delete_records(topic, {0: 20})

    with pytest.raises(Exception, match=rf"DataLossError: .*{topic}/0: from offset 5 on"):
        read(spark, kafka, topic, tasks="1", start=json.dumps({topic: {"0": 5}})).collect()


async def test_reading_ends_at_an_open_transaction_and_skips_aborted_records(
    spark: "SparkSession", kafka: SharedKafka, topic: str
) -> None:
    await kafka.create_topic(topic, 1)
    await kafka.produce(topic, [(b"k", b"plain")])
    await kafka.produce_transaction(topic, [(b"k", b"aborted")], abort=True)
    await kafka.produce_transaction(topic, [(b"k", b"committed")])

    rows = read(spark, kafka, topic).orderBy("offset").collect()

    assert [bytes(row.value) for row in rows] == [b"plain", b"committed"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"topic": "orders"}, "has no option 'topic'"),
        ({"topics": "orders", "tasks": "no"}, "option tasks='no': expected a whole number"),
        ({"topics": "orders", "start": "soon"}, "option start='soon': expected an offset"),
        ({"plan": "nowhere"}, "nowhere contains no plan.json"),
    ],
)
def test_a_wrong_option_is_a_clear_error(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        AioshardSource({"bootstrap_servers": "127.0.0.1:1"} | options).reader(OUTCOME_COLUMNS)


def test_spark_shows_the_error_about_a_wrong_option(spark: "SparkSession") -> None:
    with pytest.raises(Exception, match="has no option 'topic'"):
        spark.read.format("aioshard").options(bootstrap_servers="127.0.0.1:1", topic="orders").load().collect()


@pytest.mark.chaos
async def test_with_an_app_reading_returns_outcomes_and_a_halt_is_an_error(
    spark: "SparkSession",
    kafka: SharedKafka,
    topic: str,
    group: str,
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await kafka.create_topic(topic, 2)
    await kafka.produce(topic, [(b"k%d" % n, b"%d" % n) for n in range(30)])
    source = f"""
@app.consume({topic!r})
async def handle(record: Record) -> bytes:
    return record.value

other = App("other", bootstrap_servers=app.settings.bootstrap_servers)

@other.consume({topic!r}, retry=__import__("aioshard").Retry(attempts=1))
def halts(record: Record) -> None:
    raise LookupError("no such customer")
"""
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source)

    rows = spark.read.format("aioshard").option("app", app.target).load().collect()

    assert sorted(bytes(row.result) for row in rows) == sorted(b"%d" % n for n in range(30))
    assert {row.status for row in rows} == {"processed"}
    with pytest.raises(Exception, match=r"HaltedError: .*LookupError: no such customer"):
        spark.read.format("aioshard").option("app", f"{app.name}:other").load().collect()
