"""Watches that log stuck partitions, hanging tasks and a blocked event loop, and that remember since when (I11)."""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import FrameType

from aioshard.core.histogram import Histogram
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.log_fields import record_fields
from aioshard.engine.partition import Partition
from aioshard.engine.runtime import Engine
from aioshard.engine.stack import LOOP_MODULES, module_of, stack_above, waits_for
from aioshard.engine.trouble import Trouble
from aioshard.engine.worker import Worker
from aioshard.observe import Sample
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.engine.watch")

_INTERVAL = 1.0
HISTORY_STEP = 5.0
"""Seconds between two samples of the history."""
_CHECKS = 4
"""Minimum checks per `stuck_after`; a new oldest record is not blamed before a quarter of that has passed."""
_LEAST_WINDOW = 100
_HELD_UP = 0.9
"""A partition is reported after half of `stuck_after` if at least `_LEAST_WINDOW` offsets follow its oldest record, of
which more than this share wait for it."""
_PATIENCE = 30.0
"""Minimum seconds without progress after which a task hangs: a busy machine may take longer than any timeout."""
_TIMEOUT_FACTOR = 5
"""A task hangs when one iteration takes this many times its timeout."""


class Watch:
    """Checks a running engine once a second, so that explanations cost nothing in between.

    Remembers since when facts hold, up to a second late. Logs one line when a problem begins and one when it is over:
    for a stuck partition, brokers that do not answer, and a hanging task. The pump and the commit coordinator make
    progress even if the brokers do not answer: if the counter of one has not changed for several times its timeout,
    the task hangs. Also keeps the history of the figures that the dashboard plots, because it must exist before the
    dashboard is opened.
    """

    def __init__(
        self,
        engine: Engine,
        describe: Callable[["Watch", Partition], str],
        sample: Callable[["Watch"], Sample],
        *,
        watch_loop: bool,
    ) -> None:
        """Make a watch; `run` is its task.

        Args:
            engine: The engine.
            describe: Describes a partition that does not advance, in one line.
            sample: Takes a sample for the history.
            watch_loop: Whether to watch from a thread for a blocked event loop.
        """
        self.engine = engine
        self.loop = LoopWatch(self._busy) if watch_loop else None
        self.standstill = Trouble(engine.clock)
        """Why consuming makes no progress although the client is alive, such as unreachable brokers."""
        self.hang = Trouble(engine.clock)
        """A task of the engine that makes no progress although the brokers answer."""
        self.history: deque[Sample] = deque(maxlen=720)
        """The samples of the last hour, oldest first."""
        self.lags: deque[tuple[float, dict[TopicPartition, int]]] = deque(maxlen=13)
        """The lag of each partition in the last minute, with the loop time of each."""
        self._describe, self._sample = describe, sample
        self._facts: dict[Hashable, tuple[object, float]] = {}
        self._reported: dict[Partition, tuple[Delivery, bool]] = {}
        """Partitions that the log reports, with their oldest record and whether they count as stuck."""

    async def run(self) -> None:
        """Watch until cancelled."""
        interval = min(_INTERVAL, self.engine.settings.stuck_after / _CHECKS)
        async with asyncio.TaskGroup() as group:
            if self.loop is not None:
                group.create_task(self.loop.run(), name="loop watch")
            while True:
                self.check()
                await asyncio.sleep(interval)

    def check(self) -> None:
        """Check the engine now."""
        engine, before = self.engine, self._facts
        now = engine.clock()
        current = {}
        for subject, fact in self._find_facts():
            seen = before.get(subject)
            current[subject] = seen if seen is not None and seen[0] == fact else (fact, now)
        self._facts = current
        self.standstill.check(engine.standstill)
        self.hang.check(self._find_hang())
        for handler in engine.handlers:
            handler.failures.tell_repeats()
        partitions = engine.rebalance.epochs
        self._reported = {partition: report for partition, report in self._reported.items() if partition in partitions}
        for partition in partitions:
            self._check_partition(partition, now)
        if not self.history or abs(time.time() - self.history[-1].at) >= HISTORY_STEP:  # the clock may be set back
            self.history.append(self._sample(self))
        if not self.lags or now - self.lags[-1][0] >= HISTORY_STEP:
            self.lags.append((now, engine.lags()))

    # Since when -------------------------------------------------------------------------

    def lasts(self, subject: Hashable, fact: object) -> float | None:
        """Seconds since *fact* has held for *subject*; None if it is not known to hold. Safe from any thread."""
        seen = self._facts.get(subject)
        return self.engine.clock() - seen[1] if seen is not None and seen[0] == fact else None

    def stands(self, partition: Epoch) -> float:
        """Seconds for which the committable offset has not advanced; 0 if it has since the last check."""
        return self.lasts(("committable", partition.topic_partition), partition.tracker.committable) or 0.0

    def _find_facts(self) -> Iterator[tuple[Hashable, object]]:
        engine = self.engine
        yield "settled", engine.rebalance.settled.is_set()
        yield "calm", engine.trouble.why is None and engine.standstill is None
        yield "pump", engine.intake.turns
        yield "committer", engine.committer.turns if engine.committer.owns else None
        for paused, why in engine.pauses.items():
            yield ("application", paused), why
        for epoch in engine.rebalance.epochs:
            name = epoch.topic_partition
            yield ("committable", name), epoch.tracker.committable
            yield ("position", name), epoch.tracker.position
            yield ("gate", name), epoch.gate
            yield ("held back", name), epoch.log_end if epoch.held_back else None
            for who, why in epoch.pauses.items():
                yield ("pause", name, who), why
        for worker in engine.workers:
            if worker.cancelled:
                yield worker, worker.started

    # Hanging tasks ----------------------------------------------------------------------

    def _find_hang(self) -> str | None:
        engine = self.engine
        calm = self.lasts("calm", fact=True) or 0.0  # a task that waits for the brokers does not hang
        limit = max(_PATIENCE, _TIMEOUT_FACTOR * engine.settings.fetch_max_wait)
        if min(self.lasts("pump", engine.intake.turns) or 0.0, calm) > limit:
            return f"the fetcher hangs: no poll of the client has returned for {limit:g} s, although the brokers answer"
        limit = max(_PATIENCE, _TIMEOUT_FACTOR * max(engine.settings.commit_timeout, engine.settings.commit_interval))
        if min(self.lasts("committer", engine.committer.turns) or 0.0, calm) > limit:
            return (
                f"the commit coordinator hangs: no commit has ended for {limit:g} s, although commits time out and "
                "the brokers answer"
            )
        return None

    def _busy(self) -> list[tuple[str, Worker]]:
        """The workers that run something, each with the name of its handler. Safe from any thread."""
        return [
            (handler.spec.name, worker)
            for handler in self.engine.handlers
            for worker in handler.workers
            if worker.deliveries
        ]

    # Stuck partitions -------------------------------------------------------------------

    def _check_partition(self, partition: Partition, now: float) -> None:
        limit, oldest = self.engine.settings.stuck_after, partition.tracker.oldest
        reported, is_stuck = self._reported.get(partition, (None, False))
        if reported is not None and reported is not oldest:
            logger.warning(
                "%s advances again: record %r no longer holds it up",
                partition.topic_partition,
                reported,
                extra=record_fields("advances_again", reported),
            )
            del self._reported[partition]
            is_stuck = False
        if oldest is None or is_stuck:
            return
        stands = self.stands(partition)
        if partition.stuck(now, limit) and (stands >= limit / _CHECKS or oldest.block is not None):
            self._report(partition, oldest, "stuck", "stuck")
        elif reported is not oldest and stands >= limit / 2 and self._held_up(partition, oldest):
            self._report(partition, oldest, "held_up", "almost everything waits for one record")

    def _report(self, partition: Partition, oldest: Delivery, event: str, what: str) -> None:
        logger.warning("%s: %s", what, self._describe(self, partition), extra=record_fields(event, oldest))
        self._reported[partition] = oldest, event == "stuck"

    def _held_up(self, partition: Partition, oldest: Delivery) -> bool:
        """Whether most of the records taken in after *oldest* wait for it: completed, or queued in its shard."""
        window, incomplete = partition.tracker.position - oldest.offset, len(partition.tracker)
        if window < _LEAST_WINDOW or partition.gate is not Gate.OPEN:
            return False
        shards = self.engine.handler_of(partition.topic_partition.topic).feed.shards_of(oldest)
        return window - incomplete + min(shards.behind(oldest), incomplete - 1) > _HELD_UP * window


# The event loop --------------------------------------------------------------------------------

BLOCKED_AFTER = 1.0
"""Seconds without a tick after which the event loop counts as blocked."""
_TICK_INTERVAL = 0.25
"""Seconds between two ticks."""
_BLOCKED_CHECK_INTERVAL = 0.05
"""Seconds between two checks by the thread while the loop is blocked."""
_AGAIN_AFTER = 60.0
"""Seconds before the log names the same place again: a handler may block for each record."""
_DELAY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEPS = ("_run", "_run_once")
"""Functions of the frames between the one that runs a loop and the code it calls; uvloop has none."""
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
        """The code that the thread saw blocking the loop since the last tick; empty if the log named it recently."""
        self._logged: dict[str | None, float] = {}
        """When the log last named each place."""
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        self._thread = threading.get_ident()
        self._runner = _runner(sys._getframe())  # noqa: SLF001 - documented despite its name
        due = self.ticked = time.monotonic()
        threading.Thread(target=self._watch, name="aioshard loop watch", daemon=True).start()
        try:
            while True:
                due = time.monotonic() + _TICK_INTERVAL
                await asyncio.sleep(_TICK_INTERVAL)
                self._tick(due)
        finally:
            self._tick(due)  # cancelled right after a block
            self.ticked = self._thread = self._runner = None
            self._stopped.set()

    def _tick(self, due: float) -> None:
        self.delays.add(max(time.monotonic() - due, 0.0))
        blocked_for, self.ticked = self.standing(), time.monotonic()
        seen, self._seen = self._seen, None
        if seen:
            _log("loop_resumed", "the event loop runs again after %.1f s: %s", blocked_for, seen)
        elif seen is None and blocked_for >= BLOCKED_AFTER and self._should_log(None):
            _log("loop_resumed", "the event loop was blocked for %.1f s: %s", blocked_for, _NOTHING_SEEN)

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
        stack = stack_above(self._thread, self._runner)
        place = stack.place
        if place is None:
            return None
        called = "" if stack.waits_in is None else f" in {stack.waits_in}"
        blocks = "computes or blocks without an await"
        if (task := asyncio.current_task(self._loop)) is None:
            return f"a callback, which is not a handler, {blocks}, at {place}{called}", str(place)
        name = task.get_name()
        busy = list(self._busy())
        # The second pass finds a handler that waits for a task it has created.
        found = next((pair for pair in busy if pair[1].name == name), None)
        found = found or next((pair for pair in busy if waits_for(pair[1].running, task)), None)
        if found is not None:
            handler, worker = found
            return f"handler {handler} {blocks}, with {_records(worker)}, at {place}{called}", f"{handler} {place}"
        return f"task {name!r}, which is not a handler, {blocks}, at {place}{called}", str(place)

    # The thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped.wait(max(BLOCKED_AFTER - self.standing(), _BLOCKED_CHECK_INTERVAL)):
            if self._seen is None and self.standing() >= BLOCKED_AFTER:
                self._report_block()

    def _report_block(self) -> None:
        ticked, holder = self.ticked, self.find_holder()
        if holder is None or self.ticked != ticked:
            return
        sentence, place = holder
        self._seen = ""
        if self._should_log(place):
            self._seen = sentence
            _log("loop_blocked", "the event loop has been blocked for %.1f s: %s", self.standing(), sentence)

    def _should_log(self, place: str | None) -> bool:
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
    while frame is not None and frame.f_code.co_name in _STEPS and module_of(frame) in LOOP_MODULES:
        frame = frame.f_back
    return frame
