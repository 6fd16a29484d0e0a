"""One fetch outside a session: neither an error nor an omission means that nothing is left."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard.errors import AuthorizationError, CorruptRecordError, TransportError
from aioshard.kafka.single_fetch import SingleFetch, fetch_once
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.requests import FETCH
from aioshard.kafka.wire.start import connect
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_cluster import ModelCluster, ModelLog

ONE = TopicPartition("orders", 0)
Scenario = Callable[[ModelCluster, ModelLog, Cluster], Awaitable[None]]


def scenario(test: Scenario) -> None:
    """Runs a test with a log of one partition."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        (log,) = model.create("orders")
        cluster = await connect(model.settings, ["orders"])
        try:
            await test(model, log, cluster)
            assert not any(model.sessions.values())
        finally:
            await cluster.close()
            await model.close()

    run_on_network(live)


async def fetched(cluster: Cluster, offset: int, *, read_committed: bool = True) -> SingleFetch:
    found = await fetch_once(cluster, ONE, offset, read_committed=read_committed)
    assert found is not None
    return found


def offsets(found: SingleFetch) -> list[int]:
    return [record.offset for record in found.records]


def test_records_come_from_the_offset_on() -> None:
    async def test(_: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a", b"b", gap=2)
        found = await fetched(cluster, 1)
        assert (offsets(found), found.next_offset, found.is_at_end) == ([1], 4, False)
        assert await fetched(cluster, 4) == SingleFetch([], 4, is_at_end=True)

    scenario(test)


def test_an_offset_outside_the_log_leads_to_its_start() -> None:
    async def test(_: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a", b"b")
        log.append(b"c")
        log.delete_before(2)
        assert await fetched(cluster, 0) == SingleFetch([], 2)
        assert await fetched(cluster, 9) == SingleFetch([], 2, is_at_end=True)

    scenario(test)


@pytest.mark.parametrize("read_committed", [True, False])
def test_records_of_transactions_that_are_open_or_aborted_are_hidden_if_wanted(read_committed: bool) -> None:
    async def test(_: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"aborted", producer=4, transactional=True)
        log.abort(0, 4)
        log.append(b"open", producer=5, transactional=True)
        log.stable_end = 2
        found = await fetched(cluster, 0, read_committed=read_committed)
        assert offsets(found) == ([] if read_committed else [0, 2])
        assert found.next_offset == (2 if read_committed else 3)
        at_end = await fetched(cluster, found.next_offset, read_committed=read_committed)
        assert at_end == SingleFetch([], found.next_offset, is_at_end=True)

    scenario(test)


def test_a_log_whose_last_batches_are_gone_is_passed_to_its_end() -> None:
    async def test(_: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        log.end = 9
        assert await fetched(cluster, 1) == SingleFetch([], 9, is_at_end=True)
        log.stable_end = 5
        assert await fetched(cluster, 1) == SingleFetch([], 5, is_at_end=True)

    scenario(test)


def test_records_in_tiered_storage_that_do_not_come_in_time_are_not_passed() -> None:
    """The broker answers without an error, and without records."""

    async def test(_: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        log.append(b"b")
        log.local_start = 1
        assert await fetched(cluster, 0) == SingleFetch([], 0)
        assert offsets(await fetched(cluster, 1)) == [1]

    scenario(test)


def test_a_broker_that_throttles_us_says_nothing_about_the_end() -> None:
    async def test(model: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        for offset in (0, 1):
            model.throttle_ms = 100
            assert await fetched(cluster, offset) == SingleFetch([], offset)
            model.throttle_ms = 0
        part = {"partition": 0, "high_watermark": 1, "stable_end": 1, "preferred": -1}
        topics = [{"topic": "orders", "id": model.topic_ids["orders"], "partitions": [part]}]
        model.brokers[1].on(FETCH, lambda request: request.reply(throttle_ms=100, topics=topics))
        for offset in (0, 1):
            assert await fetched(cluster, offset) == SingleFetch([], offset)

    scenario(test)


@pytest.mark.parametrize("code", sorted({*ERROR_CODES, 999} - {1}))
def test_no_error_means_that_nothing_is_left(code: int) -> None:
    async def test(model: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        model.change_fetch = lambda _at, part: part.update(error=code, records=b"")
        with pytest.raises((WireError, TransportError)) as caught:
            await fetch_once(cluster, ONE, 0, read_committed=True)
        error = caught.value
        if code == 29:
            assert isinstance(error, AuthorizationError)
        elif code in (2, 76):
            assert isinstance(error, CorruptRecordError)
        else:
            assert isinstance(error, WireError)
            assert error.retriable
        model.brokers[1].on(FETCH, lambda request: request.reply(error=code))
        with pytest.raises(WireError):
            await fetch_once(cluster, ONE, 0, read_committed=True)

    scenario(test)


@pytest.mark.parametrize(
    "topics",
    [
        pytest.param(lambda _: [], id="none"),
        pytest.param(lambda topic: [{"id": topic, "partitions": []}], id="no partition"),
        pytest.param(lambda topic: [{"id": topic, "partitions": [{"partition": 1}]}], id="another"),
        pytest.param(lambda topic: [{"id": topic, "partitions": [{"partition": 0}] * 2}], id="twice"),
    ],
)
def test_an_omission_does_not_mean_that_nothing_is_left(topics: Callable[[Any], Any]) -> None:
    async def test(model: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        answer = topics(model.topic_ids["orders"])
        model.brokers[1].on(FETCH, lambda request: request.reply(topics=answer))
        with pytest.raises(WireError) as caught:
            await fetch_once(cluster, ONE, 0, read_committed=True)
        assert caught.value.retriable

    scenario(test)


def test_records_before_a_batch_that_cannot_be_read_are_returned() -> None:
    async def test(model: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"first")
        log.append(b"second")
        model.change_fetch = lambda _at, part: part.update(records=part["records"].replace(b"second", b"sec#nd"))
        found = await fetched(cluster, 0)
        assert (offsets(found), found.next_offset) == ([0], 1)
        with pytest.raises(CorruptRecordError, match=r"offset 1 of orders/0 .* checksum"):
            await fetched(cluster, 1)

    scenario(test)


def test_a_partition_without_a_leader_is_not_asked_for() -> None:
    async def test(_: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        assert await fetch_once(cluster, TopicPartition("orders", 7), 0, read_committed=True) is None
        log.lead(None)
        await cluster.look_up(["orders"])
        assert await fetch_once(cluster, ONE, 0, read_committed=True) is None

    scenario(test)


def test_a_hanging_broker_ends_it_after_a_while() -> None:
    async def test(model: ModelCluster, log: ModelLog, cluster: Cluster) -> None:
        log.append(b"a")
        model.brokers[1].on(FETCH, lambda _: None)
        before = asyncio.get_running_loop().time()
        with pytest.raises(WireError, match="did not answer Fetch"):
            await fetch_once(cluster, ONE, 0, read_committed=True, wait=1.0)
        assert 5 < asyncio.get_running_loop().time() - before < 7

    scenario(test)
