"""How unequal the keys and partitions of topics are, and what fixed shards their records would have."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sql

from aioshard.core.key_hash import SHARD_BITS
from aioshard.spark.analysis.skew import key_as_text, spread_of
from aioshard.spark.analysis.topic import Topics, partition_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TopicGroup", "TopicSkew", "TopicSkewed", "find_topic_skew", "shard_of_key"]

_MULTIPLIER = 1_327_217_885
_LOW_BITS = (1 << 32) - 1


class TopicGroup(NamedTuple):
    """A key, a partition or a fixed shard."""

    name: str
    records: int
    bytes: int
    """Of keys and values; headers are not counted."""


class TopicSkewed(NamedTuple):
    """How records and bytes are spread over the groups of one kind."""

    by: str
    """`key`, `partition` or `shard`."""
    of: int | None
    """How many fixed shards there are; None for keys and partitions."""
    groups: int
    """Those with records."""
    records: int
    """Those that belong to a group. A record without a key belongs to no key."""
    bytes: int
    records_gini: float
    """0: all groups with records have as many; towards 1: one has them all."""
    bytes_gini: float
    most_records_share: float
    """Of the group with the most records, from 0 to 1."""
    most_bytes_share: float
    top: tuple[TopicGroup, ...]
    """Those with the most bytes, the most first."""


class TopicSkew(NamedTuple):
    """Where the records and the bytes of topics are."""

    topics: tuple[str, ...]
    records: int
    bytes: int
    without_key: int
    spread: tuple[TopicSkewed, ...]


def find_topic_skew(topics: Topics, shards: Sequence[int] = (), top: int = 10) -> TopicSkew:
    """Add up records and bytes by key, by partition, and by fixed shard.

    Args:
        topics: What to look at.
        shards: Numbers of fixed shards to look at: which of them serves a key is what a handler with `shards=N` and
            `shard_by="key"` does. Records without a key take turns there, and here by their offsets.
        top: How many groups to name of each kind.
    """
    rows = topics.rows
    totals = rows.agg(sql.coalesce(sql.sum("bytes"), sql.lit(0)), sql.count_if(sql.col("key").isNull())).first()
    assert totals is not None  # noqa: S101 - an aggregate without groups has one row
    keyed = rows.where(sql.col("key").isNotNull())
    several = len(topics.names) > 1
    # A key is one within its topic, as it is for a handler.
    name = sql.concat_ws("/", sql.col("topic"), key_as_text()) if several else key_as_text()
    spread = [
        _skewed("key", None, _grouped(keyed, ("topic", "key"), name), top),
        _skewed("partition", None, _grouped(rows, ("topic", "partition"), partition_name()), top),
    ]
    for number in shards:
        placed = rows.withColumn("shard", sql.coalesce(shard_of_key("key", number), _turn(number)))
        spread.append(_skewed("shard", number, _grouped(placed, ("shard",), sql.col("shard").cast("string")), top))
    return TopicSkew(topics.names, topics.records, totals[0], totals[1], tuple(spread))


def shard_of_key(key: str, shards: int) -> "Column":
    """The SQL twin of `aioshard.core.sharding.shard_number` for a key of bytes."""
    mixed = (sql.crc32(key) * sql.lit(_MULTIPLIER)).bitwiseAND(sql.lit(_LOW_BITS))
    return sql.shiftright(mixed * shards, SHARD_BITS)


def _turn(shards: int) -> "Column":
    return sql.pmod(sql.col("offset"), sql.lit(shards))


def _grouped(rows: "DataFrame", by: Iterable[str], name: "Column") -> "DataFrame":
    return rows.groupBy(*by).agg(
        sql.first(name).alias("name"), sql.count("*").alias("records"), sql.sum("bytes").alias("amount")
    )


def _skewed(by: str, of: int | None, grouped: "DataFrame", top: int) -> TopicSkewed:
    spread = spread_of(grouped, top)
    return TopicSkewed(
        by=by,
        of=of,
        groups=spread.groups,
        records=spread.records,
        bytes=spread.amount,
        records_gini=spread.records_gini,
        bytes_gini=spread.amount_gini,
        most_records_share=spread.most_records_share,
        most_bytes_share=spread.most_amount_share,
        top=tuple(TopicGroup(*one) for one in spread.top),
    )
