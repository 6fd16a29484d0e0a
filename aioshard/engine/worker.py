"""N coroutines that take deliveries, run the handler and settle the outcome."""

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
"""Looks at each delivery before it starts, and may give it a detour."""

RUN_AHEAD = 128
"""Records that workers process without letting the loop turn, while handlers never suspend. Heartbeats
and other tasks wait for as long as that many handlers take."""

_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Asked:
    """What somebody wants of a worker, as bits; 0 is nothing, so that the hot path has one question for all.

    Plain numbers: asking an `enum.Flag` whether it is anything costs a call per record.
    """

    NOTHING: Final = 0
    INTERRUPT: Final = 1
    """End the run; the record stays incomplete."""
    TIME_OUT: Final = 2
    """End the run; the attempt has failed."""
    RETIRE: Final = 4
    """End the worker when its run has ended, or at once when there is none."""


class Ending(NamedTuple):
    """What a run that raised has come to."""

    failure: BaseException | None
    """Why its attempt failed; None when it was cancelled, and was no attempt."""
    interrupted: bool
    """Whether its cancellation was asked for, so that the next run is a repetition."""
    fatal: bool
    """Whether the worker ends too: it is being cancelled, or the interpreter is asked to exit."""


class Worker(ABC):
    """One coroutine that serves the shards of a handler.

    Cancelling the run (`interrupt`, `time_out`) is not cancelling the worker: the handler sees a
    `CancelledError`, the record stays incomplete (I8), the worker lives on. A handler that swallows the
    cancellation keeps its worker and its shard until it returns, and its result counts for nothing.

    Invariants:
        * A record completes only when its handler returned and nobody had asked for its run to end.
        * While `delivery` is set, its shard key is occupied.
    """

    def __init__(
        self, name: str, *, settlement: Settlement, clock: Callable[[], float], timeout: float | None = None
    ) -> None:
        self.name = name
        self.delivery: Delivery | None = None
        """What it runs; of a batch, the first."""
        self.running: Awaitable[object] | None = None
        """What the worker awaits; shows where a handler hangs."""
        self.started = 0.0
        """Loop time at which the current attempt began."""
        self.asked: int = Asked.NOTHING
        """What is wanted of the worker, by its current run or for good."""
        self.timeout = timeout
        self._task: asyncio.Task[object] | None = None
        self._asked_before = 0
        self._requests = 0
        self._settlement = settlement
        self._clock = clock

    @abstractmethod
    async def run(self) -> None:
        """Serve until cancelled, or retired."""

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """What the worker runs now."""
        return () if self.delivery is None else (self.delivery,)

    def _note_failed(self, delivery: Delivery) -> None:
        """An attempt has failed, or all of a batch: how long it took belongs to how long runs take."""
        delivery.epoch.counts.durations.add(max(self._clock() - self.started, 0.0))

    @property
    def cancelled(self) -> bool:
        """Whether the current run was told to end and has not."""
        return self.delivery is not None and bool(self.asked & (Asked.INTERRUPT | Asked.TIME_OUT))

    def retire(self) -> None:
        """Ask the worker to end after its current run; one that waits has to be woken (`Shards.wake`)."""
        self.asked |= Asked.RETIRE

    def stay(self) -> None:
        """Take `retire` back; too late for a worker whose task has ended."""
        self.asked &= ~Asked.RETIRE

    @property
    def retires(self) -> bool:
        """Whether the worker ends soon, or has."""
        return bool(self.asked & Asked.RETIRE)

    def interrupt(self) -> None:
        """Ask the current run to end; its record stays incomplete. Does nothing between runs."""
        self._ask(Asked.INTERRUPT)

    def overdue(self, now: float) -> bool:
        """Whether the handler has run for longer than its time-out, and was not told so yet."""
        delivery = self.delivery
        return (
            self.timeout is not None
            and delivery is not None
            and delivery.detour is None
            and not self.asked & (Asked.INTERRUPT | Asked.TIME_OUT)
            and now - self.started > self.timeout
        )

    def time_out(self) -> None:
        """Ask the current run to end; its attempt has failed."""
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
        """Find out whether a run that raised has failed, was cancelled, or takes the worker with it."""
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
        """Take back the cancellations that were asked for; returns whether the worker is being cancelled besides."""
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
        """Take back what a handler asked of its own task, as time-outs of older libraries do, and left so.

        Left in place it would make the next cancellation that a handler raises look like one of the worker.
        """
        assert self._task is not None  # noqa: S101 - set by run
        while self._task.cancelling():
            self._task.uncancel()
