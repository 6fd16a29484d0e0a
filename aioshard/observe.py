"""Frozen snapshots of an app: statistics, diagnosis of partitions that do not advance, and workload.

`App.statistics()` is the source for metrics, health, the CLI and tests; `App.explain()` is `App.diagnose()` as text.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from aioshard.core.adaptive import MoveReason
from aioshard.core.histogram import HistogramCounts
from aioshard.core.loop_block import LoopBlock

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
    fetched: int = 0
    """Records fetched since this ownership began."""
    in_flight: int = 0
    """Records whose handler runs now."""
    queued: int = 0
    """Records in memory that are not in flight."""
    held_back: int = 0
    """Offsets beyond the end that cannot be read yet, because a transaction is open; at most 15 s old."""


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
    """Seconds from the arrival of records to their first attempt; sampled every 5 ms."""
    superseded: int = 0
    """Records that a newer one of their key replaced; see `keep`."""
    expired: int = 0
    """Records that were too old to start; see `max_age`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptiveStatistics:
    """The adaptive concurrency of one handler; `HandlerStatistics.concurrency` is its current limit."""

    minimum: int
    maximum: int
    before: int
    """The limit before it moved last."""
    reason: MoveReason
    """Why it moved last."""
    why: str
    """The same in a sentence."""
    since: float | None
    """Seconds since it moved last; None if it has not moved."""
    latency: float | None
    """Seconds of work per processed record, lately; None until it is known."""
    baseline: float | None
    """The same with an idle back end."""
    moves: Mapping[str, int]
    """Number of moves by reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerStatistics:
    """One handler; the counters continue across rebalances."""

    name: str
    topics: tuple[str, ...]
    concurrency: int
    """Maximum number of concurrent runs; with `Adaptive`, the current limit."""
    busy: int
    """Workers with a record or batch in flight."""
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
    queued: int = 0
    """Records that no worker has picked up yet."""
    on_failure: str = "halt"
    """`halt`, `skip`, `dead letters to TOPIC` or `parks in TOPIC`."""
    superseded: int = 0
    expired: int = 0
    adaptive: AdaptiveStatistics | None = None
    """None with a fixed concurrency."""


@dataclasses.dataclass(frozen=True, slots=True)
class LimitStatistics:
    """One rate limit, for all handlers of the app that share it; the counters continue across rebalances."""

    name: str
    per: str
    """`process`, `group` or `key`."""
    per_second: float
    """Runs per second, as configured."""
    burst: int
    """Runs that may start together, as configured or by default."""
    handlers: tuple[str, ...]
    """Names of the handlers that share it."""
    starts: int
    """Runs that started under it."""
    waiting: int
    """Keys that wait for a token; without a limit per key, the handlers that do, and with fixed shards each shard."""
    waiting_seconds: float
    """Seconds during which at least one run waited for a token."""
    tokens: float | None = None
    """Runs that may start now, with the fraction of the next one; None with a limit per key."""
    due: float | None = None
    """Seconds until a run may start, 0 if one may now; None with a limit per key, and without a share."""
    share: float | None = None
    """The part of a limit of the group that this process may use, from 0 to 1; None for other limits."""
    keys: int | None = None
    """Keys that have not all their tokens, and some that have; None without a limit per key."""


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


RebalanceKind = Literal["assigned", "revoked", "lost", "manual"]
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
    """Their records in flight at that moment."""
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
    """Until the records in flight had ended or been cancelled."""
    commit_seconds: float = 0.0
    """Until their completions were committed."""
    join_seconds: float = 0.0
    """Until we had our assignment: the other members drain, join and receive theirs."""
    resume_seconds: float = 0.0
    """Until the brokers had answered from which offsets to resume."""
    kind: RebalanceKind = "assigned"


@dataclasses.dataclass(frozen=True, slots=True)
class TransactionStatistics:
    """Transactions of exactly-once processing, over all Kafka clients of the process.

    `commits` and `commit_failures` count the attempts as the app saw them: one that it gave up after `commit_timeout`
    may have been committed.
    """

    fenced: int
    """Aborted transactions that the brokers refused because the group had rebalanced."""
    messages: int
    """Messages in committed transactions."""
    open_seconds: float | None
    """Seconds since the open transaction began; None while none is open."""
    committed: int = 0
    """Transactions whose commit the brokers have acknowledged."""
    aborted: int = 0
    """Transactions whose commit was not requested, or was refused."""
    decided_committed: int = 0
    """Transactions without an answer to their commit, which the committed offsets showed to be committed."""
    decided_aborted: int = 0
    """Likewise, to be aborted."""
    undecided: int = 0
    """Transactions whose outcome nobody could tell in time: their records began again where the brokers said."""
    producer_epochs: int = 0
    """New epochs of the transactional producer that were requested: at the start, and after a failure or doubt."""


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
    messages, a missing topic, worker processes that do not start, a hanging task, a blocked event loop. None if there
    are none."""
    partitions: tuple[PartitionStatistics, ...]
    handlers: tuple[HandlerStatistics, ...]
    journal: JournalStatistics | None = None
    """None if no journal is written."""
    lost_offsets: int = 0
    """Offsets that the group had read and that the cluster has lost, for example in an unclean leader election."""
    rebalance_reports: tuple[RebalanceReport, ...] = ()
    """The latest rebalances, oldest first; the last one may be in progress."""
    loop_delays: HistogramCounts | None = None
    """Delays of the event loop in seconds, measured a few times a second; None if they are not measured."""
    blocked: LoopBlock | None = None
    """Why the event loop is blocked now, and for how long; None while it is not blocked."""
    restart_cures: tuple[str, ...] = ()
    """Problems that a restart of the process would fix, as sentences; `/livez` returns 503 while there are any."""
    group_protocol: str | None = None
    """`classic` or `consumer`; None with manual assignment, and before the app joins the group."""
    group_protocol_reason: str | None = None
    """Why it is this protocol, to follow "because"."""
    rebalance_kinds: tuple[RebalanceKindStatistics, ...] = ()
    rebalance_seconds: float = 0.0
    """Seconds spent in rebalances, including the one in progress."""
    catch_up_seconds: float | None = None
    """Seconds until the last partition has caught up, if lags shrink as in the last minute; None if one does not."""
    heartbeat_age: float | None = None
    """Seconds since the last heartbeat that was answered; None without a session."""
    commit_durations: HistogramCounts | None = None
    """Seconds until a commit request was acknowledged."""
    commit_failure_durations: HistogramCounts | None = None
    """Seconds until a commit request was known to have failed."""
    transactions: TransactionStatistics | None = None
    """None unless `processing_guarantee` is `exactly_once`."""
    limits: tuple[LimitStatistics, ...] = ()
    """The rate limits of the handlers, by name."""

    def asdict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)


class Sample(NamedTuple):
    """The figures that the dashboard plots, at one moment, summed over the app."""

    at: float
    """Seconds since the epoch."""
    processed: int
    lag: int | None
    """None while the lag of every partition is unknown."""
    oldest_age: float
    """Seconds since the oldest incomplete record arrived; 0 if nothing is incomplete."""
    durations: tuple[int, ...]
    """Number of attempts in each bucket of `TopicStatistics.durations`; empty before the first one."""


# Diagnosis ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str
    own: bool
    """Whether it is the application's own code: not the standard library, an installed package or aioshard."""

    def __str__(self) -> str:
        """Format as `file:line in function`."""
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """The current stack of a run."""

    frames: tuple[Frame, ...]
    """Outermost first; those of a task that it awaits follow, unless there are several."""
    place: Frame | None
    """The innermost call of the application's own code; None if nothing is known."""
    waits_in: str | None
    """The library function called there, or the kind of future awaited there."""
    executing: bool
    """Whether it was not suspended in an await at that moment. That alone is no fault: each call executes sometimes."""
    thread: str | None
    """Name of the thread, if it runs in one."""


RecordState = Literal[
    "in_flight",
    "outliving",
    "recovery",
    "retrying",
    "halted",
    "evicted",
    "held",
    "collecting",
    "limited",
    "behind",
    "queued",
]
"""The state of an incomplete record, followed here by the thing that it waits for.

`in_flight`: its handler. `outliving`: a run that was cancelled but has not ended. `recovery`: the work that replaces
its handler, such as writing its dead letter. `retrying`: its next attempt. `halted`: an operator who releases it.
`evicted`: another fetch, because it was evicted to make room for others. `held`: its partition, which is paused or not
certainly ours. `collecting`: other records of its batch. `limited`: a rate limit. `behind`: another record of its
shard. `queued`: a worker.
"""

Verdict = Literal["up to date", "advancing", "waiting", "stuck"]
"""`waiting`: something is in the way. `stuck`: a record is halted, or incomplete for longer than `stuck_after`."""


@dataclasses.dataclass(frozen=True, slots=True)
class IncompleteRecord:
    """A record that is being processed or waits: for a worker, for its next attempt or for an operator."""

    handler: str
    topic: str
    partition: int
    offset: int
    key: str | None
    """The key itself with `show_keys`; otherwise `#` and a hash that is stable in this process; None without a key."""
    shard: str | None
    """Its shard, formatted like the key, if it differs from the key. None if the record has no order."""
    age: float
    """Seconds since it arrived."""
    attempt: int
    """The current or next attempt; for a halted record the last one."""
    attempts: int
    """Maximum number of attempts."""
    state: RecordState
    since: float | None
    """Seconds in that state; None if the start is unknown."""
    reason: str
    """A sentence: what it waits for, and since when."""
    what_to_do: str | None
    """A sentence; None if nothing needs to be done."""
    stack: Stack | None
    """Stack of its run, or of the run that it waits for."""
    due: float | None
    """Seconds until its next attempt; None if it is not scheduled."""
    error: str | None
    """The latest failure that makes it wait: its own, or that of the record that it waits for."""
    waiting: int
    """Number of records behind it in its shard."""
    worker: str | None
    """Name of the worker that runs it."""
    records: int
    """Number of records in its run: more than one in a batch."""
    waits_for: str | None = None
    """`topic/partition/offset` of the record of its shard that it waits for; None unless `state` is `behind`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A reason why a partition, or all of them, do not advance."""

    kind: str
    """A short identifier for programs: `paused`, `rebalancing`, `unreadable`, `no room`, `commit`, ..."""
    sentence: str
    """The problem, and since when."""
    since: float | None
    """Seconds; None if the start is unknown."""
    what_to_do: str | None
    """A sentence; None if nothing needs to be done."""
    error: str | None = None
    """The failure of halted records."""
    offsets: tuple[int, ...] = ()
    """The first offsets of halted records, at most ten."""
    records: int = 0
    """Number of halted records with that error; errors that differ only in numbers and identifiers count as equal."""


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionDiagnosis:
    """Why one partition does not advance."""

    topic: str
    partition: int
    verdict: Verdict
    since: float | None
    """Seconds without progress; None while it advances."""
    sentence: str
    """The whole diagnosis in one sentence."""
    head: IncompleteRecord | None
    """The oldest incomplete record: nothing is committed past it. None if nothing is incomplete."""
    findings: tuple[Finding, ...]
    """Reasons other than that record."""
    window: int
    """Offsets from the oldest incomplete record to the position."""
    behind: int
    """Number of those offsets that wait for that record: done but not committable (gaps count as done), in its shard,
    or evicted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why each partition does not advance."""

    state: AppState
    findings: tuple[Finding, ...]
    """Findings that concern all partitions."""
    partitions: tuple[PartitionDiagnosis, ...]
    outliving: tuple[IncompleteRecord, ...]
    """Runs that were cancelled, or whose partition is gone, but that have not ended: their shards wait."""

    def asdict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)


# Workload -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ParkedKey:
    """A parked key, described by its first record."""

    handler: str
    stored_in: str
    """The side topic."""
    topic: str
    partition: int
    offset: int
    """Offset of its first record."""
    key: str | None
    """The shard key, as in `IncompleteRecord`; None if the record has no key and is parked alone."""
    retries: int
    """Number of retries so far."""
    due: float | None
    """Seconds until it is retried; None if it waits for a manual release."""
    in_flight: bool
    """Whether it is being retried now."""
    failed_at: float | None
    """Seconds since the epoch."""
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """A pause requested by the application or an operator."""

    topic: str | None
    partition: int | None
    handler: str | None
    """Either a partition or a handler is set."""
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Current activity of the handlers: the worst few items of each kind, and how many there are."""

    workers: tuple[IncompleteRecord, ...]
    """Longest runs first."""
    busy: int
    shards: tuple[IncompleteRecord, ...]
    """Deepest shards first."""
    deep: int
    """Number of shards with waiting records."""
    failed: tuple[IncompleteRecord, ...]
    """Halted records first, the oldest first within each state."""
    failing: int
    parked: tuple[ParkedKey, ...]
    parked_keys: int
    pauses: tuple[Pause, ...]

    def asdict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
