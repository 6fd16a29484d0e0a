"""Group members on confluent-kafka that close with their test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]

COOPERATIVE: Mapping[str, Any] = {"client": "confluent", "assignor": "sticky"}
BY_THE_BROKER: Mapping[str, Any] = {"client": "confluent", "group_protocol": "consumer"}
OF_THE_BROKER = "session_timeout", "heartbeat_interval", "assignor"


@pytest.fixture(params=[pytest.param(COOPERATIVE, id="cooperative"), pytest.param(BY_THE_BROKER, id="KIP-848")])
def protocol(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """Settings with which a rebalance takes only the partitions that move."""
    settings: Mapping[str, Any] = request.param
    return settings


@pytest.fixture
async def members() -> AsyncIterator[list[Member]]:
    """Members in this list are closed at the end."""
    joined: list[Member] = []
    yield joined
    for member in joined:
        await asyncio.wait_for(member.transport.close(), 15)


@pytest.fixture
def member(kafka: SharedKafka, group: str, members: list[Member], protocol: Mapping[str, Any]) -> Join:
    """Makes members of the test's group; arguments are settings, and `start`."""

    def make(*, start: int = 0, **overrides: Any) -> Member:
        settings = settings_for(kafka.bootstrap, **{**COOPERATIVE, **overrides})
        if protocol is BY_THE_BROKER:
            kept = {name: getattr(settings, name) for name in settings.model_fields_set if name not in OF_THE_BROKER}
            settings = type(settings)(**{**kept, **BY_THE_BROKER})
        made = Member(settings, group, start)
        members.append(made)
        return made

    return make
