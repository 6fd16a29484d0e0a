"""The first join of a static member: who leads the group, and whether it has to rebalance.

A restarted static member gets its partitions back without a rebalance. Before version 9 of JoinGroup, which aiokafka
does not speak (KIP-814), the answer names the leader by the member id from before the restart, so a restarted leader
acts as a follower. Nobody leads the group then, until something else makes it rebalance: nobody notices added
partitions, and nobody assigns those that wait for their next member. Nor does the broker rebalance if the restarted
member has another subscription.

So the member looks at the group before it joins.
"""

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from aiokafka.protocol.group import JoinGroupRequest

from aioshard.core.assignment import Members, Partitions
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.groups import DescribedGroup
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import DESCRIBE_GROUPS
from aioshard.kafka.wire.responses import classic_members
from aioshard.records import TopicPartition, by_topic

logger = logging.getLogger("aioshard.kafka.aiokafka")

_FENCED, _UNKNOWN_MEMBER = 82, 25
"""Another process has joined with our instance id. aiokafka would fail at the first code; after the second, it joins
again."""
_VERSION_1 = (1).to_bytes(2, "big")
_NO_OWNED_PARTITIONS = bytes(4)


class Standing(Enum):
    """The standing of a static member that has joined."""

    FOLLOWER = "another member leads"
    LEADER = "this member leads, and the assignment is complete"
    OUTDATED = "the group has to rebalance"


def standing_of(
    predecessor: str, leader_id: str, topics: frozenset[str], members: Members, partitions: Partitions
) -> Standing:
    """Return the standing of a static member that has joined a stable group as a follower, as far as the answer says.

    Args:
        predecessor: The member that it replaces.
        leader_id: The leader in the answer.
        topics: The topics that it subscribes to now.
        members: The members of the group before it joined, by id.
        partitions: The existing partitions of each topic that somebody subscribes to.
    """
    assigned = {partition for member in members.values() for partition in member.owned}
    before = members[predecessor]
    changed = topics != before.topics
    # Also what a changed subscription leaves behind: the predecessor may have ended before the group rebalanced.
    unsubscribed = {partition.topic for partition in before.owned} - topics
    unread = (topics & partitions.keys()) - {partition.topic for partition in assigned}
    if changed or unsubscribed or unread:
        return Standing.OUTDATED
    if leader_id != predecessor and leader_id in members:
        return Standing.FOLLOWER
    # An unknown leader has joined in between: it may be another process with our instance id, so we may lead now. If we
    # do not, to watch the group as its leader does no harm: the broker ignores a rejoin that changes nothing.
    existing = {TopicPartition(topic, number) for topic, numbers in partitions.items() for number in numbers}
    return Standing.OUTDATED if existing - assigned else Standing.LEADER


class StaticJoins:
    """The joins of one static member."""

    def __init__(
        self, client: Any, coordinator: Any, assignor: ConsumerAssignor, cluster: Cluster, patience: float
    ) -> None:
        """Handle the joins of a consumer that has not joined yet.

        Args:
            client: Its client.
            coordinator: Its coordinator.
            assignor: Its assignor.
            cluster: Whom to ask for the description of the group.
            patience: Seconds to wait for it.
        """
        self._client = client
        self._cluster = cluster
        self._coordinator = coordinator
        self._assignor = assignor
        self._patience = patience
        self._member_id = ""
        """Our latest member id."""
        self.was_displaced = False
        """Whether another process with our instance id had replaced us before we joined last."""
        self._send: Callable[[Any], Awaitable[Any]] = coordinator._send_req
        coordinator._send_req = self._send_request

    async def _send_request(self, request: Any) -> Any:
        coordinator = self._coordinator
        if isinstance(request, JoinGroupRequest):
            self.was_displaced = False
            coordinator._group_subscription = None  # otherwise a previous leader would watch topics of others
        if isinstance(request, JoinGroupRequest) and not request._member_id:
            answer = await self._join(request)
        else:
            answer = await self._send(request)  # with a member id, the answer to a join names the real leader
        if getattr(answer, "error_code", 0) == _FENCED:
            answer.error_code = _UNKNOWN_MEMBER
        return answer

    async def _join(self, request: Any) -> Any:
        """Join without a member id, and a second time if the group has to rebalance; return the last answer."""
        coordinator = self._coordinator
        group = await self._describe()
        predecessor = None if group is None else group.instances.get(coordinator._group_instance_id)
        if predecessor is not None and self._member_id:
            self.was_displaced = predecessor != self._member_id
        answer = await self._send(request)
        if answer.error_code:
            return answer
        self._member_id = answer.member_id
        if answer.leader_id == answer.member_id:
            return answer
        if group is None:
            return await self._send(_forcing(request, answer.member_id))
        if predecessor is None or not group.is_stable:
            return answer  # the group has rebalanced, so the answer names the real leader
        topics = frozenset(coordinator._subscription.topics)
        standing = standing_of(predecessor, answer.leader_id, topics, group.members, self._partitions(group.members))
        if standing is Standing.OUTDATED:
            logger.info("group %r has to rebalance: its assignment is outdated", coordinator.group_id)
            return await self._send(_forcing(request, answer.member_id))
        if standing is Standing.LEADER:
            self._lead(group.members)
        return answer

    async def _describe(self) -> DescribedGroup | None:
        """Describe the group; None if that fails, and the group has to rebalance to be sure."""
        group_id = self._coordinator.group_id
        node: int | None = None
        try:
            async with asyncio.timeout(self._patience):
                node = await self._cluster.coordinator(CoordinatorKind.GROUP, group_id)
                request = DESCRIBE_GROUPS(groups=[group_id], operations=False)
                return classic_members(await self._cluster.ask(node, request, purpose=Purpose.GROUP), group_id)
        except (WireError, TimeoutError) as error:
            if node is not None:  # another broker may coordinate the group by now
                self._cluster.forget_coordinator(CoordinatorKind.GROUP, group_id, node)
            logger.info("group %r cannot be described: %s", group_id, str(error) or "no answer in time")
            return None

    def _partitions(self, members: Members) -> Partitions:
        """Return the partitions of the group's topics, of those that this member has looked up."""
        known = {topic: self._client.cluster.partitions_for_topic(topic) for topic in _topics(members)}
        return {topic: numbers for topic, numbers in known.items() if numbers}

    def _lead(self, members: Members) -> None:
        """Watch the group like the consumer that assigned the partitions: it rejoins if others exist.

        No await may follow before the next request: aiokafka ignores changes of the metadata until then.
        """
        coordinator = self._coordinator
        topics = set(_topics(members))
        assigned = by_topic(sorted(partition for member in members.values() for partition in member.owned))
        numbers = {topic: [] for topic in topics} | dict(assigned)
        self._assignor.lead(members, numbers)
        coordinator._group_subscription = topics
        coordinator._metadata_snapshot = {topic: len(numbers[topic]) for topic in topics}
        if not coordinator._subscription.subscribed_pattern:
            self._client.set_topics(topics)


def _topics(members: Members) -> frozenset[str]:
    return frozenset[str]().union(*(member.topics for member in members.values()))


def _forcing(request: Any, member_id: str) -> Any:
    """Return a join that makes the group rebalance: from a follower, that takes other metadata than the broker has.

    Version 1 of the metadata, with an empty list of owned partitions, says the same as version 0.
    """
    forcing = copy.copy(request)
    forcing._member_id = member_id
    forcing._group_protocols = [
        (name, _VERSION_1 + metadata[len(_VERSION_1) :] + _NO_OWNED_PARTITIONS)
        for name, metadata in request._group_protocols
    ]
    return forcing
