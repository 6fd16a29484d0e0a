"""Translate aiokafka's errors into aioshard's, with messages that name the group, topic or partition."""

import asyncio
from collections.abc import Collection

from aiokafka import errors as kafka

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    CommitError,
    CommitRefusedError,
    CorruptRecordError,
    MessageTooLargeError,
    MetadataRefusedError,
    TransportError,
)
from aioshard.records import TopicPartition

__all__ = [
    "commit_error",
    "corrupt_record",
    "error_for",
    "group_error",
    "missing_topic",
    "nothing_acknowledged",
    "publish_error",
    "raise_for",
    "reason",
    "request_error",
    "too_large",
]

_MOVED_ON = (
    kafka.UnknownMemberIdError,
    kafka.IllegalGenerationError,
    kafka.RebalanceInProgressError,
)
"""Errors that mean the group has moved on since we got our membership."""

_TOO_LONG = (kafka.OffsetMetadataTooLargeError, kafka.InvalidCommitOffsetSizeError)
"""Errors that mean the metadata of one offset, or of all of them together, is longer than brokers store."""


_PASSES = frozenset({2, 9, 13, 51, 70, 71, 72, 74, 75, 78, 80, 83, 88, 89, 100, 103, 106})
"""Error codes that Kafka calls retriable, but aiokafka treats as final or does not know."""


def error_for(code: int, *what: str) -> kafka.KafkaError:
    """Turn an error code into an error about *what*; retriable if Kafka's own clients retry."""
    error = kafka.for_code(code)(*what)
    error.retriable = error.retriable or code in _PASSES
    if code not in kafka.kafka_errors:
        error.errno, error.message, error.description = code, f"ERROR {code}", "the client has no name for it"
    return error


def raise_for(code: int, *what: str) -> None:
    """Raise the error of an error code; 0 means no error."""
    if code:
        raise error_for(code, *what)


def reason(error: BaseException) -> str:
    """Return an error's text without the final full stop, or its class name if it has no text."""
    text = str(error).strip().rstrip(".")
    if isinstance(error, kafka.BrokerResponseError):
        explained = getattr(error, "description", "").split(".")[0].strip()
        return f"{getattr(error, 'message', type(error).__name__)}: {explained or text}"
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return text or "no answer in time"
    return text or type(error).__name__


def group_error(error: BaseException, group_id: str) -> TransportError:
    """Return the error that ends membership for good: a refused group or topic, or a client that gave up."""
    return _denied(error, group_id) or ClientLostError(
        f"the Kafka client gave up on group {group_id!r} ({reason(error)}); a new client is needed"
    )


def request_error(error: BaseException, what: str, group_id: str) -> TransportError:
    """Return the error of a failed broker request.

    Args:
        error: The error that the client raised.
        what: The requested data, as in "the committed offsets of orders/0".
        group_id: For the error message when the group is not authorized.
    """
    denied = _denied(error, group_id)
    if denied is not None:
        return denied
    failed = TransportError(f"the brokers did not tell {what}: {reason(error)}")
    failed.retriable = bool(getattr(error, "retriable", False))
    return failed


def commit_error(error: BaseException, partitions: Collection[TopicPartition], group_id: str) -> TransportError:
    """Return the error of a commit that was not acknowledged."""
    if isinstance(error, _MOVED_ON):
        return CommitRefusedError(
            f"the broker refused a commit of group {group_id!r}: the group has moved on "
            f"({reason(error)}); what was not committed is delivered again"
        )
    if isinstance(error, _TOO_LONG):
        return MetadataRefusedError(
            f"the broker did not store what was noted with a commit of group {group_id!r} ({reason(error)})"
        )
    named = ", ".join(map(str, list(partitions)[:5]))
    return _denied(error, group_id) or CommitError(
        f"a commit of group {group_id!r} for {named}{', …' if len(partitions) > 5 else ''} "  # noqa: PLR2004
        f"was not acknowledged ({reason(error)}); it stays due"
    )


def corrupt_record(error: BaseException, topic_partition: TopicPartition, offset: int) -> CorruptRecordError:
    """Return the error of a batch that cannot be read."""
    if isinstance(error, kafka.UnsupportedCodecError):
        return CorruptRecordError(
            f"the batch at offset {offset} of {topic_partition} cannot be decompressed here ({reason(error)}): "
            "install the codec with  pip install 'aiokafka[all]'"
        )
    return CorruptRecordError(
        f"the batch at offset {offset} of {topic_partition} cannot be read ({reason(error)}): the position stays "
        "before it. Restore it from a replica, or move the group past it with the consumer stopped"
    )


def publish_error(error: BaseException, topic: str) -> TransportError:
    """Return the error of a failed write to a topic, except for the size of a message."""
    # aiokafka wraps unexpected refusals in a KafkaError that contains only their repr.
    text = repr(error)
    if "TopicAuthorizationFailed" in text or "ClusterAuthorizationFailed" in text:
        return AuthorizationError(
            f"the brokers do not allow this user to write to topic {topic!r}: grant WRITE and DESCRIBE on it, "
            "and before Kafka 3.0 IDEMPOTENT_WRITE on the cluster"
        )
    return TransportError(f"the brokers did not take records for topic {topic!r}: {reason(error)}")


def too_large(topic: str, size: int | None, limit: int | None = None) -> MessageTooLargeError:
    """Return the error of a message that is too large for its topic or for a request.

    Args:
        topic: The message's topic.
        size: The size in bytes; None for a message that is one of many.
        limit: The maximum size of a request in bytes, if that is the limit exceeded.
    """
    what = "a batch of messages" if size is None else f"a message of {size} bytes"
    if limit is not None:
        return MessageTooLargeError(
            f"{what} for topic {topic!r} does not fit into one request, which brokers read up to {limit} bytes: "
            "publish less at once"
        )
    return MessageTooLargeError(
        f"{what} is too large for topic {topic!r}: raise max.message.bytes of the topic, or publish less at once"
    )


def missing_topic(topic: str, seconds: float) -> TransportError:
    """Return the error of a topic that did not appear within *seconds*."""
    missing = TransportError(
        f"topic {topic!r} does not exist, and the brokers did not create it on use within {seconds:g} s: create it, "
        "or check its name"
    )
    missing.retriable = False
    return missing


def nothing_acknowledged(servers: str | None, seconds: float) -> TransportError:
    """Return the error for brokers that acknowledge nothing."""
    return TransportError(
        f"the brokers of {servers} acknowledged nothing for {seconds:g} s: "
        "check that they run, and that enough replicas of each partition are in sync"
    )


def _denied(error: BaseException, group_id: str) -> AuthorizationError | None:
    # aiokafka wraps unexpected refusals in a KafkaError that contains only their repr.
    text = repr(error)
    if isinstance(error, kafka.GroupAuthorizationFailedError) or "GroupAuthorizationFailedError" in text:
        return AuthorizationError(
            f"the brokers do not allow this user to read with group {group_id!r}: "
            f"grant READ and DESCRIBE on the group, or use another group id"
        )
    if isinstance(error, kafka.TopicAuthorizationFailedError) or "TopicAuthorizationFailedError" in text:
        return AuthorizationError(
            f"the brokers do not allow this user to read {_topics(error)}: grant READ and DESCRIBE on it"
        )
    return None


def _topics(error: BaseException) -> str:
    named = error.args[0] if isinstance(error, kafka.TopicAuthorizationFailedError) and error.args else ()
    names = [named] if isinstance(named, str) else sorted(named)
    if not names:
        return "a topic that this app subscribes to"
    return f"topic{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
