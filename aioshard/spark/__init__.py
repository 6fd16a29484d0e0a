"""The same handlers over history, on Spark: plan, drain, verify, hand over. Imports pyspark and pyarrow on use only."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioshard.spark.directory import RunDirectory
    from aioshard.spark.plan import Plan, PlannedHandler, PlannedRange

_MODULES = {
    "Plan": "plan",
    "PlannedHandler": "plan",
    "PlannedRange": "plan",
    "RunDirectory": "directory",
}
"""Where each name is: its module is imported when the name is used."""

__all__ = ["Plan", "PlannedHandler", "PlannedRange", "RunDirectory"]

if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f"aioshard.spark.{_MODULES[name]}"), name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
