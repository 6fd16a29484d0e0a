"""`aioshard run --reload`: the app in a process that is started again when its code changes, for development."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import click

from aioshard.cli.exit_codes import NOT_DRAINED
from aioshard.cli.run_options import RunOptions
from aioshard.cli.running import Signals
from aioshard.cli.tether import MARGIN, Child, Ending
from aioshard.errors import MissingExtraError

__all__ = ["run_reloading"]

logger = logging.getLogger("aioshard.cli")

_DRAINS_WITHIN = 60.0 + MARGIN
_SHOWN = 3
_NO_STALE_CODE = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Compiled code counts as that of a file of the same second and size, and edits may come as quickly."""


def run_reloading(options: RunOptions) -> int:
    """Run the app in a child until a signal, and again after each change of its code.

    Returns:
        The exit code: 4 when the app was not drained in time at the end, else 0.

    Raises:
        MissingExtraError: watchfiles is not installed.
        ClickException: The system starts no process.
    """
    try:
        import watchfiles  # noqa: F401, PLC0415 - imported on use
    except ImportError as error:
        raise MissingExtraError("--reload", "reload") from error
    signals = Signals()
    # Not uvloop: nothing here is in a hurry, and the child has its own.
    with signals, asyncio.Runner() as runner:
        return runner.run(_Reloading(options, signals).run())


class _Reloading:
    """One child after the other. Owned by one event loop."""

    def __init__(self, options: RunOptions, signals: Signals) -> None:
        self._directories = [Path(one).resolve() for one in options.reload_dirs or (options.app_dir,)]
        port = [] if options.health_port is None else ["--health-port", str(options.health_port)]
        self._arguments = [
            *options.arguments(),
            *port,
            "--host",
            options.host,
            *(["--json"] if options.as_json else []),
        ]
        self._signals = signals
        self._stopping = asyncio.Event()
        self._child: Child | None = None

    async def run(self) -> int:
        self._signals.before_leaving = self._kill
        self._signals.on_first(self._stopping.set)
        logger.info("watching %s for changes; Ctrl-C ends", ", ".join(map(str, self._directories)))
        changes = self._changes()
        stop = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            while True:
                change = asyncio.create_task(anext(changes), name="wait for a change")
                code = await self._live(change, stop)
                if stop.done():
                    change.cancel()
                    await asyncio.wait([change])
                    return code
                logger.info("%s changed: starting again", _named(change.result()))
        finally:
            stop.cancel()
            await changes.aclose()

    async def _live(self, change: asyncio.Task[list[Path]], stop: asyncio.Task[bool]) -> int:
        """Start the app and run it until a change, or until all shall end; what counts as its exit code."""
        try:
            self._child = child = await Child.start(self._arguments, _NO_STALE_CODE)
        except OSError as error:
            change.cancel()
            await asyncio.wait([change])
            message = f"no process can be started with {sys.executable}: {error.strerror}; nothing runs any more"
            raise click.ClickException(message) from None
        ended = asyncio.create_task(child.ended(), name="end of the app")
        await asyncio.wait([ended, change, stop], return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not stop.done():
            logger.warning("the app ended with exit code %d; waiting for a change", ended.result().code)
            await asyncio.wait([change, stop], return_when=asyncio.FIRST_COMPLETED)
        child.drain()
        await asyncio.wait([ended], timeout=_DRAINS_WITHIN)
        if not ended.done():
            child.kill()
        ending: Ending = await ended
        self._child = None
        return NOT_DRAINED if ending.code == NOT_DRAINED else 0

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)

    async def _changes(self) -> AsyncGenerator[list[Path]]:
        from watchfiles import PythonFilter, awatch  # noqa: PLC0415 - needs the extra `reload`

        async for found in awatch(*self._directories, watch_filter=PythonFilter(), stop_event=self._stopping):
            yield sorted({Path(path) for _, path in found})
        await asyncio.Event().wait()  # stopped: there are no more, and whoever waits is told by other means


def _named(paths: list[Path]) -> str:
    names = [path.name for path in paths[:_SHOWN]]
    return ", ".join(names) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
