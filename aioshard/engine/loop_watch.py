"""Watch that notices a blocked event loop, and finds out why."""

import asyncio
import dataclasses
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

from aioshard.core.histogram import Histogram
from aioshard.core.loop_block import BLOCKED_AFTER, ExecutedCode, Look, LoopBlock, LoopFigures, judge
from aioshard.engine.guard import Guard
from aioshard.engine.handler_set import HandlerSet
from aioshard.engine.loop_figures import LoopMeter
from aioshard.engine.stack import LOOP_MODULES, module_of, stack_above, waits_for
from aioshard.engine.worker import Worker
from aioshard.log_fields import get_logger

logger = get_logger("aioshard.engine.loop_watch")

_TICK_INTERVAL = 0.25
"""Seconds between two ticks."""
_LOOK_INTERVAL = 0.05
"""Seconds between two looks by the thread at a loop that does not tick."""
_FIRST_LOOK = BLOCKED_AFTER - 2 * _LOOK_INTERVAL
"""Seconds without a tick before the first look: when the loop counts as blocked, two looks can agree."""
_LOOKS = 2
"""Looks without which nothing is reported while the loop is blocked."""
_AGAIN_AFTER = 60.0
"""Seconds before the log names the same cause again: a handler may block for each record."""
_DELAY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEPS = ("_run", "_run_once")
"""Functions of the frames between the one that runs a loop and the code it calls; uvloop has none."""


class _Observed(NamedTuple):
    """Observations of the thread since a tick; replaced as a whole."""

    ticked: float
    """Time of that tick; after a later tick the observations are outdated."""
    looks: tuple[Look, ...] = ()
    """The latest two."""
    unwatched: float = 0.0
    """Seconds for which the thread itself did not run in time."""
    block: LoopBlock | None = None
    """The block, once it has lasted long enough and two looks were taken."""
    is_reported: bool = False
    """Whether the thread has decided if the log names the block."""
    is_logged: bool = False
    """Whether the log has named it, and so has to name its end."""


class LoopWatch:
    """Ticks in an event loop and measures how late each tick is; a separate thread checks that ticks happen.

    Costs a timer every quarter of a second and nothing per record. The thread is a daemon and ends with `run`. It reads
    figures and stacks while the loop does not tick; `aioshard.core.loop_block.judge` decides on the cause. If the whole
    process was stopped, or a call held the interpreter lock all the time, the thread could not check either: the log
    then says so afterwards.
    """

    def __init__(self, handlers: HandlerSet) -> None:
        """Make a watch in the loop that it watches; `run` is its task.

        Args:
            handlers: Their busy workers are named when the loop is blocked.
        """
        self.delays = Histogram(_DELAY_BOUNDS)
        """Delays of the ticks, in seconds."""
        self._handlers = handlers
        self._loop = asyncio.get_running_loop()
        self._meter = LoopMeter()
        self._tick: LoopFigures | None = None
        """The figures at the last tick; None while the loop is not watched."""
        self._thread = threading.get_ident()
        self._runner: FrameType | None = None
        """The frame that runs the loop; the frames above it are the code that the loop executes."""
        self._observed = _Observed(ticked=0.0)
        """Written by the thread."""
        self._wakes_at = 0.0
        """When the thread should run again; written by the thread."""
        self._logged: dict[tuple[str, str], float] = {}
        """When the log last named each cause and its code."""
        self._guard = Guard()
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        self._runner = _runner(sys._getframe())  # noqa: SLF001 - documented despite its name
        self._tick = self._meter.read()
        due = self._wakes_at = self._tick.at
        threading.Thread(target=self._watch, name="aioshard loop watch", daemon=True).start()
        try:
            while True:
                due = time.monotonic() + _TICK_INTERVAL
                await asyncio.sleep(_TICK_INTERVAL)
                with self._guard.watching("the delay of the event loop"):
                    self._add_tick(due)
        finally:
            with self._guard.watching("the delay of the event loop"):
                self._add_tick(due)  # cancelled right after a block
            self._tick = self._runner = None
            self._stopped.set()

    def _add_tick(self, due: float) -> None:
        now = self._meter.read()
        self.delays.add(max(now.at - due, 0.0))
        before = self._tick
        self._tick = now
        if before is not None and now.at - before.at >= BLOCKED_AFTER:
            self._report_end(before, now)

    def _report_end(self, before: LoopFigures, now: LoopFigures) -> None:
        observed = self._observed
        if observed.ticked != before.at:
            observed = _Observed(before.at)
        late = max(now.at - max(self._wakes_at, before.at), 0.0)
        block = _judged(before, now, observed._replace(unwatched=observed.unwatched + late))
        if observed.is_logged:
            _log("loop_resumed", "the event loop runs again after %.1f s: %s", block)
        elif not observed.is_reported and self._should_log(block):
            _log("loop_resumed", "the event loop was blocked for %.1f s: %s", block)

    # From any thread --------------------------------------------------------------------

    def standing(self) -> float:
        """Seconds since the last tick; 0 while the loop is not watched."""
        tick = self._tick
        return 0.0 if tick is None else max(time.monotonic() - tick.at, 0.0)

    def blocked(self) -> LoopBlock | None:
        """The block of the loop, with its cause; None while it runs. Log, health and explanations use this value."""
        tick = self._tick
        observed = self._observed
        return None if tick is None or observed.ticked != tick.at else observed.block

    def find_code(self) -> ExecutedCode | None:
        """Find the code that the loop executes now: a handler, or anything else in the process.

        Returns:
            None if the loop's thread executes nothing.
        """
        stack = stack_above(self._thread, self._runner)
        place = stack.place
        if place is None:
            return None
        task = asyncio.current_task(self._loop)
        handler, worker = (None, None) if task is None else self._find_worker(task)
        entry = stack.frames[0]
        return ExecutedCode(
            handler=handler,
            worker=None if worker is None else worker.name,
            task=None if task is None else task.get_name(),
            records=None if worker is None else _records(worker),
            entry=f"{entry.file} in {entry.function}",
            place=str(place),
            called=stack.waits_in,
            own=place.own,
        )

    def _find_worker(self, task: asyncio.Task[object]) -> tuple[str, Worker] | tuple[None, None]:
        """Find the worker, and the name of its handler, for which a task runs."""
        busy = list(self._handlers.busy())
        for handler, worker in busy:
            if worker.name == task.get_name():
                return handler, worker
        for handler, worker in busy:
            if waits_for(worker.running, task):  # the handler waits for a task that it has created
                return handler, worker
        return None, None

    # The thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        self._meter.watched_here()
        while True:
            pause = max(_FIRST_LOOK - self.standing(), _LOOK_INTERVAL)
            self._wakes_at = time.monotonic() + pause
            if self._stopped.wait(pause):
                return
            with self._guard.watching("a blocked event loop"):
                self._check()

    def _check(self) -> None:
        tick = self._tick
        woke = time.monotonic()
        if tick is None:
            return
        observed = self._observed if self._observed.ticked == tick.at else _Observed(tick.at)
        late = max(woke - max(self._wakes_at, tick.at), 0.0)
        observed = observed._replace(unwatched=observed.unwatched + late)
        if woke - tick.at >= _FIRST_LOOK:
            observed = self._look(tick, observed)
        block = observed.block
        if block is None or observed.is_reported:
            self._observed = observed
            return
        is_logged = self._should_log(block)
        self._observed = observed._replace(is_reported=True, is_logged=is_logged)
        if is_logged:
            _log("loop_blocked", "the event loop has been blocked for %.1f s: %s", block)

    def _look(self, tick: LoopFigures, observed: _Observed) -> _Observed:
        look = Look(self.find_code(), self._meter.is_ready(), self._meter.read_cpu())
        now = self._meter.read()
        if self._tick is not tick:
            return observed  # the loop runs again, and the look may have seen anything
        looks = (*observed.looks, look)[-_LOOKS:]
        observed = observed._replace(looks=looks)
        if now.at - tick.at < BLOCKED_AFTER or len(looks) < _LOOKS:
            return observed
        return observed._replace(block=_judged(tick, now, observed))

    def _should_log(self, block: LoopBlock) -> bool:
        now = time.monotonic()
        place = "" if block.code is None else f"{block.code.handler} {block.code.place}"
        if now - self._logged.get((block.cause, place), -_AGAIN_AFTER) < _AGAIN_AFTER:
            return False
        self._logged[block.cause, place] = now
        return True


def _judged(before: LoopFigures, now: LoopFigures, observed: _Observed) -> LoopBlock:
    """Judge a block by its observations so far; the code that was known to cause it stays known."""
    interval = sys.getswitchinterval()
    block = judge(before, now, observed.looks, unwatched=observed.unwatched, switch_interval=interval)
    known = observed.block
    if block.code is None and known is not None and known.code is not None:
        # The latest looks have seen nothing, perhaps because the code has just ended: it blocked all the same.
        return dataclasses.replace(known, seconds=block.seconds)
    return block


def _records(worker: Worker) -> str:
    deliveries = tuple(worker.deliveries)
    if not deliveries:
        return "a record that it has just finished"
    more = f" and {len(deliveries) - 1} more of its batch" if len(deliveries) > 1 else ""
    return f"record {deliveries[0]!r}{more}"


def _log(event: str, message: str, block: LoopBlock) -> None:
    fields: dict[str, object] = {"event": event, "seconds": round(block.seconds, 1), "cause": block.cause}
    if block.code is not None and block.code.handler is not None:
        fields["handler"] = block.code.handler
    logger.warning(message, block.seconds, block.reason, extra=fields)


def _runner(coroutine: FrameType) -> FrameType | None:
    """The frame that runs the loop, found below that of a coroutine which the loop executes now."""
    frame = coroutine.f_back
    while frame is not None and frame.f_code.co_name in _STEPS and module_of(frame) in LOOP_MODULES:
        frame = frame.f_back
    return frame
