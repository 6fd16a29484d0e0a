"""How a delivery may end, and what is known of it when it did not end well."""

import enum
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

__all__ = ["Block", "Detour", "FailureNote", "Outcome", "Untroubled"]


class Block(NamedTuple):
    """Why a delivery holds its shard without running."""

    halted: bool
    """True: its attempts are used up. False: it waits for the next one."""
    error: str
    since: float
    """Loop time of the failure."""


class Outcome(enum.Enum):
    """How a record reached its end."""

    PROCESSED = "processed"
    SKIPPED = "skipped"
    DEAD_LETTERED = "dead_lettered"
    PARKED = "parked"
    RETURNED = "returned"
    """A parked record was run again and is parked again: its end is to come."""


class Detour(NamedTuple):
    """What is done with a delivery in place of running its handler."""

    purpose: str
    """For explanations: "its dead letter is being written to orders.dlt"."""
    take: Callable[[Any], Awaitable[Outcome]]
    """Does it, for a delivery. What it raises is no failed attempt of the handler: it is done again, after a while."""


class FailureNote(NamedTuple):
    """The latest failed attempt of a record."""

    error: str
    """Name of the exception's class."""
    message: str
    attempts: int
    """How many had failed by then, this one included."""

    def __str__(self) -> str:
        # One line, for logs and explanations: drivers of databases write several. The traceback has them as they are.
        message = " ".join(self.message.split())
        return f"{self.error}: {message}" if message else self.error


class Untroubled:
    """What is so of a delivery until something goes wrong: as defaults of the class they cost a record nothing."""

    __slots__ = ()

    failures: int = 0
    """How many attempts have failed; a run that was cancelled is none."""
    cancelled: bool = False
    """Whether its latest run was cancelled, so that the next one is a repetition."""
    detour: Detour | None = None
    """What comes in place of the next run."""
    then: Detour | None = None
    """What has to be done after the handler has succeeded, before the record is complete."""
    detours: int = 0
    """How often the detour has failed."""
    block: Block | None = None
    limited_since: float | None = None
    """Loop time since which it waits for a token of its key's rate limit; None when it does not."""
    failure: FailureNote | None = None
    outcome: Outcome = Outcome.PROCESSED
    """How it ended, once it has."""
