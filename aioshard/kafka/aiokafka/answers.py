"""Translate the errors of aiokafka's coordinator.

Our own client has its readers of responses in `aioshard.kafka.wire.responses`. These errors are read elsewhere:

* aiokafka's own refresh of commits reads the level of the partition only. It is not on our path, because every
  partition gets a position as soon as it is assigned (`Internals.take_assignment`).
* librdkafka reports success for a partition that a commit response leaves out. A partition missing from its callback is
  not acknowledged (`ConsumerThread._refusal_in`).
* confluent-kafka's `pause` and `resume` do not pass errors to Python. The seek that follows raises, and is repeated.
"""

from aiokafka import errors as kafka

from aioshard.kafka.errors import (
    CLUSTER_DENIED,
    GROUP_DENIED,
    INVALID_REQUEST,
    TOPIC_DENIED,
    UNSUPPORTED_VERSION,
    Cause,
)

_PASSES = frozenset({2, 9, 13, 51, 70, 71, 72, 74, 75, 78, 80, 83, 88, 89, 100, 103, 106})
"""Error codes that Kafka calls retriable, but aiokafka treats as final or does not know."""
_EXPLAINED = {
    88: (
        "UNSTABLE_OFFSET_COMMIT",
        "A transaction of the group is still open; it ends at transaction_timeout at the latest",
    ),
}
"""Names and texts for error codes that aiokafka does not explain."""
_WRAPPED = {
    "GroupAuth": GROUP_DENIED,
    "TopicAuth": TOPIC_DENIED,
    "ClusterAuth": CLUSTER_DENIED,
    "UnsupportedVersionError": UNSUPPORTED_VERSION,
    "InvalidRequestError": INVALID_REQUEST,
}
"""aiokafka wraps unexpected refusals in a KafkaError that contains only their repr."""


def error_for(code: int, *what: str) -> kafka.KafkaError:
    """Turn an error code into an error about *what*; retriable if Kafka's own clients retry."""
    error = kafka.for_code(code)(*what)
    error.retriable = error.retriable or code in _PASSES
    if code not in kafka.kafka_errors:
        error.errno, error.message, error.description = code, f"ERROR {code}", "the client has no name for it"
    if code in _EXPLAINED:
        error.message, error.description = _EXPLAINED[code]
    return error


def raise_for(code: int, *what: str) -> None:
    """Raise the error of an error code; 0 means no error."""
    if code:
        raise error_for(code, *what)


def reason(error: BaseException) -> str:
    """Return an error's text without the final full stop, or its class name if it has no text."""
    text = str(error).strip().rstrip(".")
    if isinstance(error, kafka.BrokerResponseError):
        description = getattr(error, "description", "").split(".")[0].strip()
        return f"{getattr(error, 'message', type(error).__name__)}: {description or text}"
    return text or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def cause_of(error: BaseException) -> Cause:
    """Describe an error that aiokafka raised."""
    text = repr(error)
    code = next((code for name, code in _WRAPPED.items() if name in text), -1)
    if code < 0 and isinstance(error, kafka.BrokerResponseError):
        code = error.errno
    topics = error.args[0] if isinstance(error, kafka.TopicAuthorizationFailedError) and error.args else ()
    topics = (topics,) if isinstance(topics, str) else tuple(sorted(topics))
    return Cause(code, reason(error), bool(getattr(error, "retriable", False)), topics)
