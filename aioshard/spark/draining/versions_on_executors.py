"""Check that the tasks of a run find the same app as the driver."""

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
    """Import the app on every executor, and compare its version with the driver's.

    An app that changed since the plan was made causes a message, not an error: a halted run resumes that way.

    Args:
        spark: The session.
        plan: The plan with the app; its versions are used if the driver does not have the module.
        tell: Receives messages for the user.

    Raises:
        PlanError: An executor cannot import the app, or has different code than the driver.
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
        except Exception as error:  # noqa: BLE001 - importing the module may raise anything
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
