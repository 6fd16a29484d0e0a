"""Assignors: the user data that members send, and the assignment that the leader computes from it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.records import TopicPartition


def cluster(**partitions: int) -> Any:
    return SimpleNamespace(partitions_for_topic=lambda topic: set(range(partitions[topic])) or None)


def assigned(assignor: ConsumerAssignor, generation: int, topic: str, *numbers: int) -> None:
    assignor.on_assignment(ConsumerProtocolMemberAssignment(0, [(topic, list(numbers))], b""))
    assignor.generation = generation


def sent(metadata: Any) -> Any:
    """As it arrives at the leader."""
    return ConsumerProtocolMemberMetadata.decode(metadata.encode())


def gets(found: Any) -> dict[str, list[int]]:
    arrived = {name: ConsumerProtocolMemberAssignment.decode(assignment.encode()) for name, assignment in found.items()}
    return {name: [at.partition for at in assignment.partitions()] for name, assignment in arrived.items()}


@pytest.mark.parametrize("name", ["sticky", "lag", "cooperative-fair", "cooperative-lag"])
def test_every_consumer_of_a_process_keeps_its_own_state(name: str) -> None:
    one, two, leader = (ConsumerAssignor(name) for _ in range(3))
    assigned(one, 4, "t", 0, 3)
    assigned(two, 4, "t", 1, 2)

    members = {"a": sent(two.metadata(["t"])), "b": sent(one.metadata(["t"])), "c": sent(leader.metadata(["t"]))}

    assert gets(leader.assign(cluster(t=6), members)) == {"a": [1, 2], "b": [0, 3], "c": [4, 5]}


def test_a_member_reports_the_backlog_of_its_partitions() -> None:
    one, leader = ConsumerAssignor("lag"), ConsumerAssignor("lag")
    assigned(one, 4, "t", 0, 1, 2)
    one.backlogs = {TopicPartition("t", 0): 2**40, TopicPartition("t", 1): 2**39, TopicPartition("t", 2): 2**39}

    members = {"a": sent(one.metadata(["t"])), "b": sent(leader.metadata(["t"]))}

    assert sorted(gets(leader.assign(cluster(t=3), members)).values()) == [[0], [1, 2]]


@pytest.mark.parametrize("name", ["range", "roundrobin", "fair"])
def test_static_members_keep_their_partitions_under_new_member_ids(name: str) -> None:
    first, second = (ConsumerAssignor(name, instance=instance) for instance in ("worker-1", "worker-2"))
    other = ConsumerAssignor(name)

    def assign(*ids: str) -> list[list[int]]:
        members = {
            member_id: sent(who.metadata(["t"])) for member_id, who in zip(ids, (first, second, other), strict=True)
        }
        found = gets(other.assign(cluster(t=6), members))
        return [found[member_id] for member_id in ids]

    assert assign("a", "b", "c") == assign("c", "b", "a") == assign("b", "c", "a")


def test_two_members_with_one_instance_id_are_distinguished() -> None:
    twins = [ConsumerAssignor("fair", instance="worker-1") for _ in range(2)]
    members = {member_id: sent(who.metadata(["t"])) for member_id, who in zip("ab", twins, strict=True)}

    assert gets(twins[0].assign(cluster(t=2), members)) == {"a": [0], "b": [1]}


def test_the_leader_reports_the_backlog_of_unowned_partitions() -> None:
    one, leader = ConsumerAssignor("lag"), ConsumerAssignor("lag")
    for assignor, number in ((one, 0), (leader, 1)):
        assigned(assignor, 4, "t", number)
        assignor.backlogs = {TopicPartition("t", number): 500 + number for number in range(2)}
    leader.backlogs = {TopicPartition("t", number): left for number, left in enumerate((7, 501, 1_000, 490))}

    members = {"a": sent(one.metadata(["t"])), "b": sent(leader.metadata(["t"]))}

    assert gets(leader.assign(cluster(t=4), members)) == {"a": [0, 2], "b": [1, 3]}


def test_sticky_is_compatible_with_the_clients_own_sticky() -> None:
    ours = ConsumerAssignor("sticky")
    theirs: Any = type("Theirs", (StickyPartitionAssignor,), {})
    assigned(ours, 4, "t", 1, 2)
    theirs.on_assignment(ConsumerProtocolMemberAssignment(0, [("t", [0, 3])], b""))
    theirs.generation = 4

    members = {"a": sent(ours.metadata(["t"])), "b": sent(theirs.metadata(["t"]))}

    parsed = StickyPartitionAssignor.parse_member_metadata(members["a"])
    assert (parsed.partitions, parsed.generation) == ([("t", 1), ("t", 2)], 4)
    assert gets(ours.assign(cluster(t=4), members)) == {"a": [1, 2], "b": [0, 3]}


@pytest.mark.parametrize("name", ["sticky", "lag", "cooperative-lag"])
@pytest.mark.parametrize(
    "user_data",
    [
        b"\0",
        b"\xff" * 40,
        b"\0\1" + b"\0" * 8,
        pytest.param(b"[" * 100_000, id="nested too deeply"),
        pytest.param(b'{"had": {}, "generation": Infinity}', id="infinite"),
    ],
)
def test_a_member_with_invalid_metadata_counts_as_new(
    name: str, user_data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    leader = ConsumerAssignor(name)
    assigned(leader, 4, "t", 0, 1)
    members = {"a": sent(leader.metadata(["t"])), "b": sent(ConsumerProtocolMemberMetadata(0, ["t"], user_data))}

    with caplog.at_level(logging.WARNING, "aioshard.kafka.assignors"):
        assert gets(leader.assign(cluster(t=4), members)) == {"a": [0, 1], "b": [2, 3]}


@pytest.mark.parametrize("name", ["cooperative-fair", "cooperative-lag"])
def test_a_partition_moves_once_its_owner_has_released_it(name: str) -> None:
    owner, other = ConsumerAssignor(name), ConsumerAssignor(name)
    assigned(owner, 4, "t", 0, 1, 2, 3)

    def rebalance() -> dict[str, list[int]]:
        return gets(owner.assign(cluster(t=4), {"a": sent(owner.metadata(["t"])), "b": sent(other.metadata(["t"]))}))

    assert rebalance() == {"a": [0, 1], "b": []}
    assert owner.moving == {TopicPartition("t", 2): "b", TopicPartition("t", 3): "b"}
    assert rebalance() == {"a": [0, 1], "b": []}, "it is not released yet"
    assigned(owner, 5, "t", 0, 1)
    owner.backlogs = {TopicPartition("t", number): 10 * (number > 1) for number in range(4)}
    assert rebalance() == {"a": [0, 1], "b": [2, 3]}, "although what grew meanwhile would be divided otherwise"
    assert not owner.moving


def test_a_partition_of_an_unsubscribed_topic_is_released_first() -> None:
    owner, other = ConsumerAssignor("cooperative-fair"), ConsumerAssignor("cooperative-fair")
    assigned(owner, 4, "u", 0)
    members = {"a": sent(owner.metadata(["t"])), "b": sent(other.metadata(["t", "u"]))}

    assert gets(other.assign(cluster(t=1, u=1), members)) == {"a": [0], "b": []}
    assert other.moving == {TopicPartition("u", 0): "b"}


def test_a_partition_that_its_owner_releases_is_not_withheld() -> None:
    owner, other = (ConsumerAssignor("cooperative-fair", delay=30) for _ in range(2))
    assigned(owner, 4, "t", 0, 1, 2, 3)
    assigned(other, 4, "t", 4)

    def rebalance() -> dict[str, list[int]]:
        members = {"a": sent(owner.metadata(["t"])), "b": sent(other.metadata(["t"]))}
        return gets(owner.assign(cluster(t=5), members))

    assert rebalance() == {"a": [0, 1, 2], "b": [4]}
    assigned(owner, 5, "t", 0, 1, 2)
    assert rebalance() == {"a": [0, 1, 2], "b": [3, 4]}
    assert owner.joins_again_in is None


def test_of_two_claimants_the_later_generation_owns_a_partition() -> None:
    stale, owner = ConsumerAssignor("cooperative-fair"), ConsumerAssignor("cooperative-fair")
    assigned(stale, 4, "t", 0)
    assigned(owner, 5, "t", 0)
    members = {"a": sent(stale.metadata(["t"])), "b": sent(owner.metadata(["t"]))}

    assert gets(owner.assign(cluster(t=2), members)) == {"a": [1], "b": [0]}


def test_a_topic_without_partitions_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assignor = ConsumerAssignor("fair")
    members = {"a": sent(assignor.metadata(["t", "gone"]))}

    assert gets(assignor.assign(cluster(t=1, gone=0), members)) == {"a": [0]}
    assert "no partitions of gone were assigned" in caplog.text


def test_a_former_leader_forgets_withheld_and_planned_moves() -> None:
    leader, other = (ConsumerAssignor("cooperative-fair", delay=30) for _ in range(2))
    assigned(leader, 4, "t", 0, 1, 2, 3)
    assigned(other, 4, "t", 4, 5)
    both = {"a": sent(leader.metadata(["t"])), "b": sent(other.metadata(["t"]))}
    leader.assign(cluster(t=6), both)
    leader.assign(cluster(t=6), {"a": sent(leader.metadata(["t"]))})
    assert leader.joins_again_in is not None
    leader.moving = {TopicPartition("t", 3): "b"}

    leader.metadata(["t"])  # joins again, and another member leads
    assigned(leader, 6, "t", 0, 1, 2)

    assert leader.joins_again_in is None
    assert leader.moving == {}
