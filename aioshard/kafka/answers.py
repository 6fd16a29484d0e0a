"""Read answers of brokers: the errors at every level, and everything that was asked for.

An error is never read as "there is nothing", and a partition that an answer leaves out is neither empty nor
acknowledged. Each function is pure; aiokafka's own readers overlook some of this.
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
"""Codes of topics that do not exist, and of names that no topic can have."""
_ABSENT = _NO_TOPIC | {29}
"""The same, and of topics that we may not see."""
_UNKNOWN_MEMBER = 25


class IncompleteAnswerError(kafka.KafkaError):  # type: ignore[misc]
    """A broker's answer leaves out what it was asked for; the same question may be answered later."""

    retriable = True


def by_topic(values: Mapping[TopicPartition, Any]) -> list[tuple[str, list[Any]]]:
    """Group values of single partitions by topic, in the form and the order of a request."""
    found: dict[str, list[Any]] = {}
    for one in sorted(values):
        found.setdefault(one.topic, []).append(values[one])
    return list(found.items())


def only_part(parts: Sequence[T], what: str) -> T:
    """Take the one part of an answer to a question about one thing, named by *what*."""
    if len(parts) != 1:
        raise IncompleteAnswerError(f"{what} is missing in the answer")
    return parts[0]


def _refuse_missing(asked: Collection[TopicPartition], told: Collection[TopicPartition], what: str) -> None:
    missing = set(asked).difference(told)
    if missing:
        raise IncompleteAnswerError(f"the {what} of {min(missing)} is missing in the answer")


# Offsets of a group ---------------------------------------------------------------------


def stored_offsets(answer: Any, asked: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
    """Read an OffsetFetch answer, versions 1 to 3: the committed offsets, without partitions that have none.

    A broker that does not coordinate the group says so at the top level of the answer and names no partition.

    Raises:
        IncompleteAnswerError: A partition of *asked* is missing.
        KafkaError: The whole answer or a partition of it has an error code.
    """
    raise_for(getattr(answer, "error_code", 0))  # version 1 has none
    told = {}
    for topic, partitions in answer.topics:
        for partition, offset, metadata, code in partitions:
            raise_for(code)
            told[TopicPartition(topic, partition)] = Committed(offset, metadata or "")
    _refuse_missing(asked, told, "committed offset")
    return {name: committed for name, committed in told.items() if committed.offset >= 0}


def refused_offsets(answer: Any, sent: Collection[TopicPartition]) -> dict[TopicPartition, kafka.KafkaError]:
    """Read an OffsetCommit answer: the partitions of *sent* that are not acknowledged, and why.

    An error of a single topic stands behind those that are meant for the group as a whole.
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
    """Read a ListOffsets answer, versions 1 to 3: an offset of each partition; -1 where no record is that new.

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
    """Read a ListOffsets answer, versions 1 to 3: an offset of each partition that the broker leads now.

    A partition with an error that may pass is left out, so that it keeps no other one waiting.

    Raises:
        KafkaError: A partition has an error that does not pass.
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
    """Read a Metadata answer: the leader of each partition of a topic, -1 without one; empty when there is no topic.

    Raises:
        IncompleteAnswerError: The topic is missing, or the broker knows no brokers, as while it starts.
        KafkaError: The topic has an error code, other than that it does not exist.
    """
    for code, name, *_, partitions in answer.topics if answer.brokers else ():
        if name == topic:
            if code not in _NO_TOPIC:
                raise_for(code, topic)
            return {partition: leader for _, partition, leader, *_ in partitions}
    raise IncompleteAnswerError(f"topic {topic!r} is missing in the answer")


def existing_topics(answer: Any) -> frozenset[str]:
    """Read a Metadata answer: the topics that exist and that we may see, without the brokers' own.

    Raises:
        IncompleteAnswerError: The broker knows no brokers, as while it starts.
    """
    if not answer.brokers:
        raise IncompleteAnswerError("the brokers are missing in the answer")
    return frozenset(
        name for code, name, *rest in answer.topics if code not in _ABSENT and not (len(rest) > 1 and rest[0])
    )


def topic_settings(answer: Any, topic: str, names: Collection[str]) -> dict[str, str]:
    """Read a DescribeConfigs answer about one topic: the settings *names*.

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
    """Read a LeaveGroup answer about one member: whether the group had it.

    Raises:
        IncompleteAnswerError: The member is missing.
        KafkaError: The whole answer or the member has an error code, other than that the group has no such member.
    """
    raise_for(answer.error_code)
    *_, code = only_part(answer.members, "the member")
    if code != _UNKNOWN_MEMBER:
        raise_for(code)
    return bool(code != _UNKNOWN_MEMBER)
