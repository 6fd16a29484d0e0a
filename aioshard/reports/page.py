"""Reports for people: tables of text, and one HTML page."""

import html
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aioshard.reports.analysis import Journal, Report, lag, progress, skew, tail


def as_tables(report: Report) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Yield the title, the headings and the cells of each table of a report; its facts come first."""
    facts = {name: value for name, value in report.items() if not isinstance(value, list)}
    yield "", ("", ""), [(_heading(name), _cell(name, value)) for name, value in facts.items()]
    for title, rows in report.items():
        if isinstance(rows, list) and rows:
            names = [name for name, value in rows[0].items() if not isinstance(value, dict)]
            yield title, list(map(_heading, names)), [[_cell(name, row[name]) for name in names] for row in rows]


def _heading(name: str) -> str:
    return name.removesuffix("_us").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_us"):
        if value < 1e6:  # noqa: PLR2004 - a second
            return f"{value / 1e3:.2f} ms"
        return f"{value / 1e6:.2f} s"
    if name.endswith("_share"):
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def report_page(journal: Journal, *, title: str | None = None) -> str:
    """Return all reports as one page that fetches nothing; it has a dark mode and a layout for phones."""
    title = _escaped(title or f"Journal of {journal.handler}")
    began = datetime.fromtimestamp(journal.start_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [f"<h1>{title}</h1><p>Since {began}.</p>"]
    reports = {
        "Progress": progress(journal, _INTERVALS),
        "Tail": tail(journal),
        "Skew": skew(journal),
        "Lag": lag(journal, _INTERVALS),
    }
    for report, content in reports.items():
        parts.append(f"<h2>{report}</h2>")
        if report == "Progress":
            parts.append(_progress_figure(content, journal.wall_us))
        if report == "Lag":
            parts.append(_lag_figure(content["moments"]))
        for name, headings, rows in as_tables(content):
            head = "".join(f"<th>{_escaped(heading)}</th>" for heading in headings)
            body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
            parts.append(
                f'<h3>{name.capitalize()}</h3><div class="wide"><table><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>"
            )
    return _PAGE.format(title=title, body="\n".join(parts))


def _progress_figure(report: Report, wall_us: int) -> str:
    """Plot the finished records of all partitions together, and of those that finished last, over the rebalances."""
    moments = report["moments"]
    last = {name: slot for slot, moment in enumerate(moments) for name in moment["partitions"]}
    series = {"all partitions": [moment["finished"] for moment in moments]}
    for name in sorted(last, key=lambda name: (-last[name], name))[:_TAIL]:
        series[name] = [moment["partitions"].get(name, 0) for moment in moments]
    bands = []
    for kind in ("stalls", "rebalances"):
        for band in report[kind]:
            left, width = (_WIDTH * band[name] / wall_us for name in ("at_us", "for_us"))
            cause = _escaped(band["cause"] or "without a rebalance")
            area = f'x="{left:.1f}" width="{width:.1f}" height="{_HEIGHT}"'
            bands.append(f'<rect class="{kind}" {area}><title>{cause}</title></rect>')
    most = max(series["all partitions"]) * len(moments) * 1e6 / wall_us
    caption = f"Finished records over time, at most {most:,.0f}/s, of all partitions and of those that finished last"
    legend = '<span class="rebalances">rebalances</span><span class="stalls">stalls</span>'
    return _figure(caption, series, "".join(bands), legend)


def _lag_figure(moments: Sequence[Mapping[str, Any]]) -> str:
    """Plot the lag over time."""
    series = {
        "unfinished": [moment["unfinished"] for moment in moments],
        "of them in flight": [moment["in_flight"] for moment in moments],
    }
    return _figure(f"Records over time: at most {max(series['unfinished']):,}", series)


def _figure(caption: str, series: Mapping[str, Sequence[int]], behind: str = "", legend: str = "") -> str:
    """Plot series over time, the largest first, as an SVG element; *behind* are other elements of it."""
    most = max(*next(iter(series.values())), 1)
    lines = []
    for number, (name, values) in enumerate(series.items()):
        points = " ".join(
            f"{_WIDTH * slot / max(len(values) - 1, 1):.1f},{_HEIGHT * (1 - value / most):.1f}"
            for slot, value in enumerate(values)
        )
        lines.append(f'<polyline class="line{number}" points="{points}"/>')
        legend += f'<span class="line{number}">{_escaped(name)}</span>'
    return (
        f'<figure><figcaption>{caption}</figcaption><svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f"{behind}{''.join(lines)}</svg>{legend}</figure>"
    )


def _escaped(text: str) -> str:
    """Escape text for HTML and make it printable; keys can contain anything."""
    return html.escape("".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text))


_WIDTH = 700
_HEIGHT = 200
_INTERVALS = 60
_TAIL = 3
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --text: #1c2430; --faint: #97a1ae; --page: #ffffff; --one: #2f6fde; --two: #e07b1f; --three: #1f9d6b;
  --four: #9a5bd0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e4e8ee; --faint: #707b8a; --page: #14181e; --one: #6da2ff; --two: #f5a24f; --three: #4cc894;
    --four: #c08df0; }}
}}
body {{ margin: 0 auto; max-width: 56rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 0.25rem 1rem 0.25rem 0; white-space: nowrap; }}
tbody tr {{ border-top: 1px solid var(--faint); }}
figure {{ margin: 0.75rem 0; }}
svg {{ display: block; width: 100%; height: auto; border-bottom: 1px solid var(--faint); }}
polyline {{ fill: none; stroke: currentColor; stroke-width: 2; }}
figure span {{ margin-right: 1rem; }}
.line0 {{ color: var(--one); }}
.line1 {{ color: var(--two); }}
.line2 {{ color: var(--three); }}
.line3 {{ color: var(--four); }}
rect.rebalances {{ fill: var(--two); opacity: 0.35; }}
rect.stalls {{ fill: var(--faint); opacity: 0.3; }}
span.rebalances, span.stalls {{ border-bottom: 0.35em solid var(--faint); }}
span.rebalances {{ border-color: var(--two); }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
