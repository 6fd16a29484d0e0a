"""Members of a group that close with their test, and a broker that tests may break."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.kafka.client.members import Member, settings_for
from tests.support.kafka import KafkaBroker
from tests.support.kafka_libs import BrokerUnavailableError
from tests.support.provision import skip_or_fail
from tests.support.shared_kafka import SharedKafka

Join = Callable[..., Member]


@pytest.fixture(scope="session")
def broker_to_harm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """The broker that `own_kafka` starts; it is killed at the end of the session."""
    broker = KafkaBroker(tmp_path_factory.mktemp("broker-to-harm"))
    yield broker
    asyncio.run(broker.kill())


@pytest.fixture
async def own_kafka(broker_to_harm: KafkaBroker) -> KafkaBroker:
    """A started broker that this test may stop, kill, freeze and restart; earlier tests have used it too.

    One broker for all these tests saves a start for each of them. Topics and groups have names of their own.
    """
    try:
        if not broker_to_harm.answers:
            await broker_to_harm.kill()
            await broker_to_harm.start()
    except BrokerUnavailableError as missing:
        skip_or_fail("Kafka broker", str(missing))
    return broker_to_harm


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
