"""Which hash of the key the producers chose partitions with, and that hash on Spark."""

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiokafka.partitioner import murmur2
from pyspark.sql import functions as sql

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Keyed", "partitioner_of", "place_of_key", "recognised"]

_SAMPLE = 1_000
_POSITIVE = 0x7FFFFFFF


class Keyed(NamedTuple):
    """A key, and where its records are."""

    topic: str
    partition: int
    key: bytes


def _murmur2(key: bytes) -> int:
    """As Java's producer: the sign is left out."""
    return int(murmur2(key)) & _POSITIVE


_HASHES: dict[str, Callable[[bytes], int]] = {"murmur2": _murmur2, "crc32": zlib.crc32}
"""Java's and aiokafka's default, and librdkafka's."""


def partitioner_of(sample: Sequence[Keyed]) -> str | None:
    """The hash that puts every key where it is; None where none does.

    How many partitions a topic has is taken from the highest that has a record.

    Example:
        >>> partitioner_of([Keyed("t", zlib.crc32(b"%d" % n) % 7, b"%d" % n) for n in range(50)])
        'crc32'
    """
    counts: dict[str, int] = {}
    for one in sample:
        counts[one.topic] = max(counts.get(one.topic, 0), one.partition + 1)
    for name, hashed in _HASHES.items():
        if sample and all(hashed(one.key) % counts[one.topic] == one.partition for one in sample):
            return name
    return None


def recognised(rows: "DataFrame") -> str | None:
    """`partitioner_of` for the keys of a journal, a thousand of them."""
    keys = rows.where(sql.col("key").isNotNull()).select("topic", "partition", "key").distinct().limit(_SAMPLE)
    return partitioner_of([Keyed(row["topic"], row["partition"], bytes(row["key"])) for row in keys.collect()])


def place_of_key(partitioner: str) -> "Column":
    """The hash of column `key`, of which the number of partitions is taken; null without a key."""
    if partitioner == "crc32":
        return sql.crc32("key")

    return sql.udf(_murmur2_of, "bigint", useArrow=False)("key")


def _murmur2_of(key: bytearray | None) -> int | None:
    return None if key is None else _murmur2(bytes(key))
