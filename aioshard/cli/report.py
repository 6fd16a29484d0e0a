"""`aioshard report`: skew, tail and lag of a journal or a topic."""

import click

from aioshard.cli.groups import LazyCommand, LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS = {
    "skew": LazyCommand("aioshard.cli.report_asking", "How unequal keys, partitions and shards are.", "skew"),
    "tail": LazyCommand("aioshard.cli.report_asking", "What took long, and what finished last.", "tail"),
    "lag": LazyCommand("aioshard.cli.report_asking", "How far behind each partition was, or when records came.", "lag"),
    "html": LazyCommand("aioshard.cli.report_html", "All of it as one page that opens offline.", "html"),
}
"""Module and summary of each command; the module is imported when it is used."""


@click.command(cls=LazyGroup, lazy=COMMANDS)
def command() -> None:
    """Analyse the journal that App(journal=PATH) writes, or a topic, on Spark."""
