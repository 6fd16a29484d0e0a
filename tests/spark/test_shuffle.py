"""Records grouped across partitions are processed in order; all others keep their layout."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from aioshard import spark as history
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.errors import HaltedError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.spark.apps import produce_at, write_app
from tests.spark.order import BY_ACCOUNT, disorders, produce_accounts
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)  # a session of Spark starts in it, and the machine may be busy

BY_FUNCTION = "lambda record: record.value.split()[0]"

KEPT = {"retention.ms": "-1"}
"""Of a topic with records of the past."""

Begin = Callable[[str], HistoryRun]


@pytest.fixture
def begin(
    spark: "SparkSession",
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
) -> Begin:
    """Makes a run of an app with these handlers; nothing of it is planned."""

    def begin(handlers: str) -> HistoryRun:
        app = write_app(spark_modules, monkeypatch, kafka, group, handlers=handlers)
        return HistoryRun(spark, kafka, topic, app, tmp_path / app.name)

    return begin


def record_ids(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in rows]


# Order --------------------------------------------------------------------------------


async def test_records_grouped_by_a_function_are_in_order_across_partitions(
    kafka: SharedKafka, topic: str, begin: Begin
) -> None:
    await kafka.create_topic(topic, partitions=3, config=KEPT)
    await produce_accounts(kafka, topic, partitions=3, accounts=8, each=60)
    ordered = begin(BY_ACCOUNT.format(topic=topic, shard_by=BY_FUNCTION))
    plan = await ordered.plan(tasks=3)
    assert [handler.layout for handler in plan.handlers] == ["shuffle"]

    report = await ordered.drain()

    assert (report.state, report.batches, dict(report.statuses)) == ("finished", 1, {"processed": 480})
    rows = ordered.rows()
    assert record_ids(rows) == [(partition, offset) for partition in range(3) for offset in range(160)]
    assert len({row["shard"] for row in rows}) == 8
    assert disorders(rows) == 0
    without_order = begin(BY_ACCOUNT.format(topic=topic, shard_by='"record"'))
    await without_order.plan()
    await without_order.drain()
    assert disorders(without_order.rows()) > 100


@pytest.mark.chaos
async def test_offsets_stay_in_order_despite_producer_clock_skew(kafka: SharedKafka, topic: str, begin: Begin) -> None:
    await kafka.create_topic(topic, partitions=2, config=KEPT)
    await produce_at(kafka, topic, [2_000, 1_000, 3_000, 500], partition=0)
    await produce_at(kafka, topic, [2_500, 100, 2_600], partition=1)
    run = begin(f"@app.consume({topic!r}, shard_by=lambda record: 'all')\nasync def handle(record): ...\n")
    await run.plan()

    await run.drain()

    began = sorted(run.rows(), key=lambda row: row["started"])
    assert record_ids(began) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (0, 3)]


CLUSTER = """
import sys
from aioshard.spark.runs import run
from aioshard.spark.session import local_session

settings = {"spark.executorEnv.PYTHONPATH": sys.argv[1], "spark.executor.memory": "600m"}
settings["spark.sql.shuffle.partitions"] = sys.argv[2]
spark = local_session("local-cluster[2,1,1024]", settings=settings)
try:
    for directory in sys.argv[3:]:
        print(dict(run(spark, directory).statuses))
finally:
    spark.stop()
"""


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("accounts", "tasks", "without_order"),
    [
        pytest.param(8, 2, 10, id="short"),
        pytest.param(20, 4, 100, id="long"),
    ],
)
async def test_order_holds_with_executors_in_separate_processes(
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accounts: int,
    tasks: int,
    without_order: int,
) -> None:
    each = 5 * accounts
    await kafka.create_topic(topic, partitions=4, config=KEPT)
    await produce_accounts(kafka, topic, partitions=4, accounts=accounts, each=each)
    directories = []
    for shard_by in (BY_FUNCTION, '"record"'):
        handlers = BY_ACCOUNT.format(topic=topic, shard_by=shard_by)
        app = write_app(tmp_path, monkeypatch, kafka, group, handlers=handlers)
        directories.append(tmp_path / f"run-{app.name}")
        await history.plan(app.target, directory=directories[-1], start="earliest", tasks=tasks)
    modules = os.pathsep.join([str(PROJECT), str(tmp_path)])

    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", CLUSTER, modules, str(tasks), *map(str, directories)],
        env=os.environ | {"PYTHONPATH": modules},
        check=True,
        timeout=1000,
    )

    found = []
    for directory in directories:
        rows = pq.read_table(directory / "outcomes").to_pylist()
        offsets = range(accounts * each // 4)
        assert sorted(record_ids(rows)) == [(partition, offset) for partition in range(4) for offset in offsets]
        found.append(disorders(rows))
    assert found[0] == 0
    assert found[1] > without_order, "without order there is disorder, so the test can fail"


# Outcomes -------------------------------------------------------------------------------

FAILING = """
from aioshard import Retry

def shard(record):
    if record.value == b"3":
        raise LookupError("no account")
    return None if record.value == b"4" else (record.value[-1:], 1)

@app.consume({topic!r}, shard_by=shard, retry=Retry(attempts=2, initial=0.001), on_failure={on_failure})
async def handle(record: Record, context: Context):
    if record.value == b"5":
        raise ValueError("five")
    return {{"at": [record.topic, record.partition, record.offset], "replay": context.replay}}
"""


@pytest.mark.chaos
async def test_failures_have_the_same_outcome_as_live(kafka: SharedKafka, topic: str, begin: Begin) -> None:
    await kafka.create_topic(topic, partitions=2)
    for partition in (0, 1):
        await kafka.produce(
            topic, [(None, b"%d" % n) for n in range(partition, 10, 2)], partition, headers=[("h", b"1"), ("n", None)]
        )
    source = "from aioshard import Context\n" + FAILING
    run = begin(source.format(topic=topic, on_failure=f'DeadLetter("{topic}.dead", breaker=None)'))
    await run.plan()

    report = await run.drain()

    assert dict(report.statuses) == {"dead_lettered": 2, "processed": 8}
    rows = {row["partition"] + 2 * row["offset"]: row for row in run.rows()}
    assert json.loads(rows[7]["result"]) == {"at": [topic, 1, 3], "replay": True}
    assert rows[4]["shard"] is None
    assert rows[2]["shard"] != rows[6]["shard"] is not None
    failed = [(row["attempts"], row["error_type"], row["error"], row["value"]) for row in (rows[3], rows[5])]
    assert failed == [(1, "LookupError", "no account", b"3"), (2, "ValueError", "five", b"5")]
    assert rows[5]["headers"] == [{"key": "h", "value": b"1"}, {"key": "n", "value": None}]


@pytest.mark.chaos
async def test_a_halted_record_ends_the_drain_and_the_next_one_resumes_there(
    kafka: SharedKafka, topic: str, begin: Begin, tmp_path: Path
) -> None:
    await kafka.create_topic(topic, partitions=2)
    for partition in (0, 1):
        await kafka.produce(topic, [(None, b"%d" % n) for n in range(50)], partition)
    fixed = tmp_path / "fixed"
    run = begin(
        f"import pathlib\nfrom aioshard import Retry\n"
        f"@app.consume({topic!r}, shard_by=lambda record: record.value[-1:], retry=Retry(attempts=1))\n"
        f"async def handle(record):\n"
        f"    if (record.partition, record.offset) == (1, 30) and not pathlib.Path({str(fixed)!r}).exists():\n"
        f"        raise ValueError('not yet')\n"
    )
    await run.plan(max_rows_per_batch=40)

    with pytest.raises(HaltedError, match=f"{topic}/1/30 .*not yet"):
        await run.drain()
    assert len(run.rows()) == 40

    fixed.touch()
    report = await run.drain()
    assert (report.state, dict(report.statuses)) == ("finished", {"processed": 100})
    assert record_ids(run.rows()) == [(partition, offset) for partition in (0, 1) for offset in range(50)]


@pytest.mark.chaos
async def test_handlers_without_a_shuffle_share_the_tasks_of_one_with_it(
    kafka: SharedKafka, topic: str, begin: Begin
) -> None:
    for name in ("a", "b", "c"):
        await kafka.create_topic(f"{topic}.{name}", partitions=2)
        for partition in (0, 1):
            await kafka.produce(f"{topic}.{name}", [(b"k", b"%d" % n) for n in range(20)], partition)
    run = begin(
        f"@app.consume({topic + '.a'!r}, shard_by=lambda record: record.value)\n"
        "async def by_value(record): return 'a'\n"
        f"@app.consume({topic + '.b'!r}, shards=4)\n"
        "async def by_key(record): return 'b'\n"
        f"@app.consume(pattern={topic.replace('.', '[.]') + '[.][c-z]'!r}, shard_by='partition')\n"
        "def by_partition(record): return 'c'\n"
    )
    plan = await run.plan(tasks=1)
    assert {handler.name: handler.layout for handler in plan.handlers} == {
        "by_value": "shuffle",
        "by_key": "partition",
        "by_partition": "partition",
    }

    await run.drain()

    found = sorted((row["topic"][-1], row["handler"], bytes(row["result"])) for row in run.rows())
    expected = [("a", "by_value", b'"a"'), ("b", "by_key", b'"b"'), ("c", "by_partition", b'"c"')]
    assert found == [value for value in expected for _ in range(40)]


@pytest.mark.chaos
async def test_records_of_a_key_in_several_topics_are_grouped_on_request(
    kafka: SharedKafka, topic: str, begin: Begin
) -> None:
    names = [f"{topic}.{name}" for name in ("a", "b")]
    for name in names:
        await kafka.create_topic(name, partitions=2)
        await kafka.produce(name, [(b"%d" % (n % 5), b"%d" % n) for n in range(40)])
    run = begin(f"@app.consume(*{names!r})\nasync def handle(record): ...\n")
    plan = await run.plan(shuffle=True)
    assert [handler.layout for handler in plan.handlers] == ["shuffle"]

    report = await run.drain()

    assert dict(report.statuses) == {"processed": 80}
    assert sorted({row["topic"] for row in run.rows()}) == names


async def test_records_the_group_finished_are_not_run_again(
    kafka: SharedKafka, topic: str, group: str, begin: Begin
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"%d" % n) for n in range(10)])
    text = CommitMetadata(finished=(Run(5, 7),)).text(2)
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        await brokers.commit_without_member(group, {TopicPartition(topic, 0): Committed(2, text)})
    run = begin(f"@app.consume({topic!r}, shard_by=lambda record: 1)\nasync def handle(record): ...\n")
    await run.plan(start="committed")

    await run.drain()

    assert record_ids(run.rows()) == [(0, offset) for offset in (2, 3, 4, 7, 8, 9)]


@pytest.mark.chaos
async def test_a_killed_worker_costs_its_task_and_no_record(
    kafka: SharedKafka, topic: str, begin: Begin, tmp_path: Path
) -> None:
    await kafka.create_topic(topic, partitions=2)
    for partition in (0, 1):
        await kafka.produce(topic, [(None, b"%d" % n) for n in range(200)], partition)
    killed = tmp_path / "killed"
    run = begin(
        f"import os, pathlib, signal\n"
        f"@app.consume({topic!r}, shard_by=lambda record: record.value[-1:])\n"
        f"async def handle(record):\n"
        f"    if (record.partition, record.offset) == (1, 100) and not pathlib.Path({str(killed)!r}).exists():\n"
        f"        pathlib.Path({str(killed)!r}).touch()\n"
        f"        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    await run.plan(tasks=2)

    report = await run.drain()

    assert killed.exists()
    assert dict(report.statuses) == {"processed": 400}
    assert record_ids(run.rows()) == [(partition, offset) for partition in (0, 1) for offset in range(200)]
