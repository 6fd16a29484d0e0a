"""The result of a benchmark: a table for people, one object for programs, and verdicts."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.spec import Measurement


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of the same thing."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.least)}–{_short(self.most)})"


Cell = str | float | Spread | None
"""Numbers stay numbers, for JSON."""


def spread(values: Sequence[float]) -> Spread:
    """Return median and range of *values*, at least one."""
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A measured figure with its required bound and, optionally, a better aim."""

    what: str
    measured: float
    must: float
    aim: float | None = None
    unit: str = ""
    at_least: bool = False
    judged: bool = True
    """False if the input was too small for the figure to mean anything."""

    @property
    def passed(self) -> bool:
        """Whether the bound is met; True if it is not judged."""
        return not self.judged or self._meets(self.must)

    @property
    def aimed(self) -> bool:
        """Whether the aim is met, or without an aim the bound."""
        return self._meets(self.must if self.aim is None else self.aim)

    def _meets(self, bound: float) -> bool:
        return self.measured >= bound if self.at_least else self.measured <= bound

    def asdict(self) -> dict[str, Any]:
        """Return an object for JSON."""
        return {
            "what": self.what,
            "measured": self.measured,
            "relation": "at least" if self.at_least else "at most",
            "must": self.must,
            "aim": self.aim,
            "unit": self.unit,
            "judged": self.judged,
            "passed": self.passed,
        }


@dataclass(slots=True)
class Report:
    """The result of one benchmark."""

    benchmark: str
    title: str
    rows: list[dict[str, Cell]] = field(default_factory=list)
    """Rows of the table; the keys are its headings."""
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Faults of aioshard, regardless of the figures: records lost, or run twice."""
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every bound is met and nothing went wrong."""
        return not self.problems and all(verdict.passed for verdict in self.verdicts)

    def blame(self, contestant: str, runs: Sequence[Measurement]) -> None:
        """Record a problem if aioshard lost records or ran them twice."""
        lost, twice = sum(run.missing for run in runs), sum(run.repeated for run in runs)
        if contestant.startswith("aioshard") and (lost or twice):
            self.problems.append(f"{contestant} lost {lost} records and ran {twice} more than once")

    def asdict(self) -> dict[str, Any]:
        """Return an object for JSON."""
        return {
            "benchmark": self.benchmark,
            "title": self.title,
            "rows": [
                {head: asdict(cell) if isinstance(cell, Spread) else cell for head, cell in row.items()}
                for row in self.rows
            ],
            "verdicts": [verdict.asdict() for verdict in self.verdicts],
            "problems": self.problems,
            "notes": self.notes,
            "passed": self.passed,
        }

    def markdown(self) -> str:
        """Return heading, table and notes as Markdown."""
        heads = list(dict.fromkeys(head for row in self.rows for head in row))
        texts = {head for head in heads if all(isinstance(row.get(head), str) for row in self.rows)}
        lines = [f"### {self.benchmark}: {self.title}", ""]
        if heads:
            lines += [_line(heads), _line(["---" if head in texts else "---:" for head in heads])]
            lines += [_line([_cell(row.get(head)) for head in heads]) for row in self.rows]
        for text in [*self.problems, *self.notes]:
            lines += ["", text]
        return "\n".join([*lines, ""])

    def show(self, console: Console) -> None:
        """Print the table, the verdicts, the problems and the notes."""
        console.print()
        console.print(f"[bold]{self.benchmark}[/bold]  {self.title}")
        if self.rows:
            console.print(self._table())
        for verdict in self.verdicts:
            console.print(_sentence(verdict))
        for problem in self.problems:
            console.print(f"[bold red]WRONG[/]   {problem}", soft_wrap=True)
        for note in self.notes:
            console.print(f"[dim]{note}[/]", soft_wrap=True)

    def _table(self) -> Table:
        table = Table()
        heads = list(dict.fromkeys(head for row in self.rows for head in row))
        for head in heads:
            text = all(isinstance(row.get(head), str) for row in self.rows)
            table.add_column(head, justify="left" if text else "right")
        for row in self.rows:
            table.add_row(*(_cell(row.get(head)) for head in heads))
        return table


def _sentence(verdict: Verdict) -> str:
    word = "[dim]UNJUDGED[/]" if not verdict.judged else "[green]PASS[/]    " if verdict.passed else "[red]MISSED[/]  "
    relation = "at least" if verdict.at_least else "at most"
    bounds = f"must be {relation} {_short(verdict.must)}"
    if verdict.aim is not None:
        bounds += f", aim {_short(verdict.aim)}{' (reached)' if verdict.judged and verdict.aimed else ''}"
    unit = f" {verdict.unit}" if verdict.unit else ""
    return f"{word} {verdict.what}: [bold]{_short(verdict.measured)}{unit}[/] ({bounds})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Cell) -> str:
    if value is None:
        return "–"
    return _short(value) if isinstance(value, int | float) else str(value)


def _short(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"
