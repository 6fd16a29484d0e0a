"""Fair (KIP-49): the same number of partitions for everybody, over all topics together."""

from collections.abc import Mapping

from aioshard.core.assignment.balance import Holdings
from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment

__all__ = ["assign_fair"]


def assign_fair(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Spread partitions so evenly that no move, and no chain of moves, makes it more even.

    Has no memory: the same members and topics give the same assignment, whatever was before.

    Example:
        >>> members = {"a": Member(frozenset({"t", "u"})), "b": Member(frozenset({"u"}))}
        >>> [sorted({at.topic for at in got}) for got in assign_fair(members, {"t": range(2), "u": range(2)}).values()]
        [['t'], ['u']]
    """
    holdings = Holdings(members, partitions)
    holdings.place_the_rest()
    holdings.level()
    return as_assignment(members, holdings.pairs())
