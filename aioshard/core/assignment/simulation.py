"""Who would get what, and what the death of each member would move and load on others."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aioshard.core.assignment import Assign
from aioshard.core.assignment.members import Assignment, Member, Partitions
from aioshard.records import TopicPartition

__all__ = ["Death", "Simulation", "simulate"]

_GENERATION = 1


@dataclass(frozen=True, slots=True)
class Death:
    """What happens when one member dies."""

    member: str
    takers: Mapping[str, int]
    """Who gets how many of its partitions; the one who gets most is first."""
    orphans: int
    """How many of its partitions nobody gets, because nobody else subscribes to their topics."""
    others_moved: int
    """Partitions of other members that change hands too."""
    assignment: Assignment
    """Who has what then."""

    @property
    def most(self) -> int:
        """Partitions of the member that has most then; 0 where nobody is left."""
        return max(map(len, self.assignment.values()), default=0)

    @property
    def least(self) -> int:
        """Partitions of the member that has fewest then; 0 where nobody is left."""
        return min(map(len, self.assignment.values()), default=0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """An assignment, and what each death makes of it."""

    assignment: Assignment
    deaths: tuple[Death, ...]

    @property
    def standbys(self) -> tuple[str, ...]:
        """Members that have nothing, and take over when another dies."""
        return tuple(name for name, got in self.assignment.items() if not got)

    @property
    def partitions(self) -> int:
        """How many partitions the members have together."""
        return sum(map(len, self.assignment.values()))


def simulate(
    assign: Assign,
    members: Mapping[str, Member],
    partitions: Partitions,
    backlogs: Mapping[TopicPartition, int] | None = None,
) -> Simulation:
    """Assign, and let each member die once.

    Args:
        assign: One of `ASSIGNORS`.
        members: The group, all of them new.
        partitions: Of each topic.
        backlogs: Records that are left of partitions. A group learns them when its members first tell, so with
            backlogs the assignment is that of the second rebalance.

    Example:
        >>> from aioshard.core.assignment import ASSIGNORS
        >>> members = {name: Member(frozenset({"t"})) for name in "abc"}
        >>> found = simulate(ASSIGNORS["sticky"], members, {"t": range(2)})
        >>> found.standbys, found.deaths[0].takers
        (('c',), {'c': 1})
    """
    known = backlogs or {}
    assignment = assign(members, partitions)
    if known:
        assignment = assign(_remembering(members, assignment, known), partitions)
    remembering = _remembering(members, assignment, known)
    deaths = tuple(_death(assign, remembering, partitions, name) for name in assignment)
    return Simulation(assignment, deaths)


def _remembering(
    members: Mapping[str, Member], assignment: Assignment, backlogs: Mapping[TopicPartition, int]
) -> dict[str, Member]:
    """The members as they are once they have their partitions."""
    return {
        name: replace(
            members[name],
            owned=got,
            generation=_GENERATION,
            backlogs={at: backlogs.get(at, 0) for at in got} if backlogs else {},
        )
        for name, got in assignment.items()
    }


def _death(assign: Assign, members: Mapping[str, Member], partitions: Partitions, dead: str) -> Death:
    rest = {name: member for name, member in members.items() if name != dead}
    after = assign(rest, partitions)
    holders = {at: name for name, got in after.items() for at in got}
    takers = Counter(holders[at] for at in sorted(members[dead].owned) if at in holders)
    return Death(
        member=dead,
        takers=dict(takers.most_common()),
        orphans=len(members[dead].owned) - takers.total(),
        others_moved=sum(holders[at] != name for name, member in rest.items() for at in member.owned),
        assignment=after,
    )
