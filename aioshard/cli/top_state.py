"""What `aioshard top` shows: the statistics of several processes, asked again and again, as those of one."""

import concurrent.futures
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aioshard.cli.asking import HealthServer, NoAnswerError

__all__ = ["Answered", "Frame", "History", "ask", "shortened"]

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
