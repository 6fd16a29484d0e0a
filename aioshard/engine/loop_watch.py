"""Watch of the event loop: how late it ticks and, seen from another thread, what blocks it."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from aioshard.core.histogram import Histogram

__all__ = ["BLOCKED_AFTER", "Holder", "LoopWatch"]

logger = logging.getLogger("aioshard.engine.loop_watch")

BLOCKED_AFTER = 1.0
"""Seconds without a tick after which the event loop counts as blocked."""
_INTERVAL = 0.25
"""Seconds between two ticks."""
_NOTED_FROM = BLOCKED_AFTER / 2
"""A tick more than this many seconds late may end a block that the thread has seen."""
_GLANCE = 0.05
"""Seconds between checks whether a blocked loop runs again."""
_SLEPT_IN = 0.5
"""If the watching thread wakes this many seconds late, it was itself kept from running."""
_COMPUTED = 0.2
"""A process that used less than this share of CPU time during a block was stopped or starved."""
_AGAIN_AFTER = 60.0
"""Seconds before the log names the same place again: a handler that blocks may do so for each record."""
_DELAY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OF_THE_LOOP = ("asyncio.base_events", "asyncio.events")
_STEPS = ("_run", "_run_once")
"""Modules and functions of the frames between the one that runs a loop and the code it calls; uvloop has none."""


class Holder(NamedTuple):
    """The code that blocks an event loop."""

    sentence: str
    """Names the code, its record and its line."""
    place: str | None
    """Key of the place, the same for every record; None if the loop's thread executes nothing and waits to run."""


class _Stand(NamedTuple):
    """A block of a loop, as measured afterwards."""

    since: float
    """The last tick before it; monotonic."""
    seconds: float
    cpu: float
    """Seconds of CPU time that the process used meanwhile."""


class LoopWatch:
    """Ticks in an event loop and measures how late each tick is; a separate thread checks that ticks happen.

    Costs a timer every quarter of a second and nothing per record. The thread is a daemon, sleeps while the loop ticks
    and ends with `run`. If the whole process was stopped, or a call held the interpreter lock all the time, the thread
    could not check either: that is reported afterwards.
    """

    def __init__(self, find_holder: Callable[["LoopWatch"], Holder]) -> None:
        """Make a watch in the loop that it watches; `run` is its task.

        Args:
            find_holder: Finds the code that runs in the loop's thread; called from other threads.
        """
        self.delays = Histogram(_DELAY_BOUNDS)
        """Delays of the ticks, in seconds."""
        self.loop = asyncio.get_running_loop()
        self.thread: int | None = None
        """Identifier of the loop's thread while it is watched."""
        self.runner: FrameType | None = None
        """The frame that runs the loop; the frames above it are the code that the loop executes."""
        self.ticked: float | None = None
        """Time of the last tick; monotonic. None while the loop is not watched."""
        self.stand: _Stand | None = None
        """The latest block."""
        self.find_holder = find_holder
        self._cpu = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        self.thread = threading.get_ident()
        self.ticked, self._cpu = time.monotonic(), time.process_time()
        lookout = _Lookout(self)
        threading.Thread(target=lookout.run, name="aioshard loop watch", daemon=True).start()
        due = self.ticked
        try:
            while True:
                self.runner = _runner(sys._getframe())  # noqa: SLF001 - documented despite its name
                due = time.monotonic() + _INTERVAL
                await asyncio.sleep(_INTERVAL)
                self._tick(due)
        finally:
            if time.monotonic() - due > _NOTED_FROM:
                self._tick(due)  # cancelled right after a block
            self.ticked = self.thread = self.runner = None
            lookout.over.set()

    def _tick(self, due: float) -> None:
        now, cpu = time.monotonic(), time.process_time()
        delay = max(now - due, 0.0)
        self.delays.add(delay)
        if delay > _NOTED_FROM and self.ticked is not None:
            self.stand = _Stand(self.ticked, delay, cpu - self._cpu)
        self.ticked, self._cpu = now, cpu

    # From any thread --------------------------------------------------------------------

    def standing(self) -> float:
        """Seconds since the last tick; 0 while the loop is not watched."""
        ticked = self.ticked
        return 0.0 if ticked is None else max(time.monotonic() - ticked, 0.0)

    def blocked(self) -> str | None:
        """Sentence with the cause and the duration of a block of the loop; None while it runs."""
        stands = self.standing()
        if stands < BLOCKED_AFTER:
            return None
        return f"the event loop has not turned for {stands:.1f} s: {self.find_holder(self).sentence}"


class _Told(NamedTuple):
    """A blocked loop as last reported."""

    since: float
    holder: Holder
    aloud: bool
    """Whether it was logged; not if the same place was named recently."""


class _Lookout:
    """The thread that watches a loop."""

    def __init__(self, watch: LoopWatch) -> None:
        self.over = threading.Event()
        self._watch = watch
        self._seen: _Stand | None = None
        self._told: _Told | None = None
        self._named: dict[str, float] = {}
        """When the log last named each place."""

    def run(self) -> None:
        """Check until `over` is set."""
        watch = self._watch
        over = False
        while not over:
            pause = _GLANCE if self._told is not None else max(BLOCKED_AFTER - watch.standing(), _GLANCE)
            began = time.monotonic()
            over = self.over.wait(pause)
            slept_in = time.monotonic() - began > pause + _SLEPT_IN
            stand = watch.stand
            if stand is not None and stand is not self._seen:
                self._seen = stand
                self._ended(stand)
            elif self._told is not None and self._told.since != watch.ticked:
                self._told = None
            if self._told is None and not slept_in and watch.standing() >= BLOCKED_AFTER:
                self._began()

    def _began(self) -> None:
        watch = self._watch
        since = watch.ticked
        holder = watch.find_holder(watch)
        stands = watch.standing()
        if since is None or stands < BLOCKED_AFTER:
            return
        aloud = holder.place is None or self._is_news(holder.place)
        if aloud:
            level = logging.INFO if holder.place is None else logging.WARNING
            fields = _fields("loop_blocked", stands)
            logger.log(level, "the event loop has not turned for %.1f s: %s", stands, holder.sentence, extra=fields)
        self._told = _Told(since, holder, aloud)

    def _is_news(self, place: str) -> bool:
        now = time.monotonic()
        self._named = {one: at for one, at in self._named.items() if now - at < _AGAIN_AFTER}
        if place in self._named:
            return False
        self._named[place] = now
        return True

    def _ended(self, stand: _Stand) -> None:
        told, self._told = self._told, None
        if told is None:
            if stand.seconds >= BLOCKED_AFTER:
                self._tell_unseen(stand)
        elif told.aloud:
            level = logging.INFO if told.holder.place is None else logging.WARNING
            fields = _fields("loop_turns", stand.seconds)
            message = "the event loop turns again after %.1f s: %s"
            logger.log(level, message, stand.seconds, told.holder.sentence, extra=fields)

    def _tell_unseen(self, stand: _Stand) -> None:
        if stand.cpu < stand.seconds * _COMPUTED:
            message = "the event loop did not turn for %.1f s, nor did a thread: the process was stopped or starved"
            logger.info(message, stand.seconds, extra=_fields("loop_turns", stand.seconds))
        elif self._is_news("unseen"):
            logger.warning(
                "the event loop did not turn for %.1f s, and no thread could look why: something computed in a call "
                "that keeps the interpreter to itself (this process used %.1f s of the processors meanwhile)",
                stand.seconds,
                stand.cpu,
                extra=_fields("loop_turns", stand.seconds),
            )


def _fields(event: str, seconds: float) -> dict[str, object]:
    return {"event": event, "seconds": round(seconds, 1)}


def _runner(coroutine: FrameType) -> FrameType | None:
    """The frame that runs the loop, found below that of a coroutine which the loop executes now."""
    frame = coroutine.f_back
    while frame is not None and frame.f_code.co_name in _STEPS and frame.f_globals.get("__name__") in _OF_THE_LOOP:
        frame = frame.f_back
    return frame
