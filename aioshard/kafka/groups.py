"""Consumer groups as the commands see them: coordinator, members and commits; also how to remove members."""

import functools
from io import BytesIO
from typing import NamedTuple

from aiokafka import errors as kafka
from aiokafka.client import CoordinationType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from aioshard.errors import StateError, TransportError
from aioshard.kafka.answers import only_part, removed_member
from aioshard.kafka.group_protocol import DescribeConsumerGroup, RemoveMember
from aioshard.kafka.history import GroupMember, HistoryBrokers
from aioshard.kafka.translate import raise_for
from aioshard.records import TopicPartition

__all__ = ["Coordinator", "Group", "GroupBrokers", "MemberOfGroup", "offsets_partition"]

_OFFSETS_TOPIC = "__consumer_offsets"
_NO_SUCH_GROUP, _NOT_SERVED = 69, 35
"""Errors for a group of the classic protocol, and for brokers that do not have the KIP-848 protocol enabled."""


class Coordinator(NamedTuple):
    """The broker that coordinates a group."""

    broker: int
    host: str
    port: int
    offsets_partition: int | None
    """The partition of `__consumer_offsets` that stores the group's offsets; its leader is the coordinator. None if
    this user may not see that topic."""


class MemberOfGroup(NamedTuple):
    """A member and its partitions."""

    member: GroupMember
    partitions: tuple[TopicPartition, ...]


class Group(NamedTuple):
    """The brokers' description of a group."""

    state: str
    """The brokers' name for it, in lower case: stable, empty, dead, preparingrebalance, assigning, reconciling, …"""
    protocol: str
    """`classic`, or `consumer` (KIP-848)."""
    assignor: str
    """Empty if there is none."""
    members: tuple[MemberOfGroup, ...]

    @property
    def owners(self) -> dict[TopicPartition, GroupMember]:
        """Map each assigned partition to its member."""
        return {one: found.member for found in self.members for one in found.partitions}


class GroupBrokers(HistoryBrokers):
    """A connection for inspecting a group from outside and removing its members. Owned by one event loop.

    Example:
        ```python
        async with GroupBrokers(settings) as brokers:
            group = await brokers.group("billing")
        ```
    """

    async def coordinator(self, group_id: str) -> Coordinator:
        """Return the broker that coordinates a group, whether or not the group exists.

        Raises:
            AuthorizationError: This user may not see the group.
            TransportError: The brokers did not name the coordinator.
        """

        async def ask() -> tuple[int, str, int]:
            node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
            broker = self._client.cluster.broker_metadata(node)
            return node, broker.host, broker.port

        found = await self._patiently(ask, f"tell which of them coordinates group {group_id!r}", group_id)
        try:
            number = offsets_partition(group_id, len(await self._leaders(_OFFSETS_TOPIC)))
        except TransportError:
            number = None
        return Coordinator(*found, number)

    async def group(self, group_id: str) -> Group:
        """Describe a group of either protocol; a group that does not exist is "dead".

        Raises:
            AuthorizationError: This user may not see the group.
            TransportError: The brokers did not describe it.
        """
        newer = await self._patiently(
            functools.partial(self._newer_group, group_id), f"describe group {group_id!r}", group_id
        )
        if newer is not None:
            return newer
        what = f"describe group {group_id!r}"
        return await self._patiently(functools.partial(self._classic_group, group_id), what, group_id)

    async def _newer_group(self, group_id: str) -> Group | None:
        """Describe a KIP-848 group; None if it is not one, or the brokers do not support KIP-848."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
        try:
            answer = await self._client.send(node, DescribeConsumerGroup(group_id))
        except (kafka.IncompatibleBrokerVersion, NotImplementedError):
            return None
        group = only_part(answer.to_object()["groups"], f"group {group_id!r}")
        if group["error_code"] in (_NO_SUCH_GROUP, _NOT_SERVED):
            return None
        raise_for(group["error_code"])
        members = []
        for one in group["members"]:
            partitions = sorted(
                TopicPartition(topic["topic_name"], number)
                for topic in one["assignment"]["topic_partitions"]
                for number in topic["partitions"]
            )
            member = GroupMember(one["member_id"], one["client_id"], one["client_host"], one["instance_id"])
            members.append(MemberOfGroup(member, tuple(partitions)))
        return Group(group["group_state"].lower(), "consumer", group["assignor_name"] or "", tuple(sorted(members)))

    async def _classic_group(self, group_id: str) -> Group:
        found = await self._described(group_id)
        members = [
            MemberOfGroup(
                GroupMember(one["member_id"], one["client_id"], one["client_host"], one.get("group_instance_id")),
                _assigned(one["member_assignment"]),
            )
            for one in found["members"]
        ]
        return Group(found["state"].lower(), "classic", found["protocol"] or "", tuple(sorted(members)))

    async def remove_static_member(self, group_id: str, instance_id: str) -> None:
        """Remove a static member from its group for good; its partitions go to other members immediately.

        Raises:
            StateError: The group has no such member.
            AuthorizationError: This user may not read with the group.
            TransportError: The member was not removed.
        """
        what = f"remove {instance_id!r} from group {group_id!r}"
        order = RemoveMember(group_id, instance_id=instance_id)
        if not await self._patiently(functools.partial(self._removed, order, group_id), what, group_id):
            raise StateError(
                f"group {group_id!r} has no static member {instance_id!r}: aioshard group show {group_id} names those "
                "that it has"
            )

    async def remove_member(self, group_id: str, member_id: str) -> bool:
        """Remove a dead member from its group, so that others get its partitions before its session expires.

        Returns:
            Whether the group had it.

        Raises:
            AuthorizationError: This user may not read with the group.
            TransportError: The member was not removed.
        """
        order = RemoveMember(group_id, member_id=member_id)
        what = f"remove member {member_id!r} from group {group_id!r}"
        return await self._patiently(functools.partial(self._removed, order, group_id), what, group_id)

    async def _removed(self, order: RemoveMember, group_id: str) -> bool:
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
        return removed_member(await self._client.send(node, order))


def offsets_partition(group_id: str, partitions: int) -> int:
    """Compute which partition of `__consumer_offsets` stores a group's offsets; its leader coordinates the group.

    Example:
        >>> offsets_partition("hello", 50)
        22
    """
    units = group_id.encode("utf-16-be")
    code = 0
    for place in range(0, len(units), 2):
        code = (31 * code + int.from_bytes(units[place : place + 2])) & 0xFFFFFFFF
    if code >= 1 << 31:
        code = (1 << 32) - code  # Java's Math.abs; the smallest integer has no absolute value and counts as 0
    return 0 if code == 1 << 31 else code % partitions


def _assigned(content: bytes | None) -> tuple[TopicPartition, ...]:
    """Decode a classic member's partitions; empty if the member is not a consumer, or the group rebalances."""
    if not content:
        return ()
    try:
        found = ConsumerProtocolMemberAssignment.decode(BytesIO(content))
        return tuple(sorted(TopicPartition(topic, number) for topic, numbers in found.assignment for number in numbers))
    except (ValueError, TypeError, UnicodeDecodeError):
        return ()
