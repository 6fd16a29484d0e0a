"""When the event loop of a run stood still, as the ends of its records show: what their durations have too much.

While a loop stands still (a call that blocks it, the garbage collector, another program on its core), every handler
that waits at that moment takes longer by what is left of it. A journal has that with the durations, and a simulation
takes it for work. It shows: many handlers were running, for a while none of them ended, and then those that did had
taken longer than others do.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Stalls", "stalls_of"]

_SHORTEST = 2_000
"""Microseconds: shorter than that, it is also how long timers are late by themselves."""
_EXPECTED_ENDS = 6.0
"""So many ends would have been expected in a gap: by chance there is none in one of 400 such gaps."""
_SOON = 1_000
"""Microseconds after a gap in which those that waited for its end are seen to end."""
_LONGER = 0.25
"""Of a gap: by so much have those that end after it taken longer than usual, most of them. Handlers that take one and
the same time, and began together, end together after a gap as well; they have not."""


class Stalls(NamedTuple):
    """How the event loop stood still; microseconds."""

    times: int
    longest: int
    total: int
    """How long it stood still in all."""
    waited: int
    """What that has added to the durations of all records, about."""


def stalls_of(started: Sequence[int], finished: Sequence[int]) -> Stalls:
    """Find where the event loop of one process stood still.

    Args:
        started: When the handler of each record began, in microseconds, in any order.
        finished: When it ended, in the same order.

    Example:
        Four handlers at a time, one of which ends every millisecond; all of them wait from 20 ms to 40 ms.

        >>> begun = [1_000 * number for number in range(60)]
        >>> ended = [one + 4_000 for one in begun]
        >>> moved = [one if one < 20_000 else one + 20_000 for one in begun]
        >>> stalls_of(moved, [max(one, 40_000) if 20_000 < one < 24_000 else one + 20_000 * (one >= 24_000)
        ...     for one in ended])
        Stalls(times=1, longest=20000, total=20000, waited=54000)
    """
    begins, ends = np.asarray(started, np.int64), np.asarray(finished, np.int64)
    if not len(ends):
        return Stalls(0, 0, 0, 0)
    durations = ends - begins
    usual = max(float(np.median(durations)), 1.0)
    order = np.argsort(ends, kind="stable")
    ends, of_end = ends[order], durations[order]
    begins = np.sort(begins)
    moments = np.sort(np.concatenate([begins, ends]))
    gaps = np.diff(moments)
    at = moments[:-1]
    running = np.searchsorted(begins, at, "right") - np.searchsorted(ends, at, "right")
    count = longest = total = waited = 0
    for place in np.flatnonzero((gaps >= _SHORTEST) & (running * gaps >= _EXPECTED_ENDS * usual)):
        gap, since = int(gaps[place]), int(at[place])
        first, last = np.searchsorted(ends, [since + gap, since + gap + _SOON + 1], "left")
        late = of_end[first:last][ends[first:last] - of_end[first:last] <= since]
        if len(late) and float(np.median(late)) - usual >= _LONGER * gap:
            count, longest, total = count + 1, max(longest, gap), total + gap
            # What is left of those that run is anything up to what they usually take; all beyond it is waiting.
            each = gap - usual / 2 if gap > usual else gap * gap / (2 * usual)
            waited += round(int(running[place]) * each)
    return Stalls(count, longest, total, waited)
