"""Flow control: how much more of a partition may be buffered, and how much a fetch may return."""

from typing import NamedTuple

_MINIMUM_SHARE = 100
_LEAST_FETCH = 16 * 1024
_MOST_FETCH = 1024 * 1024


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
    return NONE if records <= 0 or size <= 0 else Usage(records, size)


def _room(bound: int, total: int, held: int, *, stuck: bool) -> int:
    free = bound - total
    room = max((free - held) // 2, 1 if free > held else 0)
    return min(room, _least(bound) - held) if stuck else room


def minimum(bounds: Usage) -> Usage:
    """Return what a partition that cannot advance may hold: a hundredth of the bounds, at least one record."""
    return Usage(_least(bounds.records), _least(bounds.bytes))


def _least(bound: int) -> int:
    return max(bound // _MINIMUM_SHARE, 1)


def partition_share(partitions: int, max_bytes: int) -> int:
    """Return the maximum bytes per partition in a fetch, for *max_bytes* over all partitions.

    At least 16 KiB, because smaller fetches cost more than they save, and at most 1 MiB. A broker returns at
    least one batch, of any size.
    """
    return min(max(max_bytes // max(partitions, 1), _LEAST_FETCH), _MOST_FETCH)


class FetchLimits(NamedTuple):
    """Maximum bytes that a fetch returns, unless a single batch is larger."""

    response: int
    partition: int


def fetch_limits(bound: int, used: int, partitions: int, requests: int) -> FetchLimits:
    """Return the limits of each of the next fetches.

    A broker returns at least one batch per response, but nothing of a partition whose limit is smaller than its next
    batch. With equal shares for many partitions, each fetch would return a single batch, and cost as much as one that
    returns megabytes. So a partition may use all free room, up to 1 MiB. Only the last quarter of the bound is shared
    equally: every partition finds some room there.

    Args:
        bound: Maximum bytes that may be fetched and not taken yet.
        used: Bytes fetched and not taken yet, including those that fetches in progress may return.
        partitions: The number of assigned partitions.
        requests: How many fetches are sent now; each goes to another broker.

    Example:
        >>> fetch_limits(32_000_000, 0, partitions=512, requests=1)
        FetchLimits(response=8000000, partition=1048576)
        >>> fetch_limits(32_000_000, 24_000_000, partitions=512, requests=1)
        FetchLimits(response=8000000, partition=16384)
    """
    reserve = bound // 4
    room = (bound - reserve - used) // requests
    most = min(_MOST_FETCH, reserve)
    if room < max(most // 4, _LEAST_FETCH):
        return FetchLimits(max(reserve, 1), partition_share(partitions, reserve))
    # While a response is decoded it is in memory twice, in addition to the rest of the previous response.
    return FetchLimits(min(room, reserve), min(most, room))
