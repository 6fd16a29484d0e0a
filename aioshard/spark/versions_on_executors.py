"""Whether the tasks of a run find the app that it was planned with."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aioshard.errors import PlanError
from aioshard.spark.plan import Plan
from aioshard.spark.request import places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_versions"]


def check_versions(spark: "SparkSession", plan: Plan) -> None:
    """Have every executor import the app, and compare what it finds with the plan.

    Raises:
        PlanError: An executor cannot import the app, or has other code than the plan.
    """
    target, where = plan.app, places()

    def look(_: Iterator[Any]) -> Iterator[Any]:
        import socket  # noqa: PLC0415 - runs in a task

        import pyarrow as pa  # noqa: PLC0415

        from aioshard.spark.loading import resolve_app  # noqa: PLC0415
        from aioshard.spark.versions import versions_of  # noqa: PLC0415

        problem, found = "", {}
        try:
            found = versions_of(resolve_app(target, where))
        except Exception as error:  # noqa: BLE001 - whatever the module raises as it is imported
            problem = f"{type(error).__name__}: {error}"
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "host": socket.gethostname(),
                    "aioshard": found.get("aioshard", ""),
                    "app": found.get("app", ""),
                    "problem": problem,
                }
            ]
        )

    tasks = _executors(spark)
    frame = spark.range(0, tasks, numPartitions=tasks)
    for row in frame.mapInArrow(look, "host string, aioshard string, app string, problem string").collect():
        if row["problem"]:
            raise PlanError(f"the app {target} cannot be used on {row['host']}: {row['problem']}")
        for what in ("aioshard", "app"):
            if row[what] != plan.versions.get(what):
                raise PlanError(
                    f"the tasks on {row['host']} have another version of {what} than the plan ({row[what]}, and "
                    f"{plan.versions.get(what)} then): ship the planned code there, or plan anew"
                )


def _executors(spark: "SparkSession") -> int:
    """So many tasks that each executor has one, with what the public API tells."""
    try:
        return max(int(spark.sparkContext.defaultParallelism), 1)
    except Exception:  # noqa: BLE001 - a remote session has no context, in several ways
        return 1
