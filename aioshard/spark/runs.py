"""Run a backfill: the planned ranges go through the handlers in micro-batches, each written once."""

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from aioshard.errors import (
    DataLossError,
    HaltedError,
    PlanError,
    RunError,
    SettingsError,
    TransportError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.spark.frame import error_of_job, halted_records, shuffled_outcomes
from aioshard.spark.plans import Plan, PlannedRange, Vector, app_version, check_ends, ends_of, ranges_between
from aioshard.spark.run_directory import (
    CHECKPOINT,
    HALTED,
    HANDED_OVER,
    OUTCOMES,
    STAGING,
    STOP,
    SUMMARIES,
    VERIFIED,
    RunDirectory,
)
from aioshard.spark.session import check_speculation, slots_of
from aioshard.spark.work import blocking, module_paths, resolve_app, settings_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("aioshard.spark.runs")

Foreach = Callable[["DataFrame", int], None]
"""Receives the rows of a micro-batch and its number."""

_STOP_INTERVAL = 1
"""`awaitTermination` accepts only whole seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run, according to its directory.

    Attributes:
        plan: The id of the plan.
        app: Import name of the app.
        group: The group that the run stands in for.
        state: `finished` if everything up to the planned ends is done.
        records: Offsets of the plan.
        done: Offsets before the end of the last complete micro-batch.
        batches: Complete micro-batches with rows.
        vector: The end of the last complete micro-batch: topic, partition, offset.
        statuses: Rows by status.
        stopping: Whether a stop was requested.
        halted: The records that stopped the run, with their errors.
        verified: The result of the verification, as in the directory.
        handed_over: The result of the hand-over, as in the directory.
    """

    plan: str
    app: str
    group: str
    state: Literal["finished", "unfinished"]
    records: int
    done: int
    batches: int
    vector: Mapping[str, Mapping[str, int]]
    statuses: Mapping[str, int]
    stopping: bool
    halted: tuple[str, ...]
    verified: Mapping[str, Any] | None
    handed_over: Mapping[str, Any] | None


def run(
    spark: "SparkSession",
    directory: str | os.PathLike[str] | RunDirectory,
    *,
    foreach: Foreach | None = None,
    tell: Callable[[str], None] = logger.warning,
) -> RunStatus:
    """Run the handlers over the rest of a planned run; return when it ends or is stopped.

    The outcome rows of a micro-batch appear in the directory completely or not at all. A crash of a task or of the
    driver repeats at most one micro-batch; start the same run again to resume after the last complete one.

    Args:
        spark: A session without speculation.
        directory: The directory of the run; plan it first.
        foreach: Called with the rows of each micro-batch, read back from what was written, and its number, before the
            batch counts as done: at least once. Reading the rows does not run handlers.
        tell: Receives messages for the user; logs them by default.

    Raises:
        HaltedError: A record failed permanently and its handler halts, or nothing has completed for `stuck_after`
            seconds. Its micro-batch is not committed; fix the cause and run again.
        DataLossError: The log no longer has some of the remaining records: retention deleted them, or the topic was
            deleted.
        PlanError: The directory has no plan, the tasks run different code than the driver, or another process runs
            it.
        RunError: The run ended for another reason.

    Example:
        ```python
        report = run(local_session("local[*,4]"), "runs/7")
        print(report.statuses)
        ```
    """
    return _run(spark, RunDirectory.of(directory), foreach, tell)


def follow(
    spark: "SparkSession",
    directory: str | os.PathLike[str] | RunDirectory,
    *,
    trigger: str = "10 seconds",
    foreach: Foreach | None = None,
    tell: Callable[[str], None] = logger.warning,
) -> RunStatus:
    """Run the handlers from a plan's starts over all new records; return after a `stop`.

    Args:
        spark: A session without speculation.
        directory: The directory of the run; its planned ends are ignored.
        trigger: Interval between micro-batches, such as `10 seconds`.
        foreach: As for `run`.
        tell: As for `run`.

    Raises:
        PlanError: As for `run`, or the run was handed over.
        HaltedError: As for `run`.
        RunError: As for `run`.
    """
    run_dir = RunDirectory.of(directory)
    if run_dir.exists(HANDED_OVER):
        raise PlanError(f"the run in {run_dir} was handed over: new records belong to the live app")
    return _run(spark, run_dir, foreach, tell, follow=trigger)


def stop(directory: str | os.PathLike[str] | RunDirectory) -> None:
    """Request that a run stops after the current micro-batch. Returns immediately and works from any machine.

    Raises:
        PlanError: *directory* has no plan.
    """
    run_dir = RunDirectory.of(directory)
    run_dir.plan()
    run_dir.write(STOP, "")


def status(directory: str | os.PathLike[str] | RunDirectory) -> RunStatus:
    """Return the state of a run, from its directory alone.

    Raises:
        PlanError: The directory has no plan, or its checkpoint is unreadable.
    """
    run_dir = RunDirectory.of(directory)
    plan = run_dir.plan()
    done = offsets_done(run_dir)
    counts = [counts_of(run_dir, name) for name in run_dir.list(OUTCOMES)]
    statuses = sum((Counter(batch) for batch in counts), Counter[str]())
    return RunStatus(
        plan=plan.id,
        app=plan.app,
        group=plan.group_id,
        state="finished" if done == plan.records else "unfinished",
        records=plan.records,
        done=done,
        batches=sum(batch != {} for batch in counts),  # a run that is stopped early ends with an empty batch
        vector=run_dir.reached(plan),
        statuses=dict(sorted(statuses.items())),
        stopping=run_dir.exists(STOP),
        halted=tuple(read_halted(run_dir)),
        verified=run_dir.read_json(VERIFIED),
        handed_over=run_dir.read_json(HANDED_OVER),
    )


def offsets_done(run_dir: RunDirectory) -> int:
    """Return how many planned offsets are done; a run that follows the log goes past the planned ends."""
    plan = run_dir.plan()
    reached = run_dir.reached(plan)
    return sum(min(reached[at.topic][str(at.partition)], at.end) - at.start for at in plan.ranges)


def counts_of(run_dir: RunDirectory, name: str) -> Mapping[str, int] | None:
    """Return the row counts by status of a complete batch; None if its summary is missing."""
    counts: Mapping[str, int] | None = run_dir.read_json(f"{SUMMARIES}/{name}.json")
    return counts


def read_halted(run_dir: RunDirectory) -> list[str]:
    """Return the records that stopped a run; empty if none did."""
    return run_dir.read_json(HALTED) or []


# The query ----------------------------------------------------------------------------


def _run(
    spark: "SparkSession",
    run_dir: RunDirectory,
    foreach: Foreach | None,
    tell: Callable[[str], None],
    *,
    follow: str | None = None,
) -> RunStatus:
    """Run the query to its end; with *follow*, the trigger of an endless query, until a stop is requested."""
    with run_dir.alone():
        query = _start(spark, run_dir, foreach, tell, follow)
        try:
            while not query.awaitTermination(_STOP_INTERVAL):
                if follow is not None and run_dir.exists(STOP):
                    query.processAllAvailable()  # no new records are read once the file exists
                    query.stop()
        except Exception as error:
            halted = read_halted(run_dir)
            raise HaltedError(halted) if halted else error_of_job(error, f"the run in {run_dir}") from error
        except BaseException:  # such as `KeyboardInterrupt`
            query.stop()
            raise
    return status(run_dir)


def _start(
    spark: "SparkSession",
    run_dir: RunDirectory,
    foreach: Foreach | None,
    tell: Callable[[str], None],
    follow: str | None,
) -> "StreamingQuery":
    plan = run_dir.plan()
    if not run_dir.moves_atomically:
        raise PlanError(
            f"{run_dir} is in an object store, where a micro-batch cannot appear in one step: plan the run in a "
            "directory of a file system, local or HDFS, and copy the outcomes afterwards"
        )
    check_speculation({"spark.speculation": spark.conf.get("spark.speculation", "false") or "false"})
    run_dir.remove(STOP)  # stop requests count from now on
    check_logs(plan, run_dir.reached(plan))
    try:
        version = app_version(resolve_app(plan.app, module_paths()))
    except PlanError:  # this machine lacks the module
        version = plan.version
    if version != plan.version:
        tell(f"the code of {plan.app} has changed since the plan was made; the run continues with the new code")
    if follow is not None:
        run_dir.remove(VERIFIED)  # the run continues past the verified ends
    run_dir.remove(HALTED)
    frame, outcomes = planned_source(
        spark, run_dir, plan, slots_of(spark, len(plan.ranges)), version=version, follow=follow is not None
    )
    stream = frame.writeStream.queryName(f"aioshard {plan.id}").option("checkpointLocation", run_dir.uri(CHECKPOINT))
    try:
        stream = stream.trigger(availableNow=True) if follow is None else stream.trigger(processingTime=follow)
    except Exception as error:
        raise PlanError(f"trigger={follow!r} was refused ({error}): expected a time such as '10 seconds'") from error
    return stream.foreachBatch(lambda rows, batch: write_batch(run_dir, foreach, outcomes, rows, batch)).start()


def planned_source(
    spark: "SparkSession", run_dir: RunDirectory, plan: Plan, slots: int, *, version: str, follow: bool
) -> "tuple[DataFrame, Callable[[DataFrame], DataFrame]]":
    """Return a stream of a planned run, and a function that turns its micro-batches into outcome rows.

    Args:
        spark: The session.
        run_dir: The directory of the run.
        plan: Its plan.
        slots: Number of tasks that run in parallel.
        version: Version of the app that the tasks must have.
        follow: True to ignore the planned ends.
    """
    from aioshard.spark.source import request_of  # noqa: PLC0415 - pyspark is imported on use

    options = {
        "plan": run_dir.uri(),
        "halted": "row",
        "slots": str(slots),
        "module_paths": os.pathsep.join(module_paths()),
        "version": version,
        "follow": str(follow).lower(),
    }
    if all(handler.layout != "shuffle" for handler in plan.handlers):
        return spark.readStream.format("aioshard").options(**options).load(), lambda rows: rows
    work = request_of(options).work
    return (
        spark.readStream.format("aioshard").options(**options, app="").load(),
        lambda rows: shuffled_outcomes(rows, work, plan.tasks or slots),
    )


def write_batch(
    run_dir: RunDirectory,
    foreach: Foreach | None,
    outcomes: "Callable[[DataFrame], DataFrame]",
    frame: "DataFrame",
    batch: int,
) -> None:
    """Write one micro-batch: run the handlers by writing the rows, then move the rows to their final directory.

    Any program can read a directory that appears whole. Spark's own file sink keeps a log of the valid files, which
    only Spark reads.

    Args:
        run_dir: The directory of the run.
        foreach: Called with the rows before they count as done.
        outcomes: Turns the input of a batch into outcome rows.
        frame: The input of the batch.
        batch: Its number.

    Raises:
        HaltedError: Records halted; the batch is not committed.
    """
    name = f"batch={batch}"
    if run_dir.exists(f"{OUTCOMES}/{name}"):
        return  # the batch is complete, but the driver was lost before Spark recorded that
    outcomes(frame).write.mode("overwrite").parquet(run_dir.uri(f"{STAGING}/{name}"))
    written = run_dir.rows(frame.sparkSession, f"{STAGING}/{name}")
    counts = {row["status"]: int(row["count"]) for row in written.groupBy("status").count().collect()}
    if "halted" in counts:
        halted = halted_records(written)
        run_dir.write_json(HALTED, halted)
        raise HaltedError(halted)
    if foreach is not None:
        try:
            foreach(written, batch)
        except Exception as error:
            # Spark passes on only the text of an error; `error_of_job` recognizes this text.
            raise RunError(f"foreach of micro-batch {batch} failed ({type(error).__name__}: {error})") from error
    run_dir.write_json(f"{SUMMARIES}/{name}.json", counts)
    run_dir.move(f"{STAGING}/{name}", f"{OUTCOMES}/{name}")


# Logs ---------------------------------------------------------------------------------


def check_logs(plan: Plan, reached: Vector) -> None:
    """Refuse to process records that the log no longer has, before a task waits for records that never arrive.

    If the brokers are unknown or do not answer from here, nothing is refused: the tasks may still reach them.

    Args:
        plan: The plan of the run.
        reached: The progress of the run.

    Raises:
        DataLossError: A topic was deleted or recreated, or retention deleted some of the remaining records.
    """
    if remaining := ranges_between(reached, ends_of(plan.ranges)):
        blocking(lambda: _check_logs(plan, remaining))


async def _check_logs(plan: Plan, remaining: Sequence[PlannedRange]) -> None:
    ends = {planned.topic_partition: planned.end for planned in remaining}
    try:
        async with KafkaAdmin(settings_for(plan)) as brokers:
            gone = sorted({planned.topic for planned in remaining} - await brokers.topics())
            bounds = {} if gone else await brokers.bounds(ends)
    except (SettingsError, TransportError) as error:
        logger.info("cannot check whether the log still has the records: %s", error)
        return
    lost = [f"topic {topic!r} does not exist any more, or this user may not see it" for topic in gone]
    lost += [
        f"{planned.topic_partition}: offsets {planned.start} to {min(log.start, planned.end) - 1}"
        for planned in remaining
        if (log := bounds.get(planned.topic_partition)) is not None and planned.start < log.start
    ]
    if lost:
        raise DataLossError(lost, "Process the remaining records with a new plan")
    check_ends(bounds, ends)
