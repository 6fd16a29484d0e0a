"""The partitions of a producer's messages, chosen as Java's partitioner does."""

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from aiokafka.partitioner import murmur2

from aioshard.kafka.produce import TOPIC_TIMEOUT
from aioshard.kafka.wire.metadata import ClusterMetadata
from aioshard.ports import Message

_REMEMBERED_KEYS = 10_000


class Partitioner:
    """Chooses the partitions of messages.

    Invariants:
        * A key keeps its partition as long as its topic has the same number of partitions, even if a broker that lags
          behind reports fewer.
    """

    def __init__(self) -> None:
        """Know no topic yet."""
        self._counts: dict[str, int] = {}
        """Number of partitions by topic, as last used."""
        self._shrunk: dict[str, float] = {}
        """When the brokers first reported fewer partitions of a topic than before."""
        self._led: dict[str, Sequence[int]] = {}
        """The partitions for messages without a key, by topic, since the last `count`."""
        self._round_robin: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        """Counter of the messages without a key, by topic."""

    def count(self, metadata: ClusterMetadata, topic: str) -> int:
        """Return the number of partitions of a topic; 0 while it is unknown.

        A broker that lags behind may report fewer than there are. They must not be used before that is certain: keys
        would change their partitions.
        """
        self._led.pop(topic, None)
        count = len(metadata.partitions(topic))
        if count < self._counts.get(topic, 0):
            now = time.monotonic()
            if now < self._shrunk.setdefault(topic, now) + TOPIC_TIMEOUT:
                return 0
        self._shrunk.pop(topic, None)
        self._counts[topic] = count
        return count

    def choose(self, metadata: ClusterMetadata, message: Message, count: int) -> int:
        """Return the partition of a message; one that the message names is not checked, and may not exist.

        Messages without a key are spread over the partitions that had a leader at the last `count`. So call `count`
        whenever some messages are due, but not for each of them: the leaders of all partitions are read again.

        Args:
            metadata: The topic's partitions and their leaders.
            message: The message.
            count: The number of partitions, above 0.

        Raises:
            TypeError: The key has a wrong type.
            ValueError: Likewise.
        """
        if message.partition is not None:
            return message.partition
        if message.partitioner == "key" and message.key is not None:  # `chosen_by`, without a call for each message
            return _hash(message.key) % count
        topic = message.topic
        led = self._led.get(topic)
        if led is None:
            led = self._led[topic] = _led_partitions(metadata, topic) or range(count)
        return led[next(self._round_robin[topic]) % len(led)]

    def forget(self, topic: str) -> None:
        """Forget how many partitions a topic had; it may have fewer from now on."""
        self._counts.pop(topic, None)
        self._shrunk.pop(topic, None)
        self._led.pop(topic, None)


def _led_partitions(metadata: ClusterMetadata, topic: str) -> list[int]:
    """Return the partitions of a topic that have a leader."""
    return sorted(number for number, known in metadata.partitions(topic).items() if known.leader is not None)


@functools.lru_cache(maxsize=_REMEMBERED_KEYS)
def _hash(key: bytes) -> int:
    """Hash a key as Java's partitioner does. Cached: in Python, hashing takes as long as the rest of publishing."""
    return int(murmur2(key)) & 0x7FFFFFFF
