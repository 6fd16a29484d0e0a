"""The client got a new member id: the group does not wait for the stale member."""

import asyncio
from typing import cast

from aioshard.kafka.confluent.transport import ConfluentTransport
from aioshard.ports import NOT_A_MEMBER
from tests.kafka.client.members import Member, settings_for, vanish
from tests.support.brokers import SharedKafka

SESSION = 30.0
"""Seconds for which the brokers wait for a member that is gone: longer than the test may take."""


async def test_the_group_does_not_wait_for_the_session_of_a_stale_member(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, 1)
    same = {"session_timeout": SESSION, "rebalance_timeout": SESSION}
    settings = settings_for(kafka.bootstrap, **same)
    was = Member(settings.model_copy(update={"assignor": "cooperative-sticky"}), group)  # that of librdkafka
    before = (await was.join(topic)).membership
    await vanish(was.transport)

    one = Member(settings_for(kafka.bootstrap, client="confluent", **same), group)
    transport = cast("ConfluentTransport", one.transport)
    transport._member_id = before.member_id
    transport._note_member(NOT_A_MEMBER)
    try:
        async with asyncio.timeout(SESSION / 2):
            assert len((await one.join(topic)).partitions) == 1
    finally:
        await transport.close()
