"""Drain a backfill: the planned ranges go through the handlers in micro-batches, each written once."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from aioshard.errors import AioshardError, DataLossError, DrainError, HaltedError, PlanError
from aioshard.spark.draining.batches import Foreach, WriteBatch, batches_with_rows, read_halted, summary_of
from aioshard.spark.draining.logs import check_logs
from aioshard.spark.draining.planned_source import planned_source
from aioshard.spark.runs.checkpoint import Border, last_border
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import CHECKPOINT, HALTED, HANDED_OVER, STOP, VERIFIED
from aioshard.spark.runs.plan import Plan
from aioshard.spark.runs.told import raised_by_task
from aioshard.spark.session import check_speculation, slots_of
from aioshard.spark.source.vectors import ends_of, ranges_between, starts_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["DrainReport", "Progress", "drain", "follow", "status", "stop", "until_stopped"]

logger = logging.getLogger("aioshard.spark.drain")

_LOOK_INTERVAL = 0.5
_TOO_BUSY = "Python worker failed to connect back"
_LOOK_SECONDS = 1
"""`awaitTermination` accepts only whole seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
        done: Offsets before the last border.
        total: Offsets of the plan.
        batch: Offsets of the current micro-batch, 0 if none is running.
        tasks_done: Completed tasks of that micro-batch.
        tasks: All tasks of that micro-batch; 0 if Spark does not report them.
        seconds: Time since this drain began.
    """

    done: int
    total: int
    batch: int
    tasks_done: int
    tasks: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """The result of a drain.

    Attributes:
        state: `finished`: everything up to the planned ends is done. `stopped`: the run ended at an earlier border.
        batches: Complete micro-batches with rows, over all drains of the run.
        records: Offsets of the plan.
        done: Offsets before the last border.
        statuses: Rows by status, of all batches.
        vector: The last border: topic, partition, offset.
        seconds: Duration of this drain.
    """

    state: Literal["finished", "stopped"]
    batches: int
    records: int
    done: int
    statuses: Mapping[str, int]
    vector: Mapping[str, Mapping[str, int]]
    seconds: float

    def asdict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return dataclasses.asdict(self)


def drain(
    spark: "SparkSession",
    directory: str | PathLike[str] | RunDirectory,
    *,
    foreach: Foreach | None = None,
    progress: Callable[[Progress], None] | None = None,
    tell: Callable[[str], None] = logger.warning,
) -> DrainReport:
    """Run the handlers over the rest of a planned run; return at its end, or at the border where it was stopped.

    The outcome rows of a micro-batch appear in the directory completely or not at all. A crash of a task or of the
    driver repeats at most one micro-batch; start the same drain again to resume at the last border.

    Args:
        spark: A session without speculation.
        directory: The directory of the run; plan it first.
        foreach: Called with the rows of each micro-batch, read back from what was written, and its number, before the
            batch counts as done: at least once. Reading the rows does not run handlers.
        progress: Called with the progress about twice a second.
        tell: Receives messages for the user; logs them by default.

    Raises:
        HaltedError: A record failed permanently and its handler halts, or the diversion budget is exhausted. Its
            micro-batch is not committed; fix the cause and drain again.
        DataLossError: The log no longer has some of the remaining records: retention deleted them, or the topic was
            deleted.
        PlanError: The directory has no plan, the tasks run different code than the driver, or another process drains
            the run.
        DrainError: The run ended for another reason.

    Example:
        ```python
        report = drain(local_session("local[*,4]"), "runs/7")
        print(report.statuses)
        ```
    """
    run = _Run(spark, directory, foreach, tell)
    query = run.start(follow=None)
    return run.wait(query, progress)


def follow(
    spark: "SparkSession",
    directory: str | PathLike[str] | RunDirectory,
    *,
    trigger: str = "10 seconds",
    foreach: Foreach | None = None,
    tell: Callable[[str], None] = logger.warning,
) -> "StreamingQuery":
    """Run the handlers from a plan's starts over all new records, until `stop` or `StreamingQuery.stop`.

    Args:
        spark: A session without speculation.
        directory: The directory of the run; its planned ends are ignored.
        trigger: Interval between micro-batches, such as `10 seconds`.
        foreach: As for `drain`.
        tell: As for `drain`.

    Returns:
        The running query; `awaitTermination` raises the error that ends it.

    Raises:
        PlanError: As for `drain`, or the run was handed over.
    """
    place = RunDirectory.of(directory)
    if place.exists(HANDED_OVER):
        raise PlanError(
            f"the run in {place} was handed over, and its group goes on where it ended: what comes is the live app's, "
            "and would be processed twice"
        )
    run = _Run(spark, place, foreach, tell)
    query = run.start(follow=trigger)
    threading.Thread(target=run.until_ended, args=(query,), name="aioshard follow", daemon=True).start()
    return query


def until_stopped(query: "StreamingQuery", directory: str | PathLike[str] | RunDirectory) -> None:
    """Wait for a `stop`, then end a `follow` query at the border of a micro-batch.

    Raises:
        AioshardError: The query failed earlier; errors are those of `drain`.
    """
    place = RunDirectory.of(directory)
    try:
        while not query.awaitTermination(_LOOK_SECONDS):
            if place.exists(STOP):
                query.processAllAvailable()  # no new records are read once the file exists
                query.stop()
                return
    except Exception as error:
        raise _translated(error, place) from error
    except BaseException:
        query.stop()
        raise


def stop(directory: str | PathLike[str] | RunDirectory) -> None:
    """Request that a drain stops at the next micro-batch border. Returns immediately and works from any machine.

    Raises:
        PlanError: *directory* has no plan.
    """
    place = RunDirectory.of(directory)
    place.plan()
    place.write(STOP, "")


def status(directory: str | PathLike[str] | RunDirectory) -> dict[str, Any]:
    """Return the progress of a run for programs, from its directory alone.

    Raises:
        PlanError: The directory has no plan, or its checkpoint is unreadable.
    """
    place = RunDirectory.of(directory)
    plan = place.plan()
    border = last_border(place)
    done = _done(plan, border)
    return {
        "plan": plan.id,
        "app": plan.app,
        "group": plan.group_id,
        "records": plan.records,
        "done": done,
        "finished": done == plan.records,
        "batches": batches_with_rows(place),
        "vector": starts_of(plan.ranges) if border is None else border.vector,
        "statuses": summary_of(place),
        "stopping": place.exists(STOP),
        "halted": [one.asdict() for one in read_halted(place)],
        "verified": place.read_json(VERIFIED),
        "handed_over": place.read_json(HANDED_OVER),
    }


class _Run:
    """One drain of a run."""

    def __init__(
        self,
        spark: "SparkSession",
        directory: str | PathLike[str] | RunDirectory,
        foreach: Foreach | None,
        tell: Callable[[str], None],
    ) -> None:
        from aioshard.spark.draining.versions_on_executors import check_versions  # noqa: PLC0415

        self.spark = spark
        self.place = RunDirectory.of(directory)
        self.plan = self.place.plan()
        if not self.place.moves_at_once:
            raise PlanError(
                f"{self.place} is in an object store, where a micro-batch cannot appear as a whole: plan the run in a "
                "directory of a file system, local or HDFS, and copy the outcomes when it has ended"
            )
        self._foreach = foreach
        self._began = time.monotonic()
        check_speculation({"spark.speculation": spark.conf.get("spark.speculation", "false") or "false"})
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(self.place.alone())
        try:
            self.place.remove(STOP)  # stop requests count from now on
            check_logs(self.plan, last_border(self.place))
            check_versions(spark, self.plan, tell)
        except BaseException:
            self._alone.close()
            raise

    def start(self, follow: str | None) -> "StreamingQuery":
        """Start the query; *follow* is the trigger of an unbounded one."""
        try:
            if follow is not None:
                self.place.remove(VERIFIED)  # the run continues past the verified ends
            return self._started(follow)
        except BaseException:
            self._alone.close()
            raise

    def _started(self, follow: str | None) -> "StreamingQuery":
        self.place.remove(HALTED)
        slots = slots_of(self.spark, len(self.plan.ranges))
        reader = self.spark.readStream
        frame, outcomes = planned_source(reader, self.place, self.plan, slots, follow=follow is not None)
        write = WriteBatch(self.place, self._foreach, outcomes)
        stream = frame.writeStream.queryName(f"aioshard {self.plan.id}").foreachBatch(write)
        stream = stream.option("checkpointLocation", self.place.uri(CHECKPOINT))
        if follow is None:
            return stream.trigger(availableNow=True).start()
        try:
            return stream.trigger(processingTime=follow).start()
        except Exception as error:
            if "INTERVAL" not in str(error):
                raise
            raise PlanError(f"trigger={follow!r} was found, a time such as '10 seconds' was expected") from error

    # Waiting ---------------------------------------------------------------------------

    def until_ended(self, query: "StreamingQuery") -> None:
        """Keep other processes off the run until the query ends."""
        with contextlib.suppress(Exception), self._alone:
            query.awaitTermination()

    def wait(self, query: "StreamingQuery", progress: Callable[[Progress], None] | None) -> DrainReport:
        """Wait for the end and report the result."""
        ended = threading.Event()
        teller = None
        if progress is not None:
            teller = threading.Thread(target=self._tell, args=(progress, ended), name="aioshard progress", daemon=True)
            teller.start()
        try:
            query.awaitTermination()
        except Exception as error:
            raise _translated(error, self.place) from error
        except BaseException:
            query.stop()
            raise
        finally:
            self._alone.close()
            ended.set()
            if teller is not None:
                teller.join()
        return self._report()

    def _report(self) -> DrainReport:
        border = last_border(self.place)
        done = _done(self.plan, border)
        return DrainReport(
            state="finished" if done == self.plan.records else "stopped",
            batches=batches_with_rows(self.place),
            records=self.plan.records,
            done=done,
            statuses=summary_of(self.place),
            vector=starts_of(self.plan.ranges) if border is None else border.vector,
            seconds=time.monotonic() - self._began,
        )

    def _tell(self, progress: Callable[[Progress], None], ended: threading.Event) -> None:
        while not ended.wait(_LOOK_INTERVAL):
            with contextlib.suppress(PlanError):
                progress(self._progress())
        with contextlib.suppress(PlanError):
            progress(self._progress())

    def _progress(self) -> Progress:
        done = _done(self.plan, last_border(self.place))
        tasks_done, tasks = self._tasks()
        return Progress(
            done=done,
            total=self.plan.records,
            batch=min(self.plan.max_rows_per_batch, self.plan.records - done) if tasks else 0,
            tasks_done=tasks_done,
            tasks=tasks,
            seconds=time.monotonic() - self._began,
        )

    def _tasks(self) -> tuple[int, int]:
        """Return how many tasks of the active stages are complete, and how many there are."""
        try:
            tracker = self.spark.sparkContext.statusTracker()
            found = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # noqa: BLE001 - a remote session has no status tracker
            return 0, 0
        stages = [one for one in found if one is not None]
        return sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)


def _translated(error: Exception, place: RunDirectory) -> AioshardError:
    """Translate the error that ended a query into one of aioshard's."""
    halted = read_halted(place)
    if halted:
        return HaltedError(map(str, halted))
    raised = raised_by_task(error)
    if raised is None:
        first = str(error).strip().partition("\n")[0]
        if _TOO_BUSY in str(error):
            # Spark gives the process that plans a source ten seconds to start, regardless of its settings.
            first = f"{first}; the machine was too busy to start a process of Python in time: start the same again"
        return DrainError(f"the run in {place} ended: {first or type(error).__name__}")
    if raised.kind == DataLossError.__name__:
        return DataLossError([raised.message], "Drain what is left with a new plan")
    return DrainError(f"the run in {place} ended: {raised.kind}: {raised.message}")


def _done(plan: Plan, border: Border | None) -> int:
    if border is None:
        return 0
    return sum(one.end - one.start for one in ranges_between(starts_of(plan.ranges), _within(border, plan)))


def _within(border: Border, plan: Plan) -> dict[str, dict[str, int]]:
    """Limit a border to the planned ends: a run that follows the log goes past them."""
    ends = ends_of(plan.ranges)
    return {
        topic: {number: min(offset, ends.get(topic, {}).get(number, offset)) for number, offset in offsets.items()}
        for topic, offsets in border.vector.items()
    }
