"""`aioshard report`: skew, tail and lag of a journal."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioshard.cli import options
from aioshard.cli.output import as_text, cut, print_json, print_table
from aioshard.cli.spark import session
from aioshard.errors import SettingsError
from aioshard.spark.session import check_packages

if TYPE_CHECKING:
    from aioshard.spark.reports import Journal

_top = click.option(
    "--top", type=click.IntRange(1), default=10, show_default=True, help="Number of entries of each kind."
)


def _on_journal(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the options of all reports."""
    for option in (
        options.as_json("the result"),
        options.master,
        click.option("--handler", metavar="NAME", help="Handler to analyse; by default the one with most records."),
        click.argument("path", metavar="JOURNAL"),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def _opened(path: str, handler: str | None, master: str) -> "Iterator[Journal]":
    """Read a journal in a Spark session.

    Raises:
        SettingsError: The journal does not exist, or Spark cannot be used.
        MissingExtraError: Spark is not installed.
    """
    check_packages()
    from aioshard.spark.reports import check_journal, read_journal  # noqa: PLC0415 - imported on use

    check_journal(path)
    with session(master) as spark:
        yield read_journal(spark, path, handler)


def _report(analysis: str, path: str, handler: str | None, master: str, *, as_json: bool, most: int) -> None:
    """Print the result of a function of `aioshard.spark.reports`."""
    with _opened(path, handler, master) as journal:
        from aioshard.spark import reports  # noqa: PLC0415 - imported on use

        report = getattr(reports, analysis)(journal, most)
    if as_json:
        print_json(report)
        return
    for title, headings, rows in reports.as_tables(report):
        if title:
            click.echo(f"\n{title}:")
        print_table(headings, [[cut(as_text(cell)) for cell in row] for row in rows])


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Analyse the journal that App(journal=PATH) writes, on Spark."""


@command.command()
@_on_journal
@_top
def skew(path: str, *, handler: str | None, master: str, as_json: bool, top: int) -> None:
    """How unequal the keys, partitions and shards of JOURNAL are.

    Work is how long the handler ran: the sum of the latest attempts. A Gini coefficient of 0 means that all are
    equal; close to 1, that one has almost everything.
    """
    _report("skew", path, handler, master, as_json=as_json, most=top)


@command.command()
@_on_journal
@_top
def tail(path: str, *, handler: str | None, master: str, as_json: bool, top: int) -> None:
    """The slowest and the last records of JOURNAL.

    Wait is from being fetched to the start of the latest attempt, service is that attempt, total is both.
    """
    _report("tail", path, handler, master, as_json=as_json, most=top)


@command.command()
@_on_journal
@click.option("--moments", type=click.IntRange(1), default=12, show_default=True, help="Number of points in time.")
def lag(path: str, *, handler: str | None, master: str, as_json: bool, moments: int) -> None:
    """The consumer lag of each partition of JOURNAL over time.

    A journal contains finished records. So a record counts from its timestamp to its end, and one that never ended
    does not count at all.
    """
    _report("lag", path, handler, master, as_json=as_json, most=moments)


@command.command()
@_on_journal
@click.option("--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="File to write.")
@click.option("--title", help="Title of the page.")
def html(path: str, *, handler: str | None, master: str, as_json: bool, out: str, title: str | None) -> None:
    """Write the whole analysis of JOURNAL as one page.

    The page fetches nothing, so it opens offline and can be sent by mail.
    """
    page = Path(out)
    if not page.absolute().parent.is_dir():
        raise SettingsError(f"--out {out}: the directory {page.parent} does not exist; create it first")
    with _opened(path, handler, master) as journal:
        from aioshard.spark.reports import report_page  # noqa: PLC0415 - imported on use

        content = report_page(journal, title=title).encode()
    page.write_bytes(content)
    if as_json:
        print_json({"page": str(page.absolute()), "bytes": len(content)})
    else:
        click.echo(f"{page}: {len(content):,} bytes; open it in a browser")
