"""Which partitions finish last, and when."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from aioshard.records import TopicPartition, age

_MOST = 0.9
"""The share of the lag that the heaviest partitions hold."""


class Tail(NamedTuple):
    """The records left to process, and how long they take."""

    lag: int
    """Of all partitions."""
    partitions: int
    heaviest: int
    """The fewest partitions that hold nine tenths of the lag."""
    seconds: float | None
    """Until the last partition is done, if every lag keeps shrinking at its pace; None if one does not shrink."""

    def __str__(self) -> str:
        """Return a sentence without the final full stop."""
        done = "" if self.seconds is None else f"; the last is done in {age(self.seconds)}"
        return f"{_MOST:.0%} of the lag is in {self.heaviest} of {self.partitions} partitions{done}"


def tail_of(now: Mapping[TopicPartition, int], before: Mapping[TopicPartition, int], elapsed: float, /) -> Tail:
    """Describe the tail of some partitions.

    Args:
        now: The lag of each partition.
        before: The lag *elapsed* seconds earlier, so that new records since then count against the pace.
        elapsed: Above 0 if *before* has partitions.

    Example:
        >>> first, second = TopicPartition("orders", 0), TopicPartition("orders", 1)
        >>> print(tail_of({first: 3_000, second: 100}, {first: 3_600, second: 500}, 60.0))
        90% of the lag is in 1 of 2 partitions; the last is done in 5 min
    """
    lags = sorted(now.values(), reverse=True)
    total = sum(lags)
    heaviest = bisect_left(list(accumulate(lags)), _MOST * total) + 1 if total else 0
    seconds = 0.0
    for partition, lag in now.items():
        shrunk = before.get(partition, 0) - lag
        if lag and shrunk <= 0:
            return Tail(total, len(lags), heaviest, None)
        if lag:
            seconds = max(seconds, lag * elapsed / shrunk)
    return Tail(total, len(lags), heaviest, seconds)
