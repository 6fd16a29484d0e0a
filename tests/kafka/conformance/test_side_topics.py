"""The contract of `aioshard.ports.SideTopics`, tested on both implementations, and extras of the in-memory one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import pytest
from aiokafka import AIOKafkaProducer

from aioshard.errors import ClientLostError, ConnectError, CorruptRecordError, SideTopicError, TransportError
from aioshard.kafka.side_topics import KafkaSideTopics
from aioshard.ports import SideTopics
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings
from aioshard.testing import InMemoryBroker, InMemorySideTopics
from tests.support.brokers import SharedKafka

Commit = Callable[[], Awaitable[None]]


class Harness(Protocol):
    """A topic with two partitions that only this test uses, and the actions of a test outside the client."""

    one: TopicPartition
    two: TopicPartition

    async def prepare(self) -> None: ...

    def side_topics(self) -> SideTopics: ...

    async def publish(self, partition: TopicPartition, *values: bytes) -> None: ...

    async def leave_hole(self, partition: TopicPartition, count: int) -> None: ...

    async def delete_before(self, partition: TopicPartition, offset: int) -> None: ...

    async def begin_transaction(self, partition: TopicPartition, value: bytes) -> Commit: ...

    async def aclose(self) -> None: ...


class InMemoryHarness:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        del request
        self.one, self.two = TopicPartition("parked", 0), TopicPartition("parked", 1)
        self.broker = InMemoryBroker(clock=lambda: 0.0)
        self.made: list[InMemorySideTopics] = []

    async def prepare(self) -> None:
        self.broker.create_topic("parked", 2)

    def side_topics(self) -> InMemorySideTopics:
        self.made.append(InMemorySideTopics(self.broker))
        return self.made[-1]

    async def publish(self, partition: TopicPartition, *values: bytes) -> None:
        for value in values:
            self.broker.publish(partition.topic, value, key=value, partition=partition.partition)

    async def leave_hole(self, partition: TopicPartition, count: int) -> None:
        self.broker.log(*partition).skip(count)

    async def delete_before(self, partition: TopicPartition, offset: int) -> None:
        self.broker.log(*partition).truncate_before(offset)

    async def begin_transaction(self, partition: TopicPartition, value: bytes) -> Commit:
        self.broker.log(*partition).begin_transaction()
        await self.publish(partition, value)

        async def commit() -> None:
            self.broker.log(*partition).end_transaction(commit=True)

        return commit

    async def aclose(self) -> None:
        for side_topics in self.made:
            await side_topics.close()


class KafkaHarness:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.kafka: SharedKafka = request.getfixturevalue("kafka")
        topic: str = request.getfixturevalue("topic")
        self.one, self.two = TopicPartition(topic, 0), TopicPartition(topic, 1)
        self.made: list[KafkaSideTopics] = []
        self.producers: list[AIOKafkaProducer] = []

    async def prepare(self) -> None:
        # Not compacted: DeleteRecords is for topics that delete.
        await self.kafka.create_topic(self.one.topic, 2)

    def side_topics(self) -> KafkaSideTopics:
        self.made.append(KafkaSideTopics(Settings(bootstrap_servers=self.kafka.bootstrap, fetch_max_wait=0.05)))
        return self.made[-1]

    async def publish(self, partition: TopicPartition, *values: bytes) -> None:
        await self.kafka.produce(partition.topic, [(value, value) for value in values], partition.partition)

    async def leave_hole(self, partition: TopicPartition, count: int) -> None:
        aborted = [(b"k", b"aborted")] * (count - 1)
        identity = f"{partition.topic}-{partition.partition}"
        await self.kafka.produce_transaction(
            partition.topic, aborted, partition.partition, abort=True, transactional_id=identity
        )
        await self._until_no_transaction_is_open()

    async def _until_no_transaction_is_open(self) -> None:
        """The marker of a transaction comes a moment after its end was acknowledged."""
        topic = self.one.topic
        async with asyncio.timeout(20):
            while await self.kafka.end_offsets(topic, "read_committed") != await self.kafka.end_offsets(topic):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def delete_before(self, partition: TopicPartition, offset: int) -> None:
        await self.kafka.delete_records(partition.topic, {partition.partition: offset})

    async def begin_transaction(self, partition: TopicPartition, value: bytes) -> Commit:
        identity = f"open-{partition.topic}"
        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap, transactional_id=identity)
        self.producers.append(producer)
        await producer.start()
        await producer.begin_transaction()
        await producer.send_and_wait(partition.topic, value, partition=partition.partition)

        async def commit() -> None:
            await producer.commit_transaction()
            await self._until_no_transaction_is_open()

        return commit

    async def aclose(self) -> None:
        for side_topics in (*self.made,):
            await side_topics.close()
        for producer in self.producers:
            await producer.stop()


@pytest.fixture(
    params=[
        pytest.param(InMemoryHarness, id="in memory"),
        pytest.param(KafkaHarness, id="kafka", marks=pytest.mark.kafka),
    ]
)
def unprepared(request: pytest.FixtureRequest) -> Harness:
    """Not async: the broker's fixture is not."""
    made: Harness = request.param(request)
    return made


@pytest.fixture
async def harness(unprepared: Harness) -> AsyncIterator[Harness]:
    await unprepared.prepare()
    yield unprepared
    await unprepared.aclose()


async def take(side_topics: SideTopics, count: int) -> list[Record]:
    """Poll until exactly *count* records have arrived."""
    found: list[Record] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await side_topics.poll(1.0)
    assert len(found) == count
    return found


async def catch_up(side_topics: SideTopics, partition: TopicPartition) -> list[Record]:
    """Poll until the position is at the end."""
    end = await side_topics.end(partition)
    found: list[Record] = []
    async with asyncio.timeout(20):
        while side_topics.position(partition) < end:
            found += await side_topics.poll(1.0)
    return found


def offsets(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]


# Both: topics ----------------------------------------------------------------------------


async def test_a_topic_is_created_once(harness: Harness) -> None:
    side_topics = harness.side_topics()
    created = TopicPartition(f"{harness.one.topic}-new", 2)

    await side_topics.ensure(created.topic, 3)
    await side_topics.ensure(created.topic, 3)
    await side_topics.ensure(created.topic, 2)

    assert await side_topics.end(created) == 0


async def test_a_topic_with_too_few_partitions_is_refused(harness: Harness) -> None:
    side_topics = harness.side_topics()
    topic = f"{harness.one.topic}-new"
    await side_topics.ensure(topic, 1)

    with pytest.raises(SideTopicError, match=r"has 1 partitions and needs 3.*: add 2") as caught:
        await side_topics.ensure(topic, 3)

    assert not caught.value.retriable


# Both: watching --------------------------------------------------------------------------


async def test_a_watched_partition_is_read_from_its_start(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    side_topics = harness.side_topics()

    side_topics.watch([harness.one])
    assert side_topics.position(harness.one) == 0
    records = await take(side_topics, 2)

    assert [(record.topic_partition, record.offset, record.key, record.value) for record in records] == [
        (harness.one, 0, b"a", b"a"),
        (harness.one, 1, b"b", b"b"),
    ]
    assert side_topics.position(harness.one) == 2


async def test_records_of_a_partition_are_read_in_order_and_once(harness: Harness) -> None:
    values = [b"%04d" % number for number in range(2000)]
    await harness.publish(harness.one, *values)
    await harness.publish(harness.two, *values)
    side_topics = harness.side_topics()
    side_topics.watch([harness.one, harness.two])

    records = await take(side_topics, 4000)

    for partition in (harness.one, harness.two):
        assert offsets([record for record in records if record.topic_partition == partition]) == list(range(2000))


async def test_a_waiting_poll_returns_arriving_records(harness: Harness) -> None:
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    polling = asyncio.create_task(side_topics.poll(60.0))
    await asyncio.sleep(0)

    await harness.publish(harness.one, b"a")

    async with asyncio.timeout(10):
        assert offsets(await polling) == [0]


async def test_a_waiting_poll_reads_newly_watched_partitions(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    side_topics = harness.side_topics()
    polling = asyncio.create_task(side_topics.poll(60.0))
    await asyncio.sleep(0)

    side_topics.watch([harness.one])

    async with asyncio.timeout(10):
        assert offsets(await polling) == [0]


async def test_an_empty_poll_returns_at_its_timeout(harness: Harness) -> None:
    side_topics = harness.side_topics()
    clock = asyncio.get_running_loop().time
    for partitions in ([], [harness.one]):
        side_topics.watch(partitions)
        before = clock()
        assert await side_topics.poll(0.2) == []
        assert 0.19 <= clock() - before < 5


async def test_a_cancelled_poll_loses_nothing(harness: Harness) -> None:
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    polling = asyncio.create_task(side_topics.poll(60.0))
    await asyncio.sleep(0)

    await harness.publish(harness.one, b"a")
    polling.cancel()
    await asyncio.wait([polling])
    came = [] if polling.cancelled() else polling.result()

    assert offsets(came or await take(side_topics, 1)) == [0]


async def test_kept_partitions_continue_and_rewatched_ones_restart(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    await harness.publish(harness.two, b"b", b"c")
    side_topics = harness.side_topics()
    side_topics.watch([harness.one, harness.two])
    await take(side_topics, 3)

    side_topics.watch([harness.one])
    assert (side_topics.position(harness.one), side_topics.position(harness.two)) == (1, 0)
    side_topics.watch([harness.one, harness.two])

    assert [record.value for record in await take(side_topics, 2)] == [b"b", b"c"]
    await harness.publish(harness.one, b"d")
    assert [record.value for record in await take(side_topics, 1)] == [b"d"]


async def test_an_unwatched_partition_returns_nothing(harness: Harness) -> None:
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    polling = asyncio.create_task(side_topics.poll(60.0))
    await asyncio.sleep(0)

    side_topics.watch([harness.two])
    await harness.publish(harness.one, b"a")
    await harness.publish(harness.two, b"b")

    async with asyncio.timeout(10):
        assert [record.value for record in await polling] == [b"b"]


async def test_the_position_passes_holes_and_reaches_the_end(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    await harness.leave_hole(harness.one, 3)
    await harness.publish(harness.one, b"b")
    await harness.leave_hole(harness.one, 2)
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])

    records = await catch_up(side_topics, harness.one)

    assert offsets(records) == [0, 4]
    assert side_topics.position(harness.one) == await side_topics.end(harness.one) == 7


async def test_a_later_hole_moves_the_position_without_records(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    await take(side_topics, 1)

    await harness.leave_hole(harness.one, 2)

    assert await catch_up(side_topics, harness.one) == []
    assert side_topics.position(harness.one) == 3


async def test_a_log_with_a_later_start_is_read_from_there(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b", b"c")
    await harness.delete_before(harness.one, 2)
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])

    assert offsets(await catch_up(side_topics, harness.one)) == [2]


async def test_a_log_truncated_during_the_read_is_read_on(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    await take(side_topics, 1)
    side_topics.watch([harness.one])
    await harness.publish(harness.one, b"b", b"c", b"d")
    await harness.delete_before(harness.one, 3)

    assert offsets(await catch_up(side_topics, harness.one))[-1:] == [3]


async def test_an_open_transaction_is_not_read_and_keeps_the_end_open(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    commit = await harness.begin_transaction(harness.one, b"b")
    await harness.publish(harness.one, b"c")
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])

    with pytest.raises(TransportError):
        await side_topics.end(harness.one)
    assert offsets(await take(side_topics, 1)) == [0]
    assert await side_topics.poll(0.2) == []
    await commit()

    assert [record.value for record in await catch_up(side_topics, harness.one)] == [b"b", b"c"]


async def test_a_missing_partition_is_reported_and_others_are_read(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    side_topics = harness.side_topics()
    missing = TopicPartition(harness.one.topic, 7)
    side_topics.watch([missing, harness.one])

    assert offsets(await take(side_topics, 1)) == [0]
    with pytest.raises(TransportError, match=f"{missing} cannot be read"):
        await take(side_topics, 1)
    await harness.publish(harness.one, b"b")
    async with asyncio.timeout(10):
        while side_topics.position(harness.one) < 2:
            with contextlib.suppress(TransportError):
                await side_topics.poll(1.0)


# Both: questions -------------------------------------------------------------------------


async def test_any_record_can_be_read_independently_of_watches(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b", b"c")
    side_topics = harness.side_topics()
    side_topics.watch([harness.two])

    records = await side_topics.read(harness.one, 1)

    assert [(record.offset, record.value) for record in records][:1] == [(1, b"b")]
    assert offsets(await side_topics.read(harness.one, 2)) == [2]
    assert side_topics.position(harness.one) == 0


async def test_reading_at_the_end_returns_nothing(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    await harness.leave_hole(harness.one, 2)
    side_topics = harness.side_topics()

    assert [await side_topics.read(harness.one, offset) for offset in (1, 2, 3, 10)] == [[]] * 4


async def test_a_deleted_record_is_skipped_for_the_next_one(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    await harness.leave_hole(harness.one, 2)
    await harness.publish(harness.one, b"c")
    await harness.delete_before(harness.one, 1)
    side_topics = harness.side_topics()

    assert offsets(await side_topics.read(harness.one, 0))[:1] == [1]
    assert offsets(await side_topics.read(harness.one, 2)) == [4]


async def test_a_request_for_a_missing_partition_is_an_error(harness: Harness) -> None:
    side_topics = harness.side_topics()
    missing = TopicPartition(f"{harness.one.topic}-missing", 0)

    answers = await asyncio.gather(side_topics.end(missing), side_topics.read(missing, 0), return_exceptions=True)

    for answer in answers:
        assert isinstance(answer, TransportError)
        assert f"{missing} cannot be read" in str(answer)


async def test_requests_are_answered_while_a_poll_waits(harness: Harness) -> None:
    await harness.publish(harness.two, b"a")
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    polling = asyncio.create_task(side_topics.poll(60.0))
    await asyncio.sleep(0)

    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(side_topics.read(harness.two, 0) for _ in range(5)))
        assert await side_topics.end(harness.two) == 1

    assert [offsets(answer) for answer in answers] == [[0]] * 5
    polling.cancel()
    await asyncio.wait([polling])


# Both: the end ---------------------------------------------------------------------------


async def test_after_close_nothing_is_read(harness: Harness) -> None:
    side_topics = harness.side_topics()
    side_topics.watch([harness.one])
    polling = asyncio.create_task(side_topics.poll(60.0))
    await asyncio.sleep(0)

    await side_topics.close()

    async with asyncio.timeout(10):
        for asking in (polling, side_topics.poll(1.0), side_topics.end(harness.one), side_topics.read(harness.one, 0)):
            with pytest.raises(ClientLostError, match="closed"):
                await asking


async def test_an_unused_reader_can_be_closed(harness: Harness) -> None:
    await harness.side_topics().close()


# In memory -------------------------------------------------------------------------------

PARKED = TopicPartition("parked", 0)


def make_side_topics() -> tuple[InMemoryBroker, InMemorySideTopics]:
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    broker.create_topic("parked", 1)
    side_topics = InMemorySideTopics(broker)
    side_topics.watch([PARKED])
    return broker, side_topics


async def test_fetches_fail_until_allowed() -> None:
    broker, side_topics = make_side_topics()
    broker.publish("parked", b"a")
    broker.fail_fetches("parked", 0, CorruptRecordError("bad checksum"))

    for asking in (side_topics.poll(1.0), side_topics.read(PARKED, 0)):
        with pytest.raises(CorruptRecordError, match="bad checksum"):
            await asking
    broker.fail_fetches("parked", 0, None)

    assert offsets(await side_topics.poll(1.0)) == [0]


async def test_an_outage_reads_nothing_and_loses_nothing() -> None:
    broker, side_topics = make_side_topics()
    broker.publish("parked", b"a")
    broker.available = False

    for asking in (side_topics.poll(0.01), side_topics.end(PARKED), side_topics.read(PARKED, 0)):
        with pytest.raises(ConnectError, match="not available"):
            await asking
    with pytest.raises(ConnectError, match="not available"):
        await side_topics.ensure("more", 1)
    broker.available = True

    assert offsets(await side_topics.poll(1.0)) == [0]


async def test_a_compacted_topic_is_read_over_its_holes() -> None:
    broker, side_topics = make_side_topics()
    for value in (b"old", b"new"):
        broker.publish("parked", value, key=b"k")
    broker.log("parked", 0).skip(1)
    broker.log("parked", 0).compact()

    assert [record.value for record in await side_topics.poll(1.0)] == [b"new"]
    assert side_topics.position(PARKED) == await side_topics.end(PARKED) == 3


async def test_a_poll_returns_a_bounded_number_of_records_per_partition() -> None:
    broker, _ = make_side_topics()
    side_topics = InMemorySideTopics(broker, max_records=2)
    side_topics.watch([PARKED])
    for _ in range(3):
        broker.publish("parked", b"v")

    assert [offsets(await side_topics.poll(1.0)) for _ in range(2)] == [[0, 1], [2]]
    assert offsets(await side_topics.read(PARKED, 0)) == [0, 1]
