"""Questions to the brokers that are none of the group's business: they wait for no call of the consumer."""

import asyncio
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import ConsumerGroupTopicPartitions, IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, OffsetSpec

from aioshard.kafka.confluent.member import places
from aioshard.kafka.confluent.options import admin_options
from aioshard.kafka.confluent.translate import error_of, may_pass, reason, request_error
from aioshard.ports import Committed, LogRange
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.errors import TransportError
    from aioshard.settings import Settings

__all__ = ["Asked", "Asking"]

_specification: Any = OffsetSpec
_EARLIEST, _LATEST = _specification.earliest(), _specification.latest()
_OF_BROKERS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
_RETRY_BACKOFF = 0.1
"""Seconds between two attempts of a question to the brokers."""
_REQUEST_TIMEOUT = 5.0
"""Seconds for one attempt; who asks has deadlines of his own."""


class Asking:
    """Asks about topics, logs and committed offsets, with connections of its own.

    The consumer serves one call at a time, and a question to a coordinator that is gone would keep it from reading.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        self.group_id = group_id
        uncommitted = settings.isolation_level == "read_uncommitted"
        self._isolation = IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED
        self._admin: Any = AdminClient(admin_options(settings))
        self._partitions: dict[str, frozenset[int]] = {}

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """The group's committed offsets, with the texts that were committed with them."""
        what = f"the committed offsets of {', '.join(map(str, partitions))}"
        while partitions:
            try:
                return await self._committed_once(partitions)
            except KafkaException as error:
                await self._pause_or_raise(error, what)
        return {}

    async def _committed_once(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Committed | None]:
        asked = ConsumerGroupTopicPartitions(self.group_id, places(partitions))
        futures = self._admin.list_consumer_group_offsets(
            [asked], require_stable=True, request_timeout=_REQUEST_TIMEOUT
        )
        answer = await asyncio.wrap_future(futures[self.group_id])
        found: dict[TopicPartition, Committed | None] = dict.fromkeys(partitions)
        for place in answer.topic_partitions:
            if place.error is not None:
                raise KafkaException(place.error)
            if place.offset >= 0:
                # The client writes the text with the NUL that ends it in its own memory.
                text = (place.metadata or "").removesuffix("\0")
                found[TopicPartition(place.topic, place.partition)] = Committed(place.offset, text)
        return found

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """First and end offset of each log."""
        what = f"the bounds of {', '.join(map(str, partitions))}"
        while partitions:
            try:
                starts = await self._offsets(partitions, _EARLIEST)
                ends = await self._offsets(partitions, _LATEST)
            except KafkaException as error:
                await self._pause_or_raise(error, what)
            else:
                return {name: LogRange(starts[name], ends[name]) for name in partitions}
        return {}

    async def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """The end of each log, asked once.

        Raises:
            KafkaException: It was not told.
        """
        return await self._offsets(partitions, _LATEST) if partitions else {}

    async def _offsets(self, partitions: Collection[TopicPartition], which: Any) -> dict[TopicPartition, int]:
        futures = self._admin.list_offsets(
            dict.fromkeys(places(partitions), which), isolation_level=self._isolation, request_timeout=_REQUEST_TIMEOUT
        )
        names = [TopicPartition(place.topic, place.partition) for place in futures]
        found = await asyncio.gather(*map(asyncio.wrap_future, futures.values()), return_exceptions=True)
        offsets: dict[TopicPartition, int] = {}
        for name, each in zip(names, found, strict=True):
            if isinstance(each, BaseException):
                raise each
            offsets[name] = each.offset
        return offsets

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """The first offset whose record is not older than a time, or None."""
        which = _specification.for_timestamp(round(timestamp * 1000))
        while True:
            try:
                found = (await self._offsets([topic_partition], which))[topic_partition]
            except KafkaException as error:
                await self._pause_or_raise(error, f"the offsets of {topic_partition} by time")
            else:
                return found if found >= 0 else None

    async def partitions(self, topic: str) -> frozenset[int]:
        """The partitions of a topic as last known; empty where there is none."""
        known = self._partitions.get(topic)
        if known is None:
            known = (await self.look_up([topic]))[topic]
        return known

    async def look_up(self, topics: Collection[str]) -> Mapping[str, frozenset[int]]:
        """The partitions of topics, asked now; nothing is created.

        Raises:
            AuthorizationError: One may not be seen.
            TransportError: It was not told for another reason.
        """
        if not topics:
            return {}
        futures = self._admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=_REQUEST_TIMEOUT)
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures.values()), return_exceptions=True)
        found: dict[str, frozenset[int]] = {}
        for topic, answer in zip(futures, answers, strict=True):
            if isinstance(answer, BaseException):
                error = error_of(answer)
                if error is None or error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise request_error(answer, f"the partitions of topic {topic!r}", self.group_id) from answer
                found[topic] = frozenset()
                self._partitions.pop(topic, None)
            else:
                found[topic] = self._partitions[topic] = frozenset(each.id for each in answer.partitions)
        return found

    async def all_topics(self) -> frozenset[str]:
        """The names of all topics that we may see.

        Raises:
            KafkaException: The brokers did not tell.
        """
        answer = await asyncio.to_thread(self._admin.list_topics, timeout=_REQUEST_TIMEOUT)
        return frozenset(answer.topics)

    async def reach(self) -> str | None:
        """Why no broker can be reached, or None."""
        try:
            await asyncio.to_thread(self._admin.list_topics, topic="__consumer_offsets", timeout=1.0)
        except KafkaException as error:
            return reason(error)
        return None

    async def _pause_or_raise(self, raised: KafkaException, what: str) -> None:
        failed: TransportError = request_error(raised, what, self.group_id)
        if not may_pass(error_of(raised)):
            raise failed from raised
        await asyncio.sleep(_RETRY_BACKOFF)


class Asked:
    """The part of a transport that only passes questions on."""

    @abstractmethod
    def _running(self) -> Asking:
        """Who asks.

        Raises:
            ClientLostError: The client does not run.
        """

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`. Has no deadline: tries again while the reason may pass."""
        return await self._running().committed(partitions)

    async def partitions(self, topic: str) -> frozenset[int]:
        """See `Transport.partitions`. A topic that is not known yet is asked for once, and not created."""
        return await self._running().partitions(topic)

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        asking = self._running()
        try:
            return frozenset(topic for topic in await asking.all_topics() if topic not in _OF_BROKERS)
        except KafkaException as error:
            raise request_error(error, "the topics", asking.group_id) from error

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline: tries again while the reason may pass."""
        return await self._running().offset_at(topic_partition, timestamp)
