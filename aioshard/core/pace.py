"""The token bucket that enforces the rate limit of a handler."""

import math

from aioshard.core.options import RateLimit


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
