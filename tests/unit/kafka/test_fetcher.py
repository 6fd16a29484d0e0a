"""The fetcher on a model cluster with virtual time: each record once and in order, whatever brokers answer."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard.errors import (
    AuthorizationError,
    CorruptRecordError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    TopicRecreatedError,
)
from aioshard.kafka.fetcher import FAULT_INTERVAL, Fetcher
from aioshard.kafka.wire.metadata import Leader
from aioshard.kafka.wire.requests import FETCH, METADATA
from aioshard.kafka.wire.start import connect
from aioshard.ports import Allowance, Fault, FetchedBatch
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_cluster import ModelCluster, ModelLog

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
PAYMENTS = TopicPartition("payments", 0)
MAX_WAIT = 3.0
"""Seconds for which a broker may hold a fetch in tests of that."""
SEEDS = pytest.mark.parametrize("seed", [None, 1, 2, 3])


def everything(_: TopicPartition) -> Allowance:
    return Allowance(1 << 30, 1 << 40, alone=True)


def one_record(_: TopicPartition) -> Allowance:
    return Allowance(1, 1 << 20)


class Reader:
    """A fetcher, and what was taken from it."""

    def __init__(self, fetcher: Fetcher, cluster: Any) -> None:
        self.fetcher = fetcher
        self.cluster = cluster
        self.records: dict[TopicPartition, list[bytes | None]] = {}
        self.faults: list[Fault] = []

    def begin(self, *partitions: TopicPartition, at: int = 0, epoch: int = -1) -> None:
        self.cluster.follow({partition.topic for partition in partitions})
        self.fetcher.add(partitions)
        for partition in partitions:
            self.fetcher.seek(partition, at, epoch)
        self.fetcher.resume(partitions)

    def take(self, allowance: Callable[[TopicPartition], Allowance] = everything) -> None:
        for item in self.fetcher.take(allowance).new:
            if isinstance(item, FetchedBatch):
                values = self.records.setdefault(item.topic_partition, [])
                values += [record.value for record in item.records]
            elif isinstance(item, Fault):
                self.faults.append(item)

    async def until(self, done: Callable[[], bool], seconds: float = 60.0) -> float:
        """Take everything until something is so; return the seconds that it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(seconds):
            while True:
                self.take()
                if done():
                    return loop.time() - began
                try:
                    async with asyncio.timeout(0.05):
                        await self.fetcher.readable.wait()
                except TimeoutError:
                    continue

    async def read(self, partition: TopicPartition, *values: bytes, within: float = 60.0) -> None:
        """Take until these, and no other, records of a partition have come since the last call."""
        await self.until(lambda: len(self.records.get(partition, ())) >= len(values), within)
        assert self.records.pop(partition) == list(values)

    async def refresh(self) -> None:
        """Learn the latest metadata."""
        version = self.cluster.metadata.version
        self.cluster.request_refresh()
        await self.cluster.updated_after(version)

    async def fault(self) -> Fault:
        await self.until(lambda: bool(self.faults))
        return self.faults.pop(0)

    async def nothing(self, seconds: float) -> None:
        """Take for a while; nothing may come."""
        with pytest.raises(TimeoutError):
            await self.until(lambda: bool(self.records or self.faults), seconds)


Scenario = Callable[[ModelCluster, Reader], Awaitable[None]]


def scenario(
    test: Scenario,
    *,
    brokers: int = 1,
    seed: int | None = None,
    prepare: Callable[[ModelCluster], object] = lambda _: None,
    **options: Any,
) -> None:
    """Runs a test; at the end, brokers may not have a session any more."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, brokers)
        prepare(model)
        cluster = await connect(model.settings)
        fetcher = Fetcher(cluster, **{"read_committed": True, "max_bytes": 1 << 20, "max_wait": 0.5, **options})
        fetcher.start()
        try:
            await test(model, Reader(fetcher, cluster))
            assert fetcher.failure is None
        finally:
            await fetcher.close()
            await cluster.close()
            await model.close()

    run_on_network(live, seed=seed)


def hold_fetches(model: ModelCluster, node: int = 1) -> list[Any]:
    """Holds the fetches of a broker from now on; to be answered with `model.fetch`."""
    held: list[Any] = []
    model.brokers[node].on(FETCH, held.append)
    return held


def release(model: ModelCluster, held: list[Any], node: int = 1) -> None:
    """Answers what was held, and everything from now on."""
    model.brokers[node].on(FETCH, lambda request: model.fetch(node, request))
    for request in held:
        model.fetch(node, request)
    held.clear()


# Reading --------------------------------------------------------------------------------


@SEEDS
def test_records_of_several_brokers_come_once_and_in_order(seed: int | None) -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        logs = model.create("orders", 4)
        rng = random.Random(seed or 0)
        expected: dict[TopicPartition, list[bytes]] = {log.name: [] for log in logs}
        reader.begin(*expected)
        for number in range(200):
            log = rng.choice(logs)
            expected[log.name].append(b"%d" % number)
            log.append(b"%d" % number)
            if rng.random() < 0.2:
                await asyncio.sleep(0.01)
                reader.take()
        await reader.until(lambda: sum(map(len, reader.records.values())) == 200)
        assert reader.records == expected
        assert [reader.fetcher.position(log.name) for log in logs] == [log.end for log in logs]

    scenario(test, brokers=3, seed=seed)


def test_offsets_without_records_are_passed() -> None:
    """Transaction markers, aborted batches, batches whose last records are gone."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a", gap=3)
        log.append(b"aborted", producer=7, transactional=True)
        log.abort(4, 7)
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        await reader.until(lambda: reader.fetcher.position(ONE) == 6)
        assert reader.fetcher.end_offset(ONE) == 6

    scenario(test)


# Answers that are late ------------------------------------------------------------------


async def _seek_away_and_back(_: ModelCluster, reader: Reader) -> None:
    reader.fetcher.seek(ONE, 2)
    reader.fetcher.seek(ONE, 0)


async def _revoke_and_assign(_: ModelCluster, reader: Reader) -> None:
    reader.fetcher.remove([ONE])
    reader.begin(ONE)


async def _pause_and_resume(_: ModelCluster, reader: Reader) -> None:
    reader.fetcher.pause([ONE])
    await asyncio.sleep(0.2)
    reader.fetcher.resume([ONE])


async def _move_away_and_back(model: ModelCluster, reader: Reader) -> None:
    await _move(model, reader, 2, 1)


async def _move(model: ModelCluster, reader: Reader, *nodes: int) -> None:
    """Moves a partition to one broker after the other, and tells the reader."""
    for node in nodes:
        model.logs[ONE].lead(node)
        await reader.refresh()


@SEEDS
@pytest.mark.parametrize("change", [_seek_away_and_back, _revoke_and_assign, _pause_and_resume, _move_away_and_back])
def test_an_answer_to_an_older_request_does_not_count(
    change: Callable[[ModelCluster, Reader], Awaitable[None]], seed: int | None
) -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        log, _ = model.create("orders", 2)
        log.append(b"a", b"b")
        log.append(b"c")
        held = hold_fetches(model)
        reader.begin(ONE)
        await model.brokers[1].arrival(FETCH)
        await change(model, reader)
        await asyncio.sleep(0.1)
        release(model, held)
        await reader.read(ONE, b"a", b"b", b"c")
        log.append(b"d")
        await reader.read(ONE, b"d")

    scenario(test, brokers=2, seed=seed)


def test_an_answer_from_before_a_seek_back_does_not_count() -> None:
    """It would skip what is before its first record."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a", b"b")
        log.append(b"c")
        held = hold_fetches(model)
        reader.begin(ONE, at=2)
        await model.brokers[1].arrival(FETCH)
        reader.fetcher.seek(ONE, 0)
        release(model, held)
        await reader.read(ONE, b"a", b"b", b"c")

    scenario(test)


def test_an_answer_of_the_log_before_a_topic_was_created_again_does_not_count() -> None:
    """The offset is the same in both logs."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"old")
        old_id = model.topic_ids["orders"]
        hold_fetches(model)
        reader.begin(ONE)
        request = await model.brokers[1].arrival(FETCH)
        (new,) = model.create("orders")
        new.append(b"new")
        reader.cluster.request_refresh()
        assert isinstance((await reader.fault()).error, TopicRecreatedError)
        reader.fetcher.seek(ONE, 0)
        release(model, [])
        part = {"partition": 0, "high_watermark": 1, "stable_end": 1, "preferred": -1, "records": log.batches[0].data}
        request.reply(topics=[{"topic": "orders", "id": old_id, "partitions": [part]}])
        await reader.read(ONE, b"new")

    scenario(test)


# Sessions -------------------------------------------------------------------------------


@SEEDS
def test_evicted_sessions_lost_answers_and_throttling_repeat_and_skip_nothing(seed: int | None) -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        logs = model.create("orders", 4)
        rng = random.Random(seed or 0)
        expected: dict[TopicPartition, list[bytes]] = {log.name: [] for log in logs}
        reader.begin(*expected)
        for number in range(300):
            log = rng.choice(logs)
            expected[log.name].append(b"%d" % number)
            log.append(b"%d" % number)
            node = rng.choice(list(model.brokers))
            kind = rng.random()
            model.throttle_ms = 0
            if kind < 0.1:
                model.sessions[node].clear()
            elif kind < 0.2:
                for session in model.brokers[node].open_sessions:
                    session.close()
            elif kind < 0.3:
                model.throttle_ms = 100
            await asyncio.sleep(rng.random() * 0.3)
            reader.take()
            assert all(len(sessions) <= 2 for sessions in model.sessions.values())
        model.throttle_ms = 0
        await reader.until(lambda: sum(map(len, reader.records.values())) >= 300)
        assert reader.records == expected

    scenario(test, brokers=2, seed=seed)


def test_after_silence_the_next_fetch_says_everything_and_replaces_the_session() -> None:
    """The broker has processed the fetch before it, or not."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        (session,) = model.sessions[1]
        broker = model.brokers[1]
        hold_fetches(model)
        (await broker.arrival(FETCH, len(model.fetches()) + 1)).cut()
        following = (await broker.arrival(FETCH, len(model.fetches()) + 1)).values
        assert (following.session, following.session_epoch) == (session, 0)
        assert [part.offset for topic in following.topics for part in topic.partitions] == [1]

    scenario(test)


def _seek(fetcher: Fetcher) -> None:
    fetcher.seek(ONE, 0)


def _resume_later(fetcher: Fetcher) -> None:
    fetcher.resume([ONE])


@pytest.mark.parametrize("begin", [_seek, _resume_later])
def test_a_partition_waits_at_most_for_the_fetch_that_the_broker_holds(begin: Callable[[Fetcher], None]) -> None:
    """The broker holds the fetch of an idle partition, and gets one fetch at a time."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        one, two = model.create("orders", 2)
        one.append(b"a")
        two.append(b"b")
        reader.begin(ONE, TWO)
        await reader.until(lambda: len(reader.records) == 2)
        reader.records.clear()
        if begin is _resume_later:
            reader.fetcher.seek(ONE, 0)
            reader.fetcher.pause([ONE])
        await reader.nothing(5)
        begin(reader.fetcher)
        await reader.read(ONE, b"a", within=MAX_WAIT)

    scenario(test, max_wait=MAX_WAIT)


def test_brokers_forget_the_sessions_of_a_fetcher_that_is_closed() -> None:
    """They keep an unused session for minutes, and a thousand at most."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 2)
        model.create("orders", 2)
        cluster = await connect(model.settings)
        fetcher = Fetcher(cluster, read_committed=True, max_bytes=1 << 20, max_wait=10.0)
        fetcher.start()
        Reader(fetcher, cluster).begin(ONE, TWO)
        await asyncio.sleep(11)  # the first answers are there, and the next fetches wait for records
        assert [len(sessions) for sessions in model.sessions.values()] == [1, 1]
        before = asyncio.get_running_loop().time()
        await fetcher.close()
        assert asyncio.get_running_loop().time() - before < 1
        assert [len(sessions) for sessions in model.sessions.values()] == [0, 0]
        await cluster.close()
        await model.close()

    run_on_network(live)


def test_nothing_begins_again_after_the_end() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        model.change_fetch = lambda _at, part: part.update(error=29, records=b"")
        reader.begin(ONE)
        await reader.fault()
        await _move(model, reader, 2)
        await reader.fetcher.close()
        fetches = len(model.fetches(1))
        await asyncio.sleep(5 * FAULT_INTERVAL)
        assert (len(model.fetches(1)), len(model.fetches(2))) == (fetches, 0)

    scenario(test, brokers=2)


# Progress -------------------------------------------------------------------------------


def test_an_answer_that_moves_nothing_is_not_asked_for_again_and_again() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.append(b"b")
        old = log.batches[0].data
        model.change_fetch = lambda _at, part: part.update(records=old)
        reader.begin(ONE, at=1)
        fault = await reader.fault()
        assert isinstance(fault.error, CorruptRecordError)
        assert "no record from there on" in str(fault.error)
        assert len(model.fetches()) <= 5
        assert reader.fetcher.position(ONE) == 1
        model.change_fetch = lambda _at, _part: None
        await reader.read(ONE, b"b")

    scenario(test)


# Damaged copies ---------------------------------------------------------------------------


def test_a_batch_that_is_damaged_at_the_leader_is_read_from_another_replica() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.append(b"b")
        log.follower = 2
        log.damaged = {1}
        reader.begin(ONE)
        await reader.read(ONE, b"a", b"b", within=0.5)
        assert not reader.faults
        assert reader.fetcher.trouble(ONE) is None
        # The leader is asked again: nobody said that the other replica is nearer.
        log.damaged.clear()
        fetches = len(model.fetches(1))
        await reader.nothing(15)
        for value in (b"c", b"d"):
            log.append(value)
            await reader.read(ONE, value)
        assert len(model.fetches(1)) > fetches

    scenario(test, brokers=2)


def test_a_batch_that_is_damaged_at_a_nearer_follower_is_read_from_the_leader() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        log.damaged = {2}
        reader.begin(ONE)
        await reader.read(ONE, b"a", within=0.5)
        assert not reader.faults

    scenario(test, brokers=2, rack="here")


def test_a_batch_that_another_replica_returns_damaged_too_is_reported() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.append(b"b")
        log.follower = 2
        log.damaged = {1, 2}
        reader.begin(ONE)
        fault = await reader.fault()
        assert isinstance(fault.error, CorruptRecordError)
        assert reader.records.pop(ONE) == [b"a"]
        assert reader.fetcher.position(ONE) == 1
        assert len(model.fetches(2)) == 1
        await asyncio.sleep(5 * FAULT_INTERVAL)
        reader.take()
        assert len(model.fetches(2)) == 1
        log.damaged.clear()
        await reader.read(ONE, b"b", within=2 * FAULT_INTERVAL)

    scenario(test, brokers=2)


@pytest.mark.parametrize("others", [{"not_in_sync": {2}}, {"offline": {2}}], ids=str)
def test_a_damaged_batch_without_another_replica_is_reported_at_once(others: dict[str, set[int]]) -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        vars(log).update(others)
        log.damaged = {1}
        reader.begin(ONE)
        assert isinstance((await reader.fault()).error, CorruptRecordError)
        assert not model.fetches(2)

    scenario(test, brokers=2)


def test_a_batch_that_the_leader_itself_finds_corrupt_is_read_from_another_replica() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        errors = iter([2])

        def find_corrupt(_: TopicPartition, part: dict[str, Any]) -> None:
            part.update(error=next(errors, 0))

        model.change_fetch = find_corrupt
        reader.begin(ONE)
        await reader.read(ONE, b"a", within=0.5)
        assert not reader.faults
        assert model.fetches(2)

    scenario(test, brokers=2)


# Offsets that are not in the log ---------------------------------------


def test_a_follower_that_is_behind_neither_repeats_nor_skips() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.append(b"b")
        log.follower = 2
        log.follower_end = 0
        reader.begin(ONE, at=1)
        await reader.read(ONE, b"b", within=5)
        for number in range(20):
            log.append(b"%d" % number)
            await reader.read(ONE, b"%d" % number, within=5)
        assert not reader.faults
        # The leader would name the follower again with each answer.
        assert len(model.fetches(1)) + len(model.fetches(2)) < 60

    scenario(test, brokers=2, rack="here")


def test_a_nearer_follower_is_read_and_given_up_when_it_lost_its_log() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        assert model.fetches(2)
        log.follower_end = 0
        log.append(b"b")
        await reader.read(ONE, b"b", within=5)
        assert not reader.faults

    scenario(test, brokers=2, rack="here")


def _fall_behind(log: ModelLog) -> None:
    log.not_in_sync = {2}


def _fail_disk(log: ModelLog) -> None:
    log.offline = {2}


@pytest.mark.parametrize("change", [_fall_behind, _fail_disk])
def test_a_follower_that_new_metadata_report_as_worse_is_given_up(change: Callable[[ModelLog], None]) -> None:
    """It answers without an error, and knows nothing of the records that it lacks."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        assert model.fetches(2)
        log.follower_end = log.end
        log.append(b"b")
        await reader.nothing(2)
        change(log)
        await reader.refresh()
        await reader.read(ONE, b"b", within=1)
        assert not reader.faults

    scenario(test, brokers=2, rack="here")


def test_a_new_leader_names_the_nearest_replica_itself() -> None:
    """Also if no fetch was refused in between."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        reader.begin(ONE)
        await asyncio.sleep(1)
        assert model.fetches(2)
        log.lead(3)
        await reader.refresh()
        log.append(b"b")
        await reader.read(ONE, b"a", b"b")
        assert model.fetches(3)

    scenario(test, brokers=3, rack="here")


def test_a_nearer_follower_that_hangs_is_given_up_although_metadata_list_it() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.follower = 2
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        model.brokers[2].silent = True
        log.append(b"b")
        await reader.read(ONE, b"b", within=7)
        log.append(b"c")
        await reader.read(ONE, b"c", within=1)

    scenario(test, brokers=2, rack="here")


def test_an_offset_that_is_not_in_the_log_is_reported_until_a_seek() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a", b"b")
        log.append(b"c")
        log.delete_before(2)
        reader.begin(ONE)
        for _ in range(2):
            fault = await reader.fault()
            assert isinstance(fault.error, OffsetOutOfRangeError)
            assert fault.error.position == 0
        reader.fetcher.seek(ONE, 2)
        await reader.read(ONE, b"c")

    scenario(test)


def test_an_epoch_that_the_broker_has_forgotten_is_not_an_offset_outside_the_log() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.epoch = 3
        log.append(b"a")
        log.append(b"b")
        reader.begin(ONE, at=1, epoch=1)
        await reader.read(ONE, b"b")
        assert not reader.faults
        # Once the epoch is unknown, it is not said again for the same position.
        log.batches.clear()
        reader.fetcher.seek(ONE, 2, 1)
        fetches = len(model.fetches())
        await asyncio.sleep(3)
        assert len(model.fetches()) - fetches <= 8

    scenario(test)


@SEEDS
@pytest.mark.parametrize("appended", [1, 5])
def test_a_log_that_lost_what_was_read_is_noticed(appended: int, seed: int | None) -> None:
    """Also if the new log has outgrown the old position."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        for number in range(4):
            log.append(b"%d" % number)
        reader.begin(ONE)
        await reader.read(ONE, b"0", b"1", b"2", b"3")
        log.truncate(2)
        log.lead(2)
        new = [b"new %d" % number for number in range(appended)]
        for value in new:
            log.append(value)
        fault = await reader.fault()
        assert isinstance(fault.error, LogTruncatedError)
        assert (fault.error.resumes_at, fault.error.position) == (2, 4)
        reader.fetcher.seek(ONE, fault.error.resumes_at)
        await reader.read(ONE, *new)

    scenario(test, brokers=2, seed=seed)


def test_an_epoch_that_is_not_in_the_log_any_more_is_not_a_loss() -> None:
    """Compaction may have removed all its records; a seek to the same position would not help."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.epoch = 1
        log.append(b"a")
        log.append(b"b")
        log.epoch = 5
        log.append(b"c")
        reader.begin(ONE, at=2, epoch=3)
        await reader.read(ONE, b"c")
        assert not reader.faults

    scenario(test)


def test_the_newest_epoch_that_was_read_is_known_also_after_a_seek_back() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        log.lead(1)
        log.append(b"b")
        reader.begin(ONE)
        await reader.read(ONE, b"a", b"b")
        assert reader.fetcher.newest_epoch(ONE) == 1
        reader.fetcher.seek(ONE, 1, 0)
        assert reader.fetcher.newest_epoch(ONE) == 1
        reader.fetcher.seek(ONE, 2)
        assert reader.fetcher.newest_epoch(ONE) == -1, "not from there"
        log.append(b"c")
        await reader.read(ONE, b"c")
        assert reader.fetcher.newest_epoch(ONE) == 1
        model.create("orders")
        assert isinstance((await reader.fault()).error, TopicRecreatedError)
        reader.fetcher.seek(ONE, 0)
        assert reader.fetcher.newest_epoch(ONE) == -1

    scenario(test)


def test_a_seek_beyond_what_was_read_does_not_claim_an_epoch() -> None:
    """The records in between may be of another leader, and nothing is lost then."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        reader.fetcher.pause([ONE])
        log.lead(1)
        log.append(b"b")
        log.append(b"c")
        assert [reader.fetcher.epoch_at(ONE, offset) for offset in (0, 1, 2)] == [-1, 0, -1]
        reader.fetcher.seek(ONE, 2, reader.fetcher.epoch_at(ONE, 2))
        reader.fetcher.resume([ONE])
        await reader.read(ONE, b"c")
        assert not reader.faults

    scenario(test)


# Topics that are created again ----------------------------------------------------------


def test_a_topic_that_is_created_again_is_reported_once_and_not_read() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        # A fault that would be tried again after a while must not hide the one that needs a seek.
        model.change_fetch = lambda _at, part: part.update(error=2, records=b"")
        log.append(b"b")
        assert isinstance((await reader.fault()).error, CorruptRecordError)
        (new,) = model.create("orders")
        new.append(b"x", b"y")
        new.append(b"z")
        reader.cluster.request_refresh()
        model.change_fetch = lambda _at, _part: None
        assert isinstance((await reader.fault()).error, TopicRecreatedError)
        await reader.nothing(5 * FAULT_INTERVAL)
        reader.fetcher.seek(ONE, 0)
        await reader.read(ONE, b"x", b"y", b"z")

    scenario(test)


@pytest.mark.parametrize("topic_exists", [True, False])
def test_a_partition_that_is_created_later_is_read_soon(topic_exists: bool) -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        if topic_exists:
            model.create("orders")
        reader.begin(TWO)
        await reader.nothing(20)
        trouble = reader.fetcher.trouble(TWO)
        assert trouble is not None
        assert "orders/1 cannot be read: it does not exist, or has no leader now" in str(trouble.error)
        assert asyncio.get_running_loop().time() - trouble.since > 19
        looked_up = len(model.brokers[1].received(METADATA))
        assert looked_up < 50
        log = model.extend("orders") if topic_exists else model.create("orders", 2)[1]
        log.append(b"a")
        await reader.read(TWO, b"a", within=2)
        assert reader.fetcher.trouble(TWO) is None

    scenario(test)


# Topics without ids ---------------------------------------------------------------------


def test_brokers_whose_metadata_have_no_ids_are_asked_by_name() -> None:
    """They offer the newest version of Fetch all the same."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a", within=5)
        assert {request.version for request in model.brokers[1].received(FETCH)} == {12}

    scenario(test, prepare=lambda model: model.brokers[1].versions.update({METADATA: (9, 9)}))


def test_a_topic_without_an_id_is_read_beside_one_that_has_one() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        logs = [*model.create("orders"), *model.create("payments")]
        model.without_ids.add("orders")
        reader.begin(ONE, PAYMENTS)
        for version in (12, 17):
            for log in logs:
                log.append(b"%d" % version)
            for log in logs:
                await reader.read(log.name, b"%d" % version, within=5)
            await asyncio.sleep(0.1)  # the next fetch waits for records
            assert model.brokers[1].received(FETCH)[-1].version == version
            model.without_ids.clear()
            await reader.refresh()

    scenario(test)


# Leader epochs --------------------------------------------------------------------------


def test_an_epoch_that_only_a_dead_broker_knew_does_not_stop_the_reading() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.epoch = 7
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a")

        def claim(request: Any) -> None:
            log.leader, log.epoch = 3, 9
            model.describe(request)
            log.leader, log.epoch = 1, 7

        model.brokers[3].on(METADATA, claim)
        await reader.cluster.look_up_at(3, ["orders"])
        assert reader.cluster.metadata.leader(ONE) == Leader(3, 9)
        model.stop(3)
        log.append(b"b")
        await reader.read(ONE, b"b", within=3)
        assert reader.cluster.metadata.leader(ONE) == Leader(1, 7)

    scenario(test, brokers=3)


# Brokers that are gone ------------------------------------------------------------------


@SEEDS
def test_a_leader_that_is_gone_is_replaced_soon(seed: int | None) -> None:
    """The metadata that follow the loss of the connection may still name the old leader."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        model.stop(1)
        await reader.nothing(5)
        trouble = reader.fetcher.trouble(ONE)
        assert trouble is not None
        assert "the brokers did not return the records of orders/0" in str(trouble.error)
        assert trouble.error.retriable
        log.lead(2)
        log.append(b"b")
        await reader.read(ONE, b"b", within=5)
        assert reader.fetcher.trouble(ONE) is None

    scenario(test, brokers=3, seed=seed)


def test_a_leader_that_is_named_beside_an_error_is_asked_at_once() -> None:
    """Also if the metadata do not name it yet (KIP-951)."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        reader.begin(ONE)
        await reader.read(ONE, b"a")
        await asyncio.sleep(1)
        held = hold_fetches(model)
        await model.brokers[1].arrival(FETCH, len(model.fetches()) + 1)
        model.brokers[1].on(METADATA, lambda _: None)
        log.lead(model.add_broker())
        log.append(b"b")
        (request,) = held
        part = {"partition": 0, "error": 6, "leader": {"node": 2, "epoch": log.epoch}, "preferred": -1}
        request.reply(
            session=request.values.session,
            topics=[{"topic": "orders", "id": model.topic_ids["orders"], "partitions": [part]}],
            endpoints=[{"node": 2, "host": "kafka-2", "port": 9092}],
        )
        await reader.read(ONE, b"b", within=0.5)

    scenario(test)


def test_a_hanging_broker_delays_no_other_and_is_given_up_after_a_while() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        one, two = model.create("orders", 2)
        reader.begin(ONE, TWO)
        one.append(b"a")
        two.append(b"b")
        await reader.until(lambda: len(reader.records) == 2)
        reader.records.clear()
        model.brokers[1].silent = True
        for number in range(3):
            two.append(b"%d" % number)
            await reader.read(TWO, b"%d" % number, within=1)
        await reader.until(lambda: reader.fetcher.trouble(ONE) is not None, 7)
        assert reader.fetcher.trouble(TWO) is None
        model.brokers[1].silent = False
        one.append(b"c")
        await reader.read(ONE, b"c", within=20)

    scenario(test, brokers=2)


def test_a_broker_that_is_only_slow_is_read_all_the_same() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        slow = 12.0

        def answer_late(request: Any) -> None:
            asyncio.get_running_loop().call_later(slow, model.fetch, 1, request)

        model.brokers[1].on(FETCH, answer_late)
        reader.begin(ONE)
        await reader.read(ONE, b"a", within=60)

    scenario(test)


def test_a_timer_that_is_early_ends_a_pause_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop may run a timer early, by the resolution of its clock."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        answers = iter([6, 6])
        model.change_fetch = lambda _at, part: part.update(error=next(answers, 0))
        loop = asyncio.get_running_loop()
        call_at = loop.call_at
        monkeypatch.setattr(
            loop, "call_at", lambda when, *rest, **context: call_at(when - 0.001, *rest, **context), raising=False
        )
        reader.begin(ONE)
        await reader.read(ONE, b"a", within=5)

    scenario(test)


# Permissions ----------------------------------------------------------------------------


def test_a_denied_topic_is_named_until_it_is_allowed() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        (log,) = model.create("orders")
        log.append(b"a")
        model.denied.add("orders")
        reader.begin(ONE)
        await asyncio.sleep(1)
        trouble = reader.fetcher.trouble(ONE)
        assert trouble is not None
        assert isinstance(trouble.error, AuthorizationError)
        assert "read topic 'orders'" in str(trouble.error)
        model.denied.clear()
        await reader.read(ONE, b"a", within=3)

    scenario(test)


def test_an_error_of_a_partition_delays_no_other() -> None:
    async def test(model: ModelCluster, reader: Reader) -> None:
        one, two = model.create("orders", 2)
        one.append(b"a")
        two.append(b"b")

        def deny(at: TopicPartition, part: dict[str, Any]) -> None:
            if at == ONE:
                part.update(error=29, records=b"")

        model.change_fetch = deny
        reader.begin(ONE, TWO)
        fault = await reader.fault()
        assert isinstance(fault.error, AuthorizationError)
        await reader.read(TWO, b"b")
        for number in range(5):
            two.append(b"%d" % number)
            await reader.read(TWO, b"%d" % number, within=0.3)
        trouble = reader.fetcher.trouble(ONE)
        assert trouble is not None
        assert isinstance(trouble.error, AuthorizationError)
        reader.fetcher.pause([ONE])
        assert reader.fetcher.trouble(ONE) is None

    scenario(test)


# Bounds ---------------------------------------------------------------------------------


def test_no_more_is_fetched_than_the_bound_until_something_is_taken() -> None:
    """However many partitions there are, and however large their batches."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        logs = model.create("orders", 30)
        for log in logs:
            log.append(bytes(100_000))
        reader.begin(*(log.name for log in logs))
        await asyncio.sleep(10)
        assert reader.fetcher._buffered <= (1 << 20) + 200_100
        await reader.until(lambda: len(reader.records) == 30, 5)

    scenario(test)


def test_partitions_that_are_not_taken_do_not_stop_the_others() -> None:
    """Also if what was fetched of them reaches the bound."""

    async def test(model: ModelCluster, reader: Reader) -> None:
        logs = model.create("orders", 30)
        for log in logs[:20]:
            log.append(bytes(100_000))
        halted = {log.name for log in logs[:20]}
        reader.begin(*(log.name for log in logs))

        def of_others(partition: TopicPartition) -> Allowance:
            return Allowance(0, 0) if partition in halted else everything(partition)

        async with asyncio.timeout(10):
            while len(reader.fetcher._ready) < 20:
                reader.take(of_others)
                await asyncio.sleep(0.1)
        assert reader.fetcher._buffered > 1 << 20
        for number in range(10):
            # A consumer that waits for records takes nothing meanwhile.
            reader.take(of_others)
            await asyncio.sleep(3)
            for log in logs[20:]:
                log.append(b"%d" % number)
            async with asyncio.timeout(0.5):
                while sum(map(len, reader.records.values())) < 10 * (number + 1):
                    await reader.fetcher.readable.wait()
                    reader.take(of_others)
        assert not halted & reader.records.keys()

    scenario(test)


def test_what_a_batch_unpacks_to_counts() -> None:
    """A batch of 1 MB may unpack to a gigabyte: less is fetched of other partitions meanwhile."""
    limits: list[int] = []

    async def test(model: ModelCluster, reader: Reader) -> None:
        one, _ = model.create("orders", 2)
        for is_taken in (False, True):
            one.append(*[bytes(20_000)] * 45, codec=1)
            reader.begin(ONE, at=one.end - 45)
            await asyncio.sleep(0.2)
            reader.take(everything if is_taken else one_record)
            reader.begin(TWO)
            await asyncio.sleep(0.2)
            wanted = [fetch.topics[0].partitions[0] for fetch in model.fetches(2) if fetch.topics]
            limits.append(wanted[-1].max_bytes)
            reader.fetcher.remove([ONE, TWO])

    scenario(test, brokers=2)
    assert limits[0] < limits[1]
