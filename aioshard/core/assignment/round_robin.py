"""Round-robin assignment: all partitions in a row, all members in a circle."""

from collections.abc import Mapping

from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment, subscribers
from aioshard.records import TopicPartition

__all__ = ["assign_round_robin"]


def assign_round_robin(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Give each partition to the next member that subscribes to its topic.

    The result is even if all members subscribe to the same topics; otherwise some members may get nothing.

    Example:
        >>> members = {name: Member(frozenset({"t"})) for name in "ab"}
        >>> [[at.partition for at in got] for got in assign_round_robin(members, {"t": range(3)}).values()]
        [[0, 2], [1]]
    """
    circle = sorted(members)
    turn = 0
    pairs = []
    for topic in subscribers(members, partitions):
        for number in sorted(partitions[topic]):
            while topic not in members[circle[turn % len(circle)]].topics:
                turn += 1
            pairs.append((TopicPartition(topic, number), circle[turn % len(circle)]))
            turn += 1
    return as_assignment(members, pairs)
