"""Diagnosis of partitions that do not advance: the result of `App.diagnose()`; `App.explain()` is the same as text."""

import dataclasses
from typing import Any, Literal

from aioshard.observe.statistics import AppState

__all__ = [
    "Diagnosis",
    "Finding",
    "Frame",
    "HeadOfLine",
    "HeadState",
    "PartitionDiagnosis",
    "Stack",
    "Verdict",
]


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
    """Outermost first."""
    waits_in: str | None
    """The library function called by the application's innermost frame, or the kind of future it awaits."""
    executing: bool
    """Whether it was not suspended in an await at that moment: it is computing, or in a blocking call."""
    name: str | None
    """Name of the task, if it is not the worker's own task."""
    thread: str | None
    """Name of the thread, if it runs in one."""
    tasks: tuple["Stack", ...]
    """Stacks of the tasks and threads that it waits for; only the first few."""
    more_tasks: int
    """Number of further tasks that it waits for."""

    @property
    def place(self) -> Frame | None:
        """The innermost call of the application's own code, even inside the only task that it awaits."""
        if len(self.tasks) == 1 and not self.more_tasks and (inside := self.tasks[0].place) is not None:
            return inside
        own = [frame for frame in self.frames if frame.own] or list(self.frames)
        return own[-1] if own else None


HeadState = Literal[
    "running",
    "outliving",
    "detour",
    "retrying",
    "halted",
    "given back",
    "held",
    "collecting",
    "limited",
    "behind",
    "queued",
]
"""The reason why an incomplete record is waiting.

`running`: its handler. `outliving`: a run that was cancelled but has not ended. `detour`: the work that replaces its
handler, such as writing its dead letter. `retrying`: its next attempt. `halted`: an operator who releases it.
`given back`: another fetch, because it was evicted to make room for others. `held`: its partition, which is paused or
not certainly ours. `collecting`: other records of its batch. `limited`: its rate limit. `behind`: another record of its
shard. `queued`: a worker.
"""

Verdict = Literal["up to date", "advancing", "waiting", "stuck"]
"""`waiting`: something is in the way. `stuck`: a record is halted, or in flight for longer than `stuck_after`."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadOfLine:
    """The oldest incomplete record of a partition: nothing is committed past it."""

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
    state: HeadState
    since: float | None
    """Seconds in that state; None if the start is unknown."""
    reason: str
    """A sentence: what it waits for, and since when."""
    what_to_do: str | None
    """A sentence; None if nothing needs to be done."""
    stack: Stack | None
    """Stack of its run, or of the run that it waits for."""


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
    head: HeadOfLine | None
    """None if nothing is incomplete."""
    findings: tuple[Finding, ...]
    """Reasons other than that record."""
    window: int
    """Offsets from the oldest incomplete record to the position."""
    behind: int
    """Number of those that wait for that record: done but not committable (gaps count as done), in its shard, or
    evicted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why each partition does not advance."""

    state: AppState
    findings: tuple[Finding, ...]
    """Findings that concern all partitions."""
    partitions: tuple[PartitionDiagnosis, ...]
    outliving: tuple[HeadOfLine, ...]
    """Runs that were cancelled, or whose partition is gone, but that have not ended: their shards wait."""

    def asdict(self) -> dict[str, Any]:
        """Return the same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
