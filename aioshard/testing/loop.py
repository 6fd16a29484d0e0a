"""An asyncio event loop with virtual time and a seeded order of steps, for fast and reproducible tests."""

import asyncio
import itertools
import math
import os
import random
import selectors
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioshard.engine.stack import waiting_place
from aioshard.errors import DeadlockError, StateError

T = TypeVar("T")

_TIME_LIMIT = 10_000.0
_BUSY_PASSES = 10_000
"""Passes within one instant after which time advances anyway, as it would in a CPU-bound process."""
_BUSY_TICK = 0.001
_BUSY_LIMIT = 300_000
_THREAD_POLL_INTERVAL = 0.01
_THREAD_PATIENCE = 0.5
_THREAD_LIMIT = 10.0


_NO_SOCKETS = (
    "a loop with virtual time has no sockets, pipes or subprocesses, because they take real time: run code that needs "
    "them with asyncio.run"
)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time: when nothing is ready, it jumps to the next timer.

    An hour of `asyncio.sleep` takes no time, and a timeout fires exactly when it is due. If nothing is ready, no timer
    is set and no thread is working, nothing can ever happen again: the loop raises a `DeadlockError` instead of
    hanging.

    With a seed, the order of steps is permuted, to find races. In each pass, asyncio runs the callbacks that were
    ready when the pass began. Within a pass, **the steps of different tasks are shuffled; all other callbacks keep
    their relative order**, because asyncio promises it for `call_soon` and relies on it internally, and nothing moves
    to another pass. Correct code cannot depend on the permuted part, which is the order in which ready tasks run. The
    same seed gives the same order of steps, unless the code under test has another source of randomness: sets are
    iterated in hash order, which for strings depends on `PYTHONHASHSEED`. The order in which a set of tasks was woken
    or cancelled does not matter. Without a seed, the order is asyncio's.

    Threads (`asyncio.to_thread`, `run_in_executor`, `anyio.to_thread`) work in real time: the loop does not jump
    while a thread is busy, unless it has been busy for half a second and nothing else happens. Sockets, pipes and
    subprocesses are refused.

    Invariants:
        * `time` never goes back, and advances only while nothing is ready. The exception is a program that never
          rests: after 10,000 passes within one instant, each further pass takes a millisecond.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        on_step: Callable[[], None] | None = None,
        time_limit: float = _TIME_LIMIT,
    ) -> None:
        """Create a loop at time 0.

        Args:
            seed: Permutes the steps of tasks; None keeps asyncio's order.
            on_step: Called after every callback, to check invariants; an exception ends the run, and it is not called
                again.
            time_limit: Seconds of virtual time after which `DeadlockError` is raised: a program with a periodic timer
                never becomes idle, so only this limit ends a test that waits for an event that never comes.
        """
        self._now = 0.0
        self._time_limit = time_limit
        self._virtual = _VirtualSelector(self)
        super().__init__(self._virtual)
        self._virtual.sockets_refused = True
        self.steps = _ReadyQueue(None if seed is None else random.Random(seed), on_step)  # noqa: S311
        self._ready = self.steps
        self._executor_jobs: set[asyncio.Future[Any]] = set()
        self._closing_executor = 0

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now

    def run_in_executor(  # type: ignore[override] # typeshed's variadic signature has no spelling in 3.11
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run as asyncio does; the loop waits for it in real time."""
        job = super().run_in_executor(executor, func, *args)
        self._executor_jobs.add(job)
        job.add_done_callback(self._executor_jobs.discard)
        return job

    async def create_unix_connection(self, *_: Any, **__: Any) -> Any:
        """Refuse the connection to a worker process; otherwise only the log would say why nothing arrives."""
        raise StateError(_NO_SOCKETS)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Shut down as asyncio does, but wait for the threads in real time and ignore *timeout*."""
        self._closing_executor += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._closing_executor -= 1

    # Calls from the selector -----------------------------------------------------------

    def busy_threads(self) -> frozenset[int]:
        """Return an identifier for each job that a thread is doing for this loop now."""
        busy = {id(job) for job in self._executor_jobs}
        if self._closing_executor:
            busy.add(0)
        for thread in threading.enumerate():
            # anyio has no list of its worker threads. Each has a queue that counts a call as unfinished until its
            # result has been handed to the loop.
            calls: Any = getattr(thread, "queue", None)
            if getattr(thread, "loop", None) is self and getattr(calls, "unfinished_tasks", None):
                busy.add(id(thread))
        return frozenset(busy)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock.

        Raises:
            DeadlockError: The time limit is reached.
        """
        self._now += seconds
        if self._now > self._time_limit:
            limit = self._time_limit
            self._time_limit += _TIME_LIMIT  # The tasks cancelled now need time to end.
            raise self.stuck(
                f"the test is still waiting after {limit:g} s of virtual time; if that is too short, "
                "pass a longer time_limit to run"
            )

    def next_timer(self) -> float:
        """Return when the next timer is due; infinity without one."""
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        return timers[0].when() if timers else math.inf

    def stuck(self, sentence: str) -> DeadlockError:
        """Create an error with *sentence* and the place where every task waits."""
        lines = [f"  task {task.get_name()!r} waits at {waiting_place(task)}" for task in asyncio.all_tasks(self)]
        return DeadlockError("\n".join([sentence, *sorted(lines)]))


class _ReadyQueue(deque[asyncio.Handle]):
    """The loop's queue of ready callbacks, which hands them out permuted, pass by pass.

    `BaseEventLoop._run_once` pops as many callbacks from the left as there were when its pass began, while new ones
    are appended on the right. So exactly that many on the left are permuted in place: after an error in the middle of
    a pass, the others are still where asyncio expects them.
    """

    def __init__(self, rng: random.Random | None, on_step: Callable[[], None] | None) -> None:
        super().__init__()
        self._rng = rng
        self._on_step = on_step
        self._remaining = 0
        self._running = False
        self._lanes: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._ages = itertools.count(1)

    def popleft(self) -> asyncio.Handle:
        self._finish_step()
        if self._remaining == 0:
            self._remaining = len(self)
            if self._rng is not None and self._remaining > 1:
                self._permute(self._rng)
        handle = super().popleft()
        self._remaining -= 1
        self._running = True
        return handle

    def end_pass(self) -> None:
        self._remaining = 0
        self._finish_step()

    def _finish_step(self) -> None:
        if not self._running:
            return
        self._running = False
        if self._on_step is not None:
            on_step = self._on_step
            self._on_step = None
            on_step()
            self._on_step = on_step

    def _permute(self, rng: random.Random) -> None:
        lanes: dict[int, deque[asyncio.Handle]] = defaultdict(deque)
        for _ in range(self._remaining):
            handle = super().popleft()
            lanes[self._lane(handle)].append(handle)
        turns = [lane for lane in sorted(lanes) for _ in lanes[lane]]
        rng.shuffle(turns)
        self.extendleft([lanes[lane].popleft() for lane in turns][::-1])

    def _lane(self, handle: asyncio.Handle) -> int:
        """Return the lane within which order is kept: one per task, by age, and one for everything else.

        Lanes are not numbered by wake-up order: when a set of tasks or waiters is cancelled or woken, that order is
        the iteration order of the set.
        """
        task = getattr(getattr(handle, "_callback", None), "__self__", None)
        if not isinstance(task, asyncio.Task):
            return 0
        return self._lanes.setdefault(task, next(self._ages))


class _VirtualSelector(selectors.DefaultSelector):
    """Advances the clock at the point where the loop would wait for sockets."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self.sockets_refused = False
        self._loop = loop
        self._busy_passes = 0
        self._waited = 0.0
        self._waited_for: frozenset[int] = frozenset()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.sockets_refused:
            raise StateError(_NO_SOCKETS)
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.steps.end_pass()
        if timeout is not None and timeout <= 0:
            self._note_busy_pass()
            return super().select(0)
        self._busy_passes = 0
        events, busy = self._wait_for_threads(forever=timeout is None)
        if events:
            self._waited = 0.0
            return events
        if timeout is None or math.isinf(self._loop.next_timer()):
            hung = f", and a thread did not end within {_THREAD_LIMIT:g} s" if busy else ""
            raise self._loop.stuck(f"nothing can proceed: no callback is ready and no timer is set{hung}")
        self._loop.pass_time(timeout)
        return []

    def _note_busy_pass(self) -> None:
        self._busy_passes += 1
        if self._busy_passes > _BUSY_LIMIT:
            self._busy_passes = 0
            raise self._loop.stuck(f"the program never rests: {_BUSY_LIMIT} passes without waiting for anything")
        if self._busy_passes > _BUSY_PASSES:
            self._loop.pass_time(_BUSY_TICK)

    def _wait_for_threads(self, *, forever: bool) -> tuple[list[tuple[selectors.SelectorKey, int]], frozenset[int]]:
        """Wait in real time while threads work, but not again for the same ones if they did not end in time.

        Returns the events that woke the loop, if any, and the work that is still busy.
        """
        while True:
            # The order matters: a thread that ends after it was seen idle has already woken the loop.
            busy = self._loop.busy_threads()
            events = super().select(0)
            if busy != self._waited_for:
                self._waited_for = busy
                self._waited = 0.0
            patience = (_THREAD_LIMIT if forever else _THREAD_PATIENCE) - self._waited
            if events or not busy or patience <= 0:
                return events, busy
            # In short steps: a thread may seem busy after delivering its result, and nothing wakes us when it is idle.
            step = min(patience, _THREAD_POLL_INTERVAL)
            events = super().select(step)
            self._waited += step  # not by the clock: time in which the process was suspended does not count
            if events:
                return events, busy


def run(
    main: Coroutine[Any, Any, T],
    *,
    seed: int | None = None,
    on_step: Callable[[], None] | None = None,
    time_limit: float = _TIME_LIMIT,
) -> T:
    """Run a coroutine on a new `VirtualTimeLoop`, as `asyncio.run` does, and return its result.

    Any exception carries a note with the seed, so that you can reproduce the failure. If sets of strings matter, as
    with topics in most programs, you also need a fixed `PYTHONHASHSEED`.

    Args:
        main: The test.
        seed: Permutes the steps of tasks, and seeds the `random` module during the run; try several.
        on_step: Called after every callback; an exception ends the run.
        time_limit: Seconds of virtual time after which the run is aborted.

    Raises:
        DeadlockError: Nothing can proceed, or the time limit is reached.
        BaseException: Any exception from *main* or *on_step*.

    Example:
        >>> async def an_hour() -> float:
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> run(an_hour())
        3600.0
    """
    runner = asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed=seed, on_step=on_step, time_limit=time_limit))
    random_state = random.getstate()
    if seed is not None:
        random.seed(seed)
    try:
        try:
            result = runner.run(main)
        except BaseException as error:
            try:
                runner.close()
            except Exception as close_error:  # noqa: BLE001 - an error while closing must not hide the cause
                error.add_note(f"When its tasks were cancelled afterwards: {close_error}")
            raise
        runner.close()
    except BaseException as error:
        if seed is not None:
            error.add_note(
                f"The order of steps is repeated with seed={seed} and "
                f"PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', 'random')}."
            )
        raise
    finally:
        random.setstate(random_state)
    return result
