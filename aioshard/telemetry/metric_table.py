"""All metrics with type, help and labels. The collector fills them; the documentation lists them."""

from typing import Literal, NamedTuple

__all__ = ["METRICS", "Kind", "MetricInfo"]

Kind = Literal["counter", "gauge", "histogram", "info"]


class MetricInfo(NamedTuple):
    """One metric."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Labels in addition to `group`, which comes first."""


_PARTITION = ("topic", "partition")
_HANDLED = ("topic", "handler")

_APP = {
    "aioshard_build": MetricInfo("info", "What runs here; always 1.", ("version", "client")),
    "aioshard_engine_state": MetricInfo("gauge", "1 for the state that the app is in, 0 for the others.", ("state",)),
    "aioshard_trouble": MetricInfo(
        "gauge",
        "1 while there is trouble: brokers away, access refused, commits or messages not acknowledged, a topic "
        "missing, a task that hangs, an event loop that is blocked.",
    ),
    "aioshard_assigned_partitions": MetricInfo("gauge", "Partitions that the group has given to this process."),
    "aioshard_buffered_records": MetricInfo("gauge", "Records in memory, over all partitions."),
    "aioshard_buffered_bytes": MetricInfo("gauge", "Their bytes, as they count against max_buffered_bytes."),
    "aioshard_shard_queue_capacity": MetricInfo(
        "gauge", "How many records may wait in one shard; of the handler whose fullest shard is nearest to that."
    ),
    "aioshard_shard_queue_depth_max": MetricInfo("gauge", "How many wait in that shard."),
    "aioshard_commits": MetricInfo(
        "counter", "Commit requests: success is what the broker acknowledged, failure what it did not.", ("outcome",)
    ),
    "aioshard_commit_duration_seconds": MetricInfo(
        "histogram", "Time until the broker acknowledged a commit, or it was known that it would not.", ("outcome",)
    ),
    "aioshard_rebalances": MetricInfo(
        "counter",
        "Rebalances by how they began: assigned, revoked, lost (with the group membership), by_hand.",
        ("kind",),
    ),
    "aioshard_rebalance_drain_duration_seconds": MetricInfo(
        "histogram", "Time until what ran of revoked partitions had ended or was cancelled.", ("kind",)
    ),
    "aioshard_event_loop_delay_seconds": MetricInfo(
        "histogram", "By how much the event loop was late, looked at a few times a second; absent where nobody looks."
    ),
    "aioshard_replayed_records": MetricInfo("counter", "Records that this process ran a second time."),
    "aioshard_client_losses": MetricInfo("counter", "Clients that ended by themselves and were built anew."),
    "aioshard_journal_rows": MetricInfo(
        "counter", "Rows in finished files of the journal; absent where none is written."
    ),
    "aioshard_journal_dropped_rows": MetricInfo(
        "counter", "Rows that the journal has lost: it never waits for a disk."
    ),
}

_PARTITIONS = {
    "aioshard_records_fetched": MetricInfo(
        "counter", "Records taken in; counted anew in each ownership of the partition.", _PARTITION
    ),
    "aioshard_records_in_flight": MetricInfo("gauge", "Records that workers run now.", _PARTITION),
    "aioshard_records_queued": MetricInfo(
        "gauge", "Records in memory that wait: for a worker, behind another record, for their next attempt.", _PARTITION
    ),
    "aioshard_oldest_incomplete_record_age_seconds": MetricInfo(
        "gauge",
        "How long the partition's oldest incomplete record has been in hand, 0 without one; a stuck commit shows here.",
        _PARTITION,
    ),
    "aioshard_partition_lag_records": MetricInfo(
        "gauge", "End of the log minus the committed offset, in offsets.", _PARTITION
    ),
    "aioshard_partition_lag_seconds": MetricInfo(
        "gauge",
        "Now minus the timestamp of the oldest incomplete record; absent while nothing of what is left is in hand.",
        _PARTITION,
    ),
    "aioshard_partition_committed_offset": MetricInfo(
        "gauge", "Last committed offset; absent while there is none.", _PARTITION
    ),
    "aioshard_partition_committable_offset": MetricInfo(
        "gauge", "Offset of the oldest incomplete record, else the position.", _PARTITION
    ),
    "aioshard_partition_position": MetricInfo("gauge", "Next offset to take in.", _PARTITION),
    "aioshard_partition_end_offset": MetricInfo("gauge", "End of the log, at most 15 s old.", _PARTITION),
    "aioshard_partition_paused": MetricInfo("gauge", "1 while nothing more of the partition is taken in.", _PARTITION),
    "aioshard_partition_incomplete_records": MetricInfo("gauge", "Records taken in and not complete.", _PARTITION),
    "aioshard_partition_buffered_records": MetricInfo("gauge", "Records in memory.", _PARTITION),
    "aioshard_partition_buffered_bytes": MetricInfo("gauge", "Their bytes.", _PARTITION),
}

_HANDLERS = {
    "aioshard_records_processed": MetricInfo(
        "counter",
        "Records that are complete, by how they ended: success, skipped, dead_lettered, parked.",
        (*_HANDLED, "outcome"),
    ),
    "aioshard_record_processing_duration_seconds": MetricInfo(
        "histogram", "Time that attempts took, failed ones among them; of a batch handler, those of batches.", _HANDLED
    ),
    "aioshard_record_queue_wait_seconds": MetricInfo(
        "histogram", "Time from taking a record in to its first attempt; sampled where attempts are quick.", ("topic",)
    ),
    "aioshard_retries": MetricInfo("counter", "Attempts after a record's first.", _HANDLED),
    "aioshard_dead_letters": MetricInfo("counter", "Records written to the dead-letter topic.", _HANDLED),
    "aioshard_halted_records": MetricInfo(
        "gauge", "Records that hold their shard, their attempts used up.", ("handler",)
    ),
    "aioshard_outliving_runs": MetricInfo(
        "gauge", "Runs that outlive their cancellation or their partition and hold their shard.", ("handler",)
    ),
    "aioshard_busy_workers": MetricInfo("gauge", "Workers that run the handler now.", ("handler",)),
    "aioshard_concurrency": MetricInfo("gauge", "Workers that the handler has.", ("handler",)),
    "aioshard_shards": MetricInfo("gauge", "Shards in use.", ("handler",)),
}

METRICS: dict[str, MetricInfo] = {**_APP, **_PARTITIONS, **_HANDLERS}
"""Every metric. Prometheus shows counters with the suffix `_total`, an info with `_info`, and histograms with
`_bucket`, `_sum` and `_count`."""
