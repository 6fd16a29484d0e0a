"""The names of OpenTelemetry's semantic conventions that spans and metrics carry: messaging, version 1.44.

Copied, because the package that has them keeps those of messaging in a private module until they are stable. A test
compares each with that package.
"""

from typing import Final

__all__ = ["DURATIONS", "METRICS", "SCHEMA_URL", "Attribute", "Metric"]

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

DURATIONS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bounds of the buckets that the conventions advise for durations, in seconds."""


class Attribute:
    """Names of attributes."""

    MESSAGING_SYSTEM: Final = "messaging.system"
    MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
    MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
    MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
    MESSAGING_DESTINATION_PARTITION_ID: Final = "messaging.destination.partition.id"
    MESSAGING_CONSUMER_GROUP_NAME: Final = "messaging.consumer.group.name"
    MESSAGING_CLIENT_ID: Final = "messaging.client.id"
    MESSAGING_BATCH_MESSAGE_COUNT: Final = "messaging.batch.message_count"
    MESSAGING_KAFKA_OFFSET: Final = "messaging.kafka.offset"
    MESSAGING_KAFKA_MESSAGE_KEY: Final = "messaging.kafka.message.key"
    MESSAGING_KAFKA_MESSAGE_TOMBSTONE: Final = "messaging.kafka.message.tombstone"
    ERROR_TYPE: Final = "error.type"
    SERVER_ADDRESS: Final = "server.address"
    SERVER_PORT: Final = "server.port"
    AIOSHARD_ATTEMPT: Final = "aioshard.attempt"
    """No convention has a name for it."""


class Metric:
    """Names of metrics."""

    MESSAGING_PROCESS_DURATION: Final = "messaging.process.duration"
    MESSAGING_CLIENT_CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
    MESSAGING_CLIENT_OPERATION_DURATION: Final = "messaging.client.operation.duration"
    MESSAGING_CLIENT_SENT_MESSAGES: Final = "messaging.client.sent.messages"


METRICS: Final = {
    Metric.MESSAGING_PROCESS_DURATION: ("histogram", "s", "Duration of an attempt, the same as that of its span."),
    Metric.MESSAGING_CLIENT_CONSUMED_MESSAGES: (
        "counter",
        "{message}",
        "Records that were given to a handler, each once per delivery however many attempts it takes.",
    ),
    Metric.MESSAGING_CLIENT_OPERATION_DURATION: ("histogram", "s", "Duration of a commit request, or of publishing."),
    Metric.MESSAGING_CLIENT_SENT_MESSAGES: ("counter", "{message}", "Messages that were published, or failed to be."),
}
"""Instrument, unit and meaning of each."""
