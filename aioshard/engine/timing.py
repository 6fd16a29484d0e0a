"""Run and wait times, measured almost without work on the hot path: one comparison per record.

The first bucket of the histogram ends at 5 ms. A worker that runs one record after another reads the clock at the
start of each run anyway. If less than 5 ms have passed since some earlier start, every run in between took less than
5 ms, so only their number and their total time matter. Once 5 ms have passed, the worker must call `RunTimes.turn`,
at most two hundred times a second: the latest run may have been slow, and is then measured exactly.

A thousand workers with a slow handler would call it once per record. So `RecordWorker.run` does its work inline when a
slow run follows another one: that run is all there is to account for.
"""

import time
from collections.abc import Callable
from typing import Final

from aioshard.core.histogram import DURATION_BOUNDS
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch

AT_ONCE: Final = float("-inf")
"""A time that makes `RunTimes.turn` due at the start of the next run."""

QUICK: Final = DURATION_BOUNDS[0]
"""Seconds that a quick run takes at most."""
_SAME_CLOCK = 0.01


def precise(clock: Callable[[], float]) -> Callable[[], float]:
    """Return `time.monotonic` for a loop whose clock counts whole milliseconds and advances only once per iteration.

    Args:
        clock: Loop time; a virtual clock is returned as it is.
    """
    return time.monotonic if abs(time.monotonic() - clock()) < _SAME_CLOCK else clock


def waited(delivery: Delivery, now: float) -> None:
    """Record how long a record waited for its first run, also on behalf of those that started unobserved."""
    counts = delivery.epoch.counts
    if delivery.starts or now < counts.next_waited:
        return
    counts.next_waited = now + QUICK
    weight = max(counts.processed - counts.waited, 1)
    counts.waited += weight
    counts.waits.add(max(now - delivery.arrived, 0.0), weight)


class RunTimes:
    """Measures the runs of one worker in streaks: runs that each begin when the one before has ended.

    Invariants:
        * Every processed run enters the durations of its topic once, within 5 ms or when the worker waits. A run that
          took longer than 5 ms is there before the event loop continues.
        * For quicker runs, the count per topic is exact. So is their time, unless the worker serves several topics:
          then the topic that runs at the moment of a check gets it, which is right on average.
    """

    __slots__ = ("counts", "since")

    def __init__(self) -> None:
        self.counts: TopicCounts | None = None
        """Counts of the topic in which the streak began; None between two streaks."""
        self.since = 0.0
        """Time up to which the streak is accounted for; later if the worker did something else meanwhile."""

    def turn(self, ran: Epoch | None, started: float, now: float, delivery: Delivery) -> float:
        """Account for the streak so far: the run before has just ended, and another one is about to begin.

        Args:
            ran: Epoch of the record that ran.
            started: When that run began.
            now: The current time.
            delivery: The delivery that is about to run.

        Returns:
            When to call this again: at the first start of a run from then on.
        """
        self.close(ran, started, now)
        self.counts = delivery.epoch.counts
        self.since = now
        waited(delivery, now)
        return now + QUICK

    def close(self, ran: Epoch | None, started: float, now: float) -> float:
        """End the streak, whose last run has just ended; do nothing between two streaks.

        Returns:
            When to call `turn`: `AT_ONCE`.
        """
        if self.counts is None or ran is None:
            return AT_ONCE
        self.counts = None
        counts = ran.counts
        since = self.since
        if now - started > QUICK:
            self.alone(counts, now - started)
            now = started
        _add_quick(counts, now - since)
        return AT_ONCE

    def cut(self, now: float) -> float:
        """End the streak at *now*: all its runs were quick, and anything after it is measured elsewhere.

        Returns:
            When to call `turn`: `AT_ONCE`.
        """
        counts = self.counts
        if counts is not None:
            self.counts = None
            _add_quick(counts, max(now - self.since, 0.0))
        return AT_ONCE

    @staticmethod
    def alone(counts: TopicCounts, seconds: float) -> None:
        """Record a successful run that is not a quick one of a streak; it counts as processed, now or soon."""
        counts.durations.add(seconds)
        counts.timed += 1


def _add_quick(counts: TopicCounts, seconds: float) -> None:
    """Count as quick the processed runs of any worker that are not in the durations yet."""
    runs = max(counts.processed - counts.timed, 0)
    counts.timed += runs
    counts.durations.add_below(runs, seconds)
