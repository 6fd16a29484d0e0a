"""How `aioshard top` looks: one frame in a terminal of any size."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from aioshard.cli.tables import as_text
from aioshard.cli.top_state import Frame, shortened

__all__ = ["View", "age", "number"]

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
