"""A guess at why a group does not advance, from what brokers tell: they know members and offsets, and no handlers."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from aioshard.cli.group_looking import Place
from aioshard.cli.tables import as_text, duration_as_text
from aioshard.kafka.groups import Group

__all__ = ["Movement", "cause_of", "cause_of_group", "commonest"]

_REBALANCING = {
    "preparingrebalance": "the group is rebalancing: it waits until every member has given back and joined again",
    "completingrebalance": "the group is rebalancing: it waits for the member that assigns",
    "assigning": "the group is rebalancing: its coordinator works out who gets what",
    "reconciling": "the group is rebalancing: members give back what goes to others",
}


class Movement(NamedTuple):
    """How a partition has moved between two looks."""

    seconds: float
    committed: int
    """Offsets by which the group has advanced."""
    arrived: int
    """Offsets by which the log has grown."""


def cause_of_group(group: Group) -> str | None:
    """What keeps the whole group from advancing, as its state tells; None where it is stable."""
    if group.state in _REBALANCING:
        return _REBALANCING[group.state]
    if group.members:
        return None
    return "nobody is in the group, unless partitions are given by hand: the brokers do not see who reads those"


def cause_of(group: Group, place: Place, moved: Movement | None, stands: float | None) -> str | None:
    """Why a partition is behind, and how long it may stay so; None where nothing tells, or it is not.

    Args:
        group: As it was described.
        place: Where the group is on the partition.
        moved: Since the look before; None at the first one.
        stands: For how many seconds it was seen where it is; None where it moves, or was not seen before.
    """
    if place.bounds is None:
        return "the partition is gone"
    if place.committed is not None and place.offset < place.bounds.start:
        return (
            f"from {place.offset} on records were deleted before they were read: the log begins at {place.bounds.start}"
        )
    if not place.lag:
        return None
    return next((one for one in (*_outside(group, place), *_inside(place, moved, stands))), None)


def _outside(group: Group, place: Place) -> Iterator[str]:
    """Causes for which no member can do anything."""
    lease = place.noted.lease
    if lease is not None and lease.until > time.time():
        yield f"leased to run {as_text(lease.plan)}"
    if (whole := cause_of_group(group)) is not None:
        yield whole.partition(":")[0].partition(",")[0]
    if place.member is None:
        yield "no member has it"


def _inside(place: Place, moved: Movement | None, stands: float | None) -> Iterator[str]:
    """Causes that the member has."""
    if moved is not None and moved.committed > 0:
        yield _pace(place.lag or 0, moved)
    if place.finished:
        yield f"record {place.offset} is not finished, {place.finished} beyond it are: ask its member, aioshard explain"
    if stands is not None:
        yield "its member commits nothing: it hangs, is paused or halted (aioshard explain), or has just died"


def _pace(lag: int, moved: Movement) -> str:
    net = moved.committed - moved.arrived
    if net <= 0:
        return "more comes in than is committed" if net < 0 else "as much comes in as is committed"
    return f"it catches up, in about {duration_as_text(max(lag * moved.seconds / net, 1.0))}"


def commonest(causes: Iterable[str | None]) -> str | None:
    """The cause that most partitions have; None where none has any."""
    counted = Counter(one for one in causes if one is not None)
    return counted.most_common(1)[0][0] if counted else None
