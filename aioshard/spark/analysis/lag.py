"""The lag of each partition over time, reconstructed from a journal."""

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from aioshard.spark.analysis.journal import Journal

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Lag", "LagOf", "Moment", "find_lag"]


class Moment(NamedTuple):
    """The lag at one moment."""

    at_us: int
    """Microseconds after the start of the journal."""
    unfinished: int
    """Records that existed, according to their timestamps, and were not finished."""
    in_hand: int
    """Records among these that the app had received; the others were still at the broker."""


class LagOf(NamedTuple):
    """The lag of one partition over time."""

    partition: str
    moments: tuple[Moment, ...]
    most: Moment
    """The one of these moments with the most unfinished records."""


class Lag(NamedTuple):
    """The lag of every partition over time.

    A journal contains only finished records. Records that were produced but never finished are missing towards its
    end; records that finished before it began are missing at its start. Timestamps are trusted even if the producer
    set them, from its own clock or from the time of an event.
    """

    handler: str
    step_us: int
    partitions: tuple[LagOf, ...]
    made_up: int
    """Records with a timestamp later than their arrival: a clock or the producer is wrong about them."""


def find_lag(journal: Journal, handler: str | None = None, moments: int = 60) -> Lag:
    """Count the unfinished records at equal intervals.

    Args:
        journal: The journal to analyze.
        handler: Name of a handler; by default the one with the most records.
        moments: Number of intervals; the last one ends with the journal.
    """
    name = journal.handler(handler).name
    rows = journal.of_handler(name)
    step = max(-(-journal.wall // moments), 1)
    made_up = rows.where(sql.col("produced_us") > sql.col("arrived_us")).count()
    # A record changes the counts when it is produced, arrives and finishes; running sums give the counts at a moment.
    produced = sql.least("produced_us", "arrived_us")
    changes = rows.select(
        sql.concat_ws("/", "topic", "partition").alias("name"),
        sql.explode(
            sql.array(
                _change(journal, produced, step, unfinished=1, in_hand=0),
                _change(journal, sql.col("arrived_us"), step, unfinished=0, in_hand=1),
                _change(journal, sql.col("finished_us"), step, unfinished=-1, in_hand=-1),
            )
        ).alias("change"),
    )
    summed = changes.groupBy("name", "change.slot").agg(
        sql.sum("change.unfinished").alias("unfinished"), sql.sum("change.in_hand").alias("in_hand")
    )
    so_far = Window.partitionBy("name").orderBy("slot").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    found = summed.select(
        "name", "slot", sql.sum("unfinished").over(so_far).alias("u"), sql.sum("in_hand").over(so_far).alias("h")
    ).collect()
    standing: dict[str, dict[int, tuple[int, int]]] = {}
    for row in found:
        standing.setdefault(row["name"], {})[row["slot"]] = (row["u"], row["h"])
    return Lag(name, step, tuple(_lag_of(one, standing[one], step, moments) for one in sorted(standing)), made_up)


def _change(journal: Journal, moment: "Column", step: int, *, unfinished: int, in_hand: int) -> "Column":
    """Return a change and the first moment at which it counts; moment k is k steps after the start."""
    slot = sql.greatest(sql.ceil((moment - sql.lit(journal.start)) / sql.lit(step)), sql.lit(0)).cast("int")
    return sql.struct(slot.alias("slot"), sql.lit(unfinished).alias("unfinished"), sql.lit(in_hand).alias("in_hand"))


def _lag_of(name: str, standing: dict[int, tuple[int, int]], step: int, moments: int) -> LagOf:
    now = (0, 0)
    told = []
    for slot in range(moments + 1):
        now = standing.get(slot, now)
        told.append(Moment(slot * step, *now))
    return LagOf(name, tuple(told), max(told, key=lambda moment: moment.unfinished))
