"""Broker queries on a separate client, so that they never wait for calls of the consumer."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from aiokafka import errors as kafka
from aiokafka.client import CoordinationType

from aioshard.kafka.answers import removed_member
from aioshard.kafka.client import AiokafkaTransport
from aioshard.kafka.group_protocol import RemoveMember
from aioshard.kafka.memberless import commit_by_hand, partitions_by_hand
from aioshard.kafka.translate import request_error
from aioshard.ports import Committed, LogRange
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Asked", "Asking"]


class _Outsider(AiokafkaTransport):
    """A client that joins no group, so it does not need to know our coordinator."""

    @property
    def trouble(self) -> str | None:
        """Report unreachable brokers and missing topics."""
        internals = self._internals
        if internals is None or self._closed:
            return None
        if not internals.connected:
            return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client goes on trying"
        return self._topics.trouble

    async def partitions_by_hand(self) -> list[TopicPartition]:
        """Return the partitions in `assign`."""
        return await partitions_by_hand(self._settings, self._group_id, self.partitions)

    async def commit_by_hand(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit without a member."""
        internals, _ = self._running()
        await commit_by_hand(internals, offsets)

    async def remove_member(self, member_id: str) -> None:
        """Remove a member from the group; one attempt. Succeeds also if the group does not have that member."""
        internals, _ = self._running()
        try:
            node = await internals.client.coordinator_lookup(CoordinationType.GROUP, self._group_id)
            removed_member(await internals.client.send(node, RemoveMember(self._group_id, member_id=member_id)))
        except kafka.KafkaError as error:
            raise request_error(error, f"that member {member_id} has left", self._group_id) from error


class Asking:
    """Queries topics, logs and committed offsets, on separate connections.

    The consumer serves one call at a time, and a query to a coordinator that is gone would keep it from reading.
    librdkafka's own client for queries does not recover from a broker restart: it keeps sending the leader epoch from
    before. So an aiokafka client that joins no group sends the queries.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Check the settings; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        theirs: dict[str, Any] = {
            "client": "aiokafka",
            "client_options": {},
            "group_protocol": "classic",
            "remote_assignor": None,
        }
        self.transport = _Outsider(settings.replace(**theirs), group_id)

    @property
    def trouble(self) -> str | None:
        """The reason why nothing, or not everything, can be read: unreachable brokers or missing topics."""
        return self.transport.trouble

    async def connect(self, topics: Collection[str]) -> None:
        """Connect and look up *topics*, and keep looking for them.

        Raises:
            ConnectError: No broker could be reached.
            AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
            AuthorizationError: This user may not use the group or a topic.
        """
        await self.transport.connect(topics)

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """Fetch the group's committed offsets and their metadata."""
        found = await self.transport.committed(partitions)
        # librdkafka sends the metadata with the terminating NUL of its C string.
        return {
            name: ours._replace(metadata=ours.metadata.removesuffix("\0")) if ours is not None else None
            for name, ours in found.items()
        }

    async def partitions_by_hand(self) -> list[TopicPartition]:
        """Return the partitions in `assign`; see `aioshard.kafka.memberless.partitions_by_hand`."""
        return await self.transport.partitions_by_hand()

    async def commit_by_hand(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit without a member; does not involve the consumer."""
        await self.transport.commit_by_hand(offsets)

    async def remove_member(self, member_id: str) -> None:
        """Remove a stale member from the group.

        Raises:
            TransportError: The request failed; retriable if the cause may be transient.
        """
        await self.transport.remove_member(member_id)

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """Fetch the first and end offset of each log."""
        return await self.transport.log_ranges(partitions) if partitions else {}

    async def close(self) -> None:
        """Close all connections."""
        await self.transport.close()


class Asked:
    """The query methods of a transport."""

    @abstractmethod
    def _running(self) -> Asking:
        """Return the query client; raises `ClientLostError` unless the transport is open."""

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`. Has no deadline; retries transient errors."""
        return await self._running().committed(partitions)

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `Transport.partitions`. Looks up an unknown topic once, without creating it."""
        return await self._running().transport.partitions(topic)

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        return await self._running().transport.topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline; retries transient errors."""
        return await self._running().transport.offset_at(topic_partition, timestamp)
