"""How many runs may start in a time: rate limits, and the token buckets that keep them."""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable

from aioshard.errors import HandlerError

__all__ = ["KeyedTokenBuckets", "RateLimit", "TokenBucket"]

_DEFAULT_BURST = 0.05
"""Seconds whose tokens may be taken at once where no burst was given."""


@dataclasses.dataclass(frozen=True, slots=True)
class RateLimit:
    """How many runs of a handler may start: in any *t* seconds at most `at_once + per_second * t`.

    Every attempt counts as a run, those after a failure too. The limit is that of one process.

    Attributes:
        per_second: Runs per second in the long run; 0.1 is one in ten seconds.
        burst: How many may start at once after a quiet time; what a longer one leaves unused is lost. By default as
            many as come in a twentieth of a second, at least one: with less, a loop that is late by a millisecond,
            as timers are, would stay below a high rate.

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
        rate, burst = self.per_second, self.burst
        if type(rate) not in (int, float) or not 0 < rate < math.inf:
            raise HandlerError(f"RateLimit(per_second={rate!r}) was refused: expected a number of runs greater than 0")
        if burst is not None and (type(burst) is not int or burst < 1):
            raise HandlerError(f"RateLimit(burst={burst!r}) was refused: expected a whole number of at least 1")

    @property
    def at_once(self) -> int:
        """How many runs may start at the same moment: *burst*, or its default."""
        return self.burst if self.burst is not None else max(int(self.per_second * _DEFAULT_BURST), 1)

    def shared_by(self, members: int) -> "RateLimit":
        """The limit of each of *members* that together keep this one in the long run.

        Example:
            >>> RateLimit(100, burst=10).shared_by(4)
            RateLimit(per_second=25.0, burst=2)
        """
        burst = None if self.burst is None else max(self.burst // members, 1)
        return RateLimit(self.per_second / members, burst)


class TokenBucket:
    """The tokens of one rate limit: each start takes one, and they come back at the limit's rate.

    Counts the tokens since it was last full instead of adding fractions to a level, so that nothing drifts however
    long it is in use. Has no clock: times are seconds on a clock of the caller's that does not go back.

    Invariants:
        * In any t seconds at most `at_once + per_second * t` calls of `take` are true.
        * No token is lost: whoever takes one as soon as it is due gets exactly `per_second` of them.
        * `take(now)` is true if and only if `due(now)` is 0.
    """

    __slots__ = ("_burst", "_full_at", "_rate", "_taken")

    def __init__(self, limit: RateLimit) -> None:
        self._rate = limit.per_second
        self._burst = limit.at_once
        self._full_at = -math.inf
        """When the bucket was full for the last time, as far as that mattered."""
        self._taken = 0
        """How many tokens were taken since then."""

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        if self.full(now):
            self._full_at = now
            self._taken = 1
            return True
        if now < self._due_at():
            return False
        self._taken += 1
        return True

    def due(self, now: float) -> float:
        """Seconds until there is a token; 0 when there is one."""
        return 0.0 if self.full(now) else max(self._due_at() - now, 0.0)

    def full(self, now: float) -> bool:
        """Whether all tokens have come back: the bucket is then as good as a new one."""
        return now >= self._full_at + self._taken / self._rate

    def _due_at(self) -> float:
        return self._full_at + (self._taken + 1 - self._burst) / self._rate


class KeyedTokenBuckets:
    """A token bucket for each key that was used lately; one that is full again is forgotten.

    Memory is bounded by the keys that took a token within the last `at_once / per_second` seconds, twice as many at the
    most while they are being forgotten: each new one makes room for two.

    Example:
        >>> buckets = KeyedTokenBuckets(RateLimit(1.0))
        >>> [buckets.take(key, now=0.0) for key in ("a", "b", "a")]
        [True, True, False]
        >>> buckets.due("a", now=0.25)
        0.75
        >>> buckets.take("c", now=5.0), len(buckets)
        (True, 1)
    """

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()
        """The one that was used longest ago comes first."""

    def __len__(self) -> int:
        """How many keys have a bucket that may not be full."""
        return len(self._buckets)

    def take(self, key: Hashable, now: float) -> bool:
        """Take a token of *key* if there is one."""
        bucket = self._buckets.get(key)
        if bucket is None:
            self._forget_full(now)
            self._buckets[key] = bucket = TokenBucket(self._limit)
        taken = bucket.take(now)
        if taken:
            self._buckets.move_to_end(key)
        return taken

    def due(self, key: Hashable, now: float) -> float:
        """Seconds until there is a token of *key*; 0 when there is one."""
        bucket = self._buckets.get(key)
        return bucket.due(now) if bucket is not None else 0.0

    def _forget_full(self, now: float) -> None:
        for _ in range(2):
            oldest = next(iter(self._buckets), None)
            if oldest is None or not self._buckets[oldest].full(now):
                return
            del self._buckets[oldest]
