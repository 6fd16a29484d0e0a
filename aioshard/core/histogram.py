"""A histogram that is cheap to add to, and its frozen counts."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence

DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds in seconds that OpenTelemetry's messaging conventions advise for durations."""


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A snapshot of a histogram."""

    bounds: tuple[float, ...]
    """Upper bounds of all buckets except the last, which has none; a value equal to a bound is in the bucket below."""
    counts: tuple[int, ...]
    """Number of values in each bucket, one more than there are bounds; not cumulative."""
    total: float
    """Sum of the values."""

    @property
    def count(self) -> int:
        """Total number of values."""
        return sum(self.counts)

    def __add__(self, other: "HistogramCounts") -> "HistogramCounts":
        """Return the sum of two snapshots with the same bounds."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return HistogramCounts(self.bounds, counts, self.total + other.total)


class Histogram:
    """A histogram with fixed buckets.

    The next value often belongs in the bucket of the latest one, which takes two comparisons to find out. `add` does
    that, and so does the worker, without a call.

    Invariants:
        * Nothing is ever removed, so `counts` never decreases.
        * Values that are greater than `above` and at most `up_to` belong in the bucket `latest`.

    Example:
        >>> histogram = Histogram((0.1, 1.0))
        >>> histogram.add(0.05, weight=3)
        >>> histogram.add(2.0)
        >>> histogram.counts()
        HistogramCounts(bounds=(0.1, 1.0), counts=(3, 0, 1), total=2.15)
    """

    def __init__(self, bounds: Sequence[float] = DURATION_BOUNDS) -> None:
        """Create an empty histogram.

        Args:
            bounds: Upper bounds of the buckets, ascending.
        """
        self._bounds = tuple(bounds)
        self.buckets = [0] * (len(self._bounds) + 1)
        """Number of values in each bucket; the last one has no upper bound."""
        self.total = 0.0
        """Sum of the values."""
        self.latest = 0
        """Index of the bucket of the latest value."""
        self.above = 0.0
        """Lower bound of that bucket; 0 for the first one, so that only `add` sees values that are not positive."""
        self.up_to = self._bounds[0] if self._bounds else math.inf
        """Upper bound of that bucket."""

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value.

        Args:
            value: In the unit of the bounds.
            weight: Number of equal values to count.
        """
        if not self.above < value <= self.up_to:
            self._find_bucket(value)
        self.buckets[self.latest] += weight
        self.total += value * weight

    def _find_bucket(self, value: float) -> None:
        """Make the bucket of a value the latest one."""
        bounds = self._bounds
        index = bisect_left(bounds, value)
        self.latest = index
        self.above = bounds[index - 1] if index > 0 else 0.0
        self.up_to = bounds[index] if index < len(bounds) else math.inf

    def add_below(self, count: int, total: float) -> None:
        """Count values at or below the first bound, given by their number and sum.

        Args:
            count: Number of values.
            total: Sum of the values.
        """
        self.buckets[0] += count
        self.total += total

    def counts(self) -> HistogramCounts:
        """Return a snapshot. Safe from any thread."""
        return HistogramCounts(self._bounds, tuple(self.buckets), self.total)
