"""Verify that a run has handled every record of its ranges exactly once: compare the outcomes with the log."""

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aioshard.errors import DataLossError
from aioshard.kafka.aiokafka.admin import KafkaAdmin
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.spark.plans import Plan, PlannedRange, Vector, check_ends, split, vector_of
from aioshard.spark.run_directory import OUTCOMES, VERIFIED, RunDirectory
from aioshard.spark.runs import read_halted
from aioshard.spark.work import blocking, module_paths, settings_for

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


NAMED = 20
"""How many offsets of a partition a report names at most; all are counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Offsets of one partition that a check found.

    Attributes:
        count: How many there are.
        offsets: The first of them, ascending.
    """

    count: int
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        """Return the offsets as text for people."""
        named = ", ".join(map(str, self.offsets))
        return f"{named} and {self.count - len(self.offsets)} more" if self.count > len(self.offsets) else named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether every record of a planned range was handled exactly once. Partitions are named `topic/partition`.

    Attributes:
        plan: The digest of the plan.
        ok: Whether the run may be handed over once its dead letters are sent.
        ends: How far the run was verified: topic, partition, offset.
        records: Number of outcome rows.
        statuses: Rows by status.
        left: Number of offsets that the run has not reached, by partition.
        missing: Offsets whose record is in the log but has no row.
        duplicates: Offsets with several rows, or with a row although they were completed before the run.
        outside: Offsets with a row that are not in the range.
        halted: Names of the records that halted.
        deleted_since: Number of offsets without a row that are no longer in the log, by partition. Not an error.
    """

    plan: str
    ok: bool
    ends: Mapping[str, Mapping[str, int]]
    records: int
    statuses: Mapping[str, int]
    left: Mapping[str, int]
    missing: Mapping[str, Found]
    duplicates: Mapping[str, Found]
    outside: Mapping[str, Found]
    halted: tuple[str, ...]
    deleted_since: Mapping[str, int]

    @property
    def dead_lettered(self) -> int:
        """Dead letters that the run still has to send."""
        return self.statuses.get("dead_lettered", 0)

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences that explain why the run cannot be handed over; empty if it is `ok`."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.halted:
            more = "" if len(self.halted) == 1 else f" and {len(self.halted) - 1} more"
            yield f"{self.halted[0]}{more} halted: fix the cause and run again"
        for name, count in self.left.items():
            yield f"{name}: the last {count} offsets were not processed: run to the end"
        for name, offsets in self.missing.items():
            yield f"{name}: {offsets.count} records in the log have no outcome: offsets {offsets}"
        for name, offsets in self.duplicates.items():
            yield f"{name}: {offsets.count} offsets have more than one outcome: {offsets}"
        for name, offsets in self.outside.items():
            yield f"{name}: {offsets.count} outcomes are outside the planned range: {offsets}"

    def asdict(self) -> dict[str, Any]:
        """Return the verification as a dictionary for JSON."""
        return {**dataclasses.asdict(self), "dead_lettered": self.dead_lettered, "problems": list(self.problems)}


_PARTITION = ("topic", "partition")
_KEY = (*_PARTITION, "offset")
_ROWS = "topic string, partition int, offset long, status string"
_RANGES = "topic string, partition int, start long, reached long, end long, log_start long"
_FINISHED = "finished before"
"""Status of records that the group had completed before the run; used only in this module."""
_BLOCK = 10_000
"""Offsets counted together. The log is read again only for blocks with fewer rows than offsets."""
_MOST_BLOCKS = 20_000
_TASKS = 8
"""Maximum number of tasks that read the log."""
_OFFSETS_PER_TASK = 50_000
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
        verification = verify(spark, "runs/7")
        if not verification.ok:
            print(*verification.problems, sep="\n")
        ```
    """
    run_dir = RunDirectory.of(directory)
    plan = run_dir.plan()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            verification = _verify(spark, run_dir, plan)
        except DataLossError:
            raise
        except Exception as error:
            if DataLossError.__name__ not in str(error) or attempt == _ATTEMPTS:
                raise
        else:
            run_dir.write_json(VERIFIED, verification.asdict())
            return verification
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


def _verify(spark: "SparkSession", run_dir: RunDirectory, plan: Plan) -> Verification:
    """Count the rows, read the log where counts are short, and return the verdict.

    Raises:
        DataLossError: A range ends past the end of its log.
    """
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is imported on use

    ranges = blocking(functools.partial(_ranges, plan, run_dir.reached(plan)))
    rows = spark.createDataFrame([], _ROWS)
    if run_dir.exists(OUTCOMES):
        rows = run_dir.rows(spark, OUTCOMES).select(*_KEY, "status")
    statuses = {row["status"]: int(row["count"]) for row in rows.groupBy("status").count().collect()}
    known = functions.broadcast(spark.createDataFrame(ranges, _RANGES))
    outside = rows.join(known, list(_PARTITION), "left")
    outside = outside.where("NOT coalesce(offset >= start AND offset < end, false)")
    finished = [
        (planned.topic, planned.partition, offset, _FINISHED) for planned in plan.ranges for offset in planned.finished
    ]
    inside = rows.unionByName(spark.createDataFrame(finished, _ROWS)).join(known, list(_PARTITION))
    size = max(_BLOCK, plan.records // _MOST_BLOCKS)
    block = functions.expr(f"(offset - start) div {size}").alias("block")
    deleted = functions.expr("offset < log_start").alias("deleted")
    inside = inside.where("offset >= start AND offset < reached")
    offsets = inside.groupBy(*_KEY, block, deleted).agg(functions.count("*").alias("times"))
    counts = offsets.groupBy(*_PARTITION, "block").agg(functions.count("*"), functions.count_if("deleted"))
    blocks = {(row[0], row[1], row[2]): (row[3], row[4]) for row in counts.collect()}
    gaps, deleted_since = find_gaps(ranges, blocks, size)
    unhandled = _offsets_in_log(spark, plan, gaps).join(offsets, list(_KEY), "left_anti") if gaps else None
    left = {planned.name: planned.end - planned.reached for planned in ranges if planned.reached < planned.end}
    verification = Verification(
        plan=plan.digest,
        ok=False,
        ends=vector_of({TopicPartition(planned.topic, planned.partition): planned.end for planned in ranges}),
        records=sum(statuses.values()),
        statuses=dict(sorted(statuses.items())),
        left=left,
        missing={} if unhandled is None else _by_partition(unhandled),
        duplicates=_by_partition(offsets.where("times > 1")),
        outside=_by_partition(outside),
        halted=tuple(read_halted(run_dir)) if left else (),
        deleted_since=deleted_since,
    )
    return dataclasses.replace(verification, ok=not verification.problems)


async def _ranges(plan: Plan, reached: Vector) -> list[_Range]:
    async with KafkaAdmin(settings_for(plan)) as brokers:
        bounds = await brokers.bounds([planned.topic_partition for planned in plan.ranges])
    ranges, ends = [], {}
    for planned in plan.ranges:
        at = planned.topic_partition
        done = reached[at.topic][str(at.partition)]
        ends[at] = max(planned.end, done)  # a run that follows the log goes past the planned ends
        ranges.append(_Range(*at, planned.start, done, ends[at], bounds[at].start))
    check_ends(bounds, ends)
    return ranges


def _offsets_in_log(spark: "SparkSession", plan: Plan, ranges: list[PlannedRange]) -> "DataFrame":
    """Return every offset of some ranges whose record is in the log now."""
    tasks = min(1 + sum(gap.end - gap.start for gap in ranges) // _OFFSETS_PER_TASK, _TASKS)
    parts = [(gap.topic, gap.partition, gap.start, gap.end) for task in split(ranges, tasks) for gap in task]
    schema = "topic string, partition int, start long, end long"
    frame = spark.createDataFrame(parts, schema).repartition(tasks)
    read = functools.partial(_read_offsets, plan, module_paths())
    return frame.mapInArrow(read, "topic string, partition int, offset long")


def _read_offsets(
    plan: Plan, paths: tuple[str, ...], batches: "Iterator[pa.RecordBatch]"
) -> "Iterator[pa.RecordBatch]":
    """Take ranges and yield the offsets of their records, in a task."""
    from aioshard.spark.task import read_raw  # noqa: PLC0415 - in a task

    settings = settings_for(plan, paths).replace(isolation_level=plan.isolation_level)
    for batch in batches:
        for row in batch.to_pylist():
            bounds = {TopicPartition(row["topic"], row["partition"]): LogRange(row["start"], row["end"])}
            for records in read_raw(settings, bounds):
                yield records.select(list(_KEY))


def find_gaps(
    ranges: Iterable[_Range], blocks: Mapping[tuple[str, int, int], tuple[int, int]], size: int
) -> tuple[list[PlannedRange], dict[str, int]]:
    """Find the blocks with fewer rows than offsets.

    Args:
        ranges: The ranges to verify.
        blocks: The offsets with rows of each block, and how many of them lie before the start of the log.
        size: Offsets of a block.

    Returns:
        The blocks as far as they are still in the log, and the number of offsets without a row before its start.
    """
    gaps: list[PlannedRange] = []
    deleted: Counter[str] = Counter()
    for planned in ranges:
        for number, start in enumerate(range(planned.start, planned.reached, size)):
            rows, before_log = blocks.get((planned.topic, planned.partition, number), (0, 0))
            end = min(start + size, planned.reached)
            boundary = min(max(planned.log_start, start), end)
            deleted[planned.name] += boundary - start - before_log
            if end - boundary > rows - before_log:
                gap = PlannedRange(topic=planned.topic, partition=planned.partition, start=boundary, end=end)
                continues = gaps and gaps[-1].topic_partition == gap.topic_partition and gaps[-1].end == boundary
                if continues:
                    gap = dataclasses.replace(gaps.pop(), end=end)
                gaps.append(gap)
    return gaps, dict(+deleted)


def _by_partition(offsets: "DataFrame") -> dict[str, Found]:
    """Return the number of rows of each partition, and the first offsets."""
    numbered = offsets.selectExpr(
        *_KEY,
        "count(*) OVER (PARTITION BY topic, partition) AS count",
        "row_number() OVER (PARTITION BY topic, partition ORDER BY offset) AS place",
    )
    first: dict[str, Found] = {}
    for row in numbered.where(f"place <= {NAMED}").orderBy(*_KEY).collect():
        name = f"{row['topic']}/{row['partition']}"
        before = first[name].offsets if name in first else ()
        first[name] = Found(count=row["count"], offsets=(*before, row["offset"]))
    return first
