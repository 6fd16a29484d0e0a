"""`aioshard dlt`: the dead letters of a topic."""

import click

from aioshard.cli.dlt_drop import drop
from aioshard.cli.dlt_replay import replay
from aioshard.cli.dlt_show import show

__all__ = ["command"]


@click.group()
def command() -> None:
    """Show, replay and drop dead letters."""


command.add_command(show)
command.add_command(replay)
command.add_command(drop)
