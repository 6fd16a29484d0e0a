"""`aioshard report`: what the journal of an app says of its records, and what would have been with other numbers."""

import importlib

import click

__all__ = ["COMMANDS", "command"]

COMMANDS = {
    "skew": ("aioshard.cli.report_asking", "How unequal keys, partitions and shards are."),
    "tail": ("aioshard.cli.report_asking", "What took long, and what finished last."),
    "lag": ("aioshard.cli.report_asking", "How far behind each partition was."),
    "what-if": ("aioshard.cli.report_what_if", "What other numbers of shards, workers and members come to."),
    "html": ("aioshard.cli.report_html", "All of it as one page that opens offline."),
}
"""Module and summary of each command; the module is imported when it is used."""


class _Commands(click.Group):
    """Commands that are imported when they are used: Spark is large."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (the signature is click's)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.command(cls=_Commands)
def command() -> None:
    """Analyse the journal that App(journal=PATH) writes, on Spark."""
