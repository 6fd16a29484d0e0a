"""The input of a planned run, and its conversion to outcome rows if the source does not do that itself."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioshard.spark.draining.frame import shuffled_outcomes
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.plan import Plan
from aioshard.spark.source.request import places, request_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader
    from pyspark.sql.streaming.readwriter import DataStreamReader

__all__ = ["planned_source"]


def planned_source(
    reader: "DataFrameReader | DataStreamReader", place: RunDirectory, plan: Plan, slots: int, *, follow: bool = False
) -> "tuple[DataFrame, Callable[[DataFrame], DataFrame]]":
    """Return a lazy frame of a planned run, and a function that turns it into outcome rows.

    Args:
        reader: `spark.read` or `spark.readStream`.
        place: The directory of the run.
        plan: Its plan.
        slots: Number of tasks that run in parallel.
        follow: True to ignore the planned ends.
    """
    where = os.pathsep.join(places())
    options = {"plan": place.uri(), "halted": "row", "slots": str(slots), "places": where}
    if follow:
        options["follow"] = "true"
    if all(handler.layout != "shuffle" for handler in plan.handlers):
        return reader.format("aioshard").options(**options).load(), lambda rows: rows
    work = request_of(options).work
    assert work is not None  # noqa: S101 - a plan has an app
    raw = reader.format("aioshard").options(**(options | {"app": ""})).load()
    return raw, lambda rows: shuffled_outcomes(rows, work, plan.tasks or slots)
