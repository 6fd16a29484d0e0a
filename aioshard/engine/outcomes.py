"""How a delivery may end, and its state after a failure."""

import enum
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

__all__ = ["Block", "Detour", "FailureNote", "Outcome", "Untroubled"]


class Block(NamedTuple):
    """Why a delivery occupies its shard without running."""

    halted: bool
    """True if its attempts are exhausted; False if it waits for the next one."""
    error: str
    since: float
    """Loop time of the failure."""


class Outcome(enum.Enum):
    """How a record ended."""

    PROCESSED = "processed"
    SKIPPED = "skipped"
    DEAD_LETTERED = "dead_lettered"
    PARKED = "parked"
    RETURNED = "returned"
    """A parked record ran again and is parked again: it has not ended yet."""


class Detour(NamedTuple):
    """An action that is taken for a delivery instead of running its handler."""

    purpose: str
    """For explanations, such as "its dead letter is being written to orders.dlt"."""
    take: Callable[[Any], Awaitable[Outcome]]
    """Takes it for a delivery. An exception is not a failed attempt of the handler: the detour is retried later."""


class FailureNote(NamedTuple):
    """The latest failed attempt of a record."""

    error: str
    """Name of the exception's class."""
    message: str
    attempts: int
    """How many attempts had failed by then, including this one."""

    def __str__(self) -> str:
        # One line for logs and explanations: database drivers write several. The traceback keeps them.
        message = " ".join(self.message.split())
        return f"{self.error}: {message}" if message else self.error


class Untroubled:
    """Default failure state of a delivery; class attributes cost nothing per record."""

    __slots__ = ()

    failures: int = 0
    """How many attempts have failed; cancelled runs do not count."""
    cancelled: bool = False
    """Whether its latest run was cancelled, so that the next one is a repetition."""
    detour: Detour | None = None
    """Taken instead of the next run."""
    then: Detour | None = None
    """Taken after the handler has succeeded, before the record is complete."""
    detours: int = 0
    """How often the detour has failed."""
    block: Block | None = None
    limited_since: float | None = None
    """Loop time since which it waits for a token of its key's rate limit; None if it does not wait."""
    failure: FailureNote | None = None
    outcome: Outcome = Outcome.PROCESSED
    """How it ended, once it has."""
