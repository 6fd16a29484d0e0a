"""The Produce request, and the meaning of its answers for the messages in it."""

import enum
from collections.abc import Mapping
from typing import Any, Final

from aioshard.errors import AuthorizationError, MessageTooLargeError, TransportError
from aioshard.kafka.batches import message_size
from aioshard.kafka.errors import publish_error, reason_of
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import BrokerError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.metadata import Broker
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import PRODUCE
from aioshard.kafka.wire.responses import named_leaders
from aioshard.ports import Message
from aioshard.records import TopicPartition, by_topic
from aioshard.serde.payloads import unwritable

REQUEST_BYTES: Final = 8 * 1024 * 1024
"""A request contains no further batch that would make it larger than this."""
REQUEST_TIMEOUT: Final = 10.0
"""Seconds without a response after which a broker counts as gone; a few attempts fit into a producer's patience."""
TOPIC_TIMEOUT: Final = 5.0
"""Seconds to wait until an unknown topic or partition appears: a broker may not have heard of it yet."""


# The request -------------------------------------------------------------------------


class NotSentError(WireError):
    """The connection to the broker was not opened, so nothing was sent."""


async def produce(
    cluster: Cluster,
    node: int,
    batches: Mapping[TopicPartition, bytes],
    *,
    transactional_id: str | None = None,
    newest: int = PRODUCE.highest,
) -> Any:
    """Send batches to a broker in one request, and return the response.

    Args:
        cluster: The client.
        node: The broker, which leads all the partitions.
        batches: The encoded batch of each partition.
        transactional_id: The id of the transaction's producer, if the batches are part of a transaction.
        newest: The newest version of the request to use.

    Raises:
        NotSentError: The connection to the broker was not opened.
        UnsupportedVersionError: The broker speaks no version of the request that we speak.
        WireError: The broker did not answer; it may have stored the batches.
    """
    try:
        await cluster.connect_to(node, purpose=Purpose.PRODUCE)
    except WireError as error:
        raise NotSentError(str(error)) from error
    parts = by_topic(batches, lambda name: {"partition": name.partition, "records": batches[name]})
    request = PRODUCE(
        transactional_id=transactional_id,
        acks=-1,
        timeout_ms=round(REQUEST_TIMEOUT * 1000),
        topics=[{"topic": topic, "partitions": partitions} for topic, partitions in parts],
    )
    return await cluster.ask(node, request.up_to(newest), purpose=Purpose.PRODUCE, timeout=REQUEST_TIMEOUT)


def learn_leaders(cluster: Cluster, response: Any) -> set[TopicPartition]:
    """Accept the leaders that a broker names beside errors; return the partitions whose leader is news.

    Raises:
        IncompleteResponseError: The partitions of a topic are missing.
    """
    for endpoint in response.endpoints or ():
        cluster.learn_broker(Broker(*endpoint))
    leaders = named_leaders(response)
    return {name for name, leader in leaders.items() if cluster.metadata.learn_leader(name, leader)}


# Its answers -------------------------------------------------------------------------


class Verdict(enum.Enum):
    """The meaning of an answer, or of its absence, for one batch."""

    STORED = enum.auto()
    AGAIN = enum.auto()
    """This attempt certainly stored nothing: send it again."""
    IN_DOUBT = enum.auto()
    """This attempt may have stored it: send the same bytes again, and never use their numbers for others."""
    SUSPECT = enum.auto()
    """As in doubt, but probably permanent: try once more."""
    REFUSED = enum.auto()
    """This attempt stored nothing, and none will: no single message can be the reason."""
    MESSAGE_REFUSED = enum.auto()
    """As refused, but one message of several may be the reason."""
    GAP = enum.auto()
    """The broker expects other sequence numbers: it has forgotten us, or lost messages."""
    FENCED = enum.auto()
    """The broker knows a later epoch of the producer id, or does not know the id."""


_VERDICTS: Mapping[int, Verdict] = {
    46: Verdict.STORED,  # a duplicate of a batch whose offset the broker no longer knows
    # Checked before anything is stored. Not so 3, 5, 6 and 56: a leader that changes while it waits for its replicas
    # answers these too.
    **dict.fromkeys((14, 15, 16, 19, 51, 74, 75), Verdict.AGAIN),
    # Damaged on the way, or an error of the broker that it cannot name. It may depend on the messages.
    **dict.fromkeys((-1, 2), Verdict.SUSPECT),
    # Of the whole batch: the topic's name, its permissions, the record format, the codec.
    **dict.fromkeys((17, 29, 31, 43, 76), Verdict.REFUSED),
    # The size, the timestamp, a policy, or the record itself (a compacted topic rejects records without a key).
    **dict.fromkeys((10, 18, 32, 44, 87), Verdict.MESSAGE_REFUSED),
    **dict.fromkeys((45, 59), Verdict.GAP),
    **dict.fromkeys((47, 49, 90), Verdict.FENCED),
}
_TOO_LARGE = frozenset({10, 18})
_FINAL = frozenset({17, 32, 43, 44, 76, 87})
"""Error codes that the same message will get again."""


def verdict(error: WireError | None) -> Verdict:
    """Return what an error says about a batch. A code that no one has listed proves nothing: it is in doubt."""
    if error is None:
        return Verdict.STORED
    if isinstance(error, NotSentError):
        return Verdict.AGAIN
    if isinstance(error, UnsupportedVersionError):
        return Verdict.REFUSED  # by the client, which has not sent it
    if not isinstance(error, BrokerError):
        return Verdict.IN_DOUBT  # the broker did not answer, or left the batch out
    known = _VERDICTS.get(error.code)
    if known is not None:
        return known
    return Verdict.IN_DOUBT if error.retriable else Verdict.SUSPECT


# Errors of messages ------------------------------------------------------------------


def refused(error: WireError, message: Message, *, is_in_doubt: bool = False) -> TransportError:
    """Return the error of a message that a broker does not take.

    Args:
        error: From the broker.
        message: The message.
        is_in_doubt: Whether an earlier attempt may have stored it. The error is then retriable, as for any message
            whose fate is unknown.
    """
    code = error.code
    if code in _TOO_LARGE:
        refusal: TransportError = MessageTooLargeError(
            f"a message of {message_size(message)} bytes is too large for topic {message.topic!r}: raise "
            "max.message.bytes of the topic, or publish smaller messages"
        )
    else:
        refusal = publish_error(error.cause, message.topic)
        if not isinstance(refusal, AuthorizationError):
            refusal.retriable = code not in _FINAL
    if is_in_doubt:
        return type(refusal)(f"{refusal}; an earlier attempt may have stored the message", retriable=True)
    return refusal


def not_encoded(message: Message, error: Exception | None = None) -> TransportError:
    """Return the error of a message that cannot be encoded; *error* is from the encoder."""
    why = unwritable(message) or (f"it cannot be encoded ({reason_of(error)})" if error else "it cannot be encoded")
    return TransportError(f"a message for topic {message.topic!r} was not published: {why}", retriable=False)


def no_partition(message: Message, count: int) -> TransportError:
    """Return the error of a message for a partition that its topic, which has *count* of them, does not have."""
    return TransportError(
        f"topic {message.topic!r} has partitions 0 to {count - 1} and not {message.partition}: add partitions to it",
        retriable=False,
    )
