"""`aioshard report html`: all of it as one page."""

import json
from pathlib import Path

import click

from aioshard.cli.report_options import AskedOf, asked, opened, opened_topics, shards
from aioshard.errors import SettingsError

__all__ = ["html"]


@click.command()
@asked("where the page is and how large,")
@click.option(
    "--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="The page to write."
)
@click.option("--title", help="Of the page.")
@shards
def html(*, of: AskedOf, as_json: bool, out: str, title: str | None, shards: tuple[int, ...]) -> None:
    """Write all that JOURNAL or a topic says as one page.

    It has its plots within it and fetches nothing, so it opens offline and can be sent by mail. Of a topic it has what
    a topic knows: the skew of its records and bytes, and when they came.
    """
    page = Path(out)
    if not page.absolute().parent.is_dir():
        raise SettingsError(f"--out {out}: the directory {page.parent} was expected to exist; make it first")
    from aioshard.spark.session import check_packages  # noqa: PLC0415 - imported on use

    check_packages()
    from aioshard.spark.analysis.page import check_plots  # noqa: PLC0415 - imported on use

    check_plots()
    written = (_of_topics(of, title, shards) if of.topics else _of_journal(of, title, shards)).encode()
    page.write_bytes(written)
    if as_json:
        click.echo(json.dumps({"page": str(page.absolute()), "bytes": len(written)}))
    else:
        click.echo(f"{page}: {len(written):,} bytes; open it in a browser")


def _of_journal(of: AskedOf, title: str | None, shards: tuple[int, ...]) -> str:
    from aioshard.spark.analysis.report import as_page, find_all  # noqa: PLC0415 - imported on use

    of.refuse(shards=shards)
    with opened(of) as journal:
        return as_page(find_all(journal, of.handler, title=title))


def _of_topics(of: AskedOf, title: str | None, shards: tuple[int, ...]) -> str:
    from aioshard.spark.analysis.topic_report import find_all_of_topics, topic_page  # noqa: PLC0415 - imported on use

    with opened_topics(of) as topics:
        return topic_page(find_all_of_topics(topics, shards, title=title))
