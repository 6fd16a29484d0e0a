"""What the commands of `aioshard report` have in common: arguments, options and the session."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aioshard.cli import options

if TYPE_CHECKING:
    from aioshard.spark.analysis.journal import Journal

__all__ = ["asked", "opened", "print_json", "top"]

F = TypeVar("F", bound=Callable[..., Any])

_journal = click.argument("path", metavar="JOURNAL")
"""A local path, or a URI."""

_handler = click.option("--handler", metavar="NAME", help="Whose records; by default the handler with the most.")

_master = click.option(
    "--master",
    default="local[*,4]",
    show_default=True,
    help="Where Spark runs; its own notation.",
)

top = click.option(
    "--top", type=click.IntRange(1), default=10, show_default=True, help="How many to name of each kind."
)


def asked(what: str) -> Callable[[F], F]:
    """JOURNAL, --handler, --master and --json, which prints *what*."""

    def decorate(function: F) -> F:
        for option in (options.as_json(what), _master, _handler, _journal):
            function = option(function)
        return function

    return decorate


@contextlib.contextmanager
def opened(path: str, master: str) -> "Iterator[Journal]":
    """The journal at *path*, in a session of Spark that ends with the context.

    Raises:
        SettingsError: There is no journal, or Spark cannot be used.
        MissingExtraError: Spark is not installed.
    """
    from aioshard.spark.session import check_packages, local_session  # noqa: PLC0415 - imported on use

    check_packages()
    from aioshard.spark.analysis.journal import check_journal, read_journal  # noqa: PLC0415 - imported on use

    check_journal(path)
    from pyspark.sql import SparkSession  # noqa: PLC0415 - imported on use

    ours = SparkSession.getActiveSession() is None
    if ours:
        click.echo(f"Starting Spark ({master}) …", err=True)
    session = local_session(master, "aioshard report")
    try:
        yield read_journal(session, path)
    finally:
        if ours:
            session.stop()


def print_json(found: Any) -> None:
    """Print what was found, named tuples and dataclasses as objects. Durations ending in `_us` are microseconds."""
    click.echo(json.dumps(_plain(found)))


def _plain(found: Any) -> Any:
    """What *found* holds, for JSON."""
    if hasattr(found, "_asdict"):
        return {name: _plain(value) for name, value in found._asdict().items()}
    if hasattr(found, "__dataclass_fields__"):
        return {name: _plain(getattr(found, name)) for name in found.__dataclass_fields__}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found
