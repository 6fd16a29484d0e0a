"""Fixed shards as window aggregates: what an event simulation finds, for many numbers of shards at once, on Spark.

One shard is one worker with a queue. Record n of it ends at `S(n) + max over k <= n of (a(k) - S(k - 1))`, with `a`
when a record is there and `S` the sum of the service times so far (Lindley's recursion, unrolled). That holds as long
as no bound makes a record wait outside of its queue; whether one would have is counted too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from aioshard.core.key_hash import SHARD_BITS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Windowed", "runs_by_windows", "shard_of_key", "summed_windows"]

_MULTIPLIER = 1_327_217_885
_LOW_BITS = (1 << 32) - 1
_RECORDS_PER_POLL = 500
_NEVER_REFUSED = 4
"""While less than such a part of the memory is in use, every partition finds room at once, however it is shared."""


class Windowed(NamedTuple):
    """A number of fixed shards as the windows see it; times are microseconds."""

    shards: int
    makespan: int
    wait: tuple[int, int, int]
    """Of half of the records, of 99 %, and of all, no longer than this."""
    total: tuple[int, int, int]
    busiest_work: int
    """How long the handler ran for the shard with the most work."""
    most_held: int
    """Records that were there and not finished, at most."""
    most_queued: int
    """Records that were there and not started, in one shard, at most."""
    most_at_once: int
    """Records that came at the same microsecond, at most."""

    def is_exact(self, max_buffered_records: int) -> bool:
        """Whether no bound of a member with so much room would have changed anything."""
        depth = max(max_buffered_records // self.shards, 1)
        return (
            self.most_held * _NEVER_REFUSED <= max_buffered_records
            and self.most_queued <= depth
            and self.most_at_once <= _RECORDS_PER_POLL
        )


def shard_of_key(key: "Column | str", shards: "Column | int") -> "Column":
    """The SQL twin of `aioshard.core.sharding.shard_number` for a key of bytes."""
    mixed = (sql.crc32(key) * sql.lit(_MULTIPLIER)).bitwiseAND(sql.lit(_LOW_BITS))
    return sql.shiftright(mixed * shards, SHARD_BITS)


def _shard_of_hash(hashed: "Column", shards: "Column") -> "Column":
    """The SQL twin of `aioshard.core.key_hash.shard_of_hash`."""
    return sql.shiftright(sql.shiftright(hashed, SHARD_BITS).bitwiseAND(sql.lit(_LOW_BITS)) * shards, SHARD_BITS)


def runs_by_windows(work: "DataFrame", shards: Sequence[int]) -> "DataFrame":
    """Every record with every number of shards: when it starts and ends.

    Args:
        work: `part`, `offset`, `available`, `service` and `key` (null without one), in microseconds from the start.
        shards: The numbers; at least one.

    Returns:
        The same with `shards`, `shard`, `started` and `finished`.
    """
    session = work.sparkSession
    order = [sql.col("available"), sql.col("part"), sql.col("offset")]
    keyed = work.where(sql.col("key").isNotNull()).withColumn("turn", sql.lit(0).cast("bigint"))
    # Records without a key take turns. Only they pass through one task for that.
    turns = work.where(sql.col("key").isNull()).withColumn(
        "turn", sql.row_number().over(Window.orderBy(*order)).cast("bigint")
    )
    candidates = session.createDataFrame([(number,) for number in sorted(set(shards))], "shards bigint")
    each = keyed.unionByName(turns).crossJoin(sql.broadcast(candidates))
    each = each.withColumn(
        "shard",
        sql.coalesce(_shard_of_hash(sql.col("key"), sql.col("shards")), sql.pmod("turn", "shards")),
    )
    so_far = Window.partitionBy("shards", "shard").orderBy(*order)
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    each = each.withColumn("done", sql.sum("service").over(so_far))
    each = each.withColumn(
        "finished",
        sql.col("done") + sql.max(sql.col("available") - (sql.col("done") - sql.col("service"))).over(so_far),
    )
    return each.withColumn("started", sql.col("finished") - sql.col("service")).drop("done", "turn")


def summed_windows(work: "DataFrame", shards: Sequence[int]) -> dict[int, Windowed]:
    """What each number of shards comes to.

    Args:
        work: As for `runs_by_windows`.
        shards: The numbers; at least one.
    """
    runs = runs_by_windows(work, shards).cache()
    wait, total = sql.col("started") - sql.col("available"), sql.col("finished") - sql.col("available")
    levels = [0.5, 0.99]
    sums = runs.groupBy("shards").agg(
        (sql.max("finished") - sql.min("available")).alias("makespan"),
        sql.expr(_discrete(levels, "started - available")).alias("wait"),
        sql.max(wait).alias("most_wait"),
        sql.expr(_discrete(levels, "finished - available")).alias("total"),
        sql.max(total).alias("most_total"),
    )
    busiest = runs.groupBy("shards", "shard").agg(sql.sum("service").alias("work")).groupBy("shards")
    most_work = busiest.agg(sql.max("work").alias("busiest_work"))
    held = _most_between(runs, ["shards"], "finished")
    queued = _most_between(runs, ["shards", "shard"], "started")
    at_once = work.groupBy("available").count().agg(sql.max("count")).first()
    joined = sums.join(most_work, "shards").join(held, "shards").join(queued, "shards").collect()
    runs.unpersist()
    return {
        row["shards"]: Windowed(
            shards=row["shards"],
            makespan=row["makespan"],
            wait=(*row["wait"], row["most_wait"]),
            total=(*row["total"], row["most_total"]),
            busiest_work=row["busiest_work"],
            most_held=row["most_finished"],
            most_queued=row["most_started"],
            most_at_once=at_once[0] if at_once is not None else 0,
        )
        for row in joined
    }


def _discrete(levels: Sequence[float], expression: str) -> str:
    """Percentiles that are values of records, as the event simulation has them."""
    each = ", ".join(f"percentile_disc({level}) WITHIN GROUP (ORDER BY {expression})" for level in levels)
    return f"cast(array({each}) as array<bigint>)"


def _most_between(runs: "DataFrame", keys: list[str], until: str) -> "DataFrame":
    """How many records were between being there and *until*, at most; what comes counts before what goes."""
    changes = runs.select(
        *keys,
        sql.explode(
            sql.array(
                sql.struct(sql.col("available").alias("at"), sql.lit(1).alias("change")),
                sql.struct(sql.col(until).alias("at"), sql.lit(-1).alias("change")),
            )
        ).alias("event"),
    ).select(*keys, "event.*")
    so_far = Window.partitionBy(*keys).orderBy("at", sql.desc("change"))
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    counted = changes.select(*keys, sql.sum("change").over(so_far).alias("now"))
    return counted.groupBy("shards").agg(sql.max("now").alias(f"most_{until}"))
