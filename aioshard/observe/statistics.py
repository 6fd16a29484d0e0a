"""Statistics of an app: the result of `App.statistics()`, which metrics, health, the CLI and tests all use."""

import dataclasses
from typing import Any, Literal

from aioshard.core.histogram import HistogramCounts

__all__ = [
    "AppState",
    "HandlerStatistics",
    "JournalStatistics",
    "PartitionStatistics",
    "RebalanceKind",
    "RebalanceKindStatistics",
    "RebalancePhase",
    "RebalanceReport",
    "Statistics",
    "TopicStatistics",
]

AppState = Literal["starting", "running", "draining", "stopped", "failed"]


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionStatistics:
    """One assigned partition."""

    topic: str
    partition: int
    epoch: int
    """Number of the uninterrupted ownership, counted in this process; continuing in place keeps it."""
    position: int | None
    """Next offset to read; None until the start position is resolved."""
    committed: int | None
    """Last offset that the broker acknowledged, from us or a previous owner; None if there is none."""
    committable: int | None
    """The committable offset: that of the oldest incomplete record, otherwise the position."""
    end_offset: int | None
    """End of the log, at most 15 s old (the last stable offset under read_committed)."""
    lag: int | None
    """`end_offset - committed` (or the committable offset before the first commit), in offsets."""
    lag_seconds: float | None
    """Seconds since the timestamp of the oldest incomplete record; 0 if everything is committed. None if unknown: the
    records left to read have not been fetched yet, or the record has no timestamp."""
    incomplete: int
    """Records delivered to the engine and not complete."""
    buffered_records: int
    buffered_bytes: int
    paused: str | None
    """None, or a sentence that says why fetching from the partition is paused."""
    oldest_incomplete_age: float | None
    """Seconds since the oldest incomplete record arrived; None if nothing is incomplete."""
    noted: float
    """Fill level, from 0 to 1, of the metadata in which the last commit stored completions beyond its offset."""
    fetched: int = 0
    """Records fetched since this ownership began."""
    in_flight: int = 0
    """Records that workers are running now."""
    queued: int = 0
    """Records in memory that no worker is running."""


@dataclasses.dataclass(frozen=True, slots=True)
class TopicStatistics:
    """Counters of a handler for one of its topics; they continue across rebalances."""

    topic: str
    processed: int
    retried: int
    skipped: int
    dead_lettered: int
    parked: int
    durations: HistogramCounts
    """Seconds per attempt, including failed ones; for a handler that takes batches, per attempt of a batch."""
    waits: HistogramCounts
    """Seconds from the arrival of records to their first attempt; sampled while attempts are quick."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerStatistics:
    """One handler; the counters continue across rebalances."""

    name: str
    topics: tuple[str, ...]
    concurrency: int
    busy: int
    """Workers that are running the handler now."""
    shards: int
    """Shards in use now; with `shards=N`, the fixed number."""
    processed: int
    retried: int
    """Attempts after the first."""
    skipped: int
    dead_lettered: int
    parked: int
    halted: int
    """Records that block their shard now because their attempts are exhausted."""
    outliving: tuple[str, ...]
    """`topic/partition/offset` of runs that outlive their cancellation or epoch and block their shard; for a batch, of
    its first record."""
    by_topic: tuple[TopicStatistics, ...] = ()
    shard_capacity: int = 0
    """Maximum number of records waiting in one shard; `shard_depth` is the current number in the fullest one."""
    shard_depth: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class JournalStatistics:
    """The journal of one run of an app, counted in rows: one per completed record."""

    written: int
    """Rows in finished files."""
    waiting: int
    """Rows in memory, or in the unfinished file."""
    dropped: int
    """Rows lost because the disk did not keep up, or failed."""
    files: int
    """Number of finished files."""
    trouble: str | None
    """Why nothing can be written now."""


RebalanceKind = Literal["assigned", "revoked", "lost", "by_hand"]
"""The trigger: we only received partitions, some were revoked, the membership was lost, or manual assignment."""


@dataclasses.dataclass(frozen=True, slots=True)
class RebalanceKindStatistics:
    """The rebalances of one kind."""

    kind: RebalanceKind
    count: int
    drains: HistogramCounts
    """Durations of the drains in seconds."""


RebalancePhase = Literal["drain", "commit", "join", "resume", "over"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceReport:
    """The effects of one rebalance on this process. All durations are in seconds.

    Invariants:
        * `drain_seconds + commit_seconds + join_seconds + resume_seconds` is `seconds`.
    """

    number: int
    """Counted in this process."""
    at: float
    """When it began, in seconds since the epoch."""
    cause: str
    """The cause as far as a member can know it: only the member that assigns knows who joined or left."""
    phase: RebalancePhase
    """The current phase; `over` once all our partitions have resumed."""
    generation: int | None = None
    """Generation of the group after it; None until we have our assignment."""
    revoked: int = 0
    """Revoked partitions, including those that came back."""
    in_flight: int = 0
    """Their records that were running at that moment."""
    drained: int = 0
    """Those that ended within the drain."""
    cancelled: int = 0
    """Those that were cancelled at its deadline; they will run again."""
    assigned: int = 0
    """Assigned partitions."""
    kept: int = 0
    """Partitions that continue where they were: never revoked, or returned and continued in place."""
    dropped: int = 0
    """Buffered incomplete records of partitions that moved elsewhere or start over; they are fetched again."""
    replayed: int = 0
    """Records that this process ran again between this rebalance and the next one."""
    seconds: float = 0.0
    """From its start until all our partitions have resumed."""
    drain_seconds: float = 0.0
    """Until running records had ended or been cancelled."""
    commit_seconds: float = 0.0
    """Until their completions were committed."""
    join_seconds: float = 0.0
    """Until we had our assignment: the other members drain, join and receive theirs."""
    resume_seconds: float = 0.0
    """Until the brokers had answered from which offsets to resume."""
    kind: RebalanceKind = "assigned"


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """The state of an app at one moment."""

    state: AppState
    group_id: str
    member_id: str | None
    """None while the process is not a member of the group."""
    rebalances: int
    commits: int
    """Commit requests that the broker acknowledged."""
    commit_failures: int
    replayed: int
    """Records that this process ran more than once: fetched again because their epoch ended before they were committed,
    or run again after their run was cancelled."""
    already_done: int
    """Redelivered records that were not run again, because a commit had stored them as finished."""
    buffered_records: int
    buffered_bytes: int
    client_losses: int
    """How often a client was lost or could not connect, so that the supervisor created a new one."""
    trouble: str | None
    """Problems beyond single partitions, and since when: unreachable brokers, denied access, unacknowledged commits or
    messages, a missing topic, a hanging task, a blocked event loop. None if there are none."""
    partitions: tuple[PartitionStatistics, ...]
    handlers: tuple[HandlerStatistics, ...]
    journal: JournalStatistics | None = None
    """None if no journal is written."""
    rebalance_reports: tuple[RebalanceReport, ...] = ()
    """The latest rebalances, oldest first; the last one may be in progress."""
    loop_delays: HistogramCounts | None = None
    """Delays of the event loop in seconds, measured a few times a second; None if they are not measured."""
    blocked: str | None = None
    """A sentence about the code that blocks the event loop now, and for how long; None while it is not blocked."""
    ready_anyway: bool = False
    """Whether the app counts as ready although it has not joined the group, because `ready_timeout` has passed."""
    restart_cures: tuple[str, ...] = ()
    """Problems that a restart of the process would fix, as sentences; `/livez` returns 503 while there are any."""
    client: str = ""
    """Name of the Kafka client; empty before the first start."""
    rebalance_kinds: tuple[RebalanceKindStatistics, ...] = ()
    commit_durations: HistogramCounts | None = None
    """Seconds until a commit request was acknowledged."""
    commit_failure_durations: HistogramCounts | None = None
    """Seconds until a commit request was known to have failed."""

    def asdict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
