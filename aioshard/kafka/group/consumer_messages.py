"""The heartbeats of the consumer protocol (KIP-848), and their answers, as values of `ConsumerMember`."""

import uuid
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from aioshard.kafka.wire.errors import IncompleteResponseError
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.requests import CONSUMER_GROUP_HEARTBEAT

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
STATIC_LEAVE_EPOCH: Final = -2
"""Keeps the partitions of a static member for a session: its next process gets them."""
_UNCHANGED: Final = -1


class TopicIdPartition(NamedTuple):
    """A partition of a topic by the topic's id, as heartbeats name it."""

    topic_id: uuid.UUID
    partition: int


TopicIdPartitions = frozenset[TopicIdPartition]


@dataclass(frozen=True, slots=True, eq=False)
class Heartbeat:
    """A request. None means that nothing has changed since the last answered one."""

    life: int
    sent_at: float
    member_id: str
    epoch: int
    instance_id: str | None = None
    rack: str | None = None
    rebalance_timeout: float | None = None
    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: TopicIdPartitions | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The response to a heartbeat."""

    error: int
    """Kafka's error code; 0 if there is none."""
    message: str = ""
    epoch: int = 0
    interval: float = 0.0
    """Seconds between two heartbeats."""
    assignment: Collection[TopicIdPartition] | None = None
    """None if it has not changed."""


def heartbeat_request(group_id: str, heartbeat: Heartbeat) -> Request:
    """Return the request of a heartbeat."""
    timeout = heartbeat.rebalance_timeout
    return CONSUMER_GROUP_HEARTBEAT(
        group=group_id,
        member=heartbeat.member_id,
        epoch=heartbeat.epoch,
        instance=heartbeat.instance_id,
        rack=heartbeat.rack,
        rebalance_timeout_ms=_UNCHANGED if timeout is None else round(timeout * 1000),
        topics=None if heartbeat.topics is None else list(heartbeat.topics),
        pattern=heartbeat.pattern,
        assignor=heartbeat.assignor,
        owned=None if heartbeat.owned is None else _by_topic(heartbeat.owned),
    )


def heartbeat_answer(response: Any) -> HeartbeatAnswer:
    """Read a response to ConsumerGroupHeartbeat; an error code is part of the answer.

    Raises:
        IncompleteResponseError: The response has an assignment without its topics or partitions.
    """
    return HeartbeatAnswer(
        response.error,
        (response.message or "").strip(),
        response.epoch,
        response.interval_ms / 1000,
        None if response.assignment is None or response.error else _partitions(response.assignment.topics),
    )


def _by_topic(partitions: TopicIdPartitions) -> list[dict[str, Any]]:
    topics: defaultdict[uuid.UUID, list[int]] = defaultdict(list)
    for topic_id, partition in sorted(partitions):
        topics[topic_id].append(partition)
    return [{"id": topic_id, "partitions": numbers} for topic_id, numbers in topics.items()]


def _partitions(topics: Any) -> TopicIdPartitions:
    if topics is None or any(topic.partitions is None for topic in topics):
        raise IncompleteResponseError("the partitions of an assignment are missing in the response")
    return frozenset(TopicIdPartition(topic.id, number) for topic in topics for number in topic.partitions)
