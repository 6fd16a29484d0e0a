"""Side topics on a model cluster with virtual time: no record is skipped, and the end of a log is known."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aioshard.errors import AuthorizationError, ClientLostError, ConnectError, CorruptRecordError, TransportError
from aioshard.kafka.side_topics import KafkaSideTopics, TopicReader
from aioshard.kafka.wire.requests import FETCH, LIST_OFFSETS, METADATA
from aioshard.ports import LogRange
from aioshard.records import Record, TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_cluster import ModelCluster

ONE, TWO = TopicPartition("parked", 0), TopicPartition("parked", 1)
Scenario = Callable[[ModelCluster, KafkaSideTopics], Awaitable[None]]


def scenario(test: Scenario, *, brokers: int = 1, read_committed: bool = True) -> None:
    """Runs a test; at the end, brokers may not have a session any more, and no task may be left."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, brokers)
        side_topics = KafkaSideTopics(model.settings, read_committed=read_committed)
        try:
            await test(model, side_topics)
        finally:
            before = now()
            await side_topics.close()
            assert now() - before < 2.1
            await model.close()

    run_on_network(live)


def now() -> float:
    return asyncio.get_running_loop().time()


def values(records: Sequence[Record]) -> list[bytes | None]:
    return [record.value for record in records]


async def take(side_topics: KafkaSideTopics, count: int, seconds: float = 10.0) -> list[Record]:
    """The next records, however they come; no error may come before."""
    found: list[Record] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            found += await side_topics.poll(1.0)
    assert len(found) == count
    return found


async def reach(side_topics: KafkaSideTopics, positions: dict[TopicPartition, int], seconds: float = 5.0) -> None:
    """Poll until positions are reached; nothing may come."""
    async with asyncio.timeout(seconds):
        while {at: side_topics.position(at) for at in positions} != positions:
            assert await side_topics.poll(1.0) == []


async def failure_of(side_topics: KafkaSideTopics, timeout: float = 0.2) -> TransportError:
    """Poll until an exception is raised, and return it."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert await side_topics.poll(timeout) == []
            except TransportError as error:
                return error


# Records ----------------------------------------------------------------------------------


def test_partitions_of_several_brokers_are_followed() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        one, two = model.create("parked", 2)
        one.append(b"a", b"b")
        side_topics.watch([ONE, TWO])
        assert values(await take(side_topics, 2)) == [b"a", b"b"]
        two.append(b"c")
        assert values(await take(side_topics, 1)) == [b"c"]
        assert (side_topics.position(ONE), side_topics.position(TWO)) == (2, 1)
        assert await side_topics.poll(0.1) == []

    scenario(test, brokers=2)


def test_nobody_is_asked_before_something_is_watched() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        model.create("parked")[0].append(b"a")
        assert await side_topics.poll(5.0) == []
        assert not model.brokers[1].received(METADATA)
        polling = asyncio.create_task(side_topics.poll(60.0))
        await asyncio.sleep(1)
        side_topics.watch([ONE])
        async with asyncio.timeout(1):
            assert values(await polling) == [b"a"]

    scenario(test)


def test_a_partition_watched_again_begins_at_its_start_although_a_fetch_is_in_flight() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        side_topics.watch([ONE])
        await take(side_topics, 1)
        side_topics.watch([])
        assert side_topics.position(ONE) == 0
        side_topics.watch([ONE])
        log.append(b"b")
        assert values(await take(side_topics, 2)) == [b"a", b"b"]

    scenario(test)


def test_an_answer_from_before_a_seek_does_not_count() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        log.append(b"b")
        held: list[Any] = []
        model.brokers[1].on(FETCH, held.append)
        side_topics.watch([ONE])
        assert await side_topics.poll(0.1) == []
        assert held
        side_topics.seek(ONE, 1)
        model.brokers[1].on(FETCH, lambda request: model.fetch(1, request))
        model.fetch(1, held[0])
        assert values(await take(side_topics, 1)) == [b"b"]
        assert side_topics.position(ONE) == 2

    scenario(test)


def test_a_partition_that_is_not_watched_any_more_is_not_fetched() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        one, two = model.create("parked", 2)
        side_topics.watch([ONE, TWO])
        assert await side_topics.poll(1.0) == []
        side_topics.watch([TWO])
        one.append(b"a")
        two.append(b"b")
        assert values(await take(side_topics, 1)) == [b"b"]
        assert await side_topics.poll(1.0) == []

    scenario(test)


@pytest.mark.parametrize("read_committed", [True, False])
def test_records_of_transactions_that_are_open_or_aborted_are_hidden_if_wanted(read_committed: bool) -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"aborted", producer=4, transactional=True)
        log.abort(0, 4)
        log.append(b"open", producer=5, transactional=True)
        log.stable_end = 2
        side_topics.watch([ONE])
        if read_committed:
            await reach(side_topics, {ONE: 2})
            assert await side_topics.poll(2.0) == []
        else:
            assert values(await take(side_topics, 2)) == [b"aborted", b"open"]
        assert await side_topics.read(ONE, 0) == []

    scenario(test, read_committed=read_committed)


# Where a log continues --------------------------------------------------------------------


def test_the_end_is_reached_when_the_last_batches_are_gone() -> None:
    """A broker then returns nothing, although the end is further on."""

    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        logs = model.create("parked", 2)
        for log in logs:
            log.append(b"a")
        side_topics.watch([ONE, TWO])
        await take(side_topics, 2)
        for log in logs:
            log.end = 9
        await reach(side_topics, {ONE: 9, TWO: 9})
        assert await side_topics.end(ONE) == 9
        assert await side_topics.read(ONE, 1) == []
        logs[0].append(b"b")
        assert values(await take(side_topics, 1)) == [b"b"]

    scenario(test, brokers=2)


def test_records_that_a_broker_withholds_are_not_passed() -> None:
    """An answer without records does not mean that there are none."""

    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        log.append(b"b")
        log.local_start = 1  # the first one is in tiered storage, which does not answer
        side_topics.watch([ONE])
        await reach(side_topics, {ONE: 0})
        for _ in range(5):
            assert await side_topics.poll(1.0) == []
        with pytest.raises(ConnectError, match="within 10 s"):
            await side_topics.read(ONE, 0)
        log.local_start = None
        assert values(await take(side_topics, 2)) == [b"a", b"b"]

    scenario(test)


def test_an_offset_before_the_log_continues_at_its_start() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        log.append(b"b")
        log.delete_before(1)
        side_topics.watch([ONE])
        assert values(await take(side_topics, 1, seconds=2)) == [b"b"]
        assert values(await side_topics.read(ONE, 0)) == [b"b"]

    scenario(test)


def test_an_offset_beyond_the_log_continues_at_its_start() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        side_topics.seek(ONE, 7)
        assert values(await take(side_topics, 1, seconds=2)) == [b"a"]
        assert await side_topics.read(ONE, 7) == []

    scenario(test)


def test_a_start_that_is_not_told_is_reported_and_found_later() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        log.append(b"b")
        log.delete_before(1)
        model.change_offset = lambda _at, part: part.update(error=78)
        began = now()
        side_topics.watch([ONE])
        error = await failure_of(side_topics)
        assert error.retriable
        assert 3 <= now() - began < 5
        model.change_offset = lambda _at, _part: None
        assert values(await take(side_topics, 1)) == [b"b"]

    scenario(test)


def test_a_topic_that_is_created_again_is_read_from_its_start() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"old", b"old", b"old")
        side_topics.watch([ONE])
        await take(side_topics, 3)
        (log,) = model.create("parked")
        log.append(b"a", b"b", b"c", b"d")  # as far as our position, and further
        found: list[Record] = []
        async with asyncio.timeout(20):
            while len(found) < 4:
                found += await side_topics.poll(1.0)
        assert values(found) == [b"a", b"b", b"c", b"d"]
        assert side_topics.position(ONE) == 4

    scenario(test)


def test_records_in_place_of_lost_ones_are_returned() -> None:
    """After an unclean election, the log has other records at offsets that were read before."""

    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        log.append(b"lost")
        log.append(b"lost")
        side_topics.watch([ONE])
        await take(side_topics, 3)
        log.truncate(1)
        log.lead(2)
        log.append(b"b")
        log.append(b"c")
        log.append(b"d")
        assert values(await take(side_topics, 3)) == [b"b", b"c", b"d"]

    scenario(test, brokers=2)


# Failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [-1, 3, 6, 56, 74, 75, 100, 999])
def test_an_error_is_reported_once_it_has_lasted_for_a_while(code: int) -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        side_topics.watch([ONE])
        await take(side_topics, 1)
        model.change_fetch = lambda _at, part: part.update(error=code, records=b"")
        began = now()
        async with asyncio.timeout(2):
            while now() < began + 1.5:
                assert await side_topics.poll(0.2) == []
        error = await failure_of(side_topics)
        assert 3 <= now() - began < 5
        assert error.retriable
        assert str(ONE) in str(error)
        model.change_fetch = lambda _at, _part: None
        log.append(b"b")
        async with asyncio.timeout(5):
            while side_topics.position(ONE) < 2:
                try:
                    await side_topics.poll(0.2)
                except TransportError:
                    continue

    scenario(test)


def test_an_unreadable_batch_is_reported_and_not_skipped() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        one, two = model.create("parked", 2)
        one.append(b"first")
        one.append(b"second")
        model.change_fetch = lambda _at, part: part.update(records=part["records"].replace(b"second", b"sec#nd"))
        side_topics.watch([ONE, TWO])
        assert values(await take(side_topics, 1)) == [b"first"]
        error = await failure_of(side_topics)
        assert isinstance(error, CorruptRecordError)
        assert f"offset 1 of {ONE}" in str(error)
        assert side_topics.position(ONE) == 1
        with pytest.raises(CorruptRecordError):
            await side_topics.read(ONE, 1)
        two.append(b"other")
        assert values(await take(side_topics, 1)) == [b"other"]
        model.change_fetch = lambda _at, _part: None
        found: list[Record] = []
        async with asyncio.timeout(5):
            while not found:
                try:
                    found += await side_topics.poll(1.0)
                except CorruptRecordError:
                    continue
        assert values(found) == [b"second"]

    scenario(test)


def test_a_denied_topic_is_reported_and_others_are_read() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        model.create("denied")[0].append(b"secret")
        model.create("parked")[0].append(b"a")
        model.denied.add("denied")
        denied = TopicPartition("denied", 0)
        side_topics.watch([denied, ONE])
        assert values(await take(side_topics, 1)) == [b"a"]
        assert isinstance(await failure_of(side_topics), AuthorizationError)
        for asking in (side_topics.end(denied), side_topics.read(denied, 0)):
            began = now()
            with pytest.raises(AuthorizationError, match="read topic 'denied'"):
                await asking
            assert now() - began < 1
        model.denied.clear()
        found: list[Record] = []
        async with asyncio.timeout(5):
            while not found:
                try:
                    found += await side_topics.poll(0.2)
                except AuthorizationError:
                    continue
        assert values(found) == [b"secret"]

    scenario(test)


def test_a_failure_is_reported_even_while_others_return_records() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        missing = TopicPartition("parked", 5)
        side_topics.watch([ONE, missing])
        began = now()
        reported: list[tuple[float, str]] = []
        while now() < began + 20:
            log.append(b"a")
            await asyncio.sleep(0.1)
            try:
                assert await side_topics.poll(1.0)
            except TransportError as error:
                reported.append((now() - began, str(error)))
        assert all(f"{missing} cannot be read" in text for _, text in reported)
        (first, _), (second, _), *_ = reported
        assert 8 <= first < 9
        assert 5 <= second - first < 6

    scenario(test)


# Brokers that are away --------------------------------------------------------------------


def test_a_hanging_broker_does_not_delay_the_others() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        one, two = model.create("parked", 2)
        side_topics.watch([ONE, TWO])
        assert await side_topics.poll(1.0) == []
        for kind in (FETCH, LIST_OFFSETS, METADATA):
            model.brokers[1].on(kind, lambda _: None)
        assert await side_topics.poll(1.0) == []  # until the fetch in flight is answered
        one.append(b"a")
        for _ in range(20):
            two.append(b"b")
            assert values(await take(side_topics, 1, seconds=1)) == [b"b"]
        assert str(ONE) in str(await failure_of(side_topics, timeout=5.0))
        for asking in (side_topics.end(ONE), side_topics.read(ONE, 0)):
            began = now()
            with pytest.raises(ConnectError, match="within 10 s"):
                await asking
            assert now() - began < 10.1

    scenario(test, brokers=2)


def test_lost_connections_are_reported_and_no_record_is_lost() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"before")
        side_topics.watch([ONE])
        await take(side_topics, 1)
        model.stop(1)
        error = await failure_of(side_topics)
        assert isinstance(error, ConnectError)
        assert "no connection to a broker of kafka-1:9092 is open" in str(error)
        model.start(1)
        log.append(b"after")
        found: list[Record] = []
        async with asyncio.timeout(5):
            while not found:
                try:
                    found += await side_topics.poll(0.5)
                except ConnectError:
                    continue
        assert values(found) == [b"after"]

    scenario(test)


def test_after_a_long_silence_a_new_client_says_why_no_broker_can_be_reached() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        side_topics.watch([ONE])
        assert await side_topics.poll(1.0) == []
        model.stop(1)
        began = now()
        while "could be reached" not in str(await failure_of(side_topics)):
            assert now() - began < 40
        assert now() - began > 25
        model.start(1)
        log.append(b"a")
        async with asyncio.timeout(10):
            while side_topics.position(ONE) == 0:
                try:
                    await side_topics.poll(0.5)
                except TransportError:
                    continue

    scenario(test)


@pytest.mark.parametrize("name", ["leaders of fetched partitions", "metadata of a Kafka cluster"])
def test_a_client_whose_task_ended_is_replaced(name: str) -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        side_topics.watch([ONE])
        await take(side_topics, 1)
        polling = asyncio.create_task(side_topics.poll(60.0))
        await asyncio.sleep(1)
        client = await side_topics._connected()
        for task in asyncio.all_tasks():
            if task.get_name() == name:
                task.cancel()
        await asyncio.sleep(1)
        assert await side_topics._connected() is not client
        log.append(b"b")
        async with asyncio.timeout(5):
            assert values(await polling) == [b"b"]

    scenario(test)


def test_closing_ends_what_waits() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        model.create("parked")[0].append(b"a")
        side_topics.watch([ONE])
        await take(side_topics, 1)
        for kind in (FETCH, LIST_OFFSETS, METADATA):
            model.brokers[1].on(kind, lambda _: None)
        polling = asyncio.create_task(side_topics.poll(60.0))
        asking = asyncio.create_task(side_topics.end(ONE))
        await asyncio.sleep(1)
        began = now()
        await side_topics.close()
        ended = await asyncio.gather(polling, asking, return_exceptions=True)
        assert all(isinstance(end, TransportError) for end in ended)
        assert now() - began < 4
        for late in (side_topics.poll(1.0), side_topics.end(ONE), side_topics.read(ONE, 0)):
            with pytest.raises(ClientLostError, match="closed"):
                await late

    scenario(test)


def test_closing_while_it_connects_leaves_nothing() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        model.brokers[1].on(METADATA, lambda _: None)
        side_topics.watch([ONE])
        with pytest.raises(ConnectError):
            await side_topics.poll(0.1)

    scenario(test)


# Ends -------------------------------------------------------------------------------------


def test_an_open_transaction_at_the_end_leaves_the_end_undecided() -> None:
    """A state restored up to an earlier end would lack its records once it is committed."""

    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a", b"b")
        assert await side_topics.end(ONE) == 2
        log.stable_end = 1
        with pytest.raises(TransportError, match=r"a transaction in parked/0 is still open"):
            await side_topics.end(ONE)

    scenario(test)


def test_an_election_delays_the_end_and_is_not_a_failure() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        assert await side_topics.end(ONE) == 1
        log.lead(None)
        asking = asyncio.gather(side_topics.end(ONE), side_topics.read(ONE, 0))
        await asyncio.sleep(1)
        log.lead(2)
        async with asyncio.timeout(3):
            end, records = await asking
        assert (end, values(records)) == (1, [b"a"])

    scenario(test, brokers=2)


def test_a_partition_that_does_not_exist_is_named_after_a_while() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        model.create("parked")
        missing = TopicPartition("parked", 7)
        for asking in (side_topics.end(missing), side_topics.read(missing, 0)):
            began = now()
            with pytest.raises(TransportError, match=r"parked/7 cannot be read: it does not exist"):
                await asking
            assert 3 <= now() - began < 4

    scenario(test)


def test_a_lookup_does_not_create_a_topic() -> None:
    """A broker may create topics on use: then a misspelt name would make one, which is not compacted."""

    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        missing = TopicPartition("misspelt", 0)
        side_topics.watch([missing])
        await failure_of(side_topics)
        with pytest.raises(TransportError):
            await side_topics.end(missing)
        asked = [request.values for request in model.brokers[1].received(METADATA)]
        assert any(topic.name == "misspelt" for values in asked for topic in values.topics)
        assert not any(values.create_topics for values in asked)

    scenario(test)


def test_a_broker_that_throttles_us_does_not_hide_records() -> None:
    async def test(model: ModelCluster, side_topics: KafkaSideTopics) -> None:
        (log,) = model.create("parked")
        log.append(b"a")
        assert await side_topics.end(ONE) == 1
        model.throttle_ms = 100
        asking = asyncio.create_task(side_topics.read(ONE, 0))
        await asyncio.sleep(1)
        assert not asking.done()
        model.throttle_ms = 0
        assert values(await asking) == [b"a"]

    scenario(test)


# A topic once -----------------------------------------------------------------------------


def test_a_topic_is_read_up_to_the_ends_of_its_ranges() -> None:
    async def test(model: ModelCluster, _: KafkaSideTopics) -> None:
        one, two = model.create("parked", 2)
        for log in (one, two):
            for number in range(5):
                log.append(b"%d" % number)
        reader = TopicReader(model.settings, "parked", [0, 1])
        reader.ranges = {0: LogRange(0, 3), 1: LogRange(0, 5)}
        found = [(record.partition, record.offset) async for records in reader.read({1: 3}) for record in records]
        await reader.__aexit__()
        assert sorted(found) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]

    scenario(test, brokers=2)


def test_a_read_that_does_not_advance_ends_with_an_error() -> None:
    async def test(model: ModelCluster, _: KafkaSideTopics) -> None:
        one, two = model.create("parked", 2)
        one.append(b"a")
        two.append(b"b")
        two.lead(None)
        reader = TopicReader(model.settings, "parked", [0, 1])
        reader.ranges = {0: LogRange(0, 1), 1: LogRange(0, 1)}
        began = now()
        reading = reader.read()
        assert values(await anext(reading)) == [b"a"]
        with pytest.raises(TransportError, match=r"parked/1 could not be read for 30 s"):
            await anext(reading)
        await reader.__aexit__()
        assert 30 <= now() - began < 35

    scenario(test)
