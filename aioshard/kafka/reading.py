"""Single fetches from partitions on aiokafka's bare client, without a group and without a consumer's state.

aiokafka's consumer does not fit. Each change of its partitions discards everything it has fetched, it creates the
topics that it looks up, and it does not report that nothing is left up to the end of a log. Callers that restore
state need to know that.
"""

import contextlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult, PartitionRecords
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.memory_records import MemoryRecords

from aioshard.errors import TransportError
from aioshard.kafka.answers import log_offsets, topic_leaders
from aioshard.kafka.chunk import Chunk
from aioshard.kafka.connecting import advertised_by, connected
from aioshard.kafka.connections import close_client, is_connected, pace_look_ups, refuse_useless_connections
from aioshard.kafka.translate import corrupt_record, error_for, raise_for
from aioshard.records import Record, TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Fetched", "ReadingClient", "connect"]

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


class ReadingClient(AIOKafkaClient):  # type: ignore[misc]
    """One life of a client that reads and never creates topics. Unusable after `tear_down`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Make a client; connects to nothing yet.

        Raises:
            ValueError: aiokafka rejects the value of an option.
        """
        super().__init__(**options)
        refuse_useless_connections(self)
        pace_look_ups(self, self._retry_backoff)

    @property
    def connected(self) -> bool:
        """Whether a connection to any broker is open."""
        return is_connected(self)

    @property
    def lost(self) -> BaseException | None:
        """Why the client is no longer usable; None while it is."""
        if self._sync_task is None or not self._sync_task.done():
            return None
        error: BaseException | None = None if self._sync_task.cancelled() else self._sync_task.exception()
        return error or kafka.KafkaConnectionError("closed")

    async def tear_down(self) -> None:
        """End every task and connection, in any state; takes at most 2 s."""
        await close_client(self, [])

    # Metadata ---------------------------------------------------------------------------

    def leader(self, topic_partition: TopicPartition) -> int | None:
        """Return the last known leader of a partition; None if unknown."""
        node: int | None = self.cluster.leader_for_partition(topic_partition)
        return None if node == -1 else node

    def may_not_see(self, topic: str) -> bool:
        """Whether the brokers refused access to a topic in the latest look-up."""
        return topic in self.cluster.unauthorized_topics

    def follow(self, topic: str) -> None:
        """Include a topic in every look-up from now on."""
        self._topics.add(topic)

    async def look_up(self, topic: str) -> bool:
        """Look up a topic, and all followed ones; return whether the brokers answered."""
        self.follow(topic)
        return bool(await self.force_metadata_update())

    async def partition_count(self, topic: str) -> int:
        """Fetch the current number of partitions; 0 if the topic does not exist or this user may not see it.

        Raises:
            KafkaError: The broker did not answer.
        """
        request = MetadataRequest([topic], allow_auto_topic_creation=False)
        answer = await self.send(self.get_random_node(), request)
        with contextlib.suppress(kafka.TopicAuthorizationFailedError):
            return len(topic_leaders(answer, topic))
        return 0

    async def _metadata_update(self, cluster_metadata: Any, topics: Any) -> bool:
        """Replace aiokafka's method, which creates the topics it requests, and requests all if it follows none."""
        request = MetadataRequest(sorted(topics), allow_auto_topic_creation=False)
        nodes = [broker.nodeId for broker in self.cluster.brokers()]
        for node in random.sample(nodes, len(nodes)):
            connection = await self._get_conn(node)
            if connection is None:
                continue
            try:
                answer = await connection.send(request)
            except (kafka.KafkaError, TimeoutError):
                continue
            if not answer.brokers:
                return False
            cluster_metadata.update_metadata(answer)
            return True
        cluster_metadata.failed_update(None)
        return False

    # Offsets and records ----------------------------------------------------------------

    async def end_offset(self, node: int, topic_partition: TopicPartition) -> int:
        """Fetch the last stable offset of a partition; raises the same errors as `start_offset`."""
        return await self._offset(node, topic_partition, -1)

    async def start_offset(self, node: int, topic_partition: TopicPartition) -> int:
        """Fetch the first offset of a partition's log.

        Raises:
            KafkaError: The broker did not answer.
        """
        return await self._offset(node, topic_partition, -2)

    async def _offset(self, node: int, topic_partition: TopicPartition, which: int) -> int:
        topic, partition = topic_partition
        request = OffsetRequest(-1, READ_COMMITTED, [(topic, [(partition, which)])])
        # On a separate connection: on the other one, the request would wait for the fetch in progress.
        answer = await self.send(node, request, group=ConnectionGroup.COORDINATION)
        return log_offsets(answer, [topic_partition])[topic_partition]

    async def fetch(
        self, node: int, offsets: Mapping[TopicPartition, int], wait: float, *, aside: bool = False
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

        Raises:
            KafkaError: The broker did not answer, or answered with an error.
        """
        by_topic: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, partition), offset in offsets.items():
            by_topic.setdefault(topic, []).append((partition, offset, _MOST_BYTES))
        request = FetchRequest(round(wait * 1000), 1, _MOST_BYTES, READ_COMMITTED, list(by_topic.items()))
        group = ConnectionGroup.COORDINATION if aside else ConnectionGroup.DEFAULT
        answer = await self.send(node, request, group=group)
        raise_for(getattr(answer, "error_code", 0))  # from version 7 on
        parts = {
            TopicPartition(topic, partition): rest
            for topic, partitions in answer.topics
            for partition, *rest in partitions
        }
        certain = answer.throttle_time_ms == 0
        found: dict[TopicPartition, Fetched] = {}
        for topic, asked in by_topic.items():
            for partition, offset, _ in asked:
                at = TopicPartition(topic, partition)
                code, _highwater, *rest = parts.get(at, (kafka.UnknownTopicOrPartitionError.errno, -1))
                if kafka.for_code(code) is kafka.OffsetOutOfRangeError:
                    found[at] = Fetched([], await self.start_offset(node, at), -1)
                elif code:
                    found[at] = Fetched([], offset, -1, error_for(code))
                else:
                    aborted = rest[2] if answer.API_VERSION >= _PREFERRED_REPLICA else rest[-2]
                    found[at] = _decoded(at, offset, rest[0], aborted, rest[-1], certain=certain)
                    certain = certain and not rest[-1]
        return found


def _decoded(at: TopicPartition, offset: int, end: int, aborted: Any, data: bytes | None, *, certain: bool) -> Fetched:
    """Decode the bytes that a broker returned for one partition from *offset* on."""
    memory = MemoryRecords(data or b"")
    if not memory.has_next():
        if not data:
            return Fetched([], max(offset, end) if certain else offset, end)
        if not certain:
            return Fetched([], offset, end)
        return Fetched([], offset, end, TransportError(f"the record at offset {offset} of {at} does not come whole"))
    part = PartitionRecords(at, memory, aborted, offset, None, None, True, READ_COMMITTED)  # noqa: FBT003 - aiokafka's
    chunk = Chunk(at, FetchResult(at, assignment=None, partition_records=part, backoff=0))
    taken = chunk.take(_EVERYTHING, _EVERYTHING, alone=True)
    error = None if chunk.error is None else corrupt_record(chunk.error, at, chunk.next_offset)
    return Fetched(taken.records, chunk.next_offset, end, error)


async def connect(settings: "Settings", options: Mapping[str, Any]) -> ReadingClient:
    """Return a connected client; takes at most three times `CONNECT_TIMEOUT`.

    Args:
        settings: For the error messages.
        options: The client's options.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
        SettingsError: The client refused an option.
    """

    async def begin(client: ReadingClient) -> bool:
        await client.bootstrap()
        return bool(await client.force_metadata_update())

    return await connected(
        settings,
        options,
        ReadingClient,
        begin=begin,
        end=ReadingClient.tear_down,
        advertised=lambda client: advertised_by(client.cluster),
    )
