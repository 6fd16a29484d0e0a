"""Assignors in real groups, and what members tell each other for them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, Member
from tests.support.shared_kafka import SharedKafka

Join = Callable[..., Member]


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


# What members tell -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sticky", "lag", "cooperative-fair", "cooperative-lag"])
def test_each_consumer_of_a_process_remembers_its_own(name: str) -> None:
    one, two, leader = (ConsumerAssignor(name) for _ in range(3))
    assigned(one, 4, "t", 0, 3)
    assigned(two, 4, "t", 1, 2)

    members = {"a": sent(two.metadata(["t"])), "b": sent(one.metadata(["t"])), "c": sent(leader.metadata(["t"]))}

    assert gets(leader.assign(cluster(t=6), members)) == {"a": [1, 2], "b": [0, 3], "c": [4, 5]}


def test_a_member_tells_what_is_left_of_what_it_has() -> None:
    one, leader = ConsumerAssignor("lag"), ConsumerAssignor("lag")
    assigned(one, 4, "t", 0, 1, 2)
    one.backlogs = {TopicPartition("t", 0): 2**40, TopicPartition("t", 1): 2**39, TopicPartition("t", 2): 2**39}

    members = {"a": sent(one.metadata(["t"])), "b": sent(leader.metadata(["t"]))}

    assert sorted(gets(leader.assign(cluster(t=3), members)).values()) == [[0], [1, 2]]


@pytest.mark.parametrize("name", ["range", "roundrobin", "fair"])
def test_static_members_get_the_same_whatever_their_member_ids_are(name: str) -> None:
    first, second = (ConsumerAssignor(name, instance=instance) for instance in ("worker-1", "worker-2"))
    other = ConsumerAssignor(name)

    def assign(*ids: str) -> list[list[int]]:
        members = {one: sent(who.metadata(["t"])) for one, who in zip(ids, (first, second, other), strict=True)}
        found = gets(other.assign(cluster(t=6), members))
        return [found[one] for one in ids]

    assert assign("a", "b", "c") == assign("c", "b", "a") == assign("b", "c", "a")


def test_two_members_with_one_instance_id_are_told_apart() -> None:
    twins = [ConsumerAssignor("fair", instance="worker-1") for _ in range(2)]
    members = {one: sent(who.metadata(["t"])) for one, who in zip("ab", twins, strict=True)}

    assert gets(twins[0].assign(cluster(t=2), members)) == {"a": [0], "b": [1]}


def test_the_leader_knows_what_is_left_of_what_nobody_has() -> None:
    one, leader = ConsumerAssignor("lag"), ConsumerAssignor("lag")
    for assignor, number in ((one, 0), (leader, 1)):
        assigned(assignor, 4, "t", number)
        assignor.backlogs = {TopicPartition("t", number): 500 + number for number in range(2)}
    leader.backlogs = {TopicPartition("t", number): left for number, left in enumerate((7, 501, 1_000, 490))}

    members = {"a": sent(one.metadata(["t"])), "b": sent(leader.metadata(["t"]))}

    assert gets(leader.assign(cluster(t=4), members)) == {"a": [0, 2], "b": [1, 3]}


def test_sticky_understands_what_the_clients_own_sticky_tells_and_is_understood() -> None:
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
@pytest.mark.parametrize("user_data", [b"\0", b"\xff" * 40, b"\0\1" + b"\0" * 8])
def test_a_member_that_makes_no_sense_counts_as_new(
    name: str, user_data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    leader = ConsumerAssignor(name)
    assigned(leader, 4, "t", 0, 1)
    members = {"a": sent(leader.metadata(["t"])), "b": sent(ConsumerProtocolMemberMetadata(0, ["t"], user_data))}

    with caplog.at_level(logging.WARNING, "aioshard.kafka.assignors"):
        assert gets(leader.assign(cluster(t=4), members)) == {"a": [0, 1], "b": [2, 3]}


@pytest.mark.parametrize("name", ["cooperative-fair", "cooperative-lag"])
def test_a_partition_moves_when_its_owner_has_released_it(name: str) -> None:
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


def test_a_partition_of_a_topic_that_its_owner_gives_up_is_released_first() -> None:
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


def test_of_two_that_claim_a_partition_the_later_generation_has_it() -> None:
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


# Real groups -----------------------------------------------------------------------------


def held(member: Member) -> set[TopicPartition]:
    return set(member.assignments[-1].partitions) if member.assignments else set()


async def settle(*members: Member, partitions: int) -> None:
    """Poll all members until they are in one generation and have all partitions, each once; some may have none."""
    async with asyncio.timeout(PATIENCE):
        while True:
            generations = {member.transport.membership().generation for member in members}
            everything = [at for member in members for at in held(member)]
            if (
                len(generations) == 1
                and -1 not in generations
                and len(everything) == len(set(everything)) == partitions
            ):
                return
            await asyncio.gather(*(member.poll() for member in members))


@pytest.mark.parametrize(
    "assignor",
    [
        "range",
        "sticky",
        "cooperative-lag",
        *(pytest.param(name, marks=pytest.mark.chaos) for name in ("roundrobin", "fair", "lag", "cooperative-fair")),
    ],
)
async def test_three_members_agree_and_those_who_stay_take_over_from_the_one_that_leaves(
    kafka: SharedKafka, topic: str, member: Join, assignor: str
) -> None:
    await kafka.create_topic(topic, partitions=9)
    one, two, three = (member(assignor=assignor) for _ in range(3))

    for joining in (one, two, three):
        await joining.transport.start([topic], None, joining)
    await settle(one, two, three, partitions=9)
    before = {number: held(m) for number, m in enumerate((one, two, three))}
    await three.transport.close()
    await settle(one, two, partitions=9)

    assert [len(had) for had in before.values()] == [3, 3, 3]
    assert sorted(len(held(m)) for m in (one, two)) == [4, 5]
    if assignor not in {"range", "roundrobin", "fair"}:
        assert before[0] < held(one)
        assert before[1] < held(two)


async def test_members_with_different_subscriptions_get_two_each(kafka: SharedKafka, topic: str, member: Join) -> None:
    """Range gives them five, three, none and none."""
    partitions = {"1": 2, "2": 1, "3": 2, "4": 1, "5": 2}
    for number, count in partitions.items():
        await kafka.create_topic(f"{topic}-{number}", partitions=count)
    members = [member(assignor="fair") for _ in range(4)]

    for one, numbers in zip(members, ("12345", "135", "135", "12345"), strict=True):
        await one.transport.start([f"{topic}-{number}" for number in numbers], None, one)
    await settle(*members, partitions=8)

    assert [len(held(one)) for one in members] == [2, 2, 2, 2]
    assert not any(at.topic[-1] in "24" for one in members[1:3] for at in held(one)), "to subscribers only"


async def test_who_joins_a_group_that_is_behind_gets_a_share_of_the_backlog(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=6)
    backlog = {0: 600, 1: 200, 2: 200, 3: 200, 4: 0, 5: 0}
    for partition, count in backlog.items():
        # 50 of each are read before anybody else comes.
        await kafka.produce(topic, [(None, b"v")] * (count + 50), partition=partition)
    members = [member(assignor="lag") for _ in range(3)]
    for one in members:
        one.at_revoke = committing(one, 50)

    shares = []
    for number, one in enumerate(members, start=1):
        await one.transport.start([topic], None, one)
        await settle(*members[:number], partitions=6)
        shares.append(sorted(sum(backlog[at.partition] for at in held(one)) for one in members[:number]))

    assert shares == [[1200], [600, 600], [200, 400, 600]]
    assert [len(held(one)) for one in members] == [2, 2, 2], "those without a backlog are spread by their number"

    far_behind = next(one for one in members if TopicPartition(topic, 0) in held(one))
    rest = [one for one in members if one is not far_behind]
    await far_behind.transport.close()
    await settle(*rest, partitions=6)

    assert sorted(sum(backlog[at.partition] for at in held(one)) for one in rest) == [600, 600]
    assert [len(held(one)) for one in rest] == [3, 3], "the leader has asked for what nobody has"


@pytest.mark.chaos
async def test_a_backlog_that_stays_unequal_moves_and_an_equal_one_does_not(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=4)
    members = [member(assignor="lag", balance_interval=0.5) for _ in range(2)]
    for number, one in enumerate(members, start=1):
        one.at_revoke = committing(one, 0)
        await one.transport.start([topic], None, one)
        await settle(*members[:number], partitions=4)
    first, second = members
    behind = sorted(at.partition for at in held(first))
    generation = first.transport.membership().generation

    for partition in range(4):
        await kafka.produce(topic, [(None, b"v")] * 1_500, partition=partition)
    await asyncio.sleep(2.5)  # four checks
    assert first.transport.membership().generation == generation, "both have the same backlog"

    for partition in behind:
        await kafka.produce(topic, [(None, b"v")] * 6_000, partition=partition)
    async with asyncio.timeout(PATIENCE):
        while not {at.partition for at in held(second)} & set(behind):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)
    await settle(*members, partitions=4)

    assert [len({at.partition for at in held(one)} & set(behind)) for one in members] == [1, 1]
    moved = first.transport.membership().generation
    await asyncio.sleep(2.5)
    assert first.transport.membership().generation == moved, "once is enough"


def committing(member: Member, offset: int) -> Callable[[Collection[TopicPartition], bool], Awaitable[None]]:
    async def commit(partitions: Collection[TopicPartition], _: bool) -> None:
        await member.transport.commit({at: Committed(offset, "") for at in partitions}, member.transport.membership())

    return commit


async def three_with_a_delay(member: Join, topic: str, delay: float) -> list[Member]:
    """Three that have two partitions each, when the last one has just left."""
    members = [member(assignor="sticky", reassignment_delay=delay) for _ in range(3)]
    for one in members:
        await one.transport.start([topic], None, one)
    await settle(*members, partitions=6)
    assert [len(held(one)) for one in members] == [2, 2, 2]
    return members


async def test_what_a_member_had_waits_for_the_one_in_its_place(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = await three_with_a_delay(member, topic, 60)
    before = [held(m) for m in (one, two, three)]

    await three.transport.close()
    await settle(one, two, partitions=4)
    while_waiting = [held(m) for m in (one, two)]
    new = member(assignor="sticky", reassignment_delay=60)
    await new.transport.start([topic], None, new)
    await settle(one, two, new, partitions=6)

    assert while_waiting == before[:2], "nobody gets them yet"
    assert [held(m) for m in (one, two, new)] == before


async def test_what_nobody_comes_for_is_given_to_the_others(
    kafka: SharedKafka, topic: str, member: Join, caplog: pytest.LogCaptureFixture
) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = await three_with_a_delay(member, topic, 1)
    before = [held(m) for m in (one, two)]

    left_at = asyncio.get_running_loop().time()
    await three.transport.close()
    await settle(one, two, partitions=6)

    assert asyncio.get_running_loop().time() - left_at >= 1
    assert [len(held(m)) for m in (one, two)] == [3, 3]
    assert all(had < held(m) for had, m in zip(before, (one, two), strict=True))
    assert "2 partitions of a lost member stay unassigned for 1 s" in caplog.text


@pytest.mark.chaos
async def test_the_leader_may_be_the_one_that_leaves(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = await three_with_a_delay(member, topic, 2)
    before = [held(m) for m in (two, three)]

    await one.transport.close()
    await settle(two, three, partitions=4)
    assert [held(m) for m in (two, three)] == before
    await settle(two, three, partitions=6)

    assert [len(held(m)) for m in (two, three)] == [3, 3]
