"""Read the responses of brokers: one function per request.

A response has error codes at several levels: of the whole response, of a group, a topic, a partition. The functions
here read all of them. They also refuse a response that leaves out a requested part, names one twice, or names another:
such a part never counts as empty or done. `tests/unit/properties/test_wire_responses.py` feeds them every error code in
every field of every version.

A response is what `Api.decode` returns, in any version that we speak.
"""

import enum
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

from aioshard.core.assignment import Member
from aioshard.kafka.groups import (
    GROUP_TIMES,
    HEARTBEAT_INTERVAL,
    SESSION_TIMEOUT,
    DescribedGroup,
    Group,
    GroupMember,
    GroupTime,
    GroupTimes,
)
from aioshard.kafka.wire.codes import error_for, raise_for
from aioshard.kafka.wire.consumer_protocol import assigned_partitions, subscribed_topics
from aioshard.kafka.wire.errors import BrokerError, IncompleteResponseError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.metadata import Broker, Leader
from aioshard.records import PartitionInfo, TopicPartition

T = TypeVar("T")
TopicNames = Mapping[uuid.UUID, str]
"""The names of the requested topics by their ids, for the versions that name topics by id only."""

UNKNOWN: Final = -1
"""An offset or an epoch that the broker does not know, or that does not exist."""
_NO_NAMES: Final[TopicNames] = MappingProxyType({})
_ABSENT = frozenset({3, 17, 29})
"""Codes of topics that do not exist, have an invalid name, or that this user may not see."""
_CONSUMERS = "consumer"
"""The kind of the members of a classic group that are consumers."""
_DEAD = "dead"
_MEMBER_PROTOCOLS = {0: "classic", 1: "consumer"}
"""The protocols of the members of a KIP-848 group, by Kafka's numbers."""
_UNKNOWN_MEMBER = 25
_GROUP_NOT_FOUND = 69
_OF_ONE_TOPIC = _ABSENT | {100}
"""Codes that concern a single topic. Other errors of a partition usually concern the group or the broker."""


class CommittedOffset(NamedTuple):
    """A committed offset of a group."""

    offset: int
    epoch: int
    """The leader epoch of the last record before it; -1 if it is unknown."""
    metadata: str


class ListedOffset(NamedTuple):
    """An offset of a log, looked up by time."""

    offset: int
    """-1 if the log has no record that recent."""
    timestamp: int
    """The time of the record in milliseconds since the epoch; -1 if the look-up was not by time."""
    epoch: int
    """The leader epoch of the record; -1 if it is unknown."""


class EpochEnd(NamedTuple):
    """The end of a leader epoch in a log."""

    epoch: int
    """The largest epoch of the log that is not above the requested one."""
    end: int
    """The offset behind the last record of that epoch."""


class Answers(NamedTuple, Generic[T]):
    """The contents of a response about partitions; each requested partition is in exactly one of the two."""

    values: dict[TopicPartition, T]
    errors: dict[TopicPartition, WireError]
    """Errors that concern a single topic come last."""


# All partitions of a response -------------------------------------------------------------


def _answers(
    topics: Collection[Any] | None,
    requested: Collection[TopicPartition] | None,
    what: str,
    read: Callable[[Any], T],
    names: TopicNames = _NO_NAMES,
) -> Answers[T]:
    """Read the part about each partition.

    Args:
        topics: The parts about topics in the response.
        requested: The partitions of the request; None if it was for all.
        what: The name of the requested value, for messages.
        read: Returns the value in the part about a partition. Its `WireError` becomes the answer for this partition.
        names: The names of topics that the response names by id.

    Raises:
        IncompleteResponseError: The response names a partition that was not requested.
    """
    expected = None if requested is None else frozenset(requested)
    values: dict[TopicPartition, T] = {}
    errors: dict[TopicPartition, WireError] = {}
    for partition, part in _parts(topics or (), names):
        if expected is not None and partition not in expected:
            raise IncompleteResponseError(f"the response has the {what} of {partition}, which was not requested")
        if partition in values or partition in errors:
            values.pop(partition, None)
            errors[partition] = IncompleteResponseError(f"the response has the {what} of {partition} twice")
            continue
        try:
            raise_for(part.error, partition.topic)
            values[partition] = read(part)
        except WireError as error:
            errors[partition] = error
    for partition in expected or ():
        if partition not in values and partition not in errors:
            errors[partition] = IncompleteResponseError(f"the {what} of {partition} is missing in the response")
    in_order = sorted(errors.items(), key=lambda item: (item[1].code in _OF_ONE_TOPIC, item[0]))
    return Answers(values, dict(in_order))


def _parts(topics: Collection[Any], names: TopicNames) -> Iterator[tuple[TopicPartition, Any]]:
    """Return each partition, with the part of the response about it."""
    for topic in topics:
        name = _name_of(topic, names)
        if topic.partitions is None:
            raise IncompleteResponseError(f"the partitions of topic {name!r} are missing in the response")
        for part in topic.partitions:
            yield TopicPartition(name, part.partition), part


def _name_of(topic: Any, names: TopicNames) -> str:
    name: str | None = topic.topic
    if name is not None:
        return name
    topic_id: Any = getattr(topic, "id", None)  # some responses have names in all versions
    if topic_id not in names:
        raise IncompleteResponseError(f"the response names topic {topic_id}, which was not requested")
    return names[topic_id]


def _only_part(parts: Collection[Any] | None, what: str) -> Any:
    """Return the only part of a response about one thing, which *what* names."""
    if not parts:
        raise IncompleteResponseError(f"{what} is missing in the response")
    if len(parts) > 1:
        raise IncompleteResponseError(f"the response has {len(parts)} parts about {what}, not 1")
    (part,) = parts
    return part


def _checked(value: int, what: str) -> int:
    """Return an offset or an epoch of a response; -1 is the only negative one that has a meaning."""
    if value < UNKNOWN:
        raise IncompleteResponseError(f"the response has {value} as {what}")
    return value


# Offsets of groups ------------------------------------------------------------------------


def refused_offsets(
    response: Any, sent: Collection[TopicPartition], names: TopicNames = _NO_NAMES
) -> dict[TopicPartition, WireError]:
    """Read a response to OffsetCommit: the error of each partition of *sent* that is not acknowledged.

    Errors of a single topic come after those that affect the whole group.

    Raises:
        IncompleteResponseError: The response names a partition that was not sent.
    """
    return _answers(response.topics, sent, "acknowledgement", lambda _part: True, names).errors


def committed_offsets(
    response: Any, group_id: str, requested: Collection[TopicPartition] | None, names: TopicNames = _NO_NAMES
) -> dict[TopicPartition, CommittedOffset]:
    """Read a response to OffsetFetch about one group: its committed offsets, without partitions that have none.

    Args:
        response: The response.
        group_id: The group.
        requested: The partitions of the request; None if it was for all.
        names: The names of topics that the response names by id.

    Raises:
        BrokerError: The group or one of its partitions has an error code.
        IncompleteResponseError: The group or a requested partition is missing, named twice, or was not requested.
        UnsupportedVersionError: The broker has no list of all offsets of a group, like the embedded broker.
    """
    answer = response
    if response.groups is not None:  # from version 8 on, it may be about several groups
        answer = _only_part(response.groups, f"group {group_id!r}")
        if answer.group != group_id:
            raise IncompleteResponseError(f"the response is about group {answer.group!r}, not {group_id!r}")
    if answer.error is None:
        raise IncompleteResponseError(f"the response has no part about group {group_id!r}")
    raise_for(answer.error, group_id)
    if answer.topics is None and requested is None:
        raise UnsupportedVersionError("the broker does not list all offsets of a group")
    answers = _answers(answer.topics, requested, "committed offset", _committed_offset, names)
    _raise_first(answers.errors)
    return {partition: committed for partition, committed in answers.values.items() if committed.offset != UNKNOWN}


def _committed_offset(part: Any) -> CommittedOffset:
    metadata = (part.metadata or "").removesuffix("\0")  # librdkafka sends C strings
    return CommittedOffset(_checked(part.offset, "a committed offset"), max(part.epoch, UNKNOWN), metadata)


def _raise_first(errors: Mapping[TopicPartition, WireError]) -> None:
    for error in errors.values():
        raise error


# Logs -------------------------------------------------------------------------------------


def listed_offsets(response: Any, requested: Collection[TopicPartition]) -> Answers[ListedOffset]:
    """Read a response to ListOffsets: an offset of each partition that the broker leads now.

    Raises:
        IncompleteResponseError: The response names a partition that was not requested.
    """
    return _answers(response.topics, requested, "offset", _listed_offset)


def _listed_offset(part: Any) -> ListedOffset:
    return ListedOffset(_checked(part.offset, "an offset of a log"), part.timestamp, max(part.epoch, UNKNOWN))


def epoch_ends(response: Any, requested: Collection[TopicPartition]) -> Answers[EpochEnd | None]:
    """Read a response to OffsetForLeaderEpoch: the end of an epoch in each log.

    None means that the broker does not know: it has no history of that epoch. It does not mean that the log is shorter.

    Raises:
        IncompleteResponseError: The response names a partition that was not requested.
    """
    return _answers(response.topics, requested, "end of an epoch", _epoch_end)


def _epoch_end(part: Any) -> EpochEnd | None:
    answer = EpochEnd(_checked(part.epoch, "a leader epoch"), _checked(part.end, "the end of an epoch"))
    return None if UNKNOWN in answer else answer


# Writing ----------------------------------------------------------------------------------


def stored_offsets(response: Any, sent: Collection[TopicPartition]) -> Answers[int]:
    """Read a response to Produce: the offset of the first record of each stored batch; -1 if the broker does not know.

    An error does not prove that a batch was not stored: that depends on its code.

    Raises:
        IncompleteResponseError: The response names a partition that was not sent.
    """
    return _answers(response.topics, sent, "acknowledgement", lambda part: _checked(part.offset, "an offset of a log"))


def refused_indexes(response: Any) -> dict[TopicPartition, list[int]]:
    """Read the records that a response to Produce blames for a refused batch, as indexes into the batch, from 0 on.

    Brokers name them from version 8 on, and not for every error. The caller knows how many records the batch has.

    Raises:
        IncompleteResponseError: The partitions of a topic are missing.
    """
    return {
        partition: [record.index for record in part.record_errors]
        for partition, part in _parts(response.topics or (), _NO_NAMES)
        if part.error and part.record_errors
    }


def named_leaders(response: Any) -> dict[TopicPartition, Leader]:
    """Read the leaders in a response to Produce: brokers name them beside errors from version 10 on (KIP-951).

    Raises:
        IncompleteResponseError: The partitions of a topic are missing.
    """
    return {
        partition: Leader(part.leader.node, part.leader.epoch)
        for partition, part in _parts(response.topics or (), _NO_NAMES)
        if part.error and part.leader is not None and part.leader.node >= 0
    }


def new_producer_id(response: Any) -> tuple[int, int]:
    """Read a response to InitProducerId: a producer id and its epoch.

    Raises:
        BrokerError: The response has an error code.
        IncompleteResponseError: The response has no producer id.
    """
    raise_for(response.error)
    if response.producer_id < 0 or response.epoch < 0:
        raise IncompleteResponseError("the producer id is missing in the response")
    return response.producer_id, response.epoch


def following_identity(response: Any) -> tuple[int, int] | None:
    """Read a response to EndTxn: the producer id and epoch of the next transaction, from version 5 on; else None.

    Raises:
        IncompleteResponseError: The response has only a part of it.
    """
    producer_id, epoch = response.producer_id, response.epoch
    if producer_id is None or epoch is None:
        return None
    if producer_id < 0 or epoch < 0:
        raise IncompleteResponseError("the producer id of the next transaction is missing in the response")
    return producer_id, epoch


# The cluster ------------------------------------------------------------------------------


def finalized_features(response: Any) -> dict[str, int]:
    """Read a response to ApiVersions: the features of the cluster, each with its level; none if the broker has none.

    Raises:
        BrokerError: The response has an error code.
    """
    raise_for(response.error)
    return {feature.name: feature.highest for feature in response.finalized or ()}


def coordinator(response: Any, key: str) -> Broker:
    """Read a response to FindCoordinator: the coordinator of a group or a transactional id.

    It may be a broker that our metadata do not contain yet.

    Raises:
        BrokerError: The response has an error code.
        IncompleteResponseError: The response names no coordinator.
    """
    raise_for(response.error, key, message=response.message)
    if response.node < 0 or not response.host or response.port < 0:
        raise IncompleteResponseError(f"the coordinator of {key!r} is missing in the response")
    return Broker(response.node, response.host, response.port, None)


class DescribedTopic(NamedTuple):
    """A topic, as a broker describes it."""

    topic_id: uuid.UUID | None
    """None if the brokers do not give topics an id."""
    is_internal: bool
    partitions: dict[int, PartitionInfo]
    """Partitions with an error have no leader here."""
    epochs: dict[int, int]
    """The leader epoch of each partition without an error; -1 if the broker does not say."""
    errors: dict[int, WireError]
    """The errors of single partitions. The others are not affected."""


class DescribedTopics(NamedTuple):
    """Topics, as a broker describes them; each requested topic is either described or has an error."""

    brokers: dict[int, Broker]
    topics: dict[str, DescribedTopic]
    errors: dict[str | uuid.UUID, WireError]
    """The errors of single topics, by name or by the requested id. The others are not affected."""


def described_topics(response: Any, requested: Collection[str | uuid.UUID] | None = None) -> DescribedTopics:
    """Read a response to Metadata: the partitions and leaders of topics.

    An error of one topic or partition affects only this one.

    Args:
        response: The response.
        requested: The names or ids of the topics; None if all were requested.

    Raises:
        BrokerError: The whole response has an error code.
        IncompleteResponseError: The response names no brokers, as while a broker starts, or it names a topic that was
            not requested.
    """
    brokers = _brokers(response)
    topics: dict[str, DescribedTopic] = {}
    errors: dict[str | uuid.UUID, WireError] = {}
    for part in response.topics:
        key = _requested_key(part, requested)
        if key in errors or part.name in topics:
            topics.pop(part.name, None)
            errors[key] = IncompleteResponseError(f"the response describes topic {key} twice")
            continue
        try:
            described = _described_topic(part)
        except WireError as error:
            errors[key] = error
        else:
            topics[part.name] = described
    known = {*topics, *(topic.topic_id for topic in topics.values()), *errors}
    for topic in requested or ():
        if topic not in known:
            errors[topic] = IncompleteResponseError(f"topic {topic} is missing in the response")
    return DescribedTopics(brokers, topics, errors)


def existing_topics(response: Any) -> frozenset[str]:
    """Read a response to Metadata about all topics: those that exist and that this user may see, but no internal ones.

    Raises:
        BrokerError: The whole response has an error code.
        IncompleteResponseError: The response names no brokers, as while a broker starts.
    """
    _brokers(response)
    return frozenset(
        topic.name
        for topic in response.topics
        if topic.name is not None and topic.error not in _ABSENT and not topic.internal
    )


def _brokers(response: Any) -> dict[int, Broker]:
    if not response.brokers or response.topics is None:
        raise IncompleteResponseError("the brokers or the topics are missing in the response")
    return {broker.node: Broker(broker.node, broker.host, broker.port, broker.rack) for broker in response.brokers}


def _requested_key(part: Any, requested: Collection[str | uuid.UUID] | None) -> str | uuid.UUID:
    """Return the name or the id by which a topic of the response was requested."""
    name: str | None = part.name
    topic_id: uuid.UUID | None = part.id
    if name is not None and (requested is None or name in requested):
        return name
    if topic_id is not None and requested is not None and topic_id in requested:
        return topic_id
    raise IncompleteResponseError(f"the response describes topic {name or topic_id}, which was not requested")


def _described_topic(part: Any) -> DescribedTopic:
    raise_for(part.error, *filter(None, [part.name]))
    if part.name is None or not part.partitions:
        raise IncompleteResponseError(f"the partitions of topic {part.name or part.id} are missing in the response")
    has_id = part.id is not None and part.id.int
    topic = DescribedTopic(part.id if has_id else None, bool(part.internal), {}, {}, {})
    for partition in part.partitions:
        number = partition.partition
        if number in topic.partitions:
            raise IncompleteResponseError(f"the response describes {TopicPartition(part.name, number)} twice")
        has_leader = not partition.error and partition.leader >= 0
        topic.partitions[number] = PartitionInfo(
            number,
            partition.leader if has_leader else None,
            tuple(partition.replicas or ()),
            tuple(partition.in_sync or ()),
        )
        if partition.error:
            topic.errors[number] = error_for(partition.error, part.name)
        else:
            topic.epochs[number] = max(partition.epoch, UNKNOWN)
    return topic


def refused_topic(response: Any, topic: str) -> BrokerError | None:
    """Read a response to CreateTopics about one topic: why the topic was not created; None if it was.

    Code 36 means that it existed before.

    Raises:
        IncompleteResponseError: The topic is missing, named twice, or another one.
    """
    part = _only_part(response.topics, f"topic {topic!r}")
    if part.name != topic:
        raise IncompleteResponseError(f"the response is about topic {part.name!r}, not {topic!r}")
    return error_for(part.error, topic, message=part.message) if part.error else None


class ResourceKind(enum.IntEnum):
    """A kind of thing that has settings; the values are Kafka's."""

    TOPIC = 2
    BROKER = 4
    GROUP = 32


class SettingSource(enum.IntEnum):
    """Where the value of a setting comes from, as far as we need it; the values are Kafka's."""

    GROUP = 8


def described_settings(response: Any, kind: ResourceKind, name: str, settings: Collection[str]) -> dict[str, str]:
    """Read a response to DescribeConfigs about one topic, broker or group: the values of *settings*.

    Others that the broker describes are ignored: some brokers describe all.

    Raises:
        BrokerError: The response has an error code.
        IncompleteResponseError: The response is about something else, or a setting has no value or two.
    """
    described = _described_settings(response, kind, name, settings)
    return {setting: part.value for setting, part in described.items()}


def group_times(response: Any, group_id: str) -> GroupTimes:
    """Read a response to DescribeConfigs about one group: its times under the consumer protocol.

    Raises:
        BrokerError: The response has an error code.
        IncompleteResponseError: The response is about something else, or a time has no value, two, or no number.
    """
    described = _described_settings(response, ResourceKind.GROUP, group_id, GROUP_TIMES)
    return GroupTimes(_group_time(described[SESSION_TIMEOUT]), _group_time(described[HEARTBEAT_INTERVAL]))


def _group_time(part: Any) -> GroupTime:
    try:
        milliseconds = int(part.value)
    except ValueError:
        raise IncompleteResponseError(f"the response has {part.value!r} as {part.name}, not a number") from None
    return GroupTime(milliseconds / 1000, part.source == SettingSource.GROUP)


def _described_settings(response: Any, kind: ResourceKind, name: str, settings: Collection[str]) -> dict[str, Any]:
    """Return the part of a response to DescribeConfigs about each of *settings*; all of them have a value."""
    part = _part_about(response, kind, name)
    found: dict[str, Any] = {}
    for setting in part.configs or ():
        if setting.name not in settings:
            continue
        if setting.name in found:
            raise IncompleteResponseError(f"the response has {setting.name} of {_resource(kind, name)} twice")
        if setting.value is not None:
            found[setting.name] = setting
    if missing := set(settings).difference(found):
        raise IncompleteResponseError(f"{min(missing)} of {_resource(kind, name)} is missing in the response")
    return found


def check_altered_settings(response: Any, kind: ResourceKind, name: str) -> None:
    """Read a response to IncrementalAlterConfigs about one topic, broker or group.

    Raises:
        BrokerError: The settings were refused.
        IncompleteResponseError: The response is about something else.
    """
    _part_about(response, kind, name)


def _part_about(response: Any, kind: ResourceKind, name: str) -> Any:
    """Return the only part of a response about settings, which has no error."""
    part = _only_part(response.resources, _resource(kind, name))
    raise_for(part.error, *((name,) if kind is ResourceKind.TOPIC else ()), message=part.message)
    if (part.kind, part.name) != (kind, name):
        raise IncompleteResponseError(f"the response is about {part.name!r}, not about {_resource(kind, name)}")
    return part


def _resource(kind: ResourceKind, name: str) -> str:
    return f"{kind.name.lower()} {name!r}"


# Groups -----------------------------------------------------------------------------------


def classic_group(response: Any, group_id: str) -> Group:
    """Read a response to DescribeGroups about one group; a group that does not exist is "dead", and has no members.

    So is one of another kind: a group of KIP-848, for example.

    Raises:
        BrokerError: The group has another error code.
        IncompleteResponseError: The group is missing, named twice, or another one, or a member is named twice.
    """
    part = _classic_part(response, group_id)
    if part is None:
        return Group(_DEAD, "classic", "", ())
    members = tuple(_member(member, _classic_assignment(part, member), "classic") for member in _members(part))
    return Group(_state(part), "classic", part.protocol or "", members)


def classic_members(response: Any, group_id: str) -> DescribedGroup:
    """Read the subscriptions in a response to DescribeGroups about one group; raises like `classic_group`."""
    part = _classic_part(response, group_id)
    if part is None:
        return DescribedGroup(is_stable=False, members={}, instances={})
    members: dict[str, Member] = {}
    instances: dict[str, str] = {}
    for member in _members(part):
        topics = subscribed_topics(member.metadata) if part.kind == _CONSUMERS else frozenset[str]()
        members[member.member] = Member(topics, _classic_assignment(part, member))
        if member.instance:
            instances[member.instance] = member.member
    return DescribedGroup(_state(part) == "stable", members, instances)


def consumer_group(response: Any, group_id: str) -> Group | None:
    """Read a response to ConsumerGroupDescribe about one group; None if it is not a group of KIP-848.

    Raises:
        BrokerError: The group has another error code: 35 if KIP-848 is switched off on the broker.
        IncompleteResponseError: The group is missing, named twice, or another one, or a member is named twice.
    """
    part = _described_group(response, group_id)
    if part.error == _GROUP_NOT_FOUND:
        return None
    raise_for(part.error, message=part.message)
    members = tuple(
        _member(member, _consumer_assignment(member), _MEMBER_PROTOCOLS.get(member.kind)) for member in _members(part)
    )
    return Group(_state(part), "consumer", part.assignor or "", members)


def _classic_part(response: Any, group_id: str) -> Any:
    """Return the part about a group; None if there is no such classic group."""
    part = _described_group(response, group_id)
    # From version 6 on, a code says it; before, the state.
    if part.error == _GROUP_NOT_FOUND or (not part.error and _state(part) == _DEAD):
        return None
    raise_for(part.error, message=part.message)
    return part


def _described_group(response: Any, group_id: str) -> Any:
    part = _only_part(response.groups, f"group {group_id!r}")
    if part.group != group_id:
        raise IncompleteResponseError(f"the response is about group {part.group!r}, not {group_id!r}")
    return part


def _state(group: Any) -> str:
    if group.state is None:
        raise IncompleteResponseError(f"the state of group {group.group!r} is missing in the response")
    return str(group.state).lower()


def _members(group: Any) -> list[Any]:
    """Return the parts about the members of a group, in the order of their ids."""
    if group.members is None:
        raise IncompleteResponseError(f"the members of group {group.group!r} are missing in the response")
    members = {part.member: part for part in group.members}
    if len(members) < len(group.members):
        raise IncompleteResponseError(f"the response describes a member of group {group.group!r} twice")
    return [members[member_id] for member_id in sorted(members)]


def _member(part: Any, partitions: tuple[TopicPartition, ...], protocol: str | None) -> GroupMember:
    return GroupMember(part.member, part.client, part.host, part.instance, partitions, protocol)


def _classic_assignment(group: Any, member: Any) -> tuple[TopicPartition, ...]:
    """Return the partitions of a consumer; members of another kind, as those of Kafka Connect, write something else."""
    return assigned_partitions(member.assignment) if group.kind == _CONSUMERS else ()


def _consumer_assignment(member: Any) -> tuple[TopicPartition, ...]:
    if member.assignment.partitions is None:
        raise IncompleteResponseError(f"the partitions of member {member.member!r} are missing in the response")
    partitions = [
        TopicPartition(topic.topic, number)
        for topic in member.assignment.partitions
        for number in topic.partitions or ()
    ]
    return tuple(sorted(partitions))


def removed_member(response: Any, member_id: str, instance_id: str | None) -> bool:
    """Read a response to LeaveGroup about one member: whether the group had it.

    Raises:
        BrokerError: The response or the member has an error code other than "unknown member".
        IncompleteResponseError: The member is missing, named twice, or another one.
    """
    raise_for(response.error)
    part = _only_part(response.members, f"member {instance_id or member_id!r}")
    # The broker may name the id of a static member that was removed by its instance id.
    is_requested = part.instance == instance_id if instance_id else part.member == member_id
    if not is_requested:
        raise IncompleteResponseError(
            f"the response is about member {part.instance or part.member!r}, not the one sent"
        )
    if part.error == _UNKNOWN_MEMBER:
        return False
    raise_for(part.error)
    return True
