"""`aioshard top`: running processes in a terminal, several as one."""

import concurrent.futures
import contextlib
import datetime as dt
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aioshard.cli import options
from aioshard.cli.health import (
    UNAVAILABLE,
    HealthServer,
    NoAnswerError,
    health_servers,
    timeout_option,
    urls_argument,
)
from aioshard.cli.output import UNHEALTHY, as_text, print_json
from aioshard.records import age

_OUTCOMES = ("processed", "skipped", "dead_lettered", "parked")
_SUMMED = ("busy", "concurrency", "shards", *_OUTCOMES, "retried", "halted")
_PARTITION_FIELDS = (
    *("topic", "partition", "lag", "lag_seconds", "committed", "end_offset", "incomplete", "paused"),
    "oldest_incomplete_age",
)
_PROCESS_FIELDS = ("partitions", "lag", "incomplete", "busy", "concurrency")
_STATES = {"running": "green", "starting": "yellow", "draining": "yellow", "failed": "red", "stopped": "red"}
_OLD_AGE = 60.0
"""Seconds after which an incomplete record is highlighted."""
_LONGEST_NAME = 40
"""Columns that a name keeps even in a narrow terminal."""


# Data ---------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Report of one process, or the reason why it is missing."""

    process: str
    """Host and port."""
    at: float
    """Monotonic time."""
    statistics: Mapping[str, Any] | None
    findings: Sequence[str] = ()


class Frame(NamedTuple):
    """All processes at one moment; everything in it is ready for JSON."""

    at: float
    """Seconds since the epoch."""
    groups: list[str]
    totals: dict[str, Any]
    processes: list[dict[str, Any]]
    partitions: list[dict[str, Any]]
    """Sorted by the age of their oldest incomplete record, then by lag."""
    handlers: list[dict[str, Any]]
    findings: list[dict[str, str]]
    """`process` and `sentence` of each finding."""


def take(server: HealthServer) -> Snapshot:
    """Request the statistics and findings of a process."""
    process = urllib.parse.urlsplit(server.base).netloc
    try:
        _, statistics = server.get_json("statistics.json")
        _, ready = server.get_json("readyz", UNAVAILABLE)
    except NoAnswerError as error:
        return Snapshot(process, time.monotonic(), None, [error.message])
    return Snapshot(process, time.monotonic(), statistics, [*ready["reasons"], *ready["findings"]])


class Frames:
    """Combines snapshots into frames; remembers the previous counters, to compute rates."""

    def __init__(self) -> None:
        self.answered = False
        """Whether any process has ever answered."""
        self._counters: dict[tuple[str | int, ...], tuple[float, int]] = {}
        """Time and value by process, and handler or partition."""

    def add(self, snapshots: Sequence[Snapshot], now: float) -> Frame:
        """Return a frame of the latest snapshot of each process; *now* is in seconds since the epoch."""
        processes, partitions, handlers = [], [], []
        for snapshot in snapshots:
            statistics = snapshot.statistics or {"partitions": (), "handlers": ()}
            own = [self._partition(snapshot, partition) for partition in statistics["partitions"]]
            working = [self._handler(snapshot, handler) for handler in statistics["handlers"]]
            processes.append(_process(snapshot, own, working))
            partitions += own
            handlers += working
        groups = {snapshot.statistics["group_id"] for snapshot in snapshots if snapshot.statistics is not None}
        self.answered |= bool(groups)
        names = dict.fromkeys(handler["name"] for handler in handlers)
        return Frame(
            at=now,
            groups=sorted(groups),
            totals={
                "processes": len(processes),
                "answering": sum(row["state"] is not None for row in processes),
                "oldest_incomplete_age": max((row["oldest_incomplete_age"] or 0.0 for row in partitions), default=None),
                **_sums(handlers, ["halted"]),
                **_sums(processes, _PROCESS_FIELDS),
            },
            processes=processes,
            partitions=sorted(  # the worst first
                partitions,
                key=lambda row: (
                    *(-(row["oldest_incomplete_age"] or 0.0), -(row["lag"] or 0)),
                    *(row["topic"], row["partition"]),
                ),
            ),
            handlers=[
                {"name": name, **_sums([row for row in handlers if row["name"] == name], _SUMMED)} for name in names
            ],
            findings=[
                {"process": snapshot.process, "sentence": sentence}
                for snapshot in snapshots
                for sentence in snapshot.findings
            ],
        )

    def _handler(self, snapshot: Snapshot, handler: Mapping[str, Any]) -> dict[str, Any]:
        done = sum(handler[outcome] for outcome in _OUTCOMES)
        return {**handler, "records_per_second": self._rate(snapshot.at, done, snapshot.process, handler["name"])}

    def _partition(self, snapshot: Snapshot, partition: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{name: partition[name] for name in _PARTITION_FIELDS},
            "offsets_per_second": self._rate(
                snapshot.at, partition["committable"], snapshot.process, partition["topic"], partition["partition"]
            ),
            "process": snapshot.process,
        }

    def _rate(self, at: float, value: int | None, *key: str | int) -> float | None:
        """Return the growth of a counter per second; None at first, and after a restart of its process."""
        before = self._counters.pop(key, None)
        if value is None:
            return None
        self._counters[key] = (at, value)
        return None if before is None or value < before[1] else (value - before[1]) / max(at - before[0], 0.001)


def _process(
    snapshot: Snapshot, partitions: Sequence[Mapping[str, Any]], handlers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    row = {"process": snapshot.process, "state": None, **dict.fromkeys(("records_per_second", *_PROCESS_FIELDS))}
    if snapshot.statistics is None:
        return row
    return {
        **row,
        "state": snapshot.statistics["state"],
        "partitions": len(partitions),
        "lag": sum(partition["lag"] or 0 for partition in partitions),
        "incomplete": sum(partition["incomplete"] for partition in partitions),
        **_sums(handlers, ["busy", "concurrency"]),
    }


def _sums(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Add up counts, and the rate as far as it is known."""
    rates = [row["records_per_second"] for row in rows if row["records_per_second"] is not None]
    return {name: sum(row[name] or 0 for row in rows) for name in names} | {
        "records_per_second": sum(rates) if rates else None
    }


# View ---------------------------------------------------------------------------------------


def view(frame: Frame, height: int | None = None) -> Group:
    """Draw a frame, with the most important rows first.

    Args:
        frame: The frame.
        height: Lines of the terminal; None shows everything.
    """
    most = sys.maxsize if height is None else max(height // 8, 2)
    several = len(frame.processes) > 1
    processes = sorted(frame.processes, key=lambda row: row["state"] is not None)  # silent ones first
    sections = [
        _table(_PARTITIONS, frame.partitions, 3 * most),
        _table(_FINDINGS_OF_SEVERAL if several else _FINDINGS, frame.findings, most),
        _table(_PROCESSES, processes if several else [], most),
        _table(_HANDLERS, frame.handlers, most),
    ]
    shown = [Padding(section, (1, 0, 0, 0), expand=False) for section in sections if section.row_count]
    return Group(_header(frame), _totals(frame), *shown)


def _header(frame: Frame) -> Text:
    return Text.assemble(
        ("aioshard top", "bold"),
        "  ",
        (as_text(", ".join(frame.groups)) or "no answer yet", "bold cyan"),
        "  ",
        (f"{dt.datetime.fromtimestamp(frame.at, dt.UTC).astimezone():%H:%M:%S}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _totals(frame: Frame) -> Text:
    totals = frame.totals
    return Text.assemble(
        (
            f"{totals['answering']}/{totals['processes']} processes",
            "" if totals["answering"] == totals["processes"] else "bold red",
        ),
        (f"  {number(totals['records_per_second'])} records/s", "bold"),
        f"  lag {number(totals['lag'])}  incomplete {number(totals['incomplete'])}",
        f"  busy {totals['busy']:,}/{totals['concurrency']:,}",
        (f"  halted {totals['halted']}" if totals["halted"] else "", "bold red"),
        no_wrap=True,
        overflow="ellipsis",
    )


Columns = Mapping[str, Callable[[Mapping[str, Any]], Text | str]]
"""Headings of a table, each with the function that formats its cell of a row."""


def _number(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: number(row[name])


def _busy(row: Mapping[str, Any]) -> str:
    return "-" if row["busy"] is None else f"{row['busy']:,}/{row['concurrency']:,}"


_PARTITIONS: Columns = {
    "partition": lambda row: Text(
        as_text(f"{row['topic']}/{row['partition']}"), "" if row["paused"] is None else "yellow"
    ),
    "lag": _number("lag"),
    "behind": lambda row: age(row["lag_seconds"]),
    "offsets/s": _number("offsets_per_second"),
    "incomplete": _number("incomplete"),
    "oldest": lambda row: Text(
        age(row["oldest_incomplete_age"]), "bold red" if (row["oldest_incomplete_age"] or 0.0) >= _OLD_AGE else ""
    ),
    "process": lambda row: Text(as_text(row["process"])),
}
_PROCESSES: Columns = {
    "process": lambda row: Text(as_text(row["process"])),
    "state": lambda row: Text(row["state"] or "silent", _STATES.get(row["state"], "bold red")),
    "partitions": _number("partitions"),
    "records/s": _number("records_per_second"),
    "lag": _number("lag"),
    "incomplete": _number("incomplete"),
    "busy": _busy,
}
_HANDLERS: Columns = {
    "handler": lambda row: Text(as_text(row["name"])),
    "records/s": _number("records_per_second"),
    "busy": _busy,
    "retried": _number("retried"),
    "skipped": _number("skipped"),
    "dead": _number("dead_lettered"),
    "parked": _number("parked"),
    "halted": lambda row: Text(number(row["halted"]), "bold red" if row["halted"] else ""),
}
_FINDINGS: Columns = {"look at": lambda row: Text(as_text(row["sentence"]), "yellow")}
_FINDINGS_OF_SEVERAL: Columns = {
    "look at": lambda row: Text(as_text(f"{row['process']} {row['sentence']}"), "yellow"),
}


def _table(columns: Columns, rows: Sequence[Mapping[str, Any]], most: int) -> Table:
    """Return a table of the first rows, the names in its first column."""
    first, *others = columns
    longest = max((len(columns[first](row)) for row in rows), default=0)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True, overflow="ellipsis", min_width=min(longest, _LONGEST_NAME))
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True, overflow="ellipsis", min_width=len(heading))
    for row in rows[:most]:
        table.add_row(*(cell(row) for cell in columns.values()))
    if len(rows) > most:
        table.add_row(Text(f"… {len(rows) - most} more", "dim"))
    return table


def number(value: float | None) -> str:
    """Format a count or a rate.

    Example:
        >>> number(None), number(0.25), number(12345.6)
        ('-', '0.2', '12,346')
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 and value != int(value) else f"{value:,.0f}"  # noqa: PLR2004 - one digit


# Command ------------------------------------------------------------------------------------


@click.command()
@urls_argument
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    help="Seconds between two frames.",
)
@click.option("--once", is_flag=True, help="Print one frame, with rates, and end.")
@timeout_option
@options.as_json("each frame")
def command(urls: Sequence[str], *, interval: float, once: bool, timeout: float, as_json: bool) -> int:
    """Show running processes in the terminal, several as one.

    URL is the base of a health server; the default is http://127.0.0.1:8080. Rates are measured between two frames. A
    process that does not answer is shown as such. Ctrl-C ends. If standard output is not a terminal, one frame is
    printed. Ends with 3 if no process has ever answered.
    """
    servers, frames, console = health_servers(urls, timeout), Frames(), Console()
    once = once or not (as_json or sys.stdout.isatty())
    live = None if once or as_json else Live(console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        frame = _next_frame(servers, frames)
        if once and frames.answered:
            time.sleep(interval)
            frame = _next_frame(servers, frames)
        while True:
            if as_json:
                print_json(frame._asdict())
            elif live is None:
                console.print(view(frame))
            else:
                live.update(view(frame, console.height), refresh=True)
            if once:
                break
            time.sleep(interval)
            frame = _next_frame(servers, frames)
    if frames.answered:
        return 0
    for finding in frame.findings:
        click.echo(f"Error: {finding['sentence']}", err=True)
    return UNHEALTHY


def _next_frame(servers: Sequence[HealthServer], frames: Frames) -> Frame:
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        return frames.add(list(pool.map(take, servers)), time.time())
