"""Workers that run the handler for one record at a time."""

import asyncio
from collections.abc import Awaitable, Callable

from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failing.settling import Settlement
from aioshard.engine.outcomes import Detour, Outcome
from aioshard.engine.shards import Shards
from aioshard.engine.timing import AT_ONCE, RunTimes
from aioshard.engine.worker import RUN_AHEAD, Asked, Divert, Invoke, Worker
from aioshard.errors import SwallowedCancellationError
from aioshard.records import Record

__all__ = ["RecordWorker"]


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
        """Create a worker; `run` is its task.

        Args:
            name: Name in logs and explanations.
            shards: Shards to serve.
            call: The handler itself if it takes only the record, which saves a call; else None.
            invoke: Runs an attempt in every other case.
            settlement: Handles failed attempts.
            clock: Returns the loop time.
            timeout: Seconds that an attempt may take; checked from outside through `overdue`.
            divert: Inspects each delivery first; None if nothing can be diverted before it has failed.
        """
        super().__init__(name, settlement=settlement, clock=clock, timeout=timeout)
        self._shards = shards
        self._call = call
        self._invoke = invoke
        self._divert = divert
        self._times = RunTimes()

    async def run(self) -> None:  # noqa: C901, PLR0912, PLR0915 - the hot path: no calls
        """Serve until cancelled or retired."""
        self._task = asyncio.current_task()
        shards, call, invoke, clock, divert = self._shards, self._call, self._invoke, self._clock, self._divert
        take, next_after, times = shards.take, shards.next_after, self._times
        assert self._task is not None  # noqa: S101 - this is a task
        cancelling = self._task.cancelling
        ahead, due = 0, AT_ONCE
        epoch: Epoch | None = None
        delivery = take()
        while True:
            if delivery is None:
                due = times.close(epoch, self.started, clock())
                if self.asked:  # between two runs, only `retire` can set it
                    return
                await shards.wait()
                delivery = self._take()
                continue
            now = clock()
            if now >= due:
                due = times.turn(epoch, self.started, now, delivery)
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            if divert is not None:
                divert(delivery)
            if delivery.aside:
                if delivery.detour is None:
                    self._runs_again(delivery)
                if delivery.aside:
                    due = times.cut(now)
                    delivery = await self._take_aside(delivery)
                    continue
            delivery.starts += 1
            self.delivery = delivery
            self.started = now
            try:
                self.running = running = call(delivery.record) if call is not None else invoke(delivery)
                await running
            except BaseException as error:  # noqa: BLE001 - _judge tells cancellation and exit apart
                due, delivery = AT_ONCE, self._ended_badly(delivery, error)
                continue
            if self.asked:
                due, delivery = AT_ONCE, self._returned_although_asked(delivery)
                continue
            if cancelling():
                self._forget_what_the_handler_asked()
            self.delivery = self.running = None
            if epoch.complete(delivery):
                epoch.counts.processed += 1
            delivery = next_after(delivery)
            ahead += 1
            if ahead >= RUN_AHEAD:
                ahead = 0
                if delivery is not None:
                    now = clock()
                    if now >= due:
                        due = times.turn(epoch, self.started, now, delivery)
                    delivery = await self._let_the_loop_turn(delivery)
                    due += self._back_after(now)

    def _back_after(self, now: float) -> float:
        """Return the seconds since the worker yielded, and exclude them from the last run: shift its start by them."""
        away = self._clock() - now
        self._times.since += away
        self.started += away
        return away

    async def _let_the_loop_turn(self, delivery: Delivery) -> Delivery | None:
        """Yield to the event loop before *delivery* runs; requeue it if its gate closed meanwhile."""
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

    async def _take_aside(self, delivery: Delivery) -> Delivery | None:
        """Process a delivery that needs more than a handler run; return the worker's next delivery."""
        if delivery.detour is not None:
            return await self._take_detour(delivery)
        assert delivery.then is not None  # noqa: S101 - the only other reason to be aside
        return await self._run_and_then(delivery, delivery.then)

    async def _take_detour(self, delivery: Delivery) -> Delivery | None:
        """Take a delivery's detour in place of running the handler; return the worker's next delivery."""
        assert delivery.detour is not None  # noqa: S101 - checked by the caller
        settlement = self._settlement
        if not settlement.begin_detour(delivery):
            settlement.hold_back(delivery, self._shards)
            return self._shards.take()
        self.delivery = delivery
        self.started = self._clock()
        try:
            self.running = running = delivery.detour.take(delivery)
            outcome = await running
        except BaseException as error:  # noqa: BLE001 - _judge tells cancellation and exit apart
            settlement.end_detour(delivery, succeeded=False)
            return self._ended_badly(delivery, error)
        settlement.end_detour(delivery, succeeded=True)
        if self.asked & Asked.INTERRUPT:
            return self._swallowed_cancellation(delivery)
        return self._completed(delivery, outcome)

    async def _run_and_then(self, delivery: Delivery, then: Detour) -> Delivery | None:
        """Run the handler of a delivery that completes only after a detour; return it again to take that detour."""
        self.delivery = delivery
        self.started = self._clock()
        try:
            self.running = running = self._invoke(delivery)
            await running
        except BaseException as error:  # noqa: BLE001 - _judge tells cancellation and exit apart
            return self._ended_badly(delivery, error)
        if self.asked & (Asked.INTERRUPT | Asked.TIME_OUT):
            return self._returned_although_asked(delivery)
        self.delivery = self.running = None
        self._times.alone(delivery.epoch.counts, self._clock() - self.started)
        self._forget_what_the_handler_asked()
        delivery.divert(then)
        return delivery

    def _completed(self, delivery: Delivery, outcome: Outcome) -> Delivery | None:
        self.delivery = self.running = None
        delivery.outcome = outcome
        if delivery.epoch.complete(delivery):
            delivery.epoch.counts.count(outcome)
        return self._next_after(delivery)

    def _take(self) -> Delivery | None:
        return None if self.asked else self._shards.take()

    def _next_after(self, delivery: Delivery) -> Delivery | None:
        if not self.asked:
            return self._shards.next_after(delivery)
        self._shards.release(delivery)
        return None

    # Failures and cancellations -------------------------------------------------

    def _ended_badly(self, delivery: Delivery, error: BaseException) -> Delivery | None:
        """Settle a run that raised; return the worker's next delivery.

        Raises:
            BaseException: *error* itself, if the worker is being cancelled or the interpreter is exiting.
        """
        self.delivery = self.running = None
        self._times.cut(self.started)
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
        """Requeue a delivery whose handler returned although its run was cancelled: it is not complete (I8)."""
        self._times.cut(self.started)
        self.delivery = self.running = None
        ending = self._take_back_requests()
        delivery.cancelled = delivery.aside = True
        self._settlement.outlived(delivery, (delivery,))
        self._shards.again(delivery)
        if ending:
            raise asyncio.CancelledError
        return self._take()

    def _swallowed_time_out(self, delivery: Delivery) -> Delivery | None:
        """Halt a delivery whose handler returned although its attempt had timed out: its effects are unknown."""
        self._times.cut(self.started)
        self._note_failed(delivery)
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
        """Settle a failed attempt (retry, detour or halt); return the worker's next delivery."""
        if delivery.detour is None:
            self._note_failed(delivery)
        if delivery.epoch.gate is Gate.ENDED:
            return self._next_after(delivery)
        if self._settlement.failed(delivery, error, self._shards):
            return delivery
        return self._take()
