"""Decide which range of a partition a run reads, from the brokers' answers. Pure functions."""

import datetime as dt
import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from aioshard.core.ownership import origin_of
from aioshard.errors import DataLossError, PlanError
from aioshard.kafka.history import LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition

__all__ = [
    "End",
    "Facts",
    "Offsets",
    "Start",
    "end_of",
    "lost",
    "offsets_given",
    "refuse_losses",
    "start_of",
    "timestamp_of",
]

Offsets = Mapping[str, Mapping[int, int]]
"""Topic, partition, offset."""
Start = Literal["committed", "earliest"] | dt.datetime | float | Offsets
End = Literal["latest"] | dt.datetime | float | Offsets

_LOST = "Begin with what is left (start='earliest'), or at offsets of your own, once you know what the loss means"


class Facts(NamedTuple):
    """The state of one partition when a plan is made."""

    at: TopicPartition
    committed: Committed | None
    log: LogBounds
    last: int
    """The exclusive upper bound of a read: the last stable offset under `read_committed`."""
    knows_topic: bool
    """True if the group has a commit on any partition of the topic."""


def timestamp_of(when: object, option: str) -> float | None:
    """Return *when* in seconds since the epoch if it is a time, otherwise None.

    Raises:
        PlanError: The time has no time zone, is negative, or is not finite.

    Example:
        >>> timestamp_of(dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "start"), timestamp_of("committed", "start")
        (1767225600.0, None)
    """
    if isinstance(when, dt.datetime):
        if when.tzinfo is None:
            raise PlanError(f"{option}={when.isoformat()} has no time zone: say which, as in {when.isoformat()}+00:00")
        when = when.timestamp()
    if isinstance(when, bool) or not isinstance(when, int | float):
        return None
    if not math.isfinite(when) or when < 0:
        raise PlanError(f"{option}={when!r} was found, seconds since 1970 were expected")
    return float(when)


def offsets_given(
    when: object, option: str, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int] | None:
    """Return the offset of each partition if *when* is a mapping of offsets, otherwise None.

    Raises:
        PlanError: A partition is missing, is not read by the app, or has an invalid offset.
    """
    if not isinstance(when, Mapping):
        return None
    given: dict[TopicPartition, int] = {}
    for topic, offsets in when.items():
        if not isinstance(offsets, Mapping):
            raise PlanError(
                f"{option}: {offsets!r} was found for topic {topic!r}, partitions with offsets were expected"
            )
        for partition, offset in offsets.items():
            number = str(partition)
            if not number.isdigit() or type(offset) is not int or offset < 0:
                raise PlanError(f"{option}: {topic}/{partition}: {offset!r} was found, an offset was expected")
            given[TopicPartition(topic, int(number))] = offset
    unknown, missing = sorted(given.keys() - set(partitions)), sorted(set(partitions) - given.keys())
    if unknown:
        raise PlanError(f"{option} names {_some(unknown)}, which no handler of the app reads")
    if missing:
        raise PlanError(f"{option} leaves out {_some(missing)}: name an offset for each partition")
    return given


def start_of(
    facts: Facts,
    start: object,
    policy: Literal["earliest", "latest", "error"] | None,
    *,
    given: int | None,
    timed: int | None,
) -> int:
    """Return the start of a partition's range. It may lie outside the log: see `lost`.

    Args:
        facts: The state of the partition.
        start: The start that the user requested.
        policy: `auto_offset_reset`, for a group without commits on the topic.
        given: The requested offset, if *start* names offsets.
        timed: The first offset at or after the requested time, or None if all records are older.

    Raises:
        PlanError: The start is undecided (no commit, no `auto_offset_reset`), or lies past the end of the log.
    """
    if given is not None:
        if given > facts.log.end:
            raise PlanError(f"start: {facts.at} begins at {given}, and its log ends at {facts.log.end}")
        return given
    if start == "earliest":
        return facts.log.start
    if start != "committed":
        return facts.last if timed is None else timed
    if facts.committed is not None:
        return facts.committed.offset
    origin = origin_of(None, (facts.log.start, facts.last), policy, group_knows_topic=facts.knows_topic)
    if origin is None:
        raise PlanError(
            f"the group has no committed offset for {facts.at}, and auto_offset_reset does not say where to begin: set "
            "it, or plan with start='earliest' or a time"
        )
    return origin.offset


def lost(facts: Facts, start: int) -> str | None:
    """Describe which part of a range the log no longer has, as a sentence fragment, or return None."""
    if start < facts.log.start:
        return f"{facts.at}: offsets {start} to {facts.log.start - 1}"
    if start > facts.log.end:
        return f"{facts.at}: offset {start} is committed, and the log ends at {facts.log.end}"
    return None


def end_of(facts: Facts, start: int, *, given: int | None, timed: int | None) -> int:
    """Return the end of a partition's range: at most the last readable offset, and never before its start.

    Args:
        facts: The state of the partition.
        start: The start of the range.
        given: The requested offset, if the end names offsets.
        timed: The first offset at or after the requested time, or None if all records are older.
    """
    wanted = given if given is not None else timed
    return max(start, facts.last if wanted is None else min(wanted, facts.last))


def refuse_losses(losses: Collection[str]) -> None:
    """Refuse a plan if some of its records are gone.

    Raises:
        DataLossError: *losses* is not empty.
    """
    if losses:
        raise DataLossError(losses, _LOST)


def _some(partitions: Collection[TopicPartition]) -> str:
    first, *others = partitions
    return f"{first} and {len(others)} more" if others else str(first)
