"""Delayed reassignment: hold back the partitions of a lost member for a while, until its replacement joins."""

from collections.abc import Collection, Mapping

from aioshard.core.assignment.members import Member, Partitions, owners, subscribers
from aioshard.records import TopicPartition

__all__ = ["DelayedReassignment", "left_behind"]


def left_behind(
    members: Mapping[str, Member], partitions: Partitions, before: Collection[TopicPartition] | None
) -> frozenset[TopicPartition]:
    """Return the partitions of lost members, as long as no replacement has joined.

    A subscriber without partitions is a replacement: a new member, or a standby.

    Args:
        members: The current members, with the partitions that each of them owned.
        partitions: The partitions of each topic.
        before: The previously assigned partitions, to recognise new ones; None if unknown.

    Example:
        >>> had = (TopicPartition("t", 0),)
        >>> rest = {"a": Member(frozenset({"t"}), had, 4)}
        >>> left_behind(rest, {"t": range(2)}, None)
        frozenset({TopicPartition(topic='t', partition=1)})
        >>> left_behind(rest | {"b": Member(frozenset({"t"}))}, {"t": range(2)}, None)
        frozenset()
    """
    if not any(member.owned for member in members.values()):
        return frozenset()
    claimed = owners(members, partitions)
    return frozenset(
        at
        for topic, names in subscribers(members, partitions).items()
        if all(members[name].owned for name in names)
        for number in partitions[topic]
        if (at := TopicPartition(topic, number)) not in claimed and (before is None or at in before)
    )


class DelayedReassignment:
    """The partitions that the leader of a group holds back, and until when.

    Example:
        >>> delayed = DelayedReassignment(30)
        >>> rest = {"a": Member(frozenset({"t"}), (TopicPartition("t", 0),), 4)}
        >>> [len(delayed.withheld(rest, {"t": range(2)}, now)) for now in (100, 129, 130)]
        [1, 1, 0]
    """

    def __init__(self, delay: float) -> None:
        """Hold partitions back for *delay* seconds; 0 disables it."""
        self._delay = delay
        self._given: frozenset[TopicPartition] | None = None
        self.until: float | None = None
        """When the withheld partitions are given to the remaining members; None if nothing is withheld."""

    def withheld(self, members: Mapping[str, Member], partitions: Partitions, now: float) -> frozenset[TopicPartition]:
        """Return the partitions that must not be assigned yet.

        Args:
            members: The current members, with the partitions that each of them owned.
            partitions: The partitions of each topic.
            now: Seconds on a monotonic clock.
        """
        if not self._delay:
            return frozenset()
        missing = left_behind(members, partitions, self._given)
        if missing and self.until is None:
            self.until = now + self._delay
        if not missing or (self.until is not None and now >= self.until):
            missing, self.until = frozenset(), None
        self._given = frozenset(
            TopicPartition(topic, number) for topic, numbers in partitions.items() for number in numbers
        )
        return missing

    def forget(self) -> None:
        """Reset: another member has led the group in the meantime."""
        self._given = None
        self.until = None
