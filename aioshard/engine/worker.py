"""Base of the workers: coroutines that take deliveries, run the handler and settle the outcome."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from aioshard.engine.epoch import Delivery
from aioshard.engine.failing.settling import Settlement
from aioshard.errors import AttemptTimeoutError, CancelledRunError

__all__ = ["RUN_AHEAD", "Asked", "Divert", "Ending", "Invoke", "Worker"]

Invoke = Callable[[Delivery], Awaitable[object]]
"""Runs one attempt."""

Divert = Callable[[Delivery], None]
"""Inspects each delivery before it starts, and may assign it a detour."""

RUN_AHEAD = 128
"""Number of records that workers process without yielding to the event loop, if handlers never suspend.

Heartbeats and other tasks wait for that many handler runs."""

_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Asked:
    """Requests to a worker, as bits; 0 means none, so the hot path checks all of them with one test.

    Plain integers: testing an `enum.Flag` costs a call per record.
    """

    NOTHING: Final = 0
    INTERRUPT: Final = 1
    """End the run; the record stays incomplete."""
    TIME_OUT: Final = 2
    """End the run; the attempt has failed."""
    RETIRE: Final = 4
    """End the worker after its current run, or immediately if there is none."""


class Ending(NamedTuple):
    """Verdict on a run that raised."""

    failure: BaseException | None
    """Why its attempt failed; None if it was cancelled and does not count as an attempt."""
    interrupted: bool
    """Whether its cancellation was requested, so that the next run is a repetition."""
    fatal: bool
    """Whether the worker ends too: it is being cancelled, or the interpreter is exiting."""


class Worker(ABC):
    """Coroutine that serves the shards of a handler.

    Cancelling the run (`interrupt`, `time_out`) does not cancel the worker: the handler sees a `CancelledError`, the
    record stays incomplete (I8), and the worker lives on. A handler that swallows the cancellation keeps its worker
    and its shard until it returns, and its result is ignored.

    Invariants:
        * A record completes only if its handler returned and its run had not been cancelled.
        * While `delivery` is set, its shard key is occupied.
    """

    def __init__(
        self, name: str, *, settlement: Settlement, clock: Callable[[], float], timeout: float | None = None
    ) -> None:
        self.name = name
        self.delivery: Delivery | None = None
        """The delivery it runs; the first one of a batch."""
        self.running: Awaitable[object] | None = None
        """The awaitable of the current run; shows where a handler hangs."""
        self.started = 0.0
        """Loop time at which the current attempt began."""
        self.asked: int = Asked.NOTHING
        """Pending requests (see `Asked`), to the current run or to the worker itself."""
        self.timeout = timeout
        self._task: asyncio.Task[object] | None = None
        self._asked_before = 0
        self._requests = 0
        self._settlement = settlement
        self._clock = clock

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled or retired."""

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """Deliveries that the worker runs now."""
        return () if self.delivery is None else (self.delivery,)

    def _note_failed(self, delivery: Delivery) -> None:
        """Count the duration of a failed attempt, of one record or a whole batch, among the run durations."""
        delivery.epoch.counts.durations.add(max(self._clock() - self.started, 0.0))

    @property
    def cancelled(self) -> bool:
        """Whether the current run was cancelled but has not ended."""
        return self.delivery is not None and bool(self.asked & (Asked.INTERRUPT | Asked.TIME_OUT))

    def retire(self) -> None:
        """Ask the worker to end after its current run; wake an idle worker with `Shards.wake`."""
        self.asked |= Asked.RETIRE

    def stay(self) -> None:
        """Undo `retire`; too late for a worker whose task has ended."""
        self.asked &= ~Asked.RETIRE

    @property
    def retires(self) -> bool:
        """Whether the worker will end soon or has ended."""
        return bool(self.asked & Asked.RETIRE)

    def interrupt(self) -> None:
        """Cancel the current run; its record stays incomplete. Does nothing between runs."""
        self._ask(Asked.INTERRUPT)

    def overdue(self, now: float) -> bool:
        """Return whether the handler has exceeded its timeout and was not cancelled yet."""
        delivery = self.delivery
        return (
            self.timeout is not None
            and delivery is not None
            and delivery.detour is None
            and not self.asked & (Asked.INTERRUPT | Asked.TIME_OUT)
            and now - self.started > self.timeout
        )

    def time_out(self) -> None:
        """Cancel the current run; its attempt has failed."""
        self._ask(Asked.TIME_OUT)

    def _ask(self, what: int) -> None:
        if self.delivery is None or self._task is None or self.asked & what:
            return
        if not self._requests:
            self._asked_before = self._task.cancelling()
        self.asked |= what
        self._requests += 1
        self._task.cancel()

    def _judge(self, error: BaseException) -> Ending:
        """Decide whether a run that raised has failed, was cancelled, or ends the worker too."""
        task = self._task
        assert task is not None  # noqa: S101 - set by run
        asked = self.asked & (Asked.INTERRUPT | Asked.TIME_OUT)
        if asked:
            ending = self._take_back_requests() or isinstance(error, _EXITS)
            if asked & Asked.INTERRUPT or ending:
                return Ending(None, interrupted=True, fatal=ending)
            return Ending(AttemptTimeoutError(self.timeout or 0.0), interrupted=False, fatal=False)
        if isinstance(error, _EXITS) or (isinstance(error, asyncio.CancelledError) and task.cancelling()):
            return Ending(None, interrupted=False, fatal=True)
        self._forget_what_the_handler_asked()
        failure = CancelledRunError() if isinstance(error, asyncio.CancelledError) else error
        return Ending(failure, interrupted=False, fatal=False)

    def _take_back_requests(self) -> bool:
        """Undo the requested cancellations; return whether the worker itself is being cancelled as well."""
        assert self._task is not None  # noqa: S101 - set by run
        self.asked &= Asked.RETIRE
        left = self._task.cancelling()
        for _ in range(self._requests):
            left = self._task.uncancel()
        self._requests = 0
        ending = left > self._asked_before
        if not ending:
            self._forget_what_the_handler_asked()
        return ending

    def _forget_what_the_handler_asked(self) -> None:
        """Undo cancellations that a handler requested for its task and left pending, as old timeout libraries do.

        Otherwise the next `CancelledError` that a handler raises would look like a cancellation of the worker.
        """
        assert self._task is not None  # noqa: S101 - set by run
        while self._task.cancelling():
            self._task.uncancel()
