"""The assignors of a classic member: its words to the leader, and its assignment as the leader.

The decisions are in `aioshard.core.assignment`; the members are told apart here. A member can say two things about
partitions: in the subscription, those that it still works on (a claim), and in the user data, those that it had last
(a wish to have them again). An eager member has no claims. Nobody gets a partition that another member claims before a
further rebalance.

| name | user data |
| --- | --- |
| `range`, `roundrobin`, `fair` | the group instance id, by which the leader sorts static members |
| `sticky` | the partitions that the member had last, as in Java's and aiokafka's `sticky` |
| `cooperative-sticky` | the generation, as in Java's `cooperative-sticky` |
| `lag`, `cooperative-fair`, `cooperative-lag` | the partitions that the member had last, as JSON |
"""

import json
import logging
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from aioshard.core.assignment import (
    ASSIGNORS,
    NO_GENERATION,
    DelayedReassignment,
    Member,
    Partitions,
    assign_sticky,
    pays,
    without_moves,
)
from aioshard.kafka.group.classic import Assignments, Elected
from aioshard.kafka.wire.consumer_protocol import Subscription
from aioshard.kafka.wire.notation import Structure, parse
from aioshard.records import TopicPartition, by_topic

logger = logging.getLogger("aioshard.kafka.group")

COOPERATIVE: Final = "cooperative-"
"""The beginning of the names of incremental assignors: a leader with such an assignor respects claims."""
_COOPERATIVE_STICKY = "cooperative-sticky"
_FUNCTIONS = {**ASSIGNORS, _COOPERATIVE_STICKY: assign_sticky}
_NAMED = frozenset({"range", "roundrobin", "fair"})
"""The stateless assignors. Members send their `group_instance_id`, so that the whole group sorts by it."""
_FIELDS = "previous:[topic:s partitions:i4*]"
_STICKY = Structure("Sticky", parse(f"{_FIELDS} generation:i4")).codec(0, flexible=False)
_STICKY_WITHOUT_GENERATION = Structure("Sticky", parse(_FIELDS)).codec(0, flexible=False)
_GENERATION = struct.Struct(">i")


class Plan(NamedTuple):
    """An assignment of the leader, with what follows from it; the arguments of `ClassicMember.lead`."""

    assignments: Assignments
    rejoin_at: float
    """When the group has to rebalance again, at the latest; infinite if it need not."""
    withheld: frozenset[TopicPartition]
    """Partitions of a lost member, which wait for a replacement until `rejoin_at`."""


class GroupAssignor:
    """An assignor with the state of one member.

    Example:
        >>> assignor = GroupAssignor("cooperative-fair")
        >>> assignor.user_data({TopicPartition("orders", 0)}, 4)
        b'{"generation": 4, "had": {"orders": {"0": null}}}'
    """

    def __init__(self, name: str, *, delay: float = 0.0, instance_id: str | None = None) -> None:
        """Describe it.

        Args:
            name: The name that the group agrees on.
            delay: Seconds for which partitions of a lost member wait for a replacement.
            instance_id: The name of a static member.
        """
        self.name = name
        self.is_incremental = name.startswith(COOPERATIVE)
        """Whether members keep their partitions during a rebalance, and release only those that move."""
        self._instance_id = instance_id
        self._delayed = DelayedReassignment(delay)
        self._moving: Mapping[TopicPartition, str] = {}
        """Partitions that the latest assignment left out until their owners release them, with their next members."""
        self._generation = NO_GENERATION
        """The generation of the latest assignment."""
        self._group: tuple[Mapping[str, Member], Partitions] = {}, {}
        """The members of the latest assignment, with the partitions that each got, and all partitions."""

    def user_data(self, partitions: Collection[TopicPartition], generation: int) -> bytes:
        """Return the user data of a subscription; see `aioshard.kafka.group.classic.Assignor`."""
        return user_data(self.name, self._instance_id, partitions, generation)

    def assign(
        self,
        election: Elected,
        partitions: Partitions,
        now: float,
        backlogs: Mapping[TopicPartition, int] | None = None,
    ) -> Plan:
        """Compute the assignment of the group.

        Args:
            election: The election, for this assignor.
            partitions: The existing partitions of the members' topics.
            now: The time, as the member counts it.
            backlogs: The uncommitted records of partitions, where they are known. They count for more than what
                members report.
        """
        before = _partitions(election.assigned_before)
        if election.generation != self._generation + 1:  # another member has led the group since, or nobody
            self._delayed.forget(before)
            self._moving = {}
        elif before is not None:
            self._delayed.expect(before)
        self._generation = election.generation
        subscriptions = election.members
        known = {topic: sorted(numbers) for topic, numbers in partitions.items() if numbers}
        reports = self._reports(subscriptions, backlogs or {})
        withheld = self._delayed.withheld(reports, known, now)
        available = {
            topic: [number for number in numbers if TopicPartition(topic, number) not in withheld]
            for topic, numbers in known.items()
        }
        names = lasting_names(self.name, {name: each.user_data for name, each in subscriptions.items()})
        computed = _FUNCTIONS[self.name]({names[name]: member for name, member in reports.items()}, available)
        target = {name: computed[names[name]] for name in reports}
        claims = {name: claimed(self.name, each) for name, each in subscriptions.items()}
        assignments = without_moves(claims, target)
        self._moving = {at: name for name, assigned in target.items() for at in assigned if at not in assignments[name]}
        self._group = (
            {name: Member(report.topics, assignments[name], 1) for name, report in reports.items()},
            known,
        )
        rejoin_at = self._delayed.until if withheld and self._delayed.until is not None else math.inf
        if any(self._waits_for_us(name, subscriptions) for name in claims if self._moving.keys() & claims[name].owned):
            rejoin_at = now
        return Plan(assignments, rejoin_at, withheld)

    @property
    def knows_group(self) -> bool:
        """Whether the members and their partitions are known here: not after a static leader was restarted."""
        members, _ = self._group
        return bool(members)

    def take_over(self, members: Mapping[str, Member]) -> None:
        """Accept the members of a group with the partitions that a predecessor has assigned to them."""
        assigned = sorted(partition for member in members.values() for partition in member.owned)
        self._group = (
            {name: replace(member, generation=1) for name, member in members.items()},
            dict(by_topic(assigned)),
        )

    def would_pay(self, backlogs: Mapping[TopicPartition, int]) -> bool:
        """Whether a rebalance would pay now, judged by the leader from the current backlogs of all partitions."""
        members, partitions = self._group
        if not members:
            return False
        return pays({name: replace(member, backlogs=backlogs) for name, member in members.items()}, partitions)

    def _waits_for_us(self, name: str, subscriptions: Mapping[str, Subscription]) -> bool:
        """Whether a member releases partitions but leaves the next rebalance to the leader, as old versions do."""
        return subscriptions[name].owned is None

    def _reports(
        self, subscriptions: Mapping[str, Subscription], backlogs: Mapping[TopicPartition, int]
    ) -> dict[str, Member]:
        """Return the members with the partitions that they had last, and with the backlogs of all."""
        reports = {name: reported(self.name, each) for name, each in subscriptions.items()}
        owned = {partition for member in reports.values() for partition in member.owned}
        known = dict(backlogs)
        for partition in self._moving.keys() - owned:
            # Otherwise backlogs that grew meanwhile could move it to yet another member, again and again.
            taker = self._moving[partition]
            if taker in reports:
                reports[taker] = replace(reports[taker], owned=(*reports[taker].owned, partition))
                known.pop(partition, None)
        return {name: replace(report, backlogs={**report.backlogs, **known}) for name, report in reports.items()}


def _partitions(numbers: Mapping[str, Collection[int]] | None) -> list[TopicPartition] | None:
    if numbers is None:
        return None
    return [TopicPartition(topic, number) for topic in numbers for number in numbers[topic]]


# Members ----------------------------------------------------------------------------------


def claimed(name: str, subscription: Subscription) -> Member:
    """Return a member with the partitions that it still works on.

    Version 0 of the subscription cannot say so. Members of that version with an incremental assignor say it in the
    user data.
    """
    topics = subscription.topics
    if subscription.owned is None and name.startswith(COOPERATIVE):
        return decoded(name, topics, subscription.user_data)
    owned = tuple(sorted(subscription.owned or ()))
    if subscription.generation == NO_GENERATION and name == _COOPERATIVE_STICKY:
        return Member(topics, owned, _generation(subscription.user_data))
    return Member(topics, owned, subscription.generation)


def reported(name: str, subscription: Subscription) -> Member:
    """Return a member with the partitions that it should keep if possible: those that it claims, or had last."""
    if name in _NAMED:
        return Member(subscription.topics)
    claims = claimed(name, subscription)
    last = decoded(name, subscription.topics, subscription.user_data)
    return replace(claims, backlogs=last.backlogs) if claims.owned else last


def lasting_names(name: str, data: Mapping[str, bytes]) -> Mapping[str, str]:
    """Map member ids to the names that members are sorted by: a static member gets a new id at each restart.

    Args:
        name: The assignor.
        data: The user data of each member.
    """
    names = {
        member_id: f"0 {content.hex()}" if name in _NAMED and content else f"1 {member_id}"
        for member_id, content in data.items()
    }
    return names if len(set(names.values())) == len(names) else {member_id: member_id for member_id in data}


# User data --------------------------------------------------------------------------------


def user_data(
    name: str,
    instance_id: str | None,
    partitions: Collection[TopicPartition],
    generation: int,
) -> bytes:
    """Return the user data that a member sends; `decoded` reads them.

    Args:
        name: The assignor.
        instance_id: The name of a static member.
        partitions: The partitions that the member has, or had last.
        generation: The generation that assigned them.
    """
    if name in _NAMED:
        return (instance_id or "").encode()
    if name == _COOPERATIVE_STICKY:
        return _GENERATION.pack(generation)
    if not partitions:
        return b""
    if name == "sticky":
        out = bytearray()
        parts = [{"topic": topic, "partitions": numbers} for topic, numbers in by_topic(sorted(partitions))]
        _STICKY.encode(out, {"previous": parts, "generation": generation})
        return bytes(out)
    had = {
        topic: dict.fromkeys(numbers)  # members on aiokafka named a backlog here
        for topic, numbers in by_topic(sorted(partitions))
    }
    return json.dumps({"generation": generation, "had": had}).encode()


def decoded(name: str, topics: frozenset[str], content: bytes) -> Member:
    """Read a member's user data. A member with invalid data counts as new, so that the group can continue."""
    if not content or name in _NAMED or name == _COOPERATIVE_STICKY:
        return Member(topics)
    try:
        return _sticky(topics, content) if name == "sticky" else _json(topics, content)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        logger.warning("a member's user data is invalid for %r; it counts as a new member: %s", name, error)
        return Member(topics)


def _sticky(topics: frozenset[str], content: bytes) -> Member:
    try:
        values, _ = _STICKY.decode(content, 0)
        generation: int = values.generation
    except (struct.error, IndexError):
        values, _ = _STICKY_WITHOUT_GENERATION.decode(content, 0)
        generation = NO_GENERATION
    owned = tuple(TopicPartition(part.topic, number) for part in values.previous for number in part.partitions)
    return Member(topics, owned, generation)


def _json(topics: frozenset[str], content: bytes) -> Member:
    values: Any = json.loads(content)
    backlogs = {
        TopicPartition(topic, int(number)): backlog
        for topic, numbers in values["had"].items()
        for number, backlog in numbers.items()
    }
    known = {partition: int(backlog) for partition, backlog in backlogs.items() if backlog is not None}
    return Member(topics, tuple(backlogs), int(values["generation"]), known)


def _generation(content: bytes) -> int:
    """Return the generation in the user data of `cooperative-sticky`."""
    if len(content) < _GENERATION.size:
        return NO_GENERATION
    (generation,) = _GENERATION.unpack_from(content)
    return int(generation)
