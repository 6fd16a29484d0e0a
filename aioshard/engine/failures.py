"""Failure handler: retries failed deliveries, and applies the failure policy once their attempts are exhausted."""

import asyncio
import dataclasses
import logging
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

from aioshard.core.options import BreakerState, CircuitBreaker, Retry
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.log_fields import record_fields
from aioshard.engine.outcomes import Block, FailedAttempt, Outcome, Recovery
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.errors import DecodeError, HandlerError, SwallowedCancellationError
from aioshard.ports import Message
from aioshard.records import counted
from aioshard.serde.side_records import Failure, dead_letter

logger = logging.getLogger("aioshard.engine.failures")

Send = Callable[[Delivery, Message], Awaitable[int]]
"""Publishes a message for a delivery that completes after that; returns its offset, or -1 if not known yet."""

_SLOW_RECOVERY = 1.0
"""Seconds; a healthy side topic acknowledges faster."""
_HELD_BACK = 0.5
"""Seconds until a recovery that was held back is tried again; see `FailureHandler.hold_back`."""
_BACKOFF = Retry(attempts=1 << 60, initial=0.2, maximum=10.0, retry_on=(BaseException,))
"""Backoff of failed recoveries; they are never given up, because only a terminal outcome advances (I2)."""

_REPEATS_AFTER = 60.0
"""Seconds between log lines about failures of the same kind."""

_PAUSED_BY = "breaker"
_FIRST_PROBE = 0.5
_LONGEST_PROBE = 5.0
"""Seconds between probes, at first and at most: processing resumes that soon after an outage."""
_PROBE_ROOM = 16
"""Records that a paused partition takes in when all its records in flight have failed before."""


async def _skip(delivery: Delivery) -> Outcome:  # noqa: ARG001 - signature shared by all recoveries
    return Outcome.SKIPPED


def skipping(why: str) -> Recovery:
    """Return a recovery that completes a record without processing it."""
    return Recovery(f"it is skipped ({why})", _skip)


def dead_lettering(topic: str, send: Send, *, group: str, handler: str) -> Recovery:
    """Return a recovery that completes a record when its dead letter is acknowledged (I2)."""

    async def take(delivery: Delivery) -> Outcome:
        await send(delivery, dead_letter(topic, delivery.record, failure_of(delivery, group, handler)))
        return Outcome.DEAD_LETTERED

    return Recovery(f"its dead letter is written to {topic}", take)


def failure_of(delivery: Delivery, group: str, handler: str) -> Failure:
    """Describe a failed delivery for the headers of a side record."""
    failure = delivery.failure
    assert failure is not None  # noqa: S101 - only failed deliveries are diverted
    return Failure(group, handler, failure.attempts, failure.error, failure.message, time.time())


@dataclasses.dataclass(slots=True)
class _Repeats:
    """Later failures of the same kind as one that was logged."""

    since: float
    level: int
    count: int = 0
    latest: str = ""


class FailureHandler:
    """Decides about failed deliveries of one handler, for its workers. Nothing here awaits.

    Invariants:
        * In a partition that it has paused, at most one record runs besides those that were running already.
        * While such a partition is paused, a probe is due or running.
    """

    def __init__(
        self,
        retry: Retry,
        recovery: Recovery | None,
        *,
        shards: Sequence[Shards],
        counters: Counters,
        clock: Callable[[], float],
        workers: int,
        running: Callable[[], int] = int,
        breaker: CircuitBreaker | None = None,
        handler: str = "",
        group: str = "",
    ) -> None:
        """Create the failure handler.

        Args:
            retry: Retry policy for failed attempts.
            recovery: Taken for records whose attempts are exhausted; None if they halt.
            shards: Shards of the handler.
            counters: Counters of the handler.
            clock: Returns the loop time.
            workers: Number of workers of the handler.
            running: Returns how many records run now that have not failed.
            breaker: Limit on the share of such records; None means no limit.
            handler: Name of the handler, for log lines.
            group: Consumer group, for log lines.
        """
        self.counters = counters
        self._retry = retry
        self._recovery = recovery
        self._shards = shards
        self._clock = clock
        self._workers = workers
        self._running = running
        self._breaker = None if breaker is None else BreakerState(breaker)
        self.handler = handler
        self.group = group
        self._recovering: dict[Delivery, float] = {}
        """Deliveries whose recoveries workers run now, oldest first, with their start times."""
        self._recoveries_in_doubt = False
        self._why = ""
        """Why the circuit breaker opened."""
        self._repeats: dict[tuple[str, object], _Repeats] = {}
        """Failures that were logged lately, by event and origin."""
        self._traced: set[object] = set()
        """Origins whose traceback was logged."""

    # Failed attempts ------------------------------------------------------------------

    def failed(self, delivery: Delivery, error: BaseException, shards: Shards) -> bool:
        """Handle a failed attempt or a failed recovery.

        Returns:
            Whether a recovery follows immediately.
        """
        if delivery.recovery is not None:
            self._recovery_failed(delivery, delivery.recovery, error, shards)
            return False
        failure = self._add_failure(delivery, error)
        if isinstance(error, SwallowedCancellationError):  # the run timed out but returned: its effects are unknown
            self._halt(delivery, failure, error, shards)
            return False
        delay = self._retry.delay(error, delivery.failures, random.random())  # noqa: S311 - jitter
        if delay is None:
            return self._give_up(delivery, failure, error, shards)
        delivery.epoch.counts.retried += 1
        self._wait(delivery, str(failure), delay, shards)
        self._log(
            "retry",
            delivery,
            "record %r failed attempt %d and runs again in %.2f s (%s); failed attempts of its handler so far: %d",
            delivery,
            delivery.failures,
            delay,
            failure,
            self.counters.retried,
            cause=error,
            attempt=delivery.failures,
            error=failure.error,
        )
        return False

    def failed_together(
        self, deliveries: Sequence[Delivery], heads: Sequence[Delivery], error: BaseException, shards: Shards
    ) -> None:
        """Handle a failed attempt of several records together, any of which may be to blame.

        No record is given up, however often it has failed: all run again after the same delay, in smaller batches.

        Args:
            deliveries: The failed deliveries.
            heads: Those of *deliveries* that hold their shards; the others wait behind them.
            error: Exception that the attempt raised.
            shards: Shards of the deliveries.
        """
        failures = [self.failed_behind(delivery, error) for delivery in deliveries]
        first, failure = deliveries[0], failures[0]
        delay = self._retry.delay(error, first.failures, random.random()) or 0.0  # noqa: S311
        for delivery in heads:
            self._wait(delivery, str(failure), delay, shards)
        self._log(
            "retry",
            first,
            "%d records failed together, %r among them, and run again in smaller batches in %.2f s (%s)",
            len(deliveries),
            first,
            delay,
            failure,
            cause=error,
            error=failure.error,
            records=len(deliveries),
        )

    def failed_behind(self, delivery: Delivery, error: BaseException) -> FailedAttempt:
        """Count the failure of a record behind a failed one of its shard: it always runs again, after that one."""
        delivery.epoch.counts.retried += 1
        return self._add_failure(delivery, error)

    def _add_failure(self, delivery: Delivery, error: BaseException) -> FailedAttempt:
        """Record a failed attempt."""
        if not delivery.failures:
            delivery.successes_before = self.counters.processed
        delivery.failures += 1
        delivery.failure = FailedAttempt(type(error).__name__, _message_of(error), delivery.failures)
        return delivery.failure

    def outlived(self, batch: DeliveryBatch, error: BaseException) -> None:
        """Log that a run was cancelled but returned anyway; its deliveries stay incomplete."""
        self._log(
            "swallowed",
            batch.deliveries[0],
            "the handler of %r swallowed its cancellation; its records stay incomplete",
            batch,
            cause=error,
            records=len(batch.deliveries),
        )

    def unkeyed(self, delivery: Delivery, error: Exception, shards: Shards) -> None:
        """Handle a record whose sharding function failed: it cannot run in order, so no attempt is made."""
        if self._give_up(delivery, self._add_failure(delivery, error), error, shards, keyed=False):
            shards.again(delivery)

    def _wait(self, delivery: Delivery, why: str, delay: float, shards: Shards) -> None:
        shards.block(delivery, Block(halted=False, error=why, since=self._clock()), delay)

    def _log(
        self,
        event: str,
        delivery: Delivery,
        message: str,
        *values: object,
        cause: BaseException,
        level: int = logging.WARNING,
        **more: object,
    ) -> None:
        """Log the first failure of a kind with its traceback, and later ones at DEBUG; `tell_repeats` counts them."""
        text, origin, trace = message % values, _origin_of(cause), None
        repeats = self._repeats.get((event, origin))
        if repeats is None:
            self._repeats[event, origin] = _Repeats(self._clock(), level)
            if origin not in self._traced:
                self._traced.add(origin)
                trace = _traceback_of(cause)
        else:
            repeats.count, repeats.latest, level = repeats.count + 1, text, logging.DEBUG
        fields = record_fields(event, delivery, **more, handler=self.handler, group=self.group)
        logger.log(level, "%s", text, exc_info=trace, extra=fields)

    def tell_repeats(self) -> None:
        """Log, once a minute, how many failures were like one that was logged."""
        now = self._clock()
        for (event, origin), repeats in tuple(self._repeats.items()):
            if now - repeats.since >= _REPEATS_AFTER:
                del self._repeats[event, origin]
                if repeats.count:
                    self._repeats[event, origin] = _Repeats(now, repeats.level)
                    message = "%d more failures like this one in %.0f s: %s"
                    fields = {"event": event, "handler": self.handler, "group": self.group, "repeats": repeats.count}
                    logger.log(repeats.level, message, repeats.count, now - repeats.since, repeats.latest, extra=fields)

    # Exhausted attempts ---------------------------------------------------------------

    def _give_up(
        self, delivery: Delivery, failure: FailedAttempt, error: BaseException, shards: Shards, *, keyed: bool = True
    ) -> bool:
        """Apply the failure policy to a delivery that gets no further attempt.

        Args:
            delivery: The failed delivery.
            failure: Its last attempt.
            error: Exception of that attempt.
            shards: Shards of the delivery.
            keyed: Whether it has a shard key; without one, its handler must not see it, not even as a probe.

        Returns:
            Whether a recovery follows immediately.
        """
        recovery = self._recovery
        if recovery is None:
            self._halt(delivery, failure, error, shards)
            return False
        if self._breaks(delivery, failure):
            self._pause(delivery.epoch)
            if not keyed:
                delivery.divert(Recovery("it is diverted when the circuit breaker has closed", self._divert_later))
                return True
            delivery.epoch.settle(delivery)
            shards.again(delivery)
            return False
        delivery.divert(recovery)
        self._log(
            "diverted",
            delivery,
            "record %r failed after %s, and %s (%s)",
            delivery,
            counted(failure.attempts, "attempt"),
            recovery.purpose,
            failure,
            cause=error,
            attempt=failure.attempts,
            error=failure.error,
        )
        return True

    def _halt(self, delivery: Delivery, failure: FailedAttempt, error: BaseException, shards: Shards) -> None:
        """Make a delivery keep its shard until it is released."""
        shards.block(delivery, Block(halted=True, error=str(failure), since=self._clock()))
        self._log(
            "halted",
            delivery,
            "record %r failed after %s and halts (%s): later records of its key wait. Its partition is not committed "
            "past it, and takes nothing more in once its share of memory is full. Call App.retry_now or App.skip to "
            "release it; with on_failure=DeadLetter(…) or Park(…), nothing would wait",
            delivery,
            counted(failure.attempts, "attempt"),
            failure,
            cause=error,
            level=logging.ERROR,
            attempt=failure.attempts,
            error=failure.error,
        )

    def _breaks(self, delivery: Delivery, failure: FailedAttempt) -> bool:
        """Count a record that gets no further attempt; return whether the circuit breaker is open."""
        breaker = self._breaker
        if breaker is None or breaker.is_open:
            return breaker is not None
        if not breaker.fail(delivery.successes_before, failure.error, self._running):
            return False
        self._why = (
            f"the circuit breaker of handler {self.handler} is open: {counted(breaker.failed, 'record')} failed within "
            f"a window of {breaker.limits.window}, {breaker.alike} of them with {failure.error}, the latest with "
            f"{failure}; one record at a time is tried until one succeeds"
        )
        logger.warning("%s", self._why, extra={"event": "breaker_opened", "handler": self.handler, "group": self.group})
        return True

    async def _divert_later(self, delivery: Delivery) -> Outcome:
        if self._recovery is None or (self._breaker is not None and self._breaker.is_open):
            raise HandlerError(self._why)
        return await self._recovery.take(delivery)

    # Recoveries -----------------------------------------------------------------------

    def may_recover(self) -> bool:
        """Return whether a worker may start a recovery now; if not, call `hold_back`.

        While recoveries fail or take long, they may occupy at most half of the workers (but always one): a side topic
        that acknowledges nothing must not stop the records that succeed.
        """
        now = self._clock()
        self._recoveries_in_doubt |= now - next(iter(self._recovering.values()), now) > _SLOW_RECOVERY
        return not self._recoveries_in_doubt or len(self._recovering) < max(self._workers // 2, 1)

    async def recover(self, delivery: Delivery, recovery: Recovery) -> Outcome:
        """Run the recovery of a delivery."""
        self._recovering[delivery] = self._clock()
        if recovery is not delivery.then:
            delivery.outgoing = ()  # messages of a run that does not count
        try:
            outcome = await recovery.take(delivery)
        finally:
            del self._recovering[delivery]
        self._recoveries_in_doubt = False
        return outcome

    def hold_back(self, delivery: Delivery, shards: Shards) -> None:
        """Make a delivery wait until fewer others are being recovered."""
        assert delivery.recovery is not None  # noqa: S101 - only recoveries are held back
        self._wait(
            delivery,
            f"{delivery.recovery.purpose}: other writes come first, and they fail or are slow",
            _HELD_BACK,
            shards,
        )

    def _recovery_failed(self, delivery: Delivery, recovery: Recovery, error: BaseException, shards: Shards) -> None:
        self._recoveries_in_doubt = True
        delivery.recovery_failures += 1
        delay = _BACKOFF.delay(error, delivery.recovery_failures, random.random()) or 0.0  # noqa: S311
        why = f"{recovery.purpose}: {_message_of(error) or type(error).__name__}"
        self._wait(delivery, why, delay, shards)
        self._log(
            "recovery_failed",
            delivery,
            "record %r stays incomplete and is tried again in %.1f s; this failed: %s",
            delivery,
            delay,
            why,
            cause=error,
            level=logging.ERROR,
        )

    # Pausing and probing --------------------------------------------------------------

    def _pause(self, epoch: Epoch) -> None:
        """Pause a partition until one of its records succeeds, or can be diverted again."""
        if _PAUSED_BY not in epoch.pauses:
            epoch.pause(_PAUSED_BY, self._why)
            self._probe_after(epoch, _FIRST_PROBE)

    def _probe_after(self, epoch: Epoch, delay: float) -> None:
        epoch.probed = lambda processed: self._probed(epoch, min(delay * 2, _LONGEST_PROBE), processed)
        asyncio.get_running_loop().call_later(delay, self._probe, epoch, delay)

    def _probe(self, epoch: Epoch, delay: float) -> None:
        if epoch.gate is Gate.ENDED:
            return
        if epoch.gate is Gate.PAUSED and len(epoch.pauses) == 1:
            if self._breaker is None or not self._breaker.is_open or not len(epoch.tracker):
                self._resume(epoch)
                return
            probe = next((probe for shards in self._shards if (probe := shards.probe(epoch)) is not None), None)
            # A record that failed before may itself be bad: then only another one shows that the rest would succeed.
            epoch.probe_room = 0 if probe is not None and not probe.failures else _PROBE_ROOM
            if probe is not None:
                return
        self._probe_after(epoch, delay)

    def _probed(self, epoch: Epoch, delay: float, processed: bool) -> None:
        if processed:
            self._close_breaker()
            self._resume(epoch)
        else:
            self._probe_after(epoch, delay)

    def _close_breaker(self) -> None:
        if self._breaker is not None and self._breaker.is_open:
            self._breaker.close(self.counters.processed)
            fields = {"event": "breaker_closed", "handler": self.handler, "group": self.group}
            logger.warning("the circuit breaker of handler %s closes: a record succeeded", self.handler, extra=fields)

    def _resume(self, epoch: Epoch) -> None:
        epoch.probed = None
        epoch.probe_room = 0
        if epoch.resume(_PAUSED_BY):
            for shards in self._shards:
                shards.reopen(epoch)


def _message_of(error: BaseException) -> str:
    """Return the message of an exception; if a user's exception fails to produce one, the worker must not end."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - user code: only the record has failed
        return f"its message cannot be shown ({type(failure).__name__})"


def _origin_of(error: BaseException) -> object:
    """Return what failures of the same kind have in common: the type, and the line that raised."""
    return type(error), *[(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)][-1:]


def _traceback_of(error: BaseException) -> BaseException | None:
    """Return the exception to log with its traceback; None if the traceback has no line of the user's code.

    If aioshard itself decoded the payload, the message says all that is known.
    """
    return None if isinstance(error, DecodeError) and error.__suppress_context__ and not error.__cause__ else error
