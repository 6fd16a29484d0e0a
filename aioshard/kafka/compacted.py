"""Topics that must be compacted: create them if they are missing, check them if they exist."""

from collections.abc import Mapping
from typing import Any

from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from aioshard.errors import AuthorizationError, SideTopicError, TransportError
from aioshard.kafka.answers import only_part, topic_settings
from aioshard.kafka.connections import close_administrator, start_administrator
from aioshard.kafka.reading import ReadingClient
from aioshard.kafka.translate import error_for, reason

__all__ = ["ensure_compacted"]

_CONFIGURATION = {"cleanup.policy": "compact", "segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}
"""Compact soon: a segment closes after at most an hour, and is cleaned once a tenth of the log is superseded."""
_POLICY = "cleanup.policy"


async def ensure_compacted(client: ReadingClient, options: Mapping[str, Any], topic: str, partitions: int) -> None:
    """Create a compacted topic, or check that an existing one is compacted and has enough partitions.

    Args:
        client: Looks up the topic without creating anything.
        options: Client options for an admin client that lives only during this call.
        topic: The topic's name.
        partitions: The number of partitions it needs.

    Raises:
        SideTopicError: The topic is not compacted, or has too few partitions.
        AuthorizationError: This user may not create or describe it.
        TransportError: The check or the creation failed.
    """
    admin = AIOKafkaAdminClient(**options)
    try:
        await start_administrator(admin)
        count = await client.partition_count(topic)
        if not count and await _create(admin, topic, partitions):
            return
        count = count or await client.partition_count(topic)
        if not count:
            raise kafka.UnknownTopicOrPartitionError(topic)  # somebody just created it; not every broker knows it yet
        await _check(admin, topic, count, partitions)
    except kafka.KafkaError as error:
        failed = TransportError(f"the brokers did not say whether topic {topic!r} is compacted: {reason(error)}")
        failed.retriable = bool(error.retriable)
        raise failed from error
    finally:
        await close_administrator(admin)


async def _create(admin: Any, topic: str, partitions: int) -> bool:
    """Create a topic with the broker's default replication factor; false if somebody else just created it."""
    cluster = await admin.describe_cluster()
    if cluster["controller_id"] not in {broker["node_id"] for broker in cluster["brokers"]}:
        # aiokafka would send its request to node None.
        raise TransportError(
            f"topic {topic!r} does not exist and cannot be created now, because the cluster has no controller. An "
            "election ends by itself; the embedded broker never has one, so use TestClient or a real broker there"
        )
    wanted = NewTopic(topic, partitions, 1, topic_configs=_CONFIGURATION)
    wanted.replication_factor = -1  # aiokafka does not accept it as an argument.
    answer = await admin.create_topics([wanted])
    _, code, *told = only_part(answer.topic_errors, f"topic {topic!r}")
    error = error_for(code)
    if not code or isinstance(error, kafka.TopicAlreadyExistsError):
        return not code
    if isinstance(error, kafka.TopicAuthorizationFailedError | kafka.ClusterAuthorizationFailedError):
        raise AuthorizationError(
            f"topic {topic!r} does not exist, as far as this user may see, and the brokers do not allow this user to "
            f"create it: grant CREATE on it, or create it with {partitions} partitions and cleanup.policy=compact and "
            "grant READ, WRITE and DESCRIBE_CONFIGS"
        )
    failed = TransportError(f"topic {topic!r} could not be created: {told[0] if told and told[0] else reason(error)}")
    failed.retriable = bool(error.retriable)
    raise failed


async def _check(admin: Any, topic: str, count: int, partitions: int) -> None:
    if count < partitions:
        raise SideTopicError(
            f"topic {topic!r} has {count} partitions and needs {partitions}, as many as the topic whose records it "
            f"keeps: add {partitions - count}"
        )
    wanted = ConfigResource(ConfigResourceType.TOPIC, topic, configs={_POLICY: ""})
    (answer,) = await admin.describe_configs([wanted])
    try:
        policy = topic_settings(answer, topic, [_POLICY])[_POLICY]
    except kafka.TopicAuthorizationFailedError as error:
        raise AuthorizationError(
            f"the brokers do not allow this user to look at the configuration of topic {topic!r}: grant "
            "DESCRIBE_CONFIGS on it"
        ) from error
    if policy.strip() != "compact":
        raise SideTopicError(
            f"topic {topic!r} has cleanup.policy={policy}: what it keeps would be deleted by its age. Set "
            "cleanup.policy=compact on it, without delete, or name another topic"
        )
