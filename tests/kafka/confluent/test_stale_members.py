"""The client got a new member id: the group does not wait for the stale member."""

import asyncio
from typing import Any, cast

import pytest

from aioshard.core.assignment import ASSIGNORS
from aioshard.errors import AuthorizationError, TransportError
from aioshard.kafka.confluent.transport import ConfluentTransport
from aioshard.ports import NOT_A_MEMBER, Membership
from tests.kafka.client.members import Member, settings_for
from tests.support.shared_kafka import SharedKafka

SESSION = 30.0
"""Seconds for which the brokers wait for a member that is gone: longer than the test may take."""


class Brokers:
    """Notes who was removed, once it has raised its errors."""

    def __init__(self, *errors: TransportError) -> None:
        self.errors = list(errors)
        self.removed: list[str] = []

    async def remove_member(self, member_id: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.removed.append(member_id)


async def transport_that_was(member_id: str, **settings: Any) -> ConfluentTransport:
    transport = ConfluentTransport(settings_for("127.0.0.1:9", client="confluent", **settings), "billing")
    transport._member_id = member_id
    return transport


async def removed(transport: ConfluentTransport, brokers: Brokers) -> list[str]:
    transport._remove_member = brokers.remove_member  # type: ignore[method-assign]
    await transport._remove_stale_members()
    return brokers.removed


async def test_a_stale_member_is_removed_once() -> None:
    transport, brokers = await transport_that_was("was"), Brokers()

    transport._note_member(Membership("is", 2))
    transport._note_member(Membership("is", 2))

    assert await removed(transport, brokers) == ["was"]
    assert await removed(transport, brokers) == ["was"]


@pytest.mark.parametrize(
    ("before", "now", "settings"),
    [
        pytest.param("was", Membership("was", -1), {}, id="the same member"),
        pytest.param("", Membership("is", 1), {}, id="never a member"),
        pytest.param("was", Membership("is", 2), {"group_instance_id": "first"}, id="a static member"),
    ],
)
async def test_nobody_else_is_removed(before: str, now: Membership, settings: dict[str, Any]) -> None:
    transport, brokers = await transport_that_was(before, **settings), Brokers()

    transport._note_member(now)

    assert await removed(transport, brokers) == []


async def test_a_removal_that_failed_is_tried_again() -> None:
    transport, brokers = await transport_that_was("was"), Brokers(TransportError("nobody there"))
    transport._note_member(NOT_A_MEMBER)

    with pytest.raises(TransportError, match="nobody there"):
        await removed(transport, brokers)

    assert await removed(transport, brokers) == ["was"]


async def test_a_removal_that_was_refused_is_not_tried_again() -> None:
    transport, brokers = await transport_that_was("was"), Brokers(AuthorizationError("grant READ"))
    transport._note_member(NOT_A_MEMBER)

    assert await removed(transport, brokers) == []
    assert await removed(transport, brokers) == []


async def test_the_group_does_not_wait_for_a_session_of_who_was_before(
    kafka: SharedKafka, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.create_topic(topic, 1)
    same = {"session_timeout": SESSION, "rebalance_timeout": SESSION}
    monkeypatch.setitem(ASSIGNORS, "cooperative-sticky", ASSIGNORS["range"])  # both must name the same assignor
    was = Member(settings_for(kafka.bootstrap, **same), group)
    was.transport._options["partition_assignment_strategy"][0].name = "cooperative-sticky"
    (before,) = [(await was.join(topic)).membership]
    assert was.transport._internals is not None
    await was.transport._internals.tear_down()  # without a word to the group

    one = Member(settings_for(kafka.bootstrap, client="confluent", **same), group)
    transport = cast("ConfluentTransport", one.transport)
    transport._member_id = before.member_id
    transport._note_member(NOT_A_MEMBER)
    try:
        async with asyncio.timeout(SESSION / 2):
            assert len((await one.join(topic)).partitions) == 1
    finally:
        await transport.close()
