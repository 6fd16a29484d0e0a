"""Verify that a run has handled every record of its ranges exactly once: compare the outcomes with the log."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aioshard.errors import DataLossError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.records import TopicPartition
from aioshard.spark.plans import Plan, PlannedRange, Vector, check_ends, ends_of, starts_of, vector_of
from aioshard.spark.run_directory import OUTCOMES, VERIFIED, RunDirectory
from aioshard.spark.runs import read_halted
from aioshard.spark.work import blocking, module_paths, settings_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


NAMED = 20
"""Maximum number of offsets that a report names per partition; all are counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Offsets of one partition that a check found.

    Attributes:
        count: Number of offsets.
        offsets: The first `NAMED` of them, ascending.
    """

    count: int
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        """Return the offsets as text for people."""
        named = ", ".join(map(str, self.offsets))
        more = self.count - len(self.offsets)
        return f"{named} and {more} more" if more > 0 else named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of checking that each planned record was handled exactly once. Partitions are named `topic/partition`.

    Attributes:
        plan: The digest of the plan.
        ends: The verified ends: topic, partition, offset.
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
    def ok(self) -> bool:
        """Whether the run may be handed over once its dead letters are sent."""
        return not self.problems

    @property
    def dead_lettered(self) -> int:
        """Dead letters that the run still has to send."""
        return self.statuses.get("dead_lettered", 0)

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences that explain why the run cannot be handed over; empty if it is `ok`."""
        problems = [f"{record} halted: fix the cause and run again" for record in self.halted]
        for name, count in self.left.items():
            problems.append(f"{name}: the last {count} offsets were not processed: run to the end")
        for name, found in self.missing.items():
            problems.append(f"{name}: {found.count} records in the log have no outcome: offsets {found}")
        for name, found in self.duplicates.items():
            problems.append(f"{name}: {found.count} offsets have more than one outcome: {found}")
        for name, found in self.outside.items():
            problems.append(f"{name}: {found.count} outcomes are outside the planned range: {found}")
        return tuple(problems)

    def asdict(self) -> dict[str, Any]:
        """Return the verification as a dictionary for JSON."""
        return dataclasses.asdict(self) | {
            "ok": self.ok,
            "dead_lettered": self.dead_lettered,
            "problems": list(self.problems),
        }


_PARTITION = ("topic", "partition")
_KEY = (*_PARTITION, "offset")
_ROWS = "topic string, partition int, offset long, status string"
_RANGES = "topic string, partition int, start long, reached long, end long, log_start long"
_ATTEMPTS = 3
"""Retention may delete records ahead of a reader; the next attempt starts after them."""


def verify(spark: "SparkSession", directory: str | os.PathLike[str] | RunDirectory) -> Verification:
    r"""Check that each record of a run's ranges has one outcome, and write the result to the directory.

    Spark does the counting. Only partitions with fewer rows than offsets are read from the log. A record in the log
    without a row is missing. An offset without a record in the log is a hole or was deleted since; it is not an error.

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
    attempts = _ATTEMPTS
    while True:
        attempts -= 1
        try:
            verification = _verify(spark, run_dir, run_dir.plan())
        except Exception as error:
            if not attempts or DataLossError.__name__ not in str(error):  # the name that a failed task shows
                raise
        else:
            run_dir.write_json(VERIFIED, verification.asdict())
            return verification


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

    ranges = blocking(lambda: _ranges(plan, run_dir.reached(plan)))
    if run_dir.exists(OUTCOMES):
        rows = run_dir.rows(spark, OUTCOMES).select(*_KEY, "status")
    else:
        rows = spark.createDataFrame([], _ROWS)
    statuses = {row["status"]: int(row["count"]) for row in rows.groupBy("status").count().collect()}
    known = functions.broadcast(spark.createDataFrame(ranges, _RANGES))
    outside = rows.join(known, list(_PARTITION), "left").where("NOT coalesce(offset >= start AND offset < end, false)")
    finished = [(at.topic, at.partition, offset, "") for at in plan.ranges for offset in at.finished]
    handled = rows.union(spark.createDataFrame(finished, _ROWS))
    offsets = (
        handled.join(known, list(_PARTITION))
        .where("offset >= start AND offset < reached")
        .groupBy(*_KEY, functions.expr("offset < log_start").alias("deleted"))
        .count()
    )
    counts = offsets.groupBy(*_PARTITION).agg(functions.count("*"), functions.count_if("deleted")).collect()
    gaps, deleted_since = find_gaps(ranges, {(row[0], row[1]): (row[2], row[3]) for row in counts})
    unhandled = _offsets_in_log(spark, run_dir, gaps).join(offsets, list(_KEY), "left_anti") if gaps else None
    left = {planned.name: planned.end - planned.reached for planned in ranges if planned.reached < planned.end}
    return Verification(
        plan=plan.digest,
        ends=vector_of({TopicPartition(planned.topic, planned.partition): planned.end for planned in ranges}),
        records=sum(statuses.values()),
        statuses=dict(sorted(statuses.items())),
        left=left,
        missing={} if unhandled is None else _by_partition(unhandled),
        duplicates=_by_partition(offsets.where("count > 1")),
        outside=_by_partition(outside),
        halted=tuple(read_halted(run_dir)) if left else (),
        deleted_since=deleted_since,
    )


async def _ranges(plan: Plan, reached: Vector) -> list[_Range]:
    async with KafkaAdmin(settings_for(plan)) as brokers:
        bounds = await brokers.bounds([planned.topic_partition for planned in plan.ranges])
    ranges = []
    for planned in plan.ranges:
        at = planned.topic_partition
        done = reached[at.topic][str(at.partition)]
        # A run that follows the log goes past the planned ends.
        ranges.append(_Range(*at, planned.start, done, max(planned.end, done), bounds[at].start))
    check_ends(bounds, {TopicPartition(planned.topic, planned.partition): planned.end for planned in ranges})
    return ranges


def find_gaps(
    ranges: Iterable[_Range], counts: Mapping[tuple[str, int], tuple[int, int]]
) -> tuple[list[PlannedRange], dict[str, int]]:
    """Find the partitions with fewer rows than offsets.

    Args:
        ranges: The ranges to verify.
        counts: The offsets with rows of each partition, and how many of them lie before the start of the log.

    Returns:
        These ranges as far as they are still in the log, and the number of offsets without a row before its start.
    """
    gaps: list[PlannedRange] = []
    deleted: dict[str, int] = {}
    for planned in ranges:
        rows, before_log = counts.get((planned.topic, planned.partition), (0, 0))
        first = min(max(planned.log_start, planned.start), planned.reached)
        if first - planned.start > before_log:
            deleted[planned.name] = first - planned.start - before_log
        if planned.reached - first > rows - before_log:
            gaps.append(
                PlannedRange(topic=planned.topic, partition=planned.partition, start=first, end=planned.reached)
            )
    return gaps, deleted


def _offsets_in_log(spark: "SparkSession", run_dir: RunDirectory, ranges: list[PlannedRange]) -> "DataFrame":
    """Return every offset of some ranges whose record is in the log now."""
    options = {
        "plan": run_dir.uri(),
        "app": "",
        "module_paths": os.pathsep.join(module_paths()),
        "start": json.dumps(starts_of(ranges)),
        "end": json.dumps(ends_of(ranges)),
    }
    return spark.read.format("aioshard").options(**options).load().select(*_KEY)


def _by_partition(offsets: "DataFrame") -> dict[str, Found]:
    """Return the number of rows of each partition, and the first offsets."""
    first = (
        offsets.selectExpr(
            "concat_ws('/', topic, partition) AS name",
            "offset",
            "count(*) OVER (PARTITION BY topic, partition) AS count",
            "row_number() OVER (PARTITION BY topic, partition ORDER BY offset) AS rank",
        )
        .where(f"rank <= {NAMED}")
        .groupBy("name", "count")
        .agg({"offset": "collect_list"})
        .orderBy("name")
    )
    return {row[0]: Found(count=row[1], offsets=tuple(sorted(row[2]))) for row in first.collect()}
