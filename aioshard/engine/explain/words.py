"""Phrases that several explanations share."""

import re

from aioshard.core.loop_block import LoopBlock
from aioshard.engine.epoch import Delivery
from aioshard.observe import Stack

MOST_NAMED = 10
"""Maximum number of halted records named per error, because each must be released individually; and of errors."""

_BRIEF = 0.05
_VARIABLE = re.compile(r"[\w-]*\d[\w-]*")


def for_seconds(since: float | None) -> str:
    """Return `" for 1.5 s"`, or an empty string if the duration is unknown."""
    if since is None:
        return ""
    return f" for {since:.1f} s" if since >= _BRIEF else " for a moment"


def without_numbers(error: str) -> str:
    """Replace numbers and identifiers in an error: errors that differ only in these count as equal."""
    return _VARIABLE.sub("#", error)


def arguments_of(delivery: Delivery) -> str:
    """Return the arguments with which the methods of `App` name a record."""
    record = delivery.record
    return f"({record.topic!r}, {record.partition}, {record.offset})"


def place_of(stack: Stack) -> str:
    """Format a stack as `, at file:line in function, waiting in ...`."""
    if stack.place is None:
        return ""
    called = "" if stack.waits_in is None else f" in {stack.waits_in}"
    if stack.thread is not None:
        return f" in thread {stack.thread}, at {stack.place}{called}"
    if stack.executing or not called:
        return f", at {stack.place}{called}"
    return f", at {stack.place}, waiting{called}"


def blocking_place_of(block: LoopBlock) -> str:
    """Format the code of a handler that blocks the event loop."""
    if block.code is None:
        return ""
    called = "" if block.code.called is None else f" in {block.code.called}"
    return f", at {block.code.place}, which {block.verb}{called} without an await"
