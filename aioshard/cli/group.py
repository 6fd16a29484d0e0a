"""`aioshard group`: the consumer group of an app, as the brokers see it."""

import click

from aioshard.cli.groups import LazyCommand, LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS = {
    "show": LazyCommand("aioshard.cli.group_show", "Show a group's members and what it has committed.", "show"),
    "lag": LazyCommand("aioshard.cli.group_lag", "Show how far GROUP is behind, partition by partition, and why."),
    "reset": LazyCommand("aioshard.cli.group_change", "Have a group without members go on elsewhere.", "reset"),
    "leave": LazyCommand("aioshard.cli.group_change", "Have a static member leave for good.", "leave"),
}
"""Module and summary of each command; the module is imported when it is used."""


@click.command(cls=LazyGroup, lazy=COMMANDS)
def command() -> None:
    """Inspect, reset and manage consumer groups."""
