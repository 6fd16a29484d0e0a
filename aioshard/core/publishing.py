"""The outputs that a transaction may publish: those of records that its offset or its text covers.

Under exactly-once processing, the outputs of a record and its completion become visible together. If a transaction
published outputs of a record that neither its offset nor its text lists as finished, the record would run again after a
crash, and publish them a second time. The text is short, so outputs that it cannot cover wait for a later transaction.
"""

import bisect
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from aioshard.core.finished_offsets import LAST_OFFSET, Run, beyond, holds, joined


class Span(NamedTuple):
    """The records whose run produced some outputs; all of them must be covered together."""

    first: int
    """Lowest offset; that of a single record, or the lowest one of a batch."""
    last: int


class Coverage(NamedTuple):
    """The coverage of one transaction."""

    offset: int
    """The offset to commit."""
    text: str
    """The text to commit with it."""
    listed: tuple[Run, ...]
    """The finished records beyond the offset that the text lists."""
    below: int
    """All finished records below this offset are covered."""

    @property
    def is_whole(self) -> bool:
        """Whether all finished records are covered."""
        return self.below == LAST_OFFSET

    def covers(self, span: Span) -> bool:
        """Return whether the outputs of these records may be published."""
        return span.last < self.below or holds(self.listed, span.last)


Text = Callable[[int, tuple[Run, ...]], str | None]
"""Returns the text that lists all of these records with an offset; None if the broker would not store it."""


def coverage(
    committable: int,
    finished: Sequence[Run],
    published: Sequence[Run],
    waiting: Callable[[], Collection[Span]],
    text: Text,
) -> Coverage | None:
    """Return what the next transaction of a partition covers.

    Later records of a key finish later and have higher offsets. So the lowest finished records are covered first, and
    the outputs of a key stay in order.

    Args:
        committable: The oldest incomplete offset.
        finished: All finished records beyond it.
        published: Those that an earlier transaction has listed: their outputs are visible, so they stay listed. Some
            may lie below *committable*.
        waiting: Returns the records whose outputs are not published yet; called only if the text is too short.
        text: Makes the text.

    Returns:
        The coverage; None if no text that lists the published records can be stored now.
    """
    # 1. Usually the text has room for everything.
    whole = text(committable, tuple(finished))
    if whole is not None:
        return Coverage(committable, whole, tuple(finished), LAST_OFFSET)

    # 2. Otherwise it lists what was published before, and as many of the lowest runs as fit.
    def listing(offset: int, below: int) -> tuple[Run, ...]:
        lowest = [Run(max(run.start, offset), min(run.end, below)) for run in finished if run.start < below]
        return tuple(joined([*lowest, *beyond(published, max(offset, below))]))

    bounds = [committable, *(run.end for run in finished)]
    fitting = bisect.bisect_left(bounds, 1, key=lambda below: text(committable, listing(committable, below)) is None)
    below = bounds[max(fitting - 1, 0)]

    # 3. A batch is covered as a whole or not at all: its outputs belong to all of its records.
    offset = committable
    spans = waiting()
    while split := [span.first for span in spans if span.first < below <= span.last]:
        below = min(split)
        offset = min(committable, below)
    listed = listing(offset, below)
    stored = text(offset, listed)
    return None if stored is None else Coverage(offset, stored, listed, below)
