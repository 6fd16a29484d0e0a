"""Ranges of offsets that are read once: nothing beyond them, nothing that is finished, and no loss unnoticed."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard.errors import ClientLostError, ConnectError, DataLossError
from aioshard.kafka.ranges import RangeTransport
from aioshard.kafka.wire.requests import FETCH
from aioshard.ports import Allowance, Committed, FetchedBatch, LogRange, Oversized
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_cluster import ModelCluster, ModelLog

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
Scenario = Callable[[ModelCluster, list[ModelLog], RangeTransport], Awaitable[None]]


def everything(_: TopicPartition) -> Allowance:
    return Allowance(1 << 30, 1 << 40, alone=True)


def scenario(
    test: Scenario,
    ranges: Mapping[TopicPartition, tuple[int, int]],
    finished: Mapping[TopicPartition, Collection[int]] | None = None,
    prepare: Callable[[list[ModelLog]], object] = lambda _: None,
) -> None:
    """Runs a test with a transport that has begun to read two logs, each of two batches of five records."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 2)
        logs = model.create("orders", 2)
        for log in logs:
            for first in (0, 5):
                log.append(*(b"%d" % offset for offset in range(first, first + 5)))
        prepare(logs)
        bounds = {partition: LogRange(start, end, end) for partition, (start, end) in ranges.items()}
        transport = RangeTransport(model.settings, bounds, finished)
        assigned: list[Any] = []
        listener: Any = SimpleNamespace(
            assigned=lambda partitions, membership: assigned.append((partitions, membership))
        )
        try:
            await transport.start((), None, listener)
            assert assigned == [(list(ranges), transport.membership())]
            for partition, (start, _) in ranges.items():
                transport.seek(partition, start)
            transport.resume(list(ranges))
            await test(model, logs, transport)
        finally:
            await transport.close()
            assert not any(model.sessions.values())
            await model.close()

    run_on_network(live)


async def read(transport: RangeTransport, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, list[int]]:
    """The offsets of the records up to some positions."""
    found: dict[TopicPartition, list[int]] = {partition: [] for partition in positions}
    async with asyncio.timeout(10):
        while {partition: transport.position(partition) for partition in positions} != positions:
            for batch in await transport.poll(everything, 1.0):
                assert isinstance(batch, FetchedBatch)
                assert len(batch.sizes) == len(batch.records)
                assert batch.next_offset == transport.position(batch.topic_partition)
                found[batch.topic_partition] += [record.offset for record in batch.records]
    return found


def test_ranges_end_in_the_middle_of_a_batch_and_are_not_fetched_again() -> None:
    async def test(model: ModelCluster, _: list[ModelLog], transport: RangeTransport) -> None:
        assert await read(transport, {ONE: 7, TWO: 2}) == {ONE: [3, 4, 5, 6], TWO: [0, 1]}
        assert (transport.end_offset(ONE), transport.end_offset(TWO)) == (7, 2)
        transport.resume([ONE, TWO])
        assert await transport.poll(everything, 1.0) == []
        asked = len(model.fetches(1))
        assert await transport.poll(everything, 5.0) == []
        assert len(model.fetches(1)) == asked

    scenario(test, {ONE: (3, 7), TWO: (0, 2)})


def test_a_seek_within_a_range_reads_it_again() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        await read(transport, {ONE: 7})
        transport.seek(ONE, 4)
        transport.resume([ONE])
        assert await read(transport, {ONE: 7}) == {ONE: [4, 5, 6]}

    scenario(test, {ONE: (3, 7)})


def test_finished_offsets_are_skipped() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        assert await read(transport, {ONE: 9}) == {ONE: [3, 6, 7]}

    scenario(test, {ONE: (3, 9)}, {ONE: (4, 5, 8)})


def test_a_range_whose_last_offsets_hold_no_record_is_read_to_its_end() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        assert await read(transport, {ONE: 12}) == {ONE: [8, 9, 10]}

    scenario(test, {ONE: (8, 12)}, prepare=lambda logs: logs[0].append(b"10", gap=1))


def test_a_record_that_does_not_fit_is_reported_and_stays() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        (oversized,) = await transport.poll(lambda _: Allowance(10, 1), 1.0)
        assert isinstance(oversized, Oversized)
        assert await read(transport, {ONE: 2}) == {ONE: [0, 1]}

    scenario(test, {ONE: (0, 2)})


@pytest.mark.parametrize(
    ("lose", "start"),
    [
        pytest.param(lambda logs: logs[0].delete_before(5), 3, id="retention"),
        pytest.param(lambda logs: logs[0].truncate(0), 3, id="a log that is too short"),
    ],
)
def test_a_range_whose_start_is_gone_is_an_error(lose: Callable[[list[ModelLog]], object], start: int) -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        with pytest.raises(DataLossError, match=f"orders/0: from offset {start} on, of {start} to 8"):
            await transport.poll(everything, 5.0)

    scenario(test, {ONE: (start, 9)}, prepare=lose)


def recreate(model: ModelCluster) -> None:
    log, _ = model.create("orders", 2)
    log.append(*[b"new"] * 20)


def truncate(model: ModelCluster) -> None:
    log = model.logs[ONE]
    log.truncate(5)
    log.lead(2)
    log.append(*[b"other"] * 20)


@pytest.mark.parametrize(("lose", "first"), [(recreate, 10), (truncate, 5)])
def test_another_log_is_not_taken_for_the_rest_of_a_range(lose: Callable[[ModelCluster], None], first: int) -> None:
    async def test(model: ModelCluster, _: list[ModelLog], transport: RangeTransport) -> None:
        await read(transport, {ONE: 10})
        lose(model)
        with pytest.raises(DataLossError, match=f"orders/0: from offset {first} on, of 0 to 19"):
            await read(transport, {ONE: 20})

    scenario(test, {ONE: (0, 20)})


def test_a_poll_ends_when_it_is_woken() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        transport.pause([ONE])
        polling = asyncio.create_task(transport.poll(everything, 60.0))
        await asyncio.sleep(1)
        transport.wake()
        async with asyncio.timeout(1):
            assert await polling == []

    scenario(test, {ONE: (0, 9)})


def test_a_lost_connection_is_reported_until_it_is_back() -> None:
    async def test(model: ModelCluster, _: list[ModelLog], transport: RangeTransport) -> None:
        assert transport.trouble is None
        assert transport.missing_topics == []
        for node in model.brokers:
            model.stop(node)
        assert await transport.poll(lambda _: Allowance(0, 0), 2.0) == []
        assert "no connection to a broker of kafka-1:9092,kafka-2:9092 is open" in str(transport.trouble)
        for node in model.brokers:
            model.start(node)
        assert await read(transport, {ONE: 9}) == {ONE: list(range(9))}
        assert transport.trouble is None

    scenario(test, {ONE: (0, 9)})


def test_a_hanging_broker_does_not_delay_other_ranges() -> None:
    async def test(model: ModelCluster, _: list[ModelLog], transport: RangeTransport) -> None:
        model.brokers[1].on(FETCH, lambda _: None)
        began = asyncio.get_running_loop().time()
        assert await read(transport, {TWO: 9}) == {TWO: list(range(9))}
        assert asyncio.get_running_loop().time() - began < 1
        assert transport.position(ONE) == 0
        model.brokers[1].on(FETCH, lambda request: model.fetch(1, request))
        assert await read(transport, {ONE: 9}) == {ONE: list(range(9))}

    scenario(test, {ONE: (0, 9), TWO: (0, 9)})


def test_a_transport_that_was_not_started_or_is_closed_reads_nothing() -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        transport = RangeTransport(model.settings, {ONE: LogRange(0, 9)})
        with pytest.raises(ClientLostError, match="was not started"):
            await transport.poll(everything, 1.0)
        transport.wake()
        transport.pause([ONE])
        assert transport.position(ONE) is None
        await transport.close()
        with pytest.raises(ClientLostError, match="is closed"):
            await transport.poll(everything, 1.0)

    run_on_network(live)


def test_a_task_that_ended_ends_the_transport() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        await read(transport, {ONE: 9})
        polling = asyncio.create_task(transport.poll(everything, 60.0))
        await asyncio.sleep(1)
        for task in asyncio.all_tasks():
            if task.get_name() == "metadata of a Kafka cluster":
                task.cancel()
        with pytest.raises(ClientLostError, match="metadata of a Kafka cluster"):
            async with asyncio.timeout(5):
                await polling

    scenario(test, {ONE: (0, 9)})


def test_a_start_without_brokers_fails() -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        model.stop(1)
        transport = RangeTransport(model.settings, {ONE: LogRange(0, 9)})
        with pytest.raises(ConnectError, match="kafka-1:9092"):
            await transport.start((), None, SimpleNamespace())
        await transport.close()

    run_on_network(live)


def test_commits_stay_in_the_transport() -> None:
    async def test(_: ModelCluster, __: list[ModelLog], transport: RangeTransport) -> None:
        assert await transport.committed([ONE]) == {ONE: Committed(3, "")}
        await transport.commit({ONE: Committed(6, "note")}, transport.membership())
        assert await transport.committed([ONE]) == {ONE: Committed(6, "note")}

    scenario(test, {ONE: (3, 9)})
