"""What every task of a job is told. Imports nothing of Spark or Arrow: a plan is made without them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from aioshard.errors import PlanError
from aioshard.handlers import Registration

__all__ = ["DEAD_LETTER", "Work", "check_concurrency"]

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
    topics: tuple[str, ...] | None = None
    """Those of a task; None where any may come."""

    def concurrency_of(self, handlers: Iterable[Registration]) -> int | None:
        """How many runs of each handler a task may have at the same time; None where nothing bounds them all.

        Args:
            handlers: Of the app. Those that the task has records for share what is its part of the total.
        """
        if self.total_concurrency is None:
            return None
        topics = self.topics
        serving = sum(topics is None or any(map(handler.takes, topics)) for handler in handlers)
        return max(self.total_concurrency // (self.at_once * max(serving, 1)), 1)


def check_concurrency(handlers: Iterable[Registration], total_concurrency: int | None) -> None:
    """Refuse a total that could not be kept.

    Raises:
        PlanError: A handler has fixed shards: each is a worker, in every task.
    """
    fixed = [handler for handler in handlers if handler.shards is not None]
    if total_concurrency is not None and fixed:
        name, shards = fixed[0].name, fixed[0].shards
        raise PlanError(
            f"total_concurrency={total_concurrency} was found, and handler {name!r} has shards={shards}: each fixed "
            "shard is a worker of its own in every task, so nothing would keep that total. Leave it out, or give the "
            "handler concurrency= instead of shards="
        )
