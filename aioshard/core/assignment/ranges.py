"""Range assignment: each topic separately, in runs of neighbouring partitions."""

from collections.abc import Mapping

from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment, subscribers
from aioshard.records import TopicPartition

__all__ = ["assign_ranges"]


def assign_ranges(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Split each topic over its subscribers; the first ones get one more if the division leaves a remainder.

    Partitions with the same number in several topics go to the same member, which joins need. With several topics,
    the same members get the remainder of each.

    Example:
        >>> members = {name: Member(frozenset({"t"})) for name in "ab"}
        >>> [[at.partition for at in got] for got in assign_ranges(members, {"t": range(3)}).values()]
        [[0, 1], [2]]
    """
    pairs = []
    for topic, names in subscribers(members, partitions).items():
        numbers = sorted(partitions[topic])
        each, more = divmod(len(numbers), len(names))
        start = 0
        for position, name in enumerate(names):
            end = start + each + (position < more)
            pairs += [(TopicPartition(topic, number), name) for number in numbers[start:end]]
            start = end
    return as_assignment(members, pairs)
