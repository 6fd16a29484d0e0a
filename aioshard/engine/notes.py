"""What is noted with each committed offset, so that a crash or a move repeats only what ran."""

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
"""Characters of a text that are not the content of what is finished, and what deflating may add: at most."""
_LEAST = 256
"""A broker that stores no more than that gets nothing but offsets."""


class Due(NamedTuple):
    """What is to be sent for an epoch, as of one moment."""

    committed: Committed
    completed: int
    """How many records of the epoch had completed then."""


class Notes:
    """Writes what is finished beyond the committed offset into the text that goes with it.

    Owned by the committer; the admission asks how much has room.

    Invariants:
        * An offset and its text are of the same moment: nothing is noted as finished that was not.
        * A text never holds an offset back: what the broker does not store is made shorter, or left out.
    """

    def __init__(self) -> None:
        self.most_units = MOST_UNITS
        """How long a text may be; less when a broker has refused one, and 0 when it stores none."""

    def is_due(self, epoch: Epoch) -> bool:
        """Whether something of an epoch may be committed, or be noted, and is not yet."""
        tracker = epoch.tracker
        if tracker.committable != epoch.acknowledged:
            return True
        # With the same committable offset, whatever has completed since lies beyond it.
        return bool(tracker) and tracker.completed != epoch.noted and self.most_units > 0 and not epoch.one_way

    def due(self, epoch: Epoch) -> Due:
        """What to send for an epoch now."""
        offset, completed = epoch.tracker.committable, epoch.tracker.completed
        text = ""
        if self.most_units:
            finished = () if epoch.one_way else tuple(epoch.finished())
            text = dataclasses.replace(epoch.mark, finished=finished).text(offset, self.most_units)
        return Due(Committed(offset, text), completed)

    def acknowledged(self, epoch: Epoch, due: Due) -> None:
        """The broker has stored it."""
        epoch.acknowledged = due.committed.offset
        epoch.noted = due.completed
        epoch.note_length = len(due.committed.metadata)

    def refused(self, longest: int) -> None:
        """The broker does not store texts of *longest* characters; shorter ones are tried from now on."""
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
        """How many more records a partition may take in, so that whatever finishes can be noted; None is any number."""
        if not self.most_units or epoch.one_way:
            return None
        tracker, inherited = epoch.tracker, epoch.inherited
        end = max(tracker.position, inherited[-1].end) if inherited else tracker.position
        units = max(self.most_units - _AROUND, 0)
        more = records_with_room(end - tracker.committable, len(tracker) + len(inherited), units)
        # Up to the end of what another owner noted nothing grows: what is missing there is noted as missing already.
        return max(more, end - tracker.position)
