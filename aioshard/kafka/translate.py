"""Errors of aiokafka as ours: sentences that name the group, the topic or the partition."""

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
"""Answers that say: the group has moved on since the membership was given."""

_TOO_LONG = (kafka.OffsetMetadataTooLargeError, kafka.InvalidCommitOffsetSizeError)
"""Answers that say: the text that goes with an offset, or all of them together, are more than is stored."""


_PASSES = frozenset({2, 9, 13, 51, 70, 71, 72, 74, 75, 78, 80, 83, 88, 89, 100, 103, 106})
"""Codes that Kafka calls retriable, and aiokafka final or does not know."""


def error_for(code: int, *what: str) -> kafka.KafkaError:
    """Make an answer's error code an error about *what*; retriable where Kafka's own clients try again."""
    error = kafka.for_code(code)(*what)
    error.retriable = error.retriable or code in _PASSES
    if code not in kafka.kafka_errors:
        error.errno, error.message, error.description = code, f"ERROR {code}", "the client has no name for it"
    return error


def raise_for(code: int, *what: str) -> None:
    """Raise what an answer's error code stands for; 0 is no error."""
    if code:
        raise error_for(code, *what)


def reason(error: BaseException) -> str:
    """What an error says, or its class where it says nothing, without a full stop."""
    text = str(error).strip().rstrip(".")
    if isinstance(error, kafka.BrokerResponseError):
        explained = getattr(error, "description", "").split(".")[0].strip()
        return f"{getattr(error, 'message', type(error).__name__)}: {explained or text}"
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return text or "no answer in time"
    return text or type(error).__name__


def group_error(error: BaseException, group_id: str) -> TransportError:
    """What ends membership for good: refusals of the group or a topic, and whatever the client gave up on."""
    return _denied(error, group_id) or ClientLostError(
        f"the Kafka client gave up on group {group_id!r} ({reason(error)}); a new client is needed"
    )


def request_error(error: BaseException, what: str, group_id: str) -> TransportError:
    """A failed question to the brokers.

    Args:
        error: What the client raised.
        what: What was asked for, as in "the committed offsets of orders/0".
        group_id: For the sentence when the group is not allowed.
    """
    denied = _denied(error, group_id)
    if denied is not None:
        return denied
    failed = TransportError(f"the brokers did not tell {what}: {reason(error)}")
    failed.retriable = bool(getattr(error, "retriable", False))
    return failed


def commit_error(error: BaseException, partitions: Collection[TopicPartition], group_id: str) -> TransportError:
    """A commit that was not acknowledged."""
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
    """A batch that cannot be read."""
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
    """What a topic was not written for, other than the size of a message."""
    # aiokafka wraps refusals that it does not expect in a KafkaError of their repr.
    text = repr(error)
    if "TopicAuthorizationFailed" in text or "ClusterAuthorizationFailed" in text:
        return AuthorizationError(
            f"the brokers do not allow this user to write to topic {topic!r}: grant WRITE and DESCRIBE on it, "
            "and before Kafka 3.0 IDEMPOTENT_WRITE on the cluster"
        )
    return TransportError(f"the brokers did not take records for topic {topic!r}: {reason(error)}")


def too_large(topic: str, size: int | None, limit: int | None = None) -> MessageTooLargeError:
    """A message that its topic, or a whole request, has no room for.

    Args:
        topic: Where it should have gone.
        size: Its bytes; None where it is one of many.
        limit: The bytes of a request, where that is what it does not fit into.
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
    """A topic that nobody created, looked for during *seconds*."""
    missing = TransportError(
        f"topic {topic!r} does not exist, and the brokers did not create it on use within {seconds:g} s: create it, "
        "or check its name"
    )
    missing.retriable = False
    return missing


def nothing_acknowledged(servers: str | None, seconds: float) -> TransportError:
    """Brokers that are silent on what is published."""
    return TransportError(
        f"the brokers of {servers} acknowledged nothing for {seconds:g} s: "
        "check that they run, and that enough replicas of each partition are in sync"
    )


def _denied(error: BaseException, group_id: str) -> AuthorizationError | None:
    # aiokafka wraps refusals that it does not expect in a KafkaError of their repr.
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
