"""A histogram that is cheap to add to, and its frozen counts."""

import dataclasses
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

    Invariants:
        * Nothing is ever removed, so `counts` never decreases.

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
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value.

        Args:
            value: In the unit of the bounds.
            weight: Number of equal values to count.
        """
        self._counts[bisect_left(self._bounds, value)] += weight
        self._total += value * weight

    def add_below(self, count: int, total: float) -> None:
        """Count values at or below the first bound, given by their number and sum.

        Args:
            count: Number of values.
            total: Sum of the values.
        """
        self._counts[0] += count
        self._total += total

    def counts(self) -> HistogramCounts:
        """Return a snapshot. Safe from any thread."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
