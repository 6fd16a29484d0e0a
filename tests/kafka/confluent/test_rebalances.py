"""Incremental rebalances: kept partitions continue, moved ones are drained and committed."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import ClientLostError, TransportError
from aioshard.ports import NOTHING, Allowance, Committed
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, Member
from tests.kafka.confluent.conftest import BY_THE_BROKER, COOPERATIVE
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]

RECORDS = 400


COOPERATIVE_QUICKLY = pytest.mark.parametrize(
    "protocol",
    [
        pytest.param(COOPERATIVE, id="cooperative"),
        pytest.param(BY_THE_BROKER, id="KIP-848", marks=pytest.mark.chaos),
    ],
    indirect=True,
)
"""Both protocols; only the first one is in the plain run."""


def one_by_one(_: TopicPartition) -> Allowance:
    return Allowance(1, 1 << 20)


def nothing(_: TopicPartition) -> Allowance:
    return NOTHING


async def fill(kafka: SharedKafka, topic: str, partitions: int) -> None:
    await kafka.create_topic(topic, partitions)
    for partition in range(partitions):
        await kafka.produce(topic, [(None, b"%d" % number) for number in range(RECORDS)], partition=partition)


async def until(condition: Callable[[], bool], *members: Member) -> None:
    """Poll members, one record of each partition at a time, until a condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.gather(*(member.poll(one_by_one) for member in members))


def held(member: Member) -> set[TopicPartition]:
    return set(member.assignments[-1].partitions) if member.assignments else set()


async def test_kept_partitions_return_records_while_the_others_drain(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await fill(kafka, topic, 4)
    one, two = member(), member()
    keep_kept(one)
    await one.join(topic)

    def five(at: TopicPartition) -> Allowance:
        return Allowance(1, 1 << 20) if len(one.offsets(at)) < 5 else NOTHING

    await one.poll_until(lambda: all(len(one.offsets(at)) == 5 for at in held(one)), five)
    draining, go_on = asyncio.Event(), asyncio.Event()
    accepted: list[TopicPartition] = []

    async def drain(partitions: Collection[TopicPartition], lost: bool) -> None:
        assert not lost
        draining.set()
        await go_on.wait()
        # Asked for by another task, as the engine's commit coordinator is.
        offsets = {at: Committed(one.next_offsets[at], "drained") for at in partitions}
        await asyncio.create_task(one.transport.commit(offsets, one.transport.membership()))
        accepted.extend(partitions)

    one.at_revoke = drain
    await two.transport.start([topic], None, two)
    async with asyncio.timeout(PATIENCE):
        while not draining.is_set():
            await one.poll(nothing)
    moving = set(one.revocations[0].partitions)
    before = {at: len(one.records[at]) for at in one.records}
    kept = set(before) - moving

    await until(lambda: all(len(one.records[at]) > before[at] + 20 for at in kept), one)
    taken = {at: len(one.records[at]) for at in moving}
    go_on.set()
    await until(lambda: held(two) == moving, one, two)

    assert len(moving) == len(kept) == 2
    assert taken == {at: before[at] for at in moving}, "what drains is not handed out"
    assert set(accepted) == moving
    committed = await two.transport.committed(list(moving))
    assert committed == {at: Committed(one.next_offsets[at], "drained") for at in moving}
    await until(lambda: all(len(one.records[at]) == RECORDS for at in kept), one)
    for at in kept:
        assert one.offsets(at) == list(range(RECORDS)), "no kept record came twice or not at all"


def keep_kept(one: Member) -> None:
    """Open what is new, and leave alone what was kept, as the engine does."""
    opened: set[TopicPartition] = set()

    def open_new(partitions: Collection[TopicPartition], _: object) -> None:
        opened.intersection_update(partitions)
        for at in set(partitions) - opened:
            one.transport.seek(at, one.next_offsets.setdefault(at, 0))
        one.transport.resume(set(partitions) - opened)
        opened.update(partitions)

    one.at_assign = open_new


@COOPERATIVE_QUICKLY
async def test_partitions_of_a_leaving_member_are_added(kafka: SharedKafka, topic: str, member: Join) -> None:
    await fill(kafka, topic, 4)
    one, two = member(), member()
    keep_kept(one)
    keep_kept(two)
    await one.join(topic)
    await two.transport.start([topic], None, two)
    await until(lambda: len(held(one)) == len(held(two)) == 2, one, two)
    revocations = len(one.revocations)

    await two.transport.close()
    await until(lambda: len(held(one)) == 4, one)

    assert one.revocations[revocations:] == [], "nothing was taken from who stayed"
    await until(lambda: all(len(one.offsets(at)) == RECORDS for at in held(one)), one)


@COOPERATIVE_QUICKLY
async def test_a_duplicate_instance_id_is_reported(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, 2)
    first, second = member(group_instance_id="one"), member(group_instance_id="one")
    await first.join(topic)

    await second.transport.start([topic], None, second)

    async def read(one: Member) -> None:
        while True:
            await one.poll()

    reading = [asyncio.create_task(read(consumer), name="reads") for consumer in (first, second)]
    (ended, *_), others = await asyncio.wait(reading, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

    with pytest.raises(TransportError, match="group_instance_id='one'") as refused:
        ended.result()
    assert not refused.value.retriable


async def test_a_subscription_that_cannot_change_ends_the_client(
    kafka: SharedKafka, topic: str, member: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.create_topic(f"{topic}.a")
    one = member()
    await one.transport.start([], rf"{topic}\.[a-z]", one)
    await one.poll_until(lambda: bool(one.assignments and one.assignments[-1].partitions))

    def refused(*_: Any, **__: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG))

    client: Any = one.transport
    monkeypatch.setattr(client._consumer, "subscribe", refused)
    await kafka.create_topic(f"{topic}.b")

    with pytest.raises(ClientLostError, match="Invalid argument"):
        await one.poll_until(lambda: False)
