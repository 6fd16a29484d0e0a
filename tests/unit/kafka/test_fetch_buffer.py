"""The buffer between aiokafka and the engine: which fetched records are returned, and which are fetched again."""

import asyncio

import pytest
from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import FetchError

from aioshard.core.flow import fetch_limits
from aioshard.kafka.aiokafka.buffer import FAULT_INTERVAL, FetchBuffer, PollResult
from aioshard.ports import RECORD_OVERHEAD, Allowance, Fault, FetchedBatch, Oversized
from aioshard.records import TopicPartition
from aioshard.testing import run
from tests.unit.kafka.fetching import Parts, everything

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
SIZE = RECORD_OVERHEAD + 10


def at_most(records: int, size: int = 1 << 30) -> Allowance:
    return Allowance(records, size)


def reading(parts: Parts, *partitions: TopicPartition, read_committed: bool = True) -> FetchBuffer:
    """A buffer whose partitions are read from 0 on."""
    buffer = FetchBuffer(read_committed=read_committed)
    buffer.begin(parts, parts.assign(partitions))
    for partition in partitions:
        buffer.seek(partition, 0)
    buffer.resume(partitions)
    return buffer


async def checks(parts: Parts) -> int:
    """How often the fetcher was made to check what it may fetch, since the last call."""
    await asyncio.sleep(0.01)
    count, parts.fetcher.checks = parts.fetcher.checks, 0
    return int(count)


def offsets(result: PollResult) -> dict[TopicPartition, list[int]]:
    return {
        batch.topic_partition: [record.offset for record in batch.records]
        for batch in result.new
        if isinstance(batch, FetchedBatch)
    }


async def test_a_position_advances_in_the_step_that_returns_its_records() -> None:
    parts = Parts()
    buffer = reading(parts, ONE)
    parts.fetched(ONE, 0, 5)

    assert offsets(buffer.take(lambda _: at_most(2))) == {ONE: [0, 1]}
    assert buffer.position(ONE) == 2
    assert offsets(buffer.take(everything)) == {ONE: [2, 3, 4]}
    assert buffer.position(ONE) == 5
    assert not parts.buffered, "the client fetches more"


# Discards -------------------------------------------------------------------------------


async def test_a_new_assignment_discards_records_of_the_previous_one() -> None:
    """The client does so a moment later; meanwhile an error of the old assignment would be reported as a new one."""
    parts = Parts()
    buffer = reading(parts, ONE, TWO)
    parts.fetched(ONE, 0, 5)
    parts.buffered[TWO] = FetchError(error=kafka.OffsetOutOfRangeError({TWO: 0}), backoff=0)

    buffer.begin(parts, parts.assign([ONE, TWO]))

    assert not parts.buffered
    assert buffer.take(everything).new == []


async def test_a_kept_partition_continues_within_its_fetched_records() -> None:
    parts = Parts()
    buffer = reading(parts, ONE)
    parts.fetched(ONE, 0, 5)
    buffer.take(lambda _: at_most(2))

    buffer.begin(parts, parts.assign([ONE]))
    parts.fetched(ONE, 2, 3)

    assert offsets(buffer.take(everything)) == {ONE: [2, 3, 4]}


async def test_records_of_an_earlier_assignment_are_not_returned() -> None:
    parts = Parts()
    former = parts.assign([ONE])
    buffer = reading(parts, ONE)
    parts.fetched(ONE, 0, 5, of=former)

    assert buffer.take(everything).new == []
    assert buffer.position(ONE) == 0


async def test_records_not_at_the_position_are_refetched() -> None:
    parts = Parts()
    buffer = reading(parts, ONE)
    parts.fetched(ONE, 7, 5)
    await checks(parts)

    assert buffer.take(everything).new == []

    assert buffer.position(ONE) == 0
    assert not parts.buffered
    assert await checks(parts) == 1


async def test_a_seek_discards_fetched_records() -> None:
    parts = Parts()
    buffer = reading(parts, ONE, TWO)
    parts.fetched(ONE, 0, 5)
    parts.buffered[TWO] = FetchError(error=kafka.OffsetOutOfRangeError({TWO: 0}), backoff=0)
    await checks(parts)

    buffer.seek(ONE, 3)
    buffer.seek(TWO, 8)

    assert not parts.buffered
    assert await checks(parts) >= 1
    assert buffer.take(everything).new == []
    assert (buffer.position(ONE), buffer.position(TWO)) == (3, 8)


# Pauses, turns and allowances -----------------------------------------------------------


async def test_pauses_and_rebalances_return_nothing() -> None:
    parts = Parts()
    buffer = reading(parts, ONE, TWO)
    for partition in (ONE, TWO):
        parts.fetched(partition, 0, 2)

    buffer.pause([ONE])
    parts.subscription.reassignment_in_progress = True
    assert buffer.take(everything).new == []
    parts.subscription.reassignment_in_progress = False
    assert offsets(buffer.take(everything)) == {TWO: [0, 1]}
    buffer.resume([ONE])
    assert offsets(buffer.take(everything)) == {ONE: [0, 1]}


async def test_partitions_take_turns_and_share_one_allowance() -> None:
    parts = Parts()
    buffer = reading(parts, ONE, TWO)
    for partition in (ONE, TWO):
        parts.fetched(partition, 0, 10)

    assert offsets(buffer.take(lambda _: at_most(3))) == {ONE: [0, 1, 2]}
    assert offsets(buffer.take(lambda _: at_most(3))) == {TWO: [0, 1, 2]}
    assert offsets(buffer.take(lambda _: at_most(100, 8 * SIZE))) == {ONE: [3, 4, 5, 6, 7, 8, 9], TWO: [3]}


@pytest.mark.parametrize("allowance", [Allowance(0, 1 << 30), Allowance(5, SIZE - 1)], ids=["full", "too large"])
async def test_an_untaken_partition_does_not_delay_its_broker(allowance: Allowance) -> None:
    """aiokafka sends no other fetch to a broker while one of its partitions is in its back-off."""
    parts = Parts()
    buffer = reading(parts, ONE, TWO)
    result = parts.fetched(ONE, 0, 5)
    await checks(parts)

    for count in (1, 0):
        buffer.take(lambda _: allowance)
        assert result.calculate_backoff() == 0
        assert await checks(parts) == count
    assert parts.buffered.keys() == {ONE}


async def test_a_record_that_does_not_fit_counts_as_new_once() -> None:
    parts = Parts()
    buffer = reading(parts, ONE)
    parts.fetched(ONE, 0, 2)
    waiting = [Oversized(ONE, SIZE)]

    first, later = (buffer.take(lambda _: Allowance(5, SIZE - 1)) for _ in range(2))
    alone = buffer.take(lambda _: Allowance(5, SIZE - 1, alone=True))

    assert [(first.new, first.repeated), (later.new, later.repeated)] == [(waiting, []), ([], waiting)]
    assert offsets(alone) == {ONE: [0]}


# Positions and faults -------------------------------------------------------------------


async def test_read_committed_ends_at_the_last_stable_offset() -> None:
    for read_committed, end in ((True, 5), (False, 9)):
        parts = Parts()
        buffer = reading(parts, ONE, read_committed=read_committed)
        state = parts.states(parts.assignment())[ONE]
        state.lso, state.highwater = 5, 9
        assert buffer.end_offset(ONE) == end


async def test_a_record_too_large_to_fetch_is_not_skipped() -> None:
    parts = Parts()
    buffer = reading(parts, ONE)
    error = kafka.RecordTooLargeError("%s=%s is larger than %s", ONE, 4, 1_000)
    parts.buffered[ONE] = FetchError(error=error, backoff=0)
    parts.states(parts.assignment())[ONE].consumed_to(5)  # as the client does

    [fault] = buffer.take(everything).new

    assert isinstance(fault, Fault)
    assert "offset 4 of orders/0 is larger" in str(fault.error)
    assert buffer.position(ONE) == 4


def test_a_fault_is_reported_once_and_its_retry_discards_nothing_else() -> None:
    async def live() -> None:
        parts = Parts()
        buffer = reading(parts, ONE, TWO)
        for partition in (ONE, TWO):
            parts.buffered[partition] = FetchError(error=kafka.OffsetOutOfRangeError({partition: 0}), backoff=0)
        assert [type(item) for item in buffer.take(everything).new] == [Fault, Fault]
        assert buffer.take(everything).new == []
        buffer.seek(ONE, 3)
        parts.fetched(ONE, 3, 2)

        await asyncio.sleep(FAULT_INTERVAL + 0.1)

        assert parts.buffered.keys() == {ONE}
        assert offsets(buffer.take(everything)) == {ONE: [3, 4]}

    run(live())


# The bound of fetched records -------------------------------------------------------------


async def test_bytes_in_flight_and_buffered_count_against_the_fetch_bound() -> None:
    parts, bound = Parts(), 1_000_000
    parts.bound_prefetch(bound)
    fetcher, assignment = parts.fetcher, parts.assign([ONE, TWO])

    def limits(*planned: int) -> tuple[int, int]:
        fetcher.planned = planned
        fetcher._get_actions_per_node(assignment)
        return fetcher._fetch_max_bytes, fetcher._max_partition_fetch_bytes

    assert limits(1, 2) == fetch_limits(bound, 0, 2, requests=2) == (250_000, 250_000)
    parts.fetched(ONE, 0, 15, size=10_000)
    size = parts.buffered[ONE]._partition_records._records.size_in_bytes()
    assert limits() == fetch_limits(bound, 500_000 + size, 2, requests=1)
    assert limits() < (100_000, 100_000)
    fetcher._in_flight.clear()
    assert limits() == fetch_limits(bound, size, 2, requests=2)
    del parts.buffered[ONE]
    assert limits() == (250_000, 250_000)
