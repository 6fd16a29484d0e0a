"""Describe errors of confluent-kafka: those of the brokers, and those of librdkafka itself, with negative codes."""
# ruff: noqa: SLF001 - the client's names for its own errors begin with an underscore

from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import ClientLostError, InstanceIdTakenError, TransportError
from aioshard.kafka import errors
from aioshard.records import TopicPartition

_CODES = {
    KafkaError._ASSIGNMENT_LOST: KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._NO_OFFSET: KafkaError.ILLEGAL_GENERATION,
    KafkaError._AUTO_OFFSET_RESET: KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError._BAD_MSG: KafkaError.INVALID_MSG,
    KafkaError._BAD_COMPRESSION: KafkaError.INVALID_MSG,
}
"""Brokers' codes for errors that librdkafka reports under another code."""
_FINAL = errors.JOIN_REFUSED | {
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError._FATAL,
}
_FATAL_TEXTS = {KafkaError(code).str(): code for code in (*errors.JOIN_REFUSED, errors.GROUP_DENIED)}
"""Brokers' codes by the text of librdkafka's fatal errors, which have no other code."""
_RETRIABLE = frozenset(
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


def error_of(raised: BaseException) -> KafkaError | None:
    """Return the client's error inside an exception it raised."""
    first = raised.args[0] if isinstance(raised, KafkaException) and raised.args else None
    return first if isinstance(first, KafkaError) else None


def reason(error: KafkaError | BaseException | None) -> str:
    """Return the name of an error's code and its text, without the final full stop."""
    if isinstance(error, BaseException):
        client_error = error_of(error)
        return (
            reason(client_error) if client_error is not None else str(error).strip().rstrip(".") or type(error).__name__
        )
    return "no reason given" if error is None else f"{error.name()}: {error.str().strip().rstrip('.')}"


def cause_of(error: KafkaError | None, topics: Collection[str] = ()) -> errors.Cause:
    """Describe an error of the client, or a missing response; *topics* are the topics concerned."""
    if error is None:
        return errors.Cause(-1, reason(error))
    return errors.Cause(
        _code_of(error),
        reason(error),
        error.retriable() or error.code() in _RETRIABLE,
        tuple(sorted(set(topics))),
    )


def _code_of(error: KafkaError) -> int:
    if error.code() == KafkaError._FATAL:
        for text, code in _FATAL_TEXTS.items():
            if text in error.str():
                return code
    return _CODES.get(error.code(), error.code())


def is_final(error: KafkaError) -> bool:
    """Whether the client cannot continue after this error."""
    return error.fatal() or error.code() in _FINAL


def group_error(
    raised: Exception | KafkaError, group_id: str, instance: str | None, session_timeout: float
) -> TransportError:
    """Return the error that ends this life of the client: a refusal, or a client that gave up."""
    if isinstance(raised, TransportError):
        return raised
    error = raised if isinstance(raised, KafkaError) else error_of(raised)
    if error is None:
        lost = ClientLostError(f"the Kafka client failed ({reason(raised)})")
        lost.__cause__ = raised if isinstance(raised, BaseException) else None
        return lost
    if error.code() in {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID} or (
        error.code() == KafkaError._FATAL and "instance" in error.str().lower()
    ):
        killed = "; a killed process keeps the id until its session has timed out"
        why = f" ({reason(error)}{killed if 'still used' in error.str() else ''})"
        return InstanceIdTakenError(group_id, str(instance), session_timeout, why)
    return errors.group_error(cause_of(error), group_id, session_timeout)


def commit_error(error: KafkaError | None, partitions: Collection[TopicPartition], group_id: str) -> TransportError:
    """Return the error of a commit that was not acknowledged."""
    return errors.commit_error(cause_of(error, [partition.topic for partition in partitions]), partitions, group_id)
