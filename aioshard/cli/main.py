"""The entry point of the command line: commands imported on use, errors as messages, exit codes."""

import io
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from aioshard import __version__
from aioshard.cli.output import exit_code
from aioshard.engine import worker
from aioshard.errors import AioshardError
from aioshard.signals import INTERRUPTED

HEADINGS = {
    "Develop": {
        "run": "Run an app until a signal ends it.",
        "check": "Check an app without a broker.",
        "demo": "Process a year of flights and check every figure.",
        "broker": "Run a broker in memory until SIGINT or SIGTERM.",
        "publish": "Publish the lines of FILE to TOPIC.",
        "asyncapi": "Print the topics and payloads of an app as an AsyncAPI document.",
    },
    "Observe": {
        "top": "Show running processes in the terminal, several as one.",
        "explain": "Explain why partitions do not advance.",
        "health": "Check the health of running apps.",
    },
    "Operate": {
        "topics": "Show the topics that an app needs, and create missing ones.",
        "group": "Inspect, reset and manage consumer groups.",
        "dlt": "Show, try and replay dead letters.",
        "record": "Retry, skip or cancel one record of a process.",
        "park": "Show, release and drop parked records.",
    },
    "Backfill": {
        "spark": "Backfill with an app's handlers: plan, run, verify, hand over.",
        "report": "Analyse the journal that App(journal=PATH) writes.",
    },
}
"""Summaries of the commands by heading."""

_LOCATIONS = {"health": "health:health", "explain": "health:explain"}
"""Module and attribute of each command that is not `command` in a module of its name."""

_BUILD = "pure Python" if Path(worker.__file__).suffix == ".py" else "compiled"

COMMANDS = {name: summary for commands in HEADINGS.values() for name, summary in commands.items()}


class LazyGroup(click.Group):
    """A group that imports its commands on use, so that `--help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command; None if it is unknown."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = pkgutil.resolve_name(f"aioshard.cli.{_LOCATIONS.get(cmd_name, f'{cmd_name}:command')}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the names and the summaries under their headings."""
        for heading, commands in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aioshard", message=f"%(prog)s %(version)s ({_BUILD})")
def cli() -> None:
    """Consume each Kafka partition in parallel inside one asyncio process."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: Instead of the process's.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # messages of an app may have text that cannot be encoded
    try:
        result = cli.main(arguments, prog_name="aioshard", standalone_mode=False)
    except click.Abort:
        click.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except AioshardError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(exit_code(error))
    sys.exit(result if isinstance(result, int) else 0)
