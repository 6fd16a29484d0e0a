"""Broker queries of an aiokafka transport: positions, log bounds, topics."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Collection, Container, Mapping
from typing import TYPE_CHECKING, TypeVar

from aiokafka import errors as kafka

from aioshard.errors import CommitRefusedError
from aioshard.kafka.intake import Intake
from aioshard.kafka.internals import Internals
from aioshard.kafka.translate import request_error
from aioshard.ports import NOT_A_MEMBER, Committed, LogRange, Membership
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Questions", "refuse_what_is_not_ours"]

T = TypeVar("T")

_RETRY_BACKOFF = 0.1
"""Seconds between two attempts of a query."""


class Questions:
    """The query methods of a transport."""

    _group_id: str
    _settings: "Settings"

    @abstractmethod
    def _running(self) -> tuple[Internals, Intake]:
        """Return the client; raises `ClientLostError` unless the transport is open."""

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`. Has no deadline; retries transient errors."""
        while partitions:
            internals, _ = self._running()
            try:
                await internals.find_coordinator()
                found = await internals.committed_once(partitions)
            except kafka.KafkaError as error:
                if not error.retriable:
                    what = f"the committed offsets of {', '.join(map(str, partitions))}"
                    raise request_error(error, what, self._group_id) from error
                await asyncio.sleep(_RETRY_BACKOFF)
            else:
                return {topic_partition: found.get(topic_partition) for topic_partition in partitions}
        return {}

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`. Takes at most two thirds of `commit_timeout`."""
        internals, _ = self._running()
        asking = internals.log_ranges(partitions, self._settings.commit_timeout / 3)
        return await self._told(asking, f"the bounds of {', '.join(map(str, partitions))}")

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `Transport.partitions`. Looks up an unknown topic once, without creating it."""
        internals, _ = self._running()
        known = internals.client.cluster.partitions_for_topic(topic)
        if known:
            return frozenset(known)
        return await self._told(internals.look_up_topic(topic), f"the partitions of topic {topic!r}")

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        internals, _ = self._running()
        return await self._told(internals.look_up_topics(), "the topics")

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline; retries transient errors."""
        internals, _ = self._running()
        asking = internals.offset_at(topic_partition, timestamp)
        return await self._told(asking, f"the offsets of {topic_partition} by time")

    async def _told(self, asking: Awaitable[T], what: str) -> T:
        try:
            return await asking
        except kafka.KafkaError as error:
            raise request_error(error, what, self._group_id) from error


def refuse_what_is_not_ours(
    group_id: str,
    partitions: Collection[TopicPartition],
    ours: Container[object],
    membership: Membership,
    current: Membership,
) -> None:
    """Refuse a commit before it is sent if we no longer have *membership* or its partitions.

    Args:
        group_id: For the error message.
        partitions: The partitions to commit.
        ours: The partitions that we have now.
        membership: The membership that the commit was made for.
        current: Our membership now.

    Raises:
        CommitRefusedError: The group has moved on since.
    """
    if current == NOT_A_MEMBER:
        why = "we are no member of it now"
    elif membership != current:
        why = f"it was meant for generation {membership.generation}, and ours is {current.generation}"
    else:
        foreign = [str(topic_partition) for topic_partition in partitions if topic_partition not in ours]
        why = f"not assigned to us: {', '.join(foreign)}" if foreign else ""
    if why:
        raise CommitRefusedError(f"a commit of group {group_id!r} was not sent: {why}")
