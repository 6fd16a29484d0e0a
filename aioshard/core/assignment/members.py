"""What an assignor is told of a group, and what it answers."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from aioshard.records import TopicPartition

__all__ = ["Assignment", "Member", "Partitions", "as_assignment", "owners", "subscribers"]

Partitions: TypeAlias = Mapping[str, Collection[int]]
"""The partitions that each topic has."""

Assignment: TypeAlias = dict[str, tuple[TopicPartition, ...]]
"""What each member gets, in order; every member of the group is in it, with nothing where it gets nothing."""

NO_GENERATION = -1


@dataclass(frozen=True, slots=True)
class Member:
    """What one member of a group tells.

    Example:
        >>> Member(frozenset({"orders"}), owned=(TopicPartition("orders", 0),), generation=4).generation
        4
    """

    topics: frozenset[str]
    """What it subscribes to."""
    owned: Collection[TopicPartition] = ()
    """What it had until now; empty for one that is new."""
    generation: int = NO_GENERATION
    """The generation in which it got that."""
    backlogs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Records that are left of what it had, and of what nobody has, as far as it knows."""


def subscribers(members: Mapping[str, Member], partitions: Partitions) -> dict[str, tuple[str, ...]]:
    """Who may get the partitions of each topic, in the order of their names; only topics that somebody may get.

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
    """Who had each partition and may have it again.

    Where two claim the same one, because one of them was thought dead for a while, it is whose generation is later;
    within one generation, which no correct group has, the first by name.
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
    """The assignment that consists of pairs of a partition and its member."""
    found: dict[str, list[TopicPartition]] = {name: [] for name in sorted(members)}
    for topic_partition, name in pairs:
        found[name].append(topic_partition)
    return {name: tuple(sorted(got)) for name, got in found.items()}
