"""`aioshard report`: skew, tail and lag of a journal."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aioshard.cli import options
from aioshard.cli.output import cut, print_result, table
from aioshard.cli.spark import session
from aioshard.core.text import as_text
from aioshard.errors import MissingExtraError, SettingsError
from aioshard.spark.session import DEFAULT_MASTER, check_packages

if TYPE_CHECKING:
    from aioshard.reports.analysis import Journal
    from aioshard.reports.tables import Tables

_top = click.option(
    "--top", type=click.IntRange(1), metavar="N", default=10, show_default=True, help="Number of entries of each kind."
)


def _on_journal(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the options of all reports."""
    for option in (
        options.as_json("the result"),
        click.option(
            "--master",
            metavar="MASTER_URL",
            help="Read on Spark, which runs there, as in spark-submit. By default DuckDB reads the journal, and Spark "
            f"({DEFAULT_MASTER}) reads remote journals and those of 256 MiB or more.",
        ),
        click.option("--handler", metavar="NAME", help="Handler to analyse; by default the one with most records."),
        click.argument("path", metavar="JOURNAL"),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def _journal(path: str, handler: str | None, master: str | None) -> "Iterator[Journal]":
    """Read a journal, in DuckDB or in a Spark session.

    Raises:
        SettingsError: The journal does not exist, or Spark cannot be used.
        MissingExtraError: DuckDB or Spark is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("aioshard report", "report")
    from aioshard.reports.analysis import read_journal  # noqa: PLC0415 - imported on use

    with _tables(path, master) as tables:
        yield read_journal(tables, path, handler)


@contextlib.contextmanager
def _tables(path: str, master: str | None) -> "Iterator[Tables]":
    from aioshard.reports.tables import DuckTables, SparkTables, is_small  # noqa: PLC0415 - imported on use

    if is_small(path) and master is None:
        if importlib.util.find_spec("duckdb") is None:
            raise MissingExtraError("aioshard report without --master", "report")
        yield DuckTables()
        return
    check_packages()
    with session(master or DEFAULT_MASTER) as spark:
        yield SparkTables(spark)


def _report(name: str, path: str, handler: str | None, master: str | None, *, as_json: bool, **arguments: int) -> None:
    """Print the result of a function of `aioshard.reports.analysis`."""
    with _journal(path, handler, master) as journal:
        from aioshard.reports import analysis, page  # noqa: PLC0415 - imported on use

        report = getattr(analysis, name)(journal, **arguments)
    lines: list[str] = []
    for title, headings, rows in page.as_tables(report):
        if title:
            lines.append(f"\n{title}:")
        lines += table(headings, [[cut(as_text(cell)) for cell in row] for row in rows])
    print_result(report, lines, as_json=as_json)


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Analyse the journal that App(journal=PATH) writes."""


@command.command()
@_top
@_on_journal
def skew(path: str, *, handler: str | None, master: str | None, as_json: bool, top: int) -> None:
    """Show how unequal the keys, partitions and shards of JOURNAL are.

    Work is how long the handler ran: the sum of the latest attempts. A Gini coefficient of 0 means that all are
    equal; close to 1, that one has almost everything.
    """
    _report("skew", path, handler, master, as_json=as_json, top=top)


@command.command()
@_top
@_on_journal
def tail(path: str, *, handler: str | None, master: str | None, as_json: bool, top: int) -> None:
    """Show the slowest and the last records of JOURNAL.

    Wait is from being fetched to the start of the latest attempt, service is that attempt, total is both.
    """
    _report("tail", path, handler, master, as_json=as_json, top=top)


@command.command()
@click.option(
    "--moments", type=click.IntRange(1), metavar="N", default=12, show_default=True, help="Number of points in time."
)
@_on_journal
def lag(path: str, *, handler: str | None, master: str | None, as_json: bool, moments: int) -> None:
    """Show the consumer lag of each partition of JOURNAL over time.

    A journal contains finished records. So a record counts from its timestamp to its end, and one that never ended
    does not count at all.
    """
    _report("lag", path, handler, master, as_json=as_json, moments=moments)


@command.command()
@click.option(
    "--moments", type=click.IntRange(1), metavar="N", default=12, show_default=True, help="Number of intervals."
)
@_on_journal
def progress(path: str, *, handler: str | None, master: str | None, as_json: bool, moments: int) -> None:
    """Show the records of JOURNAL that finished over time, and stalls.

    A stall is an interval in which nothing finished; its cause is the rebalance that took most of it.
    """
    _report("progress", path, handler, master, as_json=as_json, moments=moments)


@command.command()
@click.option("--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="File to write.")
@click.option("--title", metavar="TEXT", help="Title of the page.")
@_on_journal
def html(path: str, *, handler: str | None, master: str | None, as_json: bool, out: str, title: str | None) -> None:
    """Write the whole analysis of JOURNAL as one page.

    The page fetches nothing, so it opens offline and can be sent by mail.
    """
    file = Path(out)
    if not file.absolute().parent.is_dir():
        raise SettingsError(f"--out {out}: the directory {file.parent} does not exist; create it first")
    with _journal(path, handler, master) as journal:
        from aioshard.reports.page import report_page  # noqa: PLC0415 - imported on use

        content = report_page(journal, title=title).encode()
    file.write_bytes(content)
    line = f"{file}: {len(content):,} bytes; open it in a browser"
    print_result({"page": str(file.absolute()), "bytes": len(content)}, [line], as_json=as_json)
