"""Process records of an earlier run again, from its own rows: a dead letter may succeed now."""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from aioshard.errors import PlanError
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import OUTCOMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["redrive"]

_KEPT = ("dead_lettered", "skipped")
"""Statuses whose rows contain the complete record."""


def redrive(
    spark: "SparkSession",
    directory: str | PathLike[str] | RunDirectory,
    *,
    out: str | PathLike[str],
    status: str | Sequence[str] = "dead_lettered",
    app: str | None = None,
    tasks: int | None = None,
    on_failure: str | None = None,
    total_concurrency: int | None = None,
) -> "DataFrame":
    """Run the handlers again over records of a run with a given status, and return their new outcomes.

    The rows of the run contain these records completely, so the topic is not read again: records that retention has
    deleted are processed too. The order is that of `apply_handlers`. The directory of the first run does not change,
    nothing is committed to the group, and a record that fails again is a row in *out*.

    Args:
        spark: A session without speculation.
        directory: The directory of the earlier run.
        out: A new directory for the outcome rows as Parquet.
        status: Status of the rows to process: `dead_lettered` or `skipped`, or both.
        app: `MODULE:APP` to use instead of the run's own app, which may have been fixed in the meantime.
        tasks: As for `apply_handlers`.
        on_failure: As for `apply_handlers`.
        total_concurrency: As for `apply_handlers`.

    Returns:
        The rows in *out*; reading them does not run handlers again.

    Raises:
        HaltedError: A record failed permanently and its handler halts. *out* was not created.
        PlanError: *directory* has no plan or no such rows, or `apply_handlers` refuses the arguments.
        DrainError: The job ended for another reason.

    Example:
        ```python
        again = redrive(spark, "runs/7", out="runs/7-again", on_failure="skip")
        again.groupBy("status").count().show()
        ```
    """
    from aioshard.spark.draining.frame import apply_handlers  # noqa: PLC0415 - imported on use
    from aioshard.spark.source.data_source import OUTCOME_COLUMNS  # noqa: PLC0415

    place = RunDirectory.of(directory)
    plan = place.plan()
    statuses = [status] if isinstance(status, str) else list(status)
    unknown = [one for one in statuses if one not in _KEPT]
    if unknown or not statuses:
        raise PlanError(
            f"status {', '.join(unknown) or 'of no kind'} was found, {' or '.join(_KEPT)} was expected: only rows of "
            "these hold the whole record"
        )
    if not place.list(OUTCOMES):
        raise PlanError(f"the run in {place} has no outcomes yet: drain it first")
    rows = spark.read.schema(OUTCOME_COLUMNS).parquet(place.uri(OUTCOMES))
    chosen = rows.where(rows["status"].isin(statuses))
    if not chosen.limit(1).collect():
        raise PlanError(f"no row of the run in {place} has the status {' or '.join(statuses)}: nothing is left to do")
    return apply_handlers(
        chosen,
        app or plan.app,
        out=out,
        tasks=tasks,
        on_failure=on_failure,
        total_concurrency=total_concurrency,
        bootstrap_servers=plan.bootstrap_servers,
    )
