"""Some records of a planned run through its handlers, without a trace: how fast a run is, and what would fail."""

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioshard.errors import PlanError
from aioshard.spark.draining.planned_source import planned_source
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.plan import Plan
from aioshard.spark.session import check_speculation, shuffle_partitions, slots_of
from aioshard.spark.source.vectors import advanced, ends_of, ranges_between, starts_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Sample", "sample"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a sample of a run came to.

    Attributes:
        records: That came to an end.
        statuses: Rows by status; `halted` among them where records failed for good and their handler halts.
        rate: Records per second in the whole job, from the first run of a handler to the end of the last; None where
            that is too short to tell.
        eta: Seconds that the plan would take at that rate; None where there is none.
        p50: Of the last attempts' durations, in seconds; None where no handler ran.
        p99: The same.
        seconds: That the sample took, with everything that Spark does before the first run of a handler.
    """

    records: int
    statuses: Mapping[str, int]
    rate: float | None
    eta: float | None
    p50: float | None
    p99: float | None
    seconds: float

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def sample(spark: "SparkSession", plan: Plan, records: int) -> Sample:
    """Run some records of a plan through the handlers, once; no row is written, nothing is committed or sent.

    The records are the first ones of each partition, in proportion to its range, so all tasks of the run have their
    share. What handlers themselves do is done: a handler that writes somewhere writes. The first record that halts
    ends its task.

    Args:
        spark: A session without speculation, with as many cores as the run is to have.
        plan: What would be run; its directory is not touched.
        records: How many at most, by offsets.

    Raises:
        PlanError: There is nothing to read, *records* is not at least 1, or an app cannot be imported.

    Example:
        ```python
        found = sample(local_session(), RunDirectory("runs/7").plan(), 10_000)
        print(found.rate, found.eta, found.statuses)
        ```
    """
    from pyspark.sql import functions  # noqa: PLC0415 - imported on use

    if records < 1:
        raise PlanError(f"a sample of {records} records was asked for, at least 1 was expected")
    if not plan.records:
        raise PlanError("the plan has nothing to read, so there is nothing to sample")
    check_speculation({"spark.speculation": spark.conf.get("spark.speculation", "false") or "false"})
    began = time.monotonic()
    ends = advanced(starts_of(plan.ranges), ends_of(plan.ranges), records)
    part = dataclasses.replace(plan, ranges=tuple(ranges_between(starts_of(plan.ranges), ends)))
    ended = functions.col("started").cast("double") + functions.col("duration")
    with tempfile.TemporaryDirectory(prefix="aioshard-sample-") as directory:
        place = RunDirectory(directory)
        place.begin(part)
        rows, outcomes = planned_source(spark.read, place, part, slots_of(spark, shuffle_partitions(spark)))
        # One action: each record runs once.
        frame = outcomes(rows).select("status", "duration", "started", ended.alias("ended"))
        found = frame.groupBy("status").agg(
            functions.count("*").alias("records"),
            functions.min("started").cast("double").alias("first"),
            functions.max("ended").alias("last"),
            functions.collect_list(functions.col("duration").cast("float")).alias("durations"),
        )
        told = found.collect()
    return _sample(plan, told, time.monotonic() - began)


def _sample(plan: Plan, rows: list[Any], seconds: float) -> Sample:
    count = sum(row["records"] for row in rows)
    first = min((row["first"] for row in rows if row["first"] is not None), default=0.0)
    last = max((row["last"] for row in rows if row["last"] is not None), default=0.0)
    rate = count / (last - first) if last > first else None
    durations = sorted(duration for row in rows for duration in row["durations"])
    return Sample(
        records=count,
        statuses={row["status"]: row["records"] for row in sorted(rows, key=lambda row: str(row["status"]))},
        rate=rate,
        eta=None if rate is None else plan.records / rate,
        p50=_quantile(durations, 0.5),
        p99=_quantile(durations, 0.99),
        seconds=seconds,
    )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None
