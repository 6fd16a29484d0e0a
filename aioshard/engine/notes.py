"""Metadata of committed offsets: with it, a crash or a rebalance repeats only the records that were running."""

import dataclasses
import logging
from typing import NamedTuple

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.core.finished_offsets import records_with_room
from aioshard.engine.epoch import Epoch
from aioshard.ports import Committed

__all__ = ["Due", "Notes"]

logger = logging.getLogger("aioshard.engine.committer")

_AROUND = 195
"""Most characters of a text that are not its content, including those that deflating may add."""
_LEAST = 256
"""If the broker stores fewer characters than this, commits carry only offsets."""


class Due(NamedTuple):
    """The commit to send for an epoch, as of one moment."""

    committed: Committed
    completed: int
    """How many records of the epoch had completed at that moment."""


class Notes:
    """Writes the records finished beyond the committed offset into the metadata of the commit.

    Owned by the committer; the admission asks it how many more records fit.

    Invariants:
        * An offset and its metadata are from the same moment: only finished records are noted as finished.
        * Metadata never holds an offset back: if the broker does not store it, it is shortened or left out.
    """

    def __init__(self) -> None:
        self.most_units = MOST_UNITS
        """Longest text to send; reduced after a broker refused one, and 0 if it stores none."""

    def is_due(self, epoch: Epoch) -> bool:
        """Whether an epoch has an offset to commit or completions to note."""
        tracker = epoch.tracker
        if tracker.committable != epoch.acknowledged:
            return True
        # The committable offset is unchanged, so all completions since then lie beyond it.
        return bool(tracker) and tracker.completed != epoch.noted and self.most_units > 0 and not epoch.one_way

    def due(self, epoch: Epoch) -> Due:
        """Return the commit to send for an epoch now."""
        offset, completed = epoch.tracker.committable, epoch.tracker.completed
        text = ""
        if self.most_units:
            finished = () if epoch.one_way else tuple(epoch.finished())
            text = dataclasses.replace(epoch.mark, finished=finished).text(offset, self.most_units)
        return Due(Committed(offset, text), completed)

    def acknowledged(self, epoch: Epoch, due: Due) -> None:
        """Record that the broker has stored a commit."""
        epoch.acknowledged = due.committed.offset
        epoch.noted = due.completed
        epoch.note_length = len(due.committed.metadata)

    def refused(self, longest: int) -> None:
        """Send shorter texts from now on, because the broker does not store *longest* characters."""
        self.most_units = min(longest, self.most_units) // 2
        if self.most_units < _LEAST:
            self.most_units = 0
        logger.warning(
            "the broker does not store %d characters with an offset: from now on %d are tried. What does not fit is "
            "processed again after a crash; see offset.metadata.max.bytes of the broker",
            longest,
            self.most_units,
            extra={"event": "note_shortened", "refused": longest, "tried": self.most_units},
        )

    def room(self, epoch: Epoch) -> int | None:
        """How many more records a partition may take in so that all completions can be noted; None for any number."""
        if not self.most_units or epoch.one_way:
            return None
        tracker, inherited = epoch.tracker, epoch.inherited
        end = max(tracker.position, inherited[-1].end) if inherited else tracker.position
        units = max(self.most_units - _AROUND, 0)
        more = records_with_room(end - tracker.committable, len(tracker) + len(inherited), units)
        # Up to the end of an earlier owner's completions, the text does not grow: the gaps there are noted already.
        return max(more, end - tracker.position)
