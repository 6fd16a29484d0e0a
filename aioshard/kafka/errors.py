"""aioshard's errors for what brokers and Kafka clients report: one sentence per cause, the same for every client."""

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
    TransportError,
)
from aioshard.records import TopicPartition

OUT_OF_RANGE, CORRUPT, METADATA_TOO_LONG = 1, 2, 12
COMMITS_TOO_LARGE, TOPIC_DENIED, GROUP_DENIED, CLUSTER_DENIED, UNSTABLE_OFFSET = 28, 29, 30, 31, 88

GROUP_CHANGED = {
    22: "illegal generation",
    23: "inconsistent group protocol",
    25: "unknown member id",
    27: "rebalance in progress",
    68: "the group is not empty",
    82: "fenced instance id",
    110: "fenced member epoch",
    113: "stale member epoch",
}
"""Error codes that refuse a commit because of the group's members. For a member, the group has rebalanced since; for a
commit without a member id, the group has members."""

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
    if cause.code == TOPIC_DENIED:
        topics = f"topic {named([repr(topic) for topic in cause.topics])}" if cause.topics else "a subscribed topic"
        return AuthorizationError(f"the brokers do not allow this user to read {topics}: grant READ and DESCRIBE on it")
    return None


def group_error(cause: Cause, group_id: str) -> TransportError:
    """Return the error that ends the life of a client: missing permission, or a client that gave up."""
    return denied(cause, group_id) or ClientLostError(
        f"the Kafka client gave up on group {group_id!r} ({cause.reason}); a new client is needed"
    )


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


def nothing_acknowledged(servers: str | None, seconds: float) -> TransportError:
    """Return the error for brokers that acknowledge nothing."""
    return TransportError(
        f"the brokers of {servers} acknowledged nothing for {seconds:g} s: "
        "check that they run, and that enough replicas of each partition are in sync"
    )
