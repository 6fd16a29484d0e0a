"""Skew of the keys and partitions of topics, and of the fixed shards that their records would be assigned to."""

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
    """Size of keys and values, without headers."""


class TopicSkewed(NamedTuple):
    """The distribution of records and bytes over the groups of one kind."""

    by: str
    """`key`, `partition` or `shard`."""
    of: int | None
    """Number of fixed shards; None for keys and partitions."""
    groups: int
    """Number of groups with records."""
    records: int
    """Records that belong to a group; a record without a key does not belong to any key."""
    bytes: int
    records_gini: float
    """0: all groups with records have the same number; towards 1: one group has all of them."""
    bytes_gini: float
    most_records_share: float
    """Share of the group with the most records, from 0 to 1."""
    most_bytes_share: float
    top: tuple[TopicGroup, ...]
    """Groups with the most bytes, the largest first."""


class TopicSkew(NamedTuple):
    """The distribution of the records and bytes of topics."""

    topics: tuple[str, ...]
    records: int
    bytes: int
    without_key: int
    spread: tuple[TopicSkewed, ...]


def find_topic_skew(topics: Topics, shards: Sequence[int] = (), top: int = 10) -> TopicSkew:
    """Sum records and bytes by key, by partition, and by fixed shard.

    Args:
        topics: The topics to analyze.
        shards: Numbers of fixed shards to simulate. Keys go to the same shards as with a handler that has `shards=N`
            and `shard_by="key"`. Such a handler distributes records without a key in turn; here their offset decides.
        top: Number of groups of each kind to name.
    """
    rows = topics.rows
    totals = rows.agg(sql.coalesce(sql.sum("bytes"), sql.lit(0)), sql.count_if(sql.col("key").isNull())).first()
    assert totals is not None  # noqa: S101 - an aggregate without groups has one row
    keyed = rows.where(sql.col("key").isNotNull())
    several = len(topics.names) > 1
    # Keys are distinct per topic, as they are for a handler.
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
    """Compute `aioshard.core.sharding.shard_number` of a bytes key in SQL."""
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
