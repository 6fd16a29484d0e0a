"""Ranges of offsets that are read once: nothing beyond them, nothing that is finished, and no loss unnoticed."""

from typing import Any

import pytest
from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import FetchError

from aioshard.errors import DataLossError
from aioshard.kafka.ranges import RangeTransport
from aioshard.ports import Committed, FetchedBatch, LogRange
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.unit.kafka.fetching import Parts, everything

ONE = TopicPartition("orders", 0)


def reading(start: int, end: int, *finished: int) -> tuple[RangeTransport, Parts]:
    """A transport that reads one range, from its start on."""
    settings = Settings(bootstrap_servers="127.0.0.1:9")
    transport, parts = RangeTransport(settings, {ONE: LogRange(start, end, end)}, {ONE: finished}), Parts()
    transport._internals = parts
    transport._buffer.begin(parts, parts.assign([ONE]))
    transport.seek(ONE, start)
    transport.resume([ONE])
    return transport, parts


async def polled(transport: Any) -> tuple[list[int], int]:
    """The offsets of the records of one poll, and the position behind them."""
    [batch] = await transport.poll(everything, 0)
    assert isinstance(batch, FetchedBatch)
    assert len(batch.sizes) == len(batch.records)
    return [record.offset for record in batch.records], batch.next_offset


async def test_a_range_ends_in_the_middle_of_a_batch_and_is_not_fetched_again() -> None:
    transport, parts = reading(3, 7)
    parts.fetched(ONE, 3, 10)

    assert await polled(transport) == ([3, 4, 5, 6], 7)

    transport.resume([ONE])
    assert parts.states(parts.assignment())[ONE].paused
    assert (transport.position(ONE), transport.end_offset(ONE)) == (7, 7)


async def test_finished_offsets_are_skipped() -> None:
    transport, parts = reading(3, 9, 4, 5, 8)
    parts.fetched(ONE, 3, 10)

    assert await polled(transport) == ([3, 6, 7], 9)


async def test_a_range_truncated_by_retention_is_an_error() -> None:
    transport, parts = reading(3, 9)
    parts.buffered[ONE] = FetchError(error=kafka.OffsetOutOfRangeError({ONE: 3}), backoff=0)

    with pytest.raises(DataLossError, match="orders/0: from offset 3 on, of 3 to 8"):
        await transport.poll(everything, 0)


async def test_commits_stay_in_the_transport() -> None:
    transport, _ = reading(3, 9)
    assert await transport.committed([ONE]) == {ONE: Committed(3, "")}
    await transport.commit({ONE: Committed(6, "note")}, transport.membership())
    assert await transport.committed([ONE]) == {ONE: Committed(6, "note")}
