"""The entry of the command line: commands loaded on use, errors as sentences, exit codes.

| code | meaning |
| --- | --- |
| 0 | clean |
| 1 | crashed: the brokers, or an unexpected error |
| 2 | usage: wrong options, unknown module or app, a setting, a handler or a plan refused |
| 3 | unhealthy: halted records in the way, failed dead letters, an app that is not ready, a wrong figure or run |
| 4 | records still ran when the time to stop was over; the group is busy, has moved or is leased |
| 5 | records that were to be read are not in the log any more |
| 130 | interrupted, or left at a second signal |
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from aioshard import __version__
from aioshard.cli.groups import LazyCommand, LazyGroup
from aioshard.errors import (
    AioshardError,
    DataLossError,
    GroupBusyError,
    GroupMovedError,
    HaltedError,
    HandlerError,
    LeasedError,
    MissingExtraError,
    NotDrainedError,
    NotVerifiedError,
    PlanError,
    SettingsError,
)

__all__ = ["COMMANDS", "INTERRUPTED", "cli", "exit_code", "main"]

INTERRUPTED = 130

COMMANDS = {
    "run": LazyCommand("aioshard.cli.run", "Run an app until a signal ends it."),
    "check": LazyCommand("aioshard.cli.check", "Check an app without a broker."),
    "asyncapi": LazyCommand("aioshard.cli.asyncapi", "Print what an app reads and writes as an AsyncAPI document."),
    "broker": LazyCommand("aioshard.cli.broker", "Run a broker in memory until SIGINT or SIGTERM."),
    "publish": LazyCommand("aioshard.cli.publish", "Publish the lines of FILE to TOPIC."),
    "demo": LazyCommand("aioshard.cli.demo", "Process a year of flights and check every figure."),
    "dlt": LazyCommand("aioshard.cli.dlt", "Show, replay and drop dead letters."),
    "park": LazyCommand("aioshard.cli.park", "Show, release and drop parked records."),
    "group": LazyCommand("aioshard.cli.group", "Look at a consumer group, change it, work out who would get what."),
    "lag": LazyCommand("aioshard.cli.group_lag", "Show how far GROUP is behind, partition by partition, and why."),
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


def exit_code(error: AioshardError) -> int:
    """The exit code that an error ends the process with."""
    match error:
        case SettingsError() | HandlerError() | MissingExtraError() | PlanError():
            return 2
        case HaltedError() | NotVerifiedError():
            return 3
        case NotDrainedError() | GroupBusyError() | GroupMovedError() | LeasedError():
            return 4
        case DataLossError():
            return 5
        case _:
            return 1


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
