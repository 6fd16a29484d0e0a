"""Prometheus metrics, read from `statistics()` during a scrape.

They add no counting to the processing of a record, and the series of a revoked partition disappear by themselves.
Limit: prometheus_client's multi-process mode does not support custom collectors; use one port per process.
"""

import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from aioshard.core.histogram import HistogramCounts
from aioshard.observe import AppState, HandlerStatistics, Statistics
from aioshard.telemetry.versions import version

Kind = Literal["counter", "gauge", "histogram", "info"]


class MetricInfo(NamedTuple):
    """One metric."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Labels in addition to `group`, which comes first."""


_PARTITION = ("topic", "partition")
_HANDLED = ("topic", "handler")

METRICS: dict[str, MetricInfo] = {
    "aioshard_build": MetricInfo("info", "Versions of aioshard and its Kafka client; always 1.", ("version", "client")),
    "aioshard_engine_state": MetricInfo("gauge", "1 for the current state of the app, 0 for the others.", ("state",)),
    "aioshard_trouble": MetricInfo(
        "gauge",
        "1 while there is trouble: brokers unreachable, access denied, commits or messages not acknowledged, a topic "
        "missing, a hanging task, a blocked event loop.",
    ),
    "aioshard_assigned_partitions": MetricInfo("gauge", "Partitions assigned to this process."),
    "aioshard_buffered_records": MetricInfo("gauge", "Records in memory, over all partitions."),
    "aioshard_buffered_bytes": MetricInfo("gauge", "Their bytes, as they count against max_buffered_bytes."),
    "aioshard_shard_queue_capacity": MetricInfo(
        "gauge", "Maximum records in one shard, of the handler whose fullest shard is nearest to it."
    ),
    "aioshard_shard_queue_depth_max": MetricInfo("gauge", "Records waiting in that shard."),
    "aioshard_commits": MetricInfo(
        "counter", "Commit requests, by whether the broker acknowledged them.", ("outcome",)
    ),
    "aioshard_commit_duration_seconds": MetricInfo("histogram", "Duration of a commit request.", ("outcome",)),
    "aioshard_rebalances": MetricInfo(
        "counter",
        "Rebalances by how they began: assigned, revoked, lost (with the group membership), manual.",
        ("kind",),
    ),
    "aioshard_rebalance_drain_duration_seconds": MetricInfo(
        "histogram", "Time until all runs of revoked partitions had ended or were cancelled.", ("kind",)
    ),
    "aioshard_event_loop_delay_seconds": MetricInfo(
        "histogram", "Delay of the event loop, sampled a few times a second; absent if the loop is not watched."
    ),
    "aioshard_replayed_records": MetricInfo("counter", "Records that this process ran twice."),
    "aioshard_client_losses": MetricInfo("counter", "Kafka clients that failed and were replaced."),
    "aioshard_journal_rows": MetricInfo("counter", "Rows in finished journal files; absent without a journal."),
    "aioshard_journal_dropped_rows": MetricInfo(
        "counter", "Rows that the journal has dropped: the app never waits for the disk."
    ),
    "aioshard_records_fetched": MetricInfo(
        "counter", "Records fetched; restarts at 0 with each assignment of the partition.", _PARTITION
    ),
    "aioshard_records_in_flight": MetricInfo("gauge", "Records in progress.", _PARTITION),
    "aioshard_records_queued": MetricInfo(
        "gauge",
        "Records waiting in memory: for a worker, behind another record, or for their next attempt.",
        _PARTITION,
    ),
    "aioshard_oldest_incomplete_record_age_seconds": MetricInfo(
        "gauge",
        "Age of the partition's oldest incomplete record since it was fetched, 0 without one; shows a stuck commit.",
        _PARTITION,
    ),
    "aioshard_partition_lag_records": MetricInfo(
        "gauge", "End of the log minus the committed offset, in offsets.", _PARTITION
    ),
    "aioshard_partition_lag_seconds": MetricInfo(
        "gauge",
        "Now minus the timestamp of the oldest incomplete record; absent without one in memory.",
        _PARTITION,
    ),
    "aioshard_partition_committed_offset": MetricInfo(
        "gauge", "Last committed offset; absent without one.", _PARTITION
    ),
    "aioshard_partition_committable_offset": MetricInfo(
        "gauge", "Offset of the oldest incomplete record, or the position without one.", _PARTITION
    ),
    "aioshard_partition_position": MetricInfo("gauge", "Next offset to fetch.", _PARTITION),
    "aioshard_partition_end_offset": MetricInfo("gauge", "End of the log, at most 15 s old.", _PARTITION),
    "aioshard_partition_paused": MetricInfo("gauge", "1 while the partition is paused.", _PARTITION),
    "aioshard_partition_incomplete_records": MetricInfo("gauge", "Records fetched but not complete.", _PARTITION),
    "aioshard_partition_buffered_records": MetricInfo("gauge", "Records in memory.", _PARTITION),
    "aioshard_partition_buffered_bytes": MetricInfo("gauge", "Their bytes.", _PARTITION),
    "aioshard_records_processed": MetricInfo(
        "counter",
        "Completed records, by outcome: success, skipped, dead_lettered, parked.",
        (*_HANDLED, "outcome"),
    ),
    "aioshard_record_processing_duration_seconds": MetricInfo(
        "histogram", "Duration of attempts, including failed ones; batch handlers count batches.", _HANDLED
    ),
    "aioshard_record_queue_wait_seconds": MetricInfo(
        "histogram", "Time from fetching a record to its first attempt; sampled if attempts are quick.", ("topic",)
    ),
    "aioshard_retries": MetricInfo("counter", "Retries of records.", _HANDLED),
    "aioshard_dead_letters": MetricInfo("counter", "Records written to the dead-letter topic.", _HANDLED),
    "aioshard_halted_records": MetricInfo(
        "gauge", "Records that block their shard after their last attempt failed.", ("handler",)
    ),
    "aioshard_outliving_runs": MetricInfo(
        "gauge", "Runs that outlive their cancellation or their partition and block their shard.", ("handler",)
    ),
    "aioshard_busy_workers": MetricInfo("gauge", "Workers running the handler.", ("handler",)),
    "aioshard_concurrency": MetricInfo("gauge", "Workers of the handler.", ("handler",)),
    "aioshard_shards": MetricInfo("gauge", "Shards in use.", ("handler",)),
}
"""Every metric. Prometheus shows counters with the suffix `_total`, an info with `_info`, and histograms with
`_bucket`, `_sum` and `_count`."""


Labels = tuple[str, ...]
"""Label values of one series, in the order of the metric table; `group` comes first."""

Value = float | HistogramCounts

_SUFFIXES: Final = {"counter": "_total", "info": "_info"}
_EOF = b"# EOF\n"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class SeriesFamily(Metric):
    """One aioshard metric with its series: a regular `Metric`, but `encode` renders it without an object per series."""

    def __init__(self, name: str) -> None:
        self.series: dict[Labels, Any] = {}
        """The value of each series; write to it directly if there are many."""
        self._names = ("group", *METRICS[name].labels)
        super().__init__(name, METRICS[name].help, METRICS[name].kind)

    def add(self, labels: Labels, value: Value | None) -> None:
        """Add a value; None is ignored.

        Series that occur twice, from handlers with the same name, are summed: Prometheus rejects a page with
        duplicates.
        """
        if value is not None:
            self.series[labels] = self.series[labels] + value if labels in self.series else value

    @property
    def samples(self) -> list[Sample]:
        """Return one sample per series, as prometheus_client expects."""
        return [
            Sample(name, dict(zip(self._names, labels, strict=True)) | ({"le": le} if le else {}), value)
            for name, labels, le, value in self._rows()
        ]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """Ignore the empty list that the base class assigns."""

    def _rows(self) -> Iterator[tuple[str, Labels, str, float]]:
        """Yield name, labels, bound and value of each sample; the bound is empty except for buckets."""
        full = self.name + _SUFFIXES.get(self.type, "")
        for labels, value in self.series.items():
            if not isinstance(value, HistogramCounts):
                yield full, labels, "", value
                continue
            for le, count in zip([*map(str, value.bounds), "+Inf"], itertools.accumulate(value.counts), strict=True):
                yield f"{self.name}_bucket", labels, le, count
            yield f"{self.name}_sum", labels, "", value.total
            yield f"{self.name}_count", labels, "", value.count

    def lines(self, texts: dict[tuple[Labels, Labels], str], *, open_metrics: bool) -> Iterator[str]:
        """Yield the metric as text.

        Args:
            texts: Cache of rendered label names and values, which many metrics share.
            open_metrics: True for the OpenMetrics format, whose headings name counters and infos differently.
        """
        kind = "gauge" if self.type == "info" and not open_metrics else self.type
        heading = self.name if open_metrics else self.name + _SUFFIXES.get(self.type, "")
        yield f"# HELP {heading} {self.documentation.translate(_ESCAPES) if open_metrics else self.documentation}\n"
        yield f"# TYPE {heading} {kind}\n"
        for name, labels, le, value in self._rows():
            text = texts.get((self._names, labels)) or self._text(texts, labels)
            bound = f',le="{le}"' if le else ""
            yield f"{name}{{{text}{bound}}} {float(value)}\n"

    def _text(self, texts: dict[tuple[Labels, Labels], str], labels: Labels) -> str:
        pairs = sorted(zip(self._names, labels, strict=True))
        text = texts[self._names, labels] = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
        return text


def encode(registry: Collector, accept: str = "") -> tuple[bytes, str]:
    """Render the metrics page: the same as prometheus_client would, in a fraction of the time.

    Args:
        registry: The metrics to render.
        accept: The `Accept` header of the scraper.

    Returns:
        The page and its content type.
    """
    encoder: Callable[[Any], bytes]
    encoder, content_type = choose_encoder(accept)
    open_metrics = content_type.startswith("application/openmetrics-text")
    metrics = list(registry.collect())
    texts: dict[tuple[Labels, Labels], str] = {}
    ours = [family.lines(texts, open_metrics=open_metrics) for family in metrics if isinstance(family, SeriesFamily)]
    page = "".join(itertools.chain.from_iterable(ours)).encode()
    others = [metric for metric in metrics if not isinstance(metric, SeriesFamily)]
    rest = encoder(types.SimpleNamespace(collect=lambda: others))
    if open_metrics:
        return rest.removesuffix(_EOF) + page + _EOF, content_type
    return rest + page, content_type


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
        families = {name: SeriesFamily(name) for name in METRICS}
        for app in self._apps:
            statistics = app.statistics()
            _add_app(families, statistics)
            _add_partitions(families, statistics)
            for handler in statistics.handlers:
                _add_handler(families, statistics.group_id, handler)
        yield from families.values()


def _client(name: str) -> str:
    return f"{name} {version(_CLIENTS[name])}" if name in _CLIENTS else name


Families = dict[str, SeriesFamily]


def _add_app(families: Families, statistics: Statistics) -> None:
    group = (statistics.group_id,)
    families["aioshard_build"].add((*group, version(), _client(statistics.client)), 1.0)
    for state in get_args(AppState):
        families["aioshard_engine_state"].add((*group, state), float(statistics.state == state))
    families["aioshard_trouble"].add(group, float(statistics.trouble is not None))
    for name, attribute in _APP_ATTRIBUTES.items():
        families[name].add(group, getattr(statistics, attribute))
    families["aioshard_assigned_partitions"].add(group, len(statistics.partitions))
    limited = [handler for handler in statistics.handlers if handler.shard_capacity]
    if limited:
        fullest = max(limited, key=lambda handler: handler.shard_depth / handler.shard_capacity)
        families["aioshard_shard_queue_capacity"].add(group, fullest.shard_capacity)
        families["aioshard_shard_queue_depth_max"].add(group, fullest.shard_depth)
    families["aioshard_commits"].add((*group, "success"), statistics.commits)
    families["aioshard_commits"].add((*group, "failure"), statistics.commit_failures)
    families["aioshard_commit_duration_seconds"].add((*group, "success"), statistics.commit_durations)
    families["aioshard_commit_duration_seconds"].add((*group, "failure"), statistics.commit_failure_durations)
    for rebalances in statistics.rebalance_kinds:
        families["aioshard_rebalances"].add((*group, rebalances.kind), rebalances.count)
        families["aioshard_rebalance_drain_duration_seconds"].add((*group, rebalances.kind), rebalances.drains)
    if statistics.journal is not None:
        families["aioshard_journal_rows"].add(group, statistics.journal.written)
        families["aioshard_journal_dropped_rows"].add(group, statistics.journal.dropped)


_APP_ATTRIBUTES = {
    "aioshard_buffered_records": "buffered_records",
    "aioshard_buffered_bytes": "buffered_bytes",
    "aioshard_event_loop_delay_seconds": "loop_delays",
    "aioshard_replayed_records": "replayed",
    "aioshard_client_losses": "client_losses",
}
_HANDLER_ATTRIBUTES = {
    "aioshard_halted_records": "halted",
    "aioshard_busy_workers": "busy",
    "aioshard_concurrency": "concurrency",
    "aioshard_shards": "shards",
}
_PARTITION_ATTRIBUTES = {
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
"""The attribute of the statistics that each metric shows; None gives no sample."""


def _add_partitions(families: Families, statistics: Statistics) -> None:
    group, partitions = statistics.group_id, statistics.partitions
    labels = [(group, partition.topic, str(partition.partition)) for partition in partitions]
    for name, attribute in _PARTITION_ATTRIBUTES.items():
        series = families[name].series
        for key, partition in zip(labels, partitions, strict=True):
            value = getattr(partition, attribute)
            if value is not None:
                series[key] = value
    paused = families["aioshard_partition_paused"].series
    ages = families["aioshard_oldest_incomplete_record_age_seconds"].series
    for key, partition in zip(labels, partitions, strict=True):
        paused[key] = float(partition.paused is not None)
        ages[key] = partition.oldest_incomplete_age or 0.0


def _add_handler(families: Families, group: str, handler: HandlerStatistics) -> None:
    for topic in handler.by_topic:
        labels = (group, topic.topic, handler.name)
        families["aioshard_records_processed"].add((*labels, "success"), topic.processed)
        for outcome in ("skipped", "dead_lettered", "parked"):
            families["aioshard_records_processed"].add((*labels, outcome), getattr(topic, outcome))
        families["aioshard_retries"].add(labels, topic.retried)
        families["aioshard_dead_letters"].add(labels, topic.dead_lettered)
        families["aioshard_record_processing_duration_seconds"].add(labels, topic.durations)
        families["aioshard_record_queue_wait_seconds"].add((group, topic.topic), topic.waits)
    of_handler = (group, handler.name)
    for name, attribute in _HANDLER_ATTRIBUTES.items():
        families[name].add(of_handler, getattr(handler, attribute))
    families["aioshard_outliving_runs"].add(of_handler, len(handler.outliving))
