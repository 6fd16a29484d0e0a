"""Undocumented confluent-kafka behavior that the transport relies on."""

import asyncio
import struct
from typing import Any

import pytest

from aioshard.kafka.confluent.consumer import Callbacks, ConsumerThread, membership_of
from aioshard.ports import Membership
from tests.kafka.client.members import settings_for
from tests.support.shared_kafka import SharedKafka


def test_generation_and_member_id_are_read_as_the_client_writes_them() -> None:
    raw = b"CGMDv2:" + struct.pack("=i", 7) + b"billing\0member-1\0\1"

    assert membership_of(raw) == Membership("member-1", 7)


@pytest.mark.parametrize("raw", [b"", b"CGMD", b"CGMDv3:" + bytes(20), None])
def test_metadata_of_another_version_is_not_a_membership(raw: object) -> None:
    assert membership_of(raw) == Membership("", -1)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_the_metadata_of_a_member_has_its_id_and_generation(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    await kafka.create_topic(topic, 1)
    found: list[Membership] = []

    async def assigned(_: object, membership: Membership) -> None:
        found.append(membership)

    ignore: Any = None
    read = ConsumerThread(
        {
            "bootstrap.servers": settings_for(kafka.bootstrap).bootstrap_servers,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "error",
        }
        | ({} if protocol == "consumer" else {"partition.assignment.strategy": "cooperative-sticky"}),
        group,
        30.0,
        Callbacks(ignore, assigned, ignore, ignore),
    )
    try:
        await read.call(read.subscribe, [topic])
        async with asyncio.timeout(30):
            while not found:
                await read.call(read.read, [])
        member_id = await read.call(read._consumer.memberid)
        assert found == [Membership(str(member_id), found[0].generation)]
        assert found[0].generation >= 1
    finally:
        await asyncio.wrap_future(read.stop())
