"""The three Kafka clients of an app, created when it starts."""

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
    from aioshard.kafka.transactions.identity import TransactionalIds  # noqa: PLC0415 - imported on use

    ids = TransactionalIds(group_id, settings.group_instance_id)
    exactly_once = settings.processing_guarantee == "exactly_once"
    return Clients(
        lambda: MemberTransport(settings, group_id, ids.for_client() if exactly_once else None),
        lambda: KafkaProducer(settings),
        lambda: KafkaSideTopics(settings),
    )
