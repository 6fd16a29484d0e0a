"""`aioshard top`: running processes in a terminal, several as one."""

import concurrent.futures
import contextlib
import datetime as dt
import json
import os
import select
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from aioshard.cli import options
from aioshard.cli.asking import HealthServer, NoAnswerError
from aioshard.cli.exit_codes import UNHEALTHY
from aioshard.cli.tables import as_text

__all__ = ["Answered", "Frame", "History", "View", "age", "ask", "command", "number", "shortened"]

_UNAVAILABLE = 503
_OUTCOMES = ("processed", "skipped", "dead_lettered", "parked")
_REBALANCES = 5

Statistics = Mapping[str, Any]


class Answered(NamedTuple):
    """What one process told, or why it did not."""

    name: str
    """Host and port, and behind `#` the worker."""
    at: float
    """When, by a clock that never goes back."""
    statistics: Statistics | None
    findings: tuple[str, ...]
    error: str | None


def ask(servers: Sequence[HealthServer], clock: Callable[[], float] = time.monotonic) -> list[Answered]:
    """Ask all servers at the same time; each may be one process or the supervisor of several."""
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        return [one for answered in pool.map(lambda server: list(_asked(server, clock)), servers) for one in answered]


def _asked(server: HealthServer, clock: Callable[[], float]) -> Iterable[Answered]:
    name = urllib.parse.urlsplit(server.base).netloc
    try:
        found = server.ask("statistics.json").json(f"{server.base}/statistics.json")
        ready = server.ask("readyz", _UNAVAILABLE).json(f"{server.base}/readyz")
    except NoAnswerError as error:
        yield Answered(name, clock(), None, (), str(error))
        return
    at = clock()
    findings = (*ready.get("reasons", ()), *ready.get("findings", ()))
    if "workers" not in found:
        yield Answered(name, at, found, findings, None)
        return
    for worker in found["workers"]:
        number = worker["worker"]
        # The supervisor's findings name the worker.
        prefix = f"worker {number}: "
        theirs = tuple(dict.fromkeys(one.removeprefix(prefix) for one in findings if one.startswith(prefix)))
        yield Answered(f"{name}#{number}", at, worker["statistics"], theirs, worker["error"])


class Frame(NamedTuple):
    """All processes at one moment; everything in it is ready for JSON."""

    at: float
    """Seconds since the epoch."""
    groups: list[str]
    totals: dict[str, Any]
    processes: list[dict[str, Any]]
    partitions: list[dict[str, Any]]
    """The one with the oldest incomplete record first, then the one with the largest lag."""
    handlers: list[dict[str, Any]]
    findings: list[dict[str, str]]
    """`process` and `sentence` of each."""
    rebalances: list[dict[str, Any]]
    """The latest, newest first."""

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict()


class History:
    """Remembers what was told before, for what is so much a second."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self.answered = False
        """Whether any process has ever told something."""
        self._before: dict[str, Answered] = {}

    def frame(self, told: Sequence[Answered], now: float) -> Frame:
        """All of them as one, compared with what they told before.

        Args:
            told: By each process.
            now: Seconds since the epoch.
        """
        looks = [_Look(one, self._before.get(one.name)) for one in told]
        self.answered |= any(one.statistics is not None for one in told)
        for one in told:
            if one.statistics is not None:
                self._before[one.name] = one
        live = [look for look in looks if look.statistics is not None]
        partitions = sorted((row for look in live for row in look.partitions()), key=_worst_first)
        rebalances = [row for look in live for row in look.rebalances()]
        return Frame(
            at=now,
            groups=sorted({look.statistics["group_id"] for look in live}),
            totals=_totals(live, len(looks)),
            processes=[look.process() for look in looks],
            partitions=partitions,
            handlers=_handlers(live),
            findings=[one for look in looks for one in look.findings()],
            rebalances=sorted(rebalances, key=lambda row: -row["at"])[:_REBALANCES],
        )


class _Look:
    """One process now and before."""

    def __init__(self, told: Answered, before: Answered | None) -> None:
        self._told = told
        self.statistics: Any = told.statistics
        self._before: Statistics | None = None
        self._seconds = 0.0
        if before is not None and before.statistics is not None and told.statistics is not None:
            self._seconds = told.at - before.at
            if self._seconds > 0 and _done(told.statistics) >= _done(before.statistics):  # else it was started anew
                self._before = before.statistics

    def rate(self, value: Callable[[Statistics], float | None]) -> float | None:
        """How much a figure grows in a second; None where that is not known."""
        if self._before is None:
            return None
        now, before = value(self.statistics), value(self._before)
        return None if now is None or before is None else max(now - before, 0.0) / self._seconds

    def process(self) -> dict[str, Any]:
        found = self.statistics
        known: dict[str, Any] = {"process": self._told.name, "error": self._told.error, "state": None}
        if found is None:
            return known
        return known | {
            "state": found["state"],
            "partitions": len(found["partitions"]),
            "records_per_second": self.rate(_done),
            "lag": _sum(found["partitions"], "lag"),
            "incomplete": _sum(found["partitions"], "incomplete"),
            "busy": _sum(found["handlers"], "busy"),
            "concurrency": _sum(found["handlers"], "concurrency"),
            "buffered_bytes": found["buffered_bytes"],
            "rebalances": found["rebalances"],
        }

    def partitions(self) -> Iterable[dict[str, Any]]:
        shown = ("topic", "partition", "lag", "lag_seconds", "committed", "end_offset", "incomplete", "paused")
        before = {} if self._before is None else _committable(self._before)
        for one in self.statistics["partitions"]:
            was = before.get((one["topic"], one["partition"]))
            moved = None if was is None or one["committable"] is None else max(one["committable"] - was, 0)
            yield {
                **{name: one[name] for name in shown},
                "oldest_incomplete_age": one["oldest_incomplete_age"],
                "offsets_per_second": None if moved is None else moved / self._seconds,
                "process": self._told.name,
            }

    def handler(self, name: str) -> float | None:
        return self.rate(lambda found: _done({"handlers": [one for one in found["handlers"] if one["name"] == name]}))

    def rebalances(self) -> Iterable[dict[str, Any]]:
        for one in self.statistics.get("rebalance_reports", ()):
            yield {**one, "process": self._told.name}

    def findings(self) -> Iterable[dict[str, str]]:
        sentences = self._told.findings or ([self._told.error] if self._told.error else ())
        for one in sentences:
            yield {"process": self._told.name, "sentence": one}


def _committable(statistics: Statistics) -> dict[tuple[str, int], int | None]:
    return {(one["topic"], one["partition"]): one["committable"] for one in statistics["partitions"]}


def _done(statistics: Statistics) -> float:
    return float(sum(one[outcome] for one in statistics["handlers"] for outcome in _OUTCOMES))


def _sum(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(row[name] or 0 for row in rows)


def _sum_of_rates(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _totals(live: Sequence[_Look], processes: int) -> dict[str, Any]:
    partitions = [one for look in live for one in look.statistics["partitions"]]
    handlers = [one for look in live for one in look.statistics["handlers"]]
    ages = [one["oldest_incomplete_age"] for one in partitions if one["oldest_incomplete_age"] is not None]
    return {
        "processes": processes,
        "answering": len(live),
        "partitions": len(partitions),
        "records_per_second": _sum_of_rates(look.rate(_done) for look in live),
        "lag": _sum(partitions, "lag"),
        "incomplete": _sum(partitions, "incomplete"),
        "oldest_incomplete_age": max(ages, default=None),
        "busy": _sum(handlers, "busy"),
        "concurrency": _sum(handlers, "concurrency"),
        "halted": _sum(handlers, "halted"),
    }


def _handlers(live: Sequence[_Look]) -> list[dict[str, Any]]:
    """The handlers of all processes, those of the same name together."""
    summed = ("busy", "concurrency", "shards", *_OUTCOMES, "retried", "halted")
    rows: dict[str, dict[str, Any]] = {}
    for look in live:
        for one in look.statistics["handlers"]:
            row = rows.setdefault(
                one["name"], {"name": one["name"], "records_per_second": None, **dict.fromkeys(summed, 0)}
            )
            row["records_per_second"] = _sum_of_rates([row["records_per_second"], look.handler(one["name"])])
            for name in summed:
                row[name] += one[name]
    return list(rows.values())


def _worst_first(row: Mapping[str, Any]) -> tuple[float, float, str, int]:
    return -(row["oldest_incomplete_age"] or 0.0), -(row["lag"] or 0), row["topic"], row["partition"]


def shortened(names: Sequence[str]) -> dict[str, str]:
    """Names of processes without what all have in common: the host.

    Example:
        >>> shortened(["10.0.0.7:8080#0", "10.0.0.7:8080#1"])
        {'10.0.0.7:8080#0': '#0', '10.0.0.7:8080#1': '#1'}
        >>> shortened(["a:8080", "b:8080"])
        {'a:8080': 'a:8080', 'b:8080': 'b:8080'}
    """
    for separator in ("#", ":"):
        heads = {name.rpartition(separator)[0] for name in names}
        if len(heads) == 1 and heads != {""} and len(set(names)) > 1:
            return {name: separator + name.rpartition(separator)[2] for name in names}
    return {name: name for name in names}


_LOOKS_EVERY = 0.05
"""Seconds between two looks at the keys while an answer is waited for."""

Pause = Callable[[float, Callable[[], bool]], bool]
"""Waits for so many seconds, or until something is the case; whether the user wants to end."""


@click.command()
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame, of two looks, and end.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@options.as_json("each frame")
def command(urls: Sequence[str], *, interval: float, once: bool, timeout: float, as_json: bool) -> int:
    """Show running processes in the terminal, several as one.

    URL is the base of a health server, such as http://127.0.0.1:8080; that of a supervisor stands for all of its
    workers. Rates are those between two looks. A process that does not answer is shown as such, and comes back. q or
    Ctrl-C ends. Where standard output is no terminal, one frame is printed. Ends with 3 when nobody has ever answered.
    """
    servers = [HealthServer(url, timeout=timeout) for url in dict.fromkeys(urls)]
    watch = _Watch(servers, interval)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            watch.print_json(most=1 if once else None)
        elif once or not sys.stdout.isatty():
            watch.print_once()
        else:
            watch.live()
    if watch.history.answered:
        return 0
    for finding in watch.latest.findings if watch.latest is not None else ():
        click.echo(f"Error: {finding['sentence']}", err=True)
    return UNHEALTHY


class _Watch:
    """Frame after frame."""

    def __init__(self, servers: Sequence[HealthServer], interval: float) -> None:
        self.history = History()
        self.latest: Frame | None = None
        self._servers = servers
        self._interval = interval

    def _look(self) -> Frame:
        self.latest = self.history.frame(ask(self._servers), time.time())
        return self.latest

    def _compared(self) -> Frame:
        """A frame with rates: of a second look, where the first was answered."""
        self._look()
        if self.history.answered:
            time.sleep(self._interval)
        return self._look()

    def print_json(self, most: int | None) -> None:
        """Print frames, one on each line."""
        if most is not None:
            click.echo(json.dumps(self._compared().asdict()))
            return
        while True:
            click.echo(json.dumps(self._look().asdict()))
            time.sleep(self._interval)

    def print_once(self) -> None:
        """Print one frame, with all that there is."""
        from rich.console import Console  # noqa: PLC0415 - imported on use

        from aioshard.cli.top import View  # noqa: PLC0415

        Console().print(View(self._compared()))

    def live(self) -> None:
        """Show frames until the user wants to end."""
        from rich.console import Console  # noqa: PLC0415 - imported on use
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        from aioshard.cli.top import View  # noqa: PLC0415

        console = Console()
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            Live(Text("asking …"), console=console, screen=True, auto_refresh=False) as live,
            _keys() as pause,
        ):
            while True:
                looked = pool.submit(self._look)
                began = time.monotonic()
                if pause(3600.0, looked.done):
                    return
                live.update(View(looked.result(), console.size.height), refresh=True)
                if pause(max(self._interval - (time.monotonic() - began), 0.0), lambda: False):
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Pause]:
    """A pause that `q` ends, where standard input is a terminal."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # noqa: PLC0415 - not there on Windows
    import tty  # noqa: PLC0415

    before: Any = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)  # a key counts without Enter; Ctrl-C stays a signal
    try:
        yield _listen
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float, until: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not until():
        time.sleep(min(left, _LOOKS_EVERY))
    return False


def _listen(seconds: float, until: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not until():
        ready, _, _ = select.select([sys.stdin], [], [], min(left, _LOOKS_EVERY))
        if ready and ((typed := os.read(sys.stdin.fileno(), 1024)) == b"" or b"q" in typed.lower()):
            return True
    return False


_WIDE = 120
"""Columns from which on more of each partition is shown."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_OLD = 60.0
"""Seconds after which an incomplete record is shown as worth a look."""
_STATES = {"running": "green", "starting": "yellow", "draining": "yellow", "failed": "red", "stopped": "red"}
_FEWEST = 4
"""Lines for partitions in whatever room there is."""
_LINES_FOR_A_FINDING = 10
"""Of the terminal: so many lines let one more finding be shown."""
_LINES_OF_A_FINDING = 2


def number(value: float | None) -> str:
    """A count or a rate, short.

    Example:
        >>> number(None), number(0.25), number(12345.6)
        ('-', '0.2', '12,346')
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 and value != int(value) else f"{value:,.0f}"  # noqa: PLR2004 - one digit


def age(seconds: float | None) -> str:
    """A time, short.

    Example:
        >>> age(None), age(0.31), age(75), age(7300), age(200_000)
        ('-', '0.3 s', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds is None:
        return "-"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    for unit, name, smaller, its_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // smaller)} {its_name}"
    return ""


class View:
    """One frame.

    Args:
        frame: What is shown.
        height: Lines that there are; None shows everything.
    """

    def __init__(self, frame: Frame, height: int | None = None) -> None:
        self._frame = frame
        self._height = height
        self._names = shortened([one["process"] for one in frame.processes])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The parts from top to bottom: what matters most has its room first, and partitions have what is left."""
        width = options.max_width
        room = float("inf") if self._height is None else self._height - _FEWEST - 2

        def fits(*parts: RenderableType) -> list[RenderableType]:
            nonlocal room
            shown = [Text(), *parts] if parts else []
            lines = sum(len(console.render_lines(part, options, pad=False)) for part in shown)
            if lines > room:
                return []
            room -= lines
            return shown

        header = [self._header(), self._totals()]
        room -= sum(len(console.render_lines(part, options, pad=False)) for part in header)
        processes = fits(self._processes()) if len(self._frame.processes) > 1 else []
        findings: list[RenderableType] = []
        most = len(self._frame.findings)
        if self._height is not None:
            most = min(most, max(self._height // _LINES_FOR_A_FINDING, 1))
        while most and not findings:
            findings = fits(*self._findings(console, width, most))
            most -= 1
        handlers = fits(self._handlers()) if self._frame.handlers else []
        rebalances = fits(*self._rebalances())
        rows = len(self._frame.partitions) if room == float("inf") else _FEWEST + int(room)
        yield from (*header, *processes, Text(), self._partitions(rows, wide=width >= _WIDE))
        yield from (*handlers, *findings, *rebalances)

    def _header(self) -> Text:
        groups = as_text(", ".join(self._frame.groups)) or "nothing is known yet"
        when = f"{dt.datetime.fromtimestamp(self._frame.at, dt.UTC).astimezone():%H:%M:%S}"
        header = Text.assemble(("aioshard top", "bold"), "  ", (groups, "bold cyan"), "  ", (when, "dim"))
        header.truncate(200)
        return header

    def _totals(self) -> Text:
        totals = self._frame.totals
        all_answer = totals["answering"] == totals["processes"]
        return Text.assemble(
            (f"{totals['answering']}/{totals['processes']} processes", "" if all_answer else "bold red"),
            "  ",
            (f"{number(totals['records_per_second'])} records/s", "bold"),
            f"  lag {number(totals['lag'])}  incomplete {number(totals['incomplete'])}",
            f"  busy {totals['busy']:,}/{totals['concurrency']:,}",
            (f"  halted {totals['halted']}" if totals["halted"] else "", "bold red"),
        )

    def _processes(self) -> Table:
        most = len(self._frame.processes) if self._height is None else max(self._height // 4, 2)
        table = _table(
            "process", "state", ("partitions", 1), ("records/s", 1), ("lag", 1), ("incomplete", 1), ("busy", 1)
        )
        for one in sorted(self._frame.processes, key=lambda one: one["state"] is not None)[:most]:
            name = Text(as_text(self._names[one["process"]]))
            if one["state"] is None:
                table.add_row(name, Text("no answer", "bold red"), *["-"] * 5)
                continue
            table.add_row(
                name,
                Text(one["state"], _STATES.get(one["state"], "")),
                number(one["partitions"]),
                number(one["records_per_second"]),
                number(one["lag"]),
                number(one["incomplete"]),
                f"{one['busy']}/{one['concurrency']}",
            )
        if (left := len(self._frame.processes) - most) > 0:
            table.add_row(Text(f"… {left} more", "dim"))
        return table

    def _partitions(self, room: int, *, wide: bool) -> Table:
        all_fit = len(self._frame.partitions) <= room
        rows = self._frame.partitions[: None if all_fit else room - 1]  # and a line that says how many more
        columns: list[str | tuple[str, int]] = [
            "partition",
            ("lag", 1),
            ("behind", 1),
            ("offsets/s", 1),
            ("incomplete", 1),
        ]
        columns += [("oldest", 1), "process"]
        columns += [("committed", 1), ("end", 1), "paused"] if wide else []
        table = _table(*columns)
        for one in rows:
            table.add_row(*self._partition(one, wide=wide))
        left = len(self._frame.partitions) - len(rows)
        if left:
            table.add_row(Text(f"… {left} more", "dim"))
        return table

    def _partition(self, one: Mapping[str, Any], *, wide: bool) -> Sequence[Text | str]:
        old = (one["oldest_incomplete_age"] or 0.0) >= _OLD
        paused = one["paused"] is not None
        name = Text(as_text(f"{one['topic']}/{one['partition']}"), "yellow" if paused else "")
        cells: list[Text | str] = [
            name,
            number(one["lag"]),
            age(one["lag_seconds"]),
            number(one["offsets_per_second"]),
            number(one["incomplete"]),
            Text(age(one["oldest_incomplete_age"]), "bold red" if old else ""),
            Text(as_text(self._names[one["process"]])),
        ]
        if wide:
            cells += [number(one["committed"]), number(one["end_offset"]), Text(as_text(one["paused"] or ""), "yellow")]
        return cells

    def _handlers(self) -> Table:
        table = _table(
            "handler",
            ("records/s", 1),
            ("busy", 1),
            ("retried", 1),
            ("skipped", 1),
            ("dead", 1),
            ("parked", 1),
            ("halted", 1),
        )
        for one in self._frame.handlers:
            table.add_row(
                Text(as_text(one["name"])),
                number(one["records_per_second"]),
                f"{one['busy']:,}/{one['concurrency']:,}",
                number(one["retried"]),
                number(one["skipped"]),
                number(one["dead_lettered"]),
                number(one["parked"]),
                Text(number(one["halted"]), "bold red" if one["halted"] else ""),
            )
        return table

    def _findings(self, console: Console, width: int, most: int) -> list[RenderableType]:
        lines: list[RenderableType] = [Text("look at", "bold underline")]
        several = len(self._frame.processes) > 1
        for one in self._frame.findings[:most]:
            name = f"{self._names[one['process']]} " if several else ""
            wrapped = list(Text(as_text(name + one["sentence"]), "yellow").wrap(console, width))
            if self._height is not None and len(wrapped) > _LINES_OF_A_FINDING:
                wrapped = wrapped[:_LINES_OF_A_FINDING]
                wrapped[-1].truncate(width - 1)
                wrapped[-1].append("…")
            lines += wrapped
        left = len(self._frame.findings) - most
        return [*lines, *([Text(f"… {left} more", "dim")] if left > 0 else [])]

    def _rebalances(self) -> list[RenderableType]:
        if not self._frame.rebalances:
            return []
        lines: list[RenderableType] = [Text("rebalances", "bold underline")]
        for one in self._frame.rebalances[: None if self._height is None else 3]:
            when = f"{dt.datetime.fromtimestamp(one['at'], dt.UTC).astimezone():%H:%M:%S}"
            phase = age(one["seconds"]) if one["phase"] == "over" else f"{one['phase']} …"
            told = f"{when} {self._names[one['process']]} {phase}, {one['assigned']} assigned, {one['kept']} kept"
            told += f", {one['replayed']} run again" if one["replayed"] else ""
            line = Text(as_text(f"{told}: {one['cause']}"), no_wrap=True, overflow="ellipsis")
            lines.append(line)
        return lines


def _table(*columns: str | tuple[str, int]) -> Table:
    """A table without lines; a column as a pair is one of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        name, right = (column, False) if isinstance(column, str) else (column[0], True)
        table.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=8 if index == 0 else None,
            ratio=None,
        )
    return table
