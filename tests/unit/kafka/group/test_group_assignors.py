"""Assignors of classic members: what members say, who gets what, and groups of several versions and clients."""

import math
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata

from aioshard.core.assignment import ASSIGNORS, Member, Partitions
from aioshard.kafka.group.assignors import GroupAssignor, Plan, claimed, reported
from aioshard.kafka.group.classic import Assignor, ClassicMember, Elected
from aioshard.kafka.group.member import NO_PARTITIONS
from aioshard.kafka.wire.consumer_protocol import Subscription, read_subscription, write_subscription
from aioshard.records import TopicPartition
from tests.simulation.seeds import with_seeds
from tests.unit.kafka.group.classic_chaos import Chaos, Release
from tests.unit.kafka.group.classic_world import Node, World
from tests.unit.kafka.group.former_assignor import ConsumerAssignor

ORDERS = frozenset({"orders"})
EVERY_NAME = [*ASSIGNORS, "cooperative-sticky"]
COOPERATIVE = [name for name in EVERY_NAME if name.startswith("cooperative-")]


def orders(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("orders", number) for number in numbers)


def member(name: str, *owned: int, generation: int = 4) -> Subscription:
    """A member that has partitions; it claims them if its assignor is incremental."""
    assignor = GroupAssignor(name)
    content = assignor.user_data(orders(*owned), generation)
    claims = orders(*owned) if assignor.is_incremental else NO_PARTITIONS
    return read_subscription(write_subscription(Subscription(ORDERS, content, claims, generation)))


def of_version_0(name: str, *owned: int, generation: int = 4) -> Subscription:
    """A member that says in its user data what it has."""
    return Subscription(ORDERS, GroupAssignor(name).user_data(orders(*owned), generation), None, -1)


def assign(
    assignor: GroupAssignor,
    count: int,
    generation: int = 5,
    now: float = 0.0,
    backlogs: Mapping[TopicPartition, int] | None = None,
    **members: Subscription,
) -> Plan:
    election = Elected(generation, assignor.name, members)
    return assignor.assign(election, {"orders": range(count)}, now, backlogs)


def numbers(plan: Plan) -> dict[str, list[int]]:
    return {name: sorted(at.partition for at in assigned) for name, assigned in plan.assignments.items()}


# One assignment -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_partition_of_a_new_group_is_assigned(name: str) -> None:
    plan = assign(GroupAssignor(name), 6, a=member(name), b=member(name))

    assert sorted(number for owned in numbers(plan).values() for number in owned) == [0, 1, 2, 3, 4, 5]
    assert sorted(map(len, numbers(plan).values())) == [3, 3]
    assert plan.rejoin_at == math.inf


@pytest.mark.parametrize("name", COOPERATIVE)
def test_nobody_gets_what_another_member_claims(name: str) -> None:
    plan = assign(GroupAssignor(name), 4, a=member(name, 0, 1, 2, 3), b=member(name))

    kept = numbers(plan)["a"]
    assert (len(kept), numbers(plan)["b"]) == (2, [])
    assert plan.rejoin_at == math.inf, "the owner joins again when it has released the others"
    after = assign(GroupAssignor(name), 4, generation=6, a=member(name, *kept), b=member(name))
    assert sorted(map(len, numbers(after).values())) == [2, 2]
    assert numbers(after)["a"] == kept


@pytest.mark.parametrize("name", ["cooperative-fair", "cooperative-lag"])
def test_the_leader_rebalances_again_for_members_that_do_not(name: str) -> None:
    """Members that claim partitions in their user data leave the second step to the leader."""
    plan = assign(GroupAssignor(name), 4, now=7.0, a=of_version_0(name, 0, 1, 2, 3), b=member(name))

    assert (len(numbers(plan)["a"]), numbers(plan)["b"]) == (2, [])
    assert plan.rejoin_at == 7.0


@pytest.mark.parametrize("name", ["cooperative-fair", "cooperative-lag", "sticky", "lag"])
def test_an_eager_member_has_wishes_but_no_claims(name: str) -> None:
    """It offers an eager assignor too, so it has released everything before it joined."""
    content = GroupAssignor(name).user_data(orders(0, 1, 2, 3), 4)
    eager = Subscription(ORDERS, content, NO_PARTITIONS, 4)

    plan = assign(GroupAssignor(name), 4, a=eager, b=member(name))

    assert sorted(map(len, numbers(plan).values())) == [2, 2]
    assert claimed(name, eager).owned == ()
    assert set(reported(name, eager).owned) == orders(0, 1, 2, 3)


@pytest.mark.parametrize("name", COOPERATIVE)
def test_a_partition_that_two_members_claim_under_one_generation_is_taken_from_both(name: str) -> None:
    plan = assign(GroupAssignor(name), 4, a=member(name, 0, 1), b=member(name, 1, 2), c=member(name, 3, generation=3))

    assert all(1 not in owned for owned in numbers(plan).values())
    later = assign(GroupAssignor(name), 4, a=member(name, 0, 1), b=member(name, 1, 2, generation=5))
    assert 1 in numbers(later)["b"]


@pytest.mark.parametrize(("generation", "is_kept"), [(6, True), (7, False)], ids=["led", "not led since"])
def test_a_moving_partition_goes_to_its_planned_member_although_backlogs_change(generation: int, is_kept: bool) -> None:
    """Unless another member has led since: then the plan is not the group's."""
    leader = GroupAssignor("cooperative-lag")
    before = dict.fromkeys(orders(0, 1, 2, 3), 1_000)
    first = assign(leader, 4, backlogs=before, a=member("cooperative-lag", 0, 1, 2, 3), b=member("cooperative-lag"))
    kept = numbers(first)["a"]
    moving = sorted({0, 1, 2, 3}.difference(kept))
    grown = before | dict.fromkeys(orders(*moving), 1_000_000)

    one, other = member("cooperative-lag", *kept), member("cooperative-lag")
    after = assign(leader, 4, generation=generation, backlogs=grown, a=one, b=other, c=other)

    assert (set(moving) <= set(numbers(after)["b"])) is is_kept


@pytest.mark.parametrize("name", EVERY_NAME)
def test_only_assignors_whose_leaders_respect_claims_are_incremental(name: str) -> None:
    """A leader of another version, or of another client, may have the same name."""
    assert GroupAssignor(name).is_incremental is (name in COOPERATIVE)


def test_partitions_of_a_lost_member_wait_for_a_replacement() -> None:
    leader = GroupAssignor("cooperative-fair", delay=30.0)
    assign(leader, 4, a=member("cooperative-fair", 0, 1), b=member("cooperative-fair", 2, 3))

    plan = assign(leader, 4, generation=6, now=100.0, a=member("cooperative-fair", 0, 1))
    assert (numbers(plan), plan.rejoin_at, plan.withheld) == ({"a": [0, 1]}, 130.0, orders(2, 3))
    plan = assign(leader, 4, generation=7, now=130.0, a=member("cooperative-fair", 0, 1))
    assert (numbers(plan), plan.rejoin_at) == ({"a": [0, 1, 2, 3]}, math.inf)


def test_what_a_predecessor_left_unassigned_is_assigned_at_once() -> None:
    """It may have waited for a replacement for as long as it was told to: nobody knows since when."""
    leader = GroupAssignor("sticky", delay=30.0)
    members = {"a": member("sticky", 0, 1), "b": member("sticky", 2)}
    before = {"orders": frozenset({0, 1, 2})}

    plan = leader.assign(Elected(9, "sticky", members, before), {"orders": range(4)}, 0.0)

    assert plan.withheld == frozenset()
    assert sorted(number for assigned in numbers(plan).values() for number in assigned) == [0, 1, 2, 3]


def test_partitions_of_an_assignment_that_never_reached_the_group_are_new_still() -> None:
    """They are not those of a lost member, so nobody waits for its replacement."""
    leader = GroupAssignor("sticky", delay=30.0)
    had = {"orders": frozenset({0, 1})}
    members = {"a": member("sticky", 0), "b": member("sticky", 1)}
    leader.assign(Elected(5, "sticky", members), {"orders": range(2)}, 0.0)
    leader.assign(Elected(6, "sticky", members, had), {"orders": range(4)}, 1.0)

    plan = leader.assign(Elected(7, "sticky", members, had), {"orders": range(4)}, 2.0)

    assert plan.withheld == frozenset()


def test_the_leader_judges_whether_a_rebalance_would_pay() -> None:
    leader = GroupAssignor("cooperative-lag")
    assign(leader, 4, a=member("cooperative-lag", 0, 1), b=member("cooperative-lag", 2, 3))

    assert leader.would_pay({at: 50_000 if at.partition < 2 else 0 for at in orders(0, 1, 2, 3)})
    assert not leader.would_pay(dict.fromkeys(orders(0, 1, 2, 3), 50_000))


# Other clients --------------------------------------------------------------------------------


def test_members_of_javas_cooperative_sticky_claim_their_partitions_in_each_version() -> None:
    """Before version 2 of the subscription, the generation is in the user data."""
    old = Subscription(ORDERS, b"\0\0\0\7", orders(0), -1)
    new = Subscription(ORDERS, b"\0\0\0\7", orders(0), 8)

    assert claimed("cooperative-sticky", old) == Member(ORDERS, (TopicPartition("orders", 0),), 7)
    assert claimed("cooperative-sticky", new) == Member(ORDERS, (TopicPartition("orders", 0),), 8)
    assert claimed("cooperative-sticky", Subscription(ORDERS, b"", orders(0), -1)).generation == -1
    assert GroupAssignor("cooperative-sticky").user_data(orders(0), 7) == b"\0\0\0\7"


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize(
    "content", [b"\xff", b"{}", b"[]", b'{"generation": {}, "had": {"orders": {"x": 1}}}', b"\0" * 5]
)
def test_a_member_with_invalid_user_data_counts_as_new(name: str, content: bytes) -> None:
    assert reported(name, Subscription(ORDERS, content)).owned == ()


# Groups of several versions and clients -------------------------------------------------------


class OldMember(ClassicMember):
    """A member of a version that claims its partitions in the user data, and lets the leader do the second step."""

    def _subscription(self, assignor: Assignor) -> bytes:
        written = read_subscription(super()._subscription(assignor))
        return bytes(ConsumerProtocolMemberMetadata(0, sorted(written.topics), written.user_data).encode())

    def _reconcile(self, target: frozenset[TopicPartition], now: float) -> None:
        self._claimed = NO_PARTITIONS
        super()._reconcile(target, now)


class OldAssignor(GroupAssignor):
    """The leader of that version."""

    def __init__(self, name: str, *, delay: float = 0.0, instance_id: str | None = None) -> None:
        super().__init__(name, delay=delay, instance_id=instance_id)
        self._old = ConsumerAssignor(name, delay, instance_id)
        self._led = -1

    def assign(self, election: Elected, partitions: Partitions, now: float, backlogs: Any = None) -> Plan:  # noqa: ARG002
        if election.generation != self._led + 1:
            self._old.moving = {}
        self._led = election.generation
        cluster: Any = SimpleNamespace(partitions_for_topic=lambda topic: set(partitions[topic]) or None)
        members = {
            name: ConsumerProtocolMemberMetadata(0, sorted(each.topics), each.user_data)
            for name, each in election.members.items()
        }
        found: Mapping[str, Any] = self._old.assign(cluster, members)
        assignments: dict[str, Collection[TopicPartition]] = {
            name: [TopicPartition(at.topic, at.partition) for at in each.partitions()] for name, each in found.items()
        }
        return Plan(assignments, now if self._old.moving else math.inf, frozenset())


class JavaMember(ClassicMember):
    """A member of Java's `cooperative-sticky` before version 2 of the subscription."""

    def _subscription(self, assignor: Assignor) -> bytes:
        generation_and_rack = 4 + 2
        return b"\0\1" + super()._subscription(assignor)[2:-generation_and_rack]


MIXTURES = {
    **{name: [Release([name])] for name in EVERY_NAME},
    **{
        f"{eager} and both": [Release([eager]), Release([f"cooperative-{eager}", eager])]
        for eager in ("fair", "lag", "sticky")
    },
    **{
        f"both and cooperative-{eager}": [Release([f"cooperative-{eager}", eager]), Release([f"cooperative-{eager}"])]
        for eager in ("fair", "lag", "sticky")
    },
    **{
        f"old and new {name}": [Release([name]), Release([name], OldMember, OldAssignor)]
        for name in ("cooperative-fair", "cooperative-lag")
    },
    "old fair and both": [Release(["cooperative-fair", "fair"]), Release(["fair"], OldMember, OldAssignor)],
    "java and ours": [Release(["cooperative-sticky"]), Release(["cooperative-sticky"], JavaMember)],
}


@pytest.mark.parametrize("mixture", MIXTURES)
@with_seeds(5)
def test_a_partition_has_one_owner_in_each_group(mixture: str, seeds: range) -> None:
    for seed in seeds:
        Chaos(seed, mixtures=[MIXTURES[mixture]]).run()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Release([eager]), [Release([f"cooperative-{eager}", eager]), Release([f"cooperative-{eager}"])])
        for eager in ("fair", "lag", "sticky")
    ]
    + [(Release([name], OldMember, OldAssignor), [Release([name])]) for name in ("cooperative-fair", "cooperative-lag")]
    + [(Release(["cooperative-sticky"], JavaMember), [Release(["cooperative-sticky"])])],
    ids=lambda each: each.assignors[0] if isinstance(each, Release) else None,
)
def test_a_group_changes_its_assignor_one_member_after_another(before: Release, after: list[Release]) -> None:
    world = World()

    def start(release: Release, name: str) -> Node:
        return world.start(
            Node(
                world,
                name,
                assignors=release.assignors,
                kind=release.kind,
                new_assignor=release.new_assignor,
                drain=0.1,
            )
        )

    nodes = [start(before, f"{number}") for number in range(3)]
    world.run_until(world.is_settled)
    for release in after:
        for number, node in enumerate(nodes):
            node.leave()
            world.run(3)
            nodes[number] = start(release, f"{node.name}'")
            world.run_until(world.is_settled)

    world.run(5)
    assert world.is_settled(), world.describe()
    assert world.group.protocol == after[-1].assignors[0]
    assert sorted(map(list(world.owners().values()).count, (node.name for node in nodes))) == [2, 2, 2]
