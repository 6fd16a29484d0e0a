"""Commit metadata of other programs, read when an app opens its partitions."""

import asyncio
import logging

import pytest

from aioshard import App, Record, TopicPartition
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.testing import InMemoryBroker, InMemoryTransport, run

ORDERS = TopicPartition("orders", 0)


class Consumed:
    """A topic of ten records, of which a group has committed four, and an app of that group."""

    def __init__(self, metadata: str) -> None:
        self.broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for _ in range(10):
            self.broker.publish("orders", b"", partition=0)
        self.broker.group("shop").commit_from_outside({ORDERS: 4}, metadata=metadata)
        self.offsets: list[int] = []

    async def consume(self) -> None:
        app = App("shop", auto_offset_reset="earliest", commit_interval=0.1)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            self.offsets.append(record.offset)

        async with app.started(lambda: InMemoryTransport(self.broker, "shop")):
            await asyncio.sleep(1.0)


def test_replacing_metadata_of_another_program_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    group = Consumed("secret of another program")

    with caplog.at_level(logging.WARNING):
        run(group.consume())

    assert group.offsets == [4, 5, 6, 7, 8, 9]
    (said,) = [record.message for record in caplog.records if "will be replaced" in record.message]
    assert "orders/0 at offset 4" in said
    assert "secret" not in caplog.text, "its metadata is private"


def test_damaged_metadata_is_ignored_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    group = Consumed(CommitMetadata(finished=(Run(6, 8),)).text(3))

    run(group.consume())

    assert group.offsets == [4, 5, 6, 7, 8, 9]
    assert "written for offset 3, but the committed offset is 4" in caplog.text
