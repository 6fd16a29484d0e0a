"""Metrics: what a scrape shows of an app's statistics."""

import dataclasses
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aioshard.observe import HandlerStatistics, JournalStatistics, PartitionStatistics, Statistics
from aioshard.telemetry.metrics import METRICS, AppCollector

PARTITION = PartitionStatistics(
    topic="orders",
    partition=3,
    epoch=1,
    position=120,
    committed=100,
    committable=101,
    end_offset=150,
    lag=50,
    lag_seconds=61.5,
    incomplete=19,
    buffered_records=18,
    buffered_bytes=9_000,
    paused="max_buffered_records=10000 is reached",
    oldest_incomplete_age=2.5,
    noted=0.25,
)
HANDLER = HandlerStatistics(
    name="on_order",
    topics=("orders",),
    concurrency=64,
    busy=5,
    shards=7,
    processed=1_000,
    retried=11,
    skipped=2,
    dead_lettered=3,
    parked=4,
    halted=1,
    outliving=("orders/3/101",),
)
STATISTICS = Statistics(
    state="running",
    group_id="billing",
    member_id="m-1",
    rebalances=2,
    commits=30,
    commit_failures=1,
    replayed=6,
    already_done=7,
    buffered_records=18,
    buffered_bytes=9_000,
    client_losses=1,
    trouble=None,
    partitions=(PARTITION,),
    handlers=(HANDLER,),
    journal=JournalStatistics(written=900, waiting=100, dropped=5, files=2, trouble=None),
)


class FakeApp:
    """Statistics that a test sets."""

    def __init__(self, statistics: Statistics = STATISTICS) -> None:
        self.current = statistics
        self.asked = 0

    def statistics(self) -> Statistics:
        self.asked += 1
        return self.current


class Scrape:
    """An app's metrics, asked by name."""

    def __init__(self, *apps: FakeApp) -> None:
        self.registry = CollectorRegistry()
        AppCollector(*apps, registry=self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"group": "billing", **labels})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aioshard_partition_position", 120),
        ("aioshard_partition_committed_offset", 100),
        ("aioshard_partition_committable_offset", 101),
        ("aioshard_partition_end_offset", 150),
        ("aioshard_partition_lag_records", 50),
        ("aioshard_partition_incomplete_records", 19),
        ("aioshard_partition_buffered_records", 18),
        ("aioshard_partition_buffered_bytes", 9_000),
        ("aioshard_partition_paused", 1),
        ("aioshard_oldest_incomplete_record_age_seconds", 2.5),
    ],
)
def test_a_partition(name: str, expected: float) -> None:
    assert Scrape(FakeApp()).value(name, topic="orders", partition="3") == expected


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("aioshard_records_processed_total", {"outcome": "success"}, 1_000),
        ("aioshard_records_processed_total", {"outcome": "skipped"}, 2),
        ("aioshard_records_processed_total", {"outcome": "dead_lettered"}, 3),
        ("aioshard_records_processed_total", {"outcome": "parked"}, 4),
        ("aioshard_retries_total", {}, 11),
        ("aioshard_halted_records", {}, 1),
        ("aioshard_outliving_runs", {}, 1),
        ("aioshard_busy_workers", {}, 5),
        ("aioshard_concurrency", {}, 64),
        ("aioshard_shards", {}, 7),
    ],
)
def test_a_handler(name: str, labels: dict[str, str], expected: float) -> None:
    assert Scrape(FakeApp()).value(name, handler="on_order", **labels) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aioshard_rebalances_total", 2),
        ("aioshard_commits_total", 30),
        ("aioshard_commit_failures_total", 1),
        ("aioshard_replayed_records_total", 6),
        ("aioshard_client_losses_total", 1),
        ("aioshard_journal_rows_total", 900),
        ("aioshard_journal_dropped_rows_total", 5),
        ("aioshard_buffered_records", 18),
        ("aioshard_buffered_bytes", 9_000),
        ("aioshard_assigned_partitions", 1),
        ("aioshard_trouble", 0),
    ],
)
def test_the_app(name: str, expected: float) -> None:
    assert Scrape(FakeApp()).value(name) == expected


def test_exactly_one_state_is_set() -> None:
    scrape = Scrape(FakeApp(dataclasses.replace(STATISTICS, state="draining")))
    states = {
        state: scrape.value("aioshard_state", state=state)
        for state in ("starting", "running", "draining", "stopped", "failed")
    }
    assert states == {"starting": 0, "running": 0, "draining": 1, "stopped": 0, "failed": 0}


def test_what_is_unknown_is_absent_and_not_zero() -> None:
    unknown = dataclasses.replace(
        PARTITION,
        position=None,
        committed=None,
        committable=None,
        end_offset=None,
        lag=None,
        lag_seconds=None,
        paused=None,
        oldest_incomplete_age=None,
    )
    scrape = Scrape(FakeApp(dataclasses.replace(STATISTICS, partitions=(unknown,))))
    labels = {"topic": "orders", "partition": "3"}
    for name in ("position", "committed_offset", "committable_offset", "end_offset", "lag_records"):
        assert scrape.value(f"aioshard_partition_{name}", **labels) is None
    assert scrape.value("aioshard_partition_paused", **labels) == 0
    assert scrape.value("aioshard_oldest_incomplete_record_age_seconds", **labels) == 0


def test_a_revoked_partition_vanishes_and_trouble_shows() -> None:
    app = FakeApp()
    scrape = Scrape(app)
    assert scrape.value("aioshard_partition_lag_records", topic="orders", partition="3") == 50
    app.current = dataclasses.replace(STATISTICS, partitions=(), trouble="no broker answers")
    assert scrape.value("aioshard_partition_lag_records", topic="orders", partition="3") is None
    assert scrape.value("aioshard_trouble") == 1


def test_the_app_is_asked_once_per_scrape_and_not_when_registering() -> None:
    app = FakeApp()
    scrape = Scrape(app)
    assert app.asked == 0
    generate_latest(scrape.registry)
    assert app.asked == 1


def test_several_apps_of_one_process_are_told_apart_by_group() -> None:
    scrape = Scrape(FakeApp(), FakeApp(dataclasses.replace(STATISTICS, group_id="audit", commits=5)))
    assert scrape.value("aioshard_commits_total") == 30
    assert scrape.value("aioshard_commits_total", group="audit") == 5


def test_handlers_of_the_same_name_are_one_series() -> None:
    scrape = Scrape(FakeApp(dataclasses.replace(STATISTICS, handlers=(HANDLER, HANDLER))))
    text = generate_latest(scrape.registry).decode()
    assert text.count('aioshard_retries_total{group="billing",handler="on_order"}') == 1
    assert scrape.value("aioshard_retries_total", handler="on_order") == 22


def test_every_declared_metric_appears_with_its_help_and_the_naming_rules() -> None:
    scrape = Scrape(FakeApp())
    families = {
        family.name: family for family in text_string_to_metric_families(generate_latest(scrape.registry).decode())
    }
    assert set(families) == {*METRICS, "aioshard_build_info"}
    for name, (kind, documentation, labels) in METRICS.items():
        assert families[name].type == kind
        assert families[name].documentation == documentation
        assert {"group", *labels} == set(families[name].samples[0].labels)
        assert not name.endswith(("_total", "_ms")), "prometheus_client adds _total; base units only"


def test_build_info_carries_the_version() -> None:
    samples: list[Any] = [
        sample for family in Scrape(FakeApp()).registry.collect() for sample in family.samples if "build" in sample.name
    ]
    assert [sample.name for sample in samples] == ["aioshard_build_info"]
    assert samples[0].labels["version"]
