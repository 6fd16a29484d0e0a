"""A verification finds every offset of a drained range exactly once or names it; log holes are allowed."""

import asyncio
import dataclasses
import json
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aioshard import spark as history
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.errors import DataLossError, NotVerifiedError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.handovers import verified_ends
from aioshard.spark.runs import stop
from aioshard.spark.verification import Found
from aioshard.spark.work import blocking
from tests.spark.apps import write_app
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka
from tests.support.cluster import DEADLINE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

ALL = {"processed": 60}


@pytest.fixture
async def run(
    spark: "SparkSession",
    spark_modules: Path,
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> HistoryRun:
    """60 records by turns in two partitions; nothing is planned yet."""
    return await _produced(
        HistoryRun(spark, kafka, topic, write_app(spark_modules, monkeypatch, kafka, group, topic), tmp_path / "run")
    )


@pytest.fixture(scope="module")
def drained_once(
    spark: "SparkSession", spark_modules: Path, kafka: SharedKafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HistoryRun]:
    """The same, drained in two micro-batches; no test changes its topic."""
    topic = f"verified-{uuid.uuid4().hex[:8]}"
    with pytest.MonkeyPatch.context() as patched:
        app = write_app(spark_modules, patched, kafka, topic, topic)
        run = HistoryRun(spark, kafka, topic, app, tmp_path_factory.mktemp("verified") / "run")

        async def drain() -> None:
            await _produced(run)
            await run.plan(max_rows_per_batch=30)
            assert (await run.drain()).batches == 2

        blocking(drain)
        yield run


@pytest.fixture
def drained(drained_once: HistoryRun, tmp_path: Path) -> HistoryRun:
    """Drained in two micro-batches; its directory is the test's own."""
    return drained_once.copied(tmp_path / "run")


async def _produced(run: HistoryRun) -> HistoryRun:
    await run.kafka.create_topic(run.topic, partitions=2)
    await run.kafka.produce(run.topic, [(None, b"%d" % number) for number in range(60)])
    return run


async def test_a_complete_run_is_verified_and_can_be_handed_over(drained: HistoryRun) -> None:
    found = await drained.verify()

    assert found.ok
    assert (found.problems, found.records, found.statuses) == ((), 60, ALL)
    assert not any((found.missing, found.duplicates, found.outside, found.left, found.deleted_since))
    run_dir = history.RunDirectory(drained.directory)
    ends = verified_ends(run_dir, run_dir.plan())
    assert ends == {TopicPartition(drained.topic, 0): 30, TopicPartition(drained.topic, 1): 30}


@pytest.mark.chaos
async def test_rows_of_a_deleted_file_are_missing_and_named(drained: HistoryRun) -> None:
    gone = drained.outcome_files()[0]
    lost = pq.read_table(gone).to_pylist()
    gone.unlink()

    found = await drained.verify()

    assert not found.ok
    (name,) = {f"{row['topic']}/{row['partition']}" for row in lost}
    offsets = sorted(row["offset"] for row in lost)
    assert found.missing == {name: Found(count=len(offsets), offsets=tuple(offsets[:20]))}
    assert found.problems[0].startswith(f"{name}: {len(offsets)} records in the log have no outcome: offsets 0, 1")
    run_dir = history.RunDirectory(drained.directory)
    with pytest.raises(NotVerifiedError):
        verified_ends(run_dir, run_dir.plan())


@pytest.mark.chaos
async def test_a_duplicate_row_is_named(drained: HistoryRun) -> None:
    file = drained.outcome_files()[0]
    table = pq.read_table(file)
    pq.write_table(table.slice(3, 2), file.with_name("again.parquet"))
    twice = table.slice(3, 2).to_pylist()

    found = await drained.verify()

    assert not found.ok
    name = f"{drained.topic}/{twice[0]['partition']}"
    assert found.duplicates == {name: Found(count=2, offsets=tuple(sorted(row["offset"] for row in twice)))}
    assert not found.missing


async def test_a_duplicate_does_not_compensate_for_a_missing_row(drained: HistoryRun) -> None:
    """Their number is right: only the offsets tell."""
    file = drained.outcome_files()[0]
    rows = pq.read_table(file).to_pylist()
    first, second = rows[0], rows[1]
    first["offset"], lost = second["offset"], first["offset"]
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file.with_name("changed.parquet"))
    file.unlink()
    name = f"{first['topic']}/{first['partition']}"

    found = await drained.verify()

    assert found.records == 60
    assert found.missing == {name: Found(count=1, offsets=(lost,))}
    assert found.duplicates == {name: Found(count=1, offsets=(second["offset"],))}


@pytest.mark.chaos
async def test_rows_outside_the_planned_range_are_named(drained: HistoryRun) -> None:
    file = next(
        file_path for file_path in drained.outcome_files() if pq.read_table(file_path).to_pylist()[0]["partition"] == 0
    )
    row = pq.read_table(file).to_pylist()[0] | {"offset": 30}
    stranger = row | {"topic": "another"}
    pq.write_table(pa.Table.from_pylist([row, stranger], schema=pq.read_schema(file)), file.with_name("x.parquet"))

    found = await drained.verify()

    assert not found.ok
    one = Found(count=1, offsets=(30,))
    assert found.outside == {f"{drained.topic}/0": one, "another/0": one}


@pytest.mark.chaos
async def test_a_run_that_was_stopped_before_its_end_is_not_verified(run: HistoryRun) -> None:
    await run.plan(max_rows_per_batch=30)

    def stop_here(_rows: object, _batch: int) -> None:
        stop(run.directory)

    assert (await run.drain(foreach=stop_here)).state == "unfinished"
    found = await run.verify()
    assert not found.ok
    assert found.left == {f"{run.topic}/0": 15, f"{run.topic}/1": 15}
    assert not found.missing

    await run.drain()
    assert (await run.verify()).ok


@pytest.mark.chaos
async def test_markers_and_aborted_records_are_holes(run: HistoryRun) -> None:
    await run.kafka.produce_transaction(run.topic, [(None, b"kept")] * 3, 0, transactional_id=run.topic)
    await run.kafka.produce_transaction(run.topic, [(None, b"not")] * 4, 1, abort=True, transactional_id=run.topic)
    await run.kafka.produce(run.topic, [(None, b"behind")] * 2, 1)
    await run.plan()
    await run.drain()

    found = await run.verify()

    assert found.ok
    assert found.records == 65


@pytest.mark.chaos
async def test_records_compacted_before_the_drain_are_holes(
    run: HistoryRun, topic: str, group: str, spark_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted = f"{topic}-compacted"
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    await run.kafka.create_topic(compacted, config=config | {"max.compaction.lag.ms": "100"})
    async with asyncio.timeout(2 * DEADLINE):
        while True:
            await run.kafka.produce(compacted, [(b"same", b"")] * 5)
            if len(await run.kafka.read(compacted)) < (await run.kafka.end_offsets(compacted))[0]:
                break
    app = write_app(spark_modules, monkeypatch, run.kafka, group, compacted)
    run = HistoryRun(run.spark, run.kafka, compacted, app, tmp_path / "compacted")
    plan = await run.plan()
    await run.drain()

    found = await run.verify()

    assert found.ok
    assert found.records < plan.records


@pytest.mark.chaos
async def test_records_deleted_by_retention_since_are_counted_without_error(run: HistoryRun) -> None:
    await run.plan()
    await run.drain()
    for file in run.outcome_files():
        if pq.read_table(file).to_pylist()[0]["partition"] == 0:
            file.unlink()
    await run.kafka.delete_records(run.topic, {0: 30, 1: 10})

    found = await run.verify()

    assert found.ok, "records without a row that are gone cannot be drained again"
    assert found.deleted_since == {f"{run.topic}/0": 30}
    assert found.records == 30


@pytest.mark.chaos
async def test_records_the_group_finished_before_count_as_done(run: HistoryRun, group: str) -> None:
    stored = CommitMetadata(finished=(Run(12, 15),)).text(10)
    async with KafkaAdmin(Settings(bootstrap_servers=run.kafka.bootstrap)) as brokers:
        commits = {TopicPartition(run.topic, 0): Committed(10, stored), TopicPartition(run.topic, 1): Committed(0, "")}
        await brokers.commit_without_member(group, commits)
    await run.plan(start="committed")
    await run.drain()

    found = await run.verify()

    assert found.ok
    assert found.records == 20 - 3 + 30

    # Had it been run again, that would be one too many.
    file = next(
        file_path for file_path in run.outcome_files() if pq.read_table(file_path).to_pylist()[0]["partition"] == 0
    )
    row = pq.read_table(file).to_pylist()[0] | {"offset": 13}
    pq.write_table(pa.Table.from_pylist([row], schema=pq.read_schema(file)), file.with_name("x.parquet"))
    assert (await run.verify()).duplicates == {f"{run.topic}/0": Found(count=1, offsets=(13,))}


async def test_a_recreated_topic_is_refused(run: HistoryRun) -> None:
    await run.plan()
    await run.kafka.delete_topic(run.topic)
    await run.kafka.create_topic(run.topic, partitions=2)

    with pytest.raises(DataLossError, match=f"{run.topic}/0: the range ends at 30, and the log at 0"):
        await run.verify()


@pytest.mark.chaos
async def test_a_run_with_nothing_to_do_is_verified(run: HistoryRun) -> None:
    await run.plan(start={run.topic: {0: 30, 1: 30}})

    found = await run.verify()

    assert found.ok
    assert found.records == 0


@pytest.mark.chaos
async def test_a_following_run_is_verified_as_far_as_it_went(drained: HistoryRun, tmp_path: Path) -> None:
    """Its planned ends lie before."""
    following = dataclasses.replace(drained, directory=tmp_path / "following")
    await following.plan(end={drained.topic: {0: 20, 1: 25}})
    for name in ("outcomes", "checkpoint"):
        (drained.directory / name).rename(following.directory / name)

    found = await following.verify()

    assert (found.ok, found.records) == (True, 60)
    assert found.ends == {drained.topic: {"0": 30, "1": 30}}


@pytest.mark.chaos
async def test_retention_that_overtakes_the_reader_is_not_an_error(
    run: HistoryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.plan()
    _pretend_drained(run, {"0": 30, "1": 30})
    ask, asked = KafkaAdmin.bounds, []

    async def ask_before(brokers: KafkaAdmin, partitions: Collection[TopicPartition]) -> Any:
        bounds = await ask(brokers, partitions)
        asked.append(bounds)
        if len(asked) == 1:
            await run.kafka.delete_records(run.topic, {0: 7, 1: 30})
        return bounds

    monkeypatch.setattr(KafkaAdmin, "bounds", ask_before)
    found = await run.verify()

    assert len(asked) == 2
    assert found.deleted_since == {f"{run.topic}/0": 7, f"{run.topic}/1": 30}
    assert found.missing == {f"{run.topic}/0": Found(count=23, offsets=tuple(range(7, 27)))}


def _pretend_drained(run: HistoryRun, ends: dict[str, int]) -> None:
    """As Spark notes it."""
    for name, content in (("commits", "v1\n{}"), ("offsets", "v1\n{}\n" + json.dumps({run.topic: ends}))):
        (run.directory / "checkpoint" / name).mkdir(parents=True)
        (run.directory / "checkpoint" / name / "0").write_text(content)


@pytest.mark.chaos
async def test_the_findings_are_stored_as_json(drained: HistoryRun) -> None:
    shutil.rmtree(drained.directory / "outcomes" / "batch=1")

    found = await drained.verify()

    stored = json.loads((drained.directory / "verified.json").read_text())
    assert stored == json.loads(json.dumps(found.asdict()))
    assert stored["ok"] is False
    assert stored["dead_lettered"] == 0
