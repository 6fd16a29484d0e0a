"""Skew of keys, partitions and shards, in records and in work."""

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from aioshard.spark.analysis.journal import Journal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Group", "Skew", "Skewed", "Spread", "find_skew", "key_as_text", "key_name", "spread_of"]


class Group(NamedTuple):
    """A key, a partition or a shard."""

    name: str
    records: int
    work_us: int
    """Run time of the handler for its records: the sum of their latest attempts, in microseconds."""


class Skewed(NamedTuple):
    """The distribution of records and work over the groups of one kind."""

    by: str
    """`key`, `partition` or `shard`."""
    groups: int
    records: int
    """Records that belong to a group; a record without a key does not."""
    work_us: int
    records_gini: float
    """0: all groups are equal; towards 1: one group has everything."""
    work_gini: float
    most_records_share: float
    """Share of the group with the most records, from 0 to 1."""
    most_work_share: float
    top: tuple[Group, ...]
    """Groups with the most work, the largest first."""


class Skew(NamedTuple):
    """The distribution of a handler's records and work."""

    handler: str
    records: int
    """All records of the handler, including those that never ran."""
    ran: int
    work_us: int
    retried: int
    """Records with more than one attempt. The journal has only the latest, so their real work is higher."""
    without_key: int
    spread: tuple[Skewed, ...]


def find_skew(journal: Journal, handler: str | None = None, top: int = 10) -> Skew:
    """Sum the records and the work of a handler by key, partition and shard.

    Totals are exact: durations are summed as whole microseconds.

    Args:
        journal: The journal to analyze.
        handler: Name of a handler; by default the one with the most records.
        top: Number of groups of each kind to name.
    """
    told = journal.handler(handler)
    name = told.name
    rows = journal.rows.where(sql.col("handler") == name)
    totals = rows.agg(
        sql.count("*"),
        sql.count("service_us"),
        sql.coalesce(sql.sum("service_us"), sql.lit(0)),
        sql.count_if(sql.col("attempts") > 1),
        sql.count_if(sql.col("key_hash").isNull()),
    ).first()
    assert totals is not None  # noqa: S101 - an aggregate without groups has one row
    kinds = {"key": key_name(), "partition": _partition_name(), "shard": _shard_name(fixed=told.shards is not None)}
    identity = {"key": "key_hash", "partition": None, "shard": "shard"}
    spread = []
    for by, naming in kinds.items():
        column = identity[by]
        chosen = rows if column is None else rows.where(sql.col(column).isNotNull())
        keys = [column] if column is not None else ["topic", "partition"]
        grouped = chosen.groupBy(*keys).agg(
            sql.first(naming).alias("name"),
            sql.count("*").alias("records"),
            sql.coalesce(sql.sum("service_us"), sql.lit(0)).alias("amount"),
        )
        spread.append(_skewed(by, spread_of(grouped, top)))
    records, ran, work_us, retried, without_key = totals
    return Skew(
        handler=name,
        records=records,
        ran=ran,
        work_us=work_us,
        retried=retried,
        without_key=without_key,
        spread=tuple(spread),
    )


def key_name() -> "Column":
    """Return the text of a key if the journal has it, otherwise its hash."""
    return sql.coalesce(key_as_text(), _hash_as_text("key_hash"))


def key_as_text() -> "Column":
    """Return the column `key` as text if it is UTF-8, otherwise as hexadecimal digits; null without a key."""
    return sql.coalesce(sql.try_validate_utf8(sql.col("key")), sql.concat(sql.lit("0x"), sql.hex("key")))


def _hash_as_text(column: str) -> "Column":
    return sql.concat(sql.lit("#"), sql.lower(sql.lpad(sql.hex(column), 16, "0")))


def _partition_name() -> "Column":
    return sql.concat_ws("/", "topic", "partition")


def _shard_name(*, fixed: bool) -> "Column":
    """Return the number of a fixed shard, or the key hash of a shard on demand."""
    return sql.col("shard").cast("string") if fixed else _hash_as_text("shard")


class Spread(NamedTuple):
    """The distribution of records, and of another amount, over groups."""

    groups: int
    records: int
    amount: int
    records_gini: float
    """0: all groups are equal; towards 1: one group has everything."""
    amount_gini: float
    most_records_share: float
    """Share of the group with the most records, from 0 to 1."""
    most_amount_share: float
    top: tuple[tuple[str, int, int], ...]
    """Name, records and amount of the groups with the largest amounts, the largest first."""


def spread_of(grouped: "DataFrame", top: int) -> Spread:
    """Measure how unequal groups are.

    Args:
        grouped: One row per group: `name`, `records`, `amount`.
        top: Number of groups to name.
    """
    grouped = grouped.cache()
    totals = grouped.agg(
        sql.count("*"),
        sql.coalesce(sql.sum("records"), sql.lit(0)),
        sql.coalesce(sql.sum("amount"), sql.lit(0)),
        sql.coalesce(sql.max("records"), sql.lit(0)),
        sql.coalesce(sql.max("amount"), sql.lit(0)),
    ).first()
    assert totals is not None  # noqa: S101 - an aggregate without groups has one row
    groups, records, amount, most_records, most_amount = totals
    most = grouped.orderBy(sql.desc("amount"), sql.desc("records"), "name").limit(top).collect()
    spread = Spread(
        groups=groups,
        records=records,
        amount=amount,
        records_gini=_gini(grouped, "records"),
        amount_gini=_gini(grouped, "amount"),
        most_records_share=most_records / records if records else 0.0,
        most_amount_share=most_amount / amount if amount else 0.0,
        top=tuple((row["name"], row["records"], row["amount"]) for row in most),
    )
    grouped.unpersist()
    return spread


def _skewed(by: str, spread: Spread) -> Skewed:
    return Skewed(
        by=by,
        groups=spread.groups,
        records=spread.records,
        work_us=spread.amount,
        records_gini=spread.records_gini,
        work_gini=spread.amount_gini,
        most_records_share=spread.most_records_share,
        most_work_share=spread.most_amount_share,
        top=tuple(Group(*one) for one in spread.top),
    )


def _gini(grouped: "DataFrame", column: str) -> float:
    """Return the Gini coefficient: twice the area between the line of equality and the Lorenz curve."""
    ranked = grouped.select(
        sql.col(column).cast("double").alias("x"), sql.row_number().over(Window.orderBy(column)).alias("rank")
    )
    row = ranked.agg(sql.count("*"), sql.sum("x"), sql.sum(sql.col("x") * sql.col("rank"))).first()
    if row is None or not row[0] or not row[1]:
        return 0.0
    count, total, weighted = row
    return max(float(2 * weighted / (count * total) - (count + 1) / count), 0.0)
