"""Assign partitions to the members of a group: pure functions that give the same result on every member.

`fair`, `sticky` and `lag` spread partitions by number in the same way: assign each to its home (its previous owner) or
at the least loaded member, then move partitions until no move makes the loads more even.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from aioshard.records import TopicPartition

Partitions: TypeAlias = Mapping[str, Collection[int]]
"""The partitions of each topic."""
Assignment: TypeAlias = dict[str, tuple[TopicPartition, ...]]
"""The sorted partitions of every member of the group; empty for members that get none."""
Holders: TypeAlias = dict[TopicPartition, str]
"""The member that holds each partition."""

NO_GENERATION = -1

_NOISE = 100
"""The mean backlog of a member divided by this is noise: the smallest partitions that add up to less count as fully
read, and no move is made for a smaller gain."""
_PAYS = 1.5
"""A rebalance pays if it shortens the longest backlog of a member by at least this factor."""
_LEAST_GAIN = 1_000
"""It must shorten that backlog by this many records too."""


@dataclass(frozen=True, slots=True)
class Member:
    """The state that a group member reports.

    Example:
        >>> Member(frozenset({"orders"}), owned=(TopicPartition("orders", 0),), generation=4).generation
        4
    """

    topics: frozenset[str]
    """The topics it subscribes to."""
    owned: Collection[TopicPartition] = ()
    """The partitions it owned until now; empty for a new member."""
    generation: int = NO_GENERATION
    """The generation that assigned them."""
    backlogs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Records left in the partitions it owned and in unowned ones, as far as the member knows."""


Members: TypeAlias = Mapping[str, Member]


def subscribers(members: Members, partitions: Partitions) -> dict[str, tuple[str, ...]]:
    """Return the subscribers of each topic, sorted by name; topics without a subscriber are left out.

    Example:
        >>> members = {"b": Member(frozenset({"t"})), "a": Member(frozenset({"t", "gone"}))}
        >>> subscribers(members, {"t": [0], "other": [0]})
        {'t': ('a', 'b')}
    """
    names = sorted(members)
    topics = frozenset[str]().union(*(member.topics for member in members.values())) & partitions.keys()
    return {topic: tuple(name for name in names if topic in members[name].topics) for topic in sorted(topics)}


class _Claims:
    """The partitions that members say they have.

    If members with different generations claim a partition, the later generation counts: the other member was
    considered dead for a while. If several members with the same generation claim it, nobody has a right to it.
    """

    def __init__(self, members: Members) -> None:
        self.holders: Holders = {}
        """The member of each partition."""
        self.contested: set[TopicPartition] = set()
        """Partitions with several claims of one generation. None of these members may keep it."""
        for name in sorted(members, key=lambda member: members[member].generation):
            for partition in members[name].owned:
                self._add(partition, name, members)

    def _add(self, partition: TopicPartition, name: str, members: Members) -> None:
        """Add a claim; those of earlier generations were added before."""
        other = self.holders.get(partition)
        self.holders[partition] = name
        if other is None or other == name:
            return
        if members[other].generation == members[name].generation:
            self.contested.add(partition)
        else:
            self.contested.discard(partition)


def owners(members: Members, partitions: Partitions) -> Holders:
    """Return the previous owner of each partition, if it may keep the partition.

    If members claim the same partition, because one was considered dead for a while, the latest generation wins. Within
    one generation, none of them keeps it.
    """
    known = {topic: frozenset(numbers) for topic, numbers in partitions.items()}
    claims = _Claims(members)
    return {
        owned: name
        for owned, name in claims.holders.items()
        if owned not in claims.contested
        and owned.topic in members[name].topics
        and owned.partition in known.get(owned.topic, ())
    }


def _as_assignment(members: Iterable[str], holders: Holders) -> Assignment:
    assignment: dict[str, list[TopicPartition]] = {name: [] for name in sorted(members)}
    for topic_partition in sorted(holders):
        assignment[holders[topic_partition]].append(topic_partition)
    return {name: tuple(owned) for name, owned in assignment.items()}


# The assignors ----------------------------------------------------------------------------


def assign_ranges(members: Members, partitions: Partitions) -> Assignment:
    """Split each topic over its subscribers; the first ones get one more if the division leaves a remainder.

    Partitions with the same number in several topics go to the same member, which joins need. With several topics,
    the same members get the remainder of each.

    Example:
        >>> members = {name: Member(frozenset({"t"})) for name in "ab"}
        >>> [[partition for _, partition in owned] for owned in assign_ranges(members, {"t": range(3)}).values()]
        [[0, 1], [2]]
    """
    holders: Holders = {}
    for topic, names in subscribers(members, partitions).items():
        share, remainder = divmod(len(partitions[topic]), len(names))
        rest = iter(sorted(partitions[topic]))
        for position, name in enumerate(names):
            holders.update(
                {
                    TopicPartition(topic, number): name
                    for number in itertools.islice(rest, share + (position < remainder))
                }
            )
    return _as_assignment(members, holders)


def assign_round_robin(members: Members, partitions: Partitions) -> Assignment:
    """Give each partition to the next member that subscribes to its topic.

    The result is even if all members subscribe to the same topics; otherwise some members may get nothing.

    Example:
        >>> members = {name: Member(frozenset({"t"})) for name in "ab"}
        >>> [[partition for _, partition in owned] for owned in assign_round_robin(members, {"t": range(3)}).values()]
        [[0, 2], [1]]
    """
    circle = itertools.cycle(sorted(members))
    holders: Holders = {}
    for topic in subscribers(members, partitions):
        for number in sorted(partitions[topic]):
            holders[TopicPartition(topic, number)] = next(name for name in circle if topic in members[name].topics)
    return _as_assignment(members, holders)


def assign_fair(members: Members, partitions: Partitions) -> Assignment:
    """Spread partitions so that no move or chain of moves would make them more even.

    Stateless: the same members and topics always give the same assignment.

    Example:
        >>> members = {"a": Member(frozenset({"t", "u"})), "b": Member(frozenset({"u"}))}
        >>> assignment = assign_fair(members, {"t": range(2), "u": range(2)})
        >>> [sorted({topic for topic, _ in owned}) for owned in assignment.values()]
        [['t'], ['u']]
    """
    return _as_assignment(members, spread(members, partitions))


def assign_sticky(members: Members, partitions: Partitions) -> Assignment:
    """Leave partitions where they are, and move only as many as an even assignment needs.

    Example:
        >>> had = tuple(TopicPartition("t", number) for number in (0, 1, 2))
        >>> members = {"a": Member(frozenset({"t"}), owned=had, generation=1), "b": Member(frozenset({"t"}))}
        >>> [[partition for _, partition in owned] for owned in assign_sticky(members, {"t": range(3)}).values()]
        [[0, 1], [2]]
    """
    return _as_assignment(members, spread(members, partitions, owners(members, partitions)))


def assign_backlog(members: Members, partitions: Partitions) -> Assignment:
    """Spread the remaining records until moving a single partition cannot make the backlogs more even.

    Partitions otherwise stay where they are. Partitions with hardly any backlog are spread by number. If no backlog
    is known at all, the assignment is sticky.

    Example:
        >>> had = {TopicPartition("t", 0): 900, TopicPartition("t", 1): 500, TopicPartition("t", 2): 400}
        >>> members = {"a": Member(frozenset({"t"}), had.keys(), 1, had), "b": Member(frozenset({"t"}))}
        >>> [[partition for _, partition in owned] for owned in assign_backlog(members, {"t": range(3)}).values()]
        [[1, 2], [0]]
    """
    homes = owners(members, partitions)
    remaining = backlogs(members, partitions, homes)
    noise = sum(remaining.values()) / (_NOISE * len(members))
    weights: dict[TopicPartition, int] = {}
    empty: dict[str, list[int]] = {}
    seen = 0
    for topic_partition in sorted(remaining, key=lambda each: (remaining[each], each)):
        seen += remaining[topic_partition]
        if seen <= noise:
            empty.setdefault(topic_partition.topic, []).append(topic_partition.partition)
        else:
            weights[topic_partition] = remaining[topic_partition]
    names = subscribers(members, partitions)
    fresh = _Backlogs(members, names, weights, {}, noise)
    kept = _Backlogs(members, names, weights, homes, noise)
    # The kept partitions can block a better assignment that single moves do not find.
    excess = max(kept.load.values()) - max(fresh.load.values())
    best = (fresh if excess > max(weights.values(), default=0) else kept).holders()
    homes = {at: name for at, name in homes.items() if at not in weights}
    # The empty partitions even out the number of partitions per member, including those with a backlog.
    return _as_assignment(members, best | spread(members, empty, homes, Counter(best.values())))


def pays(members: Members, partitions: Partitions) -> bool:
    """Whether a new assignment would clearly shorten the longest backlog of a member.

    Example:
        >>> had = {TopicPartition("t", 0): 9_000, TopicPartition("t", 1): 8_000}
        >>> members = {"a": Member(frozenset({"t"}), had.keys(), 1, had), "b": Member(frozenset({"t"}))}
        >>> pays(members, {"t": range(2)})
        True
    """
    homes = owners(members, partitions)
    remaining = backlogs(members, partitions, homes)
    longest, shortened = (
        max(sum(remaining[partition] for partition in held) for held in assignment.values())
        for assignment in (_as_assignment(members, homes), assign_backlog(members, partitions))
    )
    return longest >= _PAYS * shortened and longest - shortened >= _LEAST_GAIN


def without_moves(members: Members, assignment: Assignment) -> Assignment:
    """Leave out the partitions that other members must release first; the next rebalance assigns them.

    If several members claim a partition, nobody gets it in this one.

    Example:
        >>> members = {"a": Member(frozenset({"t"}), [TopicPartition("t", 0)], 1), "b": Member(frozenset({"t"}))}
        >>> without_moves(members, {"a": (), "b": (TopicPartition("t", 0), TopicPartition("t", 1))})
        {'a': (), 'b': (TopicPartition(topic='t', partition=1),)}
    """
    claims = _Claims(members)
    return {
        name: tuple(at for at in held if at not in claims.contested and claims.holders.get(at, name) == name)
        for name, held in assignment.items()
    }


ASSIGNORS: Mapping[str, Callable[[Members, Partitions], Assignment]] = {
    "range": assign_ranges,
    "roundrobin": assign_round_robin,
    "sticky": assign_sticky,
    "fair": assign_fair,
    "lag": assign_backlog,
    "cooperative-fair": assign_sticky,
    "cooperative-lag": assign_backlog,
}
"""The assignors by their names in the setting `assignor`."""


# By number --------------------------------------------------------------------------------


def spread(
    members: Members, partitions: Partitions, homes: Holders | None = None, begin: Mapping[str, int] | None = None
) -> Holders:
    """Spread partitions evenly, and move few of them away from *homes*.

    Args:
        members: All members of the group.
        partitions: The partitions of each topic.
        homes: The last owner of each partition that may keep it.
        begin: The number of partitions that members hold in addition to these.
    """
    even = _Spread(members, partitions, {}, begin or {})
    even.assign_the_rest()
    even.level()
    if not homes:
        return even.holders
    kept = _Spread(members, partitions, homes, begin or {})
    if sorted(kept.load.values()) != sorted(even.load.values()):
        # Only a start: levelling moves one partition at a time, and thousands may have to move.
        kept.release_surplus(even.load)
        kept.assign_the_rest()
        kept.level()
    return kept.holders


class _Spread:
    """An assignment by number while it is computed: the member of each partition."""

    def __init__(self, members: Members, partitions: Partitions, homes: Holders, begin: Mapping[str, int]) -> None:
        self._partitions = partitions
        self._homes = homes
        self._subscribers = subscribers(members, partitions)
        self._topics = {name: frozenset(members[name].topics & partitions.keys()) for name in sorted(members)}
        self.holders = dict(homes)
        self.load = Counter(begin) + Counter(homes.values())
        """Number of partitions of each member."""

    def release_surplus(self, even: Mapping[str, int]) -> None:
        """Release partitions beyond an even load, first from topics of which the member has more than its share.

        Among members with the same topics, those that have most keep most.
        """
        held: dict[str, dict[str, list[TopicPartition]]] = {}
        for at, name in sorted(self.holders.items()):
            held.setdefault(name, {}).setdefault(at.topic, []).append(at)
        alike: dict[frozenset[str], list[str]] = {}
        for name in sorted(self._topics, key=lambda member: (-self.load[member], member)):
            alike.setdefault(self._topics[name], []).append(name)
        for names in alike.values():
            for name, quota in zip(names, sorted((even[name] for name in names), reverse=True), strict=True):
                topics = held.get(name, {})
                shares = {topic: len(self._partitions[topic]) / len(self._subscribers[topic]) for topic in topics}
                while topics and self.load[name] > quota:
                    topic = min(topics, key=lambda topic: (shares[topic] - len(topics[topic]), topic))
                    del self.holders[topics[topic].pop()]
                    self.load[name] -= 1
                    if not topics[topic]:
                        del topics[topic]

    def assign_the_rest(self) -> None:
        """Give unassigned partitions to the least loaded member; topics with the fewest subscribers go first."""
        of_topic = Counter((name, at.topic) for at, name in self.holders.items())
        for topic in sorted(
            self._subscribers, key=lambda topic: (len(self._subscribers[topic]), -len(self._partitions[topic]), topic)
        ):
            # A sorted list is a heap.
            candidates = sorted((self.load[name], of_topic[name, topic], name) for name in self._subscribers[topic])
            for number in sorted(self._partitions[topic]):
                at = TopicPartition(topic, number)
                if at not in self.holders:
                    load, count, name = candidates[0]
                    self.holders[at] = name
                    self.load[name] += 1
                    heapq.heapreplace(candidates, (load + 1, count + 1, name))

    def level(self) -> None:
        """Move partitions along chains of members until no chain ends at a member with two fewer than its start.

        No other assignment is then more even, by any measure that prefers even loads: see Harvey et al.,
        "Semi-matchings for bipartite graphs and load balancing".
        """
        while chain := self._chain_to_less():
            self._pass_on(itertools.pairwise(chain))

    def _chain_to_less(self) -> list[str]:
        """Find a chain from a member to one with at least two fewer; empty if there is none."""
        held: dict[str, set[str]] = {name: set() for name in self._topics}
        for at, name in self.holders.items():
            held[name].add(at.topic)
        least = min(self.load[name] for name in self._topics)
        for start in sorted(self._topics, key=lambda member: (-self.load[member], member)):
            if self.load[start] - least < 2:  # noqa: PLR2004 - a difference of one is even enough
                break
            chains = {start: [start]}
            seen: set[str] = set()
            for name, chain in (waiting := list(chains.items())):
                if self.load[name] <= self.load[start] - 2:
                    return chain
                for topic in sorted(held[name] - seen):
                    seen.add(topic)
                    for other in self._subscribers[topic]:
                        if other not in chains:
                            chains[other] = [*chain, other]
                            waiting.append((other, chains[other]))
        return []

    def _pass_on(self, links: Iterable[tuple[str, str]]) -> None:
        """Let each giver pass on one partition: preferably one that returns home, then one that is away from home."""
        chosen = [
            min(
                ((home == giver) - (home == taker), at, giver, taker)
                for at, home in ((at, self._homes.get(at)) for at, name in self.holders.items() if name == giver)
                if at.topic in self._topics[taker]
            )
            for giver, taker in links
        ]
        for _, at, giver, taker in chosen:
            self.holders[at] = taker
            self.load[giver] -= 1
            self.load[taker] += 1


# By backlog -------------------------------------------------------------------------------


def backlogs(members: Members, partitions: Partitions, homes: Holders) -> dict[TopicPartition, int]:
    """Estimate the records left in each partition that has a subscriber; *homes* are the owners.

    The owner's figure counts. Without an owner, the smallest reported figure counts. A partition that nobody reports
    gets the mean of the known figures.
    """
    known: dict[TopicPartition, int] = {}
    for name, member in members.items():
        for partition, reported in member.backlogs.items():
            if homes.get(partition, name) == name:
                backlog = max(reported, 0)
                known[partition] = min(backlog, known.get(partition, backlog))
    subscribed = [
        TopicPartition(topic, number)
        for topic in subscribers(members, partitions)
        for number in sorted(partitions[topic])
    ]
    figures = [known[partition] for partition in subscribed if partition in known]
    mean = sum(figures) // len(figures) if figures else 0
    return {partition: known.get(partition, mean) for partition in subscribed}


class _Backlogs:
    """An assignment by backlog while it is computed: the partitions and the backlog of each member.

    Partitions begin at their homes, then the others at the member with the least backlog, largest first. Then single
    partitions move from members with a large backlog to members with a small one until no move helps.
    """

    def __init__(
        self,
        members: Members,
        names: Mapping[str, Sequence[str]],
        weights: Mapping[TopicPartition, int],
        homes: Holders,
        enough: float,
    ) -> None:
        """Compute the assignment; a move must relieve the more loaded member by more than *enough* records."""
        self._topics = {name: members[name].topics for name in sorted(members)}
        self._held: dict[str, dict[str, list[tuple[int, TopicPartition]]]] = {name: {} for name in self._topics}
        """Sorted pairs of (backlog, partition), by member and topic."""
        self.load = dict.fromkeys(self._topics, 0)
        """Backlog by member."""
        for topic_partition in sorted(weights, key=lambda each: (each not in homes, -weights[each], each)):
            name = homes.get(topic_partition) or min(
                names[topic_partition.topic],
                key=lambda name: (self.load[name], sum(map(len, self._held[name].values())), name),
            )
            self._put(weights[topic_partition], topic_partition, name)
        while any(
            self._relieve(name, enough) for name in sorted(self.load, key=lambda member: (-self.load[member], member))
        ):
            pass

    def holders(self) -> Holders:
        """The member of each partition."""
        return {
            topic_partition: name
            for name, topics in self._held.items()
            for pairs in topics.values()
            for _, topic_partition in pairs
        }

    def _put(self, weight: int, topic_partition: TopicPartition, name: str) -> None:
        insort(self._held[name].setdefault(topic_partition.topic, []), (weight, topic_partition))
        self.load[name] += weight

    def _relieve(self, giver: str, enough: float) -> bool:
        for taker in sorted(self.load, key=lambda member: (self.load[member], member)):
            gap = self.load[giver] - self.load[taker]
            if gap <= enough:
                return False
            moves = [
                (abs(2 * weight - gap), weight, topic_partition)
                for topic, pairs in self._held[giver].items()
                if topic in self._topics[taker]
                for weight, topic_partition in _nearest(pairs, gap / 2, gap - enough)
            ]
            if moves:
                _, weight, topic_partition = min(moves)
                pairs = self._held[giver][topic_partition.topic]
                del pairs[bisect_left(pairs, (weight, topic_partition))]
                self.load[giver] -= weight
                self._put(weight, topic_partition, taker)
                return True
        return False


def _nearest(
    pairs: Sequence[tuple[int, TopicPartition]], weight: float, below: float
) -> Sequence[tuple[int, TopicPartition]]:
    """Return the neighbours of *weight* in the sorted pairs, only those below the limit."""
    end = bisect_left(pairs, (below,))
    index = min(bisect_left(pairs, (weight,)), end)
    return pairs[max(index - 1, 0) : min(index + 1, end)]


# Delayed reassignment ---------------------------------------------------------------------


def _left_behind(
    members: Members, partitions: Partitions, previous: Collection[TopicPartition] | None
) -> frozenset[TopicPartition]:
    """Return the partitions of lost members, as long as no replacement has joined.

    A subscriber without partitions is a replacement: a new member, or a standby.

    Args:
        members: The current members, with the partitions that each of them owned.
        partitions: The partitions of each topic.
        previous: The previously assigned partitions, to recognise new ones; None if unknown.
    """
    if not any(member.owned for member in members.values()):
        return frozenset()
    claimed = owners(members, partitions)
    return frozenset(
        partition
        for topic, names in subscribers(members, partitions).items()
        if all(members[name].owned for name in names)
        for number in partitions[topic]
        if (partition := TopicPartition(topic, number)) not in claimed and (previous is None or partition in previous)
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
        self._previous: frozenset[TopicPartition] | None = None
        self.until: float | None = None
        """When the withheld partitions are given to the remaining members; None if nothing is withheld."""

    def withheld(self, members: Members, partitions: Partitions, now: float) -> frozenset[TopicPartition]:
        """Return the partitions that must not be assigned yet.

        Args:
            members: The current members, with the partitions that each of them owned.
            partitions: The partitions of each topic.
            now: Seconds on a monotonic clock.
        """
        if not self._delay:
            return frozenset()
        missing = _left_behind(members, partitions, self._previous)
        if missing and self.until is None:
            self.until = now + self._delay
        if not missing or (self.until is not None and now >= self.until):
            missing = frozenset()
            self.until = None
        self._previous = frozenset(
            TopicPartition(topic, number) for topic, numbers in partitions.items() for number in numbers
        )
        return missing

    def expect(self, previous: Collection[TopicPartition]) -> None:
        """Name the partitions of the latest assignment that the group has received: others count as new.

        An assignment that was computed may never have reached the group.
        """
        self._previous = frozenset(previous)

    def forget(self, previous: Collection[TopicPartition] | None = None) -> None:
        """Begin anew, because another member has led since, or a predecessor.

        Args:
            previous: The previously assigned partitions; None if unknown. Others count as new.
        """
        self._previous = None if previous is None else frozenset(previous)
        self.until = None
