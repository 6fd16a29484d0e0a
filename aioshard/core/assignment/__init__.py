"""Assign partitions to the members of a group: pure functions that give the same result on every member."""

from collections.abc import Callable, Mapping

from aioshard.core.assignment.backlog import assign_backlog
from aioshard.core.assignment.fair import assign_fair
from aioshard.core.assignment.members import Assignment, Member, Partitions
from aioshard.core.assignment.ranges import assign_ranges
from aioshard.core.assignment.round_robin import assign_round_robin
from aioshard.core.assignment.sticky import assign_sticky

__all__ = ["ASSIGNORS", "Assign", "Assignment", "Member", "Partitions"]

Assign = Callable[[Mapping[str, Member], Partitions], Assignment]

ASSIGNORS: Mapping[str, Assign] = {
    "range": assign_ranges,
    "roundrobin": assign_round_robin,
    "sticky": assign_sticky,
    "fair": assign_fair,
    "lag": assign_backlog,
}
"""The assignors by their names in the setting `assignor`."""
