"""Who holds how many: given out to whoever has least, and levelled until no chain of moves makes it more even."""

import heapq
from collections.abc import Iterable, Mapping, Sequence

from aioshard.core.assignment.members import Assignment, Member, Partitions, as_assignment, subscribers
from aioshard.records import TopicPartition

__all__ = ["Holdings"]


class Holdings:
    """What each member holds while an assignment is worked out.

    Invariants:
        * A partition is held by one member at most, which subscribes to its topic.
        * What happens depends on the values alone, never on the order in which they came.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        partitions: Partitions,
        homes: Mapping[TopicPartition, str] | None = None,
    ) -> None:
        """Begin with what each partition's *homes* says, and with nothing elsewhere."""
        self.names: Sequence[str] = sorted(members)
        self.topics = {name: frozenset(members[name].topics) for name in self.names}
        self.subscribers = subscribers(members, partitions)
        self.homes: Mapping[TopicPartition, str] = homes or {}
        """Who had a partition, where it may have it again."""
        self.held: dict[str, dict[str, set[int]]] = {name: {} for name in self.names}
        """Numbers of partitions by member and topic; a topic of which nothing is held is not in it."""
        self.load = dict.fromkeys(self.names, 0)
        """How many partitions each member holds."""
        self._partitions = partitions
        for topic_partition, name in self.homes.items():
            self._put(topic_partition, name)

    def assignment(self) -> Assignment:
        """What it came to."""
        return as_assignment(
            self.names,
            (
                (TopicPartition(topic, number), name)
                for name, topics in self.held.items()
                for topic, numbers in topics.items()
                for number in numbers
            ),
        )

    # Giving out -------------------------------------------------------------------------

    def place_the_rest(self) -> None:
        """Give what nobody holds to whoever holds least, topics with the fewest subscribers first."""
        for topic in sorted(
            self.subscribers, key=lambda one: (len(self.subscribers[one]), -len(self._partitions[one]), one)
        ):
            taken = {number for name in self.subscribers[topic] for number in self.held[name].get(topic, ())}
            waiting = [(self.load[name], len(self.held[name].get(topic, ())), name) for name in self.subscribers[topic]]
            heapq.heapify(waiting)
            for number in sorted(set(self._partitions[topic]) - taken):
                load, of_topic, name = waiting[0]
                self._put(TopicPartition(topic, number), name)
                heapq.heapreplace(waiting, (load + 1, of_topic + 1, name))

    # Levelling --------------------------------------------------------------------------

    def level(self) -> None:
        """Move partitions along chains of members until nobody has two more than another at the end of a chain.

        No assignment is then more even, by any measure that prefers even ones: see Harvey and others,
        "Semi-matchings for bipartite graphs and load balancing".
        """
        while any(
            self._relieve(name)
            for name in sorted(self.names, key=lambda one: (-self.load[one], one))
            if self.load[name]
        ):
            pass

    def _relieve(self, name: str) -> bool:
        """Take one partition off a member, if it helps; returns whether it did."""
        least = min(self.load.values())
        if self.load[name] - least < 2:  # noqa: PLR2004 - one more than another is even enough
            return False
        chain = self._chain_to_less(name)
        for giver, taker in zip(chain[-2::-1], chain[:0:-1], strict=True):
            # From the far end, so that nobody passes on what it has just got.
            self.move(self.cheapest(giver, taker), giver, taker)
        return bool(chain)

    def _chain_to_less(self, start: str) -> list[str]:
        """The shortest chain from a member to one with at least two less; empty where there is none."""
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
        """Which partition goes best from one to the other: back home, or one that is away from home anyway."""
        return min(
            self.movable(giver, taker),
            key=lambda one: (
                self.cost(one, giver, taker),
                len(self.held[taker].get(one.topic, ())) - len(self.held[giver][one.topic]),
                one.topic,
                -one.partition,
            ),
        )

    def movable(self, giver: str, taker: str) -> Iterable[TopicPartition]:
        """What of the one's partitions the other subscribes to."""
        for topic, numbers in self.held[giver].items():
            if topic in self.topics[taker]:
                for number in numbers:
                    yield TopicPartition(topic, number)

    def cost(self, topic_partition: TopicPartition, giver: str, taker: str) -> int:
        """By how much a move changes the number of partitions that are not where they were."""
        home = self.home(*topic_partition)
        return (home == giver) - (home == taker)

    def home(self, topic: str, number: int) -> str | None:
        """Who had a partition and may have it again."""
        return self.homes.get(TopicPartition(topic, number))

    def move(self, topic_partition: TopicPartition, giver: str, taker: str) -> None:
        """Let another member hold a partition."""
        numbers = self.held[giver][topic_partition.topic]
        numbers.remove(topic_partition.partition)
        if not numbers:
            del self.held[giver][topic_partition.topic]
        self.load[giver] -= 1
        self._put(topic_partition, taker)

    def _put(self, topic_partition: TopicPartition, name: str) -> None:
        self.held[name].setdefault(topic_partition.topic, set()).add(topic_partition.partition)
        self.load[name] += 1


def _way_to(end: str, reached: Mapping[str, str | None]) -> list[str]:
    way = [end]
    while (before := reached[way[-1]]) is not None:
        way.append(before)
    return way[::-1]
