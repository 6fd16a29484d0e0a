"""When the records of topics came, as their timestamps say, and how far behind that leaves who processes them."""

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from aioshard.spark.analysis.topic import Topics, partition_name

__all__ = ["Arrivals", "ArrivalsOf", "Backlog", "backlog_at", "find_arrivals"]


class ArrivalsOf(NamedTuple):
    """When the records of one partition came."""

    partition: str
    records: int
    bytes: int
    records_at: tuple[int, ...]
    """How many came in each step."""
    bytes_at: tuple[int, ...]
    most: int
    """How many came in the step with the most."""
    most_at_us: int
    """When that step began, after the oldest record."""
    late: int
    """Records with an earlier timestamp than one before them in the partition."""


class Backlog(NamedTuple):
    """How far behind an app would be that begins with the oldest record and processes so many records a second."""

    rate: float
    behind_at: tuple[int, ...]
    """Records that had come and were not processed, at the end of each step."""
    most: int
    most_at_us: int
    """When that was, after the oldest record."""
    left_us: int
    """How much longer than the topic's own time the app would take."""


class Arrivals(NamedTuple):
    """When the records of topics came.

    A topic says when its records came, not when they were processed. And a timestamp that the producer made up, its own
    clock or the time of some event, is believed.
    """

    topics: tuple[str, ...]
    start_us: int
    """The oldest timestamp, in microseconds since the epoch."""
    wall_us: int
    """From the oldest timestamp to the latest."""
    step_us: int
    partitions: tuple[ArrivalsOf, ...]
    backlog: Backlog | None
    """Where a rate was asked about."""


def find_arrivals(topics: Topics, moments: int = 60, rate: float | None = None) -> Arrivals:
    """Count the records that came in equal steps of time.

    Args:
        topics: What to look at.
        moments: How many steps.
        rate: Records a second of an app, to say how far behind it would be; None asks nothing.
    """
    step = topics.wall // moments + 1  # so that the latest record is in the last step
    in_offset_order = Window.partitionBy("topic", "partition").orderBy("offset")
    before = in_offset_order.rowsBetween(Window.unboundedPreceding, -1)
    slot = sql.floor((sql.col("produced_us") - sql.lit(topics.start)) / sql.lit(step)).cast("int")
    found = (
        topics.rows.select(
            partition_name().alias("name"),
            slot.alias("slot"),
            "bytes",
            (sql.col("produced_us") < sql.max("produced_us").over(before)).alias("late"),
        )
        .groupBy("name", "slot")
        .agg(sql.count("*").alias("records"), sql.sum("bytes").alias("bytes"), sql.count_if("late").alias("late"))
        .collect()
    )
    by_name: dict[str, dict[int, tuple[int, int, int]]] = {}
    for row in found:
        by_name.setdefault(row["name"], {})[row["slot"]] = (row["records"], row["bytes"], row["late"])
    partitions = tuple(_arrivals_of(name, by_name[name], step, moments) for name in sorted(by_name))
    totals = [sum(at) for at in zip(*(one.records_at for one in partitions), strict=True)]
    return Arrivals(
        topics=topics.names,
        start_us=topics.start,
        wall_us=topics.wall,
        step_us=step,
        partitions=partitions,
        backlog=None if rate is None else backlog_at(totals, step, rate),
    )


def backlog_at(arrivals: Sequence[int], step_us: int, rate: float) -> Backlog:
    """How far behind who processes *rate* records a second would have been.

    Within a step, records count as coming evenly.

    Args:
        arrivals: How many records came in each step.
        step_us: How long a step is, in microseconds.
        rate: Records a second; above 0.

    Example:
        >>> backlog_at([30, 0, 0, 10], 1_000_000, 10.0).behind_at
        (20, 10, 0, 0)
    """
    behind, course = 0.0, []
    for came in arrivals:
        behind = max(behind + came - rate * step_us / 1e6, 0.0)
        course.append(behind)
    most = max(course, default=0.0)
    return Backlog(
        rate=rate,
        behind_at=tuple(round(one) for one in course),
        most=round(most),
        most_at_us=(course.index(most) + 1) * step_us if most else 0,
        left_us=round(behind / rate * 1e6),
    )


def _arrivals_of(name: str, by_slot: dict[int, tuple[int, int, int]], step: int, moments: int) -> ArrivalsOf:
    records, sizes, late = zip(*(by_slot.get(slot, (0, 0, 0)) for slot in range(moments)), strict=True)
    most = max(records)
    return ArrivalsOf(
        partition=name,
        records=sum(records),
        bytes=sum(sizes),
        records_at=records,
        bytes_at=sizes,
        most=most,
        most_at_us=records.index(most) * step,
        late=sum(late),
    )
