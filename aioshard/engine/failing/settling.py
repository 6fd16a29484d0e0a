"""What becomes of a delivery whose attempt failed: another attempt, a detour, or its shard halts."""

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
"""Seconds; a side topic that works acknowledges in less."""
_HELD_BACK = 0.5
"""Seconds until a detour that was held back is tried again."""
_DETOUR_BACKOFF = Retry(attempts=1 << 60, initial=0.2, maximum=10.0, retry_on=(BaseException,))
"""When a detour that failed is taken again; never given up, because only a terminal outcome advances (I2)."""


class Halt(NamedTuple):
    """The record keeps its shard until somebody releases it."""


class Pause(NamedTuple):
    """Nothing can be done with the record now: it waits, and its partition pauses."""

    why: str


Verdict = Halt | Pause | Detour


class Recourse(Protocol):
    """What a handler's `on_failure` asks for."""

    def decide(self, delivery: Delivery) -> Verdict:
        """What comes next for a record whose attempts are used up; `delivery.failure` says what it failed with."""


class Settlement:
    """Decides for the deliveries of one handler; used by its workers. Nothing here awaits."""

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
        """Make a settlement.

        Args:
            retry: What follows a failed attempt.
            recourse: What follows the last one.
            counters: Of the handler.
            clock: Loop time.
            paused: Told about a delivery whose partition pauses, and why.
            workers: How many there are now.
            chance: Random numbers from 0 to 1, for the jitter.
            about: Further fields of its log lines: handler and group.
        """
        self.counters = counters
        self._retry = retry
        self._recourse = recourse
        self._clock = clock
        self._paused = paused
        self._workers = workers
        self._detours: dict[Delivery, float] = {}
        """What workers do now in place of the handler, the oldest first, and since when."""
        self._detours_in_doubt = False
        self._chance = chance
        self._about = about

    def _fields(self, event: str, delivery: Delivery, **more: object) -> dict[str, object]:
        return record_fields(event, delivery, **more, **self._about)

    def failed(self, delivery: Delivery, error: BaseException, shards: Shards) -> bool:
        """Settle a failed attempt, or a detour that failed.

        Returns:
            Whether the worker goes on with the same delivery: a detour follows at once.
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
        """Settle a failed attempt of several records at once, of which nobody knows which one is to blame.

        So none is given up, however often it has failed: all run again, after the same delay, in smaller batches.

        Args:
            deliveries: Those that failed.
            heads: Those among them that hold their shards; the others wait behind them.
            error: What the attempt raised.
            shards: Where they are.
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
        """A record failed behind one of its shard that failed too: it runs again after that, whatever it was."""
        _note(delivery, error)
        delivery.epoch.counts.retried += 1

    def give_up(self, delivery: Delivery, error: BaseException, shards: Shards, *, keyed: bool = True) -> bool:
        """No attempt follows any more; returns whether a detour follows at once.

        Args:
            delivery: What has failed.
            error: What it failed with.
            shards: Where it is.
            keyed: Whether it has a shard key; its handler must not see it otherwise, also not as a probe.
        """
        note = delivery.failure
        assert note is not None  # noqa: S101 - set by whoever noted the failure
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
        """Have the delivery keep its shard until somebody releases it."""
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
        """A run that had timed out went on and returned: nobody knows what it did, so its shard halts."""
        _note(delivery, error)
        self.halt(delivery, error, shards)

    def outlived(self, run: object, deliveries: Sequence[Delivery]) -> None:
        """A run that was cancelled went on and returned: what it was given stays incomplete.

        Args:
            run: By which name: that of a record, or of a batch.
            deliveries: What it was given.
        """
        message = "the handler of %r swallowed its cancellation; what it was given stays incomplete"
        fields = self._fields("swallowed", deliveries[0], records=len(deliveries))
        logger.warning(message, run, extra=fields)

    def unkeyed(self, delivery: Delivery, error: Exception, shards: Shards) -> None:
        """The sharding function failed for a record: it cannot run in order, and no attempt makes sense."""
        _note(delivery, error)
        if self.give_up(delivery, error, shards, keyed=False):
            shards.again(delivery)

    async def _divert_later(self, delivery: Delivery) -> Outcome:
        verdict = self._recourse.decide(delivery)
        if not isinstance(verdict, Detour):
            raise HandlerError(verdict.why if isinstance(verdict, Pause) else "it cannot be diverted")
        delivery.detour = verdict  # it is paid for: when it fails, it is not asked for again
        return await verdict.take(delivery)

    # Detours ------------------------------------------------------------------------

    def begin_detour(self, delivery: Delivery) -> bool:
        """Whether a worker may take the detour of a delivery now; else `hold_back` is to be called.

        While detours fail, or take long, they may keep half of the workers only: a side topic that acknowledges
        nothing must not stop the records that succeed.
        """
        now = self._clock()
        oldest = next(iter(self._detours.values()), now)
        self._detours_in_doubt |= now - oldest > _SLOW_DETOUR
        if self._detours_in_doubt and len(self._detours) >= max(self._workers() // 2, 1):
            return False
        self._detours[delivery] = now
        return True

    def end_detour(self, delivery: Delivery, *, succeeded: bool) -> None:
        """A worker has ended a detour, well or not."""
        self._detours.pop(delivery, None)
        self._detours_in_doubt &= not succeeded

    def hold_back(self, delivery: Delivery, shards: Shards) -> None:
        """Have a delivery wait until fewer others take detours."""
        assert delivery.detour is not None  # noqa: S101 - why it is held back
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
    """Take note of a failed attempt."""
    delivery.failures += 1
    delivery.failure = FailureNote(type(error).__name__, _message_of(error), delivery.failures)
    return delivery.failure


def _message_of(error: BaseException) -> str:
    """What an exception says; some of those that users write cannot say it, and that must not end the worker."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - the user's code; the record failed and nothing else
        return f"its message cannot be shown ({type(failure).__name__})"


def _traceback_of(error: BaseException) -> BaseException | None:
    """What the log shows the traceback of; None where that has no line of the user's code in it.

    The payload that an annotation asks for is decoded by us, and the message says all that is known.
    """
    return None if isinstance(error, DecodeError) and error.__suppress_context__ and not error.__cause__ else error
