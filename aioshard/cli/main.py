"""The entry of the command line: commands loaded on use, errors as sentences, exit codes."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from aioshard import __version__
from aioshard.cli.exit_codes import INTERRUPTED, exit_code
from aioshard.cli.groups import LazyCommand, LazyGroup
from aioshard.errors import AioshardError

__all__ = ["COMMANDS", "cli", "main"]

COMMANDS = {
    "run": LazyCommand("aioshard.cli.run", "Run an app until a signal ends it."),
    "check": LazyCommand("aioshard.cli.check", "Check an app without a broker."),
    "asyncapi": LazyCommand("aioshard.cli.asyncapi", "Print what an app reads and writes as an AsyncAPI document."),
    "broker": LazyCommand("aioshard.cli.broker", "Run a broker in memory until SIGINT or SIGTERM."),
    "publish": LazyCommand("aioshard.cli.publish", "Publish the lines of FILE to TOPIC."),
    "demo": LazyCommand("aioshard.cli.demo", "Process a year of flights and check every figure."),
    "dlt": LazyCommand("aioshard.cli.dlt", "Show and replay dead letters."),
    "park": LazyCommand("aioshard.cli.park", "Show, release and drop parked records."),
    "group": LazyCommand("aioshard.cli.group", "Inspect, reset and manage consumer groups."),
    "spark": LazyCommand("aioshard.cli.spark", "Run an app's handlers over history: plan, drain, verify, hand over."),
    "health": LazyCommand("aioshard.cli.health", "Ask a running app for its health."),
    "top": LazyCommand("aioshard.cli.top", "Show running processes in the terminal, several as one."),
    "report": LazyCommand(
        "aioshard.cli.report", "Analyse the journal that App(journal=PATH) writes, or a topic, on Spark."
    ),
    "explain": LazyCommand("aioshard.cli.explain", "Say why the partitions of a running app do not advance."),
}
"""Module and summary of each command; the module's `command` is imported when it is used."""


@click.command(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aioshard")
def cli() -> None:
    """Consume each Kafka partition in parallel inside one asyncio process."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: Instead of the process's.
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = cli.main(arguments, prog_name="aioshard", standalone_mode=False)
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AioshardError as error:
        click.echo(f"Error: {error}", err=True)
        return exit_code(error)
    return result if isinstance(result, int) else 0
