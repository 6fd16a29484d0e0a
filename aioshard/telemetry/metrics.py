"""Prometheus metrics, read from `statistics()` at the moment of a scrape.

Nothing is counted on the way of a record, and a revoked partition's series vanish by themselves.
(The limit: prometheus_client's multi-process mode takes no custom collectors; use one port per process.)
"""

import functools
import importlib.metadata
from collections.abc import Iterable, Iterator
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aioshard.observe import AppState, Statistics

__all__ = ["METRICS", "AppCollector", "Observed", "version"]

METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "aioshard_state": ("gauge", "1 for the state that the app is in, 0 for the others.", ("state",)),
    "aioshard_trouble": (
        "gauge",
        "1 while there is trouble: brokers away, access refused, commits not acknowledged, a topic missing.",
        (),
    ),
    "aioshard_assigned_partitions": ("gauge", "Partitions that the group has given to this process.", ()),
    "aioshard_buffered_records": ("gauge", "Records in memory, over all partitions.", ()),
    "aioshard_buffered_bytes": ("gauge", "Their bytes, as they count against max_buffered_bytes.", ()),
    "aioshard_rebalances": ("counter", "Rebalances that this process took part in.", ()),
    "aioshard_commits": ("counter", "Commit requests that the broker acknowledged.", ()),
    "aioshard_commit_failures": ("counter", "Commit requests that were not acknowledged.", ()),
    "aioshard_replayed_records": ("counter", "Records that this process ran a second time.", ()),
    "aioshard_client_losses": ("counter", "Clients that ended by themselves and were built anew.", ()),
    "aioshard_journal_rows": ("counter", "Rows in finished files of the journal; absent where none is written.", ()),
    "aioshard_journal_dropped_rows": ("counter", "Rows that the journal has lost: it never waits for a disk.", ()),
    "aioshard_partition_position": ("gauge", "Next offset to take in.", ("topic", "partition")),
    "aioshard_partition_committed_offset": (
        "gauge",
        "Last committed offset; absent while there is none.",
        ("topic", "partition"),
    ),
    "aioshard_partition_committable_offset": (
        "gauge",
        "Offset of the oldest incomplete record, else the position.",
        ("topic", "partition"),
    ),
    "aioshard_partition_end_offset": ("gauge", "End of the log, at most 15 s old.", ("topic", "partition")),
    "aioshard_partition_lag_records": (
        "gauge",
        "End of the log minus the committed offset, in offsets.",
        ("topic", "partition"),
    ),
    "aioshard_partition_lag_seconds": (
        "gauge",
        "Now minus the timestamp of the oldest incomplete record; absent while nothing of what is left is in hand.",
        ("topic", "partition"),
    ),
    "aioshard_partition_incomplete_records": (
        "gauge",
        "Records taken in and not complete.",
        ("topic", "partition"),
    ),
    "aioshard_partition_buffered_records": ("gauge", "Records in memory.", ("topic", "partition")),
    "aioshard_partition_buffered_bytes": ("gauge", "Their bytes.", ("topic", "partition")),
    "aioshard_partition_paused": (
        "gauge",
        "1 while nothing more of the partition is taken in.",
        ("topic", "partition"),
    ),
    "aioshard_oldest_incomplete_record_age_seconds": (
        "gauge",
        "Age of the partition's oldest incomplete record, 0 without one; a commit that waits shows here.",
        ("topic", "partition"),
    ),
    "aioshard_records_processed": ("counter", "Records that are complete, by how they ended.", ("handler", "outcome")),
    "aioshard_retries": ("counter", "Attempts after a record's first.", ("handler",)),
    "aioshard_halted_records": ("gauge", "Records that hold their shard, their attempts used up.", ("handler",)),
    "aioshard_outliving_runs": (
        "gauge",
        "Runs that outlive their cancellation or their partition and hold their shard.",
        ("handler",),
    ),
    "aioshard_busy_workers": ("gauge", "Workers that run the handler now.", ("handler",)),
    "aioshard_concurrency": ("gauge", "Workers that the handler has.", ("handler",)),
    "aioshard_shards": ("gauge", "Shards in use.", ("handler",)),
}
"""Type, help and labels of every metric; `group` comes first in the labels of each.
Prometheus shows counters with `_total`."""


class Observed(Protocol):
    """An app, as far as its observers need it."""

    def statistics(self) -> Statistics:
        """A snapshot; safe to call from any thread."""


class AppCollector(Collector):
    """The metrics of one or several apps of a process.

    Args:
        apps: The apps; each is told from the others by the label `group`.
        registry: Where to register, if anywhere.

    Example:
        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> collector = AppCollector(registry=registry)
        >>> registry.get_sample_value("aioshard_build_info", {"version": version()})
        1
    """

    def __init__(self, *apps: Observed, registry: CollectorRegistry | None = None) -> None:
        self._apps = apps
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The names, so that registering does not ask the apps."""
        return [*_families().values(), InfoMetricFamily("aioshard_build", "")]

    def collect(self) -> Iterator[Metric]:
        """The metrics as of now."""
        # Handlers of the same name are summed: a series that came twice would spoil the whole scrape.
        sums: dict[tuple[str, tuple[str, ...]], float] = {}
        for app in self._apps:
            for name, labels, value in _samples(app.statistics()):
                sums[name, labels] = sums.get((name, labels), 0.0) + value
        families = _families()
        for (name, labels), value in sums.items():
            families[name].add_metric(labels, value)
        yield from families.values()
        yield InfoMetricFamily("aioshard_build", "What runs here.", {"version": version()})


@functools.cache  # a scrape must not read files
def version() -> str:
    """The version of the package, `unknown` when it runs from a source tree."""
    try:
        return importlib.metadata.version("aioshard")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _families() -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return {
        name: kinds[kind](name, documentation, labels=["group", *labels])
        for name, (kind, documentation, labels) in METRICS.items()
    }


def _samples(statistics: Statistics) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for name, labels, value in (
        *_of_app(statistics),
        *_of_partitions(statistics),
        *_of_handlers(statistics),
    ):
        if value is not None:
            yield f"aioshard_{name}", (statistics.group_id, *labels), float(value)


_Values = Iterator[tuple[str, tuple[str, ...], float | None]]


def _of_app(statistics: Statistics) -> _Values:
    for state in get_args(AppState):
        yield "state", (state,), statistics.state == state
    yield "trouble", (), statistics.trouble is not None
    yield "assigned_partitions", (), len(statistics.partitions)
    yield "buffered_records", (), statistics.buffered_records
    yield "buffered_bytes", (), statistics.buffered_bytes
    yield "rebalances", (), statistics.rebalances
    yield "commits", (), statistics.commits
    yield "commit_failures", (), statistics.commit_failures
    yield "replayed_records", (), statistics.replayed
    yield "client_losses", (), statistics.client_losses
    journal = statistics.journal
    yield "journal_rows", (), None if journal is None else journal.written
    yield "journal_dropped_rows", (), None if journal is None else journal.dropped


def _of_partitions(statistics: Statistics) -> _Values:
    for partition in statistics.partitions:
        labels = (partition.topic, str(partition.partition))
        yield "partition_position", labels, partition.position
        yield "partition_committed_offset", labels, partition.committed
        yield "partition_committable_offset", labels, partition.committable
        yield "partition_end_offset", labels, partition.end_offset
        yield "partition_lag_records", labels, partition.lag
        yield "partition_lag_seconds", labels, partition.lag_seconds
        yield "partition_incomplete_records", labels, partition.incomplete
        yield "partition_buffered_records", labels, partition.buffered_records
        yield "partition_buffered_bytes", labels, partition.buffered_bytes
        yield "partition_paused", labels, partition.paused is not None
        yield "oldest_incomplete_record_age_seconds", labels, partition.oldest_incomplete_age or 0.0


def _of_handlers(statistics: Statistics) -> _Values:
    for handler in statistics.handlers:
        yield "records_processed", (handler.name, "success"), handler.processed
        yield "records_processed", (handler.name, "skipped"), handler.skipped
        yield "records_processed", (handler.name, "dead_lettered"), handler.dead_lettered
        yield "records_processed", (handler.name, "parked"), handler.parked
        labels = (handler.name,)
        yield "retries", labels, handler.retried
        yield "halted_records", labels, handler.halted
        yield "outliving_runs", labels, len(handler.outliving)
        yield "busy_workers", labels, handler.busy
        yield "concurrency", labels, handler.concurrency
        yield "shards", labels, handler.shards
