"""Who the client was before it lost its membership: the group does not wait for that one."""

import asyncio
from typing import Any, cast

import pytest
from confluent_kafka import KafkaException

from aioshard.errors import AuthorizationError, TransportError
from aioshard.kafka.confluent.asking import Asking
from aioshard.kafka.confluent.client import ConfluentTransport
from aioshard.kafka.confluent.former import Former
from aioshard.ports import NOT_A_MEMBER, Membership
from tests.kafka_client.members import Member, settings_for
from tests.support.shared_kafka import SharedKafka

SESSION = 30.0
"""Seconds for which the brokers wait for a member that is gone: longer than the test may take."""


class Brokers:
    """Takes note of who has left, once it has raised its errors."""

    def __init__(self, *errors: TransportError) -> None:
        self.errors = list(errors)
        self.left: list[str] = []

    async def remove_member(self, member_id: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.left.append(member_id)


def former(**settings: Any) -> Former:
    made = Former(settings_for("127.0.0.1:9", client="confluent", **settings))
    made.joined(Membership("was", 1))
    return made


async def left(one: Former, brokers: Brokers) -> list[str]:
    await one.leave(cast("Asking", brokers))
    return brokers.left


async def test_who_the_client_is_no_more_leaves_once() -> None:
    one, brokers = former(), Brokers()

    one.compare(Membership("is", 2))
    one.compare(Membership("is", 2))

    assert await left(one, brokers) == ["was"]
    assert await left(one, brokers) == ["was"]


@pytest.mark.parametrize("error", [KafkaException("no"), RuntimeError("Consumer closed")], ids=["refused", "closed"])
async def test_a_client_that_does_not_tell_who_it_is_ends_nothing_and_nobody_leaves(error: Exception) -> None:
    class Silent:
        async def who(self) -> Membership:
            raise error

    one, brokers = former(), Brokers()

    await one.look_at(cast("Any", Silent()))

    assert await left(one, brokers) == []


async def test_who_the_client_still_is_does_not_leave() -> None:
    one, brokers = former(), Brokers()

    one.compare(Membership("was", -1))

    assert await left(one, brokers) == []


async def test_somebody_who_was_never_anybody_does_not_leave() -> None:
    one, brokers = Former(settings_for("127.0.0.1:9", client="confluent")), Brokers()

    one.compare(NOT_A_MEMBER)
    one.compare(Membership("is", 1))

    assert await left(one, brokers) == []


async def test_a_static_member_takes_its_own_place_again() -> None:
    one, brokers = former(group_instance_id="first"), Brokers()

    one.compare(Membership("is", 2))

    assert await left(one, brokers) == []
    assert not one.may_be_unknown("gone")
    assert not one.may_be_unknown(None)


async def test_brokers_that_are_not_there_are_told_later() -> None:
    one, brokers = former(), Brokers(TransportError("nobody there"))
    one.compare(Membership("", -1))

    with pytest.raises(TransportError, match="nobody there"):
        await left(one, brokers)

    assert await left(one, brokers) == ["was"]


async def test_brokers_that_refuse_are_not_asked_again() -> None:
    one, brokers = former(), Brokers(AuthorizationError("grant READ"))
    one.compare(Membership("", -1))

    assert await left(one, brokers) == []
    assert await left(one, brokers) == []


def test_a_member_without_partitions_is_looked_at_when_the_brokers_are_back() -> None:
    one = former()

    told = [one.may_be_unknown(trouble) for trouble in (None, "gone", "gone", None, None)]

    assert told == [False, False, False, True, False]


async def test_the_group_does_not_wait_for_a_session_of_who_was_before(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, 1)
    same = {"assignor": "range", "session_timeout": SESSION, "rebalance_timeout": SESSION}
    was = Member(settings_for(kafka.bootstrap, **same), group)
    (before,) = [(await was.join(topic)).membership]
    assert was.transport._internals is not None
    await was.transport._internals.tear_down()  # without a word to the group

    one = Member(settings_for(kafka.bootstrap, client="confluent", **same), group)
    transport = cast("ConfluentTransport", one.transport)
    transport._former.joined(before)
    transport._former.compare(NOT_A_MEMBER)
    try:
        async with asyncio.timeout(SESSION / 2):
            assert len((await one.join(topic)).partitions) == 1
    finally:
        await transport.close()
