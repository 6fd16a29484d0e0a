"""Rows and ratios that several benchmarks share."""

from benchmarks.report import Cell, Spread, spread
from benchmarks.stage import Runs


def rate_ratio(runs: Runs, one: str, other: str) -> Spread:
    """Return the throughput of *one* divided by that of *other*, round by round."""
    return spread([mine.rate / theirs.rate for mine, theirs in zip(runs[one], runs[other], strict=False)])


def cpu_ratio(runs: Runs, one: str, other: str) -> Spread:
    """Return the CPU per record of *one* divided by that of *other*, round by round."""
    return spread(
        [mine.cpu_per_record / theirs.cpu_per_record for mine, theirs in zip(runs[one], runs[other], strict=False)]
    )


def rate_rows(runs: Runs, *, ceiling: str) -> list[dict[str, Cell]]:
    """Return a row per contestant, with its throughput relative to *ceiling*."""
    return [
        {
            "contestant": name,
            "records": measured[0].records,
            "records/s": spread([run.rate for run in measured]),
            f"× {ceiling}": rate_ratio(runs, name, ceiling),
            "µs CPU/record": spread([run.cpu_per_record for run in measured]).median,
            "lost": sum(run.missing for run in measured),
            "twice": sum(run.repeated for run in measured),
        }
        for name, measured in runs.items()
    ]
