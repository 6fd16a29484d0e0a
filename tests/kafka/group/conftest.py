"""Members of another client, which end with their test."""

from collections.abc import Callable, Iterator

import pytest

from tests.kafka.group.librdkafka import Librdkafka
from tests.support.brokers import SharedKafka


@pytest.fixture
def librdkafka(kafka: SharedKafka, group: str, topic: str) -> Iterator[Callable[..., Librdkafka]]:
    """Makes members of librdkafka."""
    members: list[Librdkafka] = []

    def make(protocol: str = "classic") -> Librdkafka:
        members.append(Librdkafka(kafka.bootstrap, group, topic, protocol))
        return members[-1]

    yield make
    for member in members:
        member.close()
