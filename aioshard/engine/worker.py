"""N coroutines that take deliveries, run the handler and settle the outcome."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from aioshard.core.retry import Retry
from aioshard.engine.epoch import Block, Delivery, Gate
from aioshard.engine.shards import Shards
from aioshard.errors import CancelledRunError
from aioshard.records import Record

__all__ = ["Counters", "Invoke", "Worker"]

logger = logging.getLogger("aioshard.engine.worker")

Invoke = Callable[[Delivery], Awaitable[object]]
"""Runs one attempt."""

_RUN_AHEAD = 128
"""Records that workers process without letting the loop turn, while handlers never suspend. Heartbeats
and other tasks wait for as long as that many handlers take."""

_WARNING_INTERVAL = 1.0
"""Seconds in which a handler's failed attempts give one warning; the others are logged at DEBUG."""
_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Counters:
    """What happened to the records of one handler; owned by the event loop, written by its workers."""

    __slots__ = ("_warned_at", "processed", "replayed", "retried")

    def __init__(self) -> None:
        self.processed = 0
        self.replayed = 0
        """Runs of records that had run before and were cancelled."""
        self.retried = 0
        self._warned_at = -_WARNING_INTERVAL

    def may_warn(self, now: float) -> bool:
        """Whether a failed attempt is worth a warning: while a back end is down, one in a while says it all."""
        if now - self._warned_at < _WARNING_INTERVAL:
            return False
        self._warned_at = now
        return True


class Worker:
    """One coroutine that serves the shards of a handler.

    Cancelling the run (`interrupt`) is not cancelling the worker: the handler sees a
    `CancelledError`, the record stays incomplete (I8), the worker lives on. A handler that swallows the
    cancellation keeps its worker and its shard until it returns, and its result counts for nothing.

    Invariants:
        * A record completes only when its handler returned and nobody had asked for its run to end.
        * While `delivery` is set, its shard key is occupied.
    """

    def __init__(
        self,
        name: str,
        shards: Shards,
        *,
        call: Callable[[Record], Awaitable[object]] | None,
        invoke: Invoke,
        retry: Retry,
        counters: Counters,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Make a worker; `run` is its task.

        Args:
            name: For logs and explanations.
            shards: Where the deliveries are.
            call: The handler itself where it takes nothing but the record, which spares a call; else None.
            invoke: Runs an attempt in every other case.
            retry: What follows a failed attempt.
            counters: Shared by the workers of a handler.
            clock: Loop time.
            chance: Random numbers from 0 to 1, for the jitter.
        """
        self.name = name
        self.delivery: Delivery | None = None
        self.running: Awaitable[object] | None = None
        """What the worker awaits; shows where a handler hangs."""
        self.started = 0.0
        """Loop time at which the current attempt began."""
        self.interrupted = False
        """Whether the current run was asked to end."""
        self._task: asyncio.Task[object] | None = None
        self._asked_before = 0
        self._shards = shards
        self._call = call
        self._invoke = invoke
        self._retry = retry
        self._counters = counters
        self._clock = clock
        self._chance = chance

    def interrupt(self) -> None:
        """Ask the current run to end; its record stays incomplete. Does nothing between runs."""
        if self.delivery is not None and not self.interrupted and self._task is not None:
            self.interrupted = True
            self._asked_before = self._task.cancelling()
            self._task.cancel()

    async def run(self) -> None:  # noqa: C901 - the hot path: no calls
        """Serve until cancelled."""
        self._task = asyncio.current_task()
        shards, call, invoke, clock, counters = self._shards, self._call, self._invoke, self._clock, self._counters
        take, next_after = shards.take, shards.next_after
        assert self._task is not None  # noqa: S101 - this is a task
        cancelling = self._task.cancelling
        ahead = 0
        delivery = take()
        while True:
            if delivery is None:
                await shards.wait()
                delivery = take()
                continue
            epoch = delivery.epoch
            if delivery.offset > epoch.highest_started:  # noqa: PLR1730 - max() costs a call per record
                epoch.highest_started = delivery.offset
            if delivery.cancelled:
                self._runs_again(delivery)
            delivery.starts += 1
            self.delivery = delivery
            self.started = clock()
            try:
                self.running = running = call(delivery.record) if call is not None else invoke(delivery)
                await running
            except BaseException as error:  # noqa: BLE001 - cancellation and exit are told apart there
                delivery = self._ended_badly(delivery, error)
                continue
            if self.interrupted:
                delivery = self._swallowed_cancellation(delivery)
                continue
            if cancelling():
                self._forget_what_the_handler_asked()
            self.delivery = self.running = None
            if epoch.complete(delivery):
                counters.processed += 1
            delivery = next_after(delivery)
            ahead += 1
            if ahead >= _RUN_AHEAD:
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
            return self._shards.take()
        return delivery

    # What is not success --------------------------------------------------------

    def _ended_badly(self, delivery: Delivery, error: BaseException) -> Delivery | None:
        """The handler raised: settle it, and return what the worker does next.

        Raises:
            BaseException: *error* itself, when it is the worker that is being cancelled, or the
                interpreter that is asked to exit.
        """
        self.delivery = self.running = None
        task = self._task
        assert task is not None  # noqa: S101 - set by run
        if self.interrupted:
            ending = self._end_interruption(delivery)
            self._shards.again(delivery)
            if ending or isinstance(error, _EXITS):
                raise error
            return self._shards.take()
        if isinstance(error, _EXITS) or (isinstance(error, asyncio.CancelledError) and task.cancelling()):
            self._shards.again(delivery)
            raise error
        self._forget_what_the_handler_asked()
        if isinstance(error, asyncio.CancelledError):
            return self._failed(delivery, CancelledRunError())
        return self._failed(delivery, error)

    def _swallowed_cancellation(self, delivery: Delivery) -> Delivery | None:
        """The handler returned although its run was cancelled: that completes nothing (I8)."""
        self.delivery = self.running = None
        ending = self._end_interruption(delivery)
        logger.warning("the handler of %r swallowed its cancellation; the record stays incomplete", delivery)
        self._shards.again(delivery)
        if ending:
            raise asyncio.CancelledError
        return self._shards.take()

    def _runs_again(self, delivery: Delivery) -> None:
        delivery.cancelled = False
        self._counters.replayed += 1

    def _end_interruption(self, delivery: Delivery) -> bool:
        """Take back what `interrupt` asked for; returns whether the worker is being cancelled besides."""
        assert self._task is not None  # noqa: S101 - set by run
        self.interrupted = False
        delivery.cancelled = True
        ending = self._task.uncancel() > self._asked_before
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

    def _failed(self, delivery: Delivery, error: BaseException) -> Delivery | None:
        """An attempt failed: another one later, or the shard halts."""
        if delivery.epoch.gate is Gate.ENDED:
            return self._shards.next_after(delivery)
        text = f"{type(error).__name__}: {_message_of(error)}"
        delivery.failures += 1
        delay = self._retry.delay(error, delivery.failures, self._chance())
        if delay is None:
            self._shards.halt(delivery, Block(halted=True, error=text, since=self._clock()))
            logger.error(
                "record %r failed %d time(s) and halts its shard: its partition is not committed past it (%s)",
                delivery,
                delivery.failures,
                text,
                exc_info=error,
            )
        else:
            self._counters.retried += 1
            self._shards.retry(delivery, Block(halted=False, error=text, since=self._clock()), delay)
            level = logging.WARNING if self._counters.may_warn(self._clock()) else logging.DEBUG
            message = (
                "record %r failed attempt %d and runs again in %.2f s (%s); %d attempts of its handler failed so far"
            )
            logger.log(level, message, delivery, delivery.failures, delay, text, self._counters.retried)
        return self._shards.take()


def _message_of(error: BaseException) -> str:
    """What an exception says; some of those that users write cannot say it, and that must not end the worker."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - the user's code; the record failed and nothing else
        return f"its message cannot be shown ({type(failure).__name__})"
