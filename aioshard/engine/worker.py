"""N coroutines that take deliveries, run the handler and settle the outcome."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.failing.settling import Settlement
from aioshard.engine.outcomes import Detour, Outcome
from aioshard.engine.shards import Shards
from aioshard.errors import AttemptTimeoutError, CancelledRunError, SwallowedCancellationError
from aioshard.records import Record

__all__ = ["RUN_AHEAD", "Asked", "Divert", "Ending", "Invoke", "RecordWorker", "Worker"]

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


class RecordWorker(Worker):
    """Runs the handler for one record at a time."""

    def __init__(
        self,
        name: str,
        shards: Shards,
        *,
        call: Callable[[Record], Awaitable[object]] | None,
        invoke: Invoke,
        settlement: Settlement,
        clock: Callable[[], float],
        timeout: float | None = None,
        divert: Divert | None = None,
    ) -> None:
        """Make a worker; `run` is its task.

        Args:
            name: For logs and explanations.
            shards: Where the deliveries are.
            call: The handler itself where it takes nothing but the record, which spares a call; else None.
            invoke: Runs an attempt in every other case.
            settlement: What follows a failed attempt.
            clock: Loop time.
            timeout: Seconds that an attempt may take; somebody else watches them (`overdue`).
            divert: Looks at each delivery first; None where nothing can be diverted before it has failed.
        """
        super().__init__(name, settlement=settlement, clock=clock, timeout=timeout)
        self._shards = shards
        self._call = call
        self._invoke = invoke
        self._divert = divert

    async def run(self) -> None:  # noqa: C901, PLR0912 - the hot path: no calls
        """Serve until cancelled, or retired."""
        self._task = asyncio.current_task()
        shards, call, invoke, clock, divert = self._shards, self._call, self._invoke, self._clock, self._divert
        take, next_after, counters = shards.take, shards.next_after, self._settlement.counters
        assert self._task is not None  # noqa: S101 - this is a task
        cancelling = self._task.cancelling
        ahead = 0
        delivery = take()
        while True:
            if delivery is None:
                if self.asked:  # to retire: between two runs, nothing else is asked
                    return
                await shards.wait()
                delivery = self._take()
                continue
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            if divert is not None:
                divert(delivery)
            if delivery.aside:
                if delivery.detour is not None:
                    delivery = await self._take_detour(delivery)
                    continue
                self._runs_again(delivery)
                if delivery.then is not None:
                    delivery = await self._run_and_then(delivery, delivery.then)
                    continue
            delivery.starts += 1
            self.delivery = delivery
            self.started = clock()
            try:
                self.running = running = call(delivery.record) if call is not None else invoke(delivery)
                await running
            except BaseException as error:  # noqa: BLE001 - cancellation and exit are told apart there
                delivery = self._ended_badly(delivery, error)
                continue
            if self.asked:
                delivery = self._returned_although_asked(delivery)
                continue
            if cancelling():
                self._forget_what_the_handler_asked()
            self.delivery = self.running = None
            if epoch.complete(delivery):
                counters.processed += 1
            delivery = next_after(delivery)
            ahead += 1
            if ahead >= RUN_AHEAD:
                ahead = 0
                if delivery is not None:
                    delivery = await self._let_the_loop_turn(delivery)

    async def _let_the_loop_turn(self, delivery: Delivery) -> Delivery | None:
        """Yield with a delivery in hand, and give it back if its epoch closed meanwhile."""
        self._shards.yielding += 1
        try:
            await asyncio.sleep(0)
        except BaseException:
            self._shards.again(delivery)
            raise
        finally:
            self._shards.yielding -= 1
        if delivery.epoch.gate and not delivery.epoch.may_start(delivery):
            self._shards.again(delivery)
            return self._take()
        return delivery

    async def _take_detour(self, delivery: Delivery) -> Delivery | None:
        """Do what comes in place of the handler, and return what the worker does next."""
        assert delivery.detour is not None  # noqa: S101 - why we are here
        settlement = self._settlement
        if not settlement.begin_detour(delivery):
            settlement.hold_back(delivery, self._shards)
            return self._shards.take()
        self.delivery = delivery
        self.started = self._clock()
        try:
            self.running = running = delivery.detour.take(delivery)
            outcome = await running
        except BaseException as error:  # noqa: BLE001 - cancellation and exit are told apart there
            settlement.end_detour(delivery, succeeded=False)
            return self._ended_badly(delivery, error)
        settlement.end_detour(delivery, succeeded=True)
        if self.asked & Asked.INTERRUPT:
            return self._swallowed_cancellation(delivery)
        return self._completed(delivery, outcome)

    async def _run_and_then(self, delivery: Delivery, then: Detour) -> Delivery | None:
        """Run the handler of a delivery that is complete only after a detour, and return what comes next: that."""
        self.delivery = delivery
        self.started = self._clock()
        try:
            self.running = running = self._invoke(delivery)
            await running
        except BaseException as error:  # noqa: BLE001 - cancellation and exit are told apart there
            return self._ended_badly(delivery, error)
        if self.asked & (Asked.INTERRUPT | Asked.TIME_OUT):
            return self._returned_although_asked(delivery)
        self.delivery = self.running = None
        self._forget_what_the_handler_asked()
        delivery.divert(then)
        return delivery

    def _completed(self, delivery: Delivery, outcome: Outcome) -> Delivery | None:
        self.delivery = self.running = None
        delivery.outcome = outcome
        if delivery.epoch.complete(delivery):
            self._settlement.counters.count(outcome)
        return self._next_after(delivery)

    def _take(self) -> Delivery | None:
        return None if self.asked else self._shards.take()

    def _next_after(self, delivery: Delivery) -> Delivery | None:
        if not self.asked:
            return self._shards.next_after(delivery)
        self._shards.release(delivery)
        return None

    # What is not success --------------------------------------------------------

    def _ended_badly(self, delivery: Delivery, error: BaseException) -> Delivery | None:
        """The handler raised: settle it, and return what the worker does next.

        Raises:
            BaseException: *error* itself, when it is the worker that is being cancelled, or the
                interpreter that is asked to exit.
        """
        self.delivery = self.running = None
        ending = self._judge(error)
        if ending.failure is not None:
            return self._failed(delivery, ending.failure)
        if ending.interrupted:
            delivery.cancelled = delivery.aside = True
        self._shards.again(delivery)
        if ending.fatal:
            raise error
        return self._take()

    def _returned_although_asked(self, delivery: Delivery) -> Delivery | None:
        if self.asked & Asked.INTERRUPT:
            return self._swallowed_cancellation(delivery)
        if self.asked & Asked.TIME_OUT:
            return self._swallowed_time_out(delivery)
        return self._completed(delivery, Outcome.PROCESSED)

    def _swallowed_cancellation(self, delivery: Delivery) -> Delivery | None:
        """The handler returned although its run was cancelled: that completes nothing (I8)."""
        self.delivery = self.running = None
        ending = self._take_back_requests()
        delivery.cancelled = delivery.aside = True
        self._settlement.outlived(delivery)
        self._shards.again(delivery)
        if ending:
            raise asyncio.CancelledError
        return self._take()

    def _swallowed_time_out(self, delivery: Delivery) -> Delivery | None:
        """The handler returned although its attempt had timed out: nobody knows what it did, so the shard halts."""
        self.delivery = self.running = None
        ending = self._take_back_requests()
        if delivery.epoch.gate is Gate.ENDED:
            self._shards.release(delivery)
        else:
            self._settlement.swallowed(delivery, SwallowedCancellationError(self.timeout or 0.0), self._shards)
        if ending:
            raise asyncio.CancelledError
        return self._take()

    def _runs_again(self, delivery: Delivery) -> None:
        if delivery.cancelled:
            self._settlement.counters.replayed += 1
        delivery.cancelled = False
        delivery.aside = delivery.then is not None

    def _failed(self, delivery: Delivery, error: BaseException) -> Delivery | None:
        """An attempt failed: another one later, or a detour, or the shard halts."""
        if delivery.epoch.gate is Gate.ENDED:
            return self._next_after(delivery)
        if self._settlement.failed(delivery, error, self._shards):
            return delivery
        return self._take()
