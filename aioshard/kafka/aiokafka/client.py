"""aiokafka's bare client: metadata and requests, without a group and without a consumer's or producer's state."""

import random
import time
from collections.abc import Mapping
from typing import Any

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.kafka.aiokafka.connections import close_client, refuse_useless_connections
from aioshard.records import TopicPartition


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
