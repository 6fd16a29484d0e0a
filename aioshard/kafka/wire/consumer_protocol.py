"""Read what the consumers of a classic group write for each other: subscriptions and assignments.

Brokers store both as bytes that they do not read. Newer versions append fields, which are ignored here. While a group
rebalances, brokers return no bytes.
"""

import struct
from typing import Any

from aioshard.kafka.wire.notation import Codec, Structure, parse
from aioshard.records import TopicPartition

_SUBSCRIPTION = Structure("Subscription", parse("version:i2 topics:s*")).codec(0, flexible=False)
_ASSIGNMENT = Structure("Assignment", parse("version:i2 topics:[topic:s partitions:i4*]")).codec(0, flexible=False)


def subscribed_topics(content: bytes | None) -> frozenset[str]:
    """Return the topics of a subscription; empty if there is none, or it is not one."""
    subscription = _decoded(_SUBSCRIPTION, content)
    return frozenset(topic for topic in subscription.topics or () if topic is not None) if subscription else frozenset()


def assigned_partitions(content: bytes | None) -> tuple[TopicPartition, ...]:
    """Return the partitions of an assignment in order; empty if there is none, or it is not one."""
    assignment = _decoded(_ASSIGNMENT, content)
    if assignment is None:
        return ()
    return tuple(
        sorted(
            TopicPartition(part.topic, number)
            for part in assignment.topics or ()
            if part.topic is not None
            for number in part.partitions or ()
        )
    )


def _decoded(codec: Codec, content: bytes | None) -> Any:
    try:
        decoded, _ = codec.decode(content or b"", 0)
    except (struct.error, IndexError, ValueError):
        return None
    return decoded
