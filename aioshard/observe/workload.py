"""Current activity of the handlers: the result of `App.workload()`, for the dashboard."""

import dataclasses
from typing import Any

__all__ = ["FailedRecord", "HandlerLoad", "HotShard", "ParkedKey", "Pause", "WorkerRun", "Workload"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRun:
    """The current run of one worker."""

    handler: str
    worker: str
    topic: str
    partition: int
    offset: int
    """For a batch, topic, partition and offset are those of its first record."""
    records: int
    """Number of records: more than one in a batch."""
    key: str | None
    """As in `HeadOfLine`."""
    doing: str
    """`runs the handler`, or a description of the work that replaces it."""
    seconds: float
    """Duration so far."""
    cancelled: bool
    """Whether it was cancelled but has not ended."""
    place: str | None
    """`file:line in function` of the innermost call of the application's own code."""


@dataclasses.dataclass(frozen=True, slots=True)
class HotShard:
    """A shard in which records wait behind the one that occupies it."""

    handler: str
    key: str | None
    """Key of the record that occupies it, as in `HeadOfLine`; None if nothing does now, or it has no key."""
    shard: str | None
    """Its shard, if it differs from the key; the number of a fixed shard."""
    waiting: int
    """Number of records behind that one."""
    state: str
    """State of that record: `running`, `retrying`, `halted` or `queued`."""
    topic: str | None
    partition: int | None
    offset: int | None
    """Position of that record."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRecord:
    """An incomplete record whose latest attempt failed."""

    handler: str
    topic: str
    partition: int
    offset: int
    key: str | None
    """As in `HeadOfLine`."""
    state: str
    """`halted`: its attempts are exhausted. `retrying`: it waits for the next one. `detour`: the work that replaces its
    handler has failed, and is retried."""
    attempts: int
    """Number of failed attempts."""
    most_attempts: int
    since: float
    """Seconds since the latest failure."""
    due: float | None
    """Seconds until the next attempt; None if it does not come automatically."""
    error: str
    waiting: int
    """Number of records of its partition behind it in its shard."""


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
    """The shard key, as in `HeadOfLine`; None if the record has no key and is parked alone."""
    replays: int
    """Number of retries so far."""
    due: float | None
    """Seconds until it is retried; None if it waits for a manual release."""
    running: bool
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
class HandlerLoad:
    """Properties of a handler that are not in its statistics."""

    name: str
    on_failure: str
    """`halt`, `skip`, `dead letter` or `park`."""
    side_topic: str | None
    """Topic for its dead letters or parked records."""
    fixed_shards: int | None
    """Number of fixed shards, if `shards=N` was given."""
    adapts: bool
    """Whether its concurrency adapts to the capacity of the back end."""
    queued: int
    """Records that no worker has picked up yet."""
    parked_records: int
    """Number of parked records in the current partitions of this process."""
    parked_keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Current activity of the handlers: the worst few items of each kind, and how many there are."""

    handlers: tuple[HandlerLoad, ...]
    workers: tuple[WorkerRun, ...]
    """Longest runs first."""
    busy: int
    shards: tuple[HotShard, ...]
    """Deepest shards first."""
    deep: int
    """Number of shards with waiting records."""
    failed: tuple[FailedRecord, ...]
    """Halted records first, the oldest first within each state."""
    failing: int
    parked: tuple[ParkedKey, ...]
    parked_keys: int
    pauses: tuple[Pause, ...]

    def asdict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
