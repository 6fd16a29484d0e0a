"""Prometheus metrics, read from `statistics()` during a scrape.

They add no counting to the processing of a record, and the series of a revoked partition disappear by themselves.
Limit: prometheus_client's multi-process mode does not support custom collectors; use one port per process.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioshard.core.adaptive import MoveReason
from aioshard.core.histogram import HistogramCounts
from aioshard.observe import AppState, Statistics
from aioshard.telemetry.versions import version

Kind = Literal["counter", "gauge", "histogram", "info"]

Labels = tuple[str, ...]
"""Label values of one series, in the order of the metric table; `group` comes first."""


class MetricInfo(NamedTuple):
    """One metric."""

    kind: Kind
    help: str
    read: Callable[[Any], float | HistogramCounts | None]
    """Returns the value for a row of `_rows`, or None for no series."""
    labels: tuple[str, ...] = ()
    """Labels in addition to `group`, which comes first."""


_PARTITION = ("topic", "partition")
_HANDLED = ("topic", "handler")
_LEFT_OUT = ("skipped", "dead_lettered", "parked", "superseded", "expired")
"""Outcomes other than success, and their counts."""


def _rows(app: Statistics) -> dict[tuple[str, ...], Sequence[tuple[Labels, Any]]]:
    """Return the series for each set of labels: their label values and the statistics to read."""
    group = app.group_id
    topics = [((group, row.topic, handler.name), row) for handler in app.handlers for row in handler.by_topic]
    outcomes = {"success": "processed"} | {name: name for name in _LEFT_OUT}
    return {
        (): [((group,), app)],
        ("version",): [((group, version()), app)],
        ("state",): [((group, state), app.state == state) for state in get_args(AppState)],
        ("outcome",): [
            ((group, "success"), (app.commits, app.commit_durations)),
            ((group, "failure"), (app.commit_failures, app.commit_failure_durations)),
        ],
        ("kind",): [((group, rebalances.kind), rebalances) for rebalances in app.rebalance_kinds],
        _PARTITION: [((group, row.topic, str(row.partition)), row) for row in app.partitions],
        _HANDLED: topics,
        (*_HANDLED, "outcome"): [
            ((*labels, outcome), getattr(row, name)) for labels, row in topics for outcome, name in outcomes.items()
        ],
        ("topic",): [(labels[:2], row) for labels, row in topics],
        ("handler",): [((group, handler.name), handler) for handler in app.handlers],
        ("limit",): [((group, limit.name), limit) for limit in app.limits],
        ("handler", "reason"): [
            ((group, handler.name, reason), handler.adaptive.moves.get(reason, 0))
            for handler in app.handlers
            if handler.adaptive is not None
            for reason in get_args(MoveReason)
        ],
    }


def _fullest(app: Statistics) -> tuple[int | None, int | None]:
    """Return capacity and depth of the shard that is nearest to its capacity; None without a capacity."""
    shards = ((handler.shard_capacity, handler.shard_depth) for handler in app.handlers if handler.shard_capacity)
    return max(shards, key=lambda shard: shard[1] / shard[0], default=(None, None))


def _of_transactions(name: str) -> Callable[[Statistics], float | None]:
    """Return a function that reads a figure of the transactions; None without any."""
    return lambda app: getattr(app.transactions, name, None)


METRICS: dict[str, MetricInfo] = {
    "aioshard_build": MetricInfo("info", "Version of aioshard; always 1.", lambda _: 1.0, ("version",)),
    "aioshard_engine_state": MetricInfo(
        "gauge", "1 for the current state of the app, 0 for the others.", float, ("state",)
    ),
    "aioshard_trouble": MetricInfo(
        "gauge",
        "1 while there is trouble: brokers unreachable, access denied, commits or messages not acknowledged, a topic "
        "missing, worker processes that do not start, a schema registry that does not answer, a hanging task, a "
        "blocked event loop.",
        lambda app: float(app.trouble is not None),
    ),
    "aioshard_assigned_partitions": MetricInfo(
        "gauge", "Partitions assigned to this process.", lambda app: len(app.partitions)
    ),
    "aioshard_buffered_records": MetricInfo(
        "gauge", "Records in memory, over all partitions.", attrgetter("buffered_records")
    ),
    "aioshard_buffered_bytes": MetricInfo(
        "gauge", "Bytes of the records in memory, as max_buffered_bytes counts them.", attrgetter("buffered_bytes")
    ),
    "aioshard_shard_queue_capacity": MetricInfo(
        "gauge",
        "Maximum records in one shard, of the handler whose fullest shard is nearest to it.",
        lambda app: _fullest(app)[0],
    ),
    "aioshard_shard_queue_depth_max": MetricInfo(
        "gauge", "Records waiting in that shard.", lambda app: _fullest(app)[1]
    ),
    "aioshard_commits": MetricInfo(
        "counter", "Commit requests, by whether the broker acknowledged them.", itemgetter(0), ("outcome",)
    ),
    "aioshard_commit_duration_seconds": MetricInfo(
        "histogram", "Duration of a commit request.", itemgetter(1), ("outcome",)
    ),
    "aioshard_transaction_messages": MetricInfo(
        "counter",
        "Messages in committed transactions; absent with at-least-once processing.",
        _of_transactions("messages"),
    ),
    "aioshard_transactions_fenced": MetricInfo(
        "counter",
        "Transactions that the brokers refused because the group had rebalanced; absent with at-least-once processing.",
        _of_transactions("fenced"),
    ),
    "aioshard_transaction_open_seconds": MetricInfo(
        "gauge", "Age of the open transaction; absent while there is none.", _of_transactions("open_seconds")
    ),
    "aioshard_transactions_committed": MetricInfo(
        "counter",
        "Transactions whose commit the brokers have acknowledged; absent with at-least-once processing.",
        _of_transactions("committed"),
    ),
    "aioshard_transactions_aborted": MetricInfo(
        "counter",
        "Transactions whose commit was not requested, or was refused; absent with at-least-once processing.",
        _of_transactions("aborted"),
    ),
    "aioshard_transactions_decided_committed": MetricInfo(
        "counter",
        "Transactions without an answer to their commit, which the committed offsets showed to be committed; absent "
        "with at-least-once processing.",
        _of_transactions("decided_committed"),
    ),
    "aioshard_transactions_decided_aborted": MetricInfo(
        "counter",
        "Transactions without an answer to their commit, which the committed offsets showed to be aborted; absent "
        "with at-least-once processing.",
        _of_transactions("decided_aborted"),
    ),
    "aioshard_transactions_undecided": MetricInfo(
        "counter",
        "Transactions whose outcome nobody could tell in time; absent with at-least-once processing.",
        _of_transactions("undecided"),
    ),
    "aioshard_transaction_producer_epochs": MetricInfo(
        "counter",
        "New epochs of the transactional producer that were requested; absent with at-least-once processing.",
        _of_transactions("producer_epochs"),
    ),
    "aioshard_rebalances": MetricInfo(
        "counter",
        "Rebalances by how they began: assigned, revoked, lost (with the group membership), manual.",
        attrgetter("count"),
        ("kind",),
    ),
    "aioshard_rebalance_seconds": MetricInfo(
        "counter",
        "Time spent in rebalances, including the current one: from losing partitions until all have resumed.",
        attrgetter("rebalance_seconds"),
    ),
    "aioshard_catch_up_seconds": MetricInfo(
        "gauge",
        "Time until the last partition has caught up, if lags shrink as in the last minute; absent if one does not.",
        attrgetter("catch_up_seconds"),
    ),
    "aioshard_heartbeat_age_seconds": MetricInfo(
        "gauge",
        "Time since the last answered heartbeat; absent without a session.",
        attrgetter("heartbeat_age"),
    ),
    "aioshard_rebalance_drain_duration_seconds": MetricInfo(
        "histogram",
        "Time until all runs of revoked partitions had ended or were cancelled.",
        attrgetter("drains"),
        ("kind",),
    ),
    "aioshard_event_loop_delay_seconds": MetricInfo(
        "histogram",
        "Delay of the event loop, sampled a few times a second; absent if the loop is not watched.",
        attrgetter("loop_delays"),
    ),
    "aioshard_replayed_records": MetricInfo("counter", "Records that this process ran twice.", attrgetter("replayed")),
    "aioshard_lost_offsets": MetricInfo(
        "counter", "Offsets that the group had read and that the cluster has lost.", attrgetter("lost_offsets")
    ),
    "aioshard_client_losses": MetricInfo(
        "counter", "Kafka clients that failed and were replaced.", attrgetter("client_losses")
    ),
    "aioshard_journal_rows": MetricInfo(
        "counter",
        "Rows in finished journal files; absent without a journal.",
        lambda app: app.journal and app.journal.written,
    ),
    "aioshard_journal_dropped_rows": MetricInfo(
        "counter",
        "Rows that the journal has dropped: the app never waits for the disk.",
        lambda app: app.journal and app.journal.dropped,
    ),
    "aioshard_records_fetched": MetricInfo(
        "counter",
        "Records fetched; restarts at 0 with each assignment of the partition.",
        attrgetter("fetched"),
        _PARTITION,
    ),
    "aioshard_records_in_flight": MetricInfo("gauge", "Records in progress.", attrgetter("in_flight"), _PARTITION),
    "aioshard_records_queued": MetricInfo(
        "gauge",
        "Records waiting in memory: for a worker, behind another record, or for their next attempt.",
        attrgetter("queued"),
        _PARTITION,
    ),
    "aioshard_oldest_incomplete_record_age_seconds": MetricInfo(
        "gauge",
        "Age of the partition's oldest incomplete record since it was fetched, 0 without one; shows a stuck commit.",
        lambda row: row.oldest_incomplete_age or 0.0,
        _PARTITION,
    ),
    "aioshard_partition_lag_records": MetricInfo(
        "gauge", "End of the log minus the committed offset, in offsets.", attrgetter("lag"), _PARTITION
    ),
    "aioshard_partition_lag_seconds": MetricInfo(
        "gauge",
        "Now minus the timestamp of the oldest incomplete record; absent without one in memory.",
        attrgetter("lag_seconds"),
        _PARTITION,
    ),
    "aioshard_partition_committed_offset": MetricInfo(
        "gauge", "Last committed offset; absent without one.", attrgetter("committed"), _PARTITION
    ),
    "aioshard_partition_committable_offset": MetricInfo(
        "gauge",
        "Offset of the oldest incomplete record, or the position without one.",
        attrgetter("committable"),
        _PARTITION,
    ),
    "aioshard_partition_position": MetricInfo("gauge", "Next offset to fetch.", attrgetter("position"), _PARTITION),
    "aioshard_partition_end_offset": MetricInfo(
        "gauge", "End of the log, at most 15 s old.", attrgetter("end_offset"), _PARTITION
    ),
    "aioshard_partition_held_back_offsets": MetricInfo(
        "gauge",
        "Offsets that cannot be read yet, because a producer has a transaction open; at most 15 s old.",
        attrgetter("held_back"),
        _PARTITION,
    ),
    "aioshard_partition_paused": MetricInfo(
        "gauge", "1 while the partition is paused.", lambda row: float(row.paused is not None), _PARTITION
    ),
    "aioshard_partition_incomplete_records": MetricInfo(
        "gauge", "Records fetched but not complete.", attrgetter("incomplete"), _PARTITION
    ),
    "aioshard_partition_buffered_records": MetricInfo(
        "gauge", "Records in memory.", attrgetter("buffered_records"), _PARTITION
    ),
    "aioshard_partition_buffered_bytes": MetricInfo(
        "gauge", "Bytes of the records in memory.", attrgetter("buffered_bytes"), _PARTITION
    ),
    "aioshard_records_processed": MetricInfo(
        "counter",
        f"Completed records, by outcome: success, {', '.join(_LEFT_OUT)}.",
        float,
        (*_HANDLED, "outcome"),
    ),
    "aioshard_record_processing_duration_seconds": MetricInfo(
        "histogram",
        "Duration of attempts, including failed ones; batch handlers count batches.",
        attrgetter("durations"),
        _HANDLED,
    ),
    "aioshard_record_queue_wait_seconds": MetricInfo(
        "histogram",
        "Time from fetching a record to its first attempt; sampled.",
        attrgetter("waits"),
        ("topic",),
    ),
    "aioshard_retries": MetricInfo("counter", "Retries of records.", attrgetter("retried"), _HANDLED),
    "aioshard_dead_letters": MetricInfo(
        "counter", "Records written to the dead-letter topic.", attrgetter("dead_lettered"), _HANDLED
    ),
    "aioshard_halted_records": MetricInfo(
        "gauge", "Records that block their shard after their last attempt failed.", attrgetter("halted"), ("handler",)
    ),
    "aioshard_outliving_runs": MetricInfo(
        "gauge",
        "Runs that outlive their cancellation or their partition and block their shard.",
        lambda handler: len(handler.outliving),
        ("handler",),
    ),
    "aioshard_busy_workers": MetricInfo(
        "gauge", "Workers with a record or batch in flight.", attrgetter("busy"), ("handler",)
    ),
    "aioshard_concurrency": MetricInfo(
        "gauge",
        "Maximum of concurrent runs of the handler; with an adaptive concurrency, its current limit.",
        attrgetter("concurrency"),
        ("handler",),
    ),
    "aioshard_concurrency_changes": MetricInfo(
        "counter",
        "Changes of an adaptive concurrency by reason: spare, queue, overload, failures, probe.",
        float,
        ("handler", "reason"),
    ),
    "aioshard_shards": MetricInfo("gauge", "Shards in use.", attrgetter("shards"), ("handler",)),
    "aioshard_limit_starts": MetricInfo(
        "counter", "Runs that started under a rate limit.", attrgetter("starts"), ("limit",)
    ),
    "aioshard_limit_waiting_seconds": MetricInfo(
        "counter",
        "Time during which at least one run waited for a rate limit; its rate is 1 while the limit is always reached.",
        attrgetter("waiting_seconds"),
        ("limit",),
    ),
    "aioshard_limit_waiting": MetricInfo(
        "gauge",
        "Keys that wait for a rate limit; without a limit per key, the handlers or fixed shards that do.",
        attrgetter("waiting"),
        ("limit",),
    ),
    "aioshard_limit_tokens": MetricInfo(
        "gauge", "Runs that a rate limit allows now; absent with a limit per key.", attrgetter("tokens"), ("limit",)
    ),
    "aioshard_limit_share": MetricInfo(
        "gauge",
        "Part of a rate limit of the group that this process may use; absent with other limits.",
        attrgetter("share"),
        ("limit",),
    ),
    "aioshard_limit_keys": MetricInfo(
        "gauge", "Keys in memory of a rate limit per key; absent with other limits.", attrgetter("keys"), ("limit",)
    ),
}
"""Every metric. Prometheus shows counters with the suffix `_total`, an info with `_info`, and histograms with
`_bucket`, `_sum` and `_count`."""


def _family(name: str, snapshots: Iterable[Mapping[tuple[str, ...], Sequence[tuple[Labels, Any]]]]) -> Metric:
    """Return one metric with its series.

    Series that occur twice, from handlers with the same name, are summed: Prometheus rejects a page with duplicates.
    """
    metric = METRICS[name]
    series: dict[Labels, Any] = {}
    for rows in snapshots:
        for labels, row in rows[metric.labels]:
            if (value := metric.read(row)) is not None:
                series[labels] = series[labels] + value if labels in series else value
    family = Metric(name, metric.help, metric.kind)
    for labels, value in series.items():
        texts = dict(zip(("group", *metric.labels), labels, strict=True))
        if isinstance(value, HistogramCounts):
            for bound, count in zip((*value.bounds, "+Inf"), itertools.accumulate(value.counts), strict=True):
                family.add_sample(f"{name}_bucket", texts | {"le": str(bound)}, count)
            family.add_sample(f"{name}_sum", texts, value.total)
            family.add_sample(f"{name}_count", texts, value.count)
        else:
            family.add_sample(name + _SUFFIXES.get(metric.kind, ""), texts, value)
    return family


_SUFFIXES: Final = {"counter": "_total", "info": "_info"}


class Observed(Protocol):
    """The part of an app that its observers use."""

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
        return [_family(name, ()) for name in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics."""
        snapshots = [_rows(app.statistics()) for app in self._apps]
        for name in METRICS:
            yield _family(name, snapshots)
