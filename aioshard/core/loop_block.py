"""Why an event loop is blocked: a decision from figures that somebody else reads."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from aioshard.records import counted

BLOCKED_AFTER = 1.0
"""Seconds without a tick after which an event loop counts as blocked."""
_LOOKS = 2
"""Looks that must agree before anything is blamed."""
_SHARE_IN_DOUBT = 0.25
"""A process that lacked a CPU for this share of the time is starved: other causes need a better proof."""
_NO_PROGRESS = 0.001
"""A thread that computed for less than these seconds between two looks has not run."""

LoopBlockCause = Literal["computes", "waits", "no CPU", "interpreter lock", "stopped", "unknown"]
"""`computes`, `waits`: code in the event loop computes, or waits in a call, without an await. `no CPU`: the loop's
thread was ready to run, but the machine did not run it. `interpreter lock`: another thread of the process held it.
`stopped`: hardly any thread of the process ran. `unknown`: the figures are missing, or show none of these."""


class LoopFigures(NamedTuple):
    """Figures about the thread of an event loop and its process; all but the time only grow."""

    at: float
    """Monotonic time."""
    cpu: float | None
    """Seconds for which the thread has computed; None if this system does not say."""
    no_cpu: float | None
    """Seconds for which it was ready to run and got no CPU, because of other load or a CPU limit; None as above."""
    starts: int | None
    """How often it got a CPU; None as above."""
    watcher_no_cpu: float | None
    """Seconds for which the thread that watches the loop was ready to run and got no CPU; None as above."""
    process_cpu: float
    """Seconds for which all threads of the process have computed."""
    throttles: int | None
    """How often the CPU limit of the process's control group has stopped it; None if there is none, or as above."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutedCode:
    """The code that an event loop executes."""

    handler: str | None
    """Name of the handler; None if it is something else."""
    worker: str | None
    """Name of the worker that runs the handler."""
    task: str | None
    """Name of the task; None for a callback."""
    records: str | None
    """The handler's record in words, and how many more there are in its batch."""
    entry: str
    """Outermost function: `file in function`."""
    place: str
    """The innermost call of the application's code, otherwise of a library: `file:line in function`."""
    called: str | None
    """The library function that it has called."""
    own: bool
    """Whether `place` is the application's code."""

    def is_same(self, other: "ExecutedCode") -> bool:
        """Return whether two looks at a loop that has not ticked in between saw the same run, maybe at other lines."""
        return (self.worker, self.task, self.records, self.entry) == (
            other.worker,
            other.task,
            other.records,
            other.entry,
        )

    def described(self, verb: str) -> str:
        """Return a sentence that names the code and its action."""
        does = f"{verb} without an await"
        at = f"at {self.place}" + ("" if self.called is None else f" in {self.called}")
        if self.handler is not None:
            return f"handler {self.handler} {does}, with {self.records}, {at}"
        if self.task is not None:
            return f"task {self.task!r}, which is not a handler, {does}, {at}"
        return f"a callback, which is not a handler, {does}, {at}"


class Look(NamedTuple):
    """One look at the stack of a blocked event loop."""

    code: ExecutedCode | None
    """None if the loop executed no Python code."""
    is_ready: bool | None
    """Whether the thread computed or was ready to; False if it waited, None if this system does not say."""
    cpu: float | None
    """Seconds for which it had computed, as in `LoopFigures`."""


_VERBS: dict[LoopBlockCause, str] = {"computes": "computes", "waits": "blocks", "unknown": "computes or blocks"}
_MOVE = "move the work to a thread or a process, with a plain 'def' handler, or to asyncio.to_thread"
_ADVICE: dict[LoopBlockCause, str] = {
    "no CPU": "give the process more CPU: raise the CPU limit of its container, or run fewer other programs on the "
    "machine; its code is not the cause",
    "interpreter lock": "run what the threads compute in processes, with run_in='process'; py-spy shows the code that "
    "holds the lock",
    "stopped": "find out what stopped the process: SIGSTOP, a debugger, a paused container or a suspended machine. If "
    "nothing did, look for a call into C that waits without releasing the interpreter lock",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LoopBlock:
    """A block of the event loop: how long, why, and by which code."""

    cause: LoopBlockCause
    seconds: float
    """Seconds since the loop's last tick."""
    cpu_seconds: float | None
    """Seconds for which the loop's thread computed; None if the system does not say."""
    no_cpu_seconds: float | None
    """Seconds for which it, or the thread that watches it, was ready to run and got no CPU; None if the system does not
    say. Linux counts a wait only once it is over."""
    other_cpu_seconds: float
    """Seconds for which other threads of the process computed; with several cores it may exceed `seconds`."""
    unwatched_seconds: float
    """Seconds for which the loop's thread did none of this, and the thread that watches it did not run either."""
    throttles: int | None
    """How often the CPU limit of the process's control group stopped it; None if the system does not say."""
    code: ExecutedCode | None
    """The code that causes it, which two looks in a row have seen; None if no code is to blame, or none is known."""

    def __str__(self) -> str:
        """Return a sentence without the final full stop."""
        return f"the event loop has been blocked for {self.seconds:.1f} s: {self.reason}"

    @property
    def verb(self) -> str:
        """The action of `code`."""
        return _VERBS.get(self.cause, "runs")

    @property
    def reason(self) -> str:
        """The cause in a sentence."""
        if self.cause == "no CPU":
            return f"{self._lack}{self._limit}"
        if self.cause == "interpreter lock":
            return (
                "another thread of this process held the interpreter lock: other threads computed for "
                f"{self.other_cpu_seconds:.1f} s meanwhile"
            )
        if self.cause == "stopped":
            return (
                f"hardly any thread of this process ran for {self.unwatched_seconds:.1f} s of that: it was stopped, or "
                "a thread held the interpreter lock while it waited or got no CPU"
            )
        if self.code is not None:
            return self.code.described(self.verb) + self._reservation
        if self.cause == "computes":
            return (
                f"its thread computed for {self.cpu_seconds or 0.0:.1f} s, but not in one place that could be named: "
                f"many tasks in a row, or a call into C that held the interpreter lock{self._reservation}"
            )
        return "no code can be named, and the system does not say why"

    @property
    def what_to_do(self) -> str:
        """Advice in a sentence."""
        if self.cause in _ADVICE:
            return _ADVICE[self.cause]
        if self.code is None:
            return f"run fewer handlers concurrently; if one of them computes, {_MOVE}"
        if not self.code.own:
            return "no code of the application runs there: find out what the library does, and report it with this line"
        return _MOVE

    @property
    def restart_helps(self) -> bool:
        """Whether a restart of the process would end the block."""
        return self.cause not in ("no CPU", "stopped")

    @property
    def _lack(self) -> str:
        if self.no_cpu_seconds is None or self.no_cpu_seconds < self.seconds * _SHARE_IN_DOUBT:
            return "the machine gives this process no CPU: its thread is ready to run, but waits for one"
        return f"the machine gave this process no CPU for {self.no_cpu_seconds:.1f} s of that"

    @property
    def _limit(self) -> str:
        if not self.throttles:
            return ""
        return f", and the CPU limit of its control group stopped it {counted(self.throttles, 'time')}"

    @property
    def _reservation(self) -> str:
        """The part of the block that the code may not have caused, if it is worth a word."""
        if self.no_cpu_seconds is None:
            return "; this system does not say whether the process gets enough CPU"
        if self.no_cpu_seconds < BLOCKED_AFTER / 2:
            return ""
        return (
            f"; in addition, the machine gave this process no CPU for {self.no_cpu_seconds:.1f} s of that{self._limit}"
        )


def judge(
    before: LoopFigures, now: LoopFigures, looks: Sequence[Look], *, unwatched: float, switch_interval: float
) -> LoopBlock:
    """Decide why an event loop has not ticked between two readings.

    The time is divided into four parts: the loop's thread computed; it was ready to run and got no CPU; it waited; and
    it did none of that while the watching thread did not run either. The largest part decides. But code that computed
    for `BLOCKED_AFTER` would block the loop on an idle machine, too: it is named however busy the machine is.

    Args:
        before: The figures at the last tick.
        now: The figures now.
        looks: The latest looks at the loop's thread in between, oldest first. Code is named only if the last two agree.
        unwatched: Seconds in between for which the watching thread should have run, but did not.
        switch_interval: Seconds after which a thread that waits for the interpreter lock wakes up to request it.
    """
    seconds = now.at - before.at
    cpu = _difference(before.cpu, now.cpu)
    no_cpu = _difference(before.no_cpu, now.no_cpu)
    throttles = _difference(before.throttles, now.throttles)
    starts = _difference(before.starts, now.starts)
    watcher_no_cpu = _difference(before.watcher_no_cpu, now.watcher_no_cpu)
    idle = max(seconds - (cpu or 0.0) - (no_cpu or 0.0), 0.0)
    unwatched = min(unwatched, idle)
    spent = _Spent(
        seconds=seconds,
        cpu=cpu,
        no_cpu=no_cpu,
        lacked=max(no_cpu or 0.0, watcher_no_cpu or 0.0),
        others=max(now.process_cpu - before.process_cpu - (cpu or 0.0), 0.0),
        unwatched=unwatched,
        waited=idle - unwatched,
        requests=None if starts is None else starts * switch_interval,
    )
    # Looks by a thread that hardly ran prove nothing.
    code = None if spent.is_unwatched else _agreed(looks)
    cause = _cause(spent, looks, code)
    return LoopBlock(
        cause=cause,
        seconds=seconds,
        cpu_seconds=cpu,
        no_cpu_seconds=None if no_cpu is None else spent.lacked,
        other_cpu_seconds=spent.others,
        unwatched_seconds=unwatched,
        throttles=None if throttles is None else round(throttles),
        code=code if cause in _VERBS else None,
    )


class _Spent(NamedTuple):
    """How the seconds of a block were spent."""

    seconds: float
    cpu: float | None
    no_cpu: float | None
    lacked: float
    """The loop's thread or the watching thread was ready to run and got no CPU."""
    others: float
    """CPU seconds of other threads of the process."""
    unwatched: float
    """The loop's thread neither computed nor was ready to, and the watching thread did not run."""
    waited: float
    """As before, but the watching thread did run."""
    requests: float | None
    """How long the thread would have waited for the interpreter lock if it got a CPU only to request that."""

    @property
    def is_unwatched(self) -> bool:
        return self.unwatched > self.seconds / 2

    @property
    def others_compute(self) -> bool:
        return self.others >= (self.unwatched + self.waited) / 2

    @property
    def is_starved(self) -> bool:
        """Whether the process lacked a CPU for long enough to doubt anything else."""
        return self.lacked >= self.seconds * _SHARE_IN_DOUBT


def _cause(spent: _Spent, looks: Sequence[Look], code: ExecutedCode | None) -> LoopBlockCause:
    no_cpu = spent.no_cpu or 0.0
    # 1. Most of the time no thread of the process executed Python code.
    if spent.is_unwatched:
        return _cause_of_standstill(spent)
    # 2. The thread computed.
    if spent.cpu is not None and (spent.cpu >= BLOCKED_AFTER or spent.cpu >= max(no_cpu, spent.waited)):
        return "computes"
    # 3. It was ready to run.
    if no_cpu > spent.waited or _lacks_cpu(spent, looks, code):
        return "no CPU"
    # 4. It waited for the interpreter lock. A thread that waits in a call does not get a CPU that often.
    if spent.others_compute and spent.requests is not None and spent.requests >= spent.waited / 2:
        return "interpreter lock"
    # 5. It waited in a call, as far as this system says.
    if code is None or spent.cpu is None or spent.no_cpu is None:
        return "unknown"
    return "waits"


def _cause_of_standstill(spent: _Spent) -> LoopBlockCause:
    if spent.cpu is None or spent.no_cpu is None:
        return "unknown"
    if spent.is_starved and not spent.others_compute:
        return "no CPU"
    # The thread that holds the lock may get little CPU, too. Before a process was stopped, others may have computed.
    if spent.others >= max(spent.unwatched / 10, BLOCKED_AFTER / 2):
        return "interpreter lock"
    return "stopped"


def _difference(before: float | None, now: float | None) -> float | None:
    if before is None or now is None:
        return None
    return max(now - before, 0)


def _lacks_cpu(spent: _Spent, looks: Sequence[Look], code: ExecutedCode | None) -> bool:
    """Return whether the thread waits for a CPU although the figures do not show it."""
    latest = looks[-_LOOKS:]
    if len(latest) == _LOOKS and all(look.is_ready for look in latest) and not _progressed(*latest):
        return True  # the system counts that only once the thread gets a CPU
    # A thread of a starved process may wait for one that holds the interpreter lock and gets no CPU.
    is_proven = code is not None and not any(look.is_ready for look in latest)
    return spent.is_starved and not spent.others_compute and not is_proven


def _progressed(first: Look, last: Look) -> bool:
    return first.cpu is None or last.cpu is None or last.cpu - first.cpu >= _NO_PROGRESS


def _agreed(looks: Sequence[Look]) -> ExecutedCode | None:
    """Return the code that the last two looks have seen; None if they do not agree."""
    if len(looks) < _LOOKS:
        return None
    first = looks[-_LOOKS].code
    last = looks[-1].code
    if first is None or last is None or not first.is_same(last):
        return None
    return last
