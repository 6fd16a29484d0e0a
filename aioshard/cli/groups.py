"""Groups of commands: in their own order, and imported when they are used, so that `--help` is quick."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

__all__ = ["InOrder", "LazyCommand", "LazyGroup"]


class InOrder(click.Group):
    """A group whose help has its commands in the order in which they were added: mostly that of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        """The names, in their order."""
        return list(self.commands)


class LazyCommand(NamedTuple):
    """Where a command is, and what it does."""

    module: str
    summary: str
    attribute: str = "command"
    """Its name in the module."""


class LazyGroup(click.Group):
    """A group that knows the summaries of its commands without importing them.

    Example:
        >>> group = LazyGroup("aioshard", lazy={"run": LazyCommand("aioshard.cli.run", "Run an app.")})
        >>> group.list_commands(click.Context(group))
        ['run']
    """

    def __init__(self, *arguments: Any, lazy: Mapping[str, LazyCommand], **options: Any) -> None:
        """Take a group's own arguments, and its commands by their names in the order of the help."""
        super().__init__(*arguments, **options)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        """The names, in their order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, imported now; None where there is no such one."""
        found = self._lazy.get(cmd_name)
        if found is None:
            return None
        command: click.Command = getattr(importlib.import_module(found.module), found.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the names and the summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._lazy.items()])
