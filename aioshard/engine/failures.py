"""Failure handler: retries failed deliveries, and applies the failure policy once their attempts are exhausted."""

import asyncio
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from aioshard.core.on_failure import Budget, BudgetAccount
from aioshard.core.retry import Retry
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.log_fields import partition_fields, record_fields
from aioshard.engine.outcomes import Block, FailedAttempt, Outcome, Recovery
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.errors import DecodeError, HandlerError, SwallowedCancellationError
from aioshard.ports import Message
from aioshard.records import counted
from aioshard.serde.side_records import Failure, dead_letter

logger = logging.getLogger("aioshard.engine.failures")

Publish = Callable[[Message], Awaitable[int]]
"""Publishes a message, waits for the brokers' acknowledgement and returns the offset."""

_SLOW_RECOVERY = 1.0
"""Seconds; a healthy side topic acknowledges faster."""
_HELD_BACK = 0.5
"""Seconds until a recovery that was held back is tried again; see `FailureHandler.hold_back`."""
_BACKOFF = Retry(attempts=1 << 60, initial=0.2, maximum=10.0, retry_on=(BaseException,))
"""Backoff of failed recoveries; they are never given up, because only a terminal outcome advances (I2)."""

_PAUSED_BY = "budget"
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


def dead_lettering(topic: str, publish: Publish, *, group: str, handler: str) -> Recovery:
    """Return a recovery that completes a record when its dead letter is acknowledged (I2)."""

    async def send(delivery: Delivery) -> Outcome:
        await publish(dead_letter(topic, delivery.record, failure_of(delivery, group, handler)))
        return Outcome.DEAD_LETTERED

    return Recovery(f"its dead letter is written to {topic}", send)


def failure_of(delivery: Delivery, group: str, handler: str) -> Failure:
    """Describe a failed delivery for the headers of a side record."""
    failure = delivery.failure
    assert failure is not None  # noqa: S101 - only failed deliveries are diverted
    return Failure(group, handler, failure.attempts, failure.error, failure.message, time.time())


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
        workers: Callable[[], int],
        budget: Budget | None = None,
        chance: Callable[[], float] = random.random,
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
            workers: Returns the current number of workers.
            budget: Limit on the number of such recoveries; successes replenish it. None means no limit.
            chance: Returns random numbers from 0 to 1, for the jitter.
            handler: Name of the handler, for log lines.
            group: Consumer group, for log lines.
        """
        self.counters = counters
        self._retry = retry
        self._recovery = recovery
        self._shards = shards
        self._clock = clock
        self._workers = workers
        self._account = None if budget is None else BudgetAccount(budget)
        self._chance = chance
        self.handler = handler
        self.group = group
        self._recovering: dict[Delivery, float] = {}
        """Deliveries whose recoveries workers run now, oldest first, with their start times."""
        self._recoveries_in_doubt = False

    # Failed attempts ------------------------------------------------------------------

    def failed(self, delivery: Delivery, error: BaseException, shards: Shards) -> bool:
        """Handle a failed attempt or a failed recovery.

        Returns:
            Whether a recovery follows immediately.
        """
        if delivery.recovery is not None:
            self._recovery_failed(delivery, delivery.recovery, error, shards)
            return False
        failure = _add_failure(delivery, error)
        if isinstance(error, SwallowedCancellationError):  # the run timed out but returned: its effects are unknown
            self._halt(delivery, failure, error, shards)
            return False
        delay = self._retry.delay(error, delivery.failures, self._chance())
        if delay is None:
            return self._give_up(delivery, failure, error, shards)
        delivery.epoch.counts.retried += 1
        self._wait(delivery, str(failure), delay, shards)
        message = "record %r failed attempt %d and runs again in %.2f s (%s); failed attempts of its handler so far: %d"
        values = (delivery, delivery.failures, delay, failure, self.counters.retried)
        self._log("retry", delivery, message, *values, attempt=delivery.failures, error=failure.error)
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
        delay = self._retry.delay(error, first.failures, self._chance()) or 0.0
        for delivery in heads:
            self._wait(delivery, str(failure), delay, shards)
        message = "%d records failed together, %r among them, and run again in smaller batches in %.2f s (%s)"
        values = (len(deliveries), first, delay, failure)
        self._log("retry", first, message, *values, error=failure.error, records=len(deliveries))

    def failed_behind(self, delivery: Delivery, error: BaseException) -> FailedAttempt:
        """Count the failure of a record behind a failed one of its shard: it always runs again, after that one."""
        delivery.epoch.counts.retried += 1
        return _add_failure(delivery, error)

    def outlived(self, batch: DeliveryBatch) -> None:
        """Log that a run was cancelled but returned all the same; its deliveries stay incomplete."""
        message = "the handler of %r swallowed its cancellation; its records stay incomplete"
        self._log("swallowed", batch.deliveries[0], message, batch, records=len(batch.deliveries), always=True)

    def unkeyed(self, delivery: Delivery, error: Exception, shards: Shards) -> None:
        """Handle a record whose sharding function failed: it cannot run in order, so no attempt is made."""
        if self._give_up(delivery, _add_failure(delivery, error), error, shards, keyed=False):
            shards.again(delivery)

    def _wait(self, delivery: Delivery, why: str, delay: float, shards: Shards) -> None:
        shards.block(delivery, Block(halted=False, error=why, since=self._clock()), delay)

    def _log(
        self,
        event: str,
        delivery: Delivery,
        message: str,
        *values: object,
        level: int = logging.WARNING,
        trace: BaseException | None = None,
        always: bool = False,
        **more: object,
    ) -> None:
        """Log a failure; while a back end is down, most of them only at DEBUG unless *always* is set."""
        level = level if always or self.counters.may_warn(self._clock()) else logging.DEBUG
        fields = record_fields(event, delivery, **more, handler=self.handler, group=self.group)
        logger.log(level, message, *values, exc_info=trace, extra=fields)

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
        if not self._spend():
            if not keyed:
                delivery.divert(Recovery("it is diverted as soon as the budget allows", self._divert_later))
                return True
            self._pause(delivery.epoch)
            delivery.epoch.settle(delivery)
            shards.again(delivery)
            return False
        delivery.divert(recovery)
        values = (delivery, counted(failure.attempts, "attempt"), recovery.purpose, failure)
        message = "record %r failed after %s, and %s (%s)"
        trace = _traceback_of(error)
        self._log("diverted", delivery, message, *values, trace=trace, attempt=failure.attempts, error=failure.error)
        return True

    def _halt(self, delivery: Delivery, failure: FailedAttempt, error: BaseException, shards: Shards) -> None:
        """Make a delivery keep its shard until it is released."""
        shards.block(delivery, Block(halted=True, error=str(failure), since=self._clock()))
        message = "record %r failed after %s and halts its shard: its partition is not committed past it (%s)"
        values = (delivery, counted(failure.attempts, "attempt"), failure)
        self._log(
            "halted",
            delivery,
            message,
            *values,
            level=logging.ERROR,
            trace=_traceback_of(error),
            always=True,
            attempt=failure.attempts,
            error=failure.error,
        )

    def _spend(self) -> bool:
        """Pay for a recovery of the failure policy; return whether the budget allowed it."""
        return self._account is None or self._account.spend(self.counters.processed)

    async def _divert_later(self, delivery: Delivery) -> Outcome:
        if self._recovery is None or not self._spend():
            raise HandlerError(f"the dead-letter budget of handler {self.handler} is exhausted")
        delivery.recovery = self._recovery  # paid for: if it fails, do not pay again
        return await self._recovery.take(delivery)

    # Recoveries -----------------------------------------------------------------------

    def may_recover(self) -> bool:
        """Return whether a worker may start a recovery now; if not, call `hold_back`.

        While recoveries fail or take long, they may occupy at most half of the workers (but always one): a side topic
        that acknowledges nothing must not stop the records that succeed.
        """
        now = self._clock()
        oldest = next(iter(self._recovering.values()), now)
        self._recoveries_in_doubt |= now - oldest > _SLOW_RECOVERY
        return not self._recoveries_in_doubt or len(self._recovering) < max(self._workers() // 2, 1)

    async def recover(self, delivery: Delivery, recovery: Recovery) -> Outcome:
        """Take the recovery of a delivery."""
        self._recovering[delivery] = self._clock()
        try:
            outcome = await recovery.take(delivery)
        finally:
            del self._recovering[delivery]
        self._recoveries_in_doubt = False
        return outcome

    def hold_back(self, delivery: Delivery, shards: Shards) -> None:
        """Make a delivery wait until fewer others are being recovered."""
        assert delivery.recovery is not None  # noqa: S101 - only recoveries are held back
        why = f"{delivery.recovery.purpose}: other writes come first, and they fail or are slow"
        self._wait(delivery, why, _HELD_BACK, shards)

    def _recovery_failed(self, delivery: Delivery, recovery: Recovery, error: BaseException, shards: Shards) -> None:
        self._recoveries_in_doubt = True
        delivery.recovery_failures += 1
        delay = _BACKOFF.delay(error, delivery.recovery_failures, self._chance()) or 0.0
        why = f"{recovery.purpose}: {_message_of(error) or type(error).__name__}"
        self._wait(delivery, why, delay, shards)
        message = "record %r stays incomplete and is tried again in %.1f s; this failed: %s"
        self._log("recovery_failed", delivery, message, delivery, delay, why, level=logging.ERROR)

    # Pausing and probing --------------------------------------------------------------

    def _pause(self, epoch: Epoch) -> None:
        """Pause a partition until one of its records succeeds, or can be diverted again."""
        if _PAUSED_BY in epoch.pauses or self._account is None:
            return
        budget = self._account.budget
        why = (
            f"the dead-letter budget of handler {self.handler} is exhausted ({budget.burst} dead letters, "
            f"{budget.per_success:g} more for each success), so a dependency of the handler seems to be down; one "
            "record at a time is tried until one succeeds"
        )
        fields = partition_fields("paused", epoch.topic_partition, why=why)
        logger.warning("%s pauses: %s", epoch.topic_partition, why, extra=fields)
        epoch.pause(_PAUSED_BY, why)
        self._probe_after(epoch, _FIRST_PROBE)

    def _probe_after(self, epoch: Epoch, delay: float) -> None:
        epoch.probed = functools.partial(self._probed, epoch, min(delay * 2, _LONGEST_PROBE))
        asyncio.get_running_loop().call_later(delay, self._probe, epoch, delay)

    def _probe(self, epoch: Epoch, delay: float) -> None:
        if epoch.gate is Gate.ENDED:
            return
        if epoch.gate is Gate.PAUSED and len(epoch.pauses) == 1:
            if self._account is None or self._account.left(self.counters.processed) or not len(epoch.tracker):
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
            self._resume(epoch)
        else:
            self._probe_after(epoch, delay)

    def _resume(self, epoch: Epoch) -> None:
        epoch.probed = None
        epoch.probe_room = 0
        message = "%s resumes: one of its records succeeded, or can be diverted again"
        logger.warning(message, epoch.topic_partition, extra=partition_fields("resumed", epoch.topic_partition))
        if epoch.resume(_PAUSED_BY):
            for shards in self._shards:
                shards.reopen(epoch)


def _add_failure(delivery: Delivery, error: BaseException) -> FailedAttempt:
    """Record a failed attempt."""
    delivery.failures += 1
    delivery.failure = FailedAttempt(type(error).__name__, _message_of(error), delivery.failures)
    return delivery.failure


def _message_of(error: BaseException) -> str:
    """Return the message of an exception; if a user's exception fails to produce one, the worker must not end."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - user code: only the record has failed
        return f"its message cannot be shown ({type(failure).__name__})"


def _traceback_of(error: BaseException) -> BaseException | None:
    """Return the exception to log with its traceback; None if the traceback has no line of the user's code.

    aioshard itself decodes the payload that an annotation asks for, and the message says all that is known.
    """
    return None if isinstance(error, DecodeError) and error.__suppress_context__ and not error.__cause__ else error
