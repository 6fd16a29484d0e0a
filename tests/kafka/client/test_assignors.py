"""Assignors in real groups."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import pytest

from aioshard.ports import Committed
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, Member, held, until_assigned
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]


@pytest.mark.parametrize(
    "assignor",
    [
        "range",
        "sticky",
        "cooperative-lag",
        *(pytest.param(name, marks=pytest.mark.chaos) for name in ("roundrobin", "fair", "lag", "cooperative-fair")),
    ],
)
async def test_remaining_members_take_over_from_the_one_that_leaves(
    kafka: SharedKafka, topic: str, member: Join, assignor: str
) -> None:
    await kafka.create_topic(topic, partitions=9)
    one, two, three = (member(assignor=assignor) for _ in range(3))

    for joining in (one, two, three):
        await joining.transport.start([topic], None, joining)
    await until_assigned(one, two, three, partitions=9, some_idle=True)
    before = {number: held(m) for number, m in enumerate((one, two, three))}
    await three.transport.close()
    await until_assigned(one, two, partitions=9, some_idle=True)

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

    for consumer, numbers in zip(members, ("12345", "135", "135", "12345"), strict=True):
        await consumer.transport.start([f"{topic}-{number}" for number in numbers], None, consumer)
    await until_assigned(*members, partitions=8, some_idle=True)

    assert [len(held(consumer)) for consumer in members] == [2, 2, 2, 2]
    assert not any(at.topic[-1] in "24" for consumer in members[1:3] for at in held(consumer)), "to subscribers only"


async def test_a_member_joining_a_lagging_group_gets_a_share_of_the_backlog(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=6)
    backlog = {0: 600, 1: 200, 2: 200, 3: 200, 4: 0, 5: 0}
    for partition, count in backlog.items():
        # 50 of each are read before anybody else comes.
        await kafka.produce(topic, [(None, b"v")] * (count + 50), partition=partition)
    members = [member(assignor="lag") for _ in range(3)]
    for consumer in members:
        consumer.at_revoke = committing(consumer, 50)

    shares = []
    for number, consumer in enumerate(members, start=1):
        await consumer.transport.start([topic], None, consumer)
        await until_assigned(*members[:number], partitions=6, some_idle=True)
        shares.append(sorted(sum(backlog[at.partition] for at in held(consumer)) for consumer in members[:number]))

    assert shares == [[1200], [600, 600], [200, 400, 600]]
    assert [len(held(consumer)) for consumer in members] == [2, 2, 2], (
        "those without a backlog are spread by their number"
    )

    far_behind = next(consumer for consumer in members if TopicPartition(topic, 0) in held(consumer))
    rest = [consumer for consumer in members if consumer is not far_behind]
    await far_behind.transport.close()
    await until_assigned(*rest, partitions=6, some_idle=True)

    assert sorted(sum(backlog[at.partition] for at in held(consumer)) for consumer in rest) == [600, 600]
    assert [len(held(consumer)) for consumer in rest] == [3, 3], (
        "the leader has read the backlog of partitions without an owner"
    )


@pytest.mark.chaos
async def test_an_unequal_backlog_is_rebalanced_and_an_equal_one_is_not(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=4)
    members = [member(assignor="lag", balance_interval=0.5) for _ in range(2)]
    for number, consumer in enumerate(members, start=1):
        consumer.at_revoke = committing(consumer, 0)
        await consumer.transport.start([topic], None, consumer)
        await until_assigned(*members[:number], partitions=4, some_idle=True)
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
    await until_assigned(*members, partitions=4, some_idle=True)

    assert [len({at.partition for at in held(consumer)} & set(behind)) for consumer in members] == [1, 1]
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
    for consumer in members:
        await consumer.transport.start([topic], None, consumer)
    await until_assigned(*members, partitions=6, some_idle=True)
    assert [len(held(consumer)) for consumer in members] == [2, 2, 2]
    return members


async def test_partitions_of_a_member_that_left_wait_for_its_replacement(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = await three_with_a_delay(member, topic, 60)
    before = [held(m) for m in (one, two, three)]

    await three.transport.close()
    await until_assigned(one, two, partitions=4, some_idle=True)
    while_waiting = [held(m) for m in (one, two)]
    new = member(assignor="sticky", reassignment_delay=60)
    await new.transport.start([topic], None, new)
    await until_assigned(one, two, new, partitions=6, some_idle=True)

    assert while_waiting == before[:2], "nobody gets them yet"
    assert [held(m) for m in (one, two, new)] == before


async def test_withheld_partitions_go_to_the_others_after_the_delay(
    kafka: SharedKafka, topic: str, member: Join, caplog: pytest.LogCaptureFixture
) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = await three_with_a_delay(member, topic, 1)
    before = [held(m) for m in (one, two)]

    left_at = asyncio.get_running_loop().time()
    await three.transport.close()
    await until_assigned(one, two, partitions=6, some_idle=True)

    assert asyncio.get_running_loop().time() - left_at >= 1
    assert [len(held(m)) for m in (one, two)] == [3, 3]
    assert all(had < held(m) for had, m in zip(before, (one, two), strict=True))
    assert "2 partitions of a lost member stay unassigned for 1 s" in caplog.text


@pytest.mark.chaos
async def test_the_leaving_member_may_be_the_leader(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = await three_with_a_delay(member, topic, 2)
    before = [held(m) for m in (two, three)]

    await one.transport.close()
    await until_assigned(two, three, partitions=4, some_idle=True)
    assert [held(m) for m in (two, three)] == before
    await until_assigned(two, three, partitions=6, some_idle=True)

    assert [len(held(m)) for m in (two, three)] == [3, 3]
