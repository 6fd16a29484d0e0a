"""Input and output of an assignor."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from aioshard.records import TopicPartition

__all__ = ["Assignment", "Member", "Partitions", "as_assignment", "owners", "subscribers"]

Partitions: TypeAlias = Mapping[str, Collection[int]]
"""The partitions of each topic."""

Assignment: TypeAlias = dict[str, tuple[TopicPartition, ...]]
"""The sorted partitions of every member of the group; empty for members that get none."""

NO_GENERATION = -1


@dataclass(frozen=True, slots=True)
class Member:
    """State that one member of a group reports.

    Example:
        >>> Member(frozenset({"orders"}), owned=(TopicPartition("orders", 0),), generation=4).generation
        4
    """

    topics: frozenset[str]
    """The topics it subscribes to."""
    owned: Collection[TopicPartition] = ()
    """The partitions it owned until now; empty for a new member."""
    generation: int = NO_GENERATION
    """The generation in which it received them."""
    backlogs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Records left in the partitions it owned and in unowned ones, as far as the member knows."""


def subscribers(members: Mapping[str, Member], partitions: Partitions) -> dict[str, tuple[str, ...]]:
    """Return the subscribers of each topic, sorted by name; topics without a subscriber are left out.

    Example:
        >>> members = {"b": Member(frozenset({"t"})), "a": Member(frozenset({"t", "gone"}))}
        >>> subscribers(members, {"t": [0], "other": [0]})
        {'t': ('a', 'b')}
    """
    found: dict[str, list[str]] = {}
    for name in sorted(members):
        for topic in members[name].topics & partitions.keys():
            found.setdefault(topic, []).append(name)
    return {topic: tuple(found[topic]) for topic in sorted(found)}


def owners(members: Mapping[str, Member], partitions: Partitions) -> dict[TopicPartition, str]:
    """Return the previous owner of each partition, if it may keep the partition.

    If two members claim the same partition, because one was considered dead for a while, the later generation wins;
    within one generation, which does not happen in a correct group, the first name wins.
    """
    latest: dict[TopicPartition, str] = {}
    for name in sorted(sorted(members, reverse=True), key=lambda one: members[one].generation):
        latest.update(dict.fromkeys(members[name].owned, name))
    known = {topic: frozenset(numbers) for topic, numbers in partitions.items()}
    return {
        owned: name
        for owned, name in latest.items()
        if owned.topic in members[name].topics and owned.partition in known.get(owned.topic, ())
    }


def as_assignment(members: Iterable[str], pairs: Iterable[tuple[TopicPartition, str]]) -> Assignment:
    """Build an assignment from pairs of a partition and its member."""
    found: dict[str, list[TopicPartition]] = {name: [] for name in sorted(members)}
    for topic_partition, name in pairs:
        found[name].append(topic_partition)
    return {name: tuple(sorted(got)) for name, got in found.items()}
