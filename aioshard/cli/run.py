"""`aioshard run`: an app as a process, with signals, a health server and exit codes."""

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.health import HealthServer
from aioshard.cli.loading import load_app, load_function
from aioshard.cli.output import exit_code, print_json
from aioshard.cli.supervisor import WORKER_VARIABLE, Parent, Supervisor, run_reloading
from aioshard.errors import AioshardError, NotDrainedError
from aioshard.loops import loop_factory
from aioshard.settings import misspelled_variables
from aioshard.signals import Signals, exit_now
from aioshard.telemetry import logs

logger = logging.getLogger("aioshard.cli")

TOKEN_VARIABLE = "AIOSHARD_WEB_TOKEN"  # noqa: S105 - a name

Load = Callable[[], App]
"""Imports and configures the app."""
ServeHealth = Callable[[App], contextlib.AbstractAsyncContextManager[object]]
"""Serves the health of an app while the context is open."""


@click.command()
@options.target
@options.bootstrap_servers("the app's setting")
@click.option(
    "--assign", metavar="TOPIC:PARTITIONS,…", help="Assign partitions manually, without a group: orders:0-2,payments:1."
)
@click.option("--until-caught-up", is_flag=True, help="Process up to the end offsets seen at the start, then end.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Run N processes, each a member of the group, and restart those that end.",
)
@click.option("--reload", is_flag=True, help="For development: restart when a Python file changes.")
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve /livez, /readyz, /metrics, /statistics.json and /explain on this port; 0 takes a free one. "
    "Worker number K of --workers uses the port plus K.",
)
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address of the health server.")
@click.option(
    "--web",
    is_flag=True,
    help="Serve the dashboard at / of the health server; without --health-port on a free port. It is read-only unless "
    f"{TOKEN_VARIABLE} has a token of at least 16 characters.",
)
@click.option(
    "--member",
    "members",
    metavar="URL",
    type=lambda text: HealthServer(text, timeout=0.0).base,
    multiple=True,
    help="With --web: show this process of the group too, by the base URL of its health server. A host name stands for "
    "all of its addresses, such as http://billing-headless:8080; repeatable.",
)
@click.option(
    "--transform",
    "transforms",
    metavar="MODULE:FUNCTION",
    multiple=True,
    help="With --web: allow operators to change dead letters with this function before they are tried or sent back; "
    "repeatable.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Lowest level that is logged.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log, for people or for programs.",
)
@options.app_dir
@options.as_json("the outcome")
@click.option("--parent", type=int, hidden=True)
def command(
    *,
    target: str,
    app_dir: str,
    bootstrap_servers: str | None,
    assign: str | None,
    until_caught_up: bool,
    workers: int | None,
    reload: bool,
    health_port: int | None,
    host: str,
    web: bool,
    members: tuple[str, ...],
    transforms: tuple[str, ...],
    log_level: str,
    log_format: logs.LogFormat,
    as_json: bool,
    parent: int | None,
) -> int:
    """Run an app until a signal ends it.

    The first SIGTERM or SIGINT drains and commits, the second exits without a drain.
    """
    if reload and workers is not None:
        raise click.UsageError("--reload cannot be combined with --workers: it runs one process, for development")
    is_child = parent is not None
    worker = None if workers is None else _worker_number(is_child=is_child)
    handler = logs.configure(log_level, log_format)
    if worker is not None:
        handler.addFilter(functools.partial(_add_worker, worker))
    overrides = {"bootstrap_servers": bootstrap_servers, "assign": assign}
    load = functools.partial(_load, target, app_dir, overrides, workers=workers, worker=worker)

    # 1. The parent of several workers.
    if workers is not None and not is_child:
        return _run_workers(load, workers, until_caught_up=until_caught_up, as_json=as_json)

    # 2. The parent that restarts one process after each change.
    if reload and not is_child:
        return _run_reloading(app_dir)

    # 3. The process that runs the app: a child of such a parent, or the only one.
    serve_health: ServeHealth = contextlib.nullcontext
    if health_port is not None or web:
        port = _port_of(health_port, worker)
        serve_health = functools.partial(
            _health, host=host, port=port, web=web, members=members, transforms=transforms, app_dir=app_dir
        )
    return _run(load, serve_health, parent, until_caught_up=until_caught_up, as_json=as_json and worker is None)


def _worker_number(*, is_child: bool) -> int | None:
    """Return the number of this process among several workers; None for their parent."""
    return int(os.environ[WORKER_VARIABLE]) if is_child else None


def _port_of(health_port: int | None, worker: int | None) -> int:
    """Return the port of a process's health server; 0 for a free one."""
    if not health_port:
        return 0
    return health_port + (worker or 0)


def _load(
    target: str,
    app_dir: str,
    overrides: Mapping[str, str | None],
    *,
    workers: int | None,
    worker: int | None,
) -> App:
    """Import the app and configure it.

    Args:
        target: `MODULE:APP`.
        app_dir: Directory to search for modules first.
        overrides: Settings by name; None keeps the app's.
        workers: Number of processes that run the app; None for this one alone.
        worker: Number of this process among them; None if it is not one of them.

    Raises:
        UsageError: The app does not exist, or cannot run in several processes.
        AioshardError: Its definition or its settings are refused.
    """
    app = load_app(target, app_dir)
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    if worker is not None and (instance := app.settings.group_instance_id) is not None:
        given["group_instance_id"] = f"{instance}-{worker}"  # each static member needs its own id
    app.configure(**given)
    if workers is not None and app.settings.assign is not None:
        raise click.UsageError(
            "--workers cannot be combined with manually assigned partitions (assign): each worker would read all "
            "of them; run one process for each part of the partitions, or leave assign out"
        )
    return app


def _add_worker(number: int, record: logging.LogRecord) -> bool:
    """Add the number of the worker to a log line, since all workers write to the same stream."""
    if not hasattr(record, "worker"):
        record.worker = number
    return True


# Several processes --------------------------------------------------------------------


def _run_workers(load: Load, count: int, *, until_caught_up: bool, as_json: bool) -> int:
    # Not on uvloop: it cannot detach a process from the terminal.
    with Signals() as signals, asyncio.Runner() as runner:
        app = load()  # only to report errors before any worker starts
        app.settings.require_bootstrap_servers()
        app.check()
        supervisor = Supervisor(app, sys.argv[2:], count, until_caught_up=until_caught_up)
        code = runner.run(supervisor.run(signals))
    if as_json:
        endings = [
            {"worker": worker.number, "exit_code": worker.exit_code, "restarts": worker.restarts}
            for worker in supervisor.workers
        ]
        print_json({"exit_code": code, "signal": signals.received or None, "workers": endings})
    return code


def _run_reloading(app_dir: str) -> int:
    with Signals() as signals, asyncio.Runner() as runner:
        return runner.run(run_reloading(sys.argv[2:], str(Path(app_dir).resolve()), signals))


# This process -------------------------------------------------------------------------


def _run(load: Load, serve_health: ServeHealth, fd: int | None, *, until_caught_up: bool, as_json: bool) -> int:
    """Run the app in this process until it ends; *fd* is the socket to the process that started this one.

    Raises:
        AioshardError: The app failed.
        ClickException: The app does not exist.
    """
    parent = None if fd is None else Parent(fd)
    with Signals() as signals:
        if parent is not None:
            parent.watch(signals.request_drain)
        try:
            app = load()
            if parent is not None:
                parent.app = app
            for sentence in misspelled_variables():
                logger.warning("%s", sentence)
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(
                    _serve(app, serve_health(app), signals, parent, until_caught_up=until_caught_up, as_json=as_json)
                )
        except (AioshardError, click.ClickException) as error:
            if parent is not None:
                parent.report_error(error)
            raise
    return 0


async def _serve(
    app: App,
    health: contextlib.AbstractAsyncContextManager[object],
    signals: Signals,
    parent: Parent | None,
    *,
    until_caught_up: bool,
    as_json: bool,
) -> None:
    """Serve the app, and its health if requested, until a signal or an error; report how it ended."""
    try:
        async with health:
            await app.serve_until_signal(signals, until_caught_up=until_caught_up)
    except AioshardError as error:
        _report(app, signals, error, as_json=as_json)
        if isinstance(error, NotDrainedError):
            # A run that ignores its cancellation would keep the event loop or, as a thread, the interpreter alive.
            click.echo(f"Error: {error}", err=True)
            if parent is not None:
                parent.report_error(error)
            exit_now(exit_code(error))
        raise
    _report(app, signals, None, as_json=as_json)


def _report(app: App, signals: Signals, error: AioshardError | None, *, as_json: bool) -> None:
    """Report how the run ended: in the log, and with `--json` as one object on standard output."""
    statistics = app.statistics()
    if error is None:
        logger.info(
            "group %r ended cleanly: processed=%d, commits=%d, rebalances=%d",
            statistics.group_id,
            sum(handler.processed for handler in statistics.handlers),
            statistics.commits,
            statistics.rebalances,
        )
    if as_json:
        print_json(
            {
                "exit_code": 0 if error is None else exit_code(error),
                "error": None if error is None else str(error),
                "records": list(getattr(error, "records", ())),
                "uncommitted": getattr(error, "uncommitted", {}),
                "unrecovered": getattr(error, "unrecovered", {}),
                "signal": signals.received or None,
                "statistics": statistics.asdict(),
            }
        )


@contextlib.asynccontextmanager
async def _health(
    app: App,
    *,
    host: str,
    port: int,
    web: bool,
    members: tuple[str, ...],
    transforms: tuple[str, ...],
    app_dir: str,
) -> AsyncIterator[None]:
    """Serve the health routes, and with *web* the dashboard, while the context is open."""
    import prometheus_client  # noqa: PLC0415 - imported on use

    from aioshard.telemetry.metrics import AppCollector  # noqa: PLC0415
    from aioshard.web import dashboard_routes, serve_health  # noqa: PLC0415 - needs the extra `web`

    # The process-wide registry, so that /metrics also has the metrics that handlers define.
    registry = prometheus_client.REGISTRY
    AppCollector(app, registry=registry)
    routes = []
    if web:
        allowed = [load_function(name, app_dir) for name in transforms]
        token = os.environ.get(TOKEN_VARIABLE) or None
        routes = dashboard_routes(app, token=token, members=members, transforms=allowed)
    async with serve_health(app, host=host, port=port, registry=registry, routes=routes) as (address, bound):
        shown_host = f"[{address}]" if ":" in address else address  # IPv6
        url = f"http://{shown_host}:{bound}"
        logger.info("health server listens on %s", url)
        if web:
            logger.info("the dashboard is at %s/", url)
        yield
