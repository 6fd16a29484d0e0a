"""Manual assignment: reading with the commits of a group, without joining it."""

import asyncio
import logging

from aioshard.errors import GroupHasMembersError, TransportError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.errors import named
from aioshard.kafka.queries import Queries
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.group")


async def assigned_manually(settings: Settings, group_id: str, queries: Queries) -> list[TopicPartition]:
    """Return the partitions in `assign`, after checking that they exist and the group is inactive.

    If the brokers do not list the group's members, the first commit finds out.

    Raises:
        GroupHasMembersError: The group has members.
        TransportError: A topic does not have such a partition; not retriable.
    """
    assign = settings.assign or {}
    for topic, numbers in assign.items():
        existing = await queries.partitions(topic)
        if missing := sorted(set(numbers) - existing.keys()):
            actual = f"has partitions 0 to {max(existing)}" if existing else "does not exist"
            raise TransportError(
                f"topic {topic!r} {actual}, but assign names {topic}/{named(missing)}: correct assign, or create "
                "the partitions",
                retriable=False,
            )
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT), KafkaAdmin(settings) as admin:
            members = (await admin.group(group_id)).members
    except (TransportError, TimeoutError) as error:
        logger.debug("the members of group %r are unknown: %s", group_id, error)
        members = ()
    if members:
        raise has_members(group_id, named(members))
    return [TopicPartition(topic, number) for topic, numbers in assign.items() for number in numbers]


def has_members(group_id: str, what: str) -> GroupHasMembersError:
    """Return the error of an app with manual assignment whose group has members, as *what* shows."""
    return GroupHasMembersError(
        f"group {group_id!r} has members ({what}), so the brokers refuse commits of this app, which uses manual "
        "assignment. Stop the members (a killed one counts until its session timeout), remove assign to join them, "
        "or use another group id"
    )
