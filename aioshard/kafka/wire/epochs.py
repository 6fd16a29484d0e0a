"""Positions in a log, and the leader epochs in which the records before them were written (KIP-320)."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

UNKNOWN = -1
"""An unknown leader epoch, and in responses an unknown offset."""


class Position(NamedTuple):
    """Where the next fetch of a partition begins."""

    offset: int
    epoch: int = UNKNOWN
    """The leader epoch of the batch before the offset; it proves that the log is still the one that was read."""


class EpochStart(NamedTuple):
    """The first offset that was read of a leader epoch; the epoch lasts until the next start."""

    offset: int
    epoch: int


def epoch_before(starts: Sequence[EpochStart], offset: int) -> int:
    """Return the leader epoch of the batch before *offset*; `UNKNOWN` if nothing before it was read.

    Example:
        >>> starts = [EpochStart(10, 3), EpochStart(40, 5)]
        >>> [epoch_before(starts, offset) for offset in (10, 11, 40, 41)]
        [-1, 3, 3, 5]
    """
    for start in reversed(starts):
        if start.offset < offset:
            return start.epoch
    return UNKNOWN


def parting(position: Position, epoch: int, end: int, starts: Iterable[EpochStart] = ()) -> Position:
    """Return where to continue if the leader's log may differ from the one that was read.

    Args:
        position: The position, with its epoch.
        epoch: The leader's largest epoch that is not above the position's.
        end: Where that epoch ends in the leader's log.
        starts: The epochs of the records that were read. Where the leader does not have them, other records may have
            taken their offsets, or compaction has removed them all. To read from there repeats none of them.

    Example:
        >>> read = [EpochStart(0, 5), EpochStart(300, 6)]
        >>> parting(Position(400, 6), 6, 350, read), parting(Position(400, 6), 5, 450, read)
        (Position(offset=350, epoch=6), Position(offset=300, epoch=5))
    """
    offset = min(position.offset, end)
    if epoch < position.epoch:
        missing = [start.offset for start in starts if start.epoch > epoch]
        offset = min([offset, *missing])
    return Position(offset, epoch)
