"""`aioshard top`: running processes in a terminal, several as one."""

import concurrent.futures
import contextlib
import datetime as dt
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from aioshard.cli.output import UNHEALTHY, print_json
from aioshard.core.text import as_text
from aioshard.records import age

_OUTCOMES = ("processed", "skipped", "dead_lettered", "parked", "superseded", "expired")
_SUMMED = ("busy", "concurrency", "shards", *_OUTCOMES, "retried", "halted")
_PARTITION_FIELDS = (
    "topic",
    "partition",
    "lag",
    "lag_seconds",
    "committed",
    "end_offset",
    "incomplete",
    "paused",
    "oldest_incomplete_age",
)
_PROCESS_FIELDS = ("partitions", "lag", "incomplete", "busy", "concurrency")
_STATES = {"running": "green", "starting": "yellow", "draining": "yellow", "failed": "red", "stopped": "red"}
_OLD_AGE = 60.0
"""Seconds after which an incomplete record is highlighted."""
_LONGEST_NAME = 40
"""Columns that a name keeps even in a narrow terminal."""


# Data ---------------------------------------------------------------------------------------

Row = Mapping[str, Any]


class Snapshot(NamedTuple):
    """Report of one process, or the reason why it is missing."""

    process: str
    """Its address: host and port, and the path below which the routes of an app are mounted."""
    at: float
    """Monotonic time."""
    statistics: Row | None
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
    """Sums over the processes of a `group`; handlers of two groups may have the same `name`."""
    findings: list[dict[str, str]]
    """`process` and `sentence` of each finding."""


def take(server: HealthServer) -> Snapshot:
    """Request the statistics and findings of a process."""
    address = urllib.parse.urlsplit(server.base)
    process = address.netloc + address.path
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
        processes: list[dict[str, Any]] = []
        partitions: list[dict[str, Any]] = []
        handlers: list[dict[str, Any]] = []
        for snapshot in snapshots:
            statistics = snapshot.statistics or {"partitions": (), "handlers": ()}
            own = [self._partition(snapshot, partition) for partition in statistics["partitions"]]
            working = [self._handler(snapshot, handler) for handler in statistics["handlers"]]
            processes.append(_process(snapshot, own, working))
            partitions += own
            handlers += working
        groups = {group for snapshot in snapshots if (group := _group(snapshot)) is not None}
        self.answered |= bool(groups)
        return Frame(
            at=now,
            groups=sorted(groups),
            totals=_totals_of(processes, partitions, handlers),
            processes=processes,
            partitions=sorted(partitions, key=_urgency),
            handlers=_of_groups(handlers),
            findings=_findings(snapshots),
        )

    def _handler(self, snapshot: Snapshot, handler: Row) -> dict[str, Any]:
        handler = {**dict.fromkeys(_OUTCOMES, 0), **handler}  # an older process does not know all of them
        done = sum(handler[outcome] for outcome in _OUTCOMES)
        return {
            **handler,
            "group": _group(snapshot),
            "records_per_second": self._rate(snapshot.at, done, snapshot.process, handler["name"]),
        }

    def _partition(self, snapshot: Snapshot, partition: Row) -> dict[str, Any]:
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
        if before is None:
            return None
        earlier, earlier_value = before
        if value < earlier_value:
            return None
        return (value - earlier_value) / max(at - earlier, 0.001)


def _group(snapshot: Snapshot) -> str | None:
    return None if snapshot.statistics is None else snapshot.statistics["group_id"]


def _totals_of(
    processes: Sequence[Row],
    partitions: Sequence[Row],
    handlers: Sequence[Row],
) -> dict[str, Any]:
    answering = sum(row["state"] is not None for row in processes)
    ages = [row["oldest_incomplete_age"] or 0.0 for row in partitions]
    return {
        "processes": len(processes),
        "answering": answering,
        "oldest_incomplete_age": max(ages, default=None),
        **_sums(handlers, ["halted"]),
        **_sums(processes, _PROCESS_FIELDS),
    }


def _urgency(partition: Row) -> tuple[Any, ...]:
    """Return the sort key that puts the worst partition first."""
    oldest = partition["oldest_incomplete_age"] or 0.0
    lag = partition["lag"] or 0
    return -oldest, -lag, partition["topic"], partition["partition"]


def _of_groups(handlers: Sequence[Row]) -> list[dict[str, Any]]:
    """Add up the rows of a handler of a group over all processes."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for handler in handlers:
        rows.setdefault((handler["group"], handler["name"]), []).append(handler)
    return [{"group": group, "name": name, **_sums(own, _SUMMED)} for (group, name), own in rows.items()]


def _findings(snapshots: Sequence[Snapshot]) -> list[dict[str, str]]:
    return [
        {"process": snapshot.process, "sentence": sentence} for snapshot in snapshots for sentence in snapshot.findings
    ]


def _process(snapshot: Snapshot, partitions: Sequence[Row], handlers: Sequence[Row]) -> dict[str, Any]:
    row = {
        "process": snapshot.process,
        "group": _group(snapshot),
        "state": None,
        **dict.fromkeys(("records_per_second", *_PROCESS_FIELDS)),
    }
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


def _sums(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
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
        _table(_HANDLERS if len(frame.groups) <= 1 else _HANDLERS_OF_SEVERAL, frame.handlers, most),
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
    all_answer = totals["answering"] == totals["processes"]
    halted = f"  halted {totals['halted']}" if totals["halted"] else ""
    return Text.assemble(
        (f"{totals['answering']}/{totals['processes']} processes", "" if all_answer else "bold red"),
        (f"  {number(totals['records_per_second'])} records/s", "bold"),
        f"  lag {number(totals['lag'])}  incomplete {number(totals['incomplete'])}",
        f"  busy {totals['busy']:,}/{totals['concurrency']:,}",
        (halted, "bold red"),
        no_wrap=True,
        overflow="ellipsis",
    )


Cell = Text | str


class Columns(NamedTuple):
    """The headings of a table, and the function that formats the cells of a row."""

    headings: tuple[str, ...]
    cells: Callable[[Row], tuple[Cell, ...]]


def _partition_cells(row: Row) -> tuple[Cell, ...]:
    paused_style = "" if row["paused"] is None else "yellow"
    oldest = row["oldest_incomplete_age"]
    oldest_style = "bold red" if oldest is not None and oldest >= _OLD_AGE else ""
    return (
        Text(as_text(f"{row['topic']}/{row['partition']}"), paused_style),
        number(row["lag"]),
        age(row["lag_seconds"]),
        number(row["offsets_per_second"]),
        number(row["incomplete"]),
        Text(age(oldest), oldest_style),
        Text(as_text(row["process"])),
    )


def _process_cells(row: Row) -> tuple[Cell, ...]:
    state = row["state"]
    return (
        Text(as_text(row["process"])),
        Text(state or "silent", _STATES.get(state, "bold red")),
        number(row["partitions"]),
        number(row["records_per_second"]),
        number(row["lag"]),
        number(row["incomplete"]),
        _busy(row),
    )


def _handler_cells(row: Row) -> tuple[Cell, ...]:
    halted_style = "bold red" if row["halted"] else ""
    return (
        Text(as_text(row["name"])),
        number(row["records_per_second"]),
        _busy(row),
        number(row["retried"]),
        number(row["skipped"]),
        number(row["dead_lettered"]),
        number(row["parked"]),
        Text(number(row["halted"]), halted_style),
    )


def _handler_of_group_cells(row: Row) -> tuple[Cell, ...]:
    name = Text(as_text(f"{row['group']} {row['name']}"))
    return (name, *_handler_cells(row)[1:])


def _finding_cells(row: Row) -> tuple[Cell, ...]:
    return (Text(as_text(row["sentence"]), "yellow"),)


def _finding_of_process_cells(row: Row) -> tuple[Cell, ...]:
    return (Text(as_text(f"{row['process']} {row['sentence']}"), "yellow"),)


def _busy(row: Row) -> str:
    if row["busy"] is None:
        return "-"
    return f"{row['busy']:,}/{row['concurrency']:,}"


_PARTITIONS = Columns(("partition", "lag", "behind", "offsets/s", "incomplete", "oldest", "process"), _partition_cells)
_PROCESSES = Columns(("process", "state", "partitions", "records/s", "lag", "incomplete", "busy"), _process_cells)
_HANDLER_HEADINGS = ("handler", "records/s", "busy", "retried", "skipped", "dead", "parked", "halted")
_HANDLERS = Columns(_HANDLER_HEADINGS, _handler_cells)
_HANDLERS_OF_SEVERAL = Columns(_HANDLER_HEADINGS, _handler_of_group_cells)
_FINDINGS = Columns(("look at",), _finding_cells)
_FINDINGS_OF_SEVERAL = Columns(("look at",), _finding_of_process_cells)


def _table(columns: Columns, rows: Sequence[Row], most: int) -> Table:
    """Return a table of the first rows, the names in its first column."""
    first, *others = columns.headings
    lines = [columns.cells(row) for row in rows]
    longest = max((len(cells[0]) for cells in lines), default=0)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True, overflow="ellipsis", min_width=min(longest, _LONGEST_NAME))
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True, overflow="ellipsis", min_width=len(heading))
    for cells in lines[:most]:
        table.add_row(*cells)
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
    if 0 < value < 10 and value != int(value):  # noqa: PLR2004 - one digit
        return f"{value:.1f}"
    return f"{value:,.0f}"


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
    servers = health_servers(urls, timeout)
    frames = Frames()
    frame: Frame | None = None
    once = once or not (as_json or sys.stdout.isatty())
    with contextlib.suppress(KeyboardInterrupt), _display(as_json=as_json, live=not once) as show:
        frame = _next_frame(servers, frames)
        if once and frames.answered:  # rates need two frames
            time.sleep(interval)
            frame = _next_frame(servers, frames)
        show(frame)
        while not once:
            time.sleep(interval)
            frame = _next_frame(servers, frames)
            show(frame)
    if frames.answered:
        return 0
    for finding in () if frame is None else frame.findings:
        click.echo(f"Error: {finding['sentence']}", err=True)
    return UNHEALTHY


@contextlib.contextmanager
def _display(*, as_json: bool, live: bool) -> Iterator[Callable[[Frame], None]]:
    """Provide the function that shows a frame: as JSON, on the whole screen with *live*, or as text."""
    console = Console()
    if as_json:
        yield lambda frame: print_json(frame._asdict())
    elif live:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            yield lambda frame: screen.update(view(frame, console.height), refresh=True)
    else:
        yield lambda frame: console.print(view(frame))


def _next_frame(servers: Sequence[HealthServer], frames: Frames) -> Frame:
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        return frames.add(list(pool.map(take, servers)), time.time())
