"""Failure handler: decides how a failed delivery continues, and makes it so."""

import random
from collections.abc import Callable, Sequence

from aioshard.core.options import CircuitBreaker, Retry
from aioshard.core.text import message_of
from aioshard.engine.breaker import HandlerBreaker
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.failure_log import FailureLog
from aioshard.engine.outcomes import (
    AwaitBreaker,
    Block,
    Decision,
    Halt,
    Outcome,
    Postpone,
    Recover,
    Recovery,
    RetryRecovery,
    RunAgain,
)
from aioshard.engine.parking import Parking
from aioshard.engine.shards import Shards
from aioshard.errors import (
    HandlerError,
    MessageRefusedError,
    ParkLater,
    RegistryUnavailableError,
    RetryLater,
    SwallowedCancellationError,
)

_SLOW_RECOVERY = 1.0
"""Seconds; a healthy side topic acknowledges faster."""
_HELD_BACK = 0.5
"""Seconds until a recovery that was held back is tried again; see `FailureHandler.hold_back`."""
_BACKOFF = Retry(attempts=1 << 60, initial=0.2, maximum=10.0, retry_on=(BaseException,))
"""Backoff of failed recoveries; they are never given up, because only a terminal outcome advances (I2)."""

_REFUSED_BACKOFF = Retry(attempts=1 << 60, initial=1.0, maximum=60.0)
"""The same if the brokers refused the message in a transaction: each try ends the epoch of the partition."""


_NOT_PARKED = (
    "nothing is parked: on_failure is not Park(…), or this is a backfill or a replay of dead letters; raise RetryLater "
    "to wait in memory"
)


class FailureHandler:
    """Handles the failed deliveries of one handler, for its workers.

    `decide` says how a delivery continues, and only `handle_failed` acts on that. `FailureLog` logs it, and
    `HandlerBreaker` pauses partitions.
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
        parking: Parking | None = None,
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
            parking: Parks the records whose handler raises `ParkLater`; None if nothing can be parked.
            breaker: Limit on the share of such records; None means no limit.
            handler: Name of the handler, for log lines.
            group: Consumer group, for log lines.
        """
        self.counters = counters
        self.log = FailureLog(handler=handler, group=group, counters=counters, clock=clock)
        self._retry = retry
        self._recovery = recovery
        self._parking = parking
        self._recovery_after_breaker = Recovery(
            "it is diverted when the circuit breaker has closed", self._recover_after_breaker
        )
        self._clock = clock
        self.workers = workers
        """Number of workers; an adaptive concurrency changes it."""
        self.overloads = 0
        """Failed runs of the handler that raised `RetryLater`."""
        self._breaker = HandlerBreaker(breaker, shards=shards, counters=counters, running=running, log=self.log)
        self._recovering: dict[Delivery, float] = {}
        """Deliveries whose recoveries workers run now, oldest first, with their start times."""
        self._recoveries_in_doubt = False

    # Failed attempts and recoveries ------------------------------------------------------

    def handle_failed(self, delivery: Delivery, error: BaseException, shards: Shards, *, keyed: bool = True) -> None:
        """Decide about a delivery whose attempt or recovery failed, log that, and act on it.

        Args:
            delivery: The failed delivery; it holds its shard.
            error: Exception that its run raised.
            shards: Shards of the delivery.
            keyed: Whether it has a shard key; see `decide`.
        """
        if keyed and delivery.recovery is None:
            shards.note_failed(delivery)
        decision = self.decide(delivery, error, keyed=keyed)
        if isinstance(decision, AwaitBreaker):
            self._breaker.pause(delivery.epoch)
        self.log.decided(delivery, decision, error)
        match decision:
            # 1. No later record of its key starts meanwhile.
            case RunAgain(why, delay) | Postpone(why, delay) | RetryRecovery(why, delay):
                if isinstance(decision, RetryRecovery) and shards.give_way(delivery):
                    return
                postponed = isinstance(decision, Postpone)
                block = Block(halted=False, error=why, since=self._clock(), postponed=postponed)
                shards.block(delivery, block, delay)
            # 2. An operator has to release it.
            case Halt(why):
                shards.block(delivery, Block(halted=True, error=why, since=self._clock()))
            # 3. A worker takes the recovery, also while the partition is paused.
            case Recover(recovery) | AwaitBreaker(Recovery() as recovery):
                delivery.divert(recovery)
                shards.resume(delivery)
            # 4. It waits like all records of its partition, which is paused now.
            case AwaitBreaker(None):
                shards.hold(delivery)

    def decide(self, delivery: Delivery, error: BaseException, *, keyed: bool = True) -> Decision:
        """Count a failed attempt or recovery, and decide how its delivery continues.

        Args:
            delivery: The failed delivery.
            error: Exception that its run raised.
            keyed: Whether it has a shard key; without one, its handler must not see it, not even as a probe.
        """
        # 1. A recovery failed: it is never given up, because only a terminal outcome advances (I2).
        if delivery.recovery is not None:
            return self._decide_recovery(delivery, delivery.recovery, error)
        # 2. A schema registry does not answer: the record is not to blame, however long that lasts.
        if isinstance(error, RegistryUnavailableError) and keyed:
            return Postpone(message_of(error), self._postpone([delivery]))
        return self._decide_attempt(delivery, error, keyed=keyed)

    def _decide_attempt(self, delivery: Delivery, error: BaseException, *, keyed: bool) -> Decision:
        if isinstance(error, ParkLater) and self._parking is None:
            error = ParkLater(error.seconds, f"{message_of(error)} ({_NOT_PARKED})")
        failure = delivery.fail(error, self.counters.processed)
        why = str(failure)
        self._note_overload(error)
        # 1. The handler returned although it was cancelled: its effects are unknown.
        if isinstance(error, SwallowedCancellationError):
            return Halt(why)
        # 2. Its handler knows when it may succeed, and its key waits for that in the side topic.
        if isinstance(error, ParkLater) and self._parking is not None:
            return Recover(self._parking.recovery_in(error.seconds))
        # 3. It has attempts left.
        delay: float | None = None
        if keyed:
            delay = self._retry.delay(error, delivery.failures, random.random())  # noqa: S311 - jitter
        if delay is not None:
            delivery.epoch.counts.retried += 1
            return RunAgain(why, delay)
        # 4. It has none.
        return self._decide_exhausted(delivery, why, keyed=keyed)

    def _decide_exhausted(self, delivery: Delivery, why: str, *, keyed: bool) -> Decision:
        # 1. Nothing else can complete it.
        if self._recovery is None:
            return Halt(why)
        # 2. It is to blame.
        self._breaker.count_failed(delivery)
        if not self._breaker.is_open:
            return Recover(self._recovery)
        # 3. The share of failed records is so high that they are probably not to blame.
        return AwaitBreaker(None if keyed else self._recovery_after_breaker)

    def _postpone(self, deliveries: Sequence[Delivery]) -> float:
        """Count runs that were no attempts; return the seconds until the next ones."""
        for delivery in deliveries:
            delivery.epoch.counts.retried += 1
        postponed = max(delivery.postpone() for delivery in deliveries)
        return _BACKOFF.delay(HandlerError(), postponed, random.random()) or 0.0  # noqa: S311 - jitter

    def _decide_recovery(self, delivery: Delivery, recovery: Recovery, error: BaseException) -> RetryRecovery:
        self._recoveries_in_doubt = True
        backoff = _BACKOFF
        if isinstance(error, MessageRefusedError):
            backoff = _REFUSED_BACKOFF
        reason = message_of(error) or type(error).__name__
        # A recovery that waits for the circuit breaker has not failed.
        failures = delivery.fail_recovery(None if isinstance(error, HandlerError) else reason)
        delay = backoff.delay(HandlerError(), failures, random.random()) or 0.0  # noqa: S311 - jitter
        return RetryRecovery(f"{recovery.purpose}: {reason}", delay)

    def parks(self, error: BaseException) -> bool:
        """Whether the handler of a record, or of each record of a batch, wants it to be parked, and it can be."""
        return isinstance(error, ParkLater) and self._parking is not None

    def handle_failed_batch(
        self, deliveries: Sequence[Delivery], heads: Sequence[Delivery], error: BaseException, shards: Shards
    ) -> None:
        """Handle a failed attempt of several records together, any of which may be to blame.

        No record is given up, however often it has failed: all run again after the same delay, in smaller batches. If a
        schema registry is to blame, the batches stay as large.

        Args:
            deliveries: The failed deliveries.
            heads: Those of *deliveries* that hold their shards; the others wait behind them.
            error: Exception that the attempt raised.
            shards: Shards of the deliveries.
        """
        self._note_overload(error)
        postponed = isinstance(error, RegistryUnavailableError)
        if postponed:
            why = message_of(error)
            delay = self._postpone(deliveries)
            self.log.decided(deliveries[0], Postpone(why, delay), error)
        else:
            for delivery in deliveries:
                self.count_failed_behind(delivery, error)
            why = str(deliveries[0].failure)
            delay = self._retry.delay(error, deliveries[0].failures, random.random()) or 0.0  # noqa: S311 - jitter
            self.log.failed_together(deliveries, delay, error)
        block = Block(halted=False, error=why, since=self._clock(), postponed=postponed)
        for delivery in heads:
            shards.block(delivery, block, delay)

    def _note_overload(self, error: BaseException) -> None:
        if isinstance(error, RetryLater):
            self.overloads += 1

    def count_failed_behind(self, delivery: Delivery, error: BaseException) -> None:
        """Count the failure of a record behind a failed one of its shard.

        It runs again after that one, unless its handler wants it to be parked.
        """
        if isinstance(error, RegistryUnavailableError):
            self._postpone([delivery])
            return
        delivery.fail(error, self.counters.processed)
        if isinstance(error, ParkLater) and self._parking is not None:
            delivery.divert(self._parking.recovery_in(error.seconds))
        else:
            delivery.epoch.counts.retried += 1

    # Recoveries -----------------------------------------------------------------------

    def may_recover(self) -> bool:
        """Return whether a worker may start a recovery now; if not, call `hold_back`.

        While recoveries fail or take long, they may occupy at most half of the workers (but always one): a side topic
        that acknowledges nothing must not stop the records that succeed.
        """
        now = self._clock()
        self._recoveries_in_doubt |= now - next(iter(self._recovering.values()), now) > _SLOW_RECOVERY
        return not self._recoveries_in_doubt or len(self._recovering) < max(self.workers // 2, 1)

    async def recover(self, delivery: Delivery, recovery: Recovery) -> Outcome:
        """Run the recovery of a delivery."""
        self._recovering[delivery] = self._clock()
        if recovery is not delivery.then:
            delivery.drop_messages()
        try:
            outcome = await recovery.take(delivery)
        finally:
            del self._recovering[delivery]
        self._recoveries_in_doubt = False
        return outcome

    def hold_back(self, delivery: Delivery, recovery: Recovery, shards: Shards) -> None:
        """Make a delivery wait until fewer others are being recovered."""
        reason = "other writes come first, and they fail or are slow"
        delivery.delay_recovery(reason)
        error = f"{recovery.purpose}: {reason}"
        shards.block(delivery, Block(halted=False, error=error, since=self._clock()), _HELD_BACK)

    async def _recover_after_breaker(self, delivery: Delivery) -> Outcome:
        if self._recovery is None or self._breaker.is_open:
            raise HandlerError(self._breaker.why)
        return await self._recovery.take(delivery)
