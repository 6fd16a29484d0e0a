"""All that a journal says as one page: plots within it, nothing fetched, readable at night and on a phone."""

import html
import importlib.util
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from aioshard.errors import MissingExtraError
from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.journal import Journal
from aioshard.spark.analysis.lag import Lag, find_lag
from aioshard.spark.analysis.skew import Skew, Skewed, find_skew
from aioshard.spark.analysis.tail import LEVELS, Tail, find_tail
from aioshard.spark.analysis.what_if import DEFAULT_LIMIT, WhatIf, ask
from aioshard.spark.analysis.wording import about_slowest, duration_as_text, sentences, share_as_text, trusted

__all__ = ["Findings", "as_page", "check_plots", "find_all"]


class Findings(NamedTuple):
    """What a page shows."""

    title: str
    begin: float
    """Seconds since the epoch."""
    records: int
    members: int
    skew: Skew
    tail: Tail
    lag: Lag
    what_if: WhatIf


def check_plots() -> None:
    """Find out whether plots can be drawn, before anything takes long.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a report with plots", "report")


def find_all(
    journal: Journal,
    candidates: Sequence[Candidate] = (),
    handler: str | None = None,
    *,
    title: str | None = None,
    limit: int = DEFAULT_LIMIT,
) -> Findings:
    """Ask a journal everything.

    Args:
        journal: What to look at.
        candidates: Configurations to ask about; some that suggest themselves where none is given.
        handler: By default the one with the most records.
        title: Of the page; without it, it names the handler.
        limit: As for `aioshard.spark.analysis.what_if.ask`.
    """
    name = journal.handler(handler).name
    return Findings(
        title=title or f"Journal of {name}",
        begin=journal.start / 1e6,
        records=journal.records,
        members=journal.members,
        skew=find_skew(journal, name),
        tail=find_tail(journal, name),
        lag=find_lag(journal, name),
        what_if=ask(journal, candidates, name, limit=limit),
    )


def as_page(found: Findings) -> str:
    """The page; its only addresses are the names of XML's own vocabularies.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_plots()
    from aioshard.spark.analysis.plots import (  # noqa: PLC0415 - matplotlib is imported on use
        plot_candidates,
        plot_lag,
        plot_skew,
        plot_tail,
    )

    tail, skew, what_if = found.tail, found.skew, found.what_if
    began = datetime.fromtimestamp(found.begin, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    sections = [
        f"<h1>{_text(found.title)}</h1>",
        f"<p>{found.records:,} records from {began} on, handler <b>{_text(skew.handler)}</b>.</p>",
        _tiles(found),
        "<h2>What if</h2>",
        _paragraphs([*trusted(what_if), *sentences(what_if)]),
        plot_candidates(what_if),
        _candidates(what_if),
        "<h2>Tail</h2>",
        _paragraphs([about_slowest(tail)]),
        plot_tail(tail),
        _percentiles(tail),
        *_last(tail),
        "<h2>Skew</h2>",
    ]
    for one in skew.spread:
        sections += [
            f"<h3>By {one.by}</h3>",
            _paragraphs([_about_skew(one)]),
            plot_skew(one),
        ]
    sections += ["<h2>Lag</h2>", _paragraphs(_about_lag(found.lag)), plot_lag(found.lag), _lag(found.lag)]
    return _PAGE.format(title=_text(found.title), body="\n".join(sections))


# Parts ----------------------------------------------------------------------------------


def _tiles(found: Findings) -> str:
    measured, what_if = found.what_if.measured, found.what_if
    tiles = [
        ("took", duration_as_text(measured.makespan)),
        ("99 % within", duration_as_text(measured.total[1])),
        ("work", duration_as_text(found.skew.work_us)),
        ("least possible", duration_as_text(what_if.best_possible)),
    ]
    if what_if.cpu is not None:
        tiles.append(("of a core", share_as_text(what_if.cpu)))
    return '<div class="tiles">' + "".join(f"<div><b>{value}</b>{name}</div>" for name, value in tiles) + "</div>"


def _candidates(found: WhatIf) -> str:
    rows = []
    for one in found.answers:
        prediction = one.prediction
        if prediction is None:
            rows.append((one.candidate.label, one.not_predicted or "", "", "", ""))
            continue
        rows.append(
            (
                one.candidate.label,
                duration_as_text(prediction.makespan),
                duration_as_text(prediction.total[1]),
                duration_as_text(prediction.wait[1]),
                share_as_text(prediction.busy),
            )
        )
    return _table(("candidate", "takes", "99 % within", "99 % wait", "workers busy"), rows)


def _percentiles(tail: Tail) -> str:
    headings = ("", "mean", *(f"{100 * level:g} %" for level in LEVELS))
    rows = [(one.of, duration_as_text(one.mean), *map(duration_as_text, one.levels)) for one in tail.percentiles]
    return _table(headings, rows)


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
        tables += [f"<h3>The {what}s that ended last</h3>", _table((what, "ended after", "records", "work"), rows)]
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
    return _table(("partition", "most not finished", "of them taken in", "after"), rows)


def _paragraphs(told: Iterable[str]) -> str:
    return "\n".join(f"<p>{_text(one)}</p>" for one in told)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(one)}</th>" for one in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(text: str) -> str:
    """Safe to show: keys are whatever somebody has sent."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return html.escape(shown)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --text: #1c2430; --faint: #97a1ae; --page: #ffffff; --box: #f2f4f7; --one: #2f6fde; --two: #e07b1f;
  --three: #1f9d6b; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e4e8ee; --faint: #707b8a; --page: #14181e; --box: #1e242c; --one: #6da2ff; --two: #f5a24f;
    --three: #4fcf9a; }}
}}
body {{ margin: 0 auto; max-width: 56rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; margin: 0.5rem 0; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 0.75rem; }}
.tiles div {{ background: var(--box); border-radius: 0.5rem; padding: 0.75rem; }}
.tiles b {{ display: block; font-size: 1.3rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 0.25rem 1rem 0.25rem 0; white-space: nowrap; }}
tbody tr {{ border-top: 1px solid var(--box); }}
svg {{ display: block; width: 100%; height: auto; max-width: 44rem; margin: 0.75rem 0; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
