"""Log lines about failed deliveries: the first failure of a kind in full, the later ones as a number."""

import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence

from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.log_fields import record_fields
from aioshard.engine.outcomes import AwaitBreaker, Decision, Halt, Postpone, Recover, RetryRecovery, RunAgain
from aioshard.engine.shards import DeliveryBatch
from aioshard.errors import DecodeError
from aioshard.log_fields import get_logger
from aioshard.records import counted

# Operators filter by the name of the subject, not of this module.
logger = get_logger("aioshard.engine.failures")

_REPEATS_AFTER = 60.0
"""Seconds between log lines about failures of the same kind."""


@dataclasses.dataclass(slots=True)
class _Repeats:
    """Later failures of the same kind as one that was logged."""

    since: float
    level: int
    count: int = 0
    latest: str = ""


class FailureLog:
    """Log of the failures of one handler.

    Failures are of the same kind if they led to the same event and the same line raised the same type of error.
    """

    def __init__(self, *, handler: str, group: str, counters: Counters, clock: Callable[[], float]) -> None:
        """Begin without a failure.

        Args:
            handler: Name of the handler.
            group: Consumer group.
            counters: Counters of the handler.
            clock: Returns the loop time.
        """
        self.handler = handler
        self.group = group
        self._counters = counters
        self._clock = clock
        self._repeats: dict[tuple[str, object], _Repeats] = {}
        """Failures that were logged lately, by event and origin."""
        self._traced: set[object] = set()
        """Origins whose traceback was logged."""

    def decided(self, delivery: Delivery, decision: Decision, error: BaseException) -> None:
        """Log how a failed delivery continues."""
        match decision:
            # 1. Its recovery failed.
            case RetryRecovery(why, delay):
                self._log(
                    "recovery_failed",
                    delivery,
                    f"record {delivery!r} stays incomplete and is tried again in {delay:.1f} s; this failed: {why}",
                    cause=error,
                    level=logging.ERROR,
                )
            # 2. An attempt failed, and another one follows.
            case RunAgain(why, delay):
                self._log(
                    "retry",
                    delivery,
                    f"record {delivery!r} failed attempt {delivery.failures} and runs again in {delay:.2f} s ({why}); "
                    f"failed attempts of its handler so far: {self._counters.retried}",
                    cause=error,
                    attempt=delivery.failures,
                    error=type(error).__name__,
                )
            # 3. It could not run, which was not an attempt.
            case Postpone(why, delay):
                self._log(
                    "postponed",
                    delivery,
                    f"record {delivery!r} waits and runs again in {delay:.2f} s; no attempt of it was used: {why}",
                    cause=error,
                    error=type(error).__name__,
                )
            # 4. It was the last attempt, and nothing else completes the record.
            case Halt(why):
                self._log(
                    "halted",
                    delivery,
                    f"record {delivery!r} failed after {_attempts(delivery)} and halts ({why}): later records of its "
                    "key wait. Its partition is not committed past it, and takes nothing more in once its share of "
                    "memory is full. Call App.retry_now or App.skip to release it; with on_failure=DeadLetter(…) or "
                    "Park(…), nothing would wait",
                    cause=error,
                    level=logging.ERROR,
                    attempt=delivery.failures,
                    error=type(error).__name__,
                )
            # 5. It was the last attempt, and a recovery follows.
            case Recover(recovery):
                self._log(
                    "diverted",
                    delivery,
                    f"record {delivery!r} failed after {_attempts(delivery)}, and {recovery.purpose} "
                    f"({delivery.failure})",
                    cause=error,
                    attempt=delivery.failures,
                    error=type(error).__name__,
                )
            # 6. The circuit breaker is open, which was logged when it opened.
            case AwaitBreaker():
                pass

    def failed_together(self, deliveries: Sequence[Delivery], delay: float, error: BaseException) -> None:
        """Log that several records failed together, any of which may be to blame.

        Args:
            deliveries: The records.
            delay: Seconds until they run again.
            error: Exception that the attempt raised.
        """
        first = deliveries[0]
        self._log(
            "retry",
            first,
            f"{len(deliveries)} records failed together, {first!r} among them, and run again in smaller batches in "
            f"{delay:.2f} s ({first.failure})",
            cause=error,
            error=type(error).__name__,
            records=len(deliveries),
        )

    def outlived(self, batch: DeliveryBatch) -> None:
        """Log that a run was cancelled but returned anyway; its deliveries stay incomplete."""
        self._log(
            "swallowed",
            batch.deliveries[0],
            f"the handler of {batch!r} swallowed its cancellation; its records stay incomplete",
            records=len(batch.deliveries),
        )

    def breaker_opened(self, why: str) -> None:
        """Log that the circuit breaker of the handler is open, with the reason as a sentence."""
        logger.warning("%s", why, extra=self._fields("breaker_opened"))

    def breaker_closed(self) -> None:
        """Log that the circuit breaker of the handler closes."""
        message = "the circuit breaker of handler %s closes: a record succeeded"
        logger.warning(message, self.handler, extra=self._fields("breaker_closed"))

    def report_repeats(self) -> None:
        """Log, once a minute, how many failures were like one that was logged."""
        now = self._clock()
        for (event, origin), repeats in tuple(self._repeats.items()):
            seconds = now - repeats.since
            if seconds < _REPEATS_AFTER:
                continue
            del self._repeats[event, origin]
            if repeats.count:
                self._repeats[event, origin] = _Repeats(now, repeats.level)
                more = counted(repeats.count, "more failure")
                fields = self._fields(event, repeats=repeats.count)
                logger.log(repeats.level, "%s like this one in %.0f s: %s", more, seconds, repeats.latest, extra=fields)

    def _log(
        self,
        event: str,
        delivery: Delivery,
        text: str,
        *,
        cause: BaseException | None = None,
        level: int = logging.WARNING,
        **more: object,
    ) -> None:
        """Log the first failure of a kind with its traceback, and later ones at DEBUG; `report_repeats` counts them."""
        origin = _origin_of(cause)
        trace: BaseException | None = None
        repeats = self._repeats.get((event, origin))
        if repeats is None:
            self._repeats[event, origin] = _Repeats(self._clock(), level)
            if origin not in self._traced:
                self._traced.add(origin)
                trace = _traceback_of(cause)
        else:
            repeats.count += 1
            repeats.latest = text
            level = logging.DEBUG
        fields = record_fields(event, delivery, **more, handler=self.handler, group=self.group)
        logger.log(level, "%s", text, exc_info=trace, extra=fields)

    def _fields(self, event: str, **more: object) -> dict[str, object]:
        return {"event": event, "handler": self.handler, "group": self.group, **more}


def _attempts(delivery: Delivery) -> str:
    return counted(delivery.failures, "attempt")


def _origin_of(error: BaseException | None) -> object:
    """Return what failures of the same kind have in common: the type, and the line that raised."""
    if error is None:
        return None
    return type(error), *[(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)][-1:]


def _traceback_of(error: BaseException | None) -> BaseException | None:
    """Return the exception to log with its traceback; None if the traceback has no line of the user's code.

    If aioshard itself decoded the payload, the message says all that is known.
    """
    return None if isinstance(error, DecodeError) and error.__suppress_context__ and not error.__cause__ else error
