"""One run of an app in this process: its signals, its health server, and the report of how it ended."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import Any, NoReturn, Self

import click

from aioshard.app import App
from aioshard.cli.main import INTERRUPTED, exit_code
from aioshard.errors import AioshardError, NotDrainedError
from aioshard.observe import Statistics

__all__ = ["Run", "Signals", "leave"]

logger = logging.getLogger("aioshard.cli")


class Signals:
    """SIGINT and SIGTERM while the context is open: the first one asks, the second one leaves.

    The handlers are Python's, not the loop's: they are called although a handler blocks the loop.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """The first signal's name."""
        self._first: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_first(self, action: Callable[[], None]) -> None:
        """Call *action* in the running loop at the first signal, or soon if that has come already."""
        self._first = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, action)
        if self.received is not None:
            self._first()

    def _receive(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Neither logging nor print here: the signal may have interrupted one of them.
        if self.received is not None:
            os.write(2, f"{name} again: leaving at once; what still runs is not committed\n".encode())
            leave(INTERRUPTED)
        self.received = name
        os.write(2, f"{name}: draining and committing; a second signal leaves at once\n".encode())
        if self._first is not None:
            self._first()


class Run:
    """One run of an app, from the health server's start to the report of how it ended."""

    def __init__(self, app: App, signals: Signals, *, as_json: bool) -> None:
        self._app = app
        self._signals = signals
        self._as_json = as_json

    async def serve(self, host: str, port: int | None, *, until_caught_up: bool) -> None:
        """Serve the app, and its health where *port* is given, until a signal or an error."""
        async with _health(self._app, host, port):
            await self._serve(until_caught_up=until_caught_up)

    async def _serve(self, *, until_caught_up: bool) -> None:
        app = self._app
        serving = asyncio.create_task(app.serve(until_caught_up=until_caught_up), name="serve")

        def stop() -> None:
            if app.statistics().state in {"running", "draining"}:
                app.stop()
            else:
                # Nothing is consumed before the start is through, and a start may wait long for a broker.
                serving.cancel()

        self._signals.on_first(stop)
        await asyncio.wait([serving])
        if serving.cancelled():
            return
        error = serving.exception()
        if isinstance(error, NotDrainedError):
            # A run that ignores its cancellation keeps the loop and, as a thread, the interpreter alive.
            self.report(error)
            click.echo(f"Error: {error}", err=True)
            leave(exit_code(error))
        if error is not None:
            raise error

    def report(self, error: AioshardError | None) -> None:
        """Tell how it ended: one line in the log, with `--json` one object on standard output."""
        statistics = self._app.statistics()
        if error is None:
            logger.info("%s", _summary(statistics))
        if self._as_json:
            body = {
                "exit_code": 0 if error is None else exit_code(error),
                "error": None if error is None else str(error),
                "records": list(getattr(error, "records", ())),
                "signal": self._signals.received,
                "statistics": statistics.asdict(),
            }
            click.echo(json.dumps(body))


@contextlib.asynccontextmanager
async def _health(app: App, host: str, port: int | None) -> AsyncIterator[None]:
    if port is None:
        yield
        return
    import prometheus_client  # noqa: PLC0415 (imported on use)

    from aioshard.telemetry.metrics import AppCollector  # noqa: PLC0415
    from aioshard.web.health import serve_health  # noqa: PLC0415 (needs the extra `web`)

    # The process's own registry: what handlers count themselves is on the same page.
    AppCollector(app, registry=prometheus_client.REGISTRY)
    async with serve_health(app, host=host, port=port, registry=prometheus_client.REGISTRY) as (address, bound):
        logger.info("health server listens on http://%s:%d", f"[{address}]" if ":" in address else address, bound)
        yield


def _summary(statistics: Statistics) -> str:
    processed = sum(handler.processed for handler in statistics.handlers)
    return (
        f"group {statistics.group_id!r} ended cleanly: {processed} record(s) processed, "
        f"{statistics.commits} commit(s), {statistics.rebalances} rebalance(s)"
    )


def leave(code: int) -> NoReturn:
    """End the process now, whatever still runs in it."""
    for stream in (sys.stdout, sys.stderr):
        # A signal can come in the middle of a write to the same stream.
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
