"""Arguments and options that several commands have."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["app_dir", "as_json", "bootstrap_servers", "master", "run_directory", "target"]

F = TypeVar("F", bound=Callable[..., Any])

target = click.argument("target", metavar="MODULE:APP")

app_dir = click.option(
    "--app-dir",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    show_default=True,
    help="Where MODULE is looked for first.",
)

run_directory = click.argument("directory", metavar="DIR")
master = click.option(
    "--master", default="local[*,4]", show_default=True, help="Where Spark runs, as spark-submit takes it."
)


def bootstrap_servers(replaced: str) -> Callable[[F], F]:
    """`--bootstrap-servers`, given instead of what *replaced* names."""
    return click.option("--bootstrap-servers", metavar="HOST:PORT,…", help=f"Brokers, instead of {replaced}.")


def as_json(what: str) -> Callable[[F], F]:
    """`--json`, which prints *what* for a program to read."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as one JSON object on standard output.")
