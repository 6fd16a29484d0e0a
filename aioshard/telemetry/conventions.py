"""Names from OpenTelemetry's semantic conventions for messaging, version 1.44, used by spans and metrics.

They are copied because the official package keeps the messaging names in a private module until they are stable. A test
compares each of them with that package.
"""

from typing import Final

__all__ = ["ATTRIBUTES", "METRICS", "SCHEMA_URL", "Attribute", "Metric"]

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"


class Attribute:
    """Attribute names."""

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
    """The conventions have no name for it."""


ATTRIBUTES: Final = {
    Attribute.MESSAGING_SYSTEM: ("process, commit, send", "`kafka`."),
    Attribute.MESSAGING_OPERATION_NAME: ("process, commit, send", "`process`, `commit` or `send`."),
    Attribute.MESSAGING_OPERATION_TYPE: ("process, commit, send", "`process`, `settle` or `send`."),
    Attribute.MESSAGING_DESTINATION_NAME: (
        "process, commit, send",
        "The topic; absent where a batch or a commit has several.",
    ),
    Attribute.MESSAGING_DESTINATION_PARTITION_ID: (
        "process, commit, send",
        "The partition, as text; absent where there are several, or the key of a message chooses.",
    ),
    Attribute.MESSAGING_CONSUMER_GROUP_NAME: ("process, commit", "The group id."),
    Attribute.MESSAGING_CLIENT_ID: ("process, commit, send", "The setting `client_id`."),
    Attribute.MESSAGING_BATCH_MESSAGE_COUNT: (
        "process",
        "Records of the batch; absent where a handler takes single ones.",
    ),
    Attribute.MESSAGING_KAFKA_OFFSET: (
        "process, send",
        "The offset, of a single record; of a batch it is in each link.",
    ),
    Attribute.MESSAGING_KAFKA_MESSAGE_KEY: (
        "process, send",
        "The key, where `show_keys` allows it and it is UTF-8; of single records.",
    ),
    Attribute.MESSAGING_KAFKA_MESSAGE_TOMBSTONE: ("process, send", "True of a tombstone, else absent."),
    Attribute.ERROR_TYPE: ("process, commit, send", "Class of the exception, where it failed."),
    Attribute.SERVER_ADDRESS: ("process, commit, send", "Host of `bootstrap_servers`, where that names a single one."),
    Attribute.SERVER_PORT: ("process, commit, send", "Its port."),
    Attribute.AIOSHARD_ATTEMPT: ("process", "Number of the attempt, from the second on."),
}
"""The spans that have each attribute, and its meaning."""


class Metric:
    """Metric names."""

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
"""Instrument, unit and meaning of each metric."""
