"""Membership: listener calls and which commits are sent."""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest

from aioshard.errors import ClientLostError, CommitRefusedError, StateError
from aioshard.ports import NOT_A_MEMBER, NOTHING, Committed, LogRange, Membership
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, Member, background_tasks, buffered, settings_for, until_assigned
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]


async def all_of(kafka: SharedKafka, topic: str) -> list[TopicPartition]:
    return [TopicPartition(found.topic, found.partition) for found in await kafka.partitions(topic)]


async def test_the_first_assignment_comes_with_the_membership_and_without_a_revocation(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=3)
    one = member()
    assert one.transport.membership() == NOT_A_MEMBER

    assigned = await one.join(topic)

    assert list(assigned.partitions) == await all_of(kafka, topic)
    assert assigned.membership == one.transport.membership()
    assert assigned.membership.member_id
    assert assigned.membership.generation >= 1
    assert one.revocations == []


async def test_commits_are_read_back_with_their_metadata(
    kafka: SharedKafka, topic: str, group: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=3)
    one = member()
    (partitions, membership) = await one.join(topic)
    assert await one.transport.committed(partitions) == dict.fromkeys(partitions)

    await one.transport.commit({partitions[0]: Committed(7, "why"), partitions[1]: Committed(0, "")}, membership)

    found = await one.transport.committed(partitions)
    assert found == {partitions[0]: Committed(7, "why"), partitions[1]: Committed(0, ""), partitions[2]: None}
    assert await kafka.committed(group, topic) == {0: 7, 1: 0}
    await one.transport.commit({}, NOT_A_MEMBER)
    assert await one.transport.committed([]) == {}


async def test_a_seek_while_being_assigned_takes_effect_for_every_partition(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """Also where the group has committed another offset, to which the client would go by itself."""
    await kafka.create_topic(topic, partitions=8)
    for partition in range(8):
        await kafka.produce(topic, [(None, b"%d" % number) for number in range(50)], partition=partition)
    first = member()
    (partitions, membership) = await first.join(topic)
    await first.transport.commit({at: Committed(30, "") for at in partitions}, membership)
    await first.transport.close()

    for _ in range(3):
        second = member(start=5)
        await second.join(topic)
        await second.read_to(dict.fromkeys(partitions, 50))
        assert {at: second.offsets(at)[0] for at in partitions} == dict.fromkeys(partitions, 5)
        await second.transport.close()


async def test_no_record_is_returned_before_the_engine_seeks_and_resumes(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=4)
    for partition in range(4):
        await kafka.produce(topic, [(None, b"v")] * 20, partition=partition)
    one = member()
    one.at_assign = lambda _partitions, _membership: None
    (partitions, _) = await one.join(topic)

    for _ in range(6):
        assert await one.poll() == []
    one.transport.seek(partitions[2], 9)
    for _ in range(3):
        assert await one.poll() == []
    one.transport.resume([partitions[2]])
    await one.read_to({partitions[2]: 20})

    assert list(one.records) == [partitions[2]]
    assert one.offsets(partitions[2]) == list(range(9, 20))


async def test_no_record_is_returned_while_two_members_rebalance(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=4)
    for partition in range(4):
        await kafka.produce(topic, [(None, b"v")] * 2000, partition=partition)
    one, two = member(), member()
    before = await one.join(topic)
    held = asyncio.Event()

    async def hold(_partitions: Collection[TopicPartition], _lost: bool) -> None:
        await held.wait()

    one.at_revoke = hold
    await two.transport.start([topic], None, two)
    await one.poll_until(lambda: bool(one.revocations), lambda _: NOTHING)
    assert buffered(one), "there would be something to hand out"
    for _ in range(5):
        assert await one.poll() == []
    held.set()
    await until_assigned(one, two, partitions=4)

    (revoked,) = one.revocations
    assert revoked == (before.partitions, False), "the eager protocol takes everything"
    after = one.assignments[-1]
    assert after.membership.member_id == before.membership.member_id
    assert after.membership.generation == before.membership.generation + 1
    assert len(after.partitions) == 2


async def test_a_commit_during_a_revocation_is_accepted(
    kafka: SharedKafka, topic: str, group: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=4)
    one, two = member(), member()
    (partitions, membership) = await one.join(topic)

    async def commit(taken: Collection[TopicPartition], lost: bool) -> None:
        assert not lost
        assert one.transport.membership() == membership
        assert [one.transport.position(at) for at in taken] == [0] * 4
        await one.transport.commit({at: Committed(11, "last") for at in taken}, membership)

    one.at_revoke = commit
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=4)

    assert len(one.revocations) == 1
    assert await kafka.committed(group, topic) == dict.fromkeys(range(4), 11)
    assert await two.transport.committed(partitions) == dict.fromkeys(partitions, Committed(11, "last"))


async def test_a_commit_of_an_old_membership_is_refused_before_it_is_sent(
    kafka: SharedKafka, topic: str, group: str, member: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.create_topic(topic, partitions=4)
    one, two = member(), member()
    (_, old) = await one.join(topic)
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=4)
    sent: list[Any] = []
    monkeypatch.setattr(one.transport._offsets, "commit", sent.append)
    mine, now = one.assignments[-1]
    theirs = two.assignments[-1].partitions

    with pytest.raises(CommitRefusedError, match=f"made for generation {old.generation}, and ours is {now.generation}"):
        await one.transport.commit({mine[0]: Committed(1, "")}, old)
    with pytest.raises(CommitRefusedError, match="not assigned to us"):
        await one.transport.commit({mine[0]: Committed(1, ""), theirs[0]: Committed(1, "")}, now)
    with pytest.raises(CommitRefusedError):
        await one.transport.commit({mine[0]: Committed(1, "")}, Membership("somebody", now.generation))
    with pytest.raises(CommitRefusedError):
        await one.transport.commit({mine[0]: Committed(1, "")}, NOT_A_MEMBER)

    assert not sent
    assert await kafka.committed(group, topic) == {}


async def test_between_two_generations_nothing_may_be_committed(
    kafka: SharedKafka, topic: str, group: str, member: Join
) -> None:
    """One has given its partitions back and waits for the other, who has not."""
    await kafka.create_topic(topic, partitions=4)
    one, two, three = member(), member(), member()
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=4)
    held = asyncio.Event()

    async def hold(_partitions: Collection[TopicPartition], _lost: bool) -> None:
        await held.wait()

    two.at_revoke = hold
    mine, membership = one.assignments[-1]
    await three.transport.start([topic], None, three)
    await one.poll_until(lambda: one.transport.membership() == NOT_A_MEMBER)

    assert len(one.revocations) == 2
    with pytest.raises(CommitRefusedError, match="not a member"):
        await one.transport.commit({mine[0]: Committed(1, "")}, membership)
    assert one.transport.position(mine[0]) is None

    held.set()
    await until_assigned(one, two, three, partitions=4)
    assert await kafka.committed(group, topic) == {}


async def test_a_dropped_member_learns_that_it_lost_its_partitions(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=2)
    one = member(rebalance_timeout=2, drain_timeout=0.5, commit_timeout=0.5, heartbeat_interval=0.2)
    before = await one.join(topic)
    time.sleep(4)  # noqa: ASYNC251 - a loop that is blocked for longer than a rebalance costs the membership
    await one.poll_until(lambda: len(one.assignments) == 2)

    assert one.revocations == [(before.partitions, True)]
    with pytest.raises(CommitRefusedError):
        await one.transport.commit({at: Committed(1, "") for at in before.partitions}, before.membership)
    assert one.assignments[-1].membership.member_id != before.membership.member_id


async def test_an_exception_in_the_listener_ends_the_client(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)

    def fail(_partitions: Collection[TopicPartition], _membership: Membership) -> None:
        raise ZeroDivisionError("an engine has no bugs")

    one = member()
    one.at_assign = fail
    await one.transport.start([topic], None, one)
    with pytest.raises(ClientLostError, match="an engine has no bugs"):
        await one.poll_until(lambda: False)

    other = member()

    async def fail_too(_partitions: Collection[TopicPartition], _lost: bool) -> None:
        raise ZeroDivisionError("an engine has no bugs")

    await one.transport.close()
    await other.join(topic)
    other.at_revoke = fail_too
    third = member()
    await third.transport.start([topic], None, third)
    with pytest.raises(ClientLostError, match="an engine has no bugs"):
        await other.poll_until(lambda: False)


@pytest.mark.parametrize("task", ["fetching", "leaders", "metadata", "assignments", "topics", "leadership"])
async def test_a_client_whose_background_task_ended_raises_at_once(
    kafka: SharedKafka, topic: str, member: Join, task: str
) -> None:
    await kafka.create_topic(topic)
    one = member()
    await one.join(topic)
    waiting = asyncio.create_task(one.poll(timeout=30))
    await asyncio.sleep(0)

    background_tasks(one.transport)[task].cancel()

    async with asyncio.timeout(15):
        with pytest.raises(ClientLostError, match=r"task for .* ended"):
            await waiting


async def test_topics_and_a_pattern_can_be_combined_and_match_new_topics(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    named, matching, later, other = topic, f"{topic}.a.x", f"{topic}.b.x", f"{topic}.c.x.y"
    for name in (named, matching, other):
        await kafka.create_topic(name)
    one = member()

    async def position_is_known(taken: Collection[TopicPartition], _lost: bool) -> None:
        membership = one.assignments[-1].membership
        await one.transport.commit({at: Committed(0, "") for at in taken}, membership)

    one.at_revoke = position_is_known
    await one.transport.start([named], rf"{topic}\.[a-z]\.x", one)
    await one.poll_until(lambda: any(len(assigned.partitions) == 2 for assigned in one.assignments))
    assert {at.topic for at in one.assignments[-1].partitions} == {named, matching}

    await kafka.create_topic(later)
    await one.poll_until(lambda: len(one.assignments[-1].partitions) == 3)

    assert {at.topic for at in one.assignments[-1].partitions} == {named, matching, later}
    assert not any(revoked.lost for revoked in one.revocations)


async def test_a_topic_that_does_not_exist_is_reported_and_found_when_it_appears(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    absent = f"{topic}-absent"
    await kafka.create_topic(topic)
    one = member()
    await one.join(topic, absent)
    await one.poll_until(lambda: absent in one.transport.missing_topics)

    assert [at.topic for at in one.assignments[-1].partitions] == [topic]

    await kafka.create_topic(absent)
    await one.poll_until(lambda: len(one.assignments[-1].partitions) == 2)
    assert one.transport.missing_topics == []


async def test_new_partitions_are_found(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    one = member()
    await one.join(topic)

    await kafka.add_partitions(topic, 3)

    await one.poll_until(lambda: len(one.assignments[-1].partitions) == 3)


async def test_partitions_and_log_ranges_are_queried(kafka: SharedKafka, topic: str, member: Join) -> None:
    other = f"{topic}-other"
    await kafka.create_topic(topic, partitions=2)
    await kafka.create_topic(other, partitions=5)
    await kafka.produce(topic, [(None, b"v")] * 9, partition=0)
    await kafka.delete_records(topic, {0: 4})
    one = member()
    (partitions, _) = await one.join(topic)

    assert (await one.transport.partitions(topic)).keys() == {0, 1}
    assert (await one.transport.partitions(other)).keys() == {0, 1, 2, 3, 4}
    assert await one.transport.partitions(f"{topic}-absent") == {}
    assert await one.transport.log_ranges(partitions) == {
        partitions[0]: LogRange(4, 9, 9),
        partitions[1]: LogRange(0, 0, 0),
    }
    assert one.transport._subscription.known == {topic}, "asking is not subscribing"


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "sticky"])
async def test_every_assignor_spreads_the_partitions(
    kafka: SharedKafka, topic: str, member: Join, assignor: str
) -> None:
    await kafka.create_topic(topic, partitions=6)
    one, two, three = (member(assignor=assignor) for _ in range(3))
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=6)
    before = {number: set(m.assignments[-1].partitions) for number, m in enumerate((one, two))}
    await three.transport.start([topic], None, three)
    await until_assigned(one, two, three, partitions=6)

    now = {number: set(m.assignments[-1].partitions) for number, m in enumerate((one, two))}
    assert [len(m.assignments[-1].partitions) for m in (one, two, three)] == [2, 2, 2]
    if assignor == "sticky":
        assert all(now[number] < before[number] for number in now), "nobody gets what another one had"


async def test_a_static_member_rejoins_without_a_rebalance(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=4)
    one, two = member(group_instance_id="one"), member(group_instance_id="two")
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=4)
    had = one.assignments[-1].partitions

    await one.transport.close()
    again = member(group_instance_id="one")
    assigned = await again.join(topic)

    assert assigned.partitions == had
    assert two.revocations == []


async def test_closing_leaves_the_group_at_once(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=4)
    one, two = member(session_timeout=30), member(session_timeout=30)
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=4)

    async with asyncio.timeout(15):
        await one.transport.close()
        await two.poll_until(lambda: len(two.assignments[-1].partitions) == 4)

    with pytest.raises(ClientLostError, match="closed"):
        await one.poll()
    with pytest.raises(StateError):
        await one.transport.start([topic], None, one)


async def test_closing_during_a_rebalance_waits_for_no_member(
    kafka: SharedKafka, topic: str, group: str, members: list[Member]
) -> None:
    """The third joins and is closed while the second still drains: its partitions must not wait for its session."""
    await kafka.create_topic(topic, partitions=4)
    one, two, three = (Member(settings_for(kafka.bootstrap, session_timeout=30), group) for _ in range(3))
    members.extend((one, two, three))
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until_assigned(one, two, partitions=4)
    draining, held = asyncio.Event(), asyncio.Event()

    async def hold(_partitions: Collection[TopicPartition], _lost: bool) -> None:
        draining.set()
        await held.wait()

    two.at_revoke = hold
    await three.transport.start([topic], None, three)
    async with asyncio.timeout(PATIENCE):
        await draining.wait()
        await one.poll_until(lambda: len(one.revocations) == 2)

    started = time.monotonic()
    await one.transport.close()
    await three.transport.close()
    assert time.monotonic() - started < 8, "both were in a join that could not end"

    held.set()
    async with asyncio.timeout(20):
        await two.poll_until(lambda: len(two.assignments[-1].partitions) == 4)


async def test_closing_waits_for_a_drain_and_its_commit(
    kafka: SharedKafka, topic: str, group: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=2)
    one, two = member(), member()
    (_, membership) = await one.join(topic)
    draining, held = asyncio.Event(), asyncio.Event()

    async def drain(taken: Collection[TopicPartition], _lost: bool) -> None:
        draining.set()
        await held.wait()
        await one.transport.commit({at: Committed(3, "") for at in taken}, membership)

    one.at_revoke = drain
    await two.transport.start([topic], None, two)
    await draining.wait()
    closing = asyncio.create_task(one.transport.close())
    await asyncio.sleep(0)
    assert not closing.done()
    held.set()
    await closing
    assert await kafka.committed(group, topic) == {0: 3, 1: 3}
