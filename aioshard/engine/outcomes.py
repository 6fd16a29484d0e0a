"""How a delivery may end, and how it may continue after a failure."""

import enum
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple


class Block(NamedTuple):
    """Why a delivery occupies its shard without running."""

    halted: bool
    """True if its attempts are exhausted; False if it waits for the next one."""
    error: str
    since: float
    """Loop time of the failure."""
    postponed: bool = False
    """Whether it has not failed, but could not run."""


class Outcome(enum.Enum):
    """How a record ended."""

    PROCESSED = "processed"
    SKIPPED = "skipped"
    DEAD_LETTERED = "dead_lettered"
    PARKED = "parked"
    SUPERSEDED = "superseded"
    """A newer record of its key was waiting, and the handler keeps only the latest."""
    EXPIRED = "expired"
    """It was older than the handler's `max_age`."""
    RETURNED = "returned"
    """A parked record ran again and is parked again: it has not ended yet."""


PROCESSED: Final = Outcome.PROCESSED
"""The usual outcome; in Python 3.11 each access to an enum member costs a call."""


class Recovery(NamedTuple):
    """An action taken for a delivery instead of running its handler, such as writing its dead letter."""

    purpose: str
    """For explanations, such as "its dead letter is being written to orders.dlt"."""
    take: Callable[[Any], Awaitable[Outcome]]
    """Runs it for a delivery. An exception does not count as a failed attempt: the recovery is retried later."""


class FailedAttempt(NamedTuple):
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


# Decisions about a failed delivery ---------------------------------------------------


class RunAgain(NamedTuple):
    """It keeps its shard for a while, then its handler runs again."""

    why: str
    delay: float
    """Seconds."""


class Postpone(NamedTuple):
    """It keeps its shard for a while, then its handler runs again; no attempt was used."""

    why: str
    delay: float
    """Seconds."""


class RetryRecovery(NamedTuple):
    """It keeps its shard for a while, then its recovery, which failed, is tried again."""

    why: str
    delay: float
    """Seconds."""


class Halt(NamedTuple):
    """It keeps its shard until it is released."""

    why: str


class Recover(NamedTuple):
    """It takes a recovery immediately."""

    recovery: Recovery


class AwaitBreaker(NamedTuple):
    """Its partition pauses until the circuit breaker has closed; the delivery may be the probe."""

    recovery: Recovery | None
    """Taken then; None if it runs again. The handler must not see a delivery without a shard key."""


Decision = RunAgain | Postpone | RetryRecovery | Halt | Recover | AwaitBreaker
"""How a failed delivery continues."""
