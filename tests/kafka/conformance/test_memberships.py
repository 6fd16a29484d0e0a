"""Commits and partitions of a member whose group does something else at the same time.

A proxy decides what comes first. The tests know a client only as `aioshard.ports.Transport`.
"""

import asyncio
from collections.abc import Collection

import pytest

from aioshard.errors import CommitError, CommitRefusedError
from aioshard.ports import NOT_A_MEMBER, NOTHING, Committed
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE
from tests.kafka.conformance.conftest import (
    AIOKAFKA,
    BY_THE_BROKER,
    CONFLUENT,
    EAGER,
    KIP_848,
    KIP_848_CONFLUENT,
    KIP_848_TRANSACTIONS,
    SHORT_SESSION,
    TRANSACTIONS,
    Client,
    Join,
    on_clients,
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


@on_clients(AIOKAFKA, KIP_848, in_chaos=[EAGER, CONFLUENT, KIP_848_CONFLUENT])
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


@on_clients(CONFLUENT, KIP_848, in_chaos=[KIP_848_CONFLUENT])
async def test_a_commit_behind_the_next_assignment_is_answered_before_partitions_are_released(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies, client: Client
) -> None:
    """The client learns what it must release before it hears of the commit (I9)."""
    await kafka.create_topic(topic, 2)
    one, two = join("one"), join("two")
    partitions, membership = await one.join(topic)
    offsets = dict.fromkeys(partitions, Committed(5, ""))
    assigning = proxies.hold(
        api_key=CONSUMER_GROUP_HEARTBEAT if client in BY_THE_BROKER else SYNC_GROUP, client_id="one"
    )
    joined = asyncio.Event()

    def note(_: Request, answer: bytes) -> bytes:
        joined.set()
        return answer

    proxies.answer(note, api_key=CONSUMER_GROUP_HEARTBEAT, client_id="two")
    await two.transport.start([topic], None, two)
    await assigning.met.wait()
    if client in BY_THE_BROKER:
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


@on_clients(AIOKAFKA, CONFLUENT, KIP_848, in_chaos=[EAGER, KIP_848_CONFLUENT])
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


@on_clients(AIOKAFKA, KIP_848, in_chaos=[CONFLUENT, KIP_848_CONFLUENT])
async def test_a_member_gives_up_its_partitions_after_a_session_without_answers(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies, client: object
) -> None:
    """Other members may have them by then (I9)."""
    await kafka.create_topic(topic)
    one = join("one", **({} if client in BY_THE_BROKER else SHORT_SESSION))
    partitions, membership = await one.join(topic)
    for api in GROUP_APIS:
        proxies.swallow(api_key=api, client_id="one")

    committing = asyncio.create_task(
        one.transport.commit(dict.fromkeys(partitions, Committed(5, "")), membership), name="commit"
    )

    await one.until_it_gives_up()
    committing.cancel()
    await asyncio.wait([committing])


@on_clients(AIOKAFKA, CONFLUENT, KIP_848_CONFLUENT)
async def test_a_member_gives_up_its_partitions_when_a_commit_finds_it_unknown(
    kafka: SharedKafka, topic: str, join: Join, proxies: Proxies
) -> None:
    """A client may never hear of it otherwise: heartbeats of librdkafka end with a coordinator that is away (I9)."""
    await kafka.create_topic(topic)
    one = join("one")
    partitions, membership = await one.join(topic)
    unknown = proxies.answer(_does_not_know_the_member, api_key=OFFSET_COMMIT, client_id="one")

    with pytest.raises(CommitRefusedError):
        await one.transport.commit(dict.fromkeys(partitions, Committed(5, "")), membership)
    unknown.lift()

    await one.until_it_gives_up()


@on_clients(KIP_848)
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


@on_clients(AIOKAFKA, CONFLUENT, KIP_848, TRANSACTIONS, in_chaos=[KIP_848_CONFLUENT, KIP_848_TRANSACTIONS])
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


@on_clients(AIOKAFKA)  # librdkafka's joins hold up its commits
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


@on_clients(AIOKAFKA, TRANSACTIONS, in_chaos=[EAGER])
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
