"""The benchmark commands run and print their results. Figures are not asserted: these inputs are tiny."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

CONTESTANTS = {
    "p1": {"plain loop", "aioshard", "aioshard, fixed shards", "fixed queues", "task per record"},
    "p2": {"bare loop, no Kafka", "aioshard"},
    "p3": {"bare loop, no Kafka", "aioshard"},
    "p4": {"fixed queues", "aioshard", "task per record"},
    "p5": {"plain loop", "aioshard"},
    "p6": {"aioshard"},
    "p8": {"aioshard"},
    "p9": {"concurrency 8", "concurrency 64", "concurrency 512", "Adaptive(1, 512)"},
    "p10": {"aioshard, app", "aioshard, fused, local[1]", "aioshard, fused", "aioshard, mapInArrow"},
    "p11": {"aioshard, fused", "gather per 1,000 rows", "gather per 10,000 rows"},
    "p12": {"aioshard"},
    "p13": {"aioshard", "aioshard, processes"},
    "p15": {"aioshard, at least once", "aioshard, exactly once"},
    "p16": {"aioshard, processes", "aioshard, threads"},
    "p17": {"aioshard, lag", "aioshard, range"},
    "p18": {"aioshard"},
    "p19": {"aioshard run"},
    "p21": {"aioshard, JSON"},
    "p22": {"without failure", "Park(delay=5)"},
}
"""The minimum contestants of a quick run."""
LONG = {
    "p1",
    "p3",
    "p4",
    "p5",
    "p6",
    "p8",
    "p9",
    "p10",
    "p11",
    "p12",
    "p13",
    "p15",
    "p16",
    "p17",
    "p18",
    "p19",
    "p21",
    "p22",
}
"""Their quick runs take long, and the others go the same way."""


def _benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


def _object(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.chaos, pytest.mark.timeout(300)] if name in LONG else ())
        for name in CONTESTANTS
    ],
)
def test_a_quick_run_processes_every_record_once_and_prints_one_object(kafka: SharedKafka, name: str) -> None:
    report = _object(_benchmarks(name, "--quick", "--json", "--bootstrap-servers", kafka.bootstrap))

    assert report["benchmark"] == name.upper()
    assert {row["contestant"] for row in report["rows"]} >= CONTESTANTS[name]
    for row in report["rows"]:
        assert [row.get(wrong, 0) for wrong in ("lost", "twice", "ran twice")] == [0, 0, 0], row
    assert report["verdicts"] != []
    assert {"what", "measured", "must", "passed", "judged"} <= set(report["verdicts"][0])
    assert report["problems"] == []
    assert (report["passed"], report["quick"]) == (True, True)
    assert report["machine"]["processors"] >= 1


def test_a_quick_run_leaves_no_topic(kafka: SharedKafka) -> None:
    ran = _benchmarks("p2", "--quick", "--bootstrap-servers", kafka.bootstrap)

    topics = [line.split()[1].rstrip(":") for line in ran.stderr.splitlines() if line.startswith("filled ")]
    assert len(topics) == 1, ran.stderr
    left = subprocess.run(
        [sys.executable, "-c", LIST_TOPICS, kafka.bootstrap], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert not set(topics) & set(json.loads(left.stdout))


LIST_TOPICS = """
import asyncio, json, sys
from aiokafka.admin import AIOKafkaAdminClient
async def main():
    admin = AIOKafkaAdminClient(bootstrap_servers=sys.argv[1])
    await admin.start()
    print(json.dumps(list(await admin.list_topics())))
    await admin.close()
asyncio.run(main())
"""


def test_the_import_benchmark_needs_no_broker_and_judges_loaded_modules() -> None:
    report = _object(_benchmarks("p7", "--quick", "--json"))

    assert [(verdict["judged"], verdict["passed"]) for verdict in report["verdicts"]] == [(False, True), (True, True)]


@pytest.mark.chaos
def test_the_scrape_benchmark_needs_no_broker() -> None:
    report = _object(_benchmarks("p14", "--quick", "--json"))

    assert [row["partitions"] for row in report["rows"]] == [1, 100, 1_000]
    assert report["rows"][-1]["series"] > 14_000


@pytest.mark.chaos
def test_several_benchmarks_are_listed_in_one_object(kafka: SharedKafka) -> None:
    found = _object(_benchmarks("p3", "p7", "--quick", "--json", "--bootstrap-servers", kafka.bootstrap))

    assert [report["benchmark"] for report in found["benchmarks"]] == ["P3", "P7"]
    assert found["passed"] is True


@pytest.mark.chaos
def test_the_table_shows_contestants_and_verdicts(kafka: SharedKafka) -> None:
    ran = _benchmarks("p2", "--quick", "--bootstrap-servers", kafka.bootstrap)

    assert ran.returncode == 0, ran.stderr
    for text in ("P2", "aioshard", "bare loop, no Kafka", "UNJUDGED", "must be at least 0.92", "aim 0.97"):
        assert text in ran.stdout


def test_a_failed_job_is_reported_with_its_process_output(kafka: SharedKafka) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "p10", "--quick", "--bootstrap-servers", kafka.bootstrap],
        cwd=PROJECT,
        env=os.environ | {"AIOSHARD_FETCH_MAX_WAIT": "nonsense"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 1
    assert "aioshard, app ended with 1" in ran.stderr
    assert "nonsense" in ran.stderr


def test_an_unknown_benchmark_is_a_usage_error() -> None:
    ran = _benchmarks("p99")

    assert ran.returncode == 2
    assert "p8" in ran.stderr


def test_without_a_broker_the_error_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_KAFKA_LIBS", str(tmp_path))

    ran = _benchmarks("p2", "--quick")

    assert ran.returncode == 1
    assert "AIOSHARD_KAFKA_LIBS" in ran.stderr
