"""The report of a journal as one HTML page."""

from datetime import UTC, datetime
from typing import NamedTuple

from aioshard.spark.analysis.journal import Journal
from aioshard.spark.analysis.lag import Lag, find_lag
from aioshard.spark.analysis.page import check_plots, escaped, page_of, paragraphs, table, tiles
from aioshard.spark.analysis.skew import Skew, Skewed, find_skew
from aioshard.spark.analysis.tail import LEVELS, Tail, find_tail
from aioshard.spark.analysis.wording import about_slowest, duration_as_text, share_as_text

__all__ = ["Findings", "as_page", "find_all"]


class Findings(NamedTuple):
    """The content of a page."""

    title: str
    begin: float
    """Seconds since the epoch."""
    records: int
    skew: Skew
    tail: Tail
    lag: Lag
    cpu: float | None
    """Share of one core that a process used while it wrote the journal; None if the journal does not say."""


def find_all(journal: Journal, handler: str | None = None, *, title: str | None = None) -> Findings:
    """Run all analyses of a journal.

    Args:
        journal: The journal to analyze.
        handler: Name of a handler; by default the one with the most records.
        title: Title of the page; by default it names the handler.
    """
    name = journal.handler(handler).name
    return Findings(
        title=title or f"Journal of {name}",
        begin=journal.start / 1e6,
        records=journal.records,
        skew=find_skew(journal, name),
        tail=find_tail(journal, name),
        lag=find_lag(journal, name),
        cpu=journal.cpu,
    )


def as_page(found: Findings) -> str:
    """Return the page; its only URLs are the names of XML namespaces.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_plots()
    from aioshard.spark.analysis.plots import plot_lag, plot_skew, plot_tail  # noqa: PLC0415 - matplotlib on use

    tail, skew = found.tail, found.skew
    began = datetime.fromtimestamp(found.begin, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    sections = [
        f"<h1>{escaped(found.title)}</h1>",
        f"<p>{found.records:,} records from {began} on, handler <b>{escaped(skew.handler)}</b>.</p>",
        _tiles(found),
        "<h2>Tail</h2>",
        paragraphs([about_slowest(tail)]),
        plot_tail(tail),
        _percentiles(tail),
        *_last(tail),
        "<h2>Skew</h2>",
    ]
    for one in skew.spread:
        sections += [
            f"<h3>By {one.by}</h3>",
            paragraphs([_about_skew(one)]),
            plot_skew(one),
        ]
    sections += ["<h2>Lag</h2>", paragraphs(_about_lag(found.lag)), plot_lag(found.lag), _lag(found.lag)]
    return page_of(found.title, sections)


# Sections -------------------------------------------------------------------------------


def _tiles(found: Findings) -> str:
    figures = [("took", duration_as_text(found.tail.wall_us))]
    within = {one.of: one.levels[LEVELS.index(0.99)] for one in found.tail.percentiles}
    if "total" in within:
        figures.append(("99 % within", duration_as_text(within["total"])))
    figures.append(("work", duration_as_text(found.skew.work_us)))
    if found.cpu is not None:
        figures.append(("of a core", share_as_text(found.cpu)))
    return tiles(figures)


def _percentiles(tail: Tail) -> str:
    headings = ("", "mean", *(f"{100 * level:g} %" for level in LEVELS))
    rows = [(one.of, duration_as_text(one.mean), *map(duration_as_text, one.levels)) for one in tail.percentiles]
    return table(headings, rows)


def _about_skew(one: Skewed) -> str:
    gini = f"Gini {one.records_gini:.2f} of the records and {one.work_gini:.2f} of the work"
    most = (
        f"{share_as_text(one.most_records_share)} of the records and {share_as_text(one.most_work_share)} of the work"
    )
    return f"{one.groups:,} {one.by}s. {gini}; the hottest has {most}."


def _last(tail: Tail) -> list[str]:
    tables = []
    for what, last in (("partition", tail.partitions), ("key", tail.keys)):
        rows = [
            (one.name, duration_as_text(one.finished_us), f"{one.records:,}", duration_as_text(one.work_us))
            for one in last
        ]
        tables += [f"<h3>The {what}s that ended last</h3>", table((what, "ended after", "records", "work"), rows)]
    return tables


def _about_lag(lag: Lag) -> list[str]:
    what = "A journal has what was finished. A record counts from its timestamp to its end; one that never ended does "
    told = [f"{what}not count at all."]
    if lag.made_up:
        told.append(f"{lag.made_up:,} records have a timestamp after their arrival: somebody's clock is wrong.")
    return told


def _lag(lag: Lag) -> str:
    rows = [
        (one.partition, f"{one.most.unfinished:,}", f"{one.most.in_hand:,}", duration_as_text(one.most.at_us))
        for one in lag.partitions
    ]
    return table(("partition", "most not finished", "of them taken in", "after"), rows)
