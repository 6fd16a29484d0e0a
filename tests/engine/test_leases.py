"""What the group's commits say beyond an offset, when an app opens its partitions."""

import asyncio
import logging
import time

import pytest

from aioshard import App, Record, TopicPartition
from aioshard.core.commit_metadata import CommitMetadata, Lease
from aioshard.core.finished_offsets import Run
from aioshard.errors import LeasedError
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


def lease(seconds: float) -> str:
    return CommitMetadata(first_generation=3, lease=Lease("7f3a", round(time.time() + seconds))).text(4)


def test_an_app_keeps_off_partitions_that_a_run_over_history_has() -> None:
    group = Consumed(lease(600))

    with pytest.raises(LeasedError, match=r"'7f3a' until 20\d\d-.*orders/0.*spark handover") as refused:
        run(group.consume())

    assert (refused.value.topic_partition, refused.value.plan) == (ORDERS, "7f3a")
    assert group.offsets == []
    assert group.broker.committed("shop", "orders", 0) == 4


def test_a_lease_that_has_run_out_stops_nobody() -> None:
    group = Consumed(lease(-1))

    run(group.consume())

    assert group.offsets == [4, 5, 6, 7, 8, 9]


def test_what_another_program_noted_is_not_replaced_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    group = Consumed("secret of another program")

    with caplog.at_level(logging.WARNING):
        run(group.consume())

    assert group.offsets == [4, 5, 6, 7, 8, 9]
    (said,) = [record.message for record in caplog.records if "committed with" in record.message]
    assert "offset 4 of orders/0" in said
    assert "secret" not in caplog.text, "what it noted is its own"


def test_a_damaged_text_is_ignored_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    group = Consumed(CommitMetadata(finished=(Run(6, 8),)).text(3))

    run(group.consume())

    assert group.offsets == [4, 5, 6, 7, 8, 9]
    assert "it was noted for offset 3 and the committed one is 4" in caplog.text
