"""Read and write what the consumers of a classic group tell each other: subscriptions and assignments.

Brokers store both as bytes that they do not read. Newer versions append fields; those that we do not know are ignored.
While a group rebalances, brokers return no bytes.

Source of the formats: `ConsumerProtocolSubscription` and `ConsumerProtocolAssignment` in the jars of Kafka.
"""

import struct
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from aioshard.kafka.wire.notation import Structure, parse
from aioshard.records import TopicPartition, by_topic

SUBSCRIPTION = parse(
    "topics:s* user_data:b owned_partitions:[topic:s partitions:i4*]@1+ generation:i4@2+ rack:s@3+",
)
ASSIGNMENT = parse("assigned_partitions:[topic:s partitions:i4*] user_data:b")
NEWEST: Final = 3
"""The newest version of both that we know. Older members ignore what it has in addition."""
NO_GENERATION: Final = -1

_VERSION = struct.Struct(">h")
_SUBSCRIPTION = Structure("Subscription", SUBSCRIPTION)
_ASSIGNMENT = Structure("Assignment", ASSIGNMENT)


class Subscription(NamedTuple):
    """The part of a join that the leader of the group reads."""

    topics: frozenset[str]
    user_data: bytes = b""
    """For the assignor."""
    owned: frozenset[TopicPartition] | None = frozenset()
    """The partitions that the member still works on (KIP-429). None if its version cannot say so."""
    generation: int = NO_GENERATION
    """The generation that assigned `owned` (KIP-792); -1 if the member's version cannot say so, or there was none."""


def write_subscription(subscription: Subscription) -> bytes:
    """Return a subscription in the newest version."""
    values = {
        "topics": sorted(subscription.topics),
        "user_data": subscription.user_data,
        "owned_partitions": _parts(subscription.owned or ()),
        "generation": subscription.generation,
        "rack": None,
    }
    return _encoded(_SUBSCRIPTION, values)


def read_subscription(content: bytes | None) -> Subscription:
    """Return a subscription; without topics if there is none, or it is not one."""
    decoded = _decoded(_SUBSCRIPTION, content)
    if decoded is None:
        return Subscription(frozenset(), owned=None)
    version, values = decoded
    return Subscription(
        frozenset(topic for topic in values.topics or () if topic is not None),
        values.user_data or b"",
        frozenset(_partitions(values.owned_partitions)) if version > 0 else None,
        NO_GENERATION if values.generation is None else values.generation,
    )


def subscribed_topics(content: bytes | None) -> frozenset[str]:
    """Return the topics of a subscription; empty if there is none, or it is not one."""
    return read_subscription(content).topics


def write_assignment(partitions: Collection[TopicPartition]) -> bytes:
    """Return an assignment in the newest version."""
    return _encoded(_ASSIGNMENT, {"assigned_partitions": _parts(partitions), "user_data": b""})


def assigned_partitions(content: bytes | None) -> tuple[TopicPartition, ...]:
    """Return the partitions of an assignment in order, each once; empty if there is none, or it is not one."""
    decoded = _decoded(_ASSIGNMENT, content)
    if decoded is None:
        return ()
    _, values = decoded
    return tuple(sorted(set(_partitions(values.assigned_partitions))))


def _parts(partitions: Collection[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": topic, "partitions": numbers} for topic, numbers in by_topic(sorted(partitions))]


def _partitions(parts: Collection[Any] | None) -> list[TopicPartition]:
    """Return the partitions of a decoded array, without those that cannot exist."""
    return [
        TopicPartition(part.topic, number)
        for part in parts or ()
        if part.topic is not None
        for number in part.partitions or ()
        if number >= 0
    ]


def _encoded(structure: Structure, values: dict[str, Any]) -> bytes:
    out = bytearray(_VERSION.pack(NEWEST))
    structure.codec(NEWEST, flexible=False).encode(out, values)
    return bytes(out)


def _decoded(structure: Structure, content: bytes | None) -> tuple[int, Any] | None:
    """Return the version and the fields; None if there are none.

    Some clients announce version 1 and write version 0.
    """
    data = content or b""
    try:
        (version,) = _VERSION.unpack_from(data)
    except struct.error:
        return None
    for known in (min(max(version, 0), NEWEST), 0):
        try:
            values, _ = structure.codec(known, flexible=False).decode(data, _VERSION.size)
        except (struct.error, IndexError, ValueError):
            continue
        return known, values
    return None
