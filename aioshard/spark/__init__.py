"""Run an app's handlers as a backfill on Spark: plan, run, verify, hand over. Imports pyspark and pyarrow on use."""

from aioshard.spark.frame import apply_handlers, redrive
from aioshard.spark.handovers import Handover, handover, send_dead_letters
from aioshard.spark.planning import plan
from aioshard.spark.plans import Plan, PlannedHandler, PlannedRange
from aioshard.spark.run_directory import RunDirectory
from aioshard.spark.runs import RunStatus, follow, run, status, stop
from aioshard.spark.session import register
from aioshard.spark.verification import Verification, verify

__all__ = [
    "Handover",
    "Plan",
    "PlannedHandler",
    "PlannedRange",
    "RunDirectory",
    "RunStatus",
    "Verification",
    "apply_handlers",
    "follow",
    "handover",
    "plan",
    "redrive",
    "register",
    "run",
    "send_dead_letters",
    "status",
    "stop",
    "verify",
]
