"""Offsets moved by others, with or without stored metadata: no record is skipped or needlessly repeated."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.structs import OffsetAndMetadata
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from aioshard import App
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.errors import NotDrainedError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed
from aioshard.settings import Settings
from tests.guarantees.durable_member import PROTOCOLS, settings_for_protocol
from tests.kafka.faults.support import Ledger, kick, until
from tests.support.brokers import SharedKafka
from tests.support.cluster import DEADLINE, KafkaCluster, Message

RECORDS = 60
STUCK = 3, 30
"""Offsets of each partition whose records cannot be finished at first."""
FINISHED_AHEAD = Run(4, 30), Run(31, RECORDS)
LOOK_INTERVAL = 0.05
SETTINGS: Mapping[str, Any] = {
    "commit_interval": 0.2,
    "session_timeout": 20,
    "heartbeat_interval": 3,
    "rebalance_timeout": 30,
    "drain_timeout": 1,
    "shutdown_timeout": 1,
    "start_timeout": 60,
    "fetch_max_wait": 0.05,
}


class Group:
    """A topic each of whose partitions was finished but for two records, its group, and the tools of others.

    Attributes:
        ledger: The runs of the handler of its apps.
    """

    def __init__(self, kafka: KafkaCluster, brokers: KafkaAdmin, topic: str, group: str, protocol: str) -> None:
        self.kafka = kafka
        self.ledger = Ledger()
        self.ledger.hold(lambda record: record.offset in STUCK)
        self._brokers = brokers
        self._topic = topic
        self._group = group
        self._protocol = protocol
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap})

    def app(self, policy: Literal["earliest", "latest"] = "earliest") -> App:
        settings = settings_for_protocol(self._protocol, SETTINGS)
        app = App(self._group, bootstrap_servers=self.kafka.bootstrap, auto_offset_reset=policy, **settings)
        app.consume(self._topic, shard_by="record", concurrency=500)(self.ledger.handle)
        return app

    async def create(self, partitions: int) -> None:
        await self.kafka.create_topic(self._topic, partitions)
        some: list[Message] = [(None, b"x")] * RECORDS
        for number in range(partitions):
            await self.kafka.produce(self._topic, some, number)

    async def commits(self) -> dict[int, Committed]:
        return {at.partition: found for at, found in (await self._brokers.all_commits(self._group)).items()}

    async def until_stored(self, partitions: int) -> dict[int, Committed]:
        """Return when all records but the stuck ones are stored as finished."""
        async with asyncio.timeout(DEADLINE):
            while True:
                found = await self.commits()
                read = [
                    CommitMetadata.read(committed.metadata, committed.offset).finished for committed in found.values()
                ]
                if read == [FINISHED_AHEAD] * partitions:
                    return found
                await asyncio.sleep(LOOK_INTERVAL)

    async def run_once(self, partitions: int) -> dict[int, Committed]:
        """One life of an app, which finishes all but the stuck records; returns its commits."""
        app = self.app()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(app)
            await self.until_stored(partitions)
            with pytest.raises(NotDrainedError):
                await stack.aclose()
        found = await self.until_stored(partitions)
        assert {committed.offset for committed in found.values()} == {STUCK[0]}
        self.ledger.release()
        self.ledger.finished.clear()
        return found

    @property
    def ran(self) -> dict[int, Counter[int]]:
        """How often each record was finished since then, by partition."""
        ran: dict[int, Counter[int]] = {}
        for record in self.ledger.finished:
            ran.setdefault(record.partition, Counter())[record.offset] += 1
        return ran

    # The tools of others ----------------------------------------------------------------

    async def delete_group(self) -> None:
        """With confluent-kafka's administration."""
        (answer,) = self._admin.delete_consumer_groups([self._group]).values()
        await asyncio.wrap_future(answer)

    async def alter(self, offsets: Mapping[int, int]) -> None:
        """With confluent-kafka's administration, which stores no metadata."""
        offsets_of_partitions = [
            TopicPartition(self._topic, partition, offset) for partition, offset in offsets.items()
        ]
        request = ConsumerGroupTopicPartitions(self._group, offsets_of_partitions)
        (answer,) = self._admin.alter_consumer_group_offsets([request]).values()
        stored = await asyncio.wrap_future(answer)
        for stored_offset in stored.topic_partitions:
            if stored_offset.error is not None:
                raise KafkaException(stored_offset.error)

    async def carry(self, offsets: Mapping[int, Committed]) -> None:
        """With a consumer that is not a member and keeps the metadata."""
        async with (
            asyncio.timeout(DEADLINE),
            AIOKafkaConsumer(
                bootstrap_servers=self.kafka.bootstrap, group_id=self._group, enable_auto_commit=False
            ) as outside,
        ):
            due = {KafkaPartition(self._topic, at): OffsetAndMetadata(*found) for at, found in offsets.items()}
            outside.assign(list(due))
            await outside.commit(due)


@pytest.fixture
async def world(kafka: SharedKafka, topic: str, group: str, protocol: str) -> AsyncIterator[Group]:
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        yield Group(kafka, brokers, topic, group, protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_offset_moved_while_the_group_is_stopped_is_used(
    world: Group, kafka: SharedKafka, topic: str, group: str
) -> None:
    """Each partition is moved in another way; the policy would skip to the end wherever it was asked."""
    lower, same, higher, carried_lower, carried_higher, copied, deleted = range(7)
    await world.create(7)
    before = await world.run_once(7)

    await world.delete_group()
    await world.alter({lower: 1, same: 3, higher: 40})
    text = before[0].metadata
    await world.carry(
        {carried_lower: Committed(1, text), carried_higher: Committed(40, text), copied: Committed(3, text)}
    )
    async with world.app("latest"):
        await kafka.wait_for_lag(group, topic)

    every = range(RECORDS)
    assert world.ran == {
        lower: Counter(every[1:]),
        same: Counter(every[3:]),
        higher: Counter(every[40:]),
        carried_lower: Counter(every[1:]),
        carried_higher: Counter(every[40:]),
        copied: Counter(STUCK),
        deleted: Counter(every),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_offsets_of_a_running_group_cannot_be_moved(
    world: Group, kafka: SharedKafka, topic: str, group: str
) -> None:
    await world.create(1)
    async with world.app():
        before = await world.until_stored(1)

        for attempt in (world.alter({0: 1}), world.alter({0: 40}), world.delete_group()):
            with pytest.raises(KafkaException) as refused:
                await attempt
            assert refused.value.args[0].code() in {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP}

        assert await world.commits() == before
        world.ledger.release()
        await kafka.wait_for_lag(group, topic)

    assert world.ran == {0: Counter(range(RECORDS))}


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.chaos)])
async def test_an_offset_moved_while_a_member_is_dropped_is_used(
    world: Group, kafka: SharedKafka, topic: str, group: str
) -> None:
    """As after a process has hung for longer than its session: it continues and does not know yet."""
    lower, higher, carried = range(3)
    await world.create(3)
    app = world.app()
    async with app:
        before = await world.until_stored(3)
        world.ledger.finished.clear()
        member = str(app.statistics().member_id)

        await kick(kafka, group, member)
        await world.alter({lower: 1, higher: 40})
        await world.carry({carried: Committed(1, before[carried].metadata)})
        await until(lambda: app.statistics().member_id not in {member, None, ""}, app.explain)
        world.ledger.release()
        await kafka.wait_for_lag(group, topic)
        assert app.statistics().trouble is None

    due = {lower: set(range(1, RECORDS)), higher: set(range(40, RECORDS)), carried: set(range(1, RECORDS))}
    assert {at: runs.keys() | set(STUCK) for at, runs in world.ran.items()} == {
        at: runs | set(STUCK) for at, runs in due.items()
    }
    assert all(due[at] <= runs.keys() for at, runs in world.ran.items())
    again = {offset for runs in world.ran.values() for offset, count in runs.items() if count > 1}
    assert again <= set(STUCK), "only what still ran when the group dropped us can end twice"
    assert {at: found.offset for at, found in (await world.commits()).items()} == dict.fromkeys(due, RECORDS)
