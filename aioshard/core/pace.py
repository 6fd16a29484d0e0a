"""The rate limit of a handler, and the token bucket that enforces it."""

import dataclasses
import math

from aioshard.core.options import check, is_number, is_whole

_DEFAULT_BURST = 0.05
"""Seconds of tokens in the default burst."""


@dataclasses.dataclass(frozen=True, slots=True)
class RateLimit:
    """A limit on how many runs of a handler may start: at most `at_once + per_second * t` in any *t* seconds.

    Every attempt counts as a run, including retries. The limit applies per process.

    Attributes:
        per_second: Runs per second in the long run; 0.1 is one in ten seconds.
        burst: Runs that may start together after a quiet period; unused runs beyond that are lost. The default is the
            runs of a twentieth of a second, at least one: with less, an event loop that wakes up a millisecond late,
            as timers do, would stay below a high rate.

    Raises:
        HandlerError: If a value is outside its range.

    Example:
        >>> RateLimit(100).at_once
        5
        >>> RateLimit(per_second=0.5, burst=10).at_once
        10
    """

    per_second: float
    burst: int | None = None

    def __post_init__(self) -> None:
        is_valid = is_number(self.per_second) and 0 < self.per_second < math.inf
        check(self, "per_second", is_valid, "a number of runs greater than 0")
        check(self, "burst", self.burst is None or is_whole(self.burst), "a whole number of at least 1")

    @property
    def at_once(self) -> int:
        """Number of runs that may start at the same moment: *burst*, or its default."""
        return self.burst if self.burst is not None else max(int(self.per_second * _DEFAULT_BURST), 1)

    def shared_by(self, members: int) -> "RateLimit":
        """Return the limit for each of *members* that together keep this one in the long run.

        Example:
            >>> RateLimit(100, burst=10).shared_by(4)
            RateLimit(per_second=25.0, burst=2)
        """
        burst = None if self.burst is None else max(self.burst // members, 1)
        return RateLimit(self.per_second / members, burst)


class TokenBucket:
    """The tokens of one rate limit: each start takes one, and tokens return at the limit's rate.

    It counts tokens since it was last full instead of adding fractions to a level, so it never drifts, however long
    it is used. It has no clock: times are seconds on a monotonic clock of the caller.

    Invariants:
        * In any t seconds at most `at_once + per_second * t` calls of `take` return true.
        * No token is lost: a caller that takes each one as soon as it is due gets exactly `per_second` tokens.
        * `take(now)` returns true if and only if `due(now)` is 0.
    """

    __slots__ = ("_burst", "_full_at", "_rate", "_taken")

    def __init__(self, limit: RateLimit) -> None:
        self._rate = limit.per_second
        self._burst = limit.at_once
        self._full_at = -math.inf
        """When the bucket was last observed full."""
        self._taken = 0
        """Number of tokens taken since then."""

    def take(self, now: float) -> bool:
        """Take a token if one is available; return whether it was."""
        if self._full(now):
            self._full_at = now
            self._taken = 1
            return True
        if now < self._due_at():
            return False
        self._taken += 1
        return True

    def due(self, now: float) -> float:
        """Return the seconds until a token is available; 0 if there is one now."""
        return 0.0 if self._full(now) else max(self._due_at() - now, 0.0)

    def _full(self, now: float) -> bool:
        return now >= self._full_at + self._taken / self._rate

    def _due_at(self) -> float:
        return self._full_at + (self._taken + 1 - self._burst) / self._rate
