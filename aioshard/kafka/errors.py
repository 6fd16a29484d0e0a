"""aioshard's errors for what brokers report: one sentence per cause."""

from collections.abc import Collection
from typing import NamedTuple

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    CommitError,
    CommitRefusedError,
    CorruptRecordError,
    MetadataRefusedError,
    OffsetOutOfRangeError,
    SessionTimeoutRefusedError,
    TransportError,
)
from aioshard.records import TopicPartition

OUT_OF_RANGE, CORRUPT, UNKNOWN_TOPIC, METADATA_TOO_LONG = 1, 2, 3, 12
COMMITS_TOO_LARGE, TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED, UNSTABLE_OFFSET = 28, 29, 30, 31, 88

GROUP_CHANGED = {
    22: "illegal generation",
    23: "inconsistent group protocol",
    25: "unknown member id",
    27: "rebalance in progress",
    68: "the group is not empty",
    69: "the group does not exist any more",
    82: "fenced instance id",
    110: "fenced member epoch",
    113: "stale member epoch",
}
"""Error codes that refuse a commit because of the group's members. For a member, the group has rebalanced since; for a
commit without a member id, the group has members."""

INVALID_GROUP_ID, GROUP_PROTOCOL, SESSION_TIMEOUT, UNSUPPORTED_VERSION, INVALID_REQUEST = 24, 23, 26, 35, 42
GROUP_IS_FULL, UNSUPPORTED_ASSIGNOR, INVALID_PATTERN = 81, 112, 128

_JOIN_REFUSED = {
    INVALID_GROUP_ID: "use another group id",
    UNSUPPORTED_VERSION: "remove the settings that it does not know, such as group_instance_id before Kafka 2.3",
    INVALID_REQUEST: "check group_instance_id and client_options",
    UNSUPPORTED_ASSIGNOR: "choose an assignor that the brokers have with client_options={'group_remote_assignor': …}",
    INVALID_PATTERN: "consume at least one topic by its name",
}
"""Advice for refusals of a member that only another setting ends."""
_JOIN_POSTPONED = {
    GROUP_PROTOCOL: "its other members use another assignor or group protocol: use theirs, or stop them",
    GROUP_IS_FULL: "it has as many members as the brokers allow: stop some, or raise group.max.size on the brokers",
}
"""Reasons why a member cannot join as long as the others stay."""

_NAMED = 5


class Cause(NamedTuple):
    """An error as a Kafka client reports it."""

    code: int
    """Kafka's error code; negative if the client itself failed."""
    reason: str
    """The client's text, without a final full stop."""
    retriable: bool = False
    """Whether the same request may succeed later."""
    topics: tuple[str, ...] = ()
    """The topics that the client names."""


def named(items: Collection[object]) -> str:
    """List the first items for a message."""
    return ", ".join(map(str, list(items)[:_NAMED])) + (", …" if len(items) > _NAMED else "")


def undecided(topic_partition: TopicPartition) -> TransportError:
    """Return the error for a log whose latest records are in a transaction that has not ended."""
    return TransportError(
        f"a transaction in {topic_partition} is still open: it ends at the latest after the transaction timeout of its "
        "producer"
    )


def denied(cause: Cause, group_id: str) -> AuthorizationError | None:
    """Return the error if this user lacks permission to read the group or a topic."""
    if cause.code == GROUP_DENIED:
        return AuthorizationError(
            f"the brokers do not allow this user to read with group {group_id!r}: "
            "grant READ and DESCRIBE on the group, or use another group id"
        )
    return _denied_topics(cause.topics) if cause.code == TOPIC_DENIED else None


def _denied_topics(topics: Collection[str]) -> AuthorizationError:
    what = f"topic {named([repr(topic) for topic in topics])}" if topics else "a subscribed topic"
    return AuthorizationError(f"the brokers do not allow this user to read {what}: grant READ and DESCRIBE on it")


def no_leader(topic_partition: TopicPartition, *, is_denied: bool) -> TransportError:
    """Return the error of a partition that no broker leads, as far as we know.

    Args:
        topic_partition: The partition.
        is_denied: Whether the brokers do not describe its topic to this user.
    """
    if is_denied:
        return _denied_topics([topic_partition.topic])
    return TransportError(f"{topic_partition} cannot be read: it does not exist, or has no leader now")


def group_error(cause: Cause, group_id: str, session_timeout: float) -> TransportError:
    """Return the error that ends the life of a client: a refusal, or a client that gave up."""
    if (permission := denied(cause, group_id)) is not None:
        return permission
    if cause.code == SESSION_TIMEOUT:
        return SessionTimeoutRefusedError(session_timeout)
    if (advice := _JOIN_REFUSED.get(cause.code)) is not None:
        return TransportError(
            f"the brokers refused a member of group {group_id!r} ({cause.reason}): {advice}", retriable=False
        )
    if (why := _JOIN_POSTPONED.get(cause.code)) is not None:
        return ClientLostError(f"group {group_id!r} accepts no such member now ({cause.reason}): {why}")
    return ClientLostError(f"the Kafka client gave up on group {group_id!r} ({cause.reason}); a new client is needed")


def request_error(cause: Cause, what: str, group_id: str = "") -> TransportError:
    """Return the error of a failed request; *what* says what the brokers did not do, as in "return the offsets"."""
    return denied(cause, group_id) or TransportError(
        f"the brokers did not {what}: {cause.reason}", retriable=cause.retriable
    )


def commit_error(cause: Cause, partitions: Collection[TopicPartition], group_id: str) -> TransportError:
    """Return the error of a commit that was not acknowledged."""
    if cause.code in GROUP_CHANGED:
        return CommitRefusedError(
            f"the broker refused a commit of group {group_id!r} because the group has rebalanced ({cause.reason}); "
            "uncommitted records are delivered again"
        )
    if cause.code in (METADATA_TOO_LONG, COMMITS_TOO_LARGE):
        return MetadataRefusedError(
            f"the broker did not store the metadata in a commit of group {group_id!r} ({cause.reason})"
        )
    return denied(cause, group_id) or CommitError(
        f"a commit of group {group_id!r} for {named(partitions)} was not acknowledged ({cause.reason}); "
        "it will be retried"
    )


def topic_refused(code: int, topic: str) -> TransportError:
    """Return the error of a commit that was refused because of one topic: it is unknown or denied."""
    if code == TOPIC_DENIED:
        return _denied_topics([topic])
    return CommitError(f"the brokers do not know topic {topic!r}: it was deleted, or created a moment ago")


def fetch_error(cause: Cause, topic_partition: TopicPartition, position: int) -> TransportError:
    """Return the error of a partition that cannot be read at *position*."""
    if cause.code == OUT_OF_RANGE:
        return OffsetOutOfRangeError(topic_partition, position)
    if cause.code == CORRUPT:
        return corrupt_batch(cause.reason, topic_partition, position)
    return request_error(cause._replace(topics=(topic_partition.topic,)), f"return the records of {topic_partition}")


def corrupt_batch(reason: str, topic_partition: TopicPartition, offset: int) -> CorruptRecordError:
    """Return the error of a batch that cannot be decoded."""
    return CorruptRecordError(
        f"the batch at offset {offset} of {topic_partition} cannot be read ({reason}); the position stays before it. "
        "Restore it from a replica, or stop the consumer and move the group past it"
    )


def publish_error(cause: Cause, topic: str) -> TransportError:
    """Return the error of a failed write to a topic."""
    if cause.code in (TOPIC_DENIED, CLUSTER_DENIED):
        return AuthorizationError(
            f"the brokers do not allow this user to write to topic {topic!r}: grant WRITE and DESCRIBE on it, "
            "and before Kafka 3.0 IDEMPOTENT_WRITE on the cluster"
        )
    return TransportError(f"the brokers did not accept records for topic {topic!r}: {cause.reason}")


def missing_topic(topic: str, waited: float | None = None) -> TransportError:
    """Return the error of a message for a topic that does not exist, even after *waited* seconds."""
    if waited is None:
        found = f"topic {topic!r} does not exist"
    else:
        found = f"topic {topic!r} does not exist, and the brokers did not create it within {waited:g} s"
    advice = "create it, for example with `aioshard topics MODULE:APP --create`, or check its name"
    return TransportError(f"{found}: {advice}", retriable=False)


def nothing_acknowledged(servers: str | None, seconds: float) -> TransportError:
    """Return the error for brokers that acknowledge nothing."""
    return TransportError(
        f"the brokers of {servers} acknowledged nothing for {seconds:g} s: "
        "check that they run, and that enough replicas of each partition are in sync"
    )


def reason_of(error: BaseException) -> str:
    """Return an error's text without the final full stop, or its class name if it has no text."""
    return str(error).strip().rstrip(".") or type(error).__name__
