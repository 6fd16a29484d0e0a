"""Metrics: a scrape shows the statistics of an app."""

import dataclasses
import json
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from aioshard.core.histogram import DURATION_BOUNDS, HistogramCounts
from aioshard.observe import (
    AdaptiveStatistics,
    JournalStatistics,
    LimitStatistics,
    RebalanceKindStatistics,
    TopicStatistics,
)
from aioshard.telemetry.metrics import METRICS, AppCollector
from aioshard.telemetry.versions import version
from tests.support import fake_app
from tests.support.fake_app import FakeApp
from tests.support.paths import PROJECT

DEPLOY = PROJECT / "deploy"
SUFFIXES = {"counter": ("_total",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}
PARTITION = dataclasses.replace(
    fake_app.PARTITION, paused="max_buffered_records=10000 is reached", fetched=119, in_flight=5, queued=13
)
DURATIONS = HistogramCounts(DURATION_BOUNDS, (900, 90, *(0,) * 12, 10), 150.0)
WAITS = HistogramCounts(DURATION_BOUNDS, (0, 1_000, *(0,) * 13), 7.5)
TOPIC = TopicStatistics(
    topic="orders",
    processed=1_000,
    retried=11,
    skipped=2,
    dead_lettered=3,
    parked=4,
    durations=DURATIONS,
    waits=WAITS,
)
NOTHING = HistogramCounts(DURATION_BOUNDS, (0,) * 15, 0.0)
ADAPTIVE = AdaptiveStatistics(1, 512, 128, "queue", "they queue", 3.0, 0.024, 0.02, {"queue": 2, "spare": 4})
HANDLER = dataclasses.replace(
    fake_app.HANDLER,
    halted=1,
    outliving=("orders/3/101",),
    by_topic=(TOPIC,),
    shard_capacity=10_000,
    shard_depth=40,
    adaptive=ADAPTIVE,
)
STATISTICS = dataclasses.replace(
    fake_app.STATISTICS,
    partitions=(PARTITION,),
    handlers=(HANDLER,),
    journal=JournalStatistics(written=900, waiting=100, dropped=5, files=2, trouble=None),
    loop_delays=WAITS,
    rebalance_kinds=(
        RebalanceKindStatistics("assigned", 1, NOTHING),
        RebalanceKindStatistics("revoked", 2, DURATIONS),
    ),
    rebalance_seconds=31.5,
    heartbeat_age=1.25,
    catch_up_seconds=64.0,
    commit_durations=WAITS,
    commit_failure_durations=NOTHING,
    limits=(
        LimitStatistics("stripe", "group", 50.0, 10, ("on_order",), 17, 1, 8.5, tokens=0.25, due=0.03, share=0.5),
        LimitStatistics("tenant", "key", 2.0, 3, ("on_order",), 18, 4, 9.5, keys=12),
    ),
)


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
        ("aioshard_partition_held_back_offsets", 7),
        ("aioshard_partition_lag_seconds", 61.5),
        ("aioshard_records_fetched_total", 119),
        ("aioshard_records_in_flight", 5),
        ("aioshard_records_queued", 13),
        ("aioshard_oldest_incomplete_record_age_seconds", 2.5),
    ],
)
def test_partition_metrics_match_the_statistics(name: str, expected: float) -> None:
    assert Scrape(FakeApp(STATISTICS)).value(name, topic="orders", partition="3") == expected


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("aioshard_records_processed_total", {"topic": "orders", "outcome": "success"}, 1_000),
        ("aioshard_records_processed_total", {"topic": "orders", "outcome": "skipped"}, 2),
        ("aioshard_records_processed_total", {"topic": "orders", "outcome": "dead_lettered"}, 3),
        ("aioshard_records_processed_total", {"topic": "orders", "outcome": "parked"}, 4),
        ("aioshard_retries_total", {"topic": "orders"}, 11),
        ("aioshard_dead_letters_total", {"topic": "orders"}, 3),
        ("aioshard_record_processing_duration_seconds_bucket", {"topic": "orders", "le": "0.01"}, 990),
        ("aioshard_record_processing_duration_seconds_bucket", {"topic": "orders", "le": "10.0"}, 990),
        ("aioshard_record_processing_duration_seconds_bucket", {"topic": "orders", "le": "+Inf"}, 1_000),
        ("aioshard_record_processing_duration_seconds_sum", {"topic": "orders"}, 150),
        ("aioshard_record_processing_duration_seconds_count", {"topic": "orders"}, 1_000),
        ("aioshard_halted_records", {}, 1),
        ("aioshard_outliving_runs", {}, 1),
        ("aioshard_busy_workers", {}, 5),
        ("aioshard_concurrency", {}, 64),
        ("aioshard_concurrency_changes_total", {"reason": "queue"}, 2),
        ("aioshard_concurrency_changes_total", {"reason": "overload"}, 0),
        ("aioshard_shards", {}, 7),
    ],
)
def test_handler_metrics_match_the_statistics(name: str, labels: dict[str, str], expected: float) -> None:
    assert Scrape(FakeApp(STATISTICS)).value(name, handler="on_order", **labels) == expected


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("aioshard_limit_starts_total", "stripe", 17),
        ("aioshard_limit_starts_total", "tenant", 18),
        ("aioshard_limit_waiting_seconds_total", "tenant", 9.5),
        ("aioshard_limit_waiting", "tenant", 4),
        ("aioshard_limit_tokens", "stripe", 0.25),
        ("aioshard_limit_tokens", "tenant", None),
        ("aioshard_limit_share", "stripe", 0.5),
        ("aioshard_limit_share", "tenant", None),
        ("aioshard_limit_keys", "stripe", None),
        ("aioshard_limit_keys", "tenant", 12),
    ],
)
def test_limit_metrics_match_the_statistics(name: str, limit: str, expected: float | None) -> None:
    assert Scrape(FakeApp(STATISTICS)).value(name, limit=limit) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aioshard_shard_queue_capacity", 10_000),
        ("aioshard_shard_queue_depth_max", 40),
        ("aioshard_event_loop_delay_seconds_count", 1_000),
        ("aioshard_rebalance_seconds_total", 31.5),
        ("aioshard_heartbeat_age_seconds", 1.25),
        ("aioshard_catch_up_seconds", 64.0),
        ("aioshard_replayed_records_total", 6),
        ("aioshard_client_losses_total", 1),
        ("aioshard_transactions_fenced_total", 8),
        ("aioshard_transaction_messages_total", 80),
        ("aioshard_transaction_open_seconds", 0.5),
        ("aioshard_transactions_committed_total", 41),
        ("aioshard_transactions_aborted_total", 9),
        ("aioshard_transactions_decided_committed_total", 3),
        ("aioshard_transactions_decided_aborted_total", 2),
        ("aioshard_transactions_undecided_total", 1),
        ("aioshard_transaction_producer_epochs_total", 14),
        ("aioshard_journal_rows_total", 900),
        ("aioshard_journal_dropped_rows_total", 5),
        ("aioshard_buffered_records", 18),
        ("aioshard_buffered_bytes", 9_000),
        ("aioshard_assigned_partitions", 1),
        ("aioshard_trouble", 0),
    ],
)
def test_app_metrics_match_the_statistics(name: str, expected: float) -> None:
    assert Scrape(FakeApp(STATISTICS)).value(name) == expected


def test_exactly_one_app_state_is_set() -> None:
    scrape = Scrape(FakeApp(dataclasses.replace(STATISTICS, state="draining")))
    states = {
        state: scrape.value("aioshard_engine_state", state=state)
        for state in ("starting", "running", "draining", "stopped", "failed")
    }
    assert states == {"starting": 0, "running": 0, "draining": 1, "stopped": 0, "failed": 0}


def test_unknown_values_are_absent_rather_than_zero() -> None:
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


def test_a_revoked_partition_disappears_and_trouble_shows() -> None:
    app = FakeApp(STATISTICS)
    scrape = Scrape(app)
    assert scrape.value("aioshard_partition_lag_records", topic="orders", partition="3") == 50
    app.current = dataclasses.replace(STATISTICS, partitions=(), trouble="no broker answers")
    assert scrape.value("aioshard_partition_lag_records", topic="orders", partition="3") is None
    assert scrape.value("aioshard_trouble") == 1


def test_statistics_are_read_once_per_scrape_and_not_at_registration() -> None:
    app = FakeApp(STATISTICS)
    scrape = Scrape(app)
    assert app.asked == 0
    generate_latest(scrape.registry)
    assert app.asked == 1


def test_apps_in_one_process_are_distinguished_by_group() -> None:
    scrape = Scrape(FakeApp(STATISTICS), FakeApp(dataclasses.replace(STATISTICS, group_id="audit", commits=5)))
    assert scrape.value("aioshard_commits_total", outcome="success") == 30
    assert scrape.value("aioshard_commits_total", outcome="failure") == 1
    assert scrape.value("aioshard_commits_total", group="audit", outcome="success") == 5


def test_handlers_with_the_same_name_share_a_series() -> None:
    scrape = Scrape(FakeApp(dataclasses.replace(STATISTICS, handlers=(HANDLER, HANDLER))))
    text = generate_latest(scrape.registry).decode()
    assert text.count('aioshard_retries_total{group="billing",handler="on_order",topic="orders"}') == 1
    labels = {"topic": "orders", "handler": "on_order"}
    assert scrape.value("aioshard_retries_total", **labels) == 22
    assert scrape.value("aioshard_record_processing_duration_seconds_sum", **labels) == 300
    assert scrape.value("aioshard_record_processing_duration_seconds_bucket", **labels, le="0.01") == 1_980


def test_every_declared_metric_has_help_and_follows_the_naming_rules() -> None:
    scrape = Scrape(FakeApp(STATISTICS))
    families = {
        family.name: family for family in text_string_to_metric_families(generate_latest(scrape.registry).decode())
    }
    families["aioshard_build"] = families.pop("aioshard_build_info")
    assert set(families) == set(METRICS)
    for name, (kind, documentation, _, labels) in METRICS.items():
        assert families[name].type == ("gauge" if kind == "info" else kind)
        assert families[name].documentation == documentation
        assert {"group", *labels} == set(families[name].samples[0].labels) - {"le"}
        assert not name.endswith(("_total", "_ms")), "prometheus_client adds _total; base units only"


def test_build_info_has_the_version() -> None:
    assert Scrape(FakeApp(STATISTICS)).value("aioshard_build_info", version=version()) == 1


def test_a_topic_has_the_queue_waits_of_its_handler() -> None:
    scrape = Scrape(FakeApp(STATISTICS))

    assert scrape.value("aioshard_record_queue_wait_seconds_bucket", topic="orders", le="0.01") == 1_000


def test_rebalances_and_drains_are_counted_by_kind() -> None:
    scrape = Scrape(FakeApp(STATISTICS))
    assert scrape.value("aioshard_rebalances_total", kind="assigned") == 1
    assert scrape.value("aioshard_rebalances_total", kind="revoked") == 2
    assert scrape.value("aioshard_rebalance_drain_duration_seconds_sum", kind="revoked") == 150


PARTITION_LABELS, HANDLED = ("topic", "partition"), ("topic", "handler")
DESIGNED = {
    "records_fetched_total": ("counter", PARTITION_LABELS),
    "records_processed_total": ("counter", (*HANDLED, "outcome")),
    "record_processing_duration_seconds": ("histogram", HANDLED),
    "record_queue_wait_seconds": ("histogram", ("topic",)),
    "retries_total": ("counter", HANDLED),
    "dead_letters_total": ("counter", HANDLED),
    "records_in_flight": ("gauge", PARTITION_LABELS),
    "records_queued": ("gauge", PARTITION_LABELS),
    "shard_queue_capacity": ("gauge", ()),
    "shard_queue_depth_max": ("gauge", ()),
    "oldest_incomplete_record_age_seconds": ("gauge", PARTITION_LABELS),
    "partition_lag_records": ("gauge", PARTITION_LABELS),
    "partition_lag_seconds": ("gauge", PARTITION_LABELS),
    "partition_committed_offset": ("gauge", PARTITION_LABELS),
    "partition_position": ("gauge", PARTITION_LABELS),
    "partition_paused": ("gauge", PARTITION_LABELS),
    "commits_total": ("counter", ("outcome",)),
    "commit_duration_seconds": ("histogram", ("outcome",)),
    "rebalances_total": ("counter", ("kind",)),
    "rebalance_seconds_total": ("counter", ()),
    "heartbeat_age_seconds": ("gauge", ()),
    "catch_up_seconds": ("gauge", ()),
    "rebalance_drain_duration_seconds": ("histogram", ("kind",)),
    "assigned_partitions": ("gauge", ()),
    "engine_state": ("gauge", ("state",)),
    "event_loop_delay_seconds": ("histogram", ()),
    "build_info": ("info", ("version",)),
}
"""Names that dashboards and alerts of users depend on: renaming one breaks them."""


@pytest.mark.parametrize("name", DESIGNED)
def test_a_published_metric_keeps_its_type_and_labels(name: str) -> None:
    kind, labels = DESIGNED[name]
    info = METRICS[f"aioshard_{name.removesuffix('_total').removesuffix('_info')}"]
    assert (info.kind, info.labels) == (kind, labels)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0", "text/plain;version=1.0.0"])
def test_metrics_parse_in_every_format(accept: str) -> None:
    hostile = dataclasses.replace(PARTITION, topic='or"ders\\\n', partition=4)
    app = FakeApp(dataclasses.replace(STATISTICS, partitions=(PARTITION, hostile)))
    registry = CollectorRegistry()
    AppCollector(app, registry=registry)
    encoder, _ = choose_encoder(accept)
    parse = parse_open_metrics if "openmetrics" in accept else text_string_to_metric_families

    families = {family.name: family for family in parse(encoder(registry).decode())}

    lag = families["aioshard_partition_lag_records"].samples
    assert {sample.labels["topic"] for sample in lag} == {PARTITION.topic, hostile.topic}


@pytest.mark.parametrize("file", ["grafana/aioshard.json", "prometheus/aioshard.rules.yml"])
def test_shipped_rules_and_dashboards_use_existing_metrics_and_labels(file: str) -> None:
    text = (DEPLOY / file).read_text()
    shown = {f"{name}{suffix}" for name, info in METRICS.items() for suffix in SUFFIXES.get(info.kind, ("",))}
    asked = set(re.findall(r"\baioshard_\w+", text))
    assert asked
    assert asked <= shown


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads((DEPLOY / "grafana/aioshard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "group", "topic"}
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}
    for row in {panel["gridPos"]["y"] for panel in panels}:
        side_by_side = [panel["gridPos"] for panel in panels if panel["gridPos"]["y"] == row]
        assert sum(place["w"] for place in side_by_side) <= 24
        assert len({place["h"] for place in side_by_side}) == 1
