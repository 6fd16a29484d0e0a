"""One run of an app in this process: its signals, its health server, and the report of how it ended."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import click

from aioshard.app import App
from aioshard.cli.exit_codes import INTERRUPTED, NOT_DRAINED, exit_code
from aioshard.cli.run_options import RunOptions
from aioshard.cli.tether import Tether
from aioshard.errors import AioshardError, NotDrainedError, StateError
from aioshard.loops import loop_factory
from aioshard.observe import Statistics
from aioshard.settings import misspelled_variables

__all__ = ["Signals", "base_url", "ends_at_once", "leave", "run_here"]

logger = logging.getLogger("aioshard.cli")


def run_here(options: RunOptions) -> int:
    """Run the app in this process to its end.

    Raises:
        AioshardError: What ended it.
        ClickException: There is no such app.
    """
    signals = Signals()
    tether = None if options.tether is None else Tether(options.tether)
    if tether is not None:
        tether.watch(signals.ask, lambda: leave(NOT_DRAINED))
    try:
        with ends_at_once():
            app = options.app()
        if tether is not None:
            tether.within = app.settings.shutdown_timeout
        for sentence in misspelled_variables():
            logger.warning("%s", sentence)
        with signals, asyncio.Runner(loop_factory=loop_factory()) as runner:
            run = _Run(app, signals, options, tether)
            try:
                runner.run(run.serve())
            except AioshardError as error:
                run.report(error)
                raise
            run.report(None)
    except (AioshardError, click.ClickException) as error:
        if tether is not None:
            tether.tell(error)
        raise
    return 0


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """While the app is imported: SIGTERM ends the process, cleanly since nothing runs that would have to be drained."""

    def receive(*_: object) -> NoReturn:
        os.write(2, b"SIGTERM: nothing runs yet; leaving at once\n")
        leave(0)

    before = signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Signals:
    """SIGINT and SIGTERM while the context is open: the first one asks, the second one leaves.

    The handlers are Python's, not the loop's: they are called although a handler blocks the loop.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """The first signal's name; empty when it was no signal that asked."""
        self.before_leaving: Callable[[], object] = lambda: None
        """Called at the second signal, in whatever the process is at."""
        self._signalled = False
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

    def ask(self) -> None:
        """As a first signal does, from any thread. A signal that comes beside it is no second one."""
        if self.received is None:
            logger.info("asked to end: draining and committing")
            self._ask("")

    def _receive(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        # Neither logging nor print here: the signal may have interrupted one of them.
        if self._signalled:
            os.write(2, f"{name} again: leaving at once; what still runs is not committed\n".encode())
            self.before_leaving()
            leave(INTERRUPTED)
        self._signalled = True
        if self.received is None:
            os.write(2, f"{name}: draining and committing; a second signal leaves at once\n".encode())
            self._ask(name)

    def _ask(self, received: str) -> None:
        self.received = received
        if self._first is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
                self._first()


class _Run:
    """One run of an app, from the health server's start to the report of how it ended."""

    def __init__(self, app: App, signals: Signals, options: RunOptions, tether: Tether | None) -> None:
        self._app = app
        self._signals = signals
        self._options = options
        self._tether = tether

    async def serve(self) -> None:
        """Serve the app, and its health where that is asked for, until a signal or an error."""
        async with _health(self._app, self._options, self._tether), contextlib.AsyncExitStack() as stack:
            if self._tether is not None:
                telling = asyncio.create_task(self._tether.tell_member(self._member), name="tell the member id")
                stack.push_async_callback(asyncio.wait, [telling])
                stack.callback(telling.cancel)
            await self._serve(until_caught_up=self._options.until_caught_up)

    def _member(self) -> str:
        # Not of the statistics: it is asked for many times a second, and those take long with many partitions.
        try:
            transport = self._app.running_engine().transport
        except StateError:
            return ""
        return "" if transport is None else transport.membership().member_id

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
            if self._tether is not None:
                self._tether.tell(error)
            leave(exit_code(error))
        if error is not None:
            raise error

    def report(self, error: AioshardError | None) -> None:
        """Tell how it ended: one line in the log, with `--json` one object on standard output."""
        statistics = self._app.statistics()
        if error is None:
            logger.info("%s", _summary(statistics))
        if self._options.as_json:
            body = {
                "exit_code": 0 if error is None else exit_code(error),
                "error": None if error is None else str(error),
                "records": list(getattr(error, "records", ())),
                "uncommitted": getattr(error, "uncommitted", {}),
                "signal": self._signals.received or None,
                "statistics": statistics.asdict(),
            }
            click.echo(json.dumps(body))


@contextlib.asynccontextmanager
async def _health(app: App, options: RunOptions, tether: Tether | None) -> AsyncIterator[None]:
    page = options.page()
    if not options.answers and options.health_socket is None:
        yield
        return
    import prometheus_client  # noqa: PLC0415 (imported on use)

    from aioshard.telemetry.metrics import AppCollector  # noqa: PLC0415
    from aioshard.web.health import serve_health  # noqa: PLC0415 (needs the extra `web`)

    # The process's own registry: what handlers count themselves is on the same page.
    registry = prometheus_client.REGISTRY
    AppCollector(app, registry=registry)
    routes = [] if page is None else page.routes(app)
    port = options.health_port or 0
    async with serve_health(
        app, host=options.host, port=port, uds=options.health_socket, registry=registry, routes=routes
    ) as (address, bound):
        if options.health_socket is None:
            logger.info("health server listens on %s", base_url(address, bound))
            if page is not None:
                logger.info("the page is at %s/", base_url(address, bound))
        yield
    if options.health_socket is not None and tether is not None and tether.orphaned:
        # The supervisor is gone without having tidied up: the last of its workers to end does it.
        with contextlib.suppress(OSError):
            Path(options.health_socket).parent.rmdir()


def base_url(address: str, port: int) -> str:
    """What users type to reach a server of ours."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


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
