"""Commits without a group member, and manual assignment, which commits that way."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING

from aiokafka import errors as kafka

from aioshard.errors import TransportError
from aioshard.kafka.connecting import CONNECT_TIMEOUT
from aioshard.kafka.groups import GroupBrokers
from aioshard.kafka.history import HAS_MEMBERS, RETENTION_MS
from aioshard.kafka.translate import commit_error, reason
from aioshard.ports import Committed, GroupHasMembersError, Membership
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.kafka.internals import Internals
    from aioshard.settings import Settings

__all__ = ["by_hand", "commit_by_hand", "partitions_by_hand"]

logger = logging.getLogger("aioshard.kafka.memberless")

_LIVES = itertools.count()
_NAMED = 5


def by_hand() -> Membership:
    """Return a membership for manual assignment: no member id, and a new generation for each life of a client.

    Neither is sent to the brokers. Without a member id, no partition is ever resumed in place. The new generation
    keeps an answer requested in one life of the client from being used in the next.
    """
    return Membership("", next(_LIVES))


async def partitions_by_hand(
    settings: "Settings", group_id: str, partitions_of: Callable[[str], Awaitable[Collection[int]]]
) -> list[TopicPartition]:
    """Return the partitions in `assign`, after checking that they exist and the group is inactive.

    Args:
        settings: With `assign`.
        group_id: Checked for members. If the brokers do not list them, the first commit finds out.
        partitions_of: Returns the partitions of a topic.

    Raises:
        GroupHasMembersError: The group has members.
        TransportError: A topic does not have such a partition; not retriable.
    """
    assign = settings.assign or {}
    for topic, numbers in assign.items():
        there = frozenset(await partitions_of(topic))
        missing = sorted(set(numbers) - there)
        if missing:
            raise _missing(topic, missing, there)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT), GroupBrokers(settings) as brokers:
            members = (await brokers.group(group_id)).members
    except (TransportError, TimeoutError) as error:
        logger.debug("it was not told whether group %r has members: %s", group_id, reason(error))
        members = ()
    if members:
        named = ", ".join(str(found.member) for found in members[:_NAMED])
        raise _has_members(group_id, named + (", …" if len(members) > _NAMED else ""))
    return [TopicPartition(topic, number) for topic, numbers in assign.items() for number in numbers]


def _missing(topic: str, missing: list[int], there: Collection[int]) -> TransportError:
    asked = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
    if there:
        found, advice = (
            f"topic {topic!r} has {len(there)} partition(s), 0 to {max(there)}",
            "add partitions to the topic",
        )
    else:
        found, advice = f"there is no topic {topic!r}", "create the topic"
    error = TransportError(f"{found}, and assign gives this app {topic}/{asked}: correct assign, or {advice}")
    error.retriable = False
    return error


async def commit_by_hand(internals: "Internals", offsets: Mapping[TopicPartition, Committed]) -> None:
    """Send one commit without a member, once; brokers accept it while the group has no members.

    Brokers keep the offsets for a year. A group without members counts as empty even while an app reads with it, so
    the offset of a quiet partition would be deleted after `offsets.retention.minutes`, a week by default.

    Raises:
        GroupHasMembersError: The group has members. Nothing was stored.
        TransportError: The commit was not acknowledged; all or part of it may have been stored.
    """
    try:
        await internals.find_coordinator()
        await internals.commit_once(offsets, RETENTION_MS)
    except kafka.KafkaError as error:
        if (told := HAS_MEMBERS.get(getattr(error, "errno", 0))) is not None:
            raise _has_members(internals.group_id, f"a commit was refused: {told}") from error
        raise commit_error(error, offsets.keys(), internals.group_id) from error


def _has_members(group_id: str, what: str) -> GroupHasMembersError:
    return GroupHasMembersError(
        f"group {group_id!r} has members ({what}), and partitions were given to this app by hand with assign: beside "
        "members the brokers take no commit of somebody who is none. Stop the members (one that was killed counts "
        "until its session time-out), leave assign out to join them, or take a group id of its own"
    )
