"""Assignors: the user data that members send, and the assignment that the leader computes from it."""

from typing import Any

import pytest
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from aioshard.core.assignment import Member as CoreMember
from aioshard.kafka.group.assignors import GroupAssignor, Plan
from aioshard.kafka.group.classic import Elected
from aioshard.kafka.wire.consumer_protocol import Subscription, read_subscription, write_subscription
from aioshard.records import TopicPartition


class Member:
    """A member that has an assignor; as the leader, it counts generations."""

    def __init__(self, name: str, delay: float = 0.0, instance: str | None = None) -> None:
        self.assignor = GroupAssignor(name, delay=delay, instance_id=instance)
        self.owned: frozenset[TopicPartition] = frozenset()
        self.generation = -1
        self.elections = 10
        self.backlogs: dict[TopicPartition, int] = {}
        self.plan: Plan | None = None

    def assigned(self, generation: int, topic: str, *numbers: int) -> None:
        self.owned = frozenset(TopicPartition(topic, number) for number in numbers)
        self.generation = generation

    def subscribes(self, *topics: str) -> Subscription:
        """Return its subscription, as it arrives at the leader."""
        claims = self.owned if self.assignor.is_incremental else frozenset[TopicPartition]()
        data = self.assignor.user_data(self.owned, self.generation)
        return read_subscription(write_subscription(Subscription(frozenset(topics), data, claims, self.generation)))

    def assign(
        self, partitions: dict[str, int], members: dict[str, Subscription], *, now: float = 0.0
    ) -> dict[str, list[int]]:
        """Return the partitions that it assigns as the leader."""
        self.elections += 1
        election = Elected(self.elections, self.assignor.name, members)
        known = {topic: range(count) for topic, count in partitions.items()}
        self.plan = self.assignor.assign(election, known, now, self.backlogs)
        return {name: [at.partition for at in sorted(found)] for name, found in self.plan.assignments.items()}


@pytest.mark.parametrize("name", ["sticky", "lag", "cooperative-fair", "cooperative-lag"])
def test_every_member_of_a_process_keeps_its_own_state(name: str) -> None:
    one, two, leader = (Member(name) for _ in range(3))
    one.assigned(4, "t", 0, 3)
    two.assigned(4, "t", 1, 2)

    members = {"a": two.subscribes("t"), "b": one.subscribes("t"), "c": leader.subscribes("t")}

    assert leader.assign({"t": 6}, members) == {"a": [1, 2], "b": [0, 3], "c": [4, 5]}


@pytest.mark.parametrize("name", ["range", "roundrobin", "fair"])
def test_static_members_keep_their_partitions_under_new_member_ids(name: str) -> None:
    first, second = (Member(name, instance=instance) for instance in ("worker-1", "worker-2"))
    other = Member(name)

    def assign(*ids: str) -> list[list[int]]:
        members = {member_id: who.subscribes("t") for member_id, who in zip(ids, (first, second, other), strict=True)}
        found = other.assign({"t": 6}, members)
        return [found[member_id] for member_id in ids]

    assert assign("a", "b", "c") == assign("c", "b", "a") == assign("b", "c", "a")


def test_two_members_with_one_instance_id_are_distinguished() -> None:
    twins = [Member("fair", instance="worker-1") for _ in range(2)]
    members = {member_id: who.subscribes("t") for member_id, who in zip("ab", twins, strict=True)}

    assert twins[0].assign({"t": 2}, members) == {"a": [0], "b": [1]}


def test_the_leader_balances_the_backlogs_that_it_knows() -> None:
    one, leader = Member("lag"), Member("lag")
    for member, number in ((one, 0), (leader, 1)):
        member.assigned(4, "t", number)
    subscriptions = {"a": one.subscribes("t"), "b": leader.subscribes("t")}
    leader.backlogs = {TopicPartition("t", number): left for number, left in enumerate((500, 501, 1_000, 490))}

    assert leader.assign({"t": 4}, subscriptions) == {"a": [0, 2], "b": [1, 3]}


def test_sticky_is_compatible_with_that_of_aiokafka() -> None:
    ours = Member("sticky")
    theirs: Any = type("Theirs", (StickyPartitionAssignor,), {})
    ours.assigned(4, "t", 1, 2)
    theirs.on_assignment(ConsumerProtocolMemberAssignment(0, [("t", [0, 3])], b""))
    theirs.generation = 4
    said = theirs.metadata(["t"])
    members = {"a": ours.subscribes("t"), "b": read_subscription(said.encode())}

    parsed = StickyPartitionAssignor.parse_member_metadata(
        ConsumerProtocolMemberMetadata(0, ["t"], members["a"].user_data)
    )
    assert (parsed.partitions, parsed.generation) == ([("t", 1), ("t", 2)], 4)
    assert ours.assign({"t": 4}, members) == {"a": [1, 2], "b": [0, 3]}


@pytest.mark.parametrize("name", ["cooperative-fair", "cooperative-lag"])
def test_a_partition_moves_once_its_owner_has_released_it(name: str) -> None:
    owner, other = Member(name), Member(name)
    owner.assigned(4, "t", 0, 1, 2, 3)

    def rebalance() -> dict[str, list[int]]:
        return owner.assign({"t": 4}, {"a": owner.subscribes("t"), "b": other.subscribes("t")})

    assert rebalance() == {"a": [0, 1], "b": []}
    assert rebalance() == {"a": [0, 1], "b": []}, "it is not released yet"
    owner.assigned(5, "t", 0, 1)
    owner.backlogs = {TopicPartition("t", number): 10 * (number > 1) for number in range(4)}
    assert rebalance() == {"a": [0, 1], "b": [2, 3]}, "although what grew meanwhile would be divided otherwise"


def test_a_partition_of_an_unsubscribed_topic_is_released_first() -> None:
    owner, other = Member("cooperative-fair"), Member("cooperative-fair")
    owner.assigned(4, "u", 0)
    members = {"a": owner.subscribes("t"), "b": other.subscribes("t", "u")}

    assert other.assign({"t": 1, "u": 1}, members) == {"a": [0], "b": []}


def test_a_partition_that_its_owner_releases_is_not_withheld() -> None:
    owner, other = (Member("cooperative-fair", delay=30) for _ in range(2))
    owner.assigned(4, "t", 0, 1, 2, 3)
    other.assigned(4, "t", 4)

    def rebalance() -> dict[str, list[int]]:
        return owner.assign({"t": 5}, {"a": owner.subscribes("t"), "b": other.subscribes("t")})

    assert rebalance() == {"a": [0, 1, 2], "b": [4]}
    owner.assigned(5, "t", 0, 1, 2)
    assert rebalance() == {"a": [0, 1, 2], "b": [3, 4]}
    assert owner.plan is not None
    assert owner.plan.withheld == frozenset()


def test_of_two_claimants_the_later_generation_owns_a_partition() -> None:
    stale, owner = Member("cooperative-fair"), Member("cooperative-fair")
    stale.assigned(4, "t", 0)
    owner.assigned(5, "t", 0)
    members = {"a": stale.subscribes("t"), "b": owner.subscribes("t")}

    assert owner.assign({"t": 2}, members) == {"a": [1], "b": [0]}


@pytest.mark.parametrize(("led_in_between", "until"), [(False, 30.0), (True, 50.0)])
def test_the_wait_for_a_replacement_begins_anew_when_another_member_has_led(led_in_between: bool, until: float) -> None:
    leader, other = (Member("cooperative-fair", delay=30) for _ in range(2))
    leader.assigned(4, "t", 0, 1, 2, 3)
    other.assigned(4, "t", 4, 5)
    leader.assign({"t": 6}, {"a": leader.subscribes("t"), "b": other.subscribes("t")})
    leader.assign({"t": 6}, {"a": leader.subscribes("t")})
    assert leader.plan is not None
    assert leader.plan.rejoin_at == 30.0

    leader.elections += led_in_between
    leader.assign({"t": 6}, {"a": leader.subscribes("t")}, now=20.0)

    assert leader.plan.rejoin_at == until


def test_a_leader_whose_predecessor_assigned_the_partitions_judges_them_too() -> None:
    leader = GroupAssignor("lag")
    assert not leader.would_pay({})
    had = {TopicPartition("t", number): 9_000 for number in range(2)}
    leader.take_over({"a": CoreMember(frozenset({"t"}), tuple(had)), "b": CoreMember(frozenset({"t"}))})
    assert leader.knows_group
    assert leader.would_pay(had)
