"""A drain writes one row per offset through crashes, halts and stops, and repeats at most a micro-batch."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from aioshard import spark as history
from aioshard.errors import DataLossError, HaltedError, PlanError
from tests.spark.apps import write_app
from tests.spark.plans import PLAN
from tests.spark.runs import HistoryRun
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(300)  # a session of Spark starts in it, and the machine may be busy

PARTITIONS = 4
RECORDS = 300
BATCH = 120

NOTING = """
import asyncio, os
from pathlib import Path
from aioshard import Context, Retry

CALLS = {calls!r}
FLAG = Path({flag!r})

def note(record):
    file = os.open(CALLS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"%d/%d\\n" % (record.partition, record.offset))
    os.close(file)
"""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A filled topic, an app whose handler notes its calls, and a run over it."""

    run: HistoryRun
    calls_file: Path
    flag: Path
    """Changes what the handler does."""

    @property
    def calls(self) -> list[tuple[int, int]]:
        """Partition and offset of each call of the handler, in the order of the calls."""
        if not self.calls_file.exists():
            return []
        return [
            (int(partition), int(offset))
            for line in self.calls_file.read_text().splitlines()
            for partition, offset in [line.split("/")]
        ]

    def assert_each_offset_has_one_row(self, records: int = RECORDS) -> None:
        rows = Counter((row["partition"], row["offset"]) for row in self.run.rows())
        assert len(rows) == records
        assert set(rows.values()) == {1}

    def assert_no_batch_is_larger(self, most: int = BATCH) -> None:
        batches = {file.parent.name for file in self.run.outcome_files()}
        for batch in batches:
            files = [file for file in self.run.outcome_files() if file.parent.name == batch]
            assert sum(_rows_of(file) for file in files) <= most


def _rows_of(file: Path) -> int:
    return int(pq.read_metadata(file).num_rows)


@pytest.fixture
async def scenario(
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    spark_modules: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    spark: "SparkSession",
) -> Scenario:
    await kafka.create_topic(topic, PARTITIONS)
    await kafka.produce(topic, [(b"k%d" % (n % 50), b"%d" % n) for n in range(RECORDS)])
    calls, flag = tmp_path / "calls", tmp_path / "flag"
    source = NOTING.format(calls=str(calls), flag=str(flag)) + request.param.format(topic=topic)
    app = write_app(spark_modules, monkeypatch, kafka, group, handlers=source)
    return Scenario(HistoryRun(spark, kafka, topic, app, tmp_path / "run"), calls, flag)


def with_handler(source: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", [source], indirect=True, ids=[""])


PLAIN = """
@app.consume({topic!r})
async def handle(record: Record, context: Context) -> object:
    note(record)
    return {{"offset": record.offset, "replay": context.replay}}
"""


@with_handler(PLAIN)
async def test_every_offset_has_one_row_and_no_batch_is_larger_than_asked(scenario: Scenario) -> None:
    plan = await scenario.run.plan(max_rows_per_batch=BATCH)
    report = await scenario.run.drain()

    assert plan.records == report.done == RECORDS
    assert (report.state, report.batches) == ("finished", -(-RECORDS // BATCH))
    assert report.statuses == {"processed": RECORDS}
    scenario.assert_each_offset_has_one_row()
    scenario.assert_no_batch_is_larger()
    assert sorted(scenario.calls) == sorted((row["partition"], row["offset"]) for row in scenario.run.rows())
    row = scenario.run.rows()[0]
    assert row["result"] == b'{"offset":0,"replay":true}'
    assert (row["status"], row["attempts"], row["error"], row["value"]) == ("processed", 1, None, None)
    assert row["started"] is not None
    assert row["duration"] >= 0.0
    found = history.status(scenario.run.directory)
    assert (found.done, found.state, found.statuses) == (RECORDS, "finished", {"processed": RECORDS})

    again = await scenario.run.drain()  # nothing is left

    assert again.done == RECORDS
    assert len(scenario.calls) == RECORDS

    # As when the driver dies after the rows have moved, and before Spark has recorded that the batch is complete.
    commits, last = scenario.run.directory / "checkpoint" / "commits", report.batches - 1
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink()
    assert history.status(scenario.run.directory).done < RECORDS
    again = await scenario.run.drain()

    assert again.done == RECORDS
    assert len(scenario.calls) == RECORDS
    scenario.assert_each_offset_has_one_row()


@pytest.mark.chaos
@with_handler(PLAIN)
async def test_a_drain_stops_after_a_batch_and_resumes_without_repeating_calls(scenario: Scenario) -> None:
    await scenario.run.plan(max_rows_per_batch=BATCH)

    def stop(rows: "DataFrame", batch: int) -> None:  # noqa: ARG001 - a sink is given both
        if batch == 1:
            history.stop(scenario.run.directory)

    report = await scenario.run.drain(foreach=stop)

    assert (report.state, report.batches) == ("unfinished", 2)
    assert report.done == sum(report.statuses.values()) == len(scenario.calls)

    report = await scenario.run.drain()

    assert report.state == "finished"
    scenario.assert_each_offset_has_one_row()
    assert len(scenario.calls) == RECORDS


@pytest.mark.chaos
@with_handler(PLAIN)
async def test_a_following_run_processes_later_records_until_stopped(scenario: Scenario) -> None:
    run = scenario.run
    await run.plan(max_rows_per_batch=RECORDS)

    async def until_called(calls: int) -> None:
        async with asyncio.timeout(100):
            while len(scenario.calls) < calls:  # noqa: ASYNC110 - the handler writes a file
                await asyncio.sleep(0.02)

    thread = asyncio.to_thread(history.follow, run.spark, run.directory, trigger="0.1 seconds")
    following = asyncio.create_task(thread, name="follow")
    try:
        await until_called(RECORDS)
        await run.kafka.produce(run.topic, [(b"k", b"later")] * 7)  # beyond the planned end
        await until_called(RECORDS + 7)
    finally:
        history.stop(run.directory)
        await following

    scenario.assert_each_offset_has_one_row(RECORDS + 7)
    assert len(scenario.calls) == RECORDS + 7


HALTING = """
@app.consume({topic!r}, retry=Retry(attempts=2, initial=0.01))
async def handle(record: Record) -> None:
    note(record)
    if record.value == b"200" and not FLAG.exists():
        raise LookupError("no such customer")
"""


@pytest.mark.chaos
@with_handler(HALTING)
async def test_a_poison_record_ends_the_drain_by_name_and_it_resumes_after_the_fix(scenario: Scenario) -> None:
    run = scenario.run
    (poison,) = [record for record in await run.kafka.read(run.topic) if record.value == b"200"]  # of the second batch
    await run.plan(max_rows_per_batch=BATCH)
    record_id = f"{run.topic}/{poison.partition}/{poison.offset}"
    with pytest.raises(HaltedError, match=rf"{record_id} \(key k0, LookupError: no such customer\)"):
        await run.drain()

    border = history.status(run.directory)
    assert border.done == BATCH
    (halted,) = border.halted
    assert halted == f"{record_id} (key k0, LookupError: no such customer)"
    assert len(run.rows()) == BATCH
    assert all(row["status"] == "processed" for row in run.rows())
    assert await run.kafka.committed(run.app.app.group_id, run.topic) == {}

    scenario.flag.touch()
    report = await run.drain()

    assert report.state == "finished"
    assert history.status(run.directory).halted == ()
    scenario.assert_each_offset_has_one_row()


FAILING = """
@app.consume({topic!r}, retry=Retry(attempts=3, initial=0.01), on_failure=DeadLetter("orders.dlt", breaker=None))
async def handle(record: Record) -> None:
    note(record)
    if record.offset % 10 == 7:
        raise LookupError("no such customer")
"""


@pytest.mark.chaos
@with_handler(FAILING)
@pytest.mark.parametrize(
    ("on_failure", "status"),
    [
        (None, "dead_lettered"),
        ("skip", "skipped"),
        ("dead-letter:other", "dead_lettered"),
    ],
)
async def test_the_failure_policy_can_be_chosen_for_one_run(
    scenario: Scenario, on_failure: str | None, status: str
) -> None:
    await scenario.run.plan(on_failure=on_failure)
    report = await scenario.run.drain()

    failed = [row for row in scenario.run.rows() if row["offset"] % 10 == 7]
    assert report.statuses == {"processed": RECORDS - len(failed), status: len(failed)}
    for row in failed:
        assert (row["status"], row["attempts"]) == (status, 3)
        assert (row["error_type"], row["error"]) == ("LookupError", "no such customer")
        assert row["value"] is not None
        assert row["timestamp"] is not None
    assert len(scenario.calls) == RECORDS + 2 * len(failed)


SPENT = """
app.configure(stuck_after=2.0)

@app.consume({topic!r}, retry=Retry(attempts=1), on_failure=DeadLetter("orders.dlt", breaker=CircuitBreaker(minimum=6)))
async def handle(record: Record) -> None:
    raise ConnectionError("the back end is down")
"""


@pytest.mark.chaos
@with_handler(SPENT)
async def test_an_open_circuit_breaker_ends_the_drain_like_a_halt(scenario: Scenario) -> None:
    await scenario.run.plan()
    with pytest.raises(HaltedError, match=r"(?s)StuckError: no record completed .* the circuit breaker .* is open"):
        await scenario.run.drain()

    assert scenario.run.outcome_files() == []
    assert history.status(scenario.run.directory).done == 0


DYING = """
@app.consume({topic!r}, concurrency=4)
async def handle(record: Record) -> None:
    note(record)
    if record.partition == 2 and record.offset == 30 and not FLAG.exists():
        FLAG.touch()
        os._exit(1)
    await asyncio.sleep(0.001)
"""


@with_handler(DYING)
async def test_a_dead_worker_costs_only_its_task(scenario: Scenario) -> None:
    await scenario.run.plan(max_rows_per_batch=BATCH)
    report = await scenario.run.drain()

    assert report.state == "finished"
    assert scenario.flag.exists()
    scenario.assert_each_offset_has_one_row()
    assert RECORDS < len(scenario.calls) <= RECORDS + BATCH


SLOW = """
@app.consume({topic!r}, concurrency=4)
async def handle(record: Record) -> None:
    note(record)
    await asyncio.sleep(0.01)
"""


@pytest.mark.chaos
@with_handler(SLOW)
async def test_a_dead_driver_costs_one_micro_batch(scenario: Scenario, spark_modules: Path) -> None:
    run = scenario.run
    await run.plan(max_rows_per_batch=BATCH)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), str(spark_modules)])}
    command = [sys.executable, "-m", "aioshard", "spark", "run", str(run.directory), "--master", "local[2,4]"]
    driver = subprocess.Popen(  # noqa: ASYNC220 - it is killed, and only then waited for
        command, cwd=spark_modules, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        async with asyncio.timeout(200):
            while len(scenario.calls) < BATCH + BATCH // 2:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # Spark's Java process and the workers die with it
        driver.wait()
    before = len(scenario.calls)

    report = await run.drain()

    assert report.state == "finished"
    assert before >= BATCH
    scenario.assert_each_offset_has_one_row()
    scenario.assert_no_batch_is_larger()
    assert len(scenario.calls) <= RECORDS + BATCH


@pytest.mark.chaos
@with_handler(PLAIN)
async def test_records_deleted_by_retention_end_the_drain_by_name(scenario: Scenario) -> None:
    run = scenario.run
    await run.plan(max_rows_per_batch=BATCH)
    ends = await run.kafka.end_offsets(run.topic)

    async def delete() -> None:
        await run.kafka.delete_records(run.topic, {0: ends[0]})

    loop = asyncio.get_running_loop()

    def after_the_first(rows: "DataFrame", batch: int) -> None:  # noqa: ARG001 - a sink is given both
        if batch == 0:
            asyncio.run_coroutine_threadsafe(delete(), loop).result(30)

    with pytest.raises(DataLossError, match=rf"{run.topic}/0: from offset \d+ on"):
        await run.drain(foreach=after_the_first)


COUNTING = """
running = 0

@app.consume({topic!r}, concurrency=64)
async def handle(record: Record) -> object:
    global running
    running += 1
    most = running
    try:
        await asyncio.sleep(0.005)
        return max(most, running)
    finally:
        running -= 1
"""


@pytest.mark.chaos
@with_handler(COUNTING)
async def test_total_concurrency_applies_to_the_whole_job(scenario: Scenario) -> None:
    await scenario.run.plan(total_concurrency=6)
    await scenario.run.drain()

    most: list[Any] = [int(row["result"]) for row in scenario.run.rows()]
    assert max(most) == 3  # two tasks run at the same time


def test_an_invalid_trigger_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    directory = history.RunDirectory(tmp_path)
    directory.begin(dataclasses.replace(PLAN, app="no_such_module:app", bootstrap_servers="127.0.0.1:1"))

    with pytest.raises(PlanError, match="trigger='soon' was refused"):
        history.follow(spark, directory, trigger="soon")
