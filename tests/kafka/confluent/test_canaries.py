"""Undocumented confluent-kafka behavior that the transport relies on."""

import asyncio
import struct
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientPartition

from aioshard.kafka.confluent.consumer import Callbacks, ConsumerThread, membership_of
from aioshard.kafka.confluent.headers import HeadersOf, headers_of
from aioshard.kafka.confluent.options import connection_options
from aioshard.kafka.confluent.transactions import Transactions
from aioshard.ports import Committed, Membership, Message
from aioshard.records import TopicPartition
from tests.kafka.client.members import settings_for
from tests.support.brokers import SharedKafka
from tests.support.misnamed import produce


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


async def test_the_log_of_a_client_shows_that_all_requests_of_a_transaction_were_answered(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """Otherwise each transaction would need a new client, which takes half a second."""
    await kafka.create_topic(topic, 4)
    member = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    transactions = Transactions(connection_options(settings_for(kafka.bootstrap)), group, group, 30.0)
    clients = []
    try:
        for number in range(3):
            await transactions.commit(
                [Message(topic, b"%d" % number)] * 4,
                {TopicPartition(topic, 0): Committed(number, "")},
                member.consumer_group_metadata(),
            )
            clients.append(transactions._producer._producer)
        assert clients[0] is not None
        assert clients == [clients[0]] * 3
    finally:
        clients.clear()
        await transactions.close()
        member.close()


async def test_header_names_that_are_not_utf_8_leave_holes_that_can_be_filled(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """The binding raises only once per message, and reveals only the first name; reading a hole crashes the process."""
    await kafka.create_topic(topic, 1)
    headers = [(b"a", b"1"), (b"\xff\xfe", b"2"), (b"b", None), (b"c\xff", None)]
    await produce(kafka.bootstrap, TopicPartition(topic, 0), [(b"misnamed", headers), (b"plain", [(b"a", b"1")])])
    options = {"bootstrap.servers": kafka.bootstrap, "group.id": group}

    def read() -> HeadersOf:
        consumer = Consumer(options)
        try:
            consumer.assign([ClientPartition(topic, 0, 0)])
            messages: list[Any] = []
            while len(messages) < 2:
                messages += consumer.consume(10, 0.5)
            return headers_of(messages)
        finally:
            consumer.close()

    found = await asyncio.wait_for(asyncio.to_thread(read), 30)

    assert found.misnamed
    assert found.headers == [
        [("a", b"1"), ("\udcff\udcfe", b"2"), ("b", None), ("\ufffd", None)],
        [("a", b"1")],
    ]
