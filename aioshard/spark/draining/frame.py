"""Run handlers over any DataFrame of records: shuffle it so that the required order holds, and run it once."""

import logging
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Literal

from aioshard.app import App
from aioshard.errors import DrainError, HaltedError, PlanError
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.told import raised_by_task
from aioshard.spark.session import shuffle_partitions, slots_of
from aioshard.spark.tasks.work import Work, check_concurrency

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


__all__ = ["apply_handlers", "shuffled_outcomes"]

logger = logging.getLogger("aioshard.spark.frame")

_NEEDED = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "key": "binary",
    "value": "binary",
    "timestamp": "timestamp",
}
_HEADERS = "array<struct<key: string, value: binary>>"
_PARTIAL = ".partial"
"""Suffix of a directory whose rows are incomplete; only its writer reads it."""
_MOST_NAMED = 100
"""How many halted records a report names at most."""


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
        A frame in the columns of `aioshard.spark.source.data_source.OUTCOME_COLUMNS`.

    Raises:
        PlanError: A column is missing.
    """
    from pyspark.sql.types import DoubleType, LongType, StructType  # noqa: PLC0415 - imported on use

    from aioshard.spark.source.data_source import OUTCOME_COLUMNS  # noqa: PLC0415
    from aioshard.spark.tasks.shuffling import MOMENT, SHARD, HandlersOverRows, WithShards  # noqa: PLC0415

    records = _records(rows)
    if not in_offset_order:
        records = records.repartition(tasks, "topic", "partition").sortWithinPartitions("topic", "partition", "offset")
    sharded = StructType(list(records.schema.fields)).add(SHARD, LongType()).add(MOMENT, DoubleType())
    shuffled = records.mapInArrow(WithShards(work), sharded).repartition(tasks, SHARD)
    ordered = shuffled.sortWithinPartitions(MOMENT, "topic", "partition", "offset")
    return ordered.mapInArrow(HandlersOverRows(work), OUTCOME_COLUMNS)


def _records(rows: "DataFrame") -> "DataFrame":
    """Select the columns that make up a record."""
    from pyspark.sql import functions  # noqa: PLC0415 - imported on use

    missing = [name for name in _NEEDED if name not in rows.columns]
    if missing:
        raise PlanError(
            f"column {missing[0]!r} is missing among {', '.join(rows.columns)}: the columns of Spark's Kafka connector "
            f"were expected ({', '.join(_NEEDED)} and, where there are any, headers)"
        )
    headers = functions.col("headers") if "headers" in rows.columns else functions.lit(None)
    columns = [functions.col(name).cast(kind).alias(name) for name, kind in _NEEDED.items()]
    return rows.select(*columns, headers.cast(_HEADERS).alias("headers"))


def apply_handlers(
    df: "DataFrame",
    app: str | App,
    *,
    out: str | PathLike[str],
    tasks: int | None = None,
    on_failure: str | None = None,
    total_concurrency: int | None = None,
    bootstrap_servers: str | None = None,
    mode: Literal["error", "overwrite"] = "error",
) -> "DataFrame":
    """Run an app's handlers once over records from any source, and return their outcomes as written to *out*.

    The rows come from Spark's own `format("kafka")`, from `format("aioshard")`, or from any source with the same
    columns. They are ordered by timestamp, and by offset within a partition. Records that a handler's `shard_by` keeps
    in order are processed in that order by one task. Nothing is committed to a group, and dead letters are not sent:
    they are rows with the status `dead_lettered`.

    Args:
        df: `key`, `value`, `topic`, `partition`, `offset`, `timestamp` and optionally `headers`. It must not be a
            stream; a micro-batch in `foreachBatch` is not one.
        app: `MODULE:APP`, or an app that is an attribute of the module of one of its handlers.
        out: Directory for the outcome rows as Parquet. It appears once all of them are written.
        tasks: Number of tasks that run handlers; Spark's own parallelism by default.
        on_failure: `skip` or `dead-letter:TOPIC`; replaces the handlers' own policies.
        total_concurrency: Maximum handlers running in parallel in the whole job.
        bootstrap_servers: Brokers for handlers that publish; by default those of the tasks' environment and the app.
        mode: How to treat an existing *out*: `error` refuses it, `overwrite` replaces it.

    Returns:
        The rows in *out*; reading them does not run handlers again.

    Raises:
        HaltedError: A record failed permanently and its handler halts. *out* was not created.
        PlanError: The app or *df* is unsuitable, a topic has no handler, or *out* exists.
        DrainError: The job ended for another reason.

    Example:
        ```python
        rows = spark.read.format("kafka").option("subscribe", "orders").load()
        outcomes = apply_handlers(rows, "orders.app:app", out="outcomes/orders", on_failure="skip")
        outcomes.groupBy("status").count().show()
        ```
    """
    from aioshard.spark.source.data_source import OUTCOME_COLUMNS  # noqa: PLC0415
    from aioshard.spark.source.request import places  # noqa: PLC0415 - pyarrow is imported on use

    target = _checked(app, on_failure, total_concurrency)
    if df.isStreaming:
        raise PlanError(
            "a stream was found, a DataFrame with an end was expected: call apply_handlers in foreachBatch, with an "
            "out of its own for each batch, or drain a planned run"
        )
    spark = df.sparkSession
    _refuse_speculation(spark)
    place, name = _parent(out)
    if mode == "error" and place.exists(name):
        raise PlanError(f"{out} exists: its rows belong to another run. Name a new directory, or say mode='overwrite'")
    slots = slots_of(spark, shuffle_partitions(spark))
    work = Work(
        app=target,
        places=places(),
        settings={} if bootstrap_servers is None else {"bootstrap_servers": bootstrap_servers},
        on_failure=on_failure,
        total_concurrency=total_concurrency,
        at_once=min(tasks or slots, slots),
        halted_rows=True,
    )
    staged = place.uri(f"{name}{_PARTIAL}")
    rows = shuffled_outcomes(df, work, tasks or slots, in_offset_order=False)
    _named(lambda: rows.write.mode("overwrite").parquet(staged))
    written = spark.read.schema(OUTCOME_COLUMNS).parquet(staged)
    _refuse_halted(written)
    if mode == "overwrite":
        place.remove_directory(name)
    place.move(f"{name}{_PARTIAL}", name)
    return spark.read.schema(OUTCOME_COLUMNS).parquet(place.uri(name))


def _checked(app: str | App, on_failure: str | None, total_concurrency: int | None) -> str:
    """Return the `MODULE:APP` name of a suitable app."""
    from aioshard.spark.planning.planned_handlers import check_policies, target_of  # noqa: PLC0415
    from aioshard.spark.tasks.loading import resolve_app  # noqa: PLC0415 - with the app's own modules

    target, loaded = (app, resolve_app(app)) if isinstance(app, str) else (target_of(app), app)
    check_policies(loaded, on_failure)
    check_concurrency(loaded.handlers, total_concurrency)
    return target


def _refuse_speculation(spark: "SparkSession") -> None:
    from aioshard.spark.session import check_speculation  # noqa: PLC0415 - on use

    check_speculation({"spark.speculation": spark.conf.get("spark.speculation", "false") or "false"})


def _parent(out: str | PathLike[str]) -> tuple[RunDirectory, str]:
    """Return the parent of a directory, and the directory's name in it."""
    parent, _, name = RunDirectory(out).uri().rpartition("/")
    return RunDirectory(parent), name


def _refuse_halted(written: "DataFrame") -> None:
    """Refuse the outcomes if records halted.

    Raises:
        HaltedError: Records halted.
    """
    halted = written.where("status = 'halted'").orderBy("topic", "partition", "offset").limit(_MOST_NAMED).collect()
    if halted:
        raise HaltedError(
            f"{row['topic']}/{row['partition']}/{row['offset']} ({row['error_type']}: {row['error']})" for row in halted
        )


def _named(action: Callable[[], object]) -> None:
    """Run a Spark action; an aioshard error from a task becomes that error here."""
    try:
        action()
    except Exception as error:
        raised = raised_by_task(error)
        if raised is None:
            raise
        if raised.kind == PlanError.__name__:
            raise PlanError(raised.message) from error
        raise DrainError(f"the job ended: {raised.kind}: {raised.message}") from error
