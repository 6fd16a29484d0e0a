"""The sentences and errors of a member of a group."""

import base64
import datetime as dt
import uuid
from collections.abc import Collection, Mapping, Sequence

from aioshard.errors import CommitRefusedError, TransportError
from aioshard.kafka.errors import Cause, commit_error, named
from aioshard.kafka.group.member import Ended, Refused, Troubled
from aioshard.kafka.groups import GroupMember
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.records import TopicPartition


def text_of(event: Troubled | Refused | Ended) -> str:
    """Return the message of the brokers, or what their code means."""
    if event.message:
        return event.message.rstrip(".")
    known = ERROR_CODES.get(event.code or 0)
    return f"error {event.code}" if known is None else known.text


def still_joining(group_id: str, others: Sequence[GroupMember], session: str) -> str:
    """Describe a rebalance that lasts; the brokers do not say which member has not rejoined, nor why."""
    if len(others) == 1:
        members = str(others[0])
        which = "it"
    else:
        members = f"{len(others)} other members ({named(others)})"
        which = "one of them"
    return (
        f"group {group_id!r} is still rebalancing with {members}; if {which} has died, the rebalance lasts until its "
        f"session ends, {session} after its last heartbeat"
    )


def unnamed(group_id: str, topic_ids: Mapping[uuid.UUID, float]) -> str:
    """Describe assigned topics that no broker names, each with the time since when."""
    first = min(topic_ids, key=lambda topic_id: (topic_ids[topic_id], topic_id))
    since = dt.datetime.fromtimestamp(topic_ids[first], dt.UTC).isoformat(sep=" ", timespec="seconds")
    if len(topic_ids) == 1:
        what = f"partitions of a topic that no broker names, by its id {_kafka_text(first)}"
        cause = "the topic was deleted, or this user has no DESCRIBE on it; nothing of it is consumed"
    else:
        what = f"partitions of {len(topic_ids)} topics that no broker names, by their ids, {_kafka_text(first)} first"
        cause = "the topics were deleted, or this user has no DESCRIBE on them; nothing of them is consumed"
    return f"group {group_id!r} has assigned {what}, since {since}: {cause}"


def _kafka_text(topic_id: uuid.UUID) -> str:
    """Return an id of a topic as Kafka's commands print it."""
    return base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def not_ours(group_id: str, partitions: Collection[TopicPartition]) -> CommitRefusedError:
    """Return the error of a commit for a membership that has ended, or for partitions that were released."""
    return CommitRefusedError(
        f"a commit of group {group_id!r} was not sent: the membership that it was made for has ended, or "
        f"{named(partitions)} was released"
    )


def overtaken(group_id: str, partitions: Collection[TopicPartition]) -> TransportError:
    """Return the error of a commit with an epoch that was raised while it was on its way."""
    cause = Cause(-1, "the group is in another epoch by now, which the next answer brings")
    return commit_error(cause, partitions, group_id)
