"""Translate confluent-kafka's errors into aioshard's, with messages that name the group, topic or partition."""
# ruff: noqa: SLF001 - the client's names for its own errors begin with an underscore

from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    CommitError,
    CommitRefusedError,
    CorruptRecordError,
    MetadataRefusedError,
    OffsetOutOfRangeError,
    TransportError,
)
from aioshard.ports import InstanceIdTakenError
from aioshard.records import TopicPartition

__all__ = ["commit_error", "error_of", "fetch_error", "group_error", "may_pass", "reason", "topic_denied"]

_MOVED_ON = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError._NO_OFFSET,
    }
)
"""Errors that mean the group has moved on since we got our membership."""
_TOO_LONG = frozenset({KafkaError.OFFSET_METADATA_TOO_LARGE, KafkaError.INVALID_COMMIT_OFFSET_SIZE})
_OUT_OF_RANGE = frozenset({KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET})
_UNREADABLE = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG})
_PASSES = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
        KafkaError._WAIT_CACHE,
        KafkaError._RESOLVE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
_NAMED = 5


def error_of(raised: BaseException) -> KafkaError | None:
    """Return the client's error inside an exception it raised."""
    first = raised.args[0] if isinstance(raised, KafkaException) and raised.args else None
    return first if isinstance(first, KafkaError) else None


def reason(error: KafkaError | BaseException | None) -> str:
    """Return the name of an error's code and its text, without the final full stop."""
    if isinstance(error, BaseException):
        known = error_of(error)
        return reason(known) if known is not None else str(error).strip().rstrip(".") or type(error).__name__
    if error is None:
        return "no reason was given"
    return f"{error.name()}: {error.str().strip().rstrip('.')}"


def may_pass(error: KafkaError | None) -> bool:
    """Whether the error may be transient: the same request may succeed later."""
    return error is not None and (error.retriable() or error.code() in _PASSES)


def group_error(error: KafkaError, group_id: str, instance: str | None, session_timeout: float) -> TransportError:
    """Return the error that ends membership for good: a refusal, or a client that gave up."""
    if error.code() in {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID} or (
        error.code() == KafkaError._FATAL and "instance" in error.str().lower()
    ):
        killed = "; one that was killed keeps the id until its session has timed out"
        why = f" ({reason(error)}{killed if 'still used' in error.str() else ''})"
        return InstanceIdTakenError(group_id, str(instance), session_timeout, why)
    return _denied(error, group_id) or ClientLostError(
        f"the Kafka client gave up on group {group_id!r} ({reason(error)}); a new client is needed"
    )


def commit_error(error: KafkaError | None, partitions: Collection[TopicPartition], group_id: str) -> TransportError:
    """Return the error of a commit that was not acknowledged."""
    if error is not None and error.code() in _MOVED_ON:
        return CommitRefusedError(
            f"the broker refused a commit of group {group_id!r}: the group has moved on "
            f"({reason(error)}); what was not committed is delivered again"
        )
    if error is not None and error.code() in _TOO_LONG:
        return MetadataRefusedError(
            f"the broker did not store what was noted with a commit of group {group_id!r} ({reason(error)})"
        )
    named = ", ".join(map(str, list(partitions)[:_NAMED]))
    if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and partitions:
        return topic_denied(min(partitions).topic)
    denied = _denied(error, group_id) if error is not None else None
    return denied or CommitError(
        f"a commit of group {group_id!r} for {named}{', …' if len(partitions) > _NAMED else ''} "
        f"was not acknowledged ({reason(error)}); it stays due"
    )


def fetch_error(error: KafkaError, name: TopicPartition, position: int) -> TransportError:
    """Return the error of a partition that cannot be read at *position*."""
    if error.code() in _OUT_OF_RANGE:
        return OffsetOutOfRangeError(name, position)
    if error.code() in _UNREADABLE:
        return CorruptRecordError(
            f"the batch at offset {position} of {name} cannot be read ({reason(error)}): the position stays before "
            "it. Restore it from a replica, or move the group past it with the consumer stopped"
        )
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return topic_denied(name.topic)
    failed = TransportError(f"the brokers did not tell the records of {name}: {reason(error)}")
    failed.retriable = may_pass(error)
    return failed


def _denied(error: KafkaError, group_id: str) -> AuthorizationError | None:
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return AuthorizationError(
            f"the brokers do not allow this user to read with group {group_id!r}: "
            f"grant READ and DESCRIBE on the group, or use another group id"
        )
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return AuthorizationError(
            f"the brokers do not allow this user to read a topic that this app subscribes to ({reason(error)}): grant "
            "READ and DESCRIBE on it"
        )
    return None


def topic_denied(topic: str) -> AuthorizationError:
    """Return the error of a topic that this user may not read."""
    return AuthorizationError(
        f"the brokers do not allow this user to read topic {topic!r}: grant READ and DESCRIBE on it"
    )
