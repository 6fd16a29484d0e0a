"""Why each partition does not advance: what `App.diagnose()` returns; `App.explain()` is the same in words."""

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
    """Whether it is the application's own code: not the standard library, no installed package, not aioshard."""

    def __str__(self) -> str:
        """`file:line in function`."""
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Where something that runs stands."""

    frames: tuple[Frame, ...]
    """Outermost first."""
    waits_in: str | None
    """The library's function that the innermost frame of the application called, or the kind of future it awaits."""
    executing: bool
    """Whether it was not suspended in an await at that moment: it computes, or is in a call that blocks."""
    name: str | None
    """Of the task, where it is another one than the worker's."""
    thread: str | None
    """Name of the thread, where it runs in one."""
    tasks: tuple["Stack", ...]
    """Of the tasks and threads that it waits for; the first few of them."""
    more_tasks: int
    """How many more it waits for."""

    @property
    def place(self) -> Frame | None:
        """The innermost call of the application's own code, also when that is in the one task that is awaited."""
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
"""What an incomplete record waits for.

`running`: its handler. `outliving`: a run that was told to end and has not. `detour`: what is done in place of its
handler, such as writing its dead letter. `retrying`: its next attempt. `halted`: somebody who releases it.
`given back`: being fetched again, because it gave its room to others. `held`: its partition, which is paused or not
ours for certain. `collecting`: others that go to the handler with it. `limited`: its rate limit. `behind`: another
record of its shard. `queued`: a worker.
"""

Verdict = Literal["up to date", "advancing", "waiting", "stuck"]
"""`waiting`: something is in the way. `stuck`: a record is, that is halted or in hand for longer than `stuck_after`."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadOfLine:
    """The oldest incomplete record of a partition: nothing is committed past it."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """With `show_keys` as it is; else `#` and a hash, by which this process names the same key; None without one."""
    shard: str | None
    """Its shard, where that is not its key: as the key. None when it asks for no order."""
    age: float
    """Seconds since it came in."""
    attempt: int
    """The one that runs, or comes next; of a halted record its last."""
    attempts: int
    """How many there are at most."""
    state: HeadState
    since: float | None
    """Seconds for which it has been in that state; None where nobody noted when it began."""
    reason: str
    """A sentence: what it waits for, and since when."""
    what_to_do: str | None
    """A sentence; None when nothing needs to be done."""
    stack: Stack | None
    """Of its run, or of the run that it waits for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps a partition, or all of them, from advancing."""

    kind: str
    """One word or two, for programs: `paused`, `rebalancing`, `unreadable`, `no room`, `commit`, ..."""
    sentence: str
    """What it is, and since when."""
    since: float | None
    """Seconds; None where nobody noted when it began."""
    what_to_do: str | None
    """A sentence; None when nothing needs to be done."""


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionDiagnosis:
    """Why one partition does not advance."""

    topic: str
    partition: int
    verdict: Verdict
    since: float | None
    """Seconds for which it has not advanced; None while it does."""
    sentence: str
    """The whole in a sentence."""
    head: HeadOfLine | None
    """None when nothing is incomplete."""
    findings: tuple[Finding, ...]
    """What is in the way beside that record."""
    window: int
    """Offsets from the oldest incomplete record to the position."""
    behind: int
    """How many of those wait for that record: done and not to be committed (holes count as done), in its shard, or
    given back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why each partition does not advance."""

    state: AppState
    findings: tuple[Finding, ...]
    """What concerns all partitions."""
    partitions: tuple[PartitionDiagnosis, ...]
    outliving: tuple[HeadOfLine, ...]
    """Runs that were told to end, or whose partition is gone, and that still run: their shards wait."""

    def asdict(self) -> dict[str, Any]:
        """The same as plain dictionaries and tuples, ready for JSON."""
        return dataclasses.asdict(self)
