"""The same handlers over history, on Spark: plan, drain, verify, hand over. Imports pyspark and pyarrow on use only."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioshard.spark.directory import RunDirectory
    from aioshard.spark.drain import DrainReport, Progress, drain, follow, status, stop
    from aioshard.spark.frame import apply_handlers
    from aioshard.spark.handover import Handover, handover
    from aioshard.spark.lease import lease
    from aioshard.spark.letters import send_letters
    from aioshard.spark.plan import Plan, PlannedHandler, PlannedRange
    from aioshard.spark.planning import plan
    from aioshard.spark.redriving import redrive
    from aioshard.spark.sampling import Sample, sample
    from aioshard.spark.session import register
    from aioshard.spark.sinks import PostgresqlTable
    from aioshard.spark.verification import Verification
    from aioshard.spark.verify import verify

_MODULES = {
    "DrainReport": "drain",
    "Handover": "handover",
    "Plan": "plan",
    "PlannedHandler": "plan",
    "PlannedRange": "plan",
    "PostgresqlTable": "sinks",
    "Progress": "drain",
    "RunDirectory": "directory",
    "Sample": "sampling",
    "Verification": "verification",
    "drain": "drain",
    "follow": "drain",
    "apply_handlers": "frame",
    "handover": "handover",
    "lease": "lease",
    "plan": "planning",
    "redrive": "redriving",
    "register": "session",
    "sample": "sampling",
    "send_letters": "letters",
    "status": "drain",
    "stop": "drain",
    "verify": "verify",
}
"""Where each name is: its module is imported when the name is used."""

__all__ = [
    "DrainReport",
    "Handover",
    "Plan",
    "PlannedHandler",
    "PlannedRange",
    "PostgresqlTable",
    "Progress",
    "RunDirectory",
    "Sample",
    "Verification",
    "apply_handlers",
    "drain",
    "follow",
    "handover",
    "lease",
    "plan",
    "redrive",
    "register",
    "sample",
    "send_letters",
    "status",
    "stop",
    "verify",
]

if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f"aioshard.spark.{_MODULES[name]}"), name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)

    class _Package(ModuleType):
        """`aioshard.spark.plan` is the function, also when the module `aioshard.spark.plan` has been imported."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (name in _MODULES and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
