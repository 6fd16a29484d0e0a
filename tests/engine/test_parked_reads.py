"""Replays read the side topic about once, in any order."""

import asyncio
from collections.abc import Sequence

import pytest

from aioshard import App, Park, Record, Retry
from aioshard.records import TopicPartition
from aioshard.serde.side_records import Coordinates, release
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, TestClient, run

PARKED = "orders.parked"
KEYS = 300


@pytest.mark.parametrize(
    ("order", "pause"),
    [(range(KEYS), 0.05), (range(KEYS - 1, -1, -1), 0.0)],
    ids=["one by one", "all backwards"],
)
def test_released_keys_are_read_in_bulk(monkeypatch: pytest.MonkeyPatch, order: range, pause: float) -> None:
    """One read brings a megabyte of the side topic: to decode it for each record holds up everything else."""
    app = App("cache", commit_interval=0.1)
    broken = True
    done: list[int] = []
    reads: list[int] = []
    read = InMemorySideTopics.read

    async def counted(
        self: InMemorySideTopics, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        reads.append(offset)
        return await read(self, topic_partition, offset, max_bytes)

    monkeypatch.setattr(InMemorySideTopics, "read", counted)

    @app.consume("orders", retry=Retry(attempts=1), concurrency=8, on_failure=Park(PARKED, delay=100_000.0))
    async def handle(record: Record) -> None:
        await asyncio.sleep(0.01)
        if broken:
            raise ValueError
        done.append(record.offset)

    async def test() -> None:
        nonlocal broken
        broker = InMemoryBroker(partitions=1)
        async with TestClient(app, broker=broker) as client:
            for number in range(2 * KEYS):
                await client.publish("orders", b"", key=str(number % KEYS), partition=0)
            await client.settle(timeout=100.0)
            broken = False
            reads.clear()
            producer = InMemoryProducer(broker)
            for number in order:
                await producer.publish(release(PARKED, Coordinates("orders", 0, number)))
                await asyncio.sleep(pause)
            async with asyncio.timeout(200.0):
                while len(done) < 2 * KEYS:  # noqa: ASYNC110 - virtual time, and nothing tells
                    await asyncio.sleep(0.1)
            await producer.close()

    run(test())

    assert len(reads) < 20
    assert all(done.index(number) < done.index(number + KEYS) for number in range(KEYS))
