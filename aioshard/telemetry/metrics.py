"""Prometheus metrics, read from `statistics()` during a scrape.

They add no counting to the processing of a record, and the series of a revoked partition disappear by themselves.
Limit: prometheus_client's multi-process mode does not support custom collectors; use one port per process.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioshard.observe import AppState, HandlerStatistics, Statistics
from aioshard.telemetry.exposition import SeriesFamily, Values
from aioshard.telemetry.metric_table import METRICS
from aioshard.telemetry.versions import version

__all__ = ["METRICS", "AppCollector", "Observed"]

_CLIENTS = {"aiokafka": "aiokafka", "confluent": "confluent-kafka"}
"""Package names of the Kafka clients."""


class Observed(Protocol):
    """The interface of an app that its observers need."""

    def statistics(self) -> Statistics:
        """Return a snapshot; safe to call from any thread."""


class AppCollector(Collector):
    """The metrics of one or several apps of a process.

    Args:
        apps: The apps, distinguished by the label `group`.
        registry: The registry to register with, if any.

    Example:
        >>> from aioshard import App
        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> collector = AppCollector(App("billing"), registry=registry)
        >>> registry.get_sample_value("aioshard_engine_state", {"group": "billing", "state": "stopped"})
        1.0
    """

    def __init__(self, *apps: Observed, registry: CollectorRegistry | None = None) -> None:
        self._apps = apps
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return the names, so that registering does not query the apps."""
        return [SeriesFamily(name) for name in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics."""
        values = Values()
        for app in self._apps:
            statistics = app.statistics()
            _add_app(values, statistics)
            _add_partitions(values, statistics)
            for handler in statistics.handlers:
                _add_handler(values, statistics.group_id, handler)
        return values.families()


def _client(name: str) -> str:
    return f"{name} {version(_CLIENTS[name])}" if name in _CLIENTS else name


def _add_app(values: Values, statistics: Statistics) -> None:
    group = (statistics.group_id,)
    values.add("aioshard_build", (*group, version(), _client(statistics.client)), 1.0)
    for state in get_args(AppState):
        values.add("aioshard_engine_state", (*group, state), float(statistics.state == state))
    values.add("aioshard_trouble", group, float(statistics.trouble is not None))
    values.add("aioshard_assigned_partitions", group, len(statistics.partitions))
    values.add("aioshard_buffered_records", group, statistics.buffered_records)
    values.add("aioshard_buffered_bytes", group, statistics.buffered_bytes)
    limited = [handler for handler in statistics.handlers if handler.shard_capacity]
    if limited:
        fullest = max(limited, key=lambda handler: handler.shard_depth / handler.shard_capacity)
        values.add("aioshard_shard_queue_capacity", group, fullest.shard_capacity)
        values.add("aioshard_shard_queue_depth_max", group, fullest.shard_depth)
    values.add("aioshard_commits", (*group, "success"), statistics.commits)
    values.add("aioshard_commits", (*group, "failure"), statistics.commit_failures)
    values.add_histogram("aioshard_commit_duration_seconds", (*group, "success"), statistics.commit_durations)
    values.add_histogram("aioshard_commit_duration_seconds", (*group, "failure"), statistics.commit_failure_durations)
    for one in statistics.rebalance_kinds:
        values.add("aioshard_rebalances", (*group, one.kind), one.count)
        values.add_histogram("aioshard_rebalance_drain_duration_seconds", (*group, one.kind), one.drains)
    values.add_histogram("aioshard_event_loop_delay_seconds", group, statistics.loop_delays)
    values.add("aioshard_replayed_records", group, statistics.replayed)
    values.add("aioshard_client_losses", group, statistics.client_losses)
    if statistics.journal is not None:
        values.add("aioshard_journal_rows", group, statistics.journal.written)
        values.add("aioshard_journal_dropped_rows", group, statistics.journal.dropped)


_OF_PARTITION = {
    "aioshard_records_fetched": "fetched",
    "aioshard_records_in_flight": "in_flight",
    "aioshard_records_queued": "queued",
    "aioshard_partition_lag_records": "lag",
    "aioshard_partition_lag_seconds": "lag_seconds",
    "aioshard_partition_committed_offset": "committed",
    "aioshard_partition_committable_offset": "committable",
    "aioshard_partition_position": "position",
    "aioshard_partition_end_offset": "end_offset",
    "aioshard_partition_incomplete_records": "incomplete",
    "aioshard_partition_buffered_records": "buffered_records",
    "aioshard_partition_buffered_bytes": "buffered_bytes",
}
"""The attribute of a partition's statistics that each metric shows; None gives no sample."""


def _add_partitions(values: Values, statistics: Statistics) -> None:
    group, partitions = statistics.group_id, statistics.partitions
    labels = [(group, partition.topic, str(partition.partition)) for partition in partitions]
    for name, attribute in _OF_PARTITION.items():
        series = values.series(name)
        for key, partition in zip(labels, partitions, strict=True):
            value = getattr(partition, attribute)
            if value is not None:
                series[key] = value
    paused = values.series("aioshard_partition_paused")
    ages = values.series("aioshard_oldest_incomplete_record_age_seconds")
    for key, partition in zip(labels, partitions, strict=True):
        paused[key] = float(partition.paused is not None)
        ages[key] = partition.oldest_incomplete_age or 0.0


def _add_handler(values: Values, group: str, handler: HandlerStatistics) -> None:
    for topic in handler.by_topic:
        labels = (group, topic.topic, handler.name)
        values.add("aioshard_records_processed", (*labels, "success"), topic.processed)
        values.add("aioshard_records_processed", (*labels, "skipped"), topic.skipped)
        values.add("aioshard_records_processed", (*labels, "dead_lettered"), topic.dead_lettered)
        values.add("aioshard_records_processed", (*labels, "parked"), topic.parked)
        values.add("aioshard_retries", labels, topic.retried)
        values.add("aioshard_dead_letters", labels, topic.dead_lettered)
        values.add_histogram("aioshard_record_processing_duration_seconds", labels, topic.durations)
        values.add_histogram("aioshard_record_queue_wait_seconds", (group, topic.topic), topic.waits)
    of_handler = (group, handler.name)
    values.add("aioshard_halted_records", of_handler, handler.halted)
    values.add("aioshard_outliving_runs", of_handler, len(handler.outliving))
    values.add("aioshard_busy_workers", of_handler, handler.busy)
    values.add("aioshard_concurrency", of_handler, handler.concurrency)
    values.add("aioshard_shards", of_handler, handler.shards)
