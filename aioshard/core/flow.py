"""Flow control: how much more of a partition may be buffered."""

from typing import NamedTuple

_MINIMUM_SHARE = 100


class Usage(NamedTuple):
    """A number of records and bytes, in use or allowed."""

    records: int
    bytes: int


NONE = Usage(0, 0)


def room_for(bounds: Usage, total: Usage, held: Usage, *, stuck: bool) -> Usage:
    """Return how much one partition may buffer now, in addition to its current usage.

    A partition may hold at most half of what would be free without it, so a partition that starts later always finds
    half of the rest. As records complete, n busy partitions converge to 1/(n + 1) of the bounds each. A partition that
    cannot advance holds at most a hundredth: records piling up behind a halted one never starve the others.

    Args:
        bounds: The bounds of the process.
        total: Usage of all partitions.
        held: Usage of this partition.
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
    return min(room, _least(bound) - held) if stuck else room


def minimum(bounds: Usage) -> Usage:
    """Return what a partition that cannot advance may hold: a hundredth of the bounds, at least one record."""
    return Usage(_least(bounds.records), _least(bounds.bytes))


def _least(bound: int) -> int:
    return max(bound // _MINIMUM_SHARE, 1)
