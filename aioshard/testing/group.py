"""An in-memory consumer group: members, generations, eager rebalances and committed offsets."""

from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

from aioshard.errors import CommitRefusedError
from aioshard.ports import NOT_A_MEMBER, Committed, GroupHasMembersError, Membership
from aioshard.records import TopicPartition, is_subscribed

__all__ = ["ConsumerGroup", "Duty", "Subscription"]

Duty = Literal["nothing", "rejoin", "adopt", "join anew"]
"""The next step of a member: nothing; release its partitions and rejoin; adopt the new assignment; or join as a new
member, because the group has forgotten it."""


class Subscription(NamedTuple):
    """The topics that a member subscribes to."""

    topics: frozenset[str]
    pattern: str | None = None

    def includes(self, topic: str) -> bool:
        """Whether the member reads *topic*."""
        return is_subscribed(topic, self.topics, self.pattern)


class _Member:
    def __init__(self, subscription: Subscription, stir: Callable[[], None]) -> None:
        self.subscription = subscription
        self.stir = stir
        self.generation = -1  # The generation whose assignment the member has adopted.


class ConsumerGroup:
    """The coordinator of one group, with the eager protocol.

    A rebalance has two steps. First every member releases all of its partitions and joins again (`rejoin`); until the
    last one has done so, the old generation is in force, and commits under it are accepted. Then the generation is
    incremented, the partitions are dealt out round robin, and each member adopts its own (`adopt`).

    Everything here is a synchronous change of state. A member learns through its `stir` callback that something may
    have changed, and then calls `duty` for its next step.

    Owned by one `InMemoryBroker`.

    Invariants:
        * Every completed rebalance increments the generation; it never decreases.
        * A partition has at most one owner.
    """

    def __init__(self, group_id: str, topics: Callable[[], Mapping[str, int]], notify: Callable[[], None]) -> None:
        self.group_id = group_id
        self._topics = topics
        self._notify = notify
        self._members: dict[str, _Member] = {}
        self._joined_ever = 0
        self._rejoined: set[str] = set()
        self._preparing = False
        self._generation = 0
        self._owners: dict[TopicPartition, str] = {}
        self._withheld: set[TopicPartition] = set()
        self._pinned: dict[TopicPartition, str] = {}
        self._committed: dict[TopicPartition, Committed] = {}

    # State -----------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of the assignment in force."""
        return self._generation

    @property
    def members(self) -> tuple[str, ...]:
        """The member ids, in the order of joining."""
        return tuple(self._members)

    @property
    def rebalancing(self) -> bool:
        """Whether members still have to release or adopt partitions."""
        return self._preparing or any(member.generation != self._generation for member in self._members.values())

    @property
    def withheld(self) -> frozenset[TopicPartition]:
        """Partitions that none of our members gets, because `revoke` gave them to an outside member."""
        return frozenset(self._withheld)

    def owner(self, topic_partition: TopicPartition) -> str | None:
        """Return the member that owns the partition in the current generation."""
        return self._owners.get(topic_partition)

    def assignment(self, member_id: str) -> tuple[TopicPartition, ...]:
        """Return the sorted partitions of a member in the current generation."""
        return tuple(sorted(partition for partition, owner in self._owners.items() if owner == member_id))

    def subscribed(self) -> tuple[TopicPartition, ...]:
        """Return every partition that some member subscribes to, withheld or not, sorted."""
        return tuple(
            TopicPartition(topic, partition)
            for topic, count in sorted(self._topics().items())
            if any(member.subscription.includes(topic) for member in self._members.values())
            for partition in range(count)
        )

    def committed(self, topic_partition: TopicPartition) -> Committed | None:
        """Return the committed offset of a partition, or None."""
        return self._committed.get(topic_partition)

    def duty(self, membership: Membership) -> Duty:
        """Return the next step of a member that believes in *membership*."""
        member = self._members.get(membership.member_id)
        if member is None:
            return "join anew"
        if self._preparing:
            return "nothing" if membership.member_id in self._rejoined else "rejoin"
        return "nothing" if membership.generation == self._generation else "adopt"

    # Calls from members ----------------------------------------------------------------

    def join(self, subscription: Subscription, stir: Callable[[], None]) -> str:
        """Add a member and begin a rebalance; return its new member id."""
        self._joined_ever += 1
        member_id = f"{self.group_id}-member-{self._joined_ever}"
        self._members[member_id] = _Member(subscription, stir)
        self._prepare()
        self.rejoin(member_id)
        return member_id

    def rejoin(self, member_id: str) -> None:
        """Record that a member has released its partitions; the last one completes the rebalance."""
        if member_id in self._members and self._preparing:
            self._rejoined.add(member_id)
            self._complete_when_all_rejoined()

    def adopt(self, member_id: str) -> Membership:
        """Let a member adopt its part of the current assignment; return its new membership.

        Returns `NOT_A_MEMBER` if the group has forgotten the member in the meantime.
        """
        member = self._members.get(member_id)
        if member is None:
            return NOT_A_MEMBER
        member.generation = self._generation
        self._notify()
        return Membership(member_id, self._generation)

    def leave(self, member_id: str) -> None:
        """Remove a member, on its request or because it timed out; the others rebalance."""
        member = self._members.pop(member_id, None)
        if member is None:
            return
        self._pinned = {partition: owner for partition, owner in self._pinned.items() if owner != member_id}
        self._prepare()
        self._complete_when_all_rejoined()
        member.stir()

    def leave_unless_rejoined(self, member_id: str, generation: int) -> None:
        """Remove a member that has not released its partitions of *generation* in time."""
        if self._preparing and self._generation == generation and member_id not in self._rejoined:
            self.leave(member_id)

    def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """Store offsets if *membership* is in force; without a member id, only if the group has no members.

        Raises:
            GroupHasMembersError: The group has members, and *membership* has no member id.
            CommitRefusedError: The group does not know the member, or has another generation.
        """
        if not membership.member_id:
            self.refuse_beside_members()
        elif membership.member_id not in self._members:
            message = (
                f"group {self.group_id!r} refused a commit: it does not know the member {membership.member_id!r}; "
                "it must join again"
            )
            raise CommitRefusedError(message)
        elif membership.generation != self._generation:
            message = (
                f"group {self.group_id!r} refused a commit under generation {membership.generation}: "
                f"generation {self._generation} is in force"
            )
            raise CommitRefusedError(message)
        self._committed.update(offsets)
        self._notify()

    def refuse_beside_members(self) -> None:
        """Reject manually assigned clients while the group has members.

        Raises:
            GroupHasMembersError: The group has members.
        """
        if self._members:
            message = (
                f"group {self.group_id!r} has members ({', '.join(self._members)}), and partitions were given to this "
                "app by hand with assign: stop the members, or take a group id of its own"
            )
            raise GroupHasMembersError(message)

    # Calls from tests ------------------------------------------------------------------

    def rebalance(self) -> None:
        """Make every member release its partitions and rejoin; member ids stay the same."""
        if self._members:
            self._prepare()
        self._complete_when_all_rejoined()

    def revoke(self, *partitions: TopicPartition) -> None:
        """Rebalance, and withhold *partitions* from now on, as if an outside member owned them."""
        self._withheld.update(partitions)
        for partition in partitions:
            self._pinned.pop(partition, None)
        self.rebalance()

    def assign(self, *partitions: TopicPartition, member_id: str | None = None) -> None:
        """Rebalance, and deal out *partitions* again: always to *member_id* if given, otherwise round robin."""
        self._withheld.difference_update(partitions)
        for partition in partitions:
            if member_id is None:
                self._pinned.pop(partition, None)
            else:
                self._pinned[partition] = member_id
        self.rebalance()

    def lose(self, member_id: str | None = None) -> None:
        """Forget a member, or all: it learns that it lost its partitions and joins under a new id."""
        for forgotten in self.members if member_id is None else (member_id,):
            self.leave(forgotten)

    def commit_from_outside(self, offsets: Mapping[TopicPartition, int | None], *, metadata: str = "") -> None:
        """Set committed offsets as another member or a reset tool would; None removes an offset."""
        for partition, offset in offsets.items():
            if offset is None:
                self._committed.pop(partition, None)
            else:
                self._committed[partition] = Committed(offset, metadata)
        self._notify()

    def topics_changed(self, topics: Collection[str]) -> None:
        """Rebalance if a member reads one of these new or changed topics."""
        if any(member.subscription.includes(topic) for member in self._members.values() for topic in topics):
            self.rebalance()

    # Inside ----------------------------------------------------------------------------

    def _prepare(self) -> None:
        if not self._preparing:
            self._preparing = True
            self._rejoined.clear()
        self._stir_all()

    def _complete_when_all_rejoined(self) -> None:
        if not self._preparing or not self._rejoined.issuperset(self._members):
            return
        self._preparing = False
        self._rejoined.clear()
        self._generation += 1
        self._owners = self._deal_out()
        self._stir_all()

    def _deal_out(self) -> dict[TopicPartition, str]:
        owners: dict[TopicPartition, str] = {}
        turn = 0
        for partition in self.subscribed():
            if partition in self._withheld:
                continue
            wanting = [
                member_id
                for member_id, member in self._members.items()
                if member.subscription.includes(partition.topic)
            ]
            pinned = self._pinned.get(partition)
            if pinned in wanting:
                owners[partition] = pinned
            else:
                owners[partition] = wanting[turn % len(wanting)]
                turn += 1
        return owners

    def _stir_all(self) -> None:
        for member in self._members.values():
            member.stir()
        self._notify()
