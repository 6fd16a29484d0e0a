"""Lag-aware assignment: spread the remaining records evenly, and partitions with hardly any by their number."""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence

from aioshard.core.assignment.balance import quotas
from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment, owners, subscribers
from aioshard.core.assignment.sticky import keep_even
from aioshard.records import TopicPartition

__all__ = ["assign_backlog", "backlogs"]

_NOISE = 100
"""A member's share of the backlog divided by this is noise. Partitions with less backlog than that in total count as
fully read, and no move is made for a smaller gain."""


def assign_backlog(members: Mapping[str, Member], partitions: Partitions) -> Assignment:
    """Spread the remaining records until moving a single partition cannot make the backlogs more even.

    Partitions otherwise stay where they are. Partitions with hardly any backlog are spread by number. If no backlog
    is known at all, the assignment is sticky.

    Example:
        >>> had = {TopicPartition("t", 0): 900, TopicPartition("t", 1): 500, TopicPartition("t", 2): 400}
        >>> members = {"a": Member(frozenset({"t"}), had.keys(), 1, had), "b": Member(frozenset({"t"}))}
        >>> [[at.partition for at in got] for got in assign_backlog(members, {"t": range(3)}).values()]
        [[1, 2], [0]]
    """
    homes = owners(members, partitions)
    left = backlogs(members, partitions, homes)
    total = sum(left.values())
    noise = total / (_NOISE * len(members))
    empty = _smallest(left, noise)
    weights = {at: backlog for at, backlog in left.items() if at not in empty}
    largest = max(weights.values(), default=0)
    fresh = _Loads(members, partitions, weights, {})
    fresh.place_the_rest()
    fresh.even_out(noise)
    kept = _Loads(members, partitions, weights, homes)
    kept.release_surplus(fresh.load, largest)
    kept.place_the_rest()
    kept.even_out(noise)
    # The kept partitions can block a better assignment that single moves do not find.
    best = fresh if max(kept.load.values()) - max(fresh.load.values()) > largest else kept
    # The empty partitions even out the number of partitions per member, including those with a backlog.
    numbers: dict[str, list[int]] = {}
    for topic, number in empty:
        numbers.setdefault(topic, []).append(number)
    spread = keep_even(members, numbers, {at: homes[at] for at in empty if at in homes}, best.counts())
    return as_assignment(members, [*best.pairs(), *spread.pairs()])


def backlogs(
    members: Mapping[str, Member], partitions: Partitions, homes: Mapping[TopicPartition, str]
) -> dict[TopicPartition, int]:
    """Estimate the records left in each partition that has a subscriber; *homes* are the owners.

    The owner's figure counts. Without an owner, the smallest reported figure counts. If nobody reports a partition,
    it gets the mean of the known ones.
    """
    known: dict[TopicPartition, int] = {}
    for name, member in members.items():
        for at, told in member.backlogs.items():
            if homes.get(at, name) == name:
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
    """Select the partitions with the smallest backlogs, up to *most* records in total."""
    found = set()
    total = 0
    for backlog, at in sorted((backlog, at) for at, backlog in left.items()):
        total += backlog
        if total > most:
            break
        found.add(at)
    return found


class _Loads:
    """The backlog of each member while an assignment is computed."""

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
        self._held: dict[str, dict[str, list[tuple[int, TopicPartition]]]] = {name: {} for name in self._topics}
        """Sorted pairs of (backlog, partition), by member and topic."""
        self._rest = weights.keys() - begin.keys()
        self.load = dict.fromkeys(self._topics, 0)
        """Backlog by member."""
        for at, name in begin.items():
            if at in weights:
                self._append(at, name)
        self._sort()

    def pairs(self) -> Iterator[tuple[TopicPartition, str]]:
        """Yield each partition with its member."""
        for name, topics in self._held.items():
            for pairs in topics.values():
                for _, at in pairs:
                    yield at, name

    def counts(self) -> dict[str, int]:
        """Return the number of partitions of each member."""
        return {name: sum(map(len, topics.values())) for name, topics in self._held.items()}

    def release_surplus(self, fresh: Mapping[str, int], allowance: int) -> None:
        """Release the largest partitions of members more than *allowance* above their fresh assignment."""
        for name, quota in quotas(self._topics, self.load, fresh).items():
            everything = itertools.chain.from_iterable(self._held[name].values())
            for _, at in sorted(everything, reverse=True):
                if self.load[name] <= quota + allowance:
                    break
                self._take(at, name)
                self._rest.add(at)

    def place_the_rest(self) -> None:
        """Give unassigned partitions, largest first, to the member with the least backlog."""
        waiting: dict[tuple[str, ...], list[tuple[int, int, str]]] = {}
        counts = self.counts()
        for _, at in sorted((-self._weights[at], at) for at in self._rest):
            names = self._subscribers[at.topic]
            if names not in waiting:
                waiting[names] = sorted((self.load[name], counts[name], name) for name in names)
            heap = waiting[names]
            while heap[0][0] != self.load[name := heap[0][2]]:  # got more through another topic
                heapq.heapreplace(heap, (self.load[name], counts[name], name))
            self._append(at, name)
            counts[name] += 1
            heapq.heapreplace(heap, (self.load[name], counts[name], name))
        self._rest.clear()
        self._sort()

    def even_out(self, enough: float) -> None:
        """Move single partitions from members with a large backlog to members with a small one until no move helps.

        Args:
            enough: Minimum number of records by which a move must relieve the more loaded member.
        """
        while any(self._relieve(name, enough) for name in sorted(self.load, key=lambda one: (-self.load[one], one))):
            pass

    def _relieve(self, giver: str, enough: float) -> bool:
        for taker in sorted(self.load, key=lambda one: (self.load[one], one)):
            gap = self.load[giver] - self.load[taker]
            if gap <= enough:
                return False
            helping = [
                (abs(2 * weight - gap), at)
                for topic, pairs in self._held[giver].items()
                if topic in self._topics[taker]
                for weight, at in _nearest(pairs, gap / 2, gap - enough)
            ]
            if helping:
                _, at = min(helping)
                self._take(at, giver)
                insort(self._held[taker].setdefault(at.topic, []), (self._weights[at], at))
                self.load[taker] += self._weights[at]
                return True
        return False

    def _append(self, at: TopicPartition, name: str) -> None:
        """Give a partition to a member without sorting; call `_sort` afterwards."""
        self._held[name].setdefault(at.topic, []).append((self._weights[at], at))
        self.load[name] += self._weights[at]

    def _sort(self) -> None:
        for topics in self._held.values():
            for pairs in topics.values():
                pairs.sort()

    def _take(self, at: TopicPartition, name: str) -> None:
        pairs = self._held[name][at.topic]
        del pairs[bisect_left(pairs, (self._weights[at], at))]
        self.load[name] -= self._weights[at]


def _nearest(
    pairs: Sequence[tuple[int, TopicPartition]], weight: float, below: float
) -> Sequence[tuple[int, TopicPartition]]:
    """Return the neighbours of *weight* in the sorted pairs, only those below the limit."""
    end = bisect_left(pairs, (below,))
    at = min(bisect_left(pairs, (weight,)), end)
    return pairs[max(at - 1, 0) : min(at + 1, end)]
