"""Brokers that evict the fetch sessions of their clients, or have no room for any: nothing is repeated or skipped."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from aioshard.kafka.wire.fetch_session import fetch_request
from aioshard.kafka.wire.requests import FETCH
from aioshard.records import TopicPartition
from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka
from tests.support.cluster import KafkaCluster
from tests.support.kafka import KafkaBroker

PARTITIONS = 8
READERS = 4
ROUNDS = 6
_NO_SUCH_SESSION = 70


@pytest.fixture
async def crowded(tmp_path: Path) -> AsyncIterator[KafkaBroker]:
    """A broker without room for a session: it divides it among eight caches."""
    broker = KafkaBroker(tmp_path)
    broker.properties["max.incremental.fetch.session.cache.slots"] = "1"
    await broker.start()
    try:
        yield broker
    finally:
        await broker.kill()


async def evict_sessions(reader: Member) -> None:
    """Let brokers forget the sessions of a reader, which does not know.

    Brokers do that by themselves only after two minutes, which no setting changes.
    """
    cluster = reader.transport._cluster
    for broker in list(reader.transport._fetcher._brokers.values()):
        closing = broker.session.closing()
        if closing is not None:
            await cluster.ask(broker.node, fetch_request(closing, max_bytes=1, wait=0.0, read_committed=False))


def responses_without_session(reader: Member) -> list[Any]:
    """Note the responses to a reader that keep no session for it, from now on."""
    cluster = reader.transport._cluster
    ask = cluster.ask
    lost: list[Any] = []

    async def note(node: int, request: Any, **options: Any) -> Any:
        response = await ask(node, request, **options)
        if request.api is FETCH and (response.error == _NO_SUCH_SESSION or not response.session):
            lost.append(response)
        return response

    cluster.ask = note  # type: ignore[method-assign]
    return lost


class Rounds:
    """Readers of a topic, each with a group of its own, and the end of each partition."""

    def __init__(self, cluster: KafkaCluster, topic: str, group: str) -> None:
        self.cluster = cluster
        self.topic = topic
        self.readers = [Member(settings_for(cluster.bootstrap), f"{group}-{number}") for number in range(READERS)]
        self.responses = [responses_without_session(reader) for reader in self.readers]
        self.ends = {TopicPartition(topic, number): 0 for number in range(PARTITIONS)}

    async def __aenter__(self) -> Self:
        await self.cluster.create_topic(self.topic, PARTITIONS)
        await asyncio.gather(*(reader.join(self.topic) for reader in self.readers))
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self.readers:
            await reader.transport.close()

    async def publish_and_read(self) -> None:
        """Publish a few records to each partition; return when all have been read."""
        for at in self.ends:
            self.ends[at] += 5
            await self.cluster.produce(self.topic, [(b"k", b"v")] * 5, at.partition)
        await asyncio.gather(*(reader.read_to(self.ends) for reader in self.readers))

    async def evict(self) -> None:
        """Evict all sessions."""
        await asyncio.gather(*(evict_sessions(reader) for reader in self.readers))

    def assert_each_record_once(self) -> None:
        offsets = [{at: reader.offsets(at) for at in self.ends} for reader in self.readers]
        assert offsets == [{at: list(range(end)) for at, end in self.ends.items()}] * READERS


async def test_evicted_sessions_repeat_and_skip_nothing(kafka: SharedKafka, topic: str, group: str) -> None:
    async with Rounds(kafka, topic, group) as rounds:
        for _ in range(ROUNDS):
            await rounds.publish_and_read()
            await asyncio.gather(rounds.evict(), rounds.publish_and_read())
        rounds.assert_each_record_once()
    assert all(any(one.error == _NO_SUCH_SESSION for one in responses) for responses in rounds.responses)


@pytest.mark.slow
async def test_a_broker_without_room_for_sessions_is_read_all_the_same(
    crowded: KafkaBroker, topic: str, group: str
) -> None:
    async with Rounds(crowded, topic, group) as rounds:
        for _ in range(ROUNDS):
            await rounds.publish_and_read()
        rounds.assert_each_record_once()
    assert all(rounds.responses)
    assert {one.error for responses in rounds.responses for one in responses} == {0}, "no session is asked for again"
