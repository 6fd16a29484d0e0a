"""Queries to the brokers on separate connections, so that they never wait for calls of the consumer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioshard.kafka.aiokafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.transport import AiokafkaTransport, commit_without_member
from aioshard.ports import Committed
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings


class QueryClient(AiokafkaTransport):
    """Queries topics, logs and committed offsets through aiokafka; joins no group.

    librdkafka serves one call at a time, and its own queries do not recover from a broker restart: it keeps sending the
    leader epoch from before.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Check the settings; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        changes: dict[str, Any] = {"client": "aiokafka", "client_options": {}, "group_protocol": "classic"}
        self.settings = settings.replace(**changes)
        super().__init__(self.settings, group_id)

    async def commit_without_member(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Send one commit without a member."""
        await commit_without_member(self._running(), offsets)

    async def remove_member(self, member_id: str) -> None:
        """Remove a member from the group. Succeeds also if the group does not have that member.

        Raises:
            TransportError: The request failed; retriable if the cause may be transient.
        """
        async with KafkaAdmin(self.settings) as admin:
            await admin.remove_member(self._group_id, member_id)
