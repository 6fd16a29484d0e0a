"""The three Kafka clients of an app, created when it starts."""

import functools
import importlib.util
import uuid
from collections.abc import Callable
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

    client: Callable[[Settings, str], Transport]
    # An instance id has no colon, so different pairs of group and instance never share a transactional id.
    transactional_id = f"{group_id}:{settings.group_instance_id or uuid.uuid4().hex}"
    if settings.client == "aiokafka":
        from aioshard.kafka.group.transport import MemberTransport  # noqa: PLC0415 - imported on use
        from aioshard.kafka.transactions.identity import TransactionalId  # noqa: PLC0415 - imported on use

        exactly_once = settings.processing_guarantee == "exactly_once"
        transactional = TransactionalId(transactional_id) if exactly_once else None
        client = functools.partial(MemberTransport, transactional=transactional)
    elif importlib.util.find_spec("confluent_kafka") is None:
        raise MissingExtraError("client='confluent'", "confluent")
    else:
        from aioshard.kafka.confluent.transport import ConfluentTransport  # noqa: PLC0415 - imported on use

        client = functools.partial(ConfluentTransport, transactional_id=transactional_id)
    return Clients(
        lambda: client(settings, group_id), lambda: KafkaProducer(settings), lambda: KafkaSideTopics(settings)
    )
