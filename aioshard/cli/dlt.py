"""`aioshard dlt`: the dead letters of a topic."""

import click

from aioshard.cli.dlt_replay import replay
from aioshard.cli.dlt_show import show
from aioshard.cli.groups import InOrder

__all__ = ["command"]


@click.group(cls=InOrder)
def command() -> None:
    """Show and replay dead letters."""


command.add_command(show)
command.add_command(replay)
