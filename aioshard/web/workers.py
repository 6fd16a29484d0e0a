"""State of the workers, as reported by their supervisor."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Supervised", "WorkerState"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker, from the supervisor's point of view."""

    worker: str
    pid: int | None
    """None while it is not running."""
    socket: str
    """Path of the socket on which it serves."""
    restarts: int
    """Number of restarts."""
    trouble: str | None
    """Why it is not running, or was restarted lately, as a sentence."""


class Supervised(Protocol):
    """The part of a supervisor that the routes need; read from another thread."""

    @property
    def group_id(self) -> str:
        """The consumer group."""

    @property
    def draining(self) -> bool:
        """Whether it is shutting down."""

    def workers(self) -> Sequence[WorkerState]:
        """The workers, in order."""
