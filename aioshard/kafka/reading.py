"""Single fetches from partitions, outside of any group and without a consumer's state, on aiokafka's bare client.

aiokafka's consumer is not used here. With each change of its partitions it throws away what it has fetched of all of
them, it creates the topics that it looks for, and it does not tell that a log has nothing more up to its end, which
who restores something has to know.
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
"""What one response brings at most, unless a single batch is larger: decoding it holds up the event loop."""
_EVERYTHING = 1 << 62
_PREFERRED_REPLICA = 11
"""The version of a response from which on each partition names one."""


class Fetched(NamedTuple):
    """What one fetch brought of one partition.

    Invariants:
        * All that is readable from the offset that was asked for up to `next_offset` is in `records`.
        * No records, no error and `next_offset` where it was: there is nothing up to `end`, or it is not known.
    """

    records: list[Record]
    next_offset: int
    end: int
    """The last stable offset; -1 where there is an error."""
    error: TransportError | kafka.KafkaError | None = None
    """What came after the records and cannot be read, or why nothing was."""


class ReadingClient(AIOKafkaClient):  # type: ignore[misc]
    """One life of a client that reads; creates no topics. After `tear_down` it is gone."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Make a client; nothing connects yet.

        Raises:
            ValueError: An option has a value that aiokafka does not take.
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
        """Why it is of no use any more; None while it lives."""
        if self._sync_task is None or not self._sync_task.done():
            return None
        error: BaseException | None = None if self._sync_task.cancelled() else self._sync_task.exception()
        return error or kafka.KafkaConnectionError("closed")

    async def tear_down(self) -> None:
        """End every task and connection, whatever state they are in; takes at most 2 s."""
        await close_client(self, [])

    # Where partitions are ---------------------------------------------------------------

    def leader(self, topic_partition: TopicPartition) -> int | None:
        """The broker that leads a partition, as last told; None when it is not known."""
        node: int | None = self.cluster.leader_for_partition(topic_partition)
        return None if node == -1 else node

    def may_not_see(self, topic: str) -> bool:
        """Whether the brokers refused to tell of a topic when they were last asked."""
        return topic in self.cluster.unauthorized_topics

    def follow(self, topic: str) -> None:
        """Ask for a topic too with each look-up from now on."""
        self._topics.add(topic)

    async def look_up(self, topic: str) -> bool:
        """Ask the brokers for a topic, and for all others that are followed; whether they answered."""
        self.follow(topic)
        return bool(await self.force_metadata_update())

    async def partition_count(self, topic: str) -> int:
        """How many partitions a topic has now; 0 when there is none of that name, or we may not see it.

        Raises:
            KafkaError: The broker did not tell.
        """
        request = MetadataRequest([topic], allow_auto_topic_creation=False)
        answer = await self.send(self.get_random_node(), request)
        with contextlib.suppress(kafka.TopicAuthorizationFailedError):
            return len(topic_leaders(answer, topic))
        return 0

    async def _metadata_update(self, cluster_metadata: Any, topics: Any) -> bool:
        """In place of aiokafka's, which creates the topics that it asks for, and asks for all when it has none."""
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

    # What is in them --------------------------------------------------------------------

    async def end_offset(self, node: int, topic_partition: TopicPartition) -> int:
        """The last stable offset of a partition; the same errors as `start_offset`."""
        return await self._offset(node, topic_partition, -1)

    async def start_offset(self, node: int, topic_partition: TopicPartition) -> int:
        """The first offset of a partition's log.

        Raises:
            KafkaError: The broker did not tell.
        """
        return await self._offset(node, topic_partition, -2)

    async def _offset(self, node: int, topic_partition: TopicPartition, which: int) -> int:
        topic, partition = topic_partition
        request = OffsetRequest(-1, READ_COMMITTED, [(topic, [(partition, which)])])
        # Through a connection of its own: on the other one it would wait for the fetch in progress.
        answer = await self.send(node, request, group=ConnectionGroup.COORDINATION)
        return log_offsets(answer, [topic_partition])[topic_partition]

    async def fetch(
        self, node: int, offsets: Mapping[TopicPartition, int], wait: float, *, aside: bool = False
    ) -> dict[TopicPartition, Fetched]:
        """Fetch from each partition once.

        An offset below the log goes on at its start, and so does one beyond its end, since the log is another one then.

        Args:
            node: The broker that leads them all.
            offsets: Where to read. What comes first is found out for certain: when nothing is returned of it,
                nothing is there up to its end. Of the others that is known only as long as nothing is returned at all.
            wait: Seconds that the broker may wait for something to return.
            aside: Whether it takes the connection that no waiting fetch is on.

        Raises:
            KafkaError: The broker did not answer, or with an error.
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
    """The records in the bytes that a broker returned of one partition from *offset* on."""
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
    """A client that is connected; takes at most three times `CONNECT_TIMEOUT`.

    Args:
        settings: Names for the sentences.
        options: The client's.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers refused our credentials, or we their certificate.
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
