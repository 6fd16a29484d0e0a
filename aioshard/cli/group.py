"""`aioshard group`: the consumer group of an app, as the brokers see it and as an assignor would split it."""

import click

from aioshard.cli.groups import LazyCommand, LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS = {
    "simulate": LazyCommand("aioshard.cli.group_simulate", "Work out who would get which partitions.", "simulation"),
}
"""Module and summary of each command; the module is imported when it is used."""


@click.command(cls=LazyGroup, lazy=COMMANDS)
def command() -> None:
    """Look at a consumer group, and work out who would get what."""
