"""What a supervisor tells of its workers."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Supervised", "WorkerState"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, as its supervisor sees it."""

    worker: str
    pid: int | None
    """None while it does not run."""
    socket: str
    """Where it answers."""
    restarts: int
    """How often it was started again."""
    trouble: str | None
    """Why it does not run, or was started again lately: a sentence."""


class Supervised(Protocol):
    """A supervisor, as far as the routes need it; read from another thread."""

    @property
    def group_id(self) -> str:
        """The consumer group."""

    @property
    def draining(self) -> bool:
        """Whether it is to end."""

    def workers(self) -> Sequence[WorkerState]:
        """The workers, in order."""
