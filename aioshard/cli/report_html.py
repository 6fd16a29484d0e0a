"""`aioshard report html`: all of it as one page."""

import json
from pathlib import Path

import click

from aioshard.cli.report_options import asked, opened
from aioshard.errors import SettingsError

__all__ = ["html"]


@click.command()
@asked("where the page is and how large,")
@click.option(
    "--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="The page to write."
)
@click.option("--title", help="Of the page.")
@click.option(
    "--candidate", "-c", "candidates", multiple=True, metavar="NAME=VALUE,…", help="As for `aioshard report what-if`."
)
def html(
    path: str,
    *,
    handler: str | None,
    master: str,
    as_json: bool,
    out: str,
    title: str | None,
    candidates: tuple[str, ...],
) -> None:
    """Write all that JOURNAL says as one page.

    It has its plots within it and fetches nothing, so it opens offline and can be sent by mail.
    """
    page = Path(out)
    if not page.absolute().parent.is_dir():
        raise SettingsError(f"--out {out}: the directory {page.parent} was expected to exist; make it first")
    from aioshard.spark.session import check_packages  # noqa: PLC0415 - imported on use

    check_packages()
    from aioshard.spark.analysis.candidate import Candidate  # noqa: PLC0415 - imported on use
    from aioshard.spark.analysis.report import as_page, check_plots, find_all  # noqa: PLC0415

    check_plots()
    asked_about = [Candidate.parse(text) for text in candidates]
    with opened(path, master) as journal:
        written = as_page(find_all(journal, asked_about, handler, title=title)).encode()
    page.write_bytes(written)
    if as_json:
        click.echo(json.dumps({"page": str(page.absolute()), "bytes": len(written)}))
    else:
        click.echo(f"{page}: {len(written):,} bytes; open it in a browser")
