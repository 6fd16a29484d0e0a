"""Arrival times of a topic's records, from their timestamps, and the backlog they cause at a given processing rate."""

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from aioshard.spark.analysis.topic import Topics, partition_name

__all__ = ["Arrivals", "ArrivalsOf", "Backlog", "backlog_at", "find_arrivals"]


class ArrivalsOf(NamedTuple):
    """Arrivals in one partition."""

    partition: str
    records: int
    bytes: int
    records_at: tuple[int, ...]
    """Number of records that arrived in each step."""
    bytes_at: tuple[int, ...]
    most: int
    """Number of records that arrived in the busiest step."""
    most_at_us: int
    """When that step began, in microseconds after the oldest record."""
    late: int
    """Records with an earlier timestamp than a record before them in the partition."""


class Backlog(NamedTuple):
    """The backlog of an app that starts with the oldest record and processes *rate* records per second."""

    rate: float
    behind_at: tuple[int, ...]
    """Records that had arrived but were not processed at the end of each step."""
    most: int
    most_at_us: int
    """When the backlog was largest, in microseconds after the oldest record."""
    left_us: int
    """Microseconds that the app needs beyond the latest record of the topic."""


class Arrivals(NamedTuple):
    """Arrival times of the records of some topics.

    A topic shows when its records arrived, not when they were processed. Timestamps are trusted even if the producer
    set them, from its own clock or from the time of an event.
    """

    topics: tuple[str, ...]
    start_us: int
    """The oldest timestamp, in microseconds since the epoch."""
    wall_us: int
    """Microseconds from the oldest timestamp to the latest."""
    step_us: int
    partitions: tuple[ArrivalsOf, ...]
    backlog: Backlog | None
    """None without a requested rate."""


def find_arrivals(topics: Topics, moments: int = 60, rate: float | None = None) -> Arrivals:
    """Count the records that arrived in equal steps of time.

    Args:
        topics: The topics to analyze.
        moments: Number of steps.
        rate: Records per second that an app processes, to compute its backlog; None computes no backlog.
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
    """Compute the backlog of an app that processes *rate* records per second.

    The records of a step are assumed to arrive evenly.

    Args:
        arrivals: Number of records that arrived in each step.
        step_us: Length of a step, in microseconds.
        rate: Records per second; above 0.

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
