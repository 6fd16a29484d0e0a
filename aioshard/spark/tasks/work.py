"""Instructions for the tasks of a job. Imports neither Spark nor Arrow, because planning works without them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from aioshard.errors import PlanError
from aioshard.handlers import Registration

__all__ = ["DEAD_LETTER", "Work", "check_concurrency"]

DEAD_LETTER = "dead-letter:"
"""Prefix of an `on_failure` value that names a dead-letter topic."""


class Work(NamedTuple):
    """Instructions that every task of a job receives; they are serialized and contain no secrets."""

    app: str
    """`MODULE:APP`."""
    places: tuple[str, ...] = ()
    """The driver's module directories; a task searches those that exist on its machine."""
    settings: Mapping[str, Any] = {}
    """Settings of the plan; all others come from the task's environment and the app's own code."""
    on_failure: str | None = None
    """Replaces the handlers' own policies: `skip` or `dead-letter:TOPIC`."""
    total_concurrency: int | None = None
    """Maximum handlers running in parallel in the whole job."""
    at_once: int = 1
    """Number of tasks that run in parallel; they share the total concurrency and the rate limits."""
    halted_rows: bool = False
    """If true, a halted record becomes a row and the task succeeds; otherwise it is an error."""
    topics: tuple[str, ...] | None = None
    """Topics of a task, or None if records of any topic may arrive."""

    def concurrency_of(self, handlers: Iterable[Registration]) -> int | None:
        """Return how many runs of each handler a task may have in parallel, or None without a total.

        Args:
            handlers: The handlers of the app. Those that the task has records for divide the task's share equally.
        """
        if self.total_concurrency is None:
            return None
        topics = self.topics
        serving = sum(topics is None or any(map(handler.takes, topics)) for handler in handlers)
        return max(self.total_concurrency // (self.at_once * max(serving, 1)), 1)


def check_concurrency(handlers: Iterable[Registration], total_concurrency: int | None) -> None:
    """Refuse a total concurrency that cannot be enforced.

    Raises:
        PlanError: A handler has fixed shards, each of which is a worker in every task.
    """
    fixed = [handler for handler in handlers if handler.shards is not None]
    if total_concurrency is not None and fixed:
        name, shards = fixed[0].name, fixed[0].shards
        raise PlanError(
            f"total_concurrency={total_concurrency} was found, and handler {name!r} has shards={shards}: each fixed "
            "shard is a worker of its own in every task, so nothing would keep that total. Leave it out, or give the "
            "handler concurrency= instead of shards="
        )
