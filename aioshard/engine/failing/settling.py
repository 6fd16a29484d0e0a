"""Failure handler: gives a delivery whose attempt failed another attempt or a detour, or halts its shard."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from aioshard.core.retry import Retry
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.log_fields import record_fields
from aioshard.engine.outcomes import Block, Detour, FailureNote, Outcome
from aioshard.engine.shards import Shards
from aioshard.errors import DecodeError, HandlerError

__all__ = ["Halt", "Pause", "Recourse", "Settlement", "Verdict"]

logger = logging.getLogger("aioshard.engine.settling")

_SLOW_DETOUR = 1.0
"""Seconds; a healthy side topic acknowledges faster."""
_HELD_BACK = 0.5
"""Seconds until a detour that was held back is tried again; see `Settlement.hold_back`."""
_DETOUR_BACKOFF = Retry(attempts=1 << 60, initial=0.2, maximum=10.0, retry_on=(BaseException,))
"""Backoff of failed detours; they are never given up, because only a terminal outcome advances (I2)."""


class Halt(NamedTuple):
    """Verdict: the record keeps its shard until it is released."""


class Pause(NamedTuple):
    """Verdict: nothing can be done with the record now, so it waits and its partition pauses."""

    why: str


Verdict = Halt | Pause | Detour


class Recourse(Protocol):
    """Failure policy of a handler, as set by `on_failure`."""

    def decide(self, delivery: Delivery) -> Verdict:
        """Decide about a record whose attempts are used up; `delivery.failure` describes its last failure."""


class Settlement:
    """Decides about failed deliveries of one handler, for its workers. Nothing here awaits."""

    def __init__(
        self,
        retry: Retry,
        recourse: Recourse,
        *,
        counters: Counters,
        clock: Callable[[], float],
        paused: Callable[[Delivery, str], None],
        workers: Callable[[], int],
        chance: Callable[[], float] = random.random,
        about: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Create the failure handler.

        Args:
            retry: Retry policy for failed attempts.
            recourse: Failure policy for records whose attempts are used up.
            counters: Counters of the handler.
            clock: Returns the loop time.
            paused: Called with a delivery whose partition pauses, and the reason.
            workers: Returns the current number of workers.
            chance: Returns random numbers from 0 to 1, for the jitter.
            about: Additional fields for the log lines: handler and group.
        """
        self.counters = counters
        self._retry = retry
        self._recourse = recourse
        self._clock = clock
        self._paused = paused
        self._workers = workers
        self._detours: dict[Delivery, float] = {}
        """Deliveries whose detours workers run now, oldest first, with their start times."""
        self._detours_in_doubt = False
        self._chance = chance
        self._about = about

    def _fields(self, event: str, delivery: Delivery, **more: object) -> dict[str, object]:
        return record_fields(event, delivery, **more, **self._about)

    def failed(self, delivery: Delivery, error: BaseException, shards: Shards) -> bool:
        """Settle a failed attempt or a failed detour.

        Returns:
            Whether the worker continues with the same delivery, because a detour follows immediately.
        """
        if delivery.detour is not None:
            self._detour_failed(delivery, delivery.detour, error, shards)
            return False
        note = _note(delivery, error)
        delay = self._retry.delay(error, delivery.failures, self._chance())
        if delay is None:
            return self.give_up(delivery, error, shards)
        delivery.epoch.counts.retried += 1
        shards.retry(delivery, Block(halted=False, error=str(note), since=self._clock()), delay)
        level = logging.WARNING if self.counters.may_warn(self._clock()) else logging.DEBUG
        message = "record %r failed attempt %d and runs again in %.2f s (%s); failed attempts of its handler so far: %d"
        fields = self._fields("retry", delivery, attempt=delivery.failures, error=note.error)
        logger.log(level, message, delivery, delivery.failures, delay, note, self.counters.retried, extra=fields)
        return False

    def failed_together(
        self, deliveries: Sequence[Delivery], heads: Sequence[Delivery], error: BaseException, shards: Shards
    ) -> None:
        """Settle a failed attempt of several records together, any of which may be to blame.

        No record is given up, however often it has failed: all run again after the same delay, in smaller batches.

        Args:
            deliveries: The failed deliveries.
            heads: Those of *deliveries* that hold their shards; the others wait behind them.
            error: Exception that the attempt raised.
            shards: Shards of the deliveries.
        """
        notes = [_note(delivery, error) for delivery in deliveries]
        note = notes[0]
        for delivery in deliveries:
            delivery.epoch.counts.retried += 1
        delay = self._retry.delay(error, deliveries[0].failures, self._chance()) or 0.0
        block = Block(halted=False, error=str(note), since=self._clock())
        for delivery in heads:
            shards.retry(delivery, block, delay)
        level = logging.WARNING if self.counters.may_warn(self._clock()) else logging.DEBUG
        message = "%d records failed together, %r among them, and run again in smaller batches in %.2f s (%s)"
        fields = self._fields("retry", deliveries[0], error=note.error, records=len(deliveries))
        logger.log(level, message, len(deliveries), deliveries[0], delay, note, extra=fields)

    def failed_behind(self, delivery: Delivery, error: BaseException) -> None:
        """Count the failure of a record behind a failed one of its shard: it always runs again, after that one."""
        _note(delivery, error)
        delivery.epoch.counts.retried += 1

    def give_up(self, delivery: Delivery, error: BaseException, shards: Shards, *, keyed: bool = True) -> bool:
        """Settle a delivery that gets no further attempt; return whether a detour follows immediately.

        Args:
            delivery: The failed delivery.
            error: Exception of its last attempt.
            shards: Shards of the delivery.
            keyed: Whether it has a shard key; without one, its handler must not see it, not even as a probe.
        """
        note = delivery.failure
        assert note is not None  # noqa: S101 - set by `_note`
        verdict = self._recourse.decide(delivery)
        if isinstance(verdict, Detour):
            delivery.divert(verdict)
            level = logging.WARNING if self.counters.may_warn(self._clock()) else logging.DEBUG
            message = "record %r failed %d time(s), and %s (%s)"
            fields = self._fields("diverted", delivery, attempt=note.attempts, error=note.error)
            logger.log(
                level,
                message,
                delivery,
                note.attempts,
                verdict.purpose,
                note,
                exc_info=_traceback_of(error),
                extra=fields,
            )
            return True
        if isinstance(verdict, Pause) and not keyed:
            delivery.divert(Detour("it is diverted as soon as the budget allows", self._divert_later))
            return True
        if isinstance(verdict, Pause):
            self._paused(delivery, verdict.why)
            delivery.epoch.settle(delivery)
            shards.again(delivery)
            return False
        self.halt(delivery, error, shards)
        return False

    def halt(self, delivery: Delivery, error: BaseException, shards: Shards) -> None:
        """Make a delivery keep its shard until it is released."""
        text = str(FailureNote(type(error).__name__, _message_of(error), delivery.failures))
        shards.halt(delivery, Block(halted=True, error=text, since=self._clock()))
        logger.error(
            "record %r failed %d time(s) and halts its shard: its partition is not committed past it (%s)",
            delivery,
            delivery.failures,
            text,
            exc_info=_traceback_of(error),
            extra=self._fields("halted", delivery, attempt=delivery.failures, error=type(error).__name__),
        )

    def swallowed(self, delivery: Delivery, error: BaseException, shards: Shards) -> None:
        """Halt a delivery whose run timed out but returned all the same: its effects are unknown."""
        _note(delivery, error)
        self.halt(delivery, error, shards)

    def outlived(self, run: object, deliveries: Sequence[Delivery]) -> None:
        """Log that a run was cancelled but returned all the same; its deliveries stay incomplete.

        Args:
            run: The record or batch, for the message.
            deliveries: Deliveries of the run.
        """
        message = "the handler of %r swallowed its cancellation; what it was given stays incomplete"
        fields = self._fields("swallowed", deliveries[0], records=len(deliveries))
        logger.warning(message, run, extra=fields)

    def unkeyed(self, delivery: Delivery, error: Exception, shards: Shards) -> None:
        """Settle a record whose sharding function failed: it cannot run in order, so an attempt makes no sense."""
        _note(delivery, error)
        if self.give_up(delivery, error, shards, keyed=False):
            shards.again(delivery)

    async def _divert_later(self, delivery: Delivery) -> Outcome:
        verdict = self._recourse.decide(delivery)
        if not isinstance(verdict, Detour):
            raise HandlerError(verdict.why if isinstance(verdict, Pause) else "it cannot be diverted")
        delivery.detour = verdict  # paid for: if it fails, do not decide again
        return await verdict.take(delivery)

    # Detours ------------------------------------------------------------------------

    def begin_detour(self, delivery: Delivery) -> bool:
        """Return whether a worker may take a delivery's detour now; if not, call `hold_back`.

        While detours fail or take long, they may occupy at most half of the workers (but always one): a side topic
        that acknowledges nothing must not stop the records that succeed.
        """
        now = self._clock()
        oldest = next(iter(self._detours.values()), now)
        self._detours_in_doubt |= now - oldest > _SLOW_DETOUR
        if self._detours_in_doubt and len(self._detours) >= max(self._workers() // 2, 1):
            return False
        self._detours[delivery] = now
        return True

    def end_detour(self, delivery: Delivery, *, succeeded: bool) -> None:
        """Record that a worker has ended a detour, successfully or not."""
        self._detours.pop(delivery, None)
        self._detours_in_doubt &= not succeeded

    def hold_back(self, delivery: Delivery, shards: Shards) -> None:
        """Make a delivery wait until fewer others take detours."""
        assert delivery.detour is not None  # noqa: S101 - only detours are held back
        text = f"{delivery.detour.purpose}: others are written first, and that takes long or fails"
        shards.retry(delivery, Block(halted=False, error=text, since=self._clock()), _HELD_BACK)

    def _detour_failed(self, delivery: Delivery, detour: Detour, error: BaseException, shards: Shards) -> None:
        self._detours_in_doubt = True
        delivery.detours += 1
        delay = _DETOUR_BACKOFF.delay(error, delivery.detours, self._chance())
        text = f"{detour.purpose}: {_message_of(error) or type(error).__name__}"
        shards.retry(delivery, Block(halted=False, error=text, since=self._clock()), delay or 0.0)
        level = logging.ERROR if self.counters.may_warn(self._clock()) else logging.DEBUG
        message = "record %r stays incomplete and is tried again in %.1f s; %s failed"
        logger.log(level, message, delivery, delay, text, extra=self._fields("detour_failed", delivery))


def _note(delivery: Delivery, error: BaseException) -> FailureNote:
    """Record a failed attempt."""
    delivery.failures += 1
    delivery.failure = FailureNote(type(error).__name__, _message_of(error), delivery.failures)
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
