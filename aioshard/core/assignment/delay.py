"""Delayed reassignment: what a member had that is gone waits a while for the one that comes in its place."""

from collections.abc import Collection, Mapping

from aioshard.core.assignment.members import Member, Partitions, owners, subscribers
from aioshard.records import TopicPartition

__all__ = ["DelayedReassignment", "left_behind"]


def left_behind(
    members: Mapping[str, Member], partitions: Partitions, before: Collection[TopicPartition] | None
) -> frozenset[TopicPartition]:
    """The partitions of members that are gone, as long as nobody is there to take their place.

    Whoever has no partitions takes the place: a member that is new, or a standby.

    Args:
        members: Who is there now, with what each had.
        partitions: Of each topic.
        before: What was given out before, so that new partitions are told apart; None where that is not known.

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
    """What the leader of a group withholds, and until when.

    Example:
        >>> delayed = DelayedReassignment(30)
        >>> rest = {"a": Member(frozenset({"t"}), (TopicPartition("t", 0),), 4)}
        >>> [len(delayed.withheld(rest, {"t": range(2)}, now)) for now in (100, 129, 130)]
        [1, 1, 0]
    """

    def __init__(self, delay: float) -> None:
        """Withhold for *delay* seconds; 0 is never."""
        self._delay = delay
        self._given: frozenset[TopicPartition] | None = None
        self.until: float | None = None
        """When what is withheld now is given to those who are left; None where nothing is."""

    def withheld(self, members: Mapping[str, Member], partitions: Partitions, now: float) -> frozenset[TopicPartition]:
        """The partitions that nobody is to have yet.

        Args:
            members: Who is there now, with what each had.
            partitions: Of each topic.
            now: Seconds on a clock that does not go back.
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
        """Begin anew: another member has led the group meanwhile."""
        self._given = None
        self.until = None
