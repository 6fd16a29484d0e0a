"""`aioshard run`: an app as a process, with signals, health server and exit codes."""

import asyncio
import logging

import click

from aioshard.cli import options
from aioshard.cli.loading import load_app
from aioshard.cli.running import Run, Signals
from aioshard.errors import AioshardError
from aioshard.loops import loop_factory
from aioshard.settings import misspelled_variables
from aioshard.telemetry import logs

__all__ = ["command"]

logger = logging.getLogger("aioshard.cli")

_LEVELS = ["debug", "info", "warning", "error", "critical"]


@click.command()
@options.target
@options.bootstrap_servers("the app's setting")
@click.option("--assign", metavar="TOPIC:PARTITIONS,…", help="Partitions by hand, as orders:0-2,payments:1; no group.")
@click.option("--until-caught-up", is_flag=True, help="Process up to the end offsets seen at the start, then end.")
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    help="Serve /livez, /readyz, /metrics, /statistics.json and /explain on this port; 0 takes a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the health server.")
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@options.app_dir
@options.as_json("how it ended")
def command(
    target: str,
    *,
    bootstrap_servers: str | None,
    assign: str | None,
    until_caught_up: bool,
    health_port: int | None,
    host: str,
    log_level: str,
    log_format: logs.LogFormat,
    app_dir: str,
    as_json: bool,
) -> int:
    """Run an app until a signal ends it.

    The first SIGTERM or SIGINT drains and commits, a second one leaves at once.
    """
    logs.configure(log_level, log_format)
    app = load_app(target, app_dir)
    given = {"bootstrap_servers": bootstrap_servers, "assign": assign}
    if given := {name: value for name, value in given.items() if value is not None}:
        app.configure(**given)
    for sentence in misspelled_variables():
        logger.warning("%s", sentence)
    with Signals() as signals, asyncio.Runner(loop_factory=loop_factory()) as runner:
        run = Run(app, signals, as_json=as_json)
        try:
            runner.run(run.serve(host, health_port, until_caught_up=until_caught_up))
        except AioshardError as error:
            run.report(error)
            raise
        run.report(None)
    return 0
