"""Balance the number of partitions: place each at the least loaded member, then level until no chain of moves helps."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from aioshard.core.assignment.members import Member, Partitions, subscribers
from aioshard.records import TopicPartition

__all__ = ["Holdings", "quotas"]


class Holdings:
    """The partitions of each member while an assignment is computed.

    The cost of a move depends on the number of members, topics and homes, not of partitions: the leader assigns
    thousands of partitions on its event loop.

    Invariants:
        * A partition has at most one member, and that member subscribes to its topic.
        * The result depends only on the values, never on their order.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        partitions: Partitions,
        homes: Mapping[TopicPartition, str] | None = None,
        begin: Mapping[str, int] | None = None,
    ) -> None:
        """Place each partition at its home, if it has one.

        Args:
            members: All members of the group.
            partitions: The partitions of each topic.
            homes: The last owner of each partition that may keep it.
            begin: The number of partitions that members hold in addition to these.
        """
        self.names: Sequence[str] = sorted(members)
        self.topics = {name: frozenset(members[name].topics) for name in self.names}
        self.subscribers = subscribers(members, partitions)
        self.held: dict[str, dict[str, dict[str | None, list[int]]]] = {name: {} for name in self.names}
        """Sorted partition numbers by member, topic and home; no empty entries."""
        self.load = {**dict.fromkeys(self.names, 0), **(begin or {})}
        """Number of partitions of each member."""
        self._partitions = partitions
        self._homes: dict[str, dict[int, str]] = {topic: {} for topic in self.subscribers}
        for (topic, number), name in (homes or {}).items():
            self._homes[topic][number] = name
            self._put(topic, number, name)

    def pairs(self) -> Iterator[tuple[TopicPartition, str]]:
        """Yield each partition with its member."""
        for name, topics in self.held.items():
            for topic, by_home in topics.items():
                for numbers in by_home.values():
                    for number in numbers:
                        yield TopicPartition(topic, number), name

    # Placing ----------------------------------------------------------------------------

    def release_surplus(self, even: Mapping[str, int]) -> None:
        """Release partitions beyond an even load, first from topics of which the member has more than its share.

        Call it before anything has moved.
        """
        for name, quota in quotas(self.topics, self.load, even).items():
            topics = self.held[name]
            shares = {topic: len(self._partitions[topic]) / len(self.subscribers[topic]) for topic in topics}
            missing = [(shares[topic] - self._count(name, topic), topic) for topic in topics]
            heapq.heapify(missing)
            while missing and self.load[name] > quota:
                less, topic = missing[0]
                self._take(topic, topics[topic][name][-1], name)
                if topic in topics:
                    heapq.heapreplace(missing, (less + 1, topic))
                else:
                    heapq.heappop(missing)

    def place_the_rest(self) -> None:
        """Give unassigned partitions to the least loaded member; topics with the fewest subscribers go first."""
        for topic in sorted(
            self.subscribers, key=lambda one: (len(self.subscribers[one]), -len(self._partitions[one]), one)
        ):
            rest = set(self._partitions[topic])
            for name in self.subscribers[topic]:
                rest.difference_update(*self.held[name].get(topic, {}).values())
            waiting = [(self.load[name], self._count(name, topic), name) for name in self.subscribers[topic]]
            heapq.heapify(waiting)
            for number in sorted(rest):
                load, of_topic, name = waiting[0]
                self._put(topic, number, name)
                heapq.heapreplace(waiting, (load + 1, of_topic + 1, name))

    # Levelling --------------------------------------------------------------------------

    def level(self) -> None:
        """Move partitions along chains of members until no chain ends at a member with two fewer than its start.

        No other assignment is then more even, by any measure that prefers even loads: see Harvey et al.,
        "Semi-matchings for bipartite graphs and load balancing".
        """
        while any(
            self._relieve(name)
            for name in sorted(self.names, key=lambda one: (-self.load[one], one))
            if self.load[name]
        ):
            pass

    def _relieve(self, name: str) -> bool:
        """Take one partition off a member if that helps; return whether it did."""
        least = min(self.load.values())
        if self.load[name] - least < 2:  # noqa: PLR2004 - a difference of one is even enough
            return False
        chain = self._chain_to_less(name)
        for giver, taker in zip(chain[-2::-1], chain[:0:-1], strict=True):
            # Start at the far end, so that no member passes on the partition that it has just received.
            self.move(self.cheapest(giver, taker), giver, taker)
        return bool(chain)

    def _chain_to_less(self, start: str) -> list[str]:
        """Find the shortest chain from a member to one with at least two fewer; empty if there is none."""
        reached: dict[str, str | None] = {start: None}
        seen: set[str] = set()
        ring = [start]
        while ring:
            following = []
            for name in ring:
                for topic in sorted(self.held[name].keys() - seen):
                    seen.add(topic)
                    for other in self.subscribers[topic]:
                        if other not in reached:
                            reached[other] = name
                            following.append(other)
            best = min(following, key=lambda one: (self.load[one], one), default=start)
            if self.load[best] <= self.load[start] - 2:
                return _way_to(best, reached)
            ring = following
        return []

    # Moving -----------------------------------------------------------------------------

    def cheapest(self, giver: str, taker: str) -> TopicPartition:
        """Choose the partition to move: preferably one that returns home, then one that is away from home anyway."""
        _, _, topic, number = min(
            (
                (home == giver) - (home == taker),
                self._count(taker, topic) - self._count(giver, topic),
                topic,
                -numbers[-1],
            )
            for topic, by_home in self.held[giver].items()
            if topic in self.topics[taker]
            for home, numbers in by_home.items()
        )
        return TopicPartition(topic, -number)

    def move(self, topic_partition: TopicPartition, giver: str, taker: str) -> None:
        """Move a partition to another member."""
        self._take(*topic_partition, giver)
        self._put(*topic_partition, taker)

    def _put(self, topic: str, number: int, name: str) -> None:
        home = self._homes[topic].get(number)
        insort(self.held[name].setdefault(topic, {}).setdefault(home, []), number)
        self.load[name] += 1

    def _take(self, topic: str, number: int, name: str) -> None:
        home = self._homes[topic].get(number)
        by_home = self.held[name][topic]
        del by_home[home][bisect_left(by_home[home], number)]
        if not by_home[home]:
            del by_home[home]
        if not by_home:
            del self.held[name][topic]
        self.load[name] -= 1

    def _count(self, name: str, topic: str) -> int:
        return sum(map(len, self.held[name].get(topic, {}).values()))


def quotas(topics: Mapping[str, frozenset[str]], load: Mapping[str, int], even: Mapping[str, int]) -> Mapping[str, int]:
    """Distribute the loads of an even assignment: among members with the same topics, those with most keep most.

    Example:
        >>> same = frozenset({"t"})
        >>> quotas({"a": same, "b": same}, load={"a": 1, "b": 7}, even={"a": 5, "b": 3})
        {'b': 5, 'a': 3}
    """
    alike: dict[frozenset[str], list[str]] = {}
    for name in sorted(topics, key=lambda one: (-load[one], one)):
        alike.setdefault(topics[name], []).append(name)
    found: dict[str, int] = {}
    for names in alike.values():
        found.update(zip(names, sorted((even[name] for name in names), reverse=True), strict=True))
    return found


def _way_to(end: str, reached: Mapping[str, str | None]) -> list[str]:
    way = [end]
    while (before := reached[way[-1]]) is not None:
        way.append(before)
    return way[::-1]
