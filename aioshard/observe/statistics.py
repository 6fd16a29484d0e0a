"""How much an app does: what `App.statistics()` returns. Metrics, health, the CLI and tests all read this one thing."""

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
    """Next offset to take in; None until the start position is resolved."""
    committed: int | None
    """Last offset that the broker acknowledged, to us or before us; None when there is none."""
    committable: int | None
    """The offset that may be committed: that of the oldest incomplete record, else the position."""
    end_offset: int | None
    """End of the log, at most 15 s old (the last stable offset under read_committed)."""
    lag: int | None
    """`end_offset - committed` (or the committable offset before the first commit), in offsets."""
    lag_seconds: float | None
    """Seconds since the timestamp of the oldest incomplete record; 0 when all is committed, None when unknown, since
    nothing of what is left to read is in hand, or it has no timestamp."""
    incomplete: int
    """Records delivered to the engine and not complete."""
    buffered_records: int
    buffered_bytes: int
    paused: str | None
    """None, or the sentence that says why nothing more of the partition is taken in."""
    oldest_incomplete_age: float | None
    """Seconds since the oldest incomplete record came in; None when nothing is incomplete."""
    noted: float
    """How full the text is in which the last commit noted what is finished beyond it, from 0 to 1."""
    fetched: int = 0
    """Records taken in since this ownership began."""
    in_flight: int = 0
    """Records that workers run now."""
    queued: int = 0
    """Records in memory that no worker runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class TopicStatistics:
    """What a handler did with one of its topics; it goes on across rebalances."""

    topic: str
    processed: int
    retried: int
    skipped: int
    dead_lettered: int
    parked: int
    durations: HistogramCounts
    """Seconds that attempts took, failed ones among them; of a handler that takes batches, the attempts of a batch."""
    waits: HistogramCounts
    """Seconds from the arrival of records to their first attempt; sampled where they are quick."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerStatistics:
    """One handler; the counters go on across rebalances."""

    name: str
    topics: tuple[str, ...]
    concurrency: int
    busy: int
    """Workers that run the handler now."""
    shards: int
    """Shards in use now; the fixed number where `shards=N` was given."""
    processed: int
    retried: int
    """Attempts after the first."""
    skipped: int
    dead_lettered: int
    parked: int
    halted: int
    """Records that hold their shard now because their attempts are used up."""
    outliving: tuple[str, ...]
    """`topic/partition/offset` of runs that outlive their cancellation or epoch and hold their shard; of a batch, the
    first."""
    by_topic: tuple[TopicStatistics, ...] = ()
    shard_capacity: int = 0
    """How many records may wait in one shard; `shard_depth` is how many do in the fullest."""
    shard_depth: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class JournalStatistics:
    """The journal of one run of an app, in rows: one for each record that is complete."""

    written: int
    """In finished files."""
    waiting: int
    """In memory, or in the file that is not finished."""
    dropped: int
    """Neither: the disk did not keep up, or failed."""
    files: int
    """Finished ones."""
    trouble: str | None
    """Why nothing can be written now."""


RebalanceKind = Literal["assigned", "revoked", "lost", "by_hand"]
"""How it began: we were given partitions and lost none, some were taken away, the membership was lost, or by hand."""


@dataclasses.dataclass(frozen=True, slots=True)
class RebalanceKindStatistics:
    """The rebalances of one kind."""

    kind: RebalanceKind
    count: int
    drains: HistogramCounts
    """Seconds that the drains took."""


RebalancePhase = Literal["drain", "commit", "join", "resume", "over"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceReport:
    """What one rebalance did to this process. All times in seconds.

    Invariants:
        * `drain_seconds + commit_seconds + join_seconds + resume_seconds` is `seconds`.
    """

    number: int
    """Counted in this process."""
    at: float
    """When it began, since the epoch."""
    cause: str
    """As far as a member can know: only the one that assigns knows who came or went."""
    phase: RebalancePhase
    """What it is at; `over` when everything that is ours goes on."""
    generation: int | None = None
    """Of the group after it; None until the group has said what is ours."""
    revoked: int = 0
    """Partitions that were taken away, those among them that came back too."""
    in_flight: int = 0
    """Records of them that ran then."""
    drained: int = 0
    """Those of them that ended within the drain."""
    cancelled: int = 0
    """Those that were cancelled at its deadline; they run again."""
    assigned: int = 0
    """Partitions that were given."""
    kept: int = 0
    """Partitions that go on where they were: never taken away, or given back and continued in place."""
    dropped: int = 0
    """Incomplete records in hand of partitions that went elsewhere or begin anew; they are fetched again."""
    replayed: int = 0
    """Records that this process has run again between this rebalance and the next one."""
    seconds: float = 0.0
    """From its begin until everything that is ours goes on."""
    drain_seconds: float = 0.0
    """Until what ran had ended, or was cancelled."""
    commit_seconds: float = 0.0
    """Until that was committed."""
    join_seconds: float = 0.0
    """Until the group had said what is ours: the other members drain, join and are told."""
    resume_seconds: float = 0.0
    """Until the brokers had said where to go on."""
    kind: RebalanceKind = "assigned"


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """The state of an app at one moment."""

    state: AppState
    group_id: str
    member_id: str | None
    """None while the process is no member of the group."""
    rebalances: int
    commits: int
    """Commit requests that the broker acknowledged."""
    commit_failures: int
    replayed: int
    """Records taken in that this process had started in an epoch that ended before they were committed."""
    already_done: int
    """Records that came again and were not run again: a commit had noted them as finished."""
    buffered_records: int
    buffered_bytes: int
    client_losses: int
    """How often a client was lost or could not connect, and the supervisor built a new one."""
    trouble: str | None
    """What is wrong beyond single partitions, and since when: brokers away, access refused, commits or messages not
    acknowledged, a topic missing, a task that hangs, an event loop that is blocked. None while there is nothing of
    the kind."""
    partitions: tuple[PartitionStatistics, ...]
    handlers: tuple[HandlerStatistics, ...]
    journal: JournalStatistics | None = None
    """None where none is written."""
    rebalance_reports: tuple[RebalanceReport, ...] = ()
    """The latest rebalances, oldest first; the last one may be under way."""
    loop_delays: HistogramCounts | None = None
    """By how many seconds the event loop was late, a few times a second; None where nobody looks."""
    blocked: str | None = None
    """What keeps the event loop from turning now, and for how long, in a sentence; None while it turns."""
    ready_anyway: bool = False
    """Whether `ready_timeout` has passed and the group has not been joined yet: ready all the same."""
    restart_cures: tuple[str, ...] = ()
    """What is wrong that a restart of the process cures, in sentences; `/livez` is 503 while there is any."""
    client: str = ""
    """Which Kafka client; empty before the first start."""
    rebalance_kinds: tuple[RebalanceKindStatistics, ...] = ()
    commit_durations: HistogramCounts | None = None
    """Seconds until a commit request was acknowledged."""
    commit_failure_durations: HistogramCounts | None = None
    """Seconds until it was known that one would not be."""

    def asdict(self) -> dict[str, Any]:
        """The same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
