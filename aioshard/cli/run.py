"""`aioshard run`: an app as a process, with signals, health server and exit codes."""

import functools
import logging
import os
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.run_options import WORKER_VARIABLE, RunOptions
from aioshard.cli.running import run_here
from aioshard.cli.web import web_options
from aioshard.telemetry import logs

__all__ = ["command"]

_LEVELS = ["debug", "info", "warning", "error", "critical"]


@click.command()
@options.target
@options.bootstrap_servers("the app's setting")
@click.option("--assign", metavar="TOPIC:PARTITIONS,…", help="Partitions by hand, as orders:0-2,payments:1; no group.")
@click.option("--until-caught-up", is_flag=True, help="Process up to the end offsets seen at the start, then end.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Run N processes, each a member of the group, and start again those that end.",
)
@click.option("--reload", is_flag=True, help="For development: start again when a file of Python code changes.")
@click.option(
    "--reload-dir",
    "reload_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Watch this directory instead of --app-dir; may be repeated.",
)
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    help="Serve /livez, /readyz, /metrics, /statistics.json and /explain on this port; 0 takes a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the health server.")
@web_options
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-config",
    type=click.Path(exists=True, dir_okay=False),
    help="Configure logging with this file instead: JSON for dictConfig, or an ini file.",
)
@click.option("--tracing", is_flag=True, help="Trace with OpenTelemetry, to the tracer provider of the process.")
@options.app_dir
@options.as_json("how it ended")
@click.option("--tether", type=int, hidden=True)
@click.option("--health-socket", hidden=True)
def command(**chosen: Any) -> int:
    """Run an app until a signal ends it.

    The first SIGTERM or SIGINT drains and commits, a second one leaves at once.
    """
    asked = RunOptions(**chosen)
    if asked.log_config is not None:
        logs.configure_from(asked.log_config)
    else:
        handler = logs.configure(asked.log_level, asked.log_format)
        if (number := os.environ.get(WORKER_VARIABLE)) is not None:
            handler.addFilter(functools.partial(_with_worker, number))
    if asked.workers is not None:
        from aioshard.cli.supervising import run_workers  # noqa: PLC0415 - imported on use

        return run_workers(asked)
    if asked.reload:
        from aioshard.cli.reloading import run_reloading  # noqa: PLC0415

        return run_reloading(asked)
    return run_here(asked)


def _with_worker(number: str, record: logging.LogRecord) -> bool:
    """Have a log line say which worker it is of; the lines of all come out in one place."""
    if not hasattr(record, "worker"):
        record.worker = number
    return True
