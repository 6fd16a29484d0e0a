"""The topics that transactions write to: which partitions exist, and how large a batch may be."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Producer

from aioshard.errors import MessageRefusedError
from aioshard.kafka.confluent.translate import cause_of
from aioshard.kafka.errors import missing_topic, publish_error
from aioshard.ports import Message

_LOOKUP_TIMEOUT = 2.0
"""Seconds for one query; a transaction waits for it."""
_GRACE = 3.0
"""Seconds until a topic that the brokers do not know counts as missing: they learn of a new topic one after another."""
_PAUSE = 0.1
_MOST_BATCHES = 50
"""Batches of a transaction, each of which is awaited, until which all messages of a topic get smaller batches."""
_NO_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE})


class _Suspect(NamedTuple):
    """A message of a refused batch."""

    message: Message
    limit: int
    """Most messages of a batch with it."""


class OutputTopics:
    """One client's knowledge of its output topics. Used by its thread."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """Number of partitions of each topic that was looked up."""
        self._limits: dict[str, int] = {}
        """Most messages of a batch, for topics of which a batch was refused."""
        self._suspects: dict[str, dict[int, _Suspect]] = {}
        """The messages of refused batches, by identity."""
        self._missing: dict[str, float] = {}
        """When topics that did not exist count as missing; a transaction does not wait twice for the same topic."""

    def forget(self) -> None:
        """Look topics up again: a transaction has failed, perhaps because a topic is gone."""
        self._counts.clear()

    def partitions(self, producer: Producer, topic: str) -> int:
        """Return the number of partitions of a topic, at least 1."""
        if topic not in self._counts:
            self._look_up(producer, topic)
        return self._counts.get(topic) or 1

    def check(self, producer: Producer, messages: Sequence[Message]) -> dict[int, MessageRefusedError]:
        """Return the messages whose topic or partition does not exist, or may not be described, by index.

        Raises:
            KafkaException: The brokers do not answer.
        """
        errors: dict[tuple[str, int], MessageRefusedError] = {}
        for topic, partition in {(message.topic, message.partition or 0) for message in messages}:
            error = self._error_of(producer, topic, partition)
            if error is not None:
                errors[topic, partition] = error
        if not errors:
            return {}
        refused: dict[int, MessageRefusedError] = {}
        for number, message in enumerate(messages):
            error = errors.get((message.topic, message.partition or 0))
            if error is not None:
                refused[number] = error
        return refused

    def _error_of(self, producer: Producer, topic: str, partition: int) -> MessageRefusedError | None:
        if partition < self._counts.get(topic, 0):
            return None
        error = self._look_up(producer, topic, partition)
        if error is not None:
            return error
        count = self._counts[topic]
        if partition < count:
            return None
        return MessageRefusedError(
            f"topic {topic!r} has partitions 0 to {count - 1}, and a message was published to partition {partition}: "
            "create the partition, or publish to another one"
        )

    def _look_up(self, producer: Producer, topic: str, partition: int = 0) -> MessageRefusedError | None:
        """Look up a topic; return why it cannot be written to. A new partition may be known only a little later."""
        while True:
            found: Any = producer.list_topics(topic, _LOOKUP_TIMEOUT).topics[topic]
            deadline = self._missing.setdefault(topic, time.monotonic() + _GRACE)  # since the brokers answer
            count = 0 if found.error is not None else len(found.partitions)
            if count and (partition < count or time.monotonic() >= deadline):
                self._counts[topic] = count
                if partition < count:
                    self._missing.pop(topic, None)
                return None
            is_missing = found.error is None or found.error.code() in _NO_TOPIC
            if not is_missing:
                return MessageRefusedError(str(publish_error(cause_of(found.error), topic)))
            if not count and time.monotonic() >= deadline:
                return MessageRefusedError(str(missing_topic(topic, _GRACE)))
            time.sleep(_PAUSE)

    # Batches ----------------------------------------------------------------------------

    def batches(self, messages: Sequence[Message]) -> list[range]:
        """Return the batches in which to write messages, one after another, by their indexes; usually one."""
        if not self._limits:
            return [range(len(messages))]
        batches: list[range] = []
        start = 0
        most = math.inf
        for number, message in enumerate(messages):
            limit = self._batch_limit(message)
            if number - start >= min(most, limit):
                batches.append(range(start, number))
                start = number
                most = math.inf
            most = min(most, limit)
        return [*batches, range(start, len(messages))]

    def _batch_limit(self, message: Message) -> float:
        """Return how many messages may be in a batch with this one."""
        suspect = self._suspects.get(message.topic, {}).get(id(message))
        return self._limits.get(message.topic, math.inf) if suspect is None else suspect.limit

    def halve_batch(self, topic: str, refused: Sequence[Message], total: int) -> bool:
        """Write smaller batches, because one was refused: it is too large, or one of its messages is to blame.

        Below a limit that keeps the number of batches small, only the refused messages get smaller batches. With many
        batches for all others, a transaction would take too long.

        Args:
            topic: The topic.
            refused: The messages that were refused together.
            total: Number of messages of the transaction.

        Returns:
            Whether the same messages may be sent again. Otherwise they are to blame.
        """
        suspects = self._suspects.setdefault(topic, {})
        known = [suspects[id(message)].limit for message in refused if id(message) in suspects]
        if len(refused) == 1 or 1 in known:  # messages that are refused with one that was alone have its content
            del self._suspects[topic]
            self._limits.pop(topic, None)
            return False
        limit = len(refused) // 2
        suspects.update({id(message): _Suspect(message, limit) for message in refused})
        for_all = max(limit, total // _MOST_BATCHES)
        self._limits[topic] = min(self._limits.get(topic, for_all), for_all)
        return True

    def committed(self) -> None:
        """Forget the suspects: their transaction was committed, so that none of them is to blame."""
        self._suspects.clear()
