"""Which fetched records are returned: positions, pauses, turns, allowances and faults; and how long fetches wait."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import pytest

from aioshard.core.flow import fetch_limits
from aioshard.errors import (
    CorruptRecordError,
    OffsetOutOfRangeError,
    StateError,
    TopicRecreatedError,
)
from aioshard.kafka.fetcher import FAULT_INTERVAL, Fetcher, PollResult, fetch_wait
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.requests import FETCH
from aioshard.kafka.wire.start import connect
from aioshard.ports import RECORD_OVERHEAD, Allowance, Fault, FetchedBatch, Oversized
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received, hold
from tests.support.model_cluster import ModelCluster

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
SIZE = RECORD_OVERHEAD + 10
WAIT = 0.1
NOTHING_MORE = 3.0
"""Seconds after which no more records come."""


def everything(_: TopicPartition) -> Allowance:
    return Allowance(1_000, 1 << 30)


def at_most(records: int, size: int = 1 << 30) -> Callable[[TopicPartition], Allowance]:
    return lambda _: Allowance(records, size)


class Reader:
    """A fetcher of a model cluster.

    Attributes:
        model: The brokers.
        cluster: The client's view of them.
        fetcher: The fetcher.
    """

    def __init__(self, model: ModelCluster, cluster: Cluster, **options: Any) -> None:
        self.model = model
        self.cluster = cluster
        settings = {"read_committed": True, "max_bytes": 32_000_000, "max_wait": WAIT, **options}
        self.fetcher = Fetcher(cluster, **settings)

    def read(self, *partitions: TopicPartition, start: int = 0, epoch: int = -1) -> None:
        """Fetch partitions from an offset on."""
        self.fetcher.add(partitions)
        for partition in partitions:
            self.fetcher.seek(partition, start, epoch)
        self.fetcher.resume(partitions)

    async def take(self, allowance: Any = everything) -> PollResult:
        """Wait until there is something to return, and return it."""
        while True:
            result = self.fetcher.take(allowance)
            if result.new:
                return result
            await self.fetcher.readable.wait()

    async def offsets(self, allowance: Any = everything) -> dict[TopicPartition, list[int]]:
        return offsets_of(await self.take(allowance))

    async def fault(self) -> Exception:
        """Wait for a fault."""
        [item] = (await self.take()).new
        assert isinstance(item, Fault)
        return item.error

    async def nothing_comes(self, seconds: float = NOTHING_MORE) -> None:
        """Check that nothing is returned for some time."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.take()

    def append(self, partition: TopicPartition, count: int, *, size: int = 10) -> None:
        """Append a batch of records."""
        self.model.logs[partition].append(*[bytes(size)] * count)

    async def lead(self, partition: TopicPartition, node: int) -> None:
        """Let a broker lead a partition, and the client know of it."""
        self.model.logs[partition].lead(node)
        await self.cluster.look_up([partition.topic])


def offsets_of(result: PollResult) -> dict[TopicPartition, list[int]]:
    return {
        item.topic_partition: [record.offset for record in item.records]
        for item in result.new
        if isinstance(item, FetchedBatch)
    }


@asynccontextmanager
async def reading(model: ModelCluster, topic: str, partitions: int, **options: Any) -> AsyncIterator[Reader]:
    """A fetcher that has begun, and fetches nothing yet."""
    model.create(topic, partitions)
    cluster = await connect(model.settings, [topic])
    reader = Reader(model, cluster, **options)
    reader.fetcher.start()
    try:
        yield reader
    finally:
        await reader.fetcher.close()
        await cluster.close()
        await model.close()


def scenario(test: Callable[[Reader], Awaitable[None]], **options: Any) -> None:
    """Run a test with two partitions, of which node 1 leads the first and node 2 the other."""

    async def live(network: MemoryNetwork) -> None:
        async with reading(ModelCluster(network, 3), "orders", 2, **options) as reader, asyncio.timeout(1_000):
            await test(reader)
            assert reader.fetcher.failure is None

    run_on_network(live)


# Positions ------------------------------------------------------------------------------


def test_a_position_advances_in_the_step_that_returns_its_records() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 5)
        reader.read(ONE)
        assert await reader.offsets(at_most(2)) == {ONE: [0, 1]}
        assert reader.fetcher.position(ONE) == 2
        assert len(reader.model.fetches()) == 1, "not fetched again before everything was taken"
        assert await reader.offsets() == {ONE: [2, 3, 4]}
        assert reader.fetcher.position(ONE) == 5
        reader.append(ONE, 1)
        assert await reader.offsets() == {ONE: [5]}

    scenario(test)


def test_nothing_is_fetched_before_a_position_is_set_and_resumed() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 5)
        reader.fetcher.add([ONE])
        assert reader.fetcher.position(ONE) is None
        with pytest.raises(StateError, match="before it was seeked"):
            reader.fetcher.resume([ONE])
        reader.fetcher.seek(ONE, 3)
        await reader.nothing_comes()
        assert reader.model.fetches() == []
        reader.fetcher.resume([ONE])
        assert await reader.offsets() == {ONE: [3, 4]}

    scenario(test)


def test_partitions_that_are_not_assigned_are_ignored() -> None:
    async def test(reader: Reader) -> None:
        reader.fetcher.seek(ONE, 3)
        reader.fetcher.resume([ONE])
        reader.fetcher.pause([ONE])
        reader.fetcher.remove([ONE])
        assert ONE not in reader.fetcher
        assert reader.fetcher.position(ONE) is None
        assert reader.fetcher.end_offset(ONE) is None
        assert reader.fetcher.epoch_at(ONE, 3) == -1

    scenario(test)


def test_the_leader_epochs_of_returned_records_are_known() -> None:
    async def test(reader: Reader) -> None:
        log = reader.model.logs[ONE]
        log.epoch = 3
        reader.append(ONE, 2)
        log.epoch = 5
        reader.append(ONE, 2)
        reader.read(ONE, start=0, epoch=2)
        await reader.take()
        assert [reader.fetcher.epoch_at(ONE, offset) for offset in range(5)] == [2, 3, 3, 5, 5]
        reader.fetcher.resume([ONE])
        requests = [part for fetch in reader.model.fetches() for topic in fetch.topics for part in topic.partitions]
        assert requests[0].fetched_epoch == 2
        reader.append(ONE, 1)
        await reader.take()
        requests = [part for fetch in reader.model.fetches() for topic in fetch.topics for part in topic.partitions]
        assert requests[-1].fetched_epoch == 5

    scenario(test)


@pytest.mark.parametrize(("read_committed", "end"), [(True, 5), (False, 9)])
def test_the_end_is_the_last_stable_offset_for_read_committed(read_committed: bool, end: int) -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 9)
        reader.model.logs[ONE].stable_end = 5
        reader.read(ONE)
        await reader.take()
        assert reader.fetcher.end_offset(ONE) == end
        assert reader.model.fetches()[0].isolation == int(read_committed)

    scenario(test, read_committed=read_committed)


# Answers that are late ------------------------------------------------------------------


def test_what_was_fetched_is_dropped_by_a_seek_and_a_removal() -> None:
    async def test(reader: Reader) -> None:
        for partition in (ONE, TWO):
            reader.append(partition, 3)
        reader.read(ONE, TWO)
        await asyncio.sleep(1)
        reader.fetcher.seek(ONE, 2)
        reader.fetcher.remove([TWO])
        assert reader.fetcher.take(everything).new == []
        assert await reader.offsets() == {ONE: [2]}
        assert reader.fetcher.partitions == (ONE,)

    scenario(test)


def test_partitions_that_stay_assigned_keep_their_records() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 5)
        reader.read(ONE)
        assert await reader.offsets(at_most(2)) == {ONE: [0, 1]}
        reader.fetcher.add([ONE, TWO])
        assert await reader.offsets() == {ONE: [2, 3, 4]}
        assert reader.fetcher.position(TWO) is None

    scenario(test)


# Pauses, turns and allowances -----------------------------------------------------------


def test_a_paused_partition_is_neither_fetched_nor_returned() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 4)
        reader.read(ONE)
        assert await reader.offsets(at_most(2)) == {ONE: [0, 1]}
        reader.fetcher.pause([ONE])
        await reader.nothing_comes()
        assert len(reader.model.fetches()) == 1
        reader.fetcher.resume([ONE])
        assert await reader.offsets() == {ONE: [2, 3]}, "what was fetched has stayed"

    scenario(test)


def test_records_that_arrive_during_a_pause_are_returned_after_it_once() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 3)
        broker = reader.model.brokers[1]
        held: list[Received] = []
        broker.on(FETCH, hold(held))
        reader.read(ONE)
        await broker.arrival(FETCH)
        reader.fetcher.pause([ONE])
        broker.on(FETCH, lambda request: reader.model.fetch(1, request))
        reader.model.fetch(1, held[0])
        await reader.nothing_comes()
        reader.fetcher.resume([ONE])
        assert await reader.offsets() == {ONE: [0, 1, 2]}
        await reader.nothing_comes()

    scenario(test)


def test_partitions_take_turns_and_share_one_allowance() -> None:
    async def test(reader: Reader) -> None:
        for partition in (ONE, TWO):
            reader.append(partition, 10)
        reader.read(ONE, TWO)
        await asyncio.sleep(1)
        take = reader.fetcher.take
        first = offsets_of(take(at_most(3)))
        second = offsets_of(take(at_most(3)))
        assert sorted([*first.items(), *second.items()]) == [(ONE, [0, 1, 2]), (TWO, [0, 1, 2])]
        third = offsets_of(take(at_most(100, 8 * SIZE)))
        assert sorted(len(offsets) for offsets in third.values()) == [1, 7]

    scenario(test)


@pytest.mark.parametrize("allowance", [Allowance(0, 1 << 30), Allowance(5, SIZE - 1)], ids=["full", "too large"])
def test_a_partition_that_is_not_taken_does_not_delay_others_of_its_broker(allowance: Allowance) -> None:
    async def test(reader: Reader) -> None:
        await reader.lead(TWO, 1)
        reader.append(ONE, 5)
        reader.read(ONE, TWO)
        await asyncio.sleep(1)
        reader.fetcher.take(lambda _: allowance)
        reader.append(TWO, 1)
        assert await reader.offsets(lambda at: allowance if at == ONE else everything(at)) == {TWO: [0]}
        assert await reader.offsets() == {ONE: [0, 1, 2, 3, 4]}

    scenario(test)


def test_a_record_that_does_not_fit_counts_as_new_once() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 2)
        reader.read(ONE)
        waiting = [Oversized(ONE, SIZE)]
        first = await reader.take(at_most(5, SIZE - 1))
        later = reader.fetcher.take(at_most(5, SIZE - 1))
        alone = reader.fetcher.take(lambda _: Allowance(5, SIZE - 1, alone=True))
        assert [(first.new, first.repeated), (later.new, later.repeated)] == [(waiting, []), ([], waiting)]
        assert offsets_of(alone) == {ONE: [0]}

    scenario(test)


def test_no_partition_is_starved_if_a_response_has_room_for_one() -> None:
    async def test(reader: Reader) -> None:
        await reader.lead(TWO, 1)
        for partition in (ONE, TWO):
            for _ in range(3):
                reader.append(partition, 1, size=20_000)
        reader.read(ONE, TWO)
        turns: list[TopicPartition] = []
        while len(turns) < 6:
            turns += await reader.offsets()
        longest = max(len(list(group)) for _, group in groupby(turns))
        assert longest <= 2, turns

    scenario(test, max_bytes=80_000)


# Faults -----------------------------------------------------------------------------------


def test_a_fault_is_reported_once_and_retried() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 3)
        reader.read(ONE, start=7)
        error = await reader.fault()
        reported_at = asyncio.get_running_loop().time()
        assert isinstance(error, OffsetOutOfRangeError)
        await reader.nothing_comes(FAULT_INTERVAL / 2)
        assert len(reader.model.fetches()) == 1, "not fetched meanwhile"
        assert isinstance(await reader.fault(), OffsetOutOfRangeError)
        assert asyncio.get_running_loop().time() - reported_at == pytest.approx(FAULT_INTERVAL, abs=0.1)
        reader.fetcher.seek(ONE, 1)
        assert await reader.offsets() == {ONE: [1, 2]}
        await reader.nothing_comes()

    scenario(test)


def test_the_retry_of_a_fault_does_not_drop_what_was_fetched_after_a_seek() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 3)
        reader.read(ONE, start=7)
        await reader.fault()
        reader.fetcher.seek(ONE, 1)
        await asyncio.sleep(2 * FAULT_INTERVAL)
        assert offsets_of(reader.fetcher.take(everything)) == {ONE: [1, 2]}
        assert len(reader.model.fetches()) == 2

    scenario(test)


def test_records_before_a_damaged_batch_are_returned_before_its_fault() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 2)
        reader.append(ONE, 1)
        log = reader.model.logs[ONE]
        damaged = bytearray(log.batches[-1].data)
        damaged[-3] ^= 1
        log.batches[-1] = log.batches[-1]._replace(data=bytes(damaged))
        reader.read(ONE)
        assert await reader.offsets() == {ONE: [0, 1]}
        error = await reader.fault()
        assert isinstance(error, CorruptRecordError)
        assert reader.fetcher.position(ONE) == 2

    scenario(test)


def test_an_error_that_passes_is_not_reported_but_waited_for() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 1)
        codes = [-1, 78]

        def refuse(request: Received) -> None:
            reader.model.change_fetch = lambda _, part: part.update(error=codes.pop(0) if codes else 0)
            reader.model.fetch(1, request)

        broker = reader.model.brokers[1]
        broker.on(FETCH, refuse)
        reader.read(ONE)
        assert await reader.offsets() == {ONE: [0]}
        first, second, third = (request.at for request in broker.received(FETCH)[:3])
        assert second - first > 0.1
        assert third - second > 0.2, "longer each time"

    scenario(test)


# The log has changed ----------------------------------------------------------------------


def test_the_retry_of_an_earlier_fault_does_not_hide_that_the_topic_was_created_again() -> None:
    async def test(reader: Reader) -> None:
        reader.read(ONE, start=7)
        assert isinstance(await reader.fault(), OffsetOutOfRangeError)
        reader.model.create("orders", 2)
        await reader.cluster.look_up(["orders"])
        assert isinstance(await reader.fault(), TopicRecreatedError)
        fetches = len(reader.model.fetches())
        await reader.nothing_comes(5 * FAULT_INTERVAL)
        assert len(reader.model.fetches()) == fetches

    scenario(test)


# Leaders and followers --------------------------------------------------------------------


def test_a_follower_that_is_gone_is_given_up_for_the_leader() -> None:
    async def test(reader: Reader) -> None:
        log = reader.model.logs[ONE]
        log.follower = 3
        reader.append(ONE, 1)
        reader.read(ONE)
        assert await reader.offsets() == {ONE: [0]}
        reader.model.stop(3)
        log.follower = None
        reader.append(ONE, 1)
        async with asyncio.timeout(1):
            assert await reader.offsets() == {ONE: [1]}

    scenario(test, rack="b")


def test_without_a_rack_only_leaders_are_fetched_from() -> None:
    async def test(reader: Reader) -> None:
        log = reader.model.logs[ONE]
        log.follower = 3
        reader.append(ONE, 1)
        reader.read(ONE)
        assert await reader.offsets() == {ONE: [0]}
        assert reader.model.fetches(3) == []

    scenario(test)


# The bound of fetched records -------------------------------------------------------------


def test_bytes_in_flight_and_buffered_count_against_the_bound() -> None:
    bound = 1_000_000

    async def test(reader: Reader) -> None:
        one, two = reader.model.brokers[1], reader.model.brokers[2]

        def limits(fetch: Received) -> tuple[int, int]:
            [part] = fetch.values.topics[0].partitions
            return fetch.values.max_bytes, part.max_bytes

        held: list[Received] = []
        one.on(FETCH, hold(held))
        reader.read(ONE)
        first = limits(await one.arrival(FETCH))
        assert first == fetch_limits(bound, 0, 1, requests=1)
        reader.read(TWO)
        other = await two.arrival(FETCH)
        assert limits(other) == fetch_limits(bound, first[0], 2, requests=1), "the other fetch may fill its share"

        reader.append(ONE, 15, size=10_000)
        size = len(reader.model.logs[ONE].batches[0].data)
        reader.model.fetch(1, held[0])
        await reader.fetcher.readable.wait()
        later = await two.arrival(FETCH, len(two.received(FETCH)) + 2)
        assert later.values.max_bytes == fetch_limits(bound, size, 2, requests=1).response, "fetched and not taken"

    scenario(test, max_bytes=bound)


# How long brokers hold a fetch ------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual", "partitions", "left_over", "idle", "expected"),
    [
        (0.1, 10, False, False, 0.1),
        (0.1, 10, False, True, 0.1),
        (0.1, 400, False, True, 0.1),
        (0.1, 2_000, False, True, 0.5),
        (0.1, 100_000, False, True, 0.5),
        (0.9, 2_000, False, True, 0.9),
        (0.1, 2_000, False, False, 0.1),
        (0.1, 10, True, False, 0.01),
        (0.1, 500, True, False, 0.05),
        (0.1, 2_000, True, False, 0.1),
    ],
)
def test_fetches_wait_longer_only_for_many_idle_partitions(
    usual: float, partitions: int, left_over: bool, idle: bool, expected: float
) -> None:
    assert fetch_wait(usual, partitions, left_over=left_over, idle=idle) == expected


MANY = [TopicPartition("many", number) for number in range(600)]
LONGER = 0.15


def many(test: Callable[[Reader], Awaitable[None]], *, may_wait_longer: bool = True) -> None:
    """Run a test with 600 partitions without records, all led by one broker."""

    async def live(network: MemoryNetwork) -> None:
        async with reading(ModelCluster(network), "many", len(MANY), may_wait_longer=may_wait_longer) as reader:
            await asyncio.sleep(1.1)  # nothing was fetched lately
            await test(reader)

    run_on_network(live)


async def next_wait(reader: Reader) -> float:
    """The seconds for which the broker may hold the next fetch."""
    broker = reader.model.brokers[1]
    request = await broker.arrival(FETCH, len(broker.received(FETCH)) + 1)
    return float(request.values.max_wait_ms) / 1000


def test_fetches_that_include_every_partition_wait_longer() -> None:
    async def test(reader: Reader) -> None:
        reader.read(*MANY)
        await next_wait(reader)
        assert await next_wait(reader) == LONGER
        reader.fetcher.pause(MANY[:1])
        assert await next_wait(reader) == WAIT, "it leaves one out, which may be resumed meanwhile"
        reader.fetcher.resume(MANY[:1])
        assert await next_wait(reader) == LONGER

    many(test)


def test_fetches_do_not_wait_longer_soon_after_records() -> None:
    async def test(reader: Reader) -> None:
        reader.read(*MANY)
        reader.append(MANY[0], 1)
        assert await reader.offsets() == {MANY[0]: [0]}
        assert await next_wait(reader) == WAIT
        await asyncio.sleep(1.1)
        assert await next_wait(reader) == LONGER

    many(test)


def test_fetches_are_held_briefly_while_a_partition_is_drained() -> None:
    async def test(reader: Reader) -> None:
        reader.append(ONE, 5)
        await reader.lead(TWO, 1)
        reader.read(ONE, TWO)
        await reader.take(at_most(2))
        assert await next_wait(reader) <= WAIT
        assert await next_wait(reader) < WAIT

    scenario(test)


def test_fetches_never_wait_longer_than_a_setting() -> None:
    async def test(reader: Reader) -> None:
        reader.read(*MANY)
        await next_wait(reader)
        assert await next_wait(reader) == WAIT

    many(test, may_wait_longer=False)


# The end ----------------------------------------------------------------------------------


def test_an_unexpected_error_ends_a_wait_and_is_kept() -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    async def live(network: MemoryNetwork) -> None:
        async with reading(ModelCluster(network), "orders", 1) as reader, asyncio.timeout(10):
            reader.cluster.supports = fail  # type: ignore[assignment,method-assign]
            reader.read(ONE)
            reader.fetcher.take(everything)
            await reader.fetcher.readable.wait()
            assert isinstance(reader.fetcher.failure, ZeroDivisionError)

    run_on_network(live)
