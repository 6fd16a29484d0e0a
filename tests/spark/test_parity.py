"""The same app over the same topic, live and on Spark, has the same outcomes."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

RECORDS = 600

HANDLERS = """
import asyncio
from aioshard import Context, Retry

@app.consume({topic!r}, retry=Retry(attempts=3, initial=0.01), on_failure=DeadLetter({dead_letters!r}, breaker=None))
async def handle(record: Record, context: Context) -> object:
    number = int(record.value)
    if number % 23 == 0:
        raise LookupError(f"no customer {{number}}")
    if number % 17 == 0 and context.attempt < 3:
        raise TimeoutError("again")
    await asyncio.sleep(0.001)
    if number % 5 == 0:
        return None
    return record.value if number % 2 else {{"number": number, "paid": True}}

@app.consume({skipping!r}, shards=4, retry=Retry(attempts=2, initial=0.01), on_failure="skip")
def skip(record: Record) -> str:
    if int(record.value) % 7 == 0:
        raise LookupError("odd one")
    return record.value.decode()
"""


async def test_live_and_spark_give_every_record_the_same_outcome(
    spark: "SparkSession",
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipping, dead_letters = f"{topic}-skip", f"{topic}-dead-letters"
    for name, partitions in ((topic, 4), (skipping, 2), (dead_letters, 1)):
        await kafka.create_topic(name, partitions)
    for name in (topic, skipping):
        await kafka.produce(name, [(b"k%d" % (n % 40), b"%d" % n) for n in range(RECORDS)])
    source = HANDLERS.format(topic=topic, skipping=skipping, dead_letters=dead_letters)
    journal = tmp_path / "journal"
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source)

    app.app.configure(journal=str(journal))
    async with asyncio.timeout(60):
        await app.app.serve(until_caught_up=True)
    app.app.configure(journal=None)
    run = HistoryRun(spark, kafka, topic, app, tmp_path / "run")
    await run.plan()
    await run.drain()

    columns = ["topic", "partition", "offset", "status", "attempts", "error_type", "error", "result", "shard"]
    live = ds.dataset(journal).to_table(columns=columns).to_pylist()
    rows = [{name: row[name] for name in columns} for row in run.rows()]
    assert len(live) == len(rows) == 2 * RECORDS
    coordinates = ("topic", "partition", "offset")
    for table in (live, rows):
        table.sort(key=lambda row: tuple(row[name] for name in coordinates))
    assert rows == live
    assert {row["status"] for row in rows} == {"processed", "dead_lettered", "skipped"}
    assert {row["attempts"] for row in rows} == {1, 2, 3}
