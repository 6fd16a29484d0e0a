"""What an app talks to Kafka with: three clients, made when it starts."""

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
    """Clients of a Kafka cluster; they are imported when the first one is made.

    Raises:
        SettingsError: The brokers are not set.
        MissingExtraError: The client that was chosen is not installed.
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
    """Clients of which some may be missing: what needs them says so."""
    return Clients(make_transport, make_producer or _NoProducer, make_side_topics or _no_side_topics)


class _NoProducer:
    """For an app that was started with a client and no producer."""

    trouble: str | None = None

    async def publish(self, message: Message) -> int:
        raise StateError(f"nothing can be published to topic {message.topic!r}: the app was started without a producer")

    async def close(self) -> None:
        """There is nothing to close."""


def _no_side_topics() -> SideTopics:
    raise StateError("nothing can be parked: the app was started without what reads side topics")
