"""Offsets of logs and groups, asked of two model brokers: one that has trouble does not hold up the other."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from aioshard.kafka.offsets import (
    END,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    START,
    GroupOffsets,
    epoch_ends,
    log_ranges,
    offsets_at,
    try_log_ranges,
    try_offsets_at,
)
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import BrokerError, ConnectionLostError, UnsupportedVersionError
from aioshard.kafka.wire.requests import FIND_COORDINATOR, LIST_OFFSETS, METADATA, OFFSET_FOR_LEADER_EPOCH
from aioshard.kafka.wire.responses import CommittedOffset, EpochEnd
from aioshard.kafka.wire.start import connect
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import ModelBroker, Received

Scenario = Callable[[Cluster, ModelBroker, ModelBroker], Awaitable[None]]

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
"""Broker 1 leads the former, broker 2 the latter."""
BOUNDS = {(START, 0): 3, (START, 1): 3, (END, 0): 9, (END, 1): 8}
"""The answers about a log, by time and isolation."""


def scenario(test: Scenario, *, leaders: Mapping[int, int] | None = None) -> None:
    async def live(network: MemoryNetwork) -> None:
        first, second = ModelBroker(), ModelBroker()
        for node, broker in enumerate((first, second), start=1):
            broker.on(METADATA, describing(leaders or {0: 1, 1: 2}))
            broker.on(LIST_OFFSETS, listing({}))
            network.add(f"kafka-{node}", broker.protocol)
        cluster = await connect(Settings(bootstrap_servers="kafka-1:9092"))
        try:
            await test(cluster, first, second)
        finally:
            await cluster.close()
        await asyncio.sleep(2)

    run_on_network(live)


def describing(leaders: Mapping[int, int]) -> Callable[[Received], None]:
    partitions = [
        {"partition": number, "leader": leader, "epoch": 7, "replicas": [1, 2], "in_sync": [1, 2]}
        for number, leader in leaders.items()
    ]
    topic = {"name": "orders", "id": uuid.UUID(int=1), "partitions": partitions}
    return lambda request: request.reply(
        brokers=[{"node": node, "host": f"kafka-{node}", "port": 9092} for node in (1, 2)],
        controller=1,
        topics=[topic for _ in request.values.topics],
    )


def listing(codes: Mapping[int, int]) -> Callable[[Received], None]:
    """Answers with the bounds of logs, or a code."""

    def answer(request: Received) -> None:
        (topic,) = request.values.topics
        isolation = request.values.isolation
        parts = [
            {
                "partition": part.partition,
                "error": codes.get(part.partition, 0),
                "offset": BOUNDS[part.timestamp, isolation],
            }
            for part in topic.partitions
        ]
        request.reply(topics=[{"topic": "orders", "partitions": parts}])

    return answer


def silent(_request: Received) -> None:
    """Answers nothing."""


def test_a_range_ends_at_what_may_be_read_and_names_the_newest_offset() -> None:
    async def test(cluster: Cluster, _first: ModelBroker, _second: ModelBroker) -> None:
        committed = dict.fromkeys([ONE, TWO], LogRange(3, 8, 9))
        uncommitted = dict.fromkeys([ONE, TWO], LogRange(3, 9, 9))
        assert await log_ranges(cluster, [ONE, TWO], READ_COMMITTED, 3) == committed
        assert await log_ranges(cluster, [ONE, TWO], READ_UNCOMMITTED, 3) == uncommitted
        assert await try_log_ranges(cluster, [ONE, TWO], READ_COMMITTED) == (committed, {})
        assert await try_log_ranges(cluster, [], READ_COMMITTED) == ({}, {})

    scenario(test)


def test_a_silent_leader_holds_up_no_other_partition() -> None:
    async def test(cluster: Cluster, _first: ModelBroker, second: ModelBroker) -> None:
        second.on(LIST_OFFSETS, silent)
        begin = asyncio.get_running_loop().time()
        assert (await log_ranges(cluster, [ONE, TWO], READ_COMMITTED, 0.5)).keys() == {ONE}
        assert asyncio.get_running_loop().time() - begin == pytest.approx(0.5, abs=0.1)
        for answers in (
            await try_log_ranges(cluster, [ONE, TWO], READ_COMMITTED),
            await try_offsets_at(cluster, {ONE: END, TWO: END}, READ_COMMITTED),
        ):
            assert answers.values.keys() == {ONE}
            assert answers.errors[TWO].retriable
            assert "kafka-2:9092 did not answer ListOffsets within 3 s" in str(answers.errors[TWO])
        assert await offsets_at(cluster, {ONE: END, TWO: START}, READ_COMMITTED) == {ONE: 8}

    scenario(test)


@pytest.mark.parametrize("code", [6, 74, 78])
def test_an_error_that_passes_leaves_out_its_partition_only(code: int) -> None:
    async def test(cluster: Cluster, first: ModelBroker, second: ModelBroker) -> None:
        second.on(LIST_OFFSETS, listing({1: code}))
        assert (await log_ranges(cluster, [ONE, TWO], READ_COMMITTED, 3)).keys() == {ONE}
        assert await offsets_at(cluster, {ONE: END, TWO: END}, READ_UNCOMMITTED) == {ONE: 9}
        answers = await try_log_ranges(cluster, [ONE, TWO], READ_COMMITTED)
        assert set(answers.values) == {ONE}
        assert answers.errors[TWO].code == code
        before = len(first.received(METADATA)) + len(second.received(METADATA))
        await asyncio.sleep(1)
        assert len(first.received(METADATA)) + len(second.received(METADATA)) > before, "the leaders are looked up"

    scenario(test)


@pytest.mark.parametrize("code", [29, 43, -1])
def test_an_error_that_does_not_pass_is_raised(code: int) -> None:
    async def test(cluster: Cluster, _first: ModelBroker, second: ModelBroker) -> None:
        second.on(LIST_OFFSETS, listing({1: code}))
        queries: list[Awaitable[Any]] = [
            log_ranges(cluster, [ONE, TWO], READ_COMMITTED, 3),
            offsets_at(cluster, {ONE: END, TWO: END}, READ_COMMITTED),
        ]
        for query in queries:
            with pytest.raises(BrokerError) as raised:
                await query
            assert raised.value.code == code
        answers = await try_offsets_at(cluster, {ONE: END, TWO: END}, READ_COMMITTED)
        assert (answers.values, answers.errors[TWO].code) == ({ONE: 8}, code)

    scenario(test)


def test_a_partition_without_a_leader_is_named() -> None:
    async def test(cluster: Cluster, _first: ModelBroker, _second: ModelBroker) -> None:
        answers = await try_offsets_at(cluster, {ONE: END, TWO: END}, READ_COMMITTED)
        assert answers.values == {ONE: 8}
        assert str(answers.errors[TWO]) == "LEADER_NOT_AVAILABLE: no broker is the leader of orders/1 now"
        assert answers.errors[TWO].retriable

    scenario(test, leaders={0: 1, 1: -1})


# Groups -----------------------------------------------------------------------------------


def test_a_closed_client_ends_a_commit_that_waits_for_a_coordinator() -> None:
    """Otherwise its task would ask for ever."""

    async def test(cluster: Cluster, first: ModelBroker, second: ModelBroker) -> None:
        for broker in (first, second):
            broker.on(FIND_COORDINATOR, lambda request: request.reply(error=15))
        offsets = {ONE: CommittedOffset(5, -1, "")}
        commit = asyncio.create_task(GroupOffsets(cluster, "billing").commit(offsets))
        await asyncio.sleep(5)
        assert not commit.done()
        await cluster.close()
        async with asyncio.timeout(2):
            with pytest.raises(ConnectionLostError):
                await commit

    scenario(test)


# Leader epochs ----------------------------------------------------------------------------


def ending(ends: Mapping[int, tuple[int, int, int]]) -> Callable[[Received], None]:
    """Answers with a code, an epoch and its end for each partition."""

    def answer(request: Received) -> None:
        (topic,) = request.values.topics
        parts = []
        for part in topic.partitions:
            assert (part.leader_epoch, part.epoch) == (7, 5)
            code, epoch, end = ends[part.partition]
            parts.append({"partition": part.partition, "error": code, "epoch": epoch, "end": end})
        request.reply(topics=[{"topic": "orders", "partitions": parts}])

    return answer


def test_leaders_say_where_an_epoch_ends_in_their_logs_or_that_they_do_not_know() -> None:
    async def test(cluster: Cluster, first: ModelBroker, second: ModelBroker) -> None:
        first.on(OFFSET_FOR_LEADER_EPOCH, ending({0: (0, 4, 30)}))
        second.on(OFFSET_FOR_LEADER_EPOCH, ending({1: (0, -1, -1)}))
        assert await epoch_ends(cluster, {ONE: 5, TWO: 5}, 3.0) == {ONE: EpochEnd(4, 30), TWO: None}

    scenario(test)


@pytest.mark.parametrize("code", [6, 74, 75], ids=["not the leader", "our epoch is old", "its epoch is old"])
def test_a_leader_that_cannot_say_it_now_leaves_its_partition_out(code: int) -> None:
    """That is not an answer: nothing may be read before it comes."""

    async def test(cluster: Cluster, first: ModelBroker, second: ModelBroker) -> None:
        first.on(OFFSET_FOR_LEADER_EPOCH, ending({0: (0, 5, 30)}))
        second.on(OFFSET_FOR_LEADER_EPOCH, ending({1: (code, -1, -1)}))
        assert (await epoch_ends(cluster, {ONE: 5, TWO: 5}, 3.0)).keys() == {ONE}
        second.on(OFFSET_FOR_LEADER_EPOCH, silent)
        assert (await epoch_ends(cluster, {ONE: 5, TWO: 5}, 0.5)).keys() == {ONE}

    scenario(test)


def test_a_broker_that_is_too_old_knows_no_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise UnsupportedVersionError("OffsetForLeaderEpoch is too new")

    async def test(cluster: Cluster, _first: ModelBroker, _second: ModelBroker) -> None:
        monkeypatch.setattr(cluster, "ask", refuse)
        assert await epoch_ends(cluster, {ONE: 5}, 3.0) == {ONE: None}

    scenario(test)
