"""Lag-aware: the records that are still to be read, spread evenly; and the partitions, where hardly any are left."""

from collections.abc import Collection, Mapping

from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment, owners, subscribers
from aioshard.core.assignment.sticky import assign_sticky
from aioshard.records import TopicPartition

__all__ = ["assign_backlog", "backlogs"]

_NOISE = 100
"""A member's share of the backlog divided by this is noise: partitions that together have less count as read to the
end, and for less than that nothing is moved."""


def assign_backlog(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Spread what is left to read so that no move of one partition makes it more even.

    Partitions stay where they were as far as that allows. Those with hardly any backlog are spread by their number.
    Where nothing is known of any backlog, it is sticky.

    Example:
        >>> had = {TopicPartition("t", 0): 900, TopicPartition("t", 1): 500, TopicPartition("t", 2): 400}
        >>> members = {"a": Member(frozenset({"t"}), had.keys(), 1, had), "b": Member(frozenset({"t"}))}
        >>> [[at.partition for at in got] for got in assign_backlog(members, {"t": range(3)}).values()]
        [[1, 2], [0]]
    """
    left = backlogs(members, partitions)
    total = sum(left.values())
    if not total:
        return assign_sticky(members, partitions)
    noise = total / (_NOISE * len(members))
    ignored = _smallest(left, noise)
    weights = {at: 0 if at in ignored else backlog for at, backlog in left.items()}
    largest = max(weights.values())
    homes = owners(members, partitions)
    kept, fresh = (_Loads(members, partitions, weights, begin) for begin in (homes, {}))
    for loads in (kept, fresh):
        loads.place_the_rest()
        loads.even_out(noise)
    # What stays where it was may be in the way of something better, which single moves do not find.
    best = fresh if kept.most() - fresh.most() > largest else kept
    best.spread_what_is_empty(homes)
    return best.assignment()


def backlogs(members: Mapping[str, Member], partitions: Partitions) -> dict[TopicPartition, int]:
    """What is left to read of each partition that somebody may get.

    It is what its owner says; of a partition without one, the least that anybody says. Where nobody says anything it is
    the mean of those that are known.
    """
    owned_by = owners(members, partitions)
    known: dict[TopicPartition, int] = {}
    for name, member in members.items():
        for at, told in member.backlogs.items():
            if owned_by.get(at, name) == name:
                left = max(told, 0)
                known[at] = min(left, known.get(at, left))
    everything = [
        TopicPartition(topic, number)
        for topic in subscribers(members, partitions)
        for number in sorted(partitions[topic])
    ]
    found = [known[at] for at in everything if at in known]
    mean = sum(found) // len(found) if found else 0
    return {at: known.get(at, mean) for at in everything}


def _smallest(left: Mapping[TopicPartition, int], most: float) -> Collection[TopicPartition]:
    """The partitions with the smallest backlogs, as many of them as have *most* records together."""
    found = set()
    total = 0
    for at in sorted(left, key=lambda one: (left[one], one)):
        total += left[at]
        if total > most:
            break
        found.add(at)
    return found


class _Loads:
    """What each member has to read while an assignment is worked out; partitions that weigh nothing come last."""

    def __init__(
        self,
        members: Mapping[str, Member],
        partitions: Partitions,
        weights: Mapping[TopicPartition, int],
        begin: Mapping[TopicPartition, str],
    ) -> None:
        self._weights = weights
        self._subscribers = subscribers(members, partitions)
        self._topics = {name: members[name].topics for name in sorted(members)}
        self._held: dict[str, set[TopicPartition]] = {name: set() for name in self._topics}
        self._load = dict.fromkeys(self._topics, 0)
        for at, name in begin.items():
            if weights[at]:
                self._put(at, name)

    def assignment(self) -> Assignment:
        return as_assignment(self._held, ((at, name) for name, held in self._held.items() for at in held))

    def most(self) -> int:
        """What the member that has most to read has."""
        return max(self._load.values())

    def place_the_rest(self) -> None:
        """Give what nobody has to whoever has least to read, the largest first."""
        placed = set().union(*self._held.values())
        rest = [at for at, weight in self._weights.items() if weight and at not in placed]
        for at in sorted(rest, key=lambda one: (-self._weights[one], one)):
            self._put(
                at, min(self._subscribers[at.topic], key=lambda one: (self._load[one], len(self._held[one]), one))
            )

    def even_out(self, enough: float) -> None:
        """Move partitions one by one from who has much to who has little, until no move helps.

        Args:
            enough: Records that a move has to take off the one who has more, at least.
        """
        while any(self._relieve(name, enough) for name in sorted(self._load, key=lambda one: (-self._load[one], one))):
            pass

    def _relieve(self, giver: str, enough: float) -> bool:
        for taker in sorted(self._load, key=lambda one: (self._load[one], one)):
            gap = self._load[giver] - self._load[taker]
            if gap <= enough:
                return False
            helping = [
                at for at in self._held[giver] if self._weights[at] < gap - enough and at.topic in self._topics[taker]
            ]
            if helping:
                self._move(min(helping, key=lambda one: (abs(2 * self._weights[one] - gap), one)), giver, taker)
                return True
        return False

    def spread_what_is_empty(self, homes: Mapping[TopicPartition, str]) -> None:
        """Give out the partitions that weigh nothing, so that each member has about as many partitions as others."""
        empty = sorted(at for at, weight in self._weights.items() if not weight)
        for at in empty:
            if at in homes:
                self._put(at, homes[at])
        for at in empty:
            if at not in homes:
                self._put(
                    at, min(self._subscribers[at.topic], key=lambda one: (len(self._held[one]), self._load[one], one))
                )
        while any(self._thin_out(name) for name in sorted(self._held, key=lambda one: (-len(self._held[one]), one))):
            pass

    def _thin_out(self, giver: str) -> bool:
        for taker in sorted(self._held, key=lambda one: (len(self._held[one]), self._load[one], one)):
            if len(self._held[giver]) - len(self._held[taker]) <= 1:
                return False
            empty = [at for at in self._held[giver] if not self._weights[at] and at.topic in self._topics[taker]]
            if empty:
                self._move(max(empty), giver, taker)
                return True
        return False

    def _move(self, at: TopicPartition, giver: str, taker: str) -> None:
        self._held[giver].remove(at)
        self._load[giver] -= self._weights[at]
        self._put(at, taker)

    def _put(self, at: TopicPartition, name: str) -> None:
        self._held[name].add(at)
        self._load[name] += self._weights[at]
