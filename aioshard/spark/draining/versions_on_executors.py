"""Whether the tasks of a run find the app that it was planned with."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from aioshard.errors import PlanError
from aioshard.spark.runs.plan import Plan
from aioshard.spark.runs.versions import versions_of
from aioshard.spark.session import slots_of
from aioshard.spark.source.request import places
from aioshard.spark.tasks.loading import resolve_app

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_versions"]


def check_versions(spark: "SparkSession", plan: Plan, tell: Callable[[str], None]) -> None:
    """Have every executor import the app, and compare what it finds with what the driver has.

    An app that was corrected since it was planned is no error, only told: that is how a halted run goes on.

    Args:
        spark: The session.
        plan: Whose app; its versions count where the driver has no such module.
        tell: Takes a sentence for the user.

    Raises:
        PlanError: An executor cannot import the app, or has other code than the driver.
    """
    expected = dict(plan.versions)
    with contextlib.suppress(PlanError, ImportError):
        expected = versions_of(resolve_app(plan.app, places()))
    if expected.get("app") != plan.versions.get("app"):
        tell(f"the code of {plan.app} has changed since the plan was made; the run goes on with the new one")
    target, where = plan.app, places()

    def look(_: Iterator[Any]) -> Iterator[Any]:
        import socket  # noqa: PLC0415 - runs in a task

        import pyarrow as pa  # noqa: PLC0415

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

    tasks = slots_of(spark, 1)
    frame = spark.range(0, tasks, numPartitions=tasks)
    for row in frame.mapInArrow(look, "host string, aioshard string, app string, problem string").collect():
        if row["problem"]:
            raise PlanError(f"the app {target} cannot be used on {row['host']}: {row['problem']}")
        for what in ("aioshard", "app"):
            if row[what] != expected.get(what):
                raise PlanError(
                    f"the tasks on {row['host']} have another version of {what} than the driver ({row[what]}, and "
                    f"{expected.get(what)} here): ship the same code to both"
                )
