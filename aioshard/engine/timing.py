"""How long runs take and records wait, measured beside the hot path: one comparison per record.

The first bucket of the histogram ends at 5 ms. A worker that serves one record after another looks at the clock at the
begin of each run, as it always did. As long as that is less than 5 ms after some earlier begin, every run in between
was quicker than 5 ms, and all that is to be known of them is how many they were, and how long they took together. Only
when 5 ms have passed somebody has to look (`RunTimes.turn`), at most two hundred times a second and worker: the
latest run may have been a slow one, and is then measured exactly.
"""

import time
from collections.abc import Callable
from typing import Final

from aioshard.core.histogram import DURATION_BOUNDS
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch

__all__ = ["AT_ONCE", "RunTimes", "precise", "waited"]

AT_ONCE: Final = float("-inf")
"""`RunTimes.turn` is due at the next begin."""

_QUICK = DURATION_BOUNDS[0]
_THE_SAME = 0.01


def precise(clock: Callable[[], float]) -> Callable[[], float]:
    """The same clock, where it is that of a loop which tells whole milliseconds, and only when it has turned.

    Args:
        clock: Loop time; virtual time is left alone.
    """
    return time.monotonic if abs(time.monotonic() - clock()) < _THE_SAME else clock


def waited(delivery: Delivery, now: float) -> None:
    """Take note of how long a record has waited for its first run; it stands for those that started unobserved."""
    if delivery.starts:
        return
    counts = delivery.epoch.counts
    weight = max(counts.processed - counts.waited, 1)
    counts.waited += weight
    counts.waits.add(max(now - delivery.arrived, 0.0), weight)


class RunTimes:
    """Measures the runs of one worker, in streaks: runs of which each began when the one before it had ended.

    Invariants:
        * Every run that was processed is in the durations of its topic once, soon after: 5 ms, or when the worker
          waits. One that took longer than 5 ms is there before the loop turns.
        * Of those that were quicker, the count is exact per topic. Their time is too, unless the worker serves
          several topics: then the one that runs when it is looked at gets it, which is right on average.
    """

    __slots__ = ("_counts", "since")

    def __init__(self) -> None:
        self._counts: TopicCounts | None = None
        """Of the topic in which the streak began; None between two streaks."""
        self.since = 0.0
        """Until when the time of the streak is accounted for; later, where the worker did something else meanwhile."""

    def turn(self, ran: Epoch | None, started: float, now: float, delivery: Delivery) -> float:
        """A run is about to begin; whatever ran before has ended just now.

        Args:
            ran: Whose record ran.
            started: When.
            now: The time.
            delivery: What is about to begin.

        Returns:
            When this is to be called again: at the first begin from then on.
        """
        self.close(ran, started, now)
        self._counts = delivery.epoch.counts
        self.since = now
        waited(delivery, now)
        return now + _QUICK

    def close(self, ran: Epoch | None, started: float, now: float) -> float:
        """The streak ends: what ran last, has ended just now. Does nothing between two streaks.

        Returns:
            When `turn` is to be called: `AT_ONCE`.
        """
        if self._counts is None or ran is None:
            return AT_ONCE
        self._counts = None
        counts = ran.counts
        since = self.since
        if now - started > _QUICK:
            self.alone(counts, now - started)
            now = started
        _add_quick(counts, now - since)
        return AT_ONCE

    def cut(self, now: float) -> float:
        """The streak has ended at *now*, and all its runs were quick; what runs since then is measured elsewhere.

        Returns:
            When `turn` is to be called: `AT_ONCE`.
        """
        counts = self._counts
        if counts is not None:
            self._counts = None
            _add_quick(counts, max(now - self.since, 0.0))
        return AT_ONCE

    @staticmethod
    def alone(counts: TopicCounts, seconds: float) -> None:
        """A run has succeeded that is no quick one of a streak; it counts as processed, now or soon."""
        counts.durations.add(seconds)
        counts.noted += 1


def _add_quick(counts: TopicCounts, seconds: float) -> None:
    """What has been processed since the last look, and is not noted, was quick, whichever worker ran it."""
    runs = counts.processed - counts.noted
    if runs > 0:
        counts.noted += runs
        counts.durations.add_below(runs, seconds)
    else:
        counts.durations.add_below(0, seconds)
