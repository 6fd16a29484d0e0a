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


def age(seconds: float | None) -> str:
    """Format a duration, in the largest unit of which there are at least two.

    Example:
        >>> age(None), age(0.31), age(90), age(150), age(7300), age(200_000)
        ('-', '0.3 s', '90 s', '2 min', '2 h', '2 d')
    """
    if seconds is None:
        return "-"
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    if seconds < 10:  # noqa: PLR2004 - one digit
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s"


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


class PartitionInfo(NamedTuple):
    """A partition of a topic, as the brokers describe it."""

    partition: int
    leader: int | None = None
    """Id of the broker that leads it; None if there is none now."""
    replicas: tuple[int, ...] = ()
    """Ids of the brokers that hold a copy, the preferred leader first."""
    in_sync: tuple[int, ...] = ()
    """Those whose copy is complete."""


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
