"""A broker with room for few fetch sessions: it evicts those of its clients, and they repeat and skip nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioshard.kafka.wire.requests import FETCH
from aioshard.records import TopicPartition
from tests.kafka.client.members import Member, settings_for
from tests.support.kafka import KafkaBroker

PARTITIONS = 8
READERS = 4
ROUNDS = 12
PAUSE = 0.5
"""Seconds between two rounds; together they are several times the age at which a session may be evicted."""
_NO_SUCH_SESSION = 70


@pytest.fixture
async def crowded(tmp_path: Path) -> AsyncIterator[KafkaBroker]:
    """A broker with room for one session less than half of the readers need, which evicts those of two seconds."""
    broker = KafkaBroker(tmp_path)
    broker.properties["max.incremental.fetch.session.cache.slots"] = "1"
    broker.properties["min.incremental.fetch.session.eviction.ms"] = "2000"
    await broker.start()
    try:
        yield broker
    finally:
        await broker.kill()


def count_lost_sessions(reader: Member) -> list[Any]:
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


@pytest.mark.slow
async def test_evicted_sessions_repeat_and_skip_nothing(crowded: KafkaBroker, topic: str, group: str) -> None:
    await crowded.create_topic(topic, PARTITIONS)
    readers = [Member(settings_for(crowded.bootstrap), f"{group}-{number}") for number in range(READERS)]
    ends = {TopicPartition(topic, number): 0 for number in range(PARTITIONS)}
    try:
        lost = [count_lost_sessions(reader) for reader in readers]
        await asyncio.gather(*(reader.join(topic) for reader in readers))
        for _ in range(ROUNDS):
            for at in ends:
                ends[at] += 5
                await crowded.produce(topic, [(b"k", b"v")] * 5, at.partition)
            await asyncio.gather(*(reader.read_to(ends) for reader in readers))
            await asyncio.sleep(PAUSE)
        offsets = [{at: reader.offsets(at) for at in ends} for reader in readers]
    finally:
        for reader in readers:
            await reader.transport.close()
    assert offsets == [{at: list(range(end)) for at, end in ends.items()}] * READERS
    assert any(lost), "the broker had room for all"
