"""Fair assignment (KIP-49): the same number of partitions for every member, across all topics."""

from collections.abc import Mapping

from aioshard.core.assignment.balance import Holdings
from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment

__all__ = ["assign_fair"]


def assign_fair(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Spread partitions so evenly that no move and no chain of moves makes them more even.

    It has no memory: the same members and topics always give the same assignment.

    Example:
        >>> members = {"a": Member(frozenset({"t", "u"})), "b": Member(frozenset({"u"}))}
        >>> [sorted({at.topic for at in got}) for got in assign_fair(members, {"t": range(2), "u": range(2)}).values()]
        [['t'], ['u']]
    """
    holdings = Holdings(members, partitions)
    holdings.place_the_rest()
    holdings.level()
    return as_assignment(members, holdings.pairs())
