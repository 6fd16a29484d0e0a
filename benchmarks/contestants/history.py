"""A process that runs backfills of a whole topic, one for each line of its standard input.

`python -m benchmarks.contestants.history app|MASTER SPEC`: an app, or jobs of one Spark session. The result of each job
is a line of JSON.
"""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil

from aioshard import App
from benchmarks.contestants.handlers import make_work
from benchmarks.spec import IN_ENVIRONMENT, Measurement, Spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

APP = "benchmarks.contestants.history_app:app"
ROWS_PER_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
DEFAULT_ROWS = "10000"

Run = Callable[[Spec], Measurement]


def main() -> None:
    """Run jobs until the end of the input."""
    kind, text = sys.argv[1:]
    with run_app() if kind == "app" else run_on_spark(kind, text) as run:
        for line in sys.stdin:
            print(json.dumps(asdict(run(Spec.from_json(line)))), flush=True)


@contextlib.contextmanager
def run_app() -> Iterator[Run]:
    """Provide a function that runs an app with a new group until it has caught up."""

    def run(spec: Spec) -> Measurement:
        app = App(spec.group, bootstrap_servers=spec.bootstrap, auto_offset_reset="earliest")
        work = make_work(spec)
        app.consume(spec.topic, concurrency=spec.concurrency)(work.handler)
        began, used = time.perf_counter(), time.process_time()
        app.run(until_caught_up=True)
        return _measured(work.count(), began, time.process_time() - used, lost=work.missing, twice=work.repeated)

    yield run


@contextlib.contextmanager
def run_on_spark(master: str, text: str) -> Iterator[Run]:
    """Provide a function that runs jobs in one Spark session."""
    from aioshard.spark.session import local_session, register  # noqa: PLC0415 - pyspark is imported only if it is measured

    # The tasks read their spec from the environment, which they inherit from the session.
    os.environ[IN_ENVIRONMENT] = text
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))  # noqa: PTH109
    spark = local_session(master, "benchmarks")
    register(spark)

    def run(spec: Spec) -> Measurement:
        frame = _FRAMES[spec.contestant](spark, spec)
        began, used = time.perf_counter(), _tree_seconds()
        total = sum(spec.ends)
        if spec.work == "check":
            rows, different = _counted(frame)
            return _measured(rows, began, _tree_seconds() - used, lost=total - different, twice=rows - different)
        frame.write.format("noop").mode("overwrite").save()
        return _measured(total, began, _tree_seconds() - used)

    try:
        yield run
    finally:
        spark.stop()


def _measured(records: int, began: float, cpu: float, *, lost: int = 0, twice: int = 0) -> Measurement:
    return Measurement(
        records=records,
        cpu_seconds=cpu,
        cpu_records=records,
        wall_seconds=time.perf_counter() - began,
        wall_records=records,
        missing=lost,
        repeated=twice,
    )


def _counted(frame: "DataFrame") -> tuple[int, int]:
    """Return the number of rows, and of distinct records among them."""
    from pyspark.sql import functions  # noqa: PLC0415 - as above

    counted = frame.agg(functions.count("*"), functions.count_distinct("partition", "offset")).first()
    assert counted is not None
    return counted[0], counted[1]


def _tree_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, even ended ones: Spark's Java and its workers."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


# Jobs ---------------------------------------------------------------------------------


def _fused(spark: "SparkSession", spec: Spec) -> "DataFrame":
    from aioshard.spark.session import slots_of  # noqa: PLC0415 - as above

    slots = str(slots_of(spark, 1))  # as a planned run does
    options = {"app": APP, "bootstrap_servers": spec.bootstrap, "topics": spec.topic, "slots": slots}
    return spark.read.format("aioshard").options(**options).load()


def _raw(spark: "SparkSession", spec: Spec) -> "DataFrame":
    return spark.read.format("aioshard").options(bootstrap_servers=spec.bootstrap, topics=spec.topic).load()


def _mapped(spark: "SparkSession", spec: Spec) -> "DataFrame":
    from aioshard.spark.shuffle import handlers_over_rows  # noqa: PLC0415
    from aioshard.spark.source import OUTCOME_COLUMNS  # noqa: PLC0415
    from aioshard.spark.work import Work, module_paths  # noqa: PLC0415

    spark.conf.set(ROWS_PER_BATCH, DEFAULT_ROWS)
    work = Work(app=APP, module_paths=module_paths())
    return _raw(spark, spec).mapInArrow(functools.partial(handlers_over_rows, work), OUTCOME_COLUMNS)


def _gathered(rows: int) -> "Callable[[SparkSession, Spec], DataFrame]":
    def frame(spark: "SparkSession", spec: Spec) -> "DataFrame":
        from benchmarks.contestants.gathering import COLUMNS, Gathering  # noqa: PLC0415 - as above

        spark.conf.set(ROWS_PER_BATCH, str(rows))
        return _raw(spark, spec).mapInArrow(Gathering(spec.concurrency), COLUMNS)

    return frame


_FRAMES: "dict[str, Callable[[SparkSession, Spec], DataFrame]]" = {
    "aioshard, fused": _fused,
    "aioshard, fused, local[1]": _fused,
    "aioshard, mapInArrow": _mapped,
    "source alone": _raw,
    "gather per 1,000 rows": _gathered(1_000),
    "gather per 10,000 rows": _gathered(10_000),
}

if __name__ == "__main__":
    main()
