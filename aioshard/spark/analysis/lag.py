"""How far behind each partition was, as far as a journal can tell."""

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from aioshard.spark.analysis.journal import Journal

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Lag", "LagOf", "Moment", "find_lag"]


class Moment(NamedTuple):
    """How it stood at one moment."""

    at_us: int
    """After the start of the journal."""
    unfinished: int
    """Records that existed, as their timestamps say, and were not finished."""
    in_hand: int
    """Of them, those that the app had taken in; the others were still with the broker."""


class LagOf(NamedTuple):
    """The lag of one partition over time."""

    partition: str
    moments: tuple[Moment, ...]
    most: Moment
    """When the most were unfinished, of these moments."""


class Lag(NamedTuple):
    """The lag of every partition over time.

    A journal knows only what was finished. So what was produced and never finished is missing towards the end, what
    was finished before the journal began is missing from its start, and a timestamp that the producer made up (its own
    clock, or the time of some event) is believed.
    """

    handler: str
    step_us: int
    partitions: tuple[LagOf, ...]
    made_up: int
    """Records with a timestamp later than their arrival: a clock, or a producer, is wrong about these."""


def find_lag(journal: Journal, handler: str | None = None, moments: int = 60) -> Lag:
    """Count what was not finished, at equal distances in time.

    Args:
        journal: What to look at.
        handler: By default the one with the most records.
        moments: How many; the last one is the end of the journal.
    """
    name = journal.handler(handler).name
    rows = journal.of_handler(name)
    step = max(-(-journal.wall // moments), 1)
    made_up = rows.where(sql.col("produced_us") > sql.col("arrived_us")).count()
    # Each record changes two counts, three times: what counts at a moment is what has happened up to it.
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
    """A change, and the first moment at which it counts: moment k is k steps after the start."""
    slot = sql.greatest(sql.ceil((moment - sql.lit(journal.start)) / sql.lit(step)), sql.lit(0)).cast("int")
    return sql.struct(slot.alias("slot"), sql.lit(unfinished).alias("unfinished"), sql.lit(in_hand).alias("in_hand"))


def _lag_of(name: str, standing: dict[int, tuple[int, int]], step: int, moments: int) -> LagOf:
    now = (0, 0)
    told = []
    for slot in range(moments + 1):
        now = standing.get(slot, now)
        told.append(Moment(slot * step, *now))
    return LagOf(name, tuple(told), max(told, key=lambda moment: moment.unfinished))
