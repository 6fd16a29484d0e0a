"""What the commands about a group have in common: the group and its offsets, looked at once."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import click

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.kafka.groups import Group, GroupBrokers
from aioshard.kafka.history import GroupMember, LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition

__all__ = ["Look", "Place", "bounds_of", "group_argument", "look", "place_as_object", "there_is_none"]

group_argument = click.argument("group", metavar="GROUP")


class Place(NamedTuple):
    """Where a group is on a partition."""

    committed: Committed | None
    bounds: LogBounds | None
    """None where there is no such partition any more."""
    member: GroupMember | None
    """Who has it now."""

    @property
    def noted(self) -> CommitMetadata:
        """What is noted with the offset."""
        return CommitMetadata() if self.committed is None else CommitMetadata.read(self.committed.metadata, self.offset)

    @property
    def offset(self) -> int:
        """The committed offset; -1 without one."""
        return -1 if self.committed is None else self.committed.offset

    @property
    def finished(self) -> int:
        """How many offsets beyond the committed one are noted as finished."""
        return sum(run.end - run.start for run in self.noted.finished)

    @property
    def lag(self) -> int | None:
        """How many offsets are not committed; None where nothing is, or the partition is gone."""
        if self.bounds is None or self.committed is None:
            return None
        return max(self.bounds.stable - max(self.offset, self.bounds.start), 0)


class Look(NamedTuple):
    """A group at one moment."""

    group: Group
    places: Mapping[TopicPartition, Place]
    """By partition, in order: all that it has committed or one of its members has."""


async def look(brokers: GroupBrokers, group_id: str) -> Look:
    """Look at a group now.

    Raises:
        TransportError: The brokers did not tell.
    """
    group, commits = await asyncio.gather(brokers.group(group_id), brokers.all_commits(group_id))
    owners = group.owners
    names = sorted({*commits, *owners})
    bounds = await bounds_of(brokers, names)
    places = {one: Place(commits.get(one), bounds.get(one), owners.get(one)) for one in names}
    return Look(group, places)


def there_is_none(group_id: str, found: Look) -> str | None:
    """A sentence where the brokers know no such group: mostly its name is misspelt. None where they know it."""
    if found.group.state != "dead" or found.places:
        return None
    return (
        f"there is no group {group_id!r}: it has no members and has committed nothing; check its name, which is the "
        "first argument of App"
    )


async def bounds_of(brokers: GroupBrokers, names: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
    """The bounds of those partitions that there are: a group may have commits of topics that were deleted."""
    there = await brokers.topics()
    known = {topic: await brokers.partitions(topic) for topic in {one.topic for one in names} & there}
    asked = [one for one in names if one.partition in known.get(one.topic, ())]
    return await brokers.bounds(asked) if asked else {}


def place_as_object(one: TopicPartition, place: Place) -> dict[str, Any]:
    """A place, for JSON."""
    noted = place.noted
    return {
        "topic": one.topic,
        "partition": one.partition,
        "committed": None if place.committed is None else place.offset,
        "log_start": None if place.bounds is None else place.bounds.start,
        "end": None if place.bounds is None else place.bounds.stable,
        "lag": place.lag,
        "member": None if place.member is None else place.member.member_id,
        "finished_beyond": [list(each) for each in noted.finished],
        "lease": None if noted.lease is None else noted.lease._asdict(),
        "foreign": noted.foreign,
        "ignored": list(noted.ignored),
    }
