"""Output of the commands: JSON, tables, progress and exit codes."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click

from aioshard.errors import (
    AioshardError,
    DataLossError,
    GroupBusyError,
    GroupMovedError,
    HaltedError,
    HandlerError,
    MissingExtraError,
    MissingTopicError,
    NotDrainedError,
    NotVerifiedError,
    PlanError,
    SettingsError,
    TakenOverError,
    UnknownPartitionError,
)
from aioshard.records import counted

CRASHED: Final = 1
WRONG_USAGE: Final = 2
UNHEALTHY: Final = 3
NOT_DRAINED: Final = 4
DATA_LOST: Final = 5

_LONGEST = 60
_PROGRESS_INTERVAL = 3.0


def exit_code(error: AioshardError) -> int:
    """Return the exit code for an error.

    | code | meaning |
    | --- | --- |
    | 0 | success |
    | 1 | crashed: no broker answers, or an unexpected error |
    | 2 | wrong usage: invalid options, an unknown module, app or partition, or a refused setting, handler or plan |
    | 3 | unhealthy: halted records, failed dead letters, a failed verification; an app is not ready or lacks a topic |
    | 4 | not drained: records are uncommitted; or the group is busy or has moved; or another run has taken over |
    | 5 | data loss: records to be read are no longer in the log |
    | 130 | interrupted, or ended by a second signal |
    """
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), CRASHED)


_EXIT_CODES = {
    SettingsError: WRONG_USAGE,
    HandlerError: WRONG_USAGE,
    MissingExtraError: WRONG_USAGE,
    PlanError: WRONG_USAGE,
    UnknownPartitionError: WRONG_USAGE,
    HaltedError: UNHEALTHY,
    MissingTopicError: UNHEALTHY,
    NotVerifiedError: UNHEALTHY,
    NotDrainedError: NOT_DRAINED,
    GroupBusyError: NOT_DRAINED,
    GroupMovedError: NOT_DRAINED,
    TakenOverError: NOT_DRAINED,
    DataLossError: DATA_LOST,
}


# JSON ---------------------------------------------------------------------------------


def print_json(content: Any, *, indent: int | None = None) -> None:
    """Print *content* on standard output, with dataclasses as objects."""
    click.echo(json.dumps(content, indent=indent, default=dataclasses.asdict))


def print_result(content: Any, lines: Iterable[str], *, as_json: bool, indent: int | None = None) -> None:
    """Print the result of a command on standard output: *content* with `--json`, otherwise *lines*."""
    if as_json:
        print_json(content, indent=indent)
    else:
        for line in lines:
            click.echo(line)


# Text ---------------------------------------------------------------------------------


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        headings: One for each column.
        rows: Cells that are safe to show; see `as_text`. None is shown as `-`.
    """
    lines = [["-" if cell is None else str(cell) for cell in line] for line in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def moment_as_text(seconds: float) -> str:
    """Return a time, to the second, in the local time zone."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


def cut(text: str, longest: int = _LONGEST) -> str:
    """Return at most *longest* characters of *text*."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 1]}…"


def part_as_text(number: int, total: int, noun: str) -> str:
    """Return how many of *total* there are.

    Example:
        >>> part_as_text(2, 2, "record"), part_as_text(1, 3, "record")
        ('2 records', '1 of 3 records')
    """
    if number == total:
        return counted(number, noun)
    return f"{number:,} of {counted(total, noun)}"


# Progress -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def progress(label: str, done: Callable[[], int], *, total: int | None = None) -> AsyncIterator[None]:
    """Show a growing number on standard error every few seconds, and at the end if the total is known.

    Args:
        label: Name of the task.
        done: Returns the number of records; called from the event loop.
        total: The final number; None if unknown.

    Example:
        ```python
        async with progress("publishing", lambda: publisher.acknowledged, total=336_776):
            ...
        ```
    """
    began = time.perf_counter()

    def show() -> None:
        count = done()
        of = ""
        if total is not None:
            percent = 100 * count // max(total, 1)
            of = f" of {total:,} ({percent} %)"
        noun = "record" if count == 1 and total in {None, 1} else "records"
        rate = f"{count / max(time.perf_counter() - began, 0.001):,.0f} records/s"
        click.echo(f"{label}: {count:,}{of} {noun}, {rate}", err=True)

    async def tick() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            show()

    ticking = asyncio.create_task(tick(), name=f"progress of {label}")
    try:
        yield
    finally:
        ticking.cancel()
        if total is not None:
            show()
