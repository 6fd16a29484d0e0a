"""Metadata of full length for many partitions: other tasks run while it is read and written."""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Delivery
from aioshard.engine.positions import _read
from aioshard.ports import Committed, FetchedBatch, Membership
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport
from tests.engine.deliveries import make_buffer, make_partition
from tests.engine.live_apps import until
from tests.support.offsets import runs_of

pytestmark = pytest.mark.slow

PARTITIONS = 40
SPAN = 62_000
FINISHED = runs_of(offset for offset in range(1, SPAN) if random.Random(offset).random() < 0.5)
NAMES = [TopicPartition("orders", number) for number in range(PARTITIONS)]


def full_text() -> str:
    text = CommitMetadata(finished=FINISHED).text(0)
    assert len(text) > MOST_UNITS - 20
    return text


async def loop_iterations_during(work: Callable[[], Any]) -> int:
    """How often another task ran while *work* did."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others(), name="others")
    await work()
    running.cancel()
    await asyncio.wait([running])
    return turns


@pytest.mark.chaos
async def test_other_tasks_run_while_metadata_is_read() -> None:
    commits = dict.fromkeys(NAMES, Committed(0, full_text()))

    assert await loop_iterations_during(lambda: _read(commits)) >= PARTITIONS


@pytest.mark.chaos
async def test_other_tasks_run_while_metadata_is_written() -> None:
    class Client:
        """Takes commits."""

        def membership(self) -> Membership:
            return Membership("member-1", 4)

        async def commit(
            self,
            offsets: Mapping[TopicPartition, Committed],
            membership: Membership,
            messages: object = None,
        ) -> None: ...

    committer = Committer(make_buffer(), lambda: 0.0, interval=1.0, timeout=5.0)
    client: Any = Client()
    partitions = []
    for name in NAMES:
        partition, _ = make_partition(partition=name.partition)
        records = [Record(*name, offset, b"k", b"", (), 0.0) for offset in range(2)]
        deliveries = [Delivery(record, partition, None, 1, 0.0) for record in records]
        partition.take_in(FetchedBatch(name, records, [1, 1], 2), deliveries)
        partition.complete(deliveries[1])
        partition.finished_ahead = FINISHED
        committer.own(partition)
        partitions.append(partition)

    assert (
        await loop_iterations_during(lambda: committer._send_all(client, partitions, client.membership())) >= PARTITIONS
    )


async def test_reading_metadata_does_not_use_the_brokers_timeout() -> None:
    """A member of many partitions could not start: they were read within `commit_timeout`, again and again."""
    broker = InMemoryBroker(partitions=PARTITIONS, clock=lambda: 0.0)
    broker.create_topic("orders", PARTITIONS)
    text = full_text()
    broker.group("group").commit_from_outside(dict.fromkeys(NAMES, 0), metadata=text)
    app = App("group", auto_offset_reset="earliest", commit_timeout=0.1, start_timeout=10)

    @app.consume("orders")
    async def handle(record: Record) -> None: ...

    async with app.started(lambda: InMemoryTransport(broker, "group")):
        await until(lambda: len(app.statistics().partitions) == PARTITIONS)
