"""Members of a group that close with their test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]


@pytest.fixture
async def members() -> AsyncIterator[list[Member]]:
    """Members in this list are closed at the end."""
    joined: list[Member] = []
    yield joined
    for member in joined:
        await asyncio.wait_for(member.transport.close(), 15)


@pytest.fixture
def member(kafka: SharedKafka, group: str, members: list[Member]) -> Join:
    """Makes members of the test's group on the run's broker; arguments are settings, and `start`."""

    def make(*, start: int = 0, **overrides: Any) -> Member:
        made = Member(settings_for(kafka.bootstrap, **overrides), group, start)
        members.append(made)
        return made

    return make
