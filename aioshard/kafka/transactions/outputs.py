"""The partitions that the messages of a transaction are written to."""

import time
from collections.abc import Sequence

from aioshard.kafka.errors import TOPIC_DENIED, missing_topic, publish_error
from aioshard.kafka.partitioning import Partitioner
from aioshard.kafka.produce import TOPIC_TIMEOUT, no_partition, not_encoded
from aioshard.kafka.transactions.call import Call
from aioshard.kafka.transactions.writes import Writes
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import WireError
from aioshard.ports import Message
from aioshard.records import TopicPartition


class OutputTopics:
    """Knows the output topics of one client, and which of them are missing."""

    def __init__(self, cluster: Cluster) -> None:
        """Know nothing yet."""
        self._cluster = cluster
        self._partitioner = Partitioner()
        self._missing: dict[str, float] = {}
        """When the brokers first answered that a topic, or a partition that a message names, does not exist, by
        `time.monotonic`: no second transaction waits for it."""

    async def assign(self, call: Call, messages: Sequence[Message]) -> Writes:
        """Choose the partition of each message, or refuse the message if it has none.

        Raises:
            CommitError: The brokers did not answer in time.
        """
        writes = Writes(messages, time.time())
        waiting: dict[str, list[int]] = {}
        for index, message in enumerate(messages):
            waiting.setdefault(message.topic, []).append(index)
        waiting = self._assign_known(writes, waiting)
        call.expect("the topics of its messages")
        while waiting:
            try:
                await self._cluster.look_up(waiting, create=True)
            except WireError as error:
                await call.pause(error)
                continue
            waiting = self._refuse_missing(writes, self._assign_known(writes, waiting))
            if waiting:
                await call.pause(None)
        call.finish()
        return writes

    def _assign_known(self, writes: Writes, waiting: dict[str, list[int]]) -> dict[str, list[int]]:
        """Choose partitions of known topics; return the messages without one, by topic."""
        unknown: dict[str, list[int]] = {}
        for topic, indexes in waiting.items():
            left = self._assign_topic(writes, topic, indexes)
            if left:
                unknown[topic] = left
            else:
                self._missing.pop(topic, None)
        return unknown

    def _assign_topic(self, writes: Writes, topic: str, indexes: list[int]) -> list[int]:
        metadata = self._cluster.metadata
        count = self._partitioner.count(metadata, topic)
        if not count:
            return indexes
        unknown: list[int] = []
        for index in indexes:
            message = writes.messages[index]
            try:
                number = self._partitioner.choose(metadata, message, count)
                exists = 0 <= number < count
            except (TypeError, ValueError) as error:  # the key or the partition has a wrong type
                writes.refuse(index, not_encoded(message, error))
                continue
            if exists:
                writes.assign(index, TopicPartition(topic, number))
            else:
                unknown.append(index)
        return unknown

    def _refuse_missing(self, writes: Writes, waiting: dict[str, list[int]]) -> dict[str, list[int]]:
        """Refuse messages whose topic or partition is denied, or has been missing for long; return the others."""
        metadata = self._cluster.metadata
        now = time.monotonic()
        left: dict[str, list[int]] = {}
        for topic, indexes in waiting.items():
            since = self._missing.setdefault(topic, now)
            count = len(metadata.partitions(topic))
            if topic in metadata.denied:
                denied = publish_error(error_for(TOPIC_DENIED, topic).cause, topic)
                for index in indexes:
                    writes.refuse(index, denied)
            elif now < since + TOPIC_TIMEOUT:
                left[topic] = indexes
            else:
                for index in indexes:
                    message = writes.messages[index]
                    writes.refuse(index, no_partition(message, count) if count else missing_topic(topic, TOPIC_TIMEOUT))
        return left
