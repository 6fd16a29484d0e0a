"""Parse broker responses, and translate aiokafka's errors.

Responses have errors at several levels: of the whole response, of a topic, of a partition. aiokafka often reads only
one level, and treats a missing part as success. The functions here read all levels and refuse missing parts, and
`tests/unit/properties/test_responses.py` feeds them every error code in every field. These errors are read elsewhere:

* aiokafka's own refresh of commits reads the level of the partition only. It is not on our path, because every
  partition gets a position before it is fetched (`FetchBuffer.begin`).
* aiokafka's fetcher logs most errors of a partition and fetches again, and ignores the top level: no position moves.
* librdkafka reports success for a partition that a commit response leaves out. A partition missing from its callback is
  not acknowledged (`ConsumerThread._refusal_in`).
* confluent-kafka's `pause` and `resume` do not pass errors to Python. The seek that follows raises, and is repeated.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any

from aiokafka import errors as kafka
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from aioshard.core.assignment import Member
from aioshard.errors import CorruptRecordError
from aioshard.kafka.errors import (
    CLUSTER_DENIED,
    GROUP_DENIED,
    INVALID_REQUEST,
    TOPIC_DENIED,
    UNSUPPORTED_VERSION,
    Cause,
    corrupt_batch,
)
from aioshard.kafka.groups import DescribedGroup
from aioshard.ports import Committed
from aioshard.records import PartitionInfo, TopicPartition

_PASSES = frozenset({2, 9, 13, 51, 70, 71, 72, 74, 75, 78, 80, 83, 88, 89, 100, 103, 106})
"""Error codes that Kafka calls retriable, but aiokafka treats as final or does not know."""
_EXPLAINED = {
    87: ("INVALID_RECORD", "The record itself was rejected; a compacted topic accepts no record without a key"),
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


def corrupt_record(error: BaseException, topic_partition: TopicPartition, offset: int) -> CorruptRecordError:
    """Return the error of a batch that cannot be decoded."""
    if isinstance(error, kafka.UnsupportedCodecError):
        return CorruptRecordError(
            f"the batch at offset {offset} of {topic_partition} cannot be decompressed ({reason(error)}): "
            "install the codec with  pip install 'aiokafka[all]'"
        )
    return corrupt_batch(reason(error), topic_partition, offset)


_NO_TOPIC = frozenset({3, 17})
"""Error codes for topics that do not exist and for invalid topic names."""
_ABSENT = _NO_TOPIC | {29}
"""The same, plus topics that this user may not see."""


class IncompleteAnswerError(kafka.KafkaError):  # type: ignore[misc]
    """A broker's response leaves out something requested; a retry may succeed."""

    retriable = True


def only_part(parts: Sequence[Any], what: str) -> Any:
    """Return the only part of a response about one thing, which *what* names."""
    if len(parts) != 1:
        raise IncompleteAnswerError(f"{what} is missing in the response")
    return parts[0]


def _refuse_missing(requested: Collection[TopicPartition], answered: Collection[TopicPartition], what: str) -> None:
    if missing := set(requested).difference(answered):
        raise IncompleteAnswerError(f"the {what} of {min(missing)} is missing in the response")


def _parts(response: Any) -> Iterator[tuple[TopicPartition, list[Any]]]:
    """Return each partition of a response, with its fields in the response."""
    return (
        (TopicPartition(topic, number), part[: len(part) - len(tags)])
        for topic, parts, *tags in response.topics
        for number, *part in parts
    )


# Offsets of a group ---------------------------------------------------------------------


def stored_offsets(response: Any, requested: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
    """Parse an OffsetFetch response, versions 1 to 3 and 7: the committed offsets, without partitions that have none.

    A broker that does not coordinate the group reports it at the top level of the response and lists no partitions.
    The embedded broker has no list of all commits of a group: it returns no topics at all.

    Raises:
        IncompleteAnswerError: A partition of *requested* is missing.
        KafkaError: The response or one of its partitions has an error code.
    """
    # Version 1 has no error code.
    raise_for(kafka.UnsupportedVersionError.errno if response.topics is None else getattr(response, "error_code", 0))
    commits = {}
    for topic_partition, (offset, *_epoch, metadata, code) in _parts(response):
        raise_for(code)
        commits[topic_partition] = Committed(offset, (metadata or "").removesuffix("\0"))  # librdkafka sends C strings
    _refuse_missing(requested, commits, "committed offset")
    return {topic_partition: committed for topic_partition, committed in commits.items() if committed.offset >= 0}


def refused_offsets(response: Any, sent: Collection[TopicPartition]) -> dict[TopicPartition, kafka.KafkaError]:
    """Parse an OffsetCommit response: the error of each partition of *sent* that is not acknowledged.

    Errors of a single topic come after those that affect the whole group.
    """
    refused = {
        topic_partition: IncompleteAnswerError(f"the acknowledgement of {topic_partition} is missing in the response")
        for topic_partition in sorted(sent)
    }
    for topic_partition, (code,) in _parts(response):
        if code:
            refused[topic_partition] = error_for(code, topic_partition.topic)
        else:
            refused.pop(topic_partition, None)
    return dict(sorted(refused.items(), key=lambda item: getattr(item[1], "errno", 0) in _ABSENT))


def produced(response: Any) -> dict[TopicPartition, tuple[int, kafka.KafkaError | None]]:
    """Parse a Produce response, up to version 7: the offset of each stored batch, or the error of the others."""
    return {
        topic_partition: (offset, error_for(code, topic_partition.topic) if code else None)
        for topic_partition, (code, offset, *_) in _parts(response)
    }


def throttled(response: Any) -> float:
    """Return for how many seconds the broker reads nothing more from this connection; 0 if we are within our quota."""
    return max(getattr(response, "throttle_time_ms", 0), 0) / 1000  # from version 1 on


# Logs -------------------------------------------------------------------------------------


def log_offsets(response: Any, requested: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Parse a ListOffsets response, versions 1 to 3: an offset per partition; -1 if no record is that recent.

    Raises:
        IncompleteAnswerError: A partition of *requested* is missing, or has a retriable error.
        KafkaError: A partition has an error that is not retriable.
    """
    offsets = led_offsets(response)
    _refuse_missing(requested, offsets, "offset")
    return offsets


def led_offsets(response: Any) -> dict[TopicPartition, int]:
    """Parse a ListOffsets response, versions 1 to 3: an offset per partition that the broker leads now.

    A partition with a retriable error is left out, so that it does not hold up the others.

    Raises:
        KafkaError: A partition has an error that is not retriable.
    """
    offsets = {}
    for topic_partition, (code, _, offset) in _parts(response):
        if not code:
            offsets[topic_partition] = int(offset)
        elif not (error := error_for(code, str(topic_partition))).retriable:
            raise error
    return offsets


# Topics -----------------------------------------------------------------------------------


def partition_info(partition: int, leader: int, replicas: Iterable[int], in_sync: Iterable[int]) -> PartitionInfo:
    """Describe a partition as a broker does, for which leader -1 is none."""
    return PartitionInfo(partition, None if leader < 0 else leader, tuple(replicas), tuple(in_sync))


def topic_partitions(response: Any, topic: str) -> dict[int, PartitionInfo]:
    """Parse a Metadata response: the partitions of a topic by number; empty if the topic does not exist.

    Raises:
        IncompleteAnswerError: The topic is missing, or the broker lists no brokers, as while it starts.
        KafkaError: The topic has an error code other than "does not exist".
    """
    for code, name, *_, partitions in response.topics if response.brokers else ():
        if name == topic:
            if code not in _NO_TOPIC:
                raise_for(code, topic)
            return {part[1]: partition_info(*part[1:5]) for part in partitions}
    raise IncompleteAnswerError(f"topic {topic!r} is missing in the response")


def existing_topics(response: Any) -> frozenset[str]:
    """Parse a Metadata response: the topics that exist and that this user may see, without internal topics.

    Raises:
        IncompleteAnswerError: The broker lists no brokers, as while it starts.
    """
    if not response.brokers:
        raise IncompleteAnswerError("the brokers are missing in the response")
    return frozenset(
        name for code, name, *rest in response.topics if code not in _ABSENT and not (len(rest) > 1 and rest[0])
    )


# Members ----------------------------------------------------------------------------------


def described_group(response: Any, group_id: str) -> DescribedGroup:
    """Parse a DescribeGroups response about one group, from version 4 on.

    Raises:
        IncompleteAnswerError: The group is missing.
        KafkaError: The group has an error code, or the broker is too old to name static members.
    """
    group = only_part(response.to_object()["groups"], f"group {group_id!r}")
    raise_for(group["error_code"], group_id)
    members: dict[str, Member] = {}
    instances: dict[str, str] = {}
    for member in group["members"]:
        if "group_instance_id" not in member:
            raise kafka.UnsupportedVersionError("static members are not named")
        name = member["member_id"]
        members[name] = Member(
            _subscription(member["member_metadata"]), assigned_partitions(member["member_assignment"])
        )
        if member["group_instance_id"]:
            instances[member["group_instance_id"]] = name
    return DescribedGroup(group["state"] == "Stable", members, instances)


def _subscription(content: bytes | None) -> frozenset[str]:
    """Decode a classic member's topics; empty if the member is not a consumer, or the group rebalances."""
    try:
        return frozenset(ConsumerProtocolMemberMetadata.decode(BytesIO(content or b"")).subscription)
    except (ValueError, TypeError):
        return frozenset()


def assigned_partitions(content: bytes | None) -> tuple[TopicPartition, ...]:
    """Decode a classic member's partitions; empty if the member is not a consumer, or the group rebalances."""
    try:
        topics = ConsumerProtocolMemberAssignment.decode(BytesIO(content or b"")).assignment
        return tuple(sorted(TopicPartition(topic, number) for topic, numbers in topics for number in numbers))
    except (ValueError, TypeError):  # nothing, or something else
        return ()
