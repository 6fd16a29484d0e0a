"""What the transport relies on in confluent-kafka beyond its documentation: each fails when the client changes."""

import asyncio
import inspect
import struct

import pytest
from confluent_kafka import Consumer
from confluent_kafka.aio import AIOConsumer

from aioshard.kafka.confluent.member import Member, membership_of
from aioshard.ports import Membership
from tests.kafka_client.members import settings_for
from tests.support.shared_kafka import SharedKafka


async def test_calls_go_through_one_place_and_to_one_consumer() -> None:
    consumer = AIOConsumer({"group.id": "g", "bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    try:
        assert isinstance(consumer._consumer, Consumer)
        assert list(inspect.signature(consumer._call).parameters) == ["blocking_task", "args", "kwargs"]
        assert await consumer._call(lambda *found: found, 1, 2) == (1, 2)
        assert consumer._closed is False
    finally:
        await consumer.close()
    assert consumer._closed is True


def test_a_generation_and_a_member_id_are_read_as_the_client_writes_them() -> None:
    raw = b"CGMDv2:" + struct.pack("=i", 7) + b"billing\0member-1\0\1"

    assert membership_of(raw) == Membership("member-1", 7)


@pytest.mark.parametrize("raw", [b"", b"CGMD", b"CGMDv3:" + bytes(20), None])
def test_metadata_of_another_version_are_no_membership(raw: object) -> None:
    assert membership_of(raw) == Membership("", -1)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_the_metadata_of_a_member_hold_its_id_and_its_generation(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    await kafka.create_topic(topic, 1)
    member = Member(
        {
            "bootstrap.servers": settings_for(kafka.bootstrap).bootstrap_servers,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "error",
        }
    )
    given = asyncio.Event()

    async def adopt(_: object) -> None:
        given.set()

    async def ignore(_: object) -> None:
        """Nothing is to be done."""

    try:
        await member.join([topic], adopt, ignore, ignore)
        async with asyncio.timeout(30):
            while not given.is_set():
                await member.turn([], 1, 0.05)
        found = membership_of(await member.consumer_group_metadata())
        assert found.member_id == await member._call(member._consumer.memberid)
        assert found.generation >= 1
    finally:
        await member.leave()
        member.abandon()
