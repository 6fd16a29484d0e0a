"""Parse broker responses: check the errors at every level, and that nothing requested is missing.

An error never counts as "there is nothing", and a partition missing from a response counts neither as empty nor as
acknowledged. Every function is pure. aiokafka's own parsers miss some of these cases.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import errors as kafka

from aioshard.kafka.translate import error_for, raise_for
from aioshard.ports import Committed
from aioshard.records import TopicPartition

__all__ = [
    "IncompleteAnswerError",
    "by_topic",
    "existing_topics",
    "led_offsets",
    "log_offsets",
    "only_part",
    "refused_offsets",
    "removed_member",
    "stored_offsets",
    "topic_leaders",
    "topic_settings",
]

T = TypeVar("T")

_NO_TOPIC = frozenset({3, 17})
"""Error codes for topics that do not exist and for invalid topic names."""
_ABSENT = _NO_TOPIC | {29}
"""The same, plus topics that this user may not see."""
_UNKNOWN_MEMBER = 25


class IncompleteAnswerError(kafka.KafkaError):  # type: ignore[misc]
    """A broker's response leaves out something requested; a retry may succeed."""

    retriable = True


def by_topic(values: Mapping[TopicPartition, Any]) -> list[tuple[str, list[Any]]]:
    """Group values of single partitions by topic, in the form and order that requests need."""
    found: dict[str, list[Any]] = {}
    for one in sorted(values):
        found.setdefault(one.topic, []).append(values[one])
    return list(found.items())


def only_part(parts: Sequence[T], what: str) -> T:
    """Return the only part of a response about one thing, which *what* names."""
    if len(parts) != 1:
        raise IncompleteAnswerError(f"{what} is missing in the answer")
    return parts[0]


def _refuse_missing(asked: Collection[TopicPartition], told: Collection[TopicPartition], what: str) -> None:
    missing = set(asked).difference(told)
    if missing:
        raise IncompleteAnswerError(f"the {what} of {min(missing)} is missing in the answer")


# Offsets of a group ---------------------------------------------------------------------


def stored_offsets(answer: Any, asked: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
    """Parse an OffsetFetch response, versions 1 to 3: the committed offsets, without partitions that have none.

    A broker that does not coordinate the group reports it at the top level of the response and lists no partitions.

    Raises:
        IncompleteAnswerError: A partition of *asked* is missing.
        KafkaError: The response or one of its partitions has an error code.
    """
    raise_for(getattr(answer, "error_code", 0))  # missing in version 1
    told = {}
    for topic, partitions in answer.topics:
        for partition, offset, metadata, code in partitions:
            raise_for(code)
            told[TopicPartition(topic, partition)] = Committed(offset, metadata or "")
    _refuse_missing(asked, told, "committed offset")
    return {name: committed for name, committed in told.items() if committed.offset >= 0}


def refused_offsets(answer: Any, sent: Collection[TopicPartition]) -> dict[TopicPartition, kafka.KafkaError]:
    """Parse an OffsetCommit response: the error of each partition of *sent* that is not acknowledged.

    Errors of a single topic come after those that affect the whole group.
    """
    refused = {
        name: IncompleteAnswerError(f"the acknowledgement of {name} is missing in the answer") for name in sorted(sent)
    }
    for topic, partitions in answer.topics:
        for partition, code in partitions:
            name = TopicPartition(topic, partition)
            if code:
                refused[name] = error_for(code, topic)
            else:
                refused.pop(name, None)
    return dict(sorted(refused.items(), key=lambda item: getattr(item[1], "errno", 0) in _ABSENT))


# Logs -------------------------------------------------------------------------------------


def log_offsets(answer: Any, asked: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Parse a ListOffsets response, versions 1 to 3: an offset per partition; -1 if no record is that recent.

    Raises:
        IncompleteAnswerError: A partition of *asked* is missing.
        KafkaError: A partition has an error code.
    """
    found = {}
    for topic, partitions in answer.topics:
        for partition, code, _, offset in partitions:
            raise_for(code, f"{topic}/{partition}")
            found[TopicPartition(topic, partition)] = int(offset)
    _refuse_missing(asked, found, "offset")
    return found


def led_offsets(answer: Any) -> dict[TopicPartition, int]:
    """Parse a ListOffsets response, versions 1 to 3: an offset per partition that the broker leads now.

    A partition with a retriable error is left out, so that it does not hold up the others.

    Raises:
        KafkaError: A partition has an error that is not retriable.
    """
    found = {}
    for topic, partitions in answer.topics:
        for partition, code, _, offset in partitions:
            if not code:
                found[TopicPartition(topic, partition)] = int(offset)
            elif not (error := error_for(code, f"{topic}/{partition}")).retriable:
                raise error
    return found


# Topics -----------------------------------------------------------------------------------


def topic_leaders(answer: Any, topic: str) -> dict[int, int]:
    """Parse a Metadata response: the leader of each partition, -1 without one; empty if the topic does not exist.

    Raises:
        IncompleteAnswerError: The topic is missing, or the broker lists no brokers, as while it starts.
        KafkaError: The topic has an error code other than "does not exist".
    """
    for code, name, *_, partitions in answer.topics if answer.brokers else ():
        if name == topic:
            if code not in _NO_TOPIC:
                raise_for(code, topic)
            return {partition: leader for _, partition, leader, *_ in partitions}
    raise IncompleteAnswerError(f"topic {topic!r} is missing in the answer")


def existing_topics(answer: Any) -> frozenset[str]:
    """Parse a Metadata response: the topics that exist and that this user may see, without internal topics.

    Raises:
        IncompleteAnswerError: The broker lists no brokers, as while it starts.
    """
    if not answer.brokers:
        raise IncompleteAnswerError("the brokers are missing in the answer")
    return frozenset(
        name for code, name, *rest in answer.topics if code not in _ABSENT and not (len(rest) > 1 and rest[0])
    )


def topic_settings(answer: Any, topic: str, names: Collection[str]) -> dict[str, str]:
    """Parse a DescribeConfigs response about one topic: the settings *names*.

    Raises:
        IncompleteAnswerError: The topic or one of its settings is missing.
        KafkaError: The topic has an error code.
    """
    code, _, _, _, entries = only_part(answer.resources, f"topic {topic!r}")
    raise_for(code, topic)
    settings = {name: value for name, value, *_ in entries if name in names}
    if missing := set(names).difference(settings):
        raise IncompleteAnswerError(f"{min(missing)} of topic {topic!r} is missing in the answer")
    return settings


# Members ----------------------------------------------------------------------------------


def removed_member(answer: Any) -> bool:
    """Parse a LeaveGroup response about one member: whether the group had this member.

    Raises:
        IncompleteAnswerError: The member is missing.
        KafkaError: The response or the member has an error code other than "unknown member".
    """
    raise_for(answer.error_code)
    *_, code = only_part(answer.members, "the member")
    if code != _UNKNOWN_MEMBER:
        raise_for(code)
    return bool(code != _UNKNOWN_MEMBER)
