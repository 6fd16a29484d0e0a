"""Questions to the brokers that are none of the consumer's business: they wait for none of its calls."""

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
    """A client that joins no group, so it need not know who coordinates ours."""

    @property
    def trouble(self) -> str | None:
        """Brokers that are gone, and topics that are missing."""
        internals = self._internals
        if internals is None or self._closed:
            return None
        if not internals.connected:
            return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client goes on trying"
        return self._topics.trouble

    async def partitions_by_hand(self) -> list[TopicPartition]:
        """What `assign` gives."""
        return await partitions_by_hand(self._settings, self._group_id, self.partitions)

    async def commit_by_hand(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit."""
        internals, _ = self._running()
        await commit_by_hand(internals, offsets)

    async def remove_member(self, member_id: str) -> None:
        """Have a member leave the group; asked once. That the group has no such member is what is wanted, too."""
        internals, _ = self._running()
        try:
            node = await internals.client.coordinator_lookup(CoordinationType.GROUP, self._group_id)
            removed_member(await internals.client.send(node, RemoveMember(self._group_id, member_id=member_id)))
        except kafka.KafkaError as error:
            raise request_error(error, f"that member {member_id} has left", self._group_id) from error


class Asking:
    """Asks about topics, logs and committed offsets, with connections of its own.

    The consumer serves one call at a time, and a question to a coordinator that is gone would keep it from reading.
    librdkafka's own client for questions does not get over a broker that was restarted: it goes on asking with the
    leader epoch that it had seen before. So it is aiokafka that asks, as a client that joins no group.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Connect to nothing yet.

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
        """Why nothing, or not everything, can be read: brokers that are gone, topics that are missing."""
        return self.transport.trouble

    async def connect(self, topics: Collection[str]) -> None:
        """Connect, and look for *topics*; they are looked for from now on.

        Raises:
            ConnectError: No broker could be reached.
            AuthenticationError: The brokers refused our credentials, or we their certificate.
            AuthorizationError: The group or a topic is not allowed.
        """
        await self.transport.connect(topics)

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """The group's committed offsets, with the texts that were committed with them."""
        found = await self.transport.committed(partitions)
        # librdkafka writes a text with the NUL that ends it in its own memory.
        return {
            name: ours._replace(metadata=ours.metadata.removesuffix("\0")) if ours is not None else None
            for name, ours in found.items()
        }

    async def partitions_by_hand(self) -> list[TopicPartition]:
        """What `assign` gives; see `aioshard.kafka.memberless.partitions_by_hand`."""
        return await self.transport.partitions_by_hand()

    async def commit_by_hand(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit as somebody who is no member: the consumer, which is one or none, has no part in it."""
        await self.transport.commit_by_hand(offsets)

    async def remove_member(self, member_id: str) -> None:
        """Tell the group that a member has left.

        Raises:
            TransportError: It was not told; retriable while that may pass.
        """
        await self.transport.remove_member(member_id)

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """First and end offset of each log."""
        return await self.transport.log_ranges(partitions) if partitions else {}

    async def close(self) -> None:
        """Close the connections."""
        await self.transport.close()


class Asked:
    """The part of a transport that only asks."""

    @abstractmethod
    def _running(self) -> Asking:
        """Who asks, while the transport is open; raises `ClientLostError` when it is not."""

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`. Has no deadline: tries again while the reason may pass."""
        return await self._running().committed(partitions)

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `Transport.partitions`. A topic that is not known yet is asked for once, and not created."""
        return await self._running().transport.partitions(topic)

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        return await self._running().transport.topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline: tries again while the reason may pass."""
        return await self._running().transport.offset_at(topic_partition, timestamp)
