"""Run handlers over any DataFrame of records: shuffle it so that the required order holds, and run it once."""

import functools
import re
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from aioshard.errors import AioshardError, DataLossError, HaltedError, PlanError, RunError
from aioshard.spark.run_directory import OUTCOMES, RunDirectory
from aioshard.spark.session import check_speculation, slots_of
from aioshard.spark.work import Work, check_handlers, module_paths, resolve_app

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ERROR_NAME = re.compile(r"aioshard\.errors\.(\w+): (.*?)(?:\n SQLSTATE|\n\s*\tat |\n\n|$)", re.DOTALL)
_REQUIRED_COLUMNS = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "key": "binary",
    "value": "binary",
    "timestamp": "timestamp",
}
_HEADERS = "array<struct<key: string, value: binary>>"
_PARTIAL_SUFFIX = ".partial"
"""Suffix of a directory whose rows are incomplete; only its writer reads it."""
_MOST_HALTED = 100
"""Maximum number of halted records that a report names."""
_REDRIVABLE = ("dead_lettered", "skipped")
"""Statuses whose rows contain the complete record."""


# Shuffle ------------------------------------------------------------------------------


def shuffled_outcomes(rows: "DataFrame", work: "Work", tasks: int, *, in_offset_order: bool = True) -> "DataFrame":
    """Return the outcome rows of records whose order spans partitions. Lazy: reading it twice runs the handlers twice.

    Rows with the same shard value go to the same task, which sorts them by time. Records of one partition stay in
    offset order even if their timestamps do not.

    Args:
        rows: Rows in the columns of Spark's own Kafka connector; `headers` may be missing.
        work: The handlers to run and their settings.
        tasks: Number of tasks to shuffle into.
        in_offset_order: True if each task of *rows* has whole partitions in offset order; otherwise one more shuffle
            establishes that first.

    Returns:
        A frame in the columns of `aioshard.spark.source.OUTCOME_COLUMNS`.

    Raises:
        PlanError: A column is missing.
    """
    from pyspark.sql.types import DoubleType, LongType, StructType  # noqa: PLC0415 - imported on use

    from aioshard.spark.shuffle import MOMENT, SHARD, handlers_over_rows, with_shards  # noqa: PLC0415
    from aioshard.spark.source import OUTCOME_COLUMNS  # noqa: PLC0415

    records = _records(rows)
    if not in_offset_order:
        records = records.repartition(tasks, "topic", "partition").sortWithinPartitions("topic", "partition", "offset")
    sharded = StructType(list(records.schema.fields)).add(SHARD, LongType()).add(MOMENT, DoubleType())
    return (
        records.mapInArrow(functools.partial(with_shards, work), sharded)
        .repartition(tasks, SHARD)
        .sortWithinPartitions(MOMENT, "topic", "partition", "offset")
        .mapInArrow(functools.partial(handlers_over_rows, work), OUTCOME_COLUMNS)
    )


def _records(rows: "DataFrame") -> "DataFrame":
    """Select the columns that make up a record."""
    from pyspark.sql import functions  # noqa: PLC0415 - imported on use

    if missing := [name for name in _REQUIRED_COLUMNS if name not in rows.columns]:
        raise PlanError(
            f"column {missing[0]!r} is missing among {', '.join(rows.columns)}: expected the columns of Spark's Kafka "
            f"connector ({', '.join(_REQUIRED_COLUMNS)} and optionally headers)"
        )
    headers = functions.col("headers") if "headers" in rows.columns else functions.lit(None)
    return rows.select(
        *(functions.col(name).cast(kind).alias(name) for name, kind in _REQUIRED_COLUMNS.items()),
        headers.cast(_HEADERS).alias("headers"),
    )


# Errors -------------------------------------------------------------------------------


def halted_records(outcomes: "DataFrame") -> list[str]:
    """Return the first halted records among outcome rows, each with its key and its error."""
    rows = (
        outcomes.where("status = 'halted'")
        .orderBy("topic", "partition", "offset")
        .limit(_MOST_HALTED)
        .selectExpr(
            "concat_ws('/', topic, partition, offset) AS record",
            "coalesce(try_validate_utf8(key), concat('0x', hex(key)), 'None') AS key",
            "error_type",
            "error",
        )
    )
    return [f"{row['record']} (key {row['key']}, {row['error_type']}: {row['error']})" for row in rows.collect()]


def error_of_job(error: Exception, job: str) -> AioshardError:
    """Translate the error of a Spark job into the aioshard error that one of its tasks raised.

    Example:
        >>> error_of_job(Exception("Job aborted: aioshard.errors.PlanError: there is no module 'orders'"), "the job")
        PlanError("there is no module 'orders'")
    """
    matches = _ERROR_NAME.findall(str(error))
    if not matches:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return RunError(f"{job} ended: {reason}")
    kind = matches[-1][0]
    message = matches[-1][1].strip()
    if kind == PlanError.__name__:
        return PlanError(message)
    if kind == DataLossError.__name__:
        return DataLossError([message], "Process the remaining records with a new plan")
    return RunError(f"{job} ended: {kind}: {message}")


# Jobs ---------------------------------------------------------------------------------


def apply_handlers(
    df: "DataFrame",
    app: str,
    *,
    out: str | PathLike[str],
    tasks: int | None = None,
    on_failure: str | None = None,
    total_concurrency: int | None = None,
    bootstrap_servers: str | None = None,
) -> "DataFrame":
    """Run an app's handlers once over records from any source, and return their outcomes as written to *out*.

    The rows come from Spark's own `format("kafka")`, from `format("aioshard")`, or from any source with the same
    columns. They are ordered by timestamp, and by offset within a partition. Records that a handler's `shard_by` keeps
    in order are processed in that order by one task. Nothing is committed to a group, and dead letters are not sent:
    they are rows with the status `dead_lettered`.

    Args:
        df: `key`, `value`, `topic`, `partition`, `offset`, `timestamp` and optionally `headers`. It must not be a
            stream; a micro-batch in `foreachBatch` is not one.
        app: `MODULE:APP`.
        out: Directory for the outcome rows as Parquet. It appears once all of them are written.
        tasks: Number of tasks that run handlers; Spark's own parallelism by default.
        on_failure: `skip` or `dead-letter:TOPIC`; replaces the handlers' own policies.
        total_concurrency: Maximum number of concurrent handler calls in the whole job.
        bootstrap_servers: Brokers for handlers that publish; by default those of the tasks' environment and the app.

    Returns:
        The rows in *out*; reading them does not run handlers again.

    Raises:
        HaltedError: A record failed permanently and its handler halts. *out* was not created.
        PlanError: The app or *df* is unsuitable, a topic has no handler, or *out* exists.
        RunError: The job ended for another reason.

    Example:
        ```python
        rows = spark.read.format("kafka").option("subscribe", "orders").load()
        outcomes = apply_handlers(rows, "orders.app:app", out="outcomes/orders", on_failure="skip")
        outcomes.groupBy("status").count().show()
        ```
    """
    check_handlers(resolve_app(app), on_failure, total_concurrency)
    if df.isStreaming:
        raise PlanError(
            "expected a DataFrame with an end, found a stream: call apply_handlers in foreachBatch, with an out for "
            "each batch, or run a plan"
        )
    spark = df.sparkSession
    check_speculation({"spark.speculation": spark.conf.get("spark.speculation", "false") or "false"})
    parent, _, name = RunDirectory(out).uri().rpartition("/")
    parent_dir = RunDirectory(parent)
    if parent_dir.exists(name):
        raise PlanError(f"{out} exists, and its rows belong to another job: name a new directory")
    slots = slots_of(spark, int(spark.conf.get("spark.sql.shuffle.partitions", "4") or 4))
    work = Work(
        app=app,
        module_paths=module_paths(),
        settings={} if bootstrap_servers is None else {"bootstrap_servers": bootstrap_servers},
        on_failure=on_failure,
        total_concurrency=total_concurrency,
        at_once=min(tasks or slots, slots),
        halted_rows=True,
    )
    staged = f"{name}{_PARTIAL_SUFFIX}"
    rows = shuffled_outcomes(df, work, tasks or slots, in_offset_order=False)
    try:
        rows.write.mode("overwrite").parquet(parent_dir.uri(staged))
    except Exception as error:
        raise error_of_job(error, "the job") from error
    if halted := halted_records(parent_dir.rows(spark, staged)):
        raise HaltedError(halted)
    parent_dir.move(staged, name)
    return parent_dir.rows(spark, name)


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
        RunError: The job ended for another reason.

    Example:
        ```python
        again = redrive(spark, "runs/7", out="runs/7-again", on_failure="skip")
        again.groupBy("status").count().show()
        ```
    """
    run_dir = RunDirectory.of(directory)
    plan = run_dir.plan()
    statuses = [status] if isinstance(status, str) else list(status)
    if not statuses or not {*statuses} <= {*_REDRIVABLE}:
        raise PlanError(
            f"status={statuses}: expected {' or '.join(_REDRIVABLE)}, whose rows contain the complete record"
        )
    if not run_dir.list(OUTCOMES):
        raise PlanError(f"the run in {run_dir} has no outcomes yet: run it first")
    rows = run_dir.rows(spark, OUTCOMES)
    chosen = rows.where(rows["status"].isin(statuses))
    if not chosen.limit(1).collect():
        raise PlanError(f"the run in {run_dir} has no records with the status {' or '.join(statuses)}")
    return apply_handlers(
        chosen,
        app or plan.app,
        out=out,
        tasks=tasks,
        on_failure=on_failure,
        total_concurrency=total_concurrency,
        bootstrap_servers=plan.bootstrap_servers,
    )
