"""Verify that a run has handled every record of its ranges exactly once: compare the outcomes with the log."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from aioshard.errors import DataLossError, PlanError
from aioshard.kafka.history import HistoryBrokers
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.spark.draining.batches import read_halted
from aioshard.spark.runs.access import settings_for
from aioshard.spark.runs.blocking import blocking
from aioshard.spark.runs.checkpoint import last_border
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import OUTCOMES, VERIFIED
from aioshard.spark.runs.plan import Plan, PlannedRange
from aioshard.spark.runs.verification import NAMED, Found, Verification
from aioshard.spark.source.request import places
from aioshard.spark.source.vectors import Vector, ends_of, split, starts_of
from aioshard.spark.tasks.loading import resolve_app

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["verify"]

_KEY = ("topic", "partition", "offset")
_ROWS = "topic string, partition int, offset long, status string"
_RANGES = "topic string, partition int, start long, reached long, end long, log_start long"
_FINISHED = "finished before"
"""Status of records that the group had completed before the run; used only in this module."""
_BLOCK = 10_000
"""Offsets counted together. The log is read again only for blocks with fewer rows than offsets."""
_MOST_BLOCKS = 20_000
_TASKS = 8
"""Maximum number of tasks that read the log."""
_OF_A_TASK = 50_000
"""Offsets that justify the connection of another task."""
_ATTEMPTS = 3
"""Retention may delete records ahead of a reader; the next attempt starts after them."""


def verify(spark: "SparkSession", directory: str | os.PathLike[str] | RunDirectory) -> Verification:
    r"""Check that each record of a run's ranges has one outcome, and write the result to the directory.

    Spark does the counting. The log is read only where there are fewer rows than offsets. A record in the log without a
    row is missing. An offset without a record in the log is a hole or was deleted since, which is not an error.

    Args:
        spark: Any session.
        directory: The directory of the run.

    Raises:
        PlanError: The directory has no plan, or its checkpoint is unreadable.
        DataLossError: A range ends past the end of its log: the topic was recreated.
        TransportError: The brokers do not answer, or refuse access.

    Example:
        ```python
        found = verify(spark, "runs/7")
        if not found.ok:
            print(*found.problems, sep="\n")
        ```
    """
    place = RunDirectory.of(directory)
    verifying = _Verifying(spark, place, place.plan())
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            found = verifying.run()
        except DataLossError:
            raise
        except Exception as error:
            if DataLossError.__name__ not in str(error) or attempt == _ATTEMPTS:
                raise
        else:
            place.write_json(VERIFIED, found.asdict())
            return found
    raise AssertionError  # the last attempt returns or raises


class _Range(NamedTuple):
    """The range of a partition to verify."""

    topic: str
    partition: int
    start: int
    reached: int
    """Progress of the run: the end, unless it was stopped earlier."""
    end: int
    log_start: int

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.partition}"


class _Counts(NamedTuple):
    """Counts of a block: distinct offsets with rows, those before the start of the log, and those with several rows."""

    rows: int = 0
    deleted: int = 0
    repeated: int = 0


class _Gaps(NamedTuple):
    """Offsets without a row."""

    to_read: list[PlannedRange]
    """The ranges that contain them, as far as they are still in the log."""
    in_log: dict[str, int]
    """How many of them lie within the current log, by partition."""
    deleted: dict[str, int]
    """How many of them lie before the start of the log, by partition."""


class _Verifying:
    """A single verification."""

    def __init__(self, spark: "SparkSession", place: RunDirectory, plan: Plan) -> None:
        self._spark = spark
        self._place = place
        self._plan = plan
        border = last_border(place)
        self._reached: Vector = starts_of(plan.ranges) if border is None else border.vector
        # A run that follows the log goes past the planned ends.
        self._ends = {
            topic: {number: max(end, self._reached.get(topic, {}).get(number, end)) for number, end in ends.items()}
            for topic, ends in ends_of(plan.ranges).items()
        }
        self._block = max(_BLOCK, plan.records // _MOST_BLOCKS)

    def run(self) -> Verification:
        """Count the rows, read the log where counts are short, and return the verdict.

        Raises:
            DataLossError: A range ends past the end of its log.
        """
        ranges = blocking(self._ranges)
        rows = self._rows()
        statuses = {row["status"]: int(row["count"]) for row in rows.groupBy("status").count().collect()}
        offsets, outside = self._parted(rows, ranges)
        blocks = self._blocks(offsets)
        gaps = _gaps(ranges, blocks, self._block)
        missing = _found(self._in_log(gaps.to_read).join(offsets, list(_KEY), "left_anti")) if gaps.to_read else {}
        holes = {name: count - (missing[name].count if name in missing else 0) for name, count in gaps.in_log.items()}
        left = {one.name: one.end - one.reached for one in ranges if one.reached < one.end}
        found = Verification(
            plan=self._plan.digest,
            ok=False,
            ends=self._ends,
            records=sum(statuses.values()),
            statuses=dict(sorted(statuses.items())),
            left=left,
            missing=missing,
            duplicates=_found(offsets.where("times > 1")) if any(one.repeated for one in blocks.values()) else {},
            outside=_found(outside),
            halted=self._halted(rows, undrained=bool(left), among="halted" in statuses),
            deleted_since=gaps.deleted,
            holes={name: count for name, count in holes.items() if count},
            finished={f"{topic}/{number}": len(done) for topic, number, done in self._plan.finished},
        )
        return dataclasses.replace(found, ok=not found.problems)

    async def _ranges(self) -> list[_Range]:
        planned = {TopicPartition(one.topic, one.partition): one for one in self._plan.ranges}
        async with HistoryBrokers(settings_for(self._plan)) as brokers:
            bounds = await brokers.bounds(planned)
        ends = {at: self._ends[at.topic][str(at.partition)] for at in planned}
        lost = [
            f"{at}: the range ends at {ends[at]}, and the log at {log.end}"
            for at, log in sorted(bounds.items())
            if ends[at] > log.end
        ]
        if lost:
            raise DataLossError(lost, "Plan anew")
        return [
            _Range(*at, one.start, self._reached[at.topic][str(at.partition)], ends[at], bounds[at].start)
            for at, one in planned.items()
        ]

    def _halted(self, rows: "DataFrame", *, undrained: bool, among: bool) -> tuple[str, ...]:
        named = [str(one) for one in read_halted(self._place)] if undrained else []
        if among:
            found = _found(rows.where("status = 'halted'"))
            named += [f"{name}/{offset}" for name, halted in found.items() for offset in halted.offsets]
        return tuple(named)

    # Spark queries --------------------------------------------------------------------

    def _rows(self) -> "DataFrame":
        if not self._place.exists(OUTCOMES):
            return self._spark.createDataFrame([], _ROWS)
        outcomes = self._spark.read.schema(_ROWS).parquet(self._place.uri(OUTCOMES))
        return outcomes.select("topic", "partition", "offset", "status")

    def _parted(self, rows: "DataFrame", ranges: list[_Range]) -> "tuple[DataFrame, DataFrame]":
        """Return distinct offsets in the ranges with their block and number of rows, and the rows outside."""
        from pyspark.sql import functions  # noqa: PLC0415 - pyspark is imported on use

        known = functions.broadcast(self._spark.createDataFrame(ranges, _RANGES))
        planned = "coalesce(offset >= start AND offset < end, false)"
        outside = rows.join(known, ["topic", "partition"], "left").where(f"NOT {planned}")
        finished = [(topic, number, at, _FINISHED) for topic, number, done in self._plan.finished for at in done]
        both = rows.unionByName(self._spark.createDataFrame(finished, _ROWS)) if finished else rows
        inside = both.join(known, ["topic", "partition"]).where("offset >= start AND offset < reached")
        place = functions.expr(f"(offset - start) div {self._block}").alias("block")
        counted = inside.groupBy(*_KEY, place, functions.expr("offset < log_start").alias("deleted"))
        return counted.agg(functions.count("*").alias("times")), outside

    def _blocks(self, offsets: "DataFrame") -> dict[tuple[str, int, int], _Counts]:
        from pyspark.sql import functions  # noqa: PLC0415

        counts = offsets.groupBy("topic", "partition", "block").agg(
            functions.count("*").alias("rows"),
            functions.sum(functions.expr("int(deleted)")).alias("deleted"),
            functions.sum(functions.expr("int(times > 1)")).alias("repeated"),
        )
        return {
            (row["topic"], row["partition"], row["block"]): _Counts(row["rows"], row["deleted"], row["repeated"])
            for row in counts.collect()
        }

    def _in_log(self, ranges: list[PlannedRange]) -> "DataFrame":
        """Return every offset of some ranges whose record is in the log now."""
        tasks = min(1 + sum(one.end - one.start for one in ranges) // _OF_A_TASK, _TASKS)
        parts = [(one.topic, one.partition, one.start, one.end) for task in split(ranges, tasks) for one in task]
        schema = "topic string, partition int, start long, end long"
        frame = self._spark.createDataFrame(parts, schema).repartition(tasks)
        return frame.mapInArrow(_reader(self._plan.to_json(), places()), "topic string, partition int, offset long")


def _gaps(ranges: Iterable[_Range], blocks: Mapping[tuple[str, int, int], _Counts], size: int) -> _Gaps:
    """Find the blocks with fewer rows than offsets."""
    gaps = _Gaps([], {}, {})
    for one in ranges:
        for number, start in enumerate(range(one.start, one.reached, size)):
            counts = blocks.get((one.topic, one.partition, number), _Counts())
            end = min(start + size, one.reached)
            border = min(max(one.log_start, start), end)
            deleted = border - start - counts.deleted
            short = end - border - (counts.rows - counts.deleted)
            if deleted:
                gaps.deleted[one.name] = gaps.deleted.get(one.name, 0) + deleted
            if short:
                gaps.in_log[one.name] = gaps.in_log.get(one.name, 0) + short
                _add(gaps.to_read, PlannedRange(topic=one.topic, partition=one.partition, start=border, end=end))
    return gaps


def _add(ranges: list[PlannedRange], more: PlannedRange) -> None:
    """Append a range, or extend the last one if it continues there."""
    last = ranges[-1] if ranges else None
    if last is not None and (last.topic, last.partition, last.end) == (more.topic, more.partition, more.start):
        ranges[-1] = dataclasses.replace(last, end=more.end)
    else:
        ranges.append(more)


def _found(offsets: "DataFrame") -> dict[str, Found]:
    """Return the number of rows of each partition, and the first offsets."""
    from pyspark.sql import Window, functions  # noqa: PLC0415 - pyspark is imported on use

    partition = Window.partitionBy("topic", "partition")
    frame = offsets.select(
        *_KEY,
        functions.count("*").over(partition).alias("count"),
        functions.row_number().over(partition.orderBy("offset")).alias("place"),
    )
    counts: dict[str, int] = {}
    first: dict[str, list[int]] = {}
    for row in frame.where(f"place <= {NAMED}").orderBy(*_KEY).collect():
        name = f"{row['topic']}/{row['partition']}"
        counts[name] = row["count"]
        first.setdefault(name, []).append(row["offset"])
    return {name: Found(count=count, offsets=tuple(first[name])) for name, count in counts.items()}


def _reader(
    plan_json: str, modules: tuple[str, ...]
) -> "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    """Return the function of a task: it takes ranges and yields the offsets of their records."""

    def read(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        from aioshard.spark.tasks.raw import read_raw  # noqa: PLC0415 - in a task

        plan = Plan.from_json(plan_json)
        with contextlib.suppress(PlanError):
            resolve_app(plan.app, modules)  # its settings may know the brokers
        settings = settings_for(plan).replace(isolation_level=plan.isolation_level)
        for batch in batches:
            for one in batch.to_pylist():
                bounds = {TopicPartition(one["topic"], one["partition"]): LogRange(one["start"], one["end"])}
                for records in read_raw(settings, bounds):
                    yield records.select(list(_KEY))

    return read
