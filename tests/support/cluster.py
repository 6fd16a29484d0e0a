"""Actions on a Kafka cluster from outside: topics, records, transactions, committed offsets.

Everything here has a deadline and leaves no connection open.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.errors import (
    GroupLoadInProgressError,
    InvalidReplicationFactorError,
    KafkaError,
    NotCoordinatorForGroupError,
    for_code,
)
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.structs import OffsetAndMetadata

from aioshard.records import Record
from tests.support.certificates import Certificates

DEADLINE = 30.0
MARKER_INTERVAL = 0.01
"""Seconds that any one call may take."""

POLL_INTERVAL = 0.02
"""Seconds between two questions where the broker offers no event to wait for."""

BATCH_BYTES = 512 * 1024

Message = tuple[bytes | None, bytes | None]
"""Key and value."""

Isolation = Literal["read_committed", "read_uncommitted"]

_partition_for_key = DefaultPartitioner()


class KafkaCluster:
    """A running cluster, known by its address; any number of processes may use one.

    Attributes:
        bootstrap: Address of the plain listener, where everything is allowed.
        replication: Of the topics that it creates.
    """

    replication = 1

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @property
    def reachable(self) -> str:
        """Address of the brokers that answer at the moment, for actions from outside."""
        return self.bootstrap

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        *,
        assignment: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Creates a topic; returns when every partition has a leader.

        Args:
            name: Of the topic.
            partitions: How many.
            config: Of the topic.
            assignment: The nodes of each partition, the one that should lead first, instead of *partitions*.
        """
        if assignment is None:
            topic = NewTopic(name, partitions, self.replication, topic_configs=dict(config or {}))
        else:
            partitions = len(assignment)
            topic = NewTopic(name, -1, -1, assignment, dict(config or {}))
        async with self._admin() as admin:
            await _create(admin, topic)
            await self._until_led(admin, name, partitions)

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic; returns when the cluster does not list it any more."""
        async with self._admin() as admin:
            _raise_first_error((await admin.delete_topics([name])).topic_error_codes)
            while name in await admin.list_topics():  # noqa: ASYNC110  (a broker sends no event)
                await asyncio.sleep(POLL_INTERVAL)

    async def add_partitions(self, name: str, total: int) -> None:
        """Grows a topic to *total* partitions; returns when each has a leader."""
        async with self._admin() as admin:
            await admin.create_partitions({name: NewPartitions(total)})
            await self._until_led(admin, name, total)

    async def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Deletes the records of each partition that lie before the given offset."""
        wanted = {TopicPartition(topic, partition): RecordsToDelete(offset) for partition, offset in before.items()}
        async with self._admin() as admin:
            await admin.delete_records(wanted)

    async def partitions(self, topic: str) -> list[TopicPartition]:
        """The topic's partitions, in order.

        Raises:
            UnknownTopicOrPartitionError: The topic does not exist.
        """
        async with self._admin() as admin:
            (found,) = await admin.describe_topics([topic])
        if found["error_code"]:
            raise for_code(found["error_code"])(f"topic {topic!r}")
        return [
            TopicPartition(topic, number)
            for number in sorted(partition["partition"] for partition in found["partitions"])
        ]

    async def produce(
        self,
        topic: str,
        messages: Sequence[Message],
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        *,
        batch_bytes: int = BATCH_BYTES,
        deadline: float = DEADLINE,
    ) -> list[tuple[int, int]]:
        """Appends records, in order per partition, and waits until the broker has them all.

        Without *partition* a key goes where Java's and aiokafka's default partitioner send it, and records
        without a key go round the partitions. No batch is larger than *batch_bytes*.

        Returns:
            Partition and offset of each message, in the order given.
        """
        producer = AIOKafkaProducer(
            bootstrap_servers=self.reachable,
            acks="all",
            enable_idempotence=self.replication > 1,  # a leader that dies before it answers has the records already
            max_batch_size=batch_bytes,
            request_timeout_ms=round(1000 * deadline),
        )
        async with asyncio.timeout(deadline), producer:
            return await _send(producer, topic, messages, partition, headers)

    async def produce_transaction(
        self,
        topic: str,
        messages: Sequence[Message],
        partition: int | None = None,
        *,
        abort: bool = False,
        transactional_id: str = "harness",
    ) -> list[tuple[int, int]]:
        """Appends records in one transaction, which ends committed or, with *abort*, aborted.

        Either way the transaction leaves one marker, an offset without a record, in each partition it touched. Brokers
        answer before the markers are written; this returns when they are.
        """
        producer = AIOKafkaProducer(
            bootstrap_servers=self.reachable, transactional_id=transactional_id, max_batch_size=BATCH_BYTES
        )
        async with asyncio.timeout(DEADLINE), producer:
            await producer.begin_transaction()
            positions = await _send(producer, topic, messages, partition, ())
            await (producer.abort_transaction() if abort else producer.commit_transaction())
            last = dict(sorted(positions))
            while not await self._lie_behind(topic, last):  # noqa: ASYNC110 - nothing tells when a marker is written
                await asyncio.sleep(MARKER_INTERVAL)
        return positions

    async def _lie_behind(self, topic: str, last: Mapping[int, int]) -> bool:
        """Whether in each partition something follows its *last* record."""
        ends = await self.end_offsets(topic)
        return all(ends[partition] > offset + 1 for partition, offset in last.items())

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's committed offset of each partition that has one."""
        async with self._admin() as admin:
            while True:
                with contextlib.suppress(NotCoordinatorForGroupError, GroupLoadInProgressError):
                    found = await committed_offsets(admin, group)
                    break
                await asyncio.sleep(POLL_INTERVAL)
        return {at.partition: found[at].offset for at in found if at.topic == topic and found[at].offset >= 0}

    async def end_offsets(self, topic: str, isolation: Isolation = "read_uncommitted") -> dict[int, int]:
        """One past the last record of each partition, or with `read_committed` the last stable offset."""
        partitions = await self.partitions(topic)
        async with self._reader(isolation) as reader:
            found = await reader.end_offsets(partitions)
        return {at.partition: offset for at, offset in found.items()}

    async def start_offsets(self, topic: str) -> dict[int, int]:
        """The first offset that each partition still has."""
        partitions = await self.partitions(topic)
        async with self._reader("read_uncommitted") as reader:
            found = await reader.beginning_offsets(partitions)
        return {at.partition: offset for at, offset in found.items()}

    async def lag(self, group: str, topic: str) -> int:
        """Last stable offset minus committed offset, over all partitions; the log's start where none is."""
        ends = await self.end_offsets(topic, "read_committed")
        starts = await self.start_offsets(topic)
        committed = await self.committed(group, topic)
        return sum(end - committed.get(partition, starts[partition]) for partition, end in ends.items())

    async def wait_for_lag(self, group: str, topic: str, most: int = 0, timeout: float = DEADLINE) -> None:
        """Returns when the group's lag on the topic is at most *most*.

        Raises:
            TimeoutError: It still was more after *timeout* seconds; the message says how much.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        while (lag := await self.lag(group, topic)) > most:
            if loop.time() > give_up:
                offsets = await self.committed(group, topic)
                raise TimeoutError(f"group {group!r} still lags {lag} on {topic!r} after {timeout:g} s: {offsets}")
            await asyncio.sleep(POLL_INTERVAL)

    async def read(self, topic: str, isolation: Isolation = "read_committed") -> list[Record]:
        """Everything that the topic holds now, by partition and offset."""
        records: list[Record] = []
        partitions = await self.partitions(topic)
        async with self._reader(isolation) as reader:
            ends = await reader.end_offsets(partitions)
            reader.assign(partitions)
            await reader.seek_to_beginning(*partitions)
            for at in partitions:
                while await reader.position(at) < ends[at]:
                    for batch in (await reader.getmany(timeout_ms=200)).values():
                        records += [_record(found) for found in batch]
        return sorted(records, key=lambda record: (record.partition, record.offset))

    async def _until_led(self, admin: Any, topic: str, partitions: int) -> None:
        """Waits until the broker that answers knows the topic as it should be."""
        while True:
            (found,) = await admin.describe_topics([topic])
            led = [
                partition
                for partition in found["partitions"]
                if partition["error_code"] == 0 and partition["leader"] >= 0
            ]
            if found["error_code"] == 0 and len(led) == partitions:
                return
            await asyncio.sleep(POLL_INTERVAL)

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[Any]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.reachable)
        async with asyncio.timeout(DEADLINE):
            try:
                await admin.start()
                while not await _names_controller(admin):  # noqa: ASYNC110  (a broker sends no event)
                    await asyncio.sleep(POLL_INTERVAL)
                yield admin
            finally:
                await admin.close()

    @asynccontextmanager
    async def _reader(self, isolation: Isolation) -> AsyncIterator[Any]:
        reader = AIOKafkaConsumer(bootstrap_servers=self.reachable, isolation_level=isolation, fetch_max_wait_ms=50)
        async with asyncio.timeout(DEADLINE), reader:
            yield reader


class GuardedCluster(KafkaCluster):
    """A cluster that has a guarded listener as well.

    Attributes:
        secure_bootstrap: Address of the SASL_SSL listener (PLAIN, SCRAM-SHA-256 and -512), which allows nobody
            anything without an ACL. Its users: `tests.support.kafka_properties`; how to log in and
            what to allow: `tests.support.access`.
        certificates: The authority that the SASL_SSL listener's certificate comes from, and another.
    """

    def __init__(self, bootstrap: str, secure_bootstrap: str, certificates: Certificates) -> None:
        super().__init__(bootstrap)
        self.secure_bootstrap = secure_bootstrap
        self.certificates = certificates


def _raise_first_error(answers: Sequence[tuple[Any, ...]]) -> None:
    for topic, code, *rest in answers:
        if code:
            raise for_code(code)(f"topic {topic!r}: {rest[0] if rest else 'refused'}")


async def _send(
    producer: Any,
    topic: str,
    messages: Sequence[Message],
    partition: int | None,
    headers: Sequence[tuple[str, bytes | None]],
) -> list[tuple[int, int]]:
    """Packs whole batches itself: about ten times quicker than `producer.send` for each record."""
    partitions = sorted(await producer.partitions_for(topic))
    lanes: dict[int, list[int]] = {}
    for index, (key, _) in enumerate(messages):
        if partition is not None:
            lane = partition
        elif key is None:
            lane = partitions[index % len(partitions)]
        else:
            lane = _partition_for_key(key, partitions, partitions)
        lanes.setdefault(lane, []).append(index)
    positions: list[tuple[int, int]] = [(-1, -1)] * len(messages)

    async def send(lane: int, indexes: list[int]) -> None:
        sent: list[tuple[asyncio.Future[Any], list[int]]] = []
        for batch, inside in _batches(producer, messages, indexes, list(headers)):
            sent.append((await producer.send_batch(batch, topic, partition=lane), inside))
        for acknowledged, inside in sent:
            base = (await acknowledged).offset
            for distance, index in enumerate(inside):
                positions[index] = (lane, base + distance)

    await asyncio.gather(*(send(lane, indexes) for lane, indexes in lanes.items()))
    return positions


def _batches(
    producer: Any, messages: Sequence[Message], indexes: Sequence[int], headers: list[tuple[str, bytes | None]]
) -> Iterator[tuple[Any, list[int]]]:
    """Full batches of the messages at *indexes*, each with the indexes inside it."""
    batch = producer.create_batch()
    inside: list[int] = []
    for index in indexes:
        key, value = messages[index]
        if batch.append(key=key, value=value, timestamp=None, headers=headers) is None:
            yield batch, inside
            batch, inside = producer.create_batch(), []
            batch.append(key=key, value=value, timestamp=None, headers=headers)
        inside.append(index)
    yield batch, inside


def _record(found: Any) -> Record:
    return Record(
        found.topic, found.partition, found.offset, found.key, found.value, tuple(found.headers), found.timestamp / 1000
    )


async def committed_offsets(admin: Any, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
    """All that a group has committed; aiokafka's own question takes "I am not the coordinator" for "nothing".

    Raises:
        KafkaError: The answer of the broker, for the group or for a partition.
    """
    answer = await admin._send_request_to_node(await admin.find_coordinator(group), OffsetFetchRequest(group, None))
    codes = [answer.error_code, *(code for _, partitions in answer.topics for *_, code in partitions)]
    if code := next(filter(None, codes), 0):
        raise for_code(code)(f"committed offsets of {group!r}")
    return {
        TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata)
        for topic, partitions in answer.topics
        for partition, offset, metadata, _ in partitions
    }


async def _create(admin: Any, topic: NewTopic) -> None:
    """Creates a topic as soon as the cluster has brokers for it: one that was frozen may be fenced for a moment."""
    while True:
        try:
            _raise_first_error((await admin.create_topics([topic])).topic_errors)
        except InvalidReplicationFactorError:
            await asyncio.sleep(POLL_INTERVAL)
        else:
            return


async def _names_controller(admin: Any) -> bool:
    """Whether the cluster names a controller; one that was frozen names no broker until its heartbeats are back."""
    if admin._client.cluster.controller is None:
        await admin._client.force_metadata_update()
    return admin._client.cluster.controller is not None


async def is_ready(bootstrap: str, **login: Any) -> bool:
    """Whether the cluster lets us in and answers; a plain listener must also know who coordinates groups."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5000, **login)
    try:
        await admin.start()
        if not login:
            await admin.find_coordinator("harness")
    except KafkaError:
        return False
    finally:
        await admin.close()
    return True
