"""Sticky assignment: as even as fair, with the fewest moves."""

from collections.abc import Mapping

from aioshard.core.assignment.balance import Holdings
from aioshard.core.assignment.keeping import keep_more
from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment, owners
from aioshard.records import TopicPartition

__all__ = ["assign_sticky", "keep_even"]


def assign_sticky(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Leave partitions where they are, and move only as many as an even assignment needs.

    Example:
        >>> from aioshard.records import TopicPartition
        >>> had = tuple(TopicPartition("t", number) for number in (0, 1, 2))
        >>> members = {"a": Member(frozenset({"t"}), owned=had, generation=1), "b": Member(frozenset({"t"}))}
        >>> [[at.partition for at in got] for got in assign_sticky(members, {"t": range(3)}).values()]
        [[0, 1], [2]]
    """
    return as_assignment(members, keep_even(members, partitions, owners(members, partitions)).pairs())


def keep_even(
    members: Mapping[str, Member],
    partitions: Partitions,
    homes: Mapping[TopicPartition, str],
    begin: Mapping[str, int] | None = None,
) -> Holdings:
    """Keep partitions at their homes while the loads stay even; *begin* is the load that members have in addition."""
    even = Holdings(members, partitions, begin=begin)
    even.place_the_rest()
    even.level()
    holdings = Holdings(members, partitions, homes, begin)
    # Only a start: levelling moves one partition at a time, and thousands may have to move.
    holdings.release_surplus(even.load)
    holdings.place_the_rest()
    holdings.level()
    keep_more(holdings)
    return holdings
