"""aiokafka's bare client: metadata, offsets and single fetches, without a group and without a consumer's state.

aiokafka's consumer does not fit for reading without a group. Each change of its partitions discards everything it has
fetched, it creates the topics that it looks up, and it does not report that nothing is left up to the end of a log.
Callers that restore state need to know that.
"""

import random
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult, PartitionRecords
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.memory_records import MemoryRecords

from aioshard.errors import TransportError
from aioshard.kafka.aiokafka.answers import corrupt_record, error_for, log_offsets, raise_for
from aioshard.kafka.aiokafka.connections import close_client, refuse_useless_connections
from aioshard.kafka.aiokafka.decoder import Chunk
from aioshard.kafka.errors import OUT_OF_RANGE
from aioshard.records import Record, TopicPartition, by_topic

START, END = -2, -1
"""Which offset of a log `BareClient.log_offset` fetches."""
_MOST_BYTES = 1024 * 1024
"""Maximum bytes per response, unless a single batch is larger; decoding a response blocks the event loop."""
_EVERYTHING = 1 << 62
_PREFERRED_REPLICA = 11
"""The fetch response version from which on each partition names a preferred replica."""


class Fetched(NamedTuple):
    """The result of one fetch for one partition.

    Invariants:
        * `records` contains everything readable from the requested offset up to `next_offset`.
        * No records, no error and an unchanged `next_offset`: nothing is left up to `end`, or that is unknown.
    """

    records: list[Record]
    next_offset: int
    end: int
    """The last stable offset; -1 if there is an error."""
    error: TransportError | kafka.KafkaError | None = None
    """Why nothing, or nothing after the records, can be read."""


class BareClient(AIOKafkaClient):  # type: ignore[misc]
    """One life of a client without a group."""

    def __init__(self, options: Mapping[str, Any], *, creates_topics: bool = False) -> None:
        """Make a client; connects to nothing yet.

        Args:
            options: aiokafka's options.
            creates_topics: Whether brokers may create the topics that it looks up.

        Raises:
            ValueError: aiokafka rejects the value of an option.
        """
        super().__init__(**options)
        self.updated_at = 0.0
        """When a broker last answered a look-up, by `time.monotonic`."""
        self._creates_topics = creates_topics
        refuse_useless_connections(self)

    async def begin(self) -> bool:
        """Connect; return whether an advertised broker has answered."""
        await self.bootstrap()
        return bool(await self.force_metadata_update())

    @property
    def lost(self) -> BaseException | None:
        """Why the client is no longer usable; None while it is."""
        if self._sync_task is None or not self._sync_task.done():
            return None
        error: BaseException | None = None if self._sync_task.cancelled() else self._sync_task.exception()
        return error or kafka.KafkaConnectionError("closed")

    async def tear_down(self) -> None:
        """End every task and connection, in any state; takes at most 2 s."""
        await close_client(self, ())

    # Metadata ---------------------------------------------------------------------------

    def leader(self, topic_partition: TopicPartition) -> int | None:
        """Return the last known leader of a partition; None if unknown."""
        node: int | None = self.cluster.leader_for_partition(topic_partition)
        return None if node == -1 else node

    def may_not_see(self, topic: str) -> bool:
        """Whether the brokers refused access to a topic in the latest look-up."""
        return topic in self.cluster.unauthorized_topics

    def partition_count(self, topic: str) -> int:
        """Return the last known number of partitions; 0 if unknown."""
        return len(self.cluster.partitions_for_topic(topic) or ())

    async def look_up(self, *topics: str) -> bool:
        """Look up topics now, and in every later look-up; return whether the brokers answered."""
        self._topics.update(topics)
        return await self._metadata_update(self.cluster, self._topics)

    def forget(self, topic: str) -> None:
        """Leave a topic out of later look-ups."""
        self._topics.discard(topic)

    async def _metadata_update(self, cluster_metadata: Any, topics: Any) -> bool:
        """Replace aiokafka's method, which creates the topics it requests, and requests all if it follows none."""
        request = MetadataRequest(sorted(topics), allow_auto_topic_creation=self._creates_topics)
        nodes = [broker.nodeId for broker in self.cluster.brokers()]
        for node in random.sample(nodes, len(nodes)):
            connection = await self._get_conn(node)
            if connection is None:
                continue
            try:
                response = await connection.send(request)
            except (kafka.KafkaError, TimeoutError):
                continue
            if not response.brokers:
                return False
            cluster_metadata.update_metadata(response)
            self.updated_at = time.monotonic()
            return True
        cluster_metadata.failed_update(None)
        return False

    # Offsets and records ----------------------------------------------------------------

    async def log_offset(
        self, node: int, topic_partition: TopicPartition, which: int, isolation: int = READ_COMMITTED
    ) -> int:
        """Fetch the `START` or the `END` of a partition's log, by default up to the last stable offset.

        Raises:
            KafkaError: The broker did not answer.
        """
        request = OffsetRequest(-1, isolation, by_topic([topic_partition], lambda at: (at.partition, which)))
        # On a separate connection: on the other one, the request would wait for the fetch in progress.
        response = await self.send(node, request, group=ConnectionGroup.COORDINATION)
        return log_offsets(response, [topic_partition])[topic_partition]

    async def fetch(
        self,
        node: int,
        offsets: Mapping[TopicPartition, int],
        wait: float,
        *,
        aside: bool = False,
        isolation: int = READ_COMMITTED,
    ) -> dict[TopicPartition, Fetched]:
        """Fetch from each partition once.

        An offset before the log continues at the log's start. So does one beyond its end: the log must be a new one.

        Args:
            node: The broker that leads all the partitions.
            offsets: The offset to fetch from, per partition. If nothing is returned for the first partition, and the
                broker did not throttle us, it certainly has no records up to its end. For a later partition, that is
                certain only if those before it returned nothing either.
            wait: Seconds that the broker may wait for something to return.
            aside: Whether to use the connection that carries no waiting fetch.
            isolation: `READ_COMMITTED` or `READ_UNCOMMITTED`.

        Raises:
            KafkaError: The broker did not answer, or answered with an error.
        """
        wanted: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, partition), offset in offsets.items():
            wanted.setdefault(topic, []).append((partition, offset, _MOST_BYTES))
        request = FetchRequest(round(wait * 1000), 1, _MOST_BYTES, isolation, list(wanted.items()))
        response = await self.send(
            node, request, group=ConnectionGroup.COORDINATION if aside else ConnectionGroup.DEFAULT
        )
        raise_for(getattr(response, "error_code", 0))  # from version 7 on
        parts = {
            TopicPartition(topic, partition): rest
            for topic, partitions in response.topics
            for partition, *rest in partitions
        }
        certain = response.throttle_time_ms == 0
        results: dict[TopicPartition, Fetched] = {}
        in_order = [
            (TopicPartition(topic, number), offset)
            for topic, requests in wanted.items()
            for number, offset, _ in requests
        ]
        for topic_partition, offset in in_order:
            code, highwater, *rest = parts.get(topic_partition, (kafka.UnknownTopicOrPartitionError.errno, -1))
            if code == OUT_OF_RANGE:
                results[topic_partition] = Fetched([], await self.log_offset(node, topic_partition, START), -1)
            elif code:
                results[topic_partition] = Fetched([], offset, -1, error_for(code))
            else:
                end = rest[0] if isolation == READ_COMMITTED else highwater
                aborted = rest[2] if response.API_VERSION >= _PREFERRED_REPLICA else rest[-2]
                results[topic_partition] = _decoded(
                    topic_partition, offset, end, aborted, rest[-1], certain=certain, isolation=isolation
                )
                certain = certain and not rest[-1]
        return results


def _decoded(
    topic_partition: TopicPartition,
    offset: int,
    end: int,
    aborted: Any,
    data: bytes | None,
    *,
    certain: bool,
    isolation: int,
) -> Fetched:
    """Decode the bytes that a broker returned for one partition from *offset* on."""
    memory = MemoryRecords(data or b"")
    if not memory.has_next():
        if not data:
            return Fetched([], max(offset, end) if certain else offset, end)
        incomplete = TransportError(f"the record at offset {offset} of {topic_partition} is incomplete")
        return Fetched([], offset, end, incomplete if certain else None)
    part = PartitionRecords(topic_partition, memory, aborted, offset, None, None, True, isolation)  # noqa: FBT003 - aiokafka's
    result = FetchResult(topic_partition, assignment=None, partition_records=part, backoff=0)
    chunk = Chunk(topic_partition, result, data or b"")
    records, _ = chunk.take(_EVERYTHING, _EVERYTHING, alone=True)
    error = None if chunk.error is None else corrupt_record(chunk.error, topic_partition, chunk.next_offset)
    return Fetched(records, chunk.next_offset, end, error)
