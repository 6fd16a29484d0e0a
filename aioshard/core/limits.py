"""Rate limits as plain values: token buckets, a bucket for each key, and the share of one member of a group.

Nothing here has a clock: times are seconds on a monotonic clock of the caller.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping

from aioshard.records import TopicPartition

_SWEPT = 2
"""How many of the oldest buckets each start looks at, to forget those that are full."""


class TokenBucket:
    """The tokens of one rate limit: each start takes one, and tokens return at the limit's rate.

    It counts tokens since a moment at which it knew its level, instead of adding fractions to the level. So it never
    drifts, however long it is used.

    Invariants:
        * In any t seconds without a `resize` at most `capacity + per_second * t` calls of `take` return true.
        * `resize` never adds tokens: afterwards the bucket has as many as before, or its new capacity if that is less.
        * No token is lost: a caller that takes each one as soon as it is due gets exactly `per_second` tokens.
        * `take(now)` returns true if and only if `due(now)` is 0.
    """

    __slots__ = ("_capacity", "_level", "_rate", "_since", "_taken")

    def __init__(self, per_second: float, capacity: float) -> None:
        """Make a full bucket.

        Args:
            per_second: Tokens per second; 0 if none ever returns, and none may be taken.
            capacity: Maximum number of tokens; at least 1, unless the rate is 0.
        """
        self._rate = per_second
        self._capacity = capacity
        self._since = -math.inf
        """When the number of tokens was last known."""
        self._level = capacity
        """Number of tokens at that moment."""
        self._taken = 0
        """Number of tokens taken since then."""

    def take(self, now: float) -> bool:
        """Take a token if one is available; return whether it was."""
        if self.due(now):
            return False
        if self.is_full(now):
            self._since = now
            self._level = self._capacity
            self._taken = 0
        self._taken += 1
        return True

    def put_back(self) -> None:
        """Return the token that `take` has just taken, which was not needed."""
        self._taken -= 1

    def due(self, now: float) -> float:
        """Return the seconds until a token is available: 0 if there is one now, infinity with a rate of 0."""
        if not self._rate:
            return math.inf
        if self.is_full(now):
            return 0.0
        due_at = self._since + (self._taken + 1 - self._level) / self._rate
        return max(due_at - now, 0.0)

    def tokens(self, now: float) -> int:
        """Return how many tokens may be taken now."""
        return 0 if self.due(now) else max(int(self.level(now)), 1)

    def level(self, now: float) -> float:
        """Return the number of tokens, with the fraction that has returned of the next one."""
        if self.is_full(now):
            return self._capacity
        level = self._level - self._taken
        return level + (now - self._since) * self._rate if self._rate else level

    def is_full(self, now: float) -> bool:
        """Return whether it has all its tokens; then it is as good as a new one."""
        missing = self._capacity - self._level + self._taken
        if not self._rate:
            return missing <= 0
        return now >= self._since + missing / self._rate

    def resize(self, per_second: float, capacity: float, now: float) -> None:
        """Change the rate and the capacity from *now* on; see the invariants."""
        self._level = min(self.level(now), capacity)
        self._since = now
        self._taken = 0
        self._rate = per_second
        self._capacity = capacity


class KeyBuckets:
    """A token bucket for each key.

    A full bucket is as good as a new one, so it is forgotten. Each start looks at two of the oldest buckets for that,
    so no timer is needed.

    Invariants:
        * A key has no bucket only if it has all its tokens.
        * While starts continue, there are at most three times as many buckets as there were keys without all their
          tokens at the same time.
    """

    __slots__ = ("_buckets", "_capacity", "_rate")

    def __init__(self, per_second: float, capacity: float) -> None:
        """Start with all tokens for every key; see `TokenBucket`."""
        self._rate = per_second
        self._capacity = capacity
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        """Number of buckets in memory. Safe from any thread."""
        return len(self._buckets)

    def take(self, key: Hashable, now: float) -> float:
        """Take a token of a key if one is available; return 0 if it was, or the seconds until one is."""
        self._sweep(now)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._rate, self._capacity)
        due = bucket.due(now)
        if not due:
            bucket.take(now)
        return due

    def put_back(self, key: Hashable) -> None:
        """Return the token that `take` has just taken, which was not needed."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.put_back()

    def _sweep(self, now: float) -> None:
        """Look at the oldest buckets, and forget those that are full."""
        for _ in range(min(_SWEPT, len(self._buckets))):
            key, bucket = self._buckets.popitem(last=False)
            if not bucket.is_full(now):
                self._buckets[key] = bucket


def share_of(owned: Collection[TopicPartition], sizes: Mapping[str, int]) -> float:
    """Return the share of a group's limit for a member that owns these partitions.

    A partition has one owner, so the shares of all members add up to at most 1.

    Args:
        owned: The partitions that the member owns, of the topics of the limit.
        sizes: Number of partitions of each topic of the limit, as far as it is known. A topic has at least as many
            as the number of an owned partition shows.

    Example:
        >>> owned = [TopicPartition("orders", 0), TopicPartition("orders", 1), TopicPartition("refunds", 0)]
        >>> share_of(owned, {"orders": 4, "refunds": 2})
        0.5
    """
    if not owned:
        return 0.0
    known = dict(sizes)
    for topic, partition in owned:
        known[topic] = max(known.get(topic, 0), partition + 1)
    return len(owned) / sum(known.values())
