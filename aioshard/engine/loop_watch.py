"""Watch of the event loop: how late it ticks and, seen from another thread, what blocks it."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

from aioshard.core.histogram import Histogram
from aioshard.engine.stack import module_of, stack_above, waits_for
from aioshard.engine.worker import Worker

logger = logging.getLogger("aioshard.engine.loop_watch")

BLOCKED_AFTER = 1.0
"""Seconds without a tick after which the event loop counts as blocked."""
_INTERVAL = 0.25
"""Seconds between two ticks."""
_GLANCE = 0.05
"""Seconds between two checks by the thread while the loop is blocked."""
_AGAIN_AFTER = 60.0
"""Seconds before the log names the same place again: a handler that blocks may do so for each record."""
_DELAY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OF_THE_LOOP = ("asyncio.base_events", "asyncio.events")
_STEPS = ("_run", "_run_once")
"""Modules and functions of the frames between the one that runs a loop and the code it calls; uvloop has none."""
_NOTHING_SEEN = "no Python code runs in it: a call into C holds it, or the process was stopped or gets no CPU time"


class LoopWatch:
    """Ticks in an event loop and measures how late each tick is; a separate thread checks that ticks happen.

    Costs a timer every quarter of a second and nothing per record. The thread is a daemon and ends with `run`. If the
    whole process was stopped, or a call held the interpreter lock all the time, the thread could not check either: the
    log then says so afterwards.
    """

    def __init__(self, busy: Callable[[], Iterable[tuple[str, Worker]]]) -> None:
        """Make a watch in the loop that it watches; `run` is its task.

        Args:
            busy: Returns the workers that run something, each with the name of its handler; called from any thread.
        """
        self.delays = Histogram(_DELAY_BOUNDS)
        """Delays of the ticks, in seconds."""
        self.ticked: float | None = None
        """Time of the last tick; monotonic. None while the loop is not watched."""
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        self._thread: int | None = None
        """Identifier of the loop's thread while it is watched."""
        self._runner: FrameType | None = None
        """The frame that runs the loop; the frames above it are the code that the loop executes."""
        self._seen: str | None = None
        """What the thread has found to block the loop since the last tick."""
        self._logged: dict[str | None, float] = {}
        """When the log last named each place."""
        self._over = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        self._thread = threading.get_ident()
        self._runner = _runner(sys._getframe())  # noqa: SLF001 - documented despite its name
        due = self.ticked = time.monotonic()
        threading.Thread(target=self._watch, name="aioshard loop watch", daemon=True).start()
        try:
            while True:
                due = time.monotonic() + _INTERVAL
                await asyncio.sleep(_INTERVAL)
                self._tick(due)
        finally:
            self._tick(due)  # cancelled right after a block
            self.ticked = self._thread = self._runner = None
            self._over.set()

    def _tick(self, due: float) -> None:
        self.delays.add(max(time.monotonic() - due, 0.0))
        stood, self.ticked = self.standing(), time.monotonic()
        seen, self._seen = self._seen, None
        if seen:
            _log("loop_resumed", "the event loop runs again after %.1f s: %s", stood, seen)
        elif seen is None and stood >= BLOCKED_AFTER and self._is_news(None):
            _log("loop_resumed", "the event loop was blocked for %.1f s: %s", stood, _NOTHING_SEEN)

    # From any thread --------------------------------------------------------------------

    def standing(self) -> float:
        """Seconds since the last tick; 0 while the loop is not watched."""
        ticked = self.ticked
        return 0.0 if ticked is None else max(time.monotonic() - ticked, 0.0)

    def blocked(self) -> str | None:
        """Sentence with the cause and the duration of a block of the loop; None while it runs."""
        seconds = self.standing()
        if seconds < BLOCKED_AFTER:
            return None
        holder = self.find_holder()
        return f"the event loop has been blocked for {seconds:.1f} s: {holder[0] if holder else _NOTHING_SEEN}"

    def find_holder(self) -> tuple[str, str] | None:
        """Find the code that blocks the loop: a handler, or anything else in the process.

        Returns:
            A sentence that names the code, its record and its line, and a key that is the same for every record; None
            if the loop's thread executes nothing.
        """
        thread = self._thread
        stack = None if thread is None else stack_above(thread, self._runner)
        place = None if stack is None else stack.place
        if stack is None or place is None:
            return None
        called = "" if stack.waits_in is None else f" in {stack.waits_in}"
        blocks = "computes or blocks without an await"
        task = asyncio.current_task(self._loop)
        if task is None:
            return f"a callback, which is not a handler, {blocks}, at {place}{called}", str(place)
        name = task.get_name()
        busy = list(self._busy())
        # The second pass finds a handler that waits for a task it has created.
        found = next((pair for pair in busy if pair[1].name == name), None)
        found = found or next((pair for pair in busy if waits_for(pair[1].running, task)), None)
        if found is not None:
            handler, worker = found
            sentence = f"handler {handler} {blocks}, with {_records(worker)}, at {place}{called}"
            return sentence, f"{handler} {place}"
        return f"task {name!r}, which is not a handler, {blocks}, at {place}{called}", str(place)

    # The thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(max(BLOCKED_AFTER - self.standing(), _GLANCE)):
            if self._seen is None and self.standing() >= BLOCKED_AFTER:
                self._look()

    def _look(self) -> None:
        ticked, holder = self.ticked, self.find_holder()
        if holder is None or self.ticked != ticked:
            return
        sentence, place = holder
        self._seen = ""
        if self._is_news(place):
            self._seen = sentence
            _log("loop_blocked", "the event loop has been blocked for %.1f s: %s", self.standing(), sentence)

    def _is_news(self, place: str | None) -> bool:
        now = time.monotonic()
        if now - self._logged.get(place, -_AGAIN_AFTER) < _AGAIN_AFTER:
            return False
        self._logged[place] = now
        return True


def _records(worker: Worker) -> str:
    deliveries = tuple(worker.deliveries)
    if not deliveries:
        return "a record that it has just finished"
    more = f" and {len(deliveries) - 1} more of its batch" if len(deliveries) > 1 else ""
    return f"record {deliveries[0]!r}{more}"


def _log(event: str, message: str, seconds: float, what: str) -> None:
    logger.warning(message, seconds, what, extra={"event": event, "seconds": round(seconds, 1)})


def _runner(coroutine: FrameType) -> FrameType | None:
    """The frame that runs the loop, found below that of a coroutine which the loop executes now."""
    frame = coroutine.f_back
    while frame is not None and frame.f_code.co_name in _STEPS and module_of(frame) in _OF_THE_LOOP:
        frame = frame.f_back
    return frame
