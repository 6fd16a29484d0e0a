"""Offsets of many partitions, and their division into tasks. Pure functions of plain values."""

import heapq
from collections.abc import Iterable, Mapping, Sequence

from aioshard.spark.runs.plan import PlannedRange

__all__ = ["Vector", "advanced", "ends_of", "packed", "ranges_between", "split", "starts_of"]

Vector = Mapping[str, Mapping[str, int]]
"""Offsets by topic and partition. Partitions are text because checkpoints store vectors as JSON."""


def starts_of(ranges: Iterable[PlannedRange]) -> dict[str, dict[str, int]]:
    """Return the starts of the ranges."""
    return _vector((one.topic, one.partition, one.start) for one in ranges)


def ends_of(ranges: Iterable[PlannedRange]) -> dict[str, dict[str, int]]:
    """Return the ends of the ranges."""
    return _vector((one.topic, one.partition, one.end) for one in ranges)


def ranges_between(start: Vector, end: Vector) -> list[PlannedRange]:
    """Return the non-empty ranges between two vectors; partitions missing from *start* are left out.

    Example:
        >>> ranges_between({"orders": {"0": 3, "1": 5}}, {"orders": {"0": 9, "1": 5}})
        [PlannedRange(topic='orders', partition=0, start=3, end=9)]
    """
    return [
        PlannedRange(topic=topic, partition=int(partition), start=first, end=end[topic][partition])
        for topic, offsets in sorted(start.items())
        for partition, first in sorted(offsets.items(), key=lambda item: int(item[0]))
        if end.get(topic, {}).get(partition, first) > first
    ]


def advanced(start: Vector, end: Vector, most: int) -> dict[str, dict[str, int]]:
    """Return a vector between two others, at most *most* offsets after the first.

    Each partition advances in proportion to its remaining offsets. All of them reach their ends together, and no batch
    is left to a few tasks.

    Args:
        start: The current vector.
        end: The upper bound.
        most: At least 1.

    Example:
        >>> advanced({"orders": {"0": 0, "1": 0}}, {"orders": {"0": 300, "1": 100}}, 40)
        {'orders': {'0': 30, '1': 10}}
    """
    left = ranges_between(start, end)
    total = sum(one.end - one.start for one in left)
    found = {topic: dict(offsets) for topic, offsets in start.items()}
    if total <= most:
        for one in left:
            found[one.topic][str(one.partition)] = one.end
        return found
    given = [(one.end - one.start) * most // total for one in left]
    spare = most - sum(given)
    # Distribute the rounding remainder to the partitions that lost most by it; ties go to the first.
    by_loss = sorted(range(len(left)), key=lambda index: -((left[index].end - left[index].start) * most % total))
    for index in by_loss[:spare]:
        given[index] += 1
    for one, more in zip(left, given, strict=True):
        found[one.topic][str(one.partition)] = one.start + more
    return found


def packed(ranges: Sequence[PlannedRange], tasks: int | None) -> list[list[PlannedRange]]:
    """Assign whole ranges to tasks: the largest first, each to the task with the least load.

    Args:
        ranges: Ranges of different partitions.
        tasks: Maximum number of tasks; None creates one per range.

    Example:
        >>> sizes = [PlannedRange(topic="t", partition=n, start=0, end=e) for n, e in enumerate((5, 9, 4))]
        >>> [[one.end for one in task] for task in packed(sizes, 2)]
        [[9], [5, 4]]
    """
    count = min(tasks or len(ranges), len(ranges))
    if not count:
        return []
    loads = [(0, number) for number in range(count)]
    found: list[list[PlannedRange]] = [[] for _ in range(count)]
    for one in sorted(ranges, key=lambda one: (one.start - one.end, one.topic, one.partition)):
        load, number = heapq.heappop(loads)
        found[number].append(one)
        heapq.heappush(loads, (load + one.end - one.start, number))
    return found


def split(ranges: Sequence[PlannedRange], tasks: int) -> list[list[PlannedRange]]:
    """Cut ranges into tasks of about the same size, splitting them if necessary: order within a partition is lost.

    Example:
        >>> tasks = split([PlannedRange(topic="t", partition=0, start=0, end=10)], 3)
        >>> [[(one.start, one.end) for one in task] for task in tasks]
        [[(0, 4)], [(4, 8)], [(8, 10)]]
    """
    total = sum(one.end - one.start for one in ranges)
    size = max(-(-total // max(tasks, 1)), 1)
    found: list[list[PlannedRange]] = []
    room = 0
    for one in ranges:
        start = one.start
        while start < one.end:
            # A task must not hold two parts of the same partition.
            if room == 0 or any(other.topic == one.topic and other.partition == one.partition for other in found[-1]):
                found.append([])
                room = size
            end = min(start + room, one.end)
            found[-1].append(PlannedRange(topic=one.topic, partition=one.partition, start=start, end=end))
            room -= end - start
            start = end
    return found


def _vector(offsets: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for topic, partition, offset in offsets:
        found.setdefault(topic, {})[str(partition)] = offset
    return found
