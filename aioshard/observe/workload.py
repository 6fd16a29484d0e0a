"""What goes on inside the handlers: what `App.workload()` returns, for the page."""

import dataclasses
from typing import Any

__all__ = ["FailedRecord", "HandlerLoad", "HotShard", "ParkedKey", "Pause", "WorkerRun", "Workload"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRun:
    """What one worker runs now."""

    handler: str
    worker: str
    topic: str
    partition: int
    offset: int
    """Of a batch, those of its first record."""
    records: int
    """How many: more than one in a batch."""
    key: str | None
    """As in `HeadOfLine`."""
    doing: str
    """`runs the handler`, or what comes in place of that, in words."""
    seconds: float
    """For how long."""
    cancelled: bool
    """Whether it was told to end, and has not."""
    place: str | None
    """`file:line in function` of the innermost call of the application's own code."""


@dataclasses.dataclass(frozen=True, slots=True)
class HotShard:
    """A shard in which records wait for the one that occupies it."""

    handler: str
    key: str | None
    """Of the record that occupies it, as in `HeadOfLine`; None where nothing does now, or that has none."""
    shard: str | None
    """Its shard, where that is not its key; of fixed shards the number."""
    waiting: int
    """Records behind that one."""
    state: str
    """What becomes of that one: `running`, `retrying`, `halted` or `queued`."""
    topic: str | None
    partition: int | None
    offset: int | None
    """Where that one is."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record whose latest attempt failed, and that is not complete."""

    handler: str
    topic: str
    partition: int
    offset: int
    key: str | None
    """As in `HeadOfLine`."""
    state: str
    """`halted`: its attempts are used up. `retrying`: it waits for the next one. `detour`: what is done in place of its
    handler has failed, and is done again."""
    attempts: int
    """That have failed."""
    most_attempts: int
    since: float
    """Seconds since the latest failure."""
    due: float | None
    """Seconds until the next attempt; None when none comes by itself."""
    error: str
    waiting: int
    """Records of its partition behind it in its shard."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParkedKey:
    """A key whose records are parked, by the first of them."""

    handler: str
    stored_in: str
    """The side topic."""
    topic: str
    partition: int
    offset: int
    """Of its first record."""
    key: str | None
    """The shard key, as in `HeadOfLine`; None where it has none, and is parked alone."""
    replays: int
    """How often it was run again."""
    due: float | None
    """Seconds until it is run again; None when it waits until somebody releases it."""
    running: bool
    """Whether it is being run again now."""
    failed_at: float | None
    """Seconds since the epoch."""
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """What the application, or an operator, has paused."""

    topic: str | None
    partition: int | None
    handler: str | None
    """Either a partition or a handler."""
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerLoad:
    """What of a handler is not in its statistics."""

    name: str
    on_failure: str
    """`halt`, `skip`, `dead letter` or `park`."""
    side_topic: str | None
    """Where its dead letters or parked records go."""
    fixed_shards: int | None
    """How many, where `shards=N` was given."""
    adapts: bool
    """Whether its concurrency follows what the back end bears."""
    queued: int
    """Records that no worker has looked at yet."""
    parked_records: int
    """Of the partitions of this process, now."""
    parked_keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What is going on inside the handlers; of each kind the worst few, and how many there are."""

    handlers: tuple[HandlerLoad, ...]
    workers: tuple[WorkerRun, ...]
    """The longest runs first."""
    busy: int
    shards: tuple[HotShard, ...]
    """The deepest first."""
    deep: int
    """How many shards have something waiting."""
    failed: tuple[FailedRecord, ...]
    """The halted ones first, of each state the oldest first."""
    failing: int
    parked: tuple[ParkedKey, ...]
    parked_keys: int
    pauses: tuple[Pause, ...]

    def asdict(self) -> dict[str, Any]:
        """The same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
