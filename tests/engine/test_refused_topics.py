"""Topics that the brokers refuse: their partitions wait, and those of the others open."""

import asyncio
from collections.abc import Collection, Mapping

import pytest

from aioshard import App, Record
from aioshard.errors import AuthorizationError, CommitError, TopicsRefusedError, TransportError
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryTransport, TestClient, run
from tests.engine.live_apps import until

REASONS = pytest.mark.parametrize(
    "reason",
    [CommitError("the topic is unknown"), AuthorizationError("the topic is denied")],
    ids=["unknown", "denied"],
)


@REASONS
def test_a_topic_whose_first_position_is_refused_does_not_hold_back_another(reason: TransportError) -> None:
    app = App("refused", start_timeout=None, commit_interval=0.1)
    started: list[str] = []

    @app.consume("orders", "payments")
    async def handle(record: Record) -> None:
        started.append(record.topic)

    async def test() -> None:
        client = TestClient(app)
        client.broker.create_topic("orders", 1)
        client.broker.create_topic("payments", 1)
        refusal = TopicsRefusedError({TopicPartition("payments", 0): reason})
        for _ in range(100):
            client.broker.fail_next_commit(refusal, applied=True)
        async with client:
            for topic in ("orders", "payments"):
                await client.publish(topic, b"", partition=0)
            await until(lambda: started)
            assert started == ["orders"]
            await until(lambda: str(reason) in str(app.statistics().trouble))
            await until(lambda: len(started) == 2)
            await asyncio.sleep(5)
            assert app.statistics().trouble is None

    run(test())


def test_a_topic_that_may_not_be_seen_does_not_hold_back_another(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = InMemoryTransport.committed
    denied = {"payments"}

    async def refuse(
        self: InMemoryTransport, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        if any(partition.topic in denied for partition in partitions):
            raise AuthorizationError("the topic is denied")
        return await committed(self, partitions)

    monkeypatch.setattr(InMemoryTransport, "committed", refuse)
    app = App("refused", start_timeout=None)
    started: list[str] = []

    @app.consume("orders", "payments")
    async def handle(record: Record) -> None:
        started.append(record.topic)

    async def test() -> None:
        async with TestClient(app) as client:
            for topic in ("orders", "payments"):
                await client.publish(topic, b"", partition=0)
            await until(lambda: "the topic is denied" in str(app.statistics().trouble))
            assert started == ["orders"]
            denied.clear()
            await until(lambda: len(started) == 2)

    run(test())
