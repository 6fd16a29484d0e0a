"""How much more of a partition may be taken in."""

from typing import NamedTuple

__all__ = ["NONE", "Usage", "minimum", "room_for"]

_MINIMUM_SHARE = 100


class Usage(NamedTuple):
    """Records and bytes: what is held, or what may be."""

    records: int
    bytes: int


NONE = Usage(0, 0)


def room_for(bounds: Usage, total: Usage, held: Usage, *, stuck: bool) -> Usage:
    """What one partition may take in now, on top of what it holds.

    A partition may hold at most half of what would be free without it: whoever comes late always finds
    half of what is left. As records complete, n busy partitions come to an (n + 1)th each. A partition that
    cannot advance takes in no more than a hundredth: what piles up behind a halted record never starves
    the others.

    Args:
        bounds: The bounds of the process.
        total: What all partitions hold.
        held: What this partition holds.
        stuck: Whether its oldest incomplete record is halted or overdue.

    Example:
        >>> room_for(Usage(1000, 10**6), total=NONE, held=NONE, stuck=False)
        Usage(records=500, bytes=500000)
        >>> room_for(Usage(1000, 10**6), total=Usage(500, 0), held=Usage(500, 0), stuck=False).records
        0
        >>> room_for(Usage(1000, 10**6), total=Usage(3, 0), held=Usage(3, 0), stuck=True).records
        7
    """
    records = _room(bounds.records, total.records, held.records, stuck=stuck)
    size = _room(bounds.bytes, total.bytes, held.bytes, stuck=stuck)
    if records <= 0 or size <= 0:
        return NONE
    return Usage(records, size)


def _room(bound: int, total: int, held: int, *, stuck: bool) -> int:
    free = bound - total
    room = max((free - held) // 2, 1 if free > held else 0)
    if stuck:
        room = min(room, _least(bound) - held)
    return room


def minimum(bounds: Usage) -> Usage:
    """What a partition that cannot advance keeps: a hundredth of the bounds, at least one record."""
    return Usage(_least(bounds.records), _least(bounds.bytes))


def _least(bound: int) -> int:
    return max(bound // _MINIMUM_SHARE, 1)
