"""The three Kafka clients of an app, created when it starts."""

import importlib.util
from typing import TYPE_CHECKING

from aioshard.errors import MissingExtraError, StateError
from aioshard.ports import (
    Clients,
    Message,
    Producer,
    ProducerFactory,
    SideTopics,
    SideTopicsFactory,
    Transport,
    TransportFactory,
)

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["kafka_clients", "with_producer_or_none"]


def kafka_clients(settings: "Settings", group_id: str) -> Clients:
    """Return factories for the clients of a Kafka cluster; the client library is imported on first use.

    Raises:
        SettingsError: The brokers are not set.
        MissingExtraError: The chosen client is not installed.
    """
    settings.require_bootstrap_servers()
    confluent = settings.client == "confluent"
    if confluent and importlib.util.find_spec("confluent_kafka") is None:
        raise MissingExtraError("client='confluent'", "confluent")

    def make_transport() -> Transport:
        if confluent:
            from aioshard.kafka.confluent.client import ConfluentTransport  # noqa: PLC0415 - imported on use

            return ConfluentTransport(settings, group_id)
        from aioshard.kafka.client import AiokafkaTransport  # noqa: PLC0415 - imported on use

        return AiokafkaTransport(settings, group_id)

    def make_producer() -> Producer:
        from aioshard.kafka.producer import KafkaProducer  # noqa: PLC0415 - imported on use

        return KafkaProducer(settings)

    def make_side_topics() -> SideTopics:
        from aioshard.kafka.side_topics import KafkaSideTopics  # noqa: PLC0415 - imported on use

        return KafkaSideTopics(settings)

    return Clients(make_transport, make_producer, make_side_topics)


def with_producer_or_none(
    make_transport: TransportFactory,
    make_producer: ProducerFactory | None,
    make_side_topics: SideTopicsFactory | None,
) -> Clients:
    """Return client factories, some of which may be missing; using a missing one raises an error."""
    return Clients(make_transport, make_producer or _NoProducer, make_side_topics or _no_side_topics)


class _NoProducer:
    """Stands in for the producer of an app that was started without one."""

    trouble: str | None = None

    async def publish(self, message: Message) -> int:
        raise StateError(f"nothing can be published to topic {message.topic!r}: the app was started without a producer")

    async def close(self) -> None:
        """Do nothing: no connection was opened."""


def _no_side_topics() -> SideTopics:
    raise StateError("nothing can be parked: the app was started without what reads side topics")
