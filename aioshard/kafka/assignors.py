"""Assignors in the form aiokafka calls them: one object per consumer, with the user data it sends to the group."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyAssignorUserDataV1
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.protocol.struct import Struct
from aiokafka.protocol.types import Array, Int16, Int32, Int64, Schema, String

from aioshard.core.assignment import ASSIGNORS, Member, Partitions
from aioshard.core.assignment.delay import DelayedReassignment
from aioshard.core.assignment.members import NO_GENERATION
from aioshard.records import TopicPartition

__all__ = ["BacklogUserData", "ConsumerAssignor"]

logger = logging.getLogger("aioshard.kafka.assignors")

_VERSION = 0
_NAMED = frozenset({"range", "roundrobin", "fair"})
"""The stateless assignors. Members send their `group_instance_id`, so that the whole group sorts by it."""
_UNKNOWN = -1
"""Placeholder for a backlog that the member does not know."""


class BacklogUserData(Struct):  # type: ignore[misc]
    """User data of a member under `lag`: the partitions it had, their backlogs, and the generation."""

    class Had(NamedTuple):
        """A topic of which the member had partitions."""

        topic: str
        partitions: Sequence[tuple[int, int]]
        """Partition number and backlog of each; -1 is unknown."""

    version: int
    had: Sequence[Had]
    generation: int

    SCHEMA = Schema(
        ("version", Int16),
        ("had", Array(("topic", String("utf-8")), ("partitions", Array(("partition", Int32), ("backlog", Int64))))),
        ("generation", Int32),
    )


class ConsumerAssignor:
    """An assignor with the state of one consumer.

    aiokafka accepts any object with `name`, `metadata`, `assign` and `on_assignment`. aiokafka's own sticky assignor
    keeps its state on the class, so all consumers of a process would share it. `sticky` sends the same user data as
    aiokafka's and Java's `sticky`, so they can be members of the same group.

    Example:
        >>> ConsumerAssignor("fair").metadata(["orders"]).user_data
        b''
    """

    def __init__(self, name: str, delay: float = 0, instance: str | None = None) -> None:
        """Take the settings `assignor`, `reassignment_delay` in seconds, and `group_instance_id`."""
        self.name = name
        self._instance = instance
        self._delayed = DelayedReassignment(delay)
        self._leads = False
        """Whether this consumer computed the latest assignment."""
        self.owned: Sequence[TopicPartition] = ()
        """The partitions that the consumer has, or had last."""
        self.generation = NO_GENERATION
        """The generation that assigned `owned`."""
        self.backlogs: Mapping[TopicPartition, int] = {}
        """Known backlogs, in records, of all subscribed partitions. User data covers only the consumer's own
        partitions, because the broker stores the user data of all members in one record."""

    # Called by aiokafka -----------------------------------------------------------------

    def metadata(self, topics: Iterable[str]) -> Any:
        """Build the metadata that the consumer sends when it joins."""
        self._leads = False
        return ConsumerProtocolMemberMetadata(_VERSION, sorted(topics), self._user_data())

    def assign(self, cluster: ClusterMetadata, members: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the assignment; called only on the leader of the group."""
        told = {name: self._member(metadata) for name, metadata in members.items()}
        # No member reports partitions that nobody has. For those, use the backlogs that the leader fetched.
        first = min(told)
        told[first] = replace(told[first], backlogs={**self.backlogs, **told[first].backlogs})
        topics = sorted(set().union(*(member.topics for member in told.values())))
        known = {topic: cluster.partitions_for_topic(topic) for topic in topics}
        unknown = [topic for topic, partitions in known.items() if not partitions]
        if unknown:
            logger.warning("nobody gets partitions of %s: the brokers tell of none", ", ".join(unknown))
        partitions = {topic: sorted(partitions) for topic, partitions in known.items() if partitions}
        self._leads = True
        names = self._lasting_names(members)
        found = ASSIGNORS[self.name](
            {names[name]: member for name, member in told.items()}, self._without_withheld(told, partitions)
        )
        return {
            name: ConsumerProtocolMemberAssignment(_VERSION, _by_topic(found[names[name]]), b"") for name in members
        }

    def _lasting_names(self, members: Mapping[str, Any]) -> Mapping[str, str]:
        """Map member ids to the names that members are sorted by: a static member gets a new id at each restart."""
        if self.name not in _NAMED:
            return {name: name for name in members}
        names = {
            name: f"0 {metadata.user_data.hex()}" if metadata.user_data else f"1 {name}"
            for name, metadata in members.items()
        }
        return names if len(set(names.values())) == len(names) else {name: name for name in members}

    def _without_withheld(self, told: Mapping[str, Member], partitions: Partitions) -> Partitions:
        now = time.monotonic()
        withheld = self._delayed.withheld(told, partitions, now)
        if not withheld or self._delayed.until is None:
            return partitions
        logger.warning(
            "%d partitions of a member that is gone wait %.3g s for another in its place, and nobody reads them: %s",
            len(withheld),
            self._delayed.until - now,
            ", ".join(map(str, sorted(withheld))),
        )
        return {
            topic: [number for number in numbers if TopicPartition(topic, number) not in withheld]
            for topic, numbers in partitions.items()
        }

    def on_assignment(self, assignment: Any) -> None:
        """Remember the consumer's new partitions."""
        if not self._leads:
            self._delayed.forget()
        self.owned = tuple(TopicPartition(one.topic, one.partition) for one in assignment.partitions())

    # Called by the transport ------------------------------------------------------------

    def on_generation_assignment(self, generation: int) -> None:
        """Remember the generation of the latest assignment."""
        self.generation = generation

    @property
    def joins_again_in(self) -> float | None:
        """Seconds until the consumer, as the leader, must rejoin to assign the withheld partitions; else None."""
        until = self._delayed.until
        return None if until is None else max(until - time.monotonic(), 0.0)

    def on_backlogs(self, backlogs: Mapping[TopicPartition, int]) -> None:
        """Remember the backlogs, in records, of the subscribed partitions."""
        self.backlogs = dict(backlogs)

    # User data ----------------------------------------------------------------------------

    def _user_data(self) -> bytes:
        data: Any = None
        if self.name in _NAMED:
            return (self._instance or "").encode()
        if self.name == "sticky" and self.owned:
            data = StickyAssignorUserDataV1(_by_topic(self.owned), self.generation)
        elif self.name == "lag" and self.owned:
            had = [
                (topic, [(number, self.backlogs.get(TopicPartition(topic, number), _UNKNOWN)) for number in numbers])
                for topic, numbers in _by_topic(self.owned)
            ]
            data = BacklogUserData(_VERSION, had, self.generation)
        return b"" if data is None else bytes(data.encode())

    def _member(self, metadata: Any) -> Member:
        """Decode a member's user data. A member with invalid data counts as new, so that the group can continue."""
        topics = frozenset(metadata.subscription)
        if not metadata.user_data or self.name not in {"sticky", "lag"}:
            return Member(topics)
        try:
            return _sticky(topics, metadata.user_data) if self.name == "sticky" else _lag(topics, metadata.user_data)
        except (ValueError, TypeError) as error:
            logger.warning(
                "a member of the group tells what %r does not understand, and counts as new: %s", self.name, error
            )
            return Member(topics)


def _sticky(topics: frozenset[str], user_data: bytes) -> Member:
    told = StickyAssignorUserDataV1.decode(user_data)
    owned = tuple(TopicPartition(topic, number) for topic, numbers in told.previous_assignment for number in numbers)
    return Member(topics, owned, told.generation)


def _lag(topics: frozenset[str], user_data: bytes) -> Member:
    told = BacklogUserData.decode(user_data)
    if told.version != _VERSION:
        raise ValueError(f"version {told.version} of the user data, where {_VERSION} was expected")
    had = {TopicPartition(topic, number): left for topic, pairs in told.had for number, left in pairs}
    return Member(topics, tuple(had), told.generation, {at: left for at, left in had.items() if left != _UNKNOWN})


def _by_topic(partitions: Iterable[TopicPartition]) -> list[tuple[str, list[int]]]:
    ordered = groupby(sorted(partitions), key=lambda one: one.topic)
    return [(topic, [one.partition for one in ones]) for topic, ones in ordered]
