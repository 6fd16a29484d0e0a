"""What every task of a job is told. Imports nothing of Spark or Arrow: a plan is made without them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["DEAD_LETTER", "Work"]

DEAD_LETTER = "dead-letter:"
"""Begins an `on_failure` that names a dead-letter topic."""


class Work(NamedTuple):
    """What every task of a job is told; it goes over the wire, and holds no secret."""

    app: str
    """`MODULE:APP`."""
    places: tuple[str, ...] = ()
    """Directories of the driver in which modules are looked for, where a task has them too."""
    settings: Mapping[str, Any] = {}
    """Those of the plan; all others come from the task's environment and the app's own code."""
    on_failure: str | None = None
    """In place of the handlers' own: `skip` or `dead-letter:TOPIC`."""
    total_concurrency: int | None = None
    """Runs of handlers at the same time in the whole job."""
    at_once: int = 1
    """Tasks that run at the same time: they share the total concurrency and the rates."""
    halted_rows: bool = False
    """Whether a halted record becomes a row, and ends the task well; else it is an error."""
