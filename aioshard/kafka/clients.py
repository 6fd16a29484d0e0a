"""The three Kafka clients of an app, created when it starts."""

import uuid
from typing import TYPE_CHECKING

from aioshard.ports import Clients

if TYPE_CHECKING:
    from aioshard.settings import Settings


def kafka_clients(settings: "Settings", group_id: str) -> Clients:
    """Return factories for the clients of a Kafka cluster; imports them.

    Raises:
        SettingsError: The brokers are not set.
    """
    settings.require_bootstrap_servers()
    from aioshard.kafka.group.transport import MemberTransport  # noqa: PLC0415 - imported on use
    from aioshard.kafka.producer import KafkaProducer  # noqa: PLC0415 - imported on use
    from aioshard.kafka.side_topics import KafkaSideTopics  # noqa: PLC0415 - imported on use
    from aioshard.kafka.transactions.identity import TransactionalId  # noqa: PLC0415 - imported on use

    transactional: TransactionalId | None = None
    if settings.processing_guarantee == "exactly_once":
        # An instance id has no colon, so different pairs of group and instance never share a transactional id.
        transactional = TransactionalId(f"{group_id}:{settings.group_instance_id or uuid.uuid4().hex}")
    return Clients(
        lambda: MemberTransport(settings, group_id, transactional),
        lambda: KafkaProducer(settings),
        lambda: KafkaSideTopics(settings),
    )
