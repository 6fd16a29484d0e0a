"""What the engine tells the outside: frozen snapshots of its state.

`App.statistics()` returns a `Statistics`; metrics, health, the CLI and tests all read this one thing.
"""

import dataclasses
from typing import Any, Literal

__all__ = ["AppState", "HandlerStatistics", "PartitionStatistics", "Statistics"]

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
    """End of the log as of the last fetch (last stable offset under read_committed)."""
    lag: int | None
    """`end_offset - committed` (or the committable offset before the first commit), in offsets."""
    incomplete: int
    """Records delivered to the engine and not complete."""
    buffered_records: int
    buffered_bytes: int
    paused: str | None
    """None, or the sentence that says why nothing more of the partition is taken in."""
    oldest_incomplete_age: float | None
    """Seconds since the oldest incomplete record came in; None when nothing is incomplete."""


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
    """`topic/partition/offset` of runs that outlive their cancellation or epoch and hold their shard."""


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
    buffered_records: int
    buffered_bytes: int
    client_losses: int
    """How often a client was lost or could not connect, and the supervisor built a new one."""
    trouble: str | None
    """What is wrong beyond single partitions, and since when: brokers away, access refused, commits not
    acknowledged, a topic missing. None while there is nothing of the kind."""
    partitions: tuple[PartitionStatistics, ...]
    handlers: tuple[HandlerStatistics, ...]

    def asdict(self) -> dict[str, Any]:
        """The same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
