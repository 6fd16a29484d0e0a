"""The plots of a report: matplotlib's SVG in the colours of the page; nothing is fetched."""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from aioshard.spark.analysis.arrivals import Arrivals
from aioshard.spark.analysis.lag import Lag
from aioshard.spark.analysis.skew import Skewed
from aioshard.spark.analysis.tail import LEVELS, Tail

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_arrivals", "plot_lag", "plot_shares", "plot_skew", "plot_tail"]

# Placeholders for the page's colours, which depend on light or dark mode; data never has these colours.
_TEXT = "#010203"
_FAINT = "#010204"
_SERIES = ("#010205", "#010206", "#010207")
_NAMES = {_TEXT: "--text", _FAINT: "--faint", **dict(zip(_SERIES, ("--one", "--two", "--three"), strict=True))}

_SETTINGS: Any = {
    "svg.fonttype": "none",  # keep text as text: searchable, and in the page's font
    "svg.hashsalt": "aioshard",  # the same report gives the same file
    "font.size": 11,
    "font.family": "sans-serif",
    "text.color": _TEXT,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "legend.frameon": False,
}
_WIDTH = 7.0
_LONGEST_NAME = 18


def plot_skew(skewed: Skewed) -> str:
    """Plot the hottest groups' shares of the records and of the work."""
    shares = [
        (one.name, one.records / max(skewed.records, 1), one.work_us / max(skewed.work_us, 1)) for one in skewed.top
    ]
    return plot_shares(shares, "work", f"Shares of the hottest of {skewed.groups} {skewed.by}s")


@mpl.rc_context(_SETTINGS)
def plot_shares(shares: Sequence[tuple[str, float, float]], amount: str, title: str) -> str:
    """Plot the shares, from 0 to 1, that named groups have of the records and of another *amount*."""
    groups = shares[::-1]
    figure, axes = _figure(0.9 + 0.36 * len(groups))
    for shift, colour, label, values in (
        (0.2, _SERIES[0], "records", [100 * records for _, records, _ in groups]),
        (-0.2, _SERIES[1], amount, [100 * other for _, _, other in groups]),
    ):
        axes.barh([place + shift for place in range(len(groups))], values, 0.38, color=colour, label=label)
    axes.set_yticks(range(len(groups)), [_short(name) for name, _, _ in groups])
    axes.set_xlabel("share of all, %")
    axes.legend(loc="lower right")
    return _svg(figure, title)


@mpl.rc_context(_SETTINGS)
def plot_tail(tail: Tail) -> str:
    """Plot the percentiles of wait, service and total time."""
    figure, axes = _figure(3.2)
    names = [f"{100 * level:g} %" for level in LEVELS]
    for colour, one in zip(_SERIES, tail.percentiles, strict=False):
        axes.plot(names, [max(value / 1e3, 0.01) for value in one.levels], marker="o", color=colour, label=one.of)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_milliseconds))
    axes.set_xlabel("of the records took no longer")
    axes.legend()
    return _svg(figure, "Percentiles of wait, service and total")


@mpl.rc_context(_SETTINGS)
def plot_lag(lag: Lag) -> str:
    """Plot the unfinished records of all partitions together over time."""
    figure, axes = _figure(3.0)
    moments = list(zip(*(one.moments for one in lag.partitions), strict=True))
    seconds = [slot * lag.step_us / 1e6 for slot in range(len(moments))]
    for colour, label, values in (
        (_SERIES[0], "not finished", [sum(one.unfinished for one in at) for at in moments]),
        (_SERIES[1], "of them taken in", [sum(one.in_hand for one in at) for at in moments]),
    ):
        axes.plot(seconds, values, color=colour, label=label)
        axes.fill_between(seconds, values, color=colour, alpha=0.15)
    axes.set_xlabel("seconds after the first record")
    axes.set_ylabel("records")
    axes.set_ylim(bottom=0)
    axes.legend()
    return _svg(figure, "Records that were not finished, over time")


@mpl.rc_context(_SETTINGS)
def plot_arrivals(found: Arrivals) -> str:
    """Plot the records per second that arrived in all partitions together over time."""
    figure, axes = _figure(3.0)
    rates = [sum(at) * 1e6 / found.step_us for at in zip(*(one.records_at for one in found.partitions), strict=True)]
    # A rate applies to a whole step, so there is one boundary more than there are rates.
    seconds = [slot * found.step_us / 1e6 for slot in range(len(rates) + 1)]
    axes.stairs(rates, seconds, color=_SERIES[0], fill=True, alpha=0.5)
    axes.set_xlabel("seconds after the oldest record")
    axes.set_ylabel("records per second")
    axes.set_ylim(bottom=0)
    return _svg(figure, "Records that came per second, over time")


def _milliseconds(value: float, _: object) -> str:
    return f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms"  # noqa: PLR2004 - milliseconds per second


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _figure(height: float) -> "tuple[Figure, Axes]":
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, title: str) -> str:
    """Return the figure as an SVG element for a page."""
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    for colour, name in _NAMES.items():
        svg = svg.replace(colour, f"var({name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
