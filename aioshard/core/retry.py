"""Decide after a failed attempt: retry after a delay, or give up."""

import dataclasses

from aioshard.core.options import check, is_number, is_whole
from aioshard.errors import DecodeError, RetryLater


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """How often and when to retry a failed record; only its shard waits meanwhile.

    Attributes:
        attempts: Maximum number of runs, including the first.
        initial: Seconds before the second attempt.
        maximum: Upper limit of any delay, in seconds.
        factor: Factor by which each delay exceeds the previous one.
        jitter: Random share of a delay, 0 to 1, so that many failed records are not retried at the same moment.
        retry_on: Exceptions that are worth another attempt.
        give_up_on: Exceptions that are not; they take precedence over *retry_on*.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> retry = Retry(attempts=4, initial=0.5, maximum=1.5, jitter=0.0)
        >>> [retry.delay(ValueError(), attempt, chance=0.0) for attempt in (1, 2, 3, 4)]
        [0.5, 1.0, 1.5, None]
    """

    attempts: int = 5
    initial: float = 0.1
    maximum: float = 30.0
    factor: float = 2.0
    jitter: float = 0.2
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    give_up_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        check(self, "attempts", is_whole(self.attempts), "a whole number of at least 1: it counts the first run")
        for name in ("initial", "maximum", "factor", "jitter"):
            check(self, name, is_number(getattr(self, name)), "a number")
        check(self, "initial", self.initial >= 0, "a number of seconds, 0 or more")
        check(self, "maximum", self.maximum >= self.initial, f"at least initial={self.initial}")
        check(self, "factor", self.factor >= 1, "at least 1, so that delays do not shrink")
        check(self, "jitter", 0 <= self.jitter <= 1, "a share between 0 and 1")
        for name in ("retry_on", "give_up_on"):
            try:
                isinstance(None, getattr(self, name))
            except TypeError:
                check(self, name, False, "an exception class, or a tuple of them")  # noqa: FBT003 - just found out

    def delay(self, error: BaseException, attempt: int, chance: float) -> float | None:
        """Return the seconds until the next attempt, or None to give up: always after a `DecodeError`.

        A `RetryLater` chooses the delay.

        Args:
            error: The exception that attempt number *attempt* raised.
            attempt: Counted from 1.
            chance: A random number from 0 to 1; it changes the delay by up to ± `jitter` / 2 of its value.
        """
        if isinstance(error, RetryLater) and attempt < self.attempts:
            return error.seconds
        is_final = isinstance(error, (DecodeError, self.give_up_on)) or not isinstance(error, self.retry_on)
        if is_final or attempt >= self.attempts:
            return None
        # The exponent is capped: factor ** 5000 is an OverflowError, and `maximum` applies long before.
        delay = min(self.maximum, self.initial * self.factor ** min(attempt - 1, 100))
        return float(min(self.maximum, delay * (1 + self.jitter * (chance - 0.5))))
