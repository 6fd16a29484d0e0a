"""Verdicts of benchmarks: wrong records and the readings of a run."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import benchmarks.__main__ as command
from aioshard.records import Record
from benchmarks.contestants.meter import Meter
from benchmarks.deploying import Deploy
from benchmarks.p13 import Course, row_of
from benchmarks.peers import PEERS, ParallelConsumerUnavailableError
from benchmarks.report import Report, Verdict, spread
from benchmarks.spec import Measurement, Spec, Work
from benchmarks.stage import Contestant, ContestantFailedError, Stage, Topic
from benchmarks.workloads import WORKLOADS, Filled
from tests.support.cluster import KafkaCluster

SPEC = Spec(
    contestant="aioshard",
    bootstrap="",
    topic="t",
    group="g",
    ends=(2, 1),
    records=3,
    concurrency=1,
    work="check",
)


@pytest.mark.parametrize(
    ("measured", "at_least", "passed"), [(2.0, False, True), (2.1, False, False), (2.0, True, True), (1.9, True, False)]
)
def test_a_must_is_met_up_to_its_bound(measured: float, at_least: bool, passed: bool) -> None:
    assert Verdict("ratio", measured, must=2.0, at_least=at_least).passed is passed


def test_an_unjudged_benchmark_passes() -> None:
    assert Verdict("ratio", 9.0, must=2.0, judged=False).passed


@pytest.mark.parametrize(("measured", "code"), [(1.9, 0), (2.1, 3)])
def test_the_exit_code_says_whether_a_must_is_missed(
    monkeypatch: pytest.MonkeyPatch, measured: float, code: int
) -> None:
    async def measure(*_: Any, **__: Any) -> list[Report]:
        return [Report("P1", "a title", verdicts=[Verdict("ratio", measured, must=2.0)])]

    monkeypatch.setattr(command, "_measure", measure)

    ran = CliRunner().invoke(command.main, ["p1", "--json"])

    assert ran.exit_code == code
    assert json.loads(ran.stdout)["passed"] is (code == 0)


def test_a_missed_must_shows_in_the_table() -> None:
    console = Console(record=True, width=140)
    report = Report("P1", "a title", verdicts=[Verdict("ratio", 2.5, must=2.0, aim=1.5, unit="x")])

    report.show(console)

    assert "MISSED   ratio: 2.5 x (must be at most 2, aim 1.5)" in console.export_text()


def test_a_lost_or_repeated_record_fails_the_benchmark() -> None:
    wrong = replace(_measurement(), missing=1, repeated=2)
    report = Report("P1", "a title", verdicts=[Verdict("ratio", 1.0, must=2.0)])

    report.blame("plain loop", [wrong])
    assert report.passed

    report.blame("aioshard", [_measurement(), wrong])
    assert not report.passed
    assert report.problems == ["aioshard lost 1 records and ran 2 more than once"]


async def test_the_meter_reports_lost_and_repeated_records() -> None:
    meter = Meter(SPEC)

    for partition, offset in ((0, 0), (0, 0), (1, 0)):
        await meter.handler(Record("t", partition, offset, None, None, (), 0.0))
    await meter.watch()

    assert (meter.result().repeated, meter.result().missing) == (1, 1)


async def test_the_meter_ends_when_the_last_record_is_done() -> None:
    meter = Meter(replace(SPEC, work="sleep", seconds=0.01))
    watching = asyncio.create_task(meter.watch())
    records = [Record("t", partition, offset, None, None, (), 0.0) for partition, offset in ((0, 0), (0, 1), (1, 0))]

    for record in records[:2]:
        await meter.handler(record)
    assert not watching.done()
    await meter.handler(records[2])
    await watching

    result = meter.result()
    assert (result.records, result.repeated, result.missing) == (3, 0, 0)
    assert 0.03 <= result.wall_seconds < 5.0


def test_cpu_per_record_excludes_the_warm_up() -> None:
    assert replace(_measurement(), cpu_seconds=0.9, cpu_records=900_000).cpu_per_record == pytest.approx(1.0)


def test_a_spec_round_trips_through_json() -> None:
    assert Spec.from_json(SPEC.to_json()) == SPEC


def test_a_contestant_that_is_not_installed_is_left_out() -> None:
    stage = Stage(KafkaCluster("nowhere:1"), quick=False, progress=Console(quiet=True))
    here, missing = Contestant("aioshard"), Contestant("other", package="a_package_that_nobody_has")

    assert stage.lineup([here, missing], [here, missing]) == [here, here]


def test_a_quick_run_includes_only_contestants_the_verdict_needs() -> None:
    stage = Stage(KafkaCluster("nowhere:1"), quick=True, progress=Console(quiet=True))

    assert stage.lineup([Contestant("aioshard")], [Contestant("other")]) == [Contestant("aioshard")]


def test_a_jvm_contestant_is_left_out_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ParallelConsumerUnavailableError("no `mvn` on PATH")

    monkeypatch.setattr("benchmarks.stage.find_peers", missing)
    stage = Stage(KafkaCluster("nowhere:1"), quick=False, progress=Console(quiet=True))

    assert stage.lineup([Contestant("aioshard")], [Contestant(PEERS[0], peer=True)]) == [Contestant("aioshard")]


async def test_the_meter_counts_concurrent_and_out_of_order_runs() -> None:
    meter = Meter(replace(SPEC, ends=(6,), records=6, work="planned", keys=2))

    def record(offset: int, key: int, milliseconds: int) -> Record:
        return Record("t", 0, offset, b"%08d" % key, b"%08d" % milliseconds, (), 0.0)

    await asyncio.gather(*map(meter.handler, (record(0, 0, 0), record(1, 1, 0))))
    await asyncio.gather(*map(meter.handler, (record(2, 0, 1), record(3, 0, 1))))  # beside each other
    await meter.handler(record(5, 1, 0))
    await meter.handler(record(4, 1, 0))  # behind a later one
    await meter.watch()

    result = meter.result()
    assert (result.disordered, result.peak_concurrency, result.missing, result.repeated) == (2, 2, 0, 0)


@pytest.mark.parametrize("work", ["check", "sleep"])
async def test_the_order_of_other_work_is_observed_if_the_keys_are_numbered(work: Work) -> None:
    meter = Meter(replace(SPEC, ends=(4,), records=4, work=work, keys=2))

    for offset, key in ((0, 0), (2, 0), (3, 1), (1, 0)):
        await meter.handler(Record("t", 0, offset, b"%08d" % key, None, (), 0.0))
    await meter.watch()

    result = meter.result()
    assert (result.disordered, result.missing, result.repeated) == (1, 0, 0)


async def test_one_record_in_a_hundred_is_slow() -> None:
    meter = Meter(replace(SPEC, ends=(100,), records=100, work="sleep", keys=1, slow_seconds=0.3))

    for offset in range(100):
        await meter.handler(Record("t", 0, offset, b"%08d" % 0, None, (), 0.0))
    await meter.watch()

    assert 0.3 <= meter.result().wall_seconds < 30.0


def test_the_rate_before_a_kill_excludes_earlier_and_later_records() -> None:
    seconds = [0.1, 0.6, 0.7, 0.9, 1.0, 1.1]
    seen = [(0, offset, round(second * 1e9)) for offset, second in enumerate(seconds)]

    assert Deploy(6, seen, began=10**9, ended=2 * 10**9).rate_before(0.5) == 6.0


async def test_records_can_be_lost_only_if_there_are_any() -> None:
    """Markers and compacted records have an offset and are not records."""
    spec = replace(SPEC, ends=(9,), records=2, present=2, work="planned", keys=1)
    meter = Meter(spec)

    for offset in (3, 7):
        await meter.handler(Record("t", 0, offset, b"%08d" % 0, b"%08d" % 0, (), 0.0))
    await meter.watch()

    assert meter.result().missing == 0
    assert Filled(Topic("t", (9,)), [[3, 7]], 0.0).uncommitted({0: 4}) == 1
    assert Filled(Topic("t", (9,)), [[3, 7]], 0.0).uncommitted({0: 8}) == 0
    assert Filled(Topic("t", (9,)), [[3, 7]], 0.0).uncommitted({}) == 2


async def test_a_failed_contestant_is_dropped_and_its_row_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(KafkaCluster("nowhere:1"), quick=False, progress=Console(quiet=True))
    ran: list[str] = []

    async def run(spec: Spec, _timeout: float) -> Measurement:
        ran.append(spec.contestant)
        if spec.contestant == "b":
            raise ContestantFailedError("b ended with 1:\nStalledError: b stopped at 2 of 3 records for 60 s")
        return _measurement()

    async def committed(_group: str, _topic: str) -> dict[int, int]:
        return {0: 2}

    monkeypatch.setattr(stage, "run", run)
    monkeypatch.setattr(stage.cluster, "committed", committed)
    workload = next(each for each in WORKLOADS if each.rounds == 3)
    filled = Filled(Topic("t", (3,)), [range(3)], 6.0)

    found = await Course(stage, workload, filled, Topic("w", (1,))).contest(["a", "b"])

    assert ran == ["a", "b", "a", "a"]
    row = row_of(workload, "a", filled, found["a"])
    assert (str(row["records/s"]), row["× bound"], row["uncommitted"]) == ("3 (3–3)", 0.5, 3)
    assert (
        row_of(workload, "b", filled, found["b"])["records/s"] == "StalledError: b stopped at 2 of 3 records for 60 s"
    )


def test_a_table_can_be_pasted() -> None:
    report = Report("P1", "a title", [{"contestant": "a", "records/s": 1234.5, "lost": None}], notes=["A note."])

    assert report.markdown().splitlines() == [
        "### P1: a title",
        "",
        "| contestant | records/s | lost |",
        "| --- | ---: | ---: |",
        "| a | 1,234 | – |",
        "",
        "A note.",
    ]


def test_a_spread_shows_median_and_range() -> None:
    assert str(spread([1.0, 3.0, 2.0])) == "2 (1–3)"


def _measurement() -> Measurement:
    return Measurement(records=3, cpu_seconds=0.0, cpu_records=0, wall_seconds=1.0, wall_records=3)
