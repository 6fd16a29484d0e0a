"""How far something has come: a bar in a terminal, a plain line every few seconds elsewhere. On standard error."""

import asyncio
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress"]

_TERMINAL_INTERVAL = 0.2
_LINE_INTERVAL = 3.0


class Progress:
    """Shows a number that grows while the context is open.

    Example:
        ```python
        async with Progress("publishing", lambda: publisher.acknowledged, total=336_776):
            ...
        ```
    """

    def __init__(
        self, label: str, done: Callable[[], int], *, total: int | None = None, note: Callable[[], str] = str
    ) -> None:
        """Make a progress display; nothing is shown yet.

        Args:
            label: What is going on.
            done: Gives the number of records; called from the event loop.
            total: Where it ends; None when that is not known.
            note: Gives what else there is to say.
        """
        self._label = label
        self._done = done
        self._total = total
        self._note = note
        self._began = 0.0
        self._bar: Bar | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to show."""
        self._began = time.perf_counter()
        if sys.stderr.isatty():
            self._bar = _bar()
            self._bar.add_task(self._label, total=self._total, rate="", note="")
            self._bar.start()
        self._ticking = asyncio.create_task(self._tick(), name=f"progress of {self._label}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show the last state; as a plain line only where a total says what it means."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        if self._bar is not None or self._total is not None:
            self._show()
        if self._bar is not None:
            self._bar.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_LINE_INTERVAL if self._bar is None else _TERMINAL_INTERVAL)
            self._show()

    def _show(self) -> None:
        done = self._done()
        rate = f"{done / max(time.perf_counter() - self._began, 0.001):,.0f} records/s"
        note = self._note()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, rate=rate, note=note, refresh=True)
            return
        of = f" of {self._total:,} ({100 * done // max(self._total, 1)} %)" if self._total is not None else ""
        click.echo(f"{self._label}: {done:,}{of} records, {rate}{', ' if note else ''}{note}", err=True)


def _bar() -> "Bar":
    from rich.console import Console  # noqa: PLC0415 - imported on use
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        console=Console(stderr=True),
        # Refreshed by hand: a thread of its own would take time from the event loop when it likes.
        auto_refresh=False,
    )
