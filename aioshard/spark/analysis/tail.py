"""Causes of a long run: the slowest records, and the partitions and keys that finish last."""

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sql

from aioshard.spark.analysis.journal import Journal
from aioshard.spark.analysis.skew import key_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["LEVELS", "Last", "Percentiles", "Tail", "find_tail"]

LEVELS = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
"""The percentiles to compute, as shares of the records."""


class Percentiles(NamedTuple):
    """Percentiles of a duration, in microseconds."""

    of: str
    """`wait` (arrived to started), `service` (the latest attempt) or `total`."""
    mean: float
    levels: tuple[float, ...]
    """In the order of `LEVELS`; exact, with interpolation between two records."""


class Last(NamedTuple):
    """A partition or key that finishes last."""

    name: str
    records: int
    work_us: int
    finished_us: int
    """Microseconds after the start of the journal."""


class Tail(NamedTuple):
    """The records, partitions and keys that determine the end of a run."""

    handler: str
    records: int
    wall_us: int
    """Microseconds from the first arrival to the last completion."""
    percentiles: tuple[Percentiles, ...]
    wait_us: int
    """Sum of all waits."""
    slowest: int
    """Number of records in the slowest 1 %, by the duration of their run; at least one."""
    slowest_from_us: int
    """The shortest of their runs."""
    slowest_work_share: float
    """Their share of all work, from 0 to 1."""
    slowest_wait_share: float
    """Share of all waits that records spent behind one of them in the same shard, while it ran."""
    partitions: tuple[Last, ...]
    keys: tuple[Last, ...]


def find_tail(journal: Journal, handler: str | None = None, top: int = 10) -> Tail:
    """Find the slowest records and the waits they caused.

    Args:
        journal: The journal to analyze.
        handler: Name of a handler; by default the one with the most records.
        top: Number of partitions and keys to name.
    """
    name = journal.handler(handler).name
    rows = journal.of_handler(name)
    names = ("wait", "service", "total")
    found = rows.agg(
        sql.count("*"),
        sql.coalesce(sql.sum("wait_us"), sql.lit(0)),
        sql.coalesce(sql.sum("service_us"), sql.lit(0)),
        *(sql.percentile(f"{one}_us", list(LEVELS)) for one in names),
        *(sql.avg(f"{one}_us") for one in names),
        sql.max("finished_us") - sql.min("arrived_us"),
    ).first()
    assert found is not None  # noqa: S101 - an aggregate without groups has one row
    records, wait, work = found[0], found[1], found[2]
    if not records:
        return Tail(name, 0, 0, (), 0, 0, 0, 0.0, 0.0, (), ())
    percentiles = tuple(Percentiles(of, found[6 + i], tuple(found[3 + i])) for i, of in enumerate(names))
    count = max(records // 100, 1)
    slowest = rows.orderBy(sql.desc("service_us"), "topic", "partition", "offset").limit(count).cache()
    least, slow_work = slowest.agg(sql.min("service_us"), sql.sum("service_us")).first() or (0, 0)
    caused = _wait_behind(rows, slowest)
    slowest.unpersist()
    return Tail(
        handler=name,
        records=records,
        wall_us=found[9],
        percentiles=percentiles,
        wait_us=wait,
        slowest=count,
        slowest_from_us=least,
        slowest_work_share=slow_work / work if work else 0.0,
        slowest_wait_share=caused / wait if wait else 0.0,
        partitions=_last(journal, rows, ["topic", "partition"], top),
        keys=_last(journal, rows.where(sql.col("key_hash").isNotNull()), ["key_hash"], top),
    )


def _wait_behind(rows: "DataFrame", slowest: "DataFrame") -> int:
    """Return how long records waited while one of *slowest* ran in the same shard.

    Runs of the same shard never overlap, so no microsecond of a record's wait is counted twice.
    """
    slow = slowest.where(sql.col("shard").isNotNull()).select(
        sql.col("shard"),
        sql.col("member"),
        sql.col("started_us").alias("began"),
        sql.col("finished_us").alias("ended"),
    )
    behind = rows.join(sql.broadcast(slow), ["shard", "member"]).where(
        (sql.col("arrived_us") < sql.col("ended"))
        & (sql.col("started_us") > sql.col("began"))
        & (sql.col("wait_us") > 0)
    )
    overlap = sql.least("ended", "started_us") - sql.greatest("began", "arrived_us")
    row = behind.agg(sql.coalesce(sql.sum(sql.greatest(overlap, sql.lit(0))), sql.lit(0))).first()
    return int(row[0]) if row is not None else 0


def _last(journal: Journal, rows: "DataFrame", keys: list[str], top: int) -> tuple[Last, ...]:
    name = key_name() if keys == ["key_hash"] else sql.concat_ws("/", "topic", "partition")
    grouped = rows.groupBy(*keys).agg(
        sql.first(name).alias("name"),
        sql.count("*").alias("records"),
        sql.sum("service_us").alias("work_us"),
        sql.max("finished_us").alias("finished_us"),
    )
    found = grouped.orderBy(sql.desc("finished_us"), "name").limit(top).collect()
    return tuple(Last(row["name"], row["records"], row["work_us"], row["finished_us"] - journal.start) for row in found)
