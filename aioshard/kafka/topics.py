"""The settings that topics of an app need, as the documentation says."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

POLICY, RETENTION, TIMESTAMP_TYPE, LARGEST = (
    "cleanup.policy",
    "retention.ms",
    "message.timestamp.type",
    "max.message.bytes",
)
COMPACTED: Mapping[str, str] = {POLICY: "compact", "segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}
"""Of a side topic. Compact soon: a segment closes after at most an hour, and is cleaned once a tenth of the log is
superseded."""
_HEADERS = 16 * 1024
"""Bytes that the headers of a dead letter may need: among them are the class and 1,000 characters of an error."""
_FOREVER = "-1"


class TopicDescription(NamedTuple):
    """A topic as the brokers describe it."""

    partitions: int
    settings: Mapping[str, str]
    """Empty if this user may not see them."""


def dead_letter_settings(largest_of_sources: int | None) -> dict[str, str]:
    """Return the settings of a dead-letter topic.

    Retention counts from the time a dead letter is written, not from the time of its record.

    Args:
        largest_of_sources: `max.message.bytes` of the topics whose dead letters it takes; None if unknown.
    """
    settings = {POLICY: "delete", TIMESTAMP_TYPE: "LogAppendTime"}
    if largest_of_sources is not None:
        settings[LARGEST] = str(largest_of_sources + _HEADERS)
    return settings


def dead_letter_warnings(found: Mapping[str, str], largest_of_sources: int | None) -> Iterator[str]:
    """Yield what may lose dead letters of an existing topic, each with what to do."""
    policy = found.get(POLICY)
    if policy is not None and "compact" in policy:
        yield f"{POLICY}={policy} keeps only one dead letter for each key: set {POLICY}=delete"
    if found.get(TIMESTAMP_TYPE) == "CreateTime" and found.get(RETENTION, _FOREVER) != _FOREVER:
        yield (
            "its retention counts from the time of the record, so dead letters of old records are deleted soon: set "
            f"{TIMESTAMP_TYPE}=LogAppendTime, or {RETENTION}={_FOREVER}"
        )
    largest = found.get(LARGEST)
    if largest is not None and largest_of_sources is not None and int(largest) <= largest_of_sources:
        yield (
            f"{LARGEST}={largest} leaves no room for the headers of a dead letter: set it to "
            f"{largest_of_sources + _HEADERS} or more"
        )


def side_topic_problem(topic: str, partitions: int, needed: int) -> str | None:
    """Return why a side topic has too few partitions; None if it has enough."""
    if partitions >= needed:
        return None
    return (
        f"topic {topic!r} has {partitions} partitions and needs {needed}, as many as the topic whose records it keeps: "
        f"add {needed - partitions}"
    )


def side_topic_policy_problem(topic: str, policy: str) -> str | None:
    """Return why a side topic would lose parked records; None if it keeps them."""
    if policy.strip() == "compact":
        return None
    return (
        f"topic {topic!r} has {POLICY}={policy}, so old entries would be deleted: set {POLICY}=compact on it, without "
        "delete, or name another topic"
    )
