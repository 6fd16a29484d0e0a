"""Commits and partitions of a member whose group does something else at the same time.

A proxy decides what comes first. The tests know a client only as `aioshard.ports.Transport`.
"""

import asyncio
from collections.abc import Callable, Collection

import pytest

from aioshard.errors import CommitError, CommitRefusedError
from aioshard.ports import NOT_A_MEMBER, NOTHING, Allowance, Committed
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE
from tests.kafka.conformance.conftest import (
    CLASSIC,
    CONSUMER,
    CONSUMER_TRANSACTIONS,
    EAGER,
    SHORT_SESSION,
    TRANSACTIONS,
    Join,
    Protocol,
    Racer,
    on,
)
from tests.support.brokers import SharedKafka
from tests.support.proxies import (
    CONSUMER_GROUP_HEARTBEAT,
    GROUP_APIS,
    HEARTBEAT,
    JOIN_GROUP,
    OFFSET_COMMIT,
    SYNC_GROUP,
    Proxies,
    Request,
)

UNKNOWN_MEMBER_ID = 25
STALE_MEMBER_EPOCH = 113
FLEXIBLE_COMMITS = 8
"""Version from which on an answer to a commit ends with three empty lists of tags."""


@on(CLASSIC, CONSUMER, in_chaos=[EAGER])
async def test_a_commit_that_is_unanswered_at_a_revocation_is_answered_before_it_ends(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """Else it could be stored after the next owner of the partition has committed (I9)."""
    await kafka.create_topic(topic, 2)
    one, two = join("one"), join("two")
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    lost = proxies.cut(api_key=OFFSET_COMMIT, client_id="one")
    committing = asyncio.create_task(one.transport.commit(offsets, membership))
    await lost.met.wait()

    async def drain(_: Collection[TopicPartition], __: bool) -> None:
        lost.lift()
        async with asyncio.timeout(PATIENCE):
            try:
                await committing
            except CommitError:  # it says that the offsets may not be stored
                await one.transport.commit(offsets, one.transport.membership())

    one.at_revoke = drain
    await two.transport.start([topic], None, two)
    await two.poll_until(lambda: len(two.holds) == 1)

    assert await two.stored(partitions) == offsets


@on(CONSUMER)
async def test_a_commit_behind_the_next_assignment_is_answered_before_partitions_are_released(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """The client learns what it must release before it hears of the commit (I9)."""
    await kafka.create_topic(topic, 2)
    one, two = join("one"), join("two")
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    assigning = proxies.hold(api_key=CONSUMER_GROUP_HEARTBEAT, client_id="one")
    joined = asyncio.Event()

    def note(_: Request, answer: bytes) -> bytes:
        joined.set()
        return answer

    proxies.answer(note, api_key=CONSUMER_GROUP_HEARTBEAT, client_id="two")
    await two.transport.start([topic], None, two)
    await assigning.met.wait()
    await joined.wait()  # the answer to the request that is held takes a partition away
    committing = asyncio.create_task(one.transport.commit(offsets, membership), name="commit")

    async def drain(_: Collection[TopicPartition], __: bool) -> None:
        async with asyncio.timeout(PATIENCE):
            await committing

    one.at_revoke = drain
    await one.poll(lambda _: NOTHING, 0.2)  # the commit follows that request
    assigning.lift()
    await two.poll_until(lambda: len(two.holds) == 1)

    assert await two.stored(partitions) == offsets


@on(CLASSIC, CONSUMER, in_chaos=[EAGER])
async def test_closing_while_the_engine_drains_waits_for_its_commit(kafka: SharedKafka, topic: str, join: Join) -> None:
    await kafka.create_topic(topic, 2)
    one, two = join("one"), join("two")
    await one.join(topic)
    draining, go_on = asyncio.Event(), asyncio.Event()

    async def drain(partitions: Collection[TopicPartition], _: bool) -> None:
        draining.set()
        await go_on.wait()
        await one.transport.commit(dict.fromkeys(partitions, Committed(5, "")), one.transport.membership())

    one.at_revoke = drain
    await two.transport.start([topic], None, two)
    await asyncio.wait_for(draining.wait(), PATIENCE)
    closing = asyncio.create_task(one.transport.close(), name="close")
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(closing, PATIENCE)

    assert one.transport.membership() == NOT_A_MEMBER
    moved = one.revocations[0].partitions
    assert await two.stored(moved) == dict.fromkeys(moved, Committed(5, ""))
    await two.poll_until(lambda: len(two.holds) == 2)


@on(CLASSIC, CONSUMER)
async def test_a_member_gives_up_its_partitions_after_a_session_without_answers(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies, protocol: Protocol
) -> None:
    """Other members may have them by then (I9)."""
    await kafka.create_topic(topic)
    one = join("one", **({} if protocol == CONSUMER else SHORT_SESSION))
    partitions, membership = await one.join(topic)
    for api in GROUP_APIS:
        proxies.swallow(api_key=api, client_id="one")

    committing = asyncio.create_task(
        one.transport.commit(dict.fromkeys(partitions, Committed(5, "")), membership), name="commit"
    )

    await one.until_it_gives_up()
    committing.cancel()
    await asyncio.wait([committing])


@on(CLASSIC)
async def test_a_member_gives_up_its_partitions_when_a_commit_finds_it_unknown(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """It hears of it before its next heartbeat; with `consumer`, that heartbeat decides (I9)."""
    await kafka.create_topic(topic)
    one = join("one")
    partitions, membership = await one.join(topic)
    unknown = proxies.answer(_does_not_know_the_member, api_key=OFFSET_COMMIT, client_id="one")

    with pytest.raises(CommitRefusedError):
        await one.transport.commit(dict.fromkeys(partitions, Committed(5, "")), membership)
    unknown.lift()

    await one.until_it_gives_up()


@on(CONSUMER)
async def test_a_commit_that_a_newer_epoch_overtakes_may_be_sent_again(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """The partitions are still ours: the last commit of a drain must not give up (I7)."""
    await kafka.create_topic(topic)
    one = join("one")
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    overtaken = proxies.answer(_has_a_newer_epoch, api_key=OFFSET_COMMIT, client_id="one")

    with pytest.raises(CommitError) as failed:
        await one.transport.commit(offsets, membership)
    overtaken.lift()
    assert not isinstance(failed.value, CommitRefusedError)

    heartbeat = proxies.hold(api_key=CONSUMER_GROUP_HEARTBEAT, client_id="one")
    await heartbeat.met.wait()
    heartbeat.lift()
    assert one.transport.membership() == membership
    await one.transport.commit(offsets, membership)
    assert await one.stored(partitions) == offsets
    assert not one.revocations


def _has_a_newer_epoch(request: Request, answer: bytes) -> bytes:
    return _refused(request, answer, STALE_MEMBER_EPOCH)


def _does_not_know_the_member(request: Request, answer: bytes) -> bytes:
    return _refused(request, answer, UNKNOWN_MEMBER_ID)


def _refused(request: Request, answer: bytes, code: int) -> bytes:
    """Refuse a commit of one partition."""
    tags = b"\0\0\0" if request.api_version >= FLEXIBLE_COMMITS else b""
    return answer[: -2 - len(tags)] + code.to_bytes(2, "big") + tags


@on(CLASSIC, CONSUMER, TRANSACTIONS, in_chaos=[CONSUMER_TRANSACTIONS])
async def test_a_commit_of_a_moved_partition_is_refused(kafka: SharedKafka, topic: str, join: Join) -> None:
    await kafka.create_topic(topic, 2)
    one, two = join("one"), join("two")
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await two.poll_until(lambda: len(one.holds) == len(two.holds) == 1)
    (kept,), (moved,) = one.holds, two.holds

    with pytest.raises(CommitRefusedError):
        await one.transport.commit({moved: Committed(5, ""), kept: Committed(5, "")}, one.transport.membership())

    assert await two.stored([moved, kept]) == {moved: None, kept: None}


@on(CLASSIC)
@pytest.mark.parametrize("fetch_max_wait", [0.1, 5.0])
async def test_a_member_that_keeps_its_partitions_commits_while_the_group_waits_for_a_dead_one(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies, fetch_max_wait: float
) -> None:
    """Else it could not stop cleanly for the rest of the dead member's session (I12)."""
    await kafka.create_topic(topic, 2)
    long = {"session_timeout": 30, "rebalance_timeout": 60, "fetch_max_wait": fetch_max_wait}
    one, dead, new = join("one", **long), join("dead", **long), join("new", **long)
    await one.join(topic)
    await dead.transport.start([topic], None, dead)
    await asyncio.gather(*(racer.poll_until(lambda: len(one.holds) == len(dead.holds) == 1) for racer in (one, dead)))
    proxies.swallow(api_key=HEARTBEAT, client_id="dead")
    rejoining = proxies.hold(api_key=JOIN_GROUP, client_id="one")
    await new.transport.start([topic], None, new)
    await rejoining.met.wait()
    rejoining.lift()
    offsets = dict.fromkeys(one.holds, Committed(5, ""))

    async with asyncio.timeout(10):
        for _ in range(2):  # the first one may still be in front of the join
            await one.transport.commit(offsets, one.transport.membership())
        assert await one.stored(list(offsets)) == offsets
    assert not new.assignments, "the group did not wait: this shows nothing"


@on(CLASSIC, TRANSACTIONS, in_chaos=[EAGER])
async def test_a_commit_is_refused_while_the_group_forms_its_next_generation(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """Brokers know the new generation, and not that the offsets were found in the old one (I9)."""
    await kafka.create_topic(topic, 2)
    one, two = join("one"), join("two")
    partitions, membership = await one.join(topic)
    assigning = proxies.hold(api_key=SYNC_GROUP, client_id="one")
    await two.transport.start([topic], None, two)
    await assigning.met.wait()

    with pytest.raises(CommitError):
        await one.transport.commit(dict.fromkeys(partitions, Committed(5, "")), membership)
    assigning.lift()
    await two.poll_until(lambda: len(two.holds) == 1)

    assert await two.stored(partitions) == dict.fromkeys(partitions)


RECORDS = 400


async def fill(kafka: SharedKafka, topic: str, partitions: int) -> None:
    await kafka.create_topic(topic, partitions)
    for partition in range(partitions):
        await kafka.produce(topic, [(None, b"%d" % number) for number in range(RECORDS)], partition=partition)


def one_by_one(_: TopicPartition) -> Allowance:
    return Allowance(1, 1 << 20)


async def until(condition: Callable[[], bool], *racers: Racer) -> None:
    """Poll members, one record of each partition at a time, until a condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.gather(*(racer.poll(one_by_one) for racer in racers))


@on(CLASSIC, CONSUMER)
async def test_kept_partitions_return_records_while_the_others_drain(
    kafka: SharedKafka, topic: str, join: Join
) -> None:
    await fill(kafka, topic, 4)
    one, two = join("one"), join("two")
    await one.join(topic)
    await until(lambda: all(len(one.offsets(at)) >= 5 for at in one.holds), one)
    draining, go_on = asyncio.Event(), asyncio.Event()

    async def drain(partitions: Collection[TopicPartition], _: bool) -> None:
        draining.set()
        await go_on.wait()
        offsets = {at: Committed(one.next_offsets[at], "drained") for at in partitions}
        # Asked for by another task, as by the engine's committer.
        await asyncio.create_task(one.transport.commit(offsets, one.transport.membership()), name="commit")

    one.at_revoke = drain
    await two.transport.start([topic], None, two)
    await one.poll_until(draining.is_set, lambda _: NOTHING)
    moving = set(one.revocations[0].partitions)
    before = {at: len(one.records[at]) for at in one.records}
    kept = set(before) - moving

    await until(lambda: all(len(one.records[at]) > before[at] + 20 for at in kept), one)
    handed_out = {at: len(one.records[at]) for at in moving}
    go_on.set()
    await until(lambda: two.holds == moving, one, two)

    assert len(moving) == len(kept) == 2
    assert handed_out == {at: before[at] for at in moving}, "what drains is not handed out"
    assert await two.stored(moving) == {at: Committed(one.next_offsets[at], "drained") for at in moving}
    await until(lambda: all(len(one.records[at]) == RECORDS for at in kept), one)
    assert all(one.offsets(at) == list(range(RECORDS)) for at in kept), "each record came once"


@on(CLASSIC, CONSUMER)
async def test_partitions_of_a_leaving_member_are_added(kafka: SharedKafka, topic: str, join: Join) -> None:
    await fill(kafka, topic, 4)
    one, two = join("one"), join("two")
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until(lambda: len(one.holds) == len(two.holds) == 2, one, two)
    revocations = len(one.revocations)

    await two.transport.close()
    await until(lambda: len(one.holds) == 4, one)

    assert one.revocations[revocations:] == [], "nothing was taken from the member that stayed"
    await until(lambda: all(one.next_offsets[at] == RECORDS for at in one.holds), one)
