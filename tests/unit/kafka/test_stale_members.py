"""The client got a new member id: the stale member is removed from the group, and nobody else."""

from typing import Any

import pytest

from aioshard.errors import AuthorizationError, TransportError
from aioshard.kafka.confluent.transport import ConfluentTransport
from aioshard.ports import NOT_A_MEMBER, Membership
from aioshard.settings import Settings


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
    transport = ConfluentTransport(Settings(bootstrap_servers="127.0.0.1:9", client="confluent", **settings), "billing")
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


async def test_a_failed_removal_is_retried() -> None:
    transport, brokers = await transport_that_was("was"), Brokers(TransportError("nobody there"))
    transport._note_member(NOT_A_MEMBER)

    with pytest.raises(TransportError, match="nobody there"):
        await removed(transport, brokers)

    assert await removed(transport, brokers) == ["was"]


async def test_a_refused_removal_is_not_retried() -> None:
    transport, brokers = await transport_that_was("was"), Brokers(AuthorizationError("grant READ"))
    transport._note_member(NOT_A_MEMBER)

    assert await removed(transport, brokers) == []
    assert await removed(transport, brokers) == []
