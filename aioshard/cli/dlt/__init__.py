"""`aioshard dlt`: dead letters, shown, tried and replayed. Each command has a module."""

import click

from aioshard.cli import options
from aioshard.cli.dlt import dry_run, finish, replay, show


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Show, try and replay dead letters."""


command.add_command(show.command)
command.add_command(replay.command)
command.add_command(finish.command)
command.add_command(dry_run.command)
