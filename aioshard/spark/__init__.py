"""Run an app's handlers as a backfill on Spark: plan, drain, verify, hand over. Imports pyspark and pyarrow on use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioshard.spark.draining.drain import DrainReport, Progress, drain, follow, status, stop
    from aioshard.spark.draining.frame import apply_handlers
    from aioshard.spark.draining.redriving import redrive
    from aioshard.spark.ending.handover import Handover, handover
    from aioshard.spark.ending.letters import send_letters
    from aioshard.spark.ending.verify import verify
    from aioshard.spark.planning.lease import lease
    from aioshard.spark.planning.planning import plan
    from aioshard.spark.runs.directory import RunDirectory
    from aioshard.spark.runs.plan import Plan, PlannedHandler, PlannedRange
    from aioshard.spark.runs.verification import Verification
    from aioshard.spark.session import register

_MODULES = {
    "DrainReport": "draining.drain",
    "Handover": "ending.handover",
    "Plan": "runs.plan",
    "PlannedHandler": "runs.plan",
    "PlannedRange": "runs.plan",
    "Progress": "draining.drain",
    "RunDirectory": "runs.directory",
    "Verification": "runs.verification",
    "drain": "draining.drain",
    "follow": "draining.drain",
    "apply_handlers": "draining.frame",
    "handover": "ending.handover",
    "lease": "planning.lease",
    "plan": "planning.planning",
    "redrive": "draining.redriving",
    "register": "session",
    "send_letters": "ending.letters",
    "status": "draining.drain",
    "stop": "draining.drain",
    "verify": "ending.verify",
}
"""The module that defines each name; it is imported when the name is first used."""

__all__ = [
    "DrainReport",
    "Handover",
    "Plan",
    "PlannedHandler",
    "PlannedRange",
    "Progress",
    "RunDirectory",
    "Verification",
    "apply_handlers",
    "drain",
    "follow",
    "handover",
    "lease",
    "plan",
    "redrive",
    "register",
    "send_letters",
    "status",
    "stop",
    "verify",
]

if not TYPE_CHECKING:  # a type checker would conclude that any name exists

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f"aioshard.spark.{_MODULES[name]}"), name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
