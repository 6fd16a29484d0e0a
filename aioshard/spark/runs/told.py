"""Recognize aioshard's errors in Spark's report of a failed task."""

import re
from typing import NamedTuple

__all__ = ["Raised", "raised_by_task"]

_NAMED = re.compile(r"aioshard\.errors\.(\w+): (.*?)(?:\n SQLSTATE|\n\s*\tat |\n\n|$)", re.DOTALL)


class Raised(NamedTuple):
    """The error that a task raised."""

    kind: str
    """The name of a class in `aioshard.errors`."""
    message: str


def raised_by_task(error: Exception) -> Raised | None:
    """Return the aioshard error that ended a Spark job, or None if it ended for another reason.

    Example:
        >>> raised_by_task(Exception("Job aborted: aioshard.errors.PlanError: there is no module 'orders'"))
        Raised(kind='PlanError', message="there is no module 'orders'")
    """
    found = _NAMED.findall(str(error))
    return Raised(found[-1][0], found[-1][1].strip()) if found else None
