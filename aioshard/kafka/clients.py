"""The three Kafka clients of an app, created when it starts."""

import functools
import importlib.util
import uuid
from typing import TYPE_CHECKING

from aioshard.errors import MissingExtraError
from aioshard.ports import Clients, Transport

if TYPE_CHECKING:
    from aioshard.settings import Settings


def kafka_clients(settings: "Settings", group_id: str) -> Clients:
    """Return factories for the clients of a Kafka cluster; imports the client library.

    Raises:
        SettingsError: The brokers are not set.
        MissingExtraError: The chosen client is not installed.
    """
    settings.require_bootstrap_servers()
    from aioshard.kafka.producer import KafkaProducer  # noqa: PLC0415 - imported on use
    from aioshard.kafka.side_topics import KafkaSideTopics  # noqa: PLC0415 - imported on use

    if settings.client == "aiokafka":
        from aioshard.kafka.group.transport import MemberTransport  # noqa: PLC0415 - imported on use
        from aioshard.kafka.transactions.identity import TransactionalIds  # noqa: PLC0415 - imported on use

        ids = TransactionalIds(group_id, settings.group_instance_id)
        exactly_once = settings.processing_guarantee == "exactly_once"

        def client(settings: "Settings", group_id: str) -> Transport:
            return MemberTransport(settings, group_id, ids.for_client() if exactly_once else None)

    elif importlib.util.find_spec("confluent_kafka") is None:
        raise MissingExtraError("client='confluent'", "confluent")
    else:
        from aioshard.kafka.confluent.transport import ConfluentTransport  # noqa: PLC0415 - imported on use

        transactional_id = f"{group_id}:{settings.group_instance_id or uuid.uuid4().hex}"
        client = functools.partial(ConfluentTransport, transactional_id=transactional_id)
    return Clients(
        lambda: client(settings, group_id), lambda: KafkaProducer(settings), lambda: KafkaSideTopics(settings)
    )
