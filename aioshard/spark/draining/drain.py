"""A run over history: the planned ranges through the handlers, micro-batch by micro-batch, each written once."""

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
"""Spark takes whole ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        done: Offsets before the last border.
        total: Offsets of the plan.
        batch: Offsets of the micro-batch that runs now, 0 where none does.
        tasks_done: Of that micro-batch.
        tasks: Of that micro-batch; 0 where Spark does not tell.
        seconds: Since this drain began.
    """

    done: int
    total: int
    batch: int
    tasks_done: int
    tasks: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What a run has come to.

    Attributes:
        state: `finished`: all is done up to the planned ends. `stopped`: at a border before them.
        batches: Micro-batches with rows that are complete, over all drains of the run.
        records: Offsets of the plan.
        done: Offsets before the last border.
        statuses: Rows by status, of all batches.
        vector: The last border: topic, partition, offset.
        seconds: That this drain took.
    """

    state: Literal["finished", "stopped"]
    batches: int
    records: int
    done: int
    statuses: Mapping[str, int]
    vector: Mapping[str, Mapping[str, int]]
    seconds: float

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def drain(
    spark: "SparkSession",
    directory: str | PathLike[str] | RunDirectory,
    *,
    foreach: Foreach | None = None,
    progress: Callable[[Progress], None] | None = None,
    tell: Callable[[str], None] = logger.warning,
) -> DrainReport:
    """Run the handlers over what is left of a planned run; returns at its end, or at the border where it was stopped.

    The outcome rows of a micro-batch come into the directory whole or not at all. A crash, of a task or of the driver,
    repeats at most one micro-batch; start the same drain again to go on at the last border.

    Args:
        spark: A session without speculation.
        directory: Of the run; plan it first.
        foreach: Called with the rows of each micro-batch, read back from what was written, and its number, before
            the batch counts as done: at least once. No handler runs by that.
        progress: Told how far it is, about twice a second.
        tell: Takes sentences for the user; by default they are logged.

    Raises:
        HaltedError: A record failed for good and its handler halts, or the budget is spent. Its micro-batch is not
            committed; correct what it failed with and drain again.
        DataLossError: What was still to be read is not in the log any more: retention has deleted it, or somebody the
            topic.
        PlanError: There is no plan, the tasks run other code than the driver, or another process drains the run.
        DrainError: Something else ended it.

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
    """Run the handlers from a plan's starts on, over whatever comes, until `stop` or `StreamingQuery.stop`.

    Args:
        spark: A session without speculation.
        directory: Of the run; its planned ends are ignored.
        trigger: How often a micro-batch begins, such as `10 seconds`.
        foreach: As for `drain`.
        tell: As for `drain`.

    Returns:
        The running query; `awaitTermination` raises what ends it.

    Raises:
        PlanError: As `drain`, or the run was handed over.
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
    """Wait until `stop` was asked for, then end a query of `follow` at the border of a micro-batch.

    Raises:
        AioshardError: What ended it before; as `drain`.
    """
    place = RunDirectory.of(directory)
    try:
        while not query.awaitTermination(_LOOK_SECONDS):
            if place.exists(STOP):
                query.processAllAvailable()  # nothing new comes since the file is there
                query.stop()
                return
    except Exception as error:
        raise _translated(error, place) from error
    except BaseException:
        query.stop()
        raise


def stop(directory: str | PathLike[str] | RunDirectory) -> None:
    """Ask a drain to end at the next border of a micro-batch; returns at once, and works from any machine.

    Raises:
        PlanError: There is no plan in *directory*.
    """
    place = RunDirectory.of(directory)
    place.plan()
    place.write(STOP, "")


def status(directory: str | PathLike[str] | RunDirectory) -> dict[str, Any]:
    """How far a run is, from its directory alone: for programs.

    Raises:
        PlanError: There is no plan, or its checkpoint cannot be read.
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
            self.place.remove(STOP)  # whoever asks from now on is heard
            check_logs(self.plan, last_border(self.place))
            check_versions(spark, self.plan, tell)
        except BaseException:
            self._alone.close()
            raise

    def start(self, follow: str | None) -> "StreamingQuery":
        """Start the query; *follow* is the trigger of one without end."""
        try:
            if follow is not None:
                self.place.remove(VERIFIED)  # it goes on behind what was verified
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
        """Keep other processes off as long as it runs."""
        with contextlib.suppress(Exception), self._alone:
            query.awaitTermination()

    def wait(self, query: "StreamingQuery", progress: Callable[[Progress], None] | None) -> DrainReport:
        """Wait for the end, and say what it is."""
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
        """Tasks of what runs now that are done, and all of them."""
        try:
            tracker = self.spark.sparkContext.statusTracker()
            found = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # noqa: BLE001 - a remote session has none
            return 0, 0
        stages = [one for one in found if one is not None]
        return sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)


def _translated(error: Exception, place: RunDirectory) -> AioshardError:
    """What ended a query, in words of ours."""
    halted = read_halted(place)
    if halted:
        return HaltedError(map(str, halted))
    raised = raised_by_task(error)
    if raised is None:
        first = str(error).strip().partition("\n")[0]
        if _TOO_BUSY in str(error):
            # Spark gives the process in which a source plans ten seconds to start, whatever its settings say.
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
    """A border as far as the planned ends: one that follows the log goes beyond."""
    ends = ends_of(plan.ranges)
    return {
        topic: {number: min(offset, ends.get(topic, {}).get(number, offset)) for number, offset in offsets.items()}
        for topic, offsets in border.vector.items()
    }
