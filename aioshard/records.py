"""Basic types of the package: a record, and the topic and partition that it came from."""

import re
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

TOPIC_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")
"""Matches a whole topic name that Kafka accepts."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "record"), counted(2000, "record")
        ('1 record', '2,000 records')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def is_subscribed(topic: str, topics: Collection[str], pattern: str | None) -> bool:
    r"""Whether a topic is one of *topics*, or its whole name matches *pattern*.

    Example:
        >>> is_subscribed("orders.eu", ["refunds"], r"orders\..*"), is_subscribed("orders.eu", ["refunds"], "orders")
        (True, False)
    """
    return topic in topics or (pattern is not None and re.fullmatch(pattern, topic) is not None)


class TopicPartition(NamedTuple):
    """A single log: a partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


def by_topic(
    partitions: Iterable[TopicPartition], part: Callable[[TopicPartition], Any] = attrgetter("partition")
) -> list[tuple[str, list[Any]]]:
    """Group partitions by topic, sorted; *part* returns the value for each, by default its number.

    Example:
        >>> by_topic([TopicPartition("orders", 1), TopicPartition("refunds", 0), TopicPartition("orders", 0)])
        [('orders', [0, 1]), ('refunds', [0])]
    """
    return [(topic, list(map(part, group))) for topic, group in groupby(sorted(partitions), attrgetter("topic"))]


class Record(NamedTuple):
    """A record as delivered by Kafka; immutable, and cheap to build.

    Example:
        >>> record = Record("orders", 0, 41, b"k", b"{}", (), 1700000000.0)
        >>> record.offset
        41
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    """None is a tombstone."""
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: float
    """Seconds since the epoch, as the broker stores it."""

    @property
    def topic_partition(self) -> TopicPartition:
        """The topic and partition of the record."""
        return TopicPartition(self.topic, self.partition)
