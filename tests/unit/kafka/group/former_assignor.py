"""The assignor of members that ran on aiokafka: what they say to a group, and what they assign as its leader."""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from aioshard.core.assignment import (
    ASSIGNORS,
    NO_GENERATION,
    DelayedReassignment,
    Member,
    Partitions,
    pays,
    without_moves,
)
from aioshard.kafka.group.assignors import decoded, lasting_names, user_data
from aioshard.records import TopicPartition, by_topic

logger = logging.getLogger("tests.former_assignor")

_VERSION = 0


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
        self.cooperative = name.startswith("cooperative-")
        """Whether members keep their partitions during a rebalance, and release only those that move."""
        self.moving: Mapping[TopicPartition, str] = {}
        """Partitions that the latest assignment left out until their owners release them, with their next members."""
        self.leads = False
        """Whether this consumer leads the group: it computed the latest assignment, before its restart or since."""
        self._group: tuple[Mapping[str, Member], Partitions] = {}, {}
        """The members of the latest assignment, with the partitions that each got, and all partitions."""
        self.owned: Sequence[TopicPartition] = ()
        """The partitions that the consumer has, or had last."""
        self.generation = NO_GENERATION
        """The generation that assigned `owned`; the transport sets it."""
        self.backlogs: Mapping[TopicPartition, int] = {}
        """Known backlogs, in records, of all subscribed partitions; the transport sets them. User data covers only the
        consumer's own partitions, because the broker stores the user data of all members in one record."""

    # Called by aiokafka -----------------------------------------------------------------

    def metadata(self, topics: Iterable[str]) -> Any:
        """Build the metadata that the consumer sends when it joins."""
        self.leads = False
        content = self._with_backlogs(user_data(self.name, self._instance, self.owned, self.generation))
        return ConsumerProtocolMemberMetadata(_VERSION, sorted(topics), content)

    def _with_backlogs(self, content: bytes) -> bytes:
        if not content.startswith(b"{"):
            return content
        values = json.loads(content)
        for topic, numbers in values["had"].items():
            for number in numbers:
                numbers[number] = self.backlogs.get(TopicPartition(topic, int(number)))
        return json.dumps(values).encode()

    def assign(self, cluster: ClusterMetadata, members: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the assignment; called only on the leader of the group."""
        reports = {
            name: decoded(self.name, frozenset(metadata.subscription), metadata.user_data or b"")
            for name, metadata in members.items()
        }
        for partition in self.moving.keys() - {owned for member in reports.values() for owned in member.owned}:
            # Otherwise backlogs that grew meanwhile could move it to yet another member, again and again.
            if (taker := reports.get(self.moving[partition])) is not None:
                reports[self.moving[partition]] = replace(taker, owned=(*taker.owned, partition))
        # No member reports unowned partitions. For those, use the backlogs that the leader fetched.
        first = min(reports)
        reports[first] = replace(reports[first], backlogs={**self.backlogs, **reports[first].backlogs})
        topics = sorted(set().union(*(member.topics for member in reports.values())))
        known = {topic: cluster.partitions_for_topic(topic) for topic in topics}
        if unknown := [topic for topic, partitions in known.items() if not partitions]:
            logger.warning("no partitions of %s were assigned: the brokers report none", ", ".join(unknown))
        partitions = {topic: sorted(partitions) for topic, partitions in known.items() if partitions}
        self.leads = True
        names = lasting_names(self.name, {name: metadata.user_data or b"" for name, metadata in members.items()})
        computed = ASSIGNORS[self.name](
            {names[name]: member for name, member in reports.items()}, self._without_withheld(reports, partitions)
        )
        target = {name: computed[names[name]] for name in reports}
        assignment = without_moves(reports, target) if self.cooperative else target
        self.moving = {at: name for name, held in target.items() for at in held if at not in assignment[name]}
        self._group = (
            {name: Member(report.topics, assignment[name], 1) for name, report in reports.items()},
            partitions,
        )
        return {
            name: ConsumerProtocolMemberAssignment(_VERSION, by_topic(member.owned), b"")
            for name, member in self._group[0].items()
        }

    def would_pay(self, backlogs: Mapping[TopicPartition, int]) -> bool:
        """Whether a rebalance would pay now, judged by the leader from the current backlogs of all partitions."""
        members, partitions = self._group
        return pays({name: replace(member, backlogs=backlogs) for name, member in members.items()}, partitions)

    def _without_withheld(self, reports: Mapping[str, Member], partitions: Partitions) -> Partitions:
        now = time.monotonic()
        withheld = self._delayed.withheld(reports, partitions, now)
        if not withheld or self._delayed.until is None:
            return partitions
        logger.warning(
            "%d partitions of a lost member stay unassigned for %.3g s, until a replacement joins: %s",
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
        if not self.leads:
            self._delayed.forget()
            self.moving = {}
        self.owned = tuple(
            TopicPartition(partition.topic, partition.partition) for partition in assignment.partitions()
        )

    # For the transport --------------------------------------------------------------------

    @property
    def joins_again_in(self) -> float | None:
        """Seconds until the consumer, as the leader, must rejoin to assign the withheld partitions; else None."""
        until = self._delayed.until
        return None if until is None else max(until - time.monotonic(), 0.0)
