"""Records are read completely, in order, once, and within their allowance."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from aioshard.errors import ClientLostError, OffsetOutOfRangeError, StateError
from aioshard.kafka.wire.requests import FETCH
from aioshard.ports import NOTHING, Allowance, FetchedBatch, Oversized
from aioshard.records import TopicPartition
from tests.kafka.client.members import EVERYTHING, Member, buffered, everything
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message

Join = Callable[..., Member]


def numbered(count: int, size: int = 20) -> list[Message]:
    return [(b"key-%d" % (number % 50), b"%06d" % number + bytes(size)) for number in range(count)]


async def ends_of(kafka: SharedKafka, topic: str) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, partition): end for partition, end in (await kafka.end_offsets(topic)).items()}


async def test_eight_partitions_are_read_completely_and_in_order(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=8)
    await kafka.produce(topic, numbered(20_000), headers=[("source", b"test"), ("empty", None)])
    reader = member()
    await reader.join(topic)

    await reader.read_to(await ends_of(kafka, topic))

    found = sorted((record for records in reader.records.values() for record in records), key=lambda r: r[1:3])
    assert found == await kafka.read(topic)
    assert found[0].headers == (("source", b"test"), ("empty", None))
    assert abs(found[0].timestamp - time.time()) < 60
    assert all(len(batch.records) <= 500 for batch in reader.batches)


async def test_tombstones_and_missing_keys_are_none(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", None), (None, b"v"), (b"", b"")])
    reader = member()
    await reader.join(topic)

    await reader.read_to({TopicPartition(topic, 0): 3})

    assert [(r.key, r.value, r.headers) for r in reader.records[TopicPartition(topic, 0)]] == [
        (b"k", None, ()),
        (None, b"v", ()),
        (b"", b"", ()),
    ]


async def test_no_allowance_pattern_loses_or_repeats_records(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=4)
    chance = random.Random(7)
    messages = [(b"%d" % number, bytes(chance.choice((0, 10, 100, 3000)))) for number in range(4000)]
    await kafka.produce(topic, messages)
    reader = member()
    await reader.join(topic)
    given: dict[TopicPartition, Allowance] = {}

    def allowance(topic_partition: TopicPartition) -> Allowance:
        records = chance.choice((0, 1, 2, 30, 700))
        size = chance.choice((0, 400, 1000, 5000, 100_000))
        given[topic_partition] = Allowance(records, size, chance.random() < 0.1)
        return given[topic_partition]

    ends = await ends_of(kafka, topic)
    async with asyncio.timeout(60):
        while any(reader.next_offsets.get(at, 0) < end for at, end in ends.items()):
            given.clear()
            found = [item for item in await reader.poll(allowance) if isinstance(item, FetchedBatch)]
            for topic_partition, records, sizes, *_ in found:
                limit, room, alone = given[topic_partition]
                assert len(records) <= limit
                assert sum(sizes) <= room or (alone and sum(sizes[1:]) <= room)
            most = max((a.records for a in given.values()), default=0)
            assert sum(len(batch.records) for batch in found) <= min(most, 500)

    assert {at: reader.offsets(at) for at in ends} == {at: list(range(end)) for at, end in ends.items()}


async def test_a_partition_without_allowance_does_not_stop_the_others(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=2)
    held, free = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for partition in (0, 1):
        await kafka.produce(topic, numbered(3000, size=1000), partition=partition)
    reader = member()
    await reader.join(topic)

    await reader.read_to({free: 3000}, lambda at: EVERYTHING if at == free else NOTHING)

    assert held not in reader.records
    assert reader.transport.position(held) == 0
    await reader.read_to({held: 3000})
    assert reader.offsets(held) == reader.offsets(free) == list(range(3000))


async def test_an_allowance_is_shared_by_all_partitions(kafka: SharedKafka, topic: str, member: Join) -> None:
    """An engine says what is free now: two partitions that both take it would take it twice."""
    await kafka.create_topic(topic, partitions=4)
    for partition in range(4):
        await kafka.produce(topic, numbered(100), partition=partition)
    reader = member()
    await reader.join(topic)
    ends = await ends_of(kafka, topic)

    def allowance(_: TopicPartition) -> Allowance:
        return Allowance(60, 40 * 600)

    while any(reader.next_offsets.get(at, 0) < end for at, end in ends.items()):
        found = [item for item in await reader.poll(allowance) if isinstance(item, FetchedBatch)]
        assert sum(len(batch.records) for batch in found) <= 60
        assert sum(sum(batch.sizes) for batch in found) <= 40 * 600


async def test_every_partition_has_its_turn(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=4)
    for partition in range(4):
        await kafka.produce(topic, numbered(2000), partition=partition)
    reader = member()
    await reader.join(topic)
    ends = await ends_of(kafka, topic)
    await reader.poll_until(lambda: len(buffered(reader)) == 4, lambda _: NOTHING)

    for _ in range(4):
        await reader.poll(lambda _: Allowance(100, 1 << 20))

    assert {at: len(records) for at, records in reader.records.items()} == dict.fromkeys(ends, 100)


async def test_a_record_larger_than_its_allowance_waits_and_is_read_alone(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic)
    at = TopicPartition(topic, 0)
    await kafka.produce(topic, [(None, bytes(10)), (None, bytes(50_000)), (None, bytes(10))])
    reader = member()
    await reader.join(topic)

    def small(_: TopicPartition) -> Allowance:
        return Allowance(100, 2000)

    await reader.poll_until(lambda: bool(reader.oversized), small)

    assert reader.offsets(at) == [0]
    assert reader.next_offsets[at] == reader.transport.position(at) == 1, (
        "the position is that of the record that waits"
    )
    assert reader.oversized == [Oversized(at, 50_500)]

    started = time.monotonic()
    assert await reader.poll(small, 0.2) == [Oversized(at, 50_500)], "it is reported again"
    assert time.monotonic() - started > 0.15, "but not again and again"

    found = await reader.poll(lambda _: Allowance(100, 2000, alone=True), 1)
    assert [len(batch.records) for batch in found] == [1], "nothing else is taken with it"
    await reader.read_to({at: 3}, small)
    assert reader.offsets(at) == [0, 1, 2]


async def test_a_waiting_record_survives_pause_and_is_refetched_after_seek(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic)
    at = TopicPartition(topic, 0)
    await kafka.produce(topic, [(None, bytes(10)), (None, bytes(5000))])
    reader = member()
    await reader.join(topic)
    await reader.poll_until(lambda: bool(reader.oversized), lambda _: Allowance(9, 1000))

    reader.transport.pause([at])
    assert await reader.poll(timeout=0.2) == []
    reader.transport.resume([at])
    await reader.read_to({at: 2})
    assert reader.offsets(at) == [0, 1]

    reader.next_offsets.clear()
    reader.transport.seek(at, 1)
    await reader.poll_until(lambda: len(reader.offsets(at)) == 3)
    assert reader.offsets(at) == [0, 1, 1]


async def test_a_paused_partition_returns_nothing(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=2)
    paused, running = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for partition in (0, 1):
        await kafka.produce(topic, numbered(1000), partition=partition)
    reader = member()
    await reader.join(topic)
    reader.transport.pause([paused])

    await reader.read_to({running: 1000})

    assert paused not in reader.records
    reader.transport.resume([paused])
    await reader.read_to({paused: 1000})
    assert reader.offsets(paused) == list(range(1000))


async def test_a_poll_ends_at_its_timeout_or_when_woken(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    reader = member()
    await reader.join(topic)

    started = time.monotonic()
    assert await reader.poll(timeout=0.3) == []
    assert 0.25 < time.monotonic() - started < 3
    assert await reader.poll(timeout=0) == []

    waiting = asyncio.create_task(reader.poll(timeout=30))
    await asyncio.sleep(0)
    reader.transport.wake()
    async with asyncio.timeout(10):
        assert await waiting == []


async def test_a_woken_poll_uses_the_current_allowances(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, numbered(10))
    reader = member()
    await reader.join(topic)
    allowed = NOTHING
    await reader.poll_until(lambda: bool(buffered(reader)), lambda _: NOTHING)
    waiting = asyncio.create_task(reader.poll(lambda _: allowed, timeout=30))
    await asyncio.sleep(0)

    allowed = EVERYTHING
    reader.transport.wake()

    async with asyncio.timeout(10):
        await waiting
    assert reader.offsets(TopicPartition(topic, 0)) == list(range(10))


async def test_a_cancelled_poll_loses_nothing(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, numbered(3000))
    reader = member()
    await reader.join(topic)
    ends = await ends_of(kafka, topic)
    chance = random.Random(3)

    async with asyncio.timeout(60):
        while any(reader.next_offsets.get(at, 0) < end for at, end in ends.items()):
            polling = asyncio.create_task(reader.poll(lambda _: Allowance(40, 1 << 20), 0.2))
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            polling.cancel()
            await asyncio.wait([polling])

    assert {at: reader.offsets(at) for at in ends} == {at: list(range(end)) for at, end in ends.items()}


async def test_positions_pass_markers_and_aborted_batches(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    at = TopicPartition(topic, 0)
    written = await kafka.produce_transaction(topic, numbered(10), transactional_id=topic)
    await kafka.produce_transaction(topic, numbered(700), transactional_id=topic, abort=True)
    written += await kafka.produce_transaction(topic, numbered(6), transactional_id=topic)
    await kafka.produce_transaction(topic, numbered(3), transactional_id=topic, abort=True)
    end = (await kafka.end_offsets(topic))[0]
    assert end == 10 + 700 + 6 + 3 + 4
    reader = member()
    await reader.join(topic)

    await reader.read_to({at: end}, lambda _: Allowance(4, 1 << 20))

    assert reader.offsets(at) == [offset for _, offset in written]
    assert reader.next_offsets[at] == reader.transport.position(at) == reader.transport.end_offset(at) == end
    assert not reader.batches[-1].records, "what ends the log holds no record: the batch is there for its position"


async def test_read_uncommitted_sees_aborted_records(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    at = TopicPartition(topic, 0)
    await kafka.produce_transaction(topic, numbered(4), transactional_id=topic, abort=True)
    reader = member(isolation_level="read_uncommitted")
    await reader.join(topic)

    await reader.read_to({at: 5})

    assert reader.offsets(at) == [0, 1, 2, 3]


async def test_read_committed_ends_at_an_open_transaction(kafka: SharedKafka, topic: str, member: Join) -> None:
    from aiokafka import AIOKafkaProducer  # noqa: PLC0415

    await kafka.create_topic(topic)
    at = TopicPartition(topic, 0)
    await kafka.produce(topic, numbered(3))
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)
    async with producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        reader = member()
        await reader.join(topic)

        await reader.read_to({at: 3})

        assert await reader.poll(timeout=0.3) == []
        assert reader.transport.end_offset(at) == 3
        assert (await reader.transport.log_ranges([at]))[at] == (0, 3, 4)
        await producer.commit_transaction()
        await reader.read_to({at: 5})
    assert reader.offsets(at) == [0, 1, 2, 3]
    assert (await reader.transport.log_ranges([at]))[at] == (0, 5, 5)


async def test_positions_pass_compacted_offsets(kafka: SharedKafka, topic: str, member: Join) -> None:
    quick = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "min.compaction.lag.ms": "0",
        "delete.retention.ms": "0",
    }
    await kafka.create_topic(topic, config=quick)
    at = TopicPartition(topic, 0)
    for _ in range(3):
        await kafka.produce(topic, [(b"key-%d" % number, b"v") for number in range(100)])
    async with asyncio.timeout(60):
        while len(compacted := await kafka.read(topic)) >= 300:
            await kafka.produce(topic, [(b"other", b"v")])  # only a segment that is not the newest is compacted
    end = (await kafka.end_offsets(topic))[0]
    reader = member()
    await reader.join(topic)

    await reader.read_to({at: end})

    assert set(reader.offsets(at)) <= {record.offset for record in compacted} | set(range(300, end))
    assert len(reader.offsets(at)) < 300
    assert reader.next_offsets[at] == end


async def test_a_position_outside_the_log_faults_only_its_partition(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, partitions=2)
    gone, fine = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for partition in (0, 1):
        await kafka.produce(topic, numbered(100), partition=partition)
    await kafka.delete_records(topic, {0: 60})
    reader = member()
    await reader.join(topic)

    await reader.read_to({fine: 100})
    await reader.poll_until(lambda: bool(reader.faults))

    (fault, *_) = reader.faults
    assert fault.topic_partition == gone
    assert isinstance(fault.error, OffsetOutOfRangeError)
    assert (fault.error.topic_partition, fault.error.position) == (gone, 0)
    assert reader.transport.position(gone) == 0, "the client must not choose a position"
    reader.transport.seek(gone, (await reader.transport.log_ranges([gone]))[gone].start)
    await reader.read_to({gone: 100})
    assert reader.offsets(gone) == list(range(60, 100))


@pytest.mark.chaos
async def test_a_fault_is_reported_about_once_a_second(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    reader = member(start=77)
    await reader.join(topic)
    give_up = time.monotonic() + 2.5
    while time.monotonic() < give_up:
        await reader.poll()
    assert 1 < len(reader.faults) <= 4


async def test_a_partition_cannot_resume_without_a_position(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    reader = member()
    reader.at_assign = lambda _partitions, _membership: None
    await reader.join(topic)

    assert reader.transport.position(TopicPartition(topic, 0)) is None
    with pytest.raises(StateError, match="before it was seeked"):
        reader.transport.resume([TopicPartition(topic, 0)])


async def test_calls_for_a_foreign_partition_do_nothing(kafka: SharedKafka, topic: str, member: Join) -> None:
    await kafka.create_topic(topic)
    reader = member()
    foreign = TopicPartition("somewhere", 4)
    for _ in ("before the start", "after it"):
        reader.transport.pause([foreign])
        reader.transport.resume([foreign])
        reader.transport.seek(foreign, 3)
        reader.transport.wake()
        assert reader.transport.position(foreign) is None
        assert reader.transport.end_offset(foreign) is None
        if not reader.assignments:
            with pytest.raises(ClientLostError, match="not started"):
                await reader.poll()
            await reader.join(topic)


async def test_prefetch_is_bounded_and_leaves_room_for_every_partition(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    bound = 512 * 1024
    await kafka.create_topic(topic, partitions=8)
    for partition in range(8):
        await kafka.produce(topic, [(None, bytes(1000))] * 500, partition=partition, batch_bytes=10_000)
    reader = member(max_buffered_bytes=2 * bound)
    await reader.join(topic)

    await reader.poll_until(lambda: len(buffered(reader)) == 8, lambda _: NOTHING)

    fetched = [partition.chunk_bytes for partition in reader.transport._fetcher._partitions.values()]
    assert sum(fetched) <= bound
    assert max(fetched) > bound // 8, "the first partitions use what is free"


async def test_a_fetch_returns_large_batches_of_many_partitions(kafka: SharedKafka, topic: str, member: Join) -> None:
    """With an equal share of the bound for each partition, none of these batches fits, and a fetch brings only one."""
    await kafka.create_topic(topic, partitions=64)
    for partition in range(64):
        await kafka.produce(topic, [(None, bytes(1000))] * 100, partition=partition)
    reader = member(max_buffered_bytes=8 * 1024 * 1024)
    await reader.join(topic)
    fetches = count_fetches(reader)

    await reader.read_to(await ends_of(kafka, topic))

    assert len(fetches) < 32


@pytest.mark.chaos
async def test_drained_partitions_share_a_fetch(kafka: SharedKafka, topic: str, member: Join) -> None:
    """A fetch costs several times as much as a partition in it."""
    await kafka.create_topic(topic, partitions=500)
    await kafka.produce(topic, [(None, bytes(10))] * 1000)
    reader = member()
    await reader.join(topic)
    fetches = count_fetches(reader)

    async def let_the_fetcher_run() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    while sum(map(len, reader.records.values())) < 1000:
        await reader.poll(lambda _: Allowance(5, 10_000))
        await let_the_fetcher_run()

    assert len(reader.batches) >= 500
    assert len(fetches) < 50, "each poll has drained a partition"


def count_fetches(reader: Member) -> list[Any]:
    """The fetches of a reader, from now on."""
    cluster = reader.transport._cluster
    ask = cluster.ask
    fetches: list[Any] = []

    async def count(node: int, request: Any, **options: Any) -> Any:
        if request.api is FETCH:
            fetches.append(request)
        return await ask(node, request, **options)

    cluster.ask = count  # type: ignore[method-assign]
    return fetches


async def test_a_drained_partition_is_refetched_without_waiting_for_idle_ones(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """A broker answers one fetch at a time, and holds one that has nothing to return for `fetch_max_wait`."""
    await kafka.create_topic(topic, partitions=8)
    for _ in range(20):
        await kafka.produce(topic, [(None, bytes(1000)) for _ in range(1000)], partition=0)
    reader = member(fetch_max_wait=20, max_buffered_bytes=1024 * 1024)
    await reader.join(topic)

    started = time.monotonic()
    await reader.read_to({TopicPartition(topic, 0): 20_000}, everything)

    assert time.monotonic() - started < 15, "not even one fetch was held"
