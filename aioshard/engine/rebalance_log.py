"""History of the rebalances: the effect of each one and how long its phases took."""

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, get_args

from aioshard.core.histogram import Histogram
from aioshard.observe import RebalanceKind, RebalanceKindStatistics, RebalancePhase, RebalanceReport

logger = logging.getLogger("aioshard.engine.rebalance")

_KEPT = 20
"""How many of the latest rebalances are reported."""

_CAUSES: dict[RebalanceKind, str] = {
    "assigned": "we have joined the group, or were assigned more of it",
    "revoked": "members, topics or partitions of the group have changed",
    "lost": "the group membership was lost",
    "manual": "the partitions were assigned manually",
}
_STEPS: dict[RebalancePhase, str] = {
    "drain": "running records of the revoked partitions are being finished",
    "commit": "finished records are being committed",
    "join": "our partitions are released, and the group has not assigned new ones yet: others drain or join",
    "resume": "the brokers are being asked where to resume",
    "over": "it is over",
}


class RebalanceLog:
    """Records what each rebalance does, and the log lines about it; owned by the `Rebalance`.

    Invariants:
        * The phases of a rebalance follow one another without a gap: their seconds add up to `seconds`.
    """

    def __init__(self, clock: Callable[[], float], replayed: Callable[[], int]) -> None:
        """Make a log.

        Args:
            clock: Loop time.
            replayed: Returns how many records this process has run more than once.
        """
        self._clock = clock
        self._replayed = replayed
        self._reports: deque[RebalanceReport] = deque(maxlen=_KEPT)
        """The latest rebalances; the last one may be in progress. Reports are replaced as a whole."""
        self._timed_at = 0.0
        """Loop time up to which the report in progress has its seconds."""
        self._counts: Counter[RebalanceKind] = Counter()
        self._drains = {kind: Histogram() for kind in get_args(RebalanceKind)}
        self._replayed_before = 0
        """Value of `replayed` when the latest rebalance began."""

    def reports(self) -> tuple[RebalanceReport, ...]:
        """The latest rebalances, oldest first; the last one may be in progress. Safe from any thread."""
        reports = list(self._reports)
        if reports:
            replayed = self._replayed() - self._replayed_before
            reports[-1] = dataclasses.replace(self._timed(reports[-1]), replayed=replayed)
        return tuple(reports)

    def kinds(self) -> tuple[RebalanceKindStatistics, ...]:
        """How many rebalances of each kind there were, including those no longer reported. Safe from any thread."""
        drains = self._drains.items()
        return tuple(RebalanceKindStatistics(kind, self._counts[kind], drain.counts()) for kind, drain in drains)

    def doing(self) -> str | None:
        """Current step of the rebalance in progress, as a clause; None without one."""
        current = self._current
        return None if current is None else _STEPS[current.phase]

    # Events ------------------------------------------------------------------------------

    def revoked(self, partitions: int, in_flight: int, *, lost: bool) -> None:
        """Begin a rebalance: partitions are being revoked while *in_flight* of their records run."""
        kind: RebalanceKind = "lost" if lost else "revoked"
        self._enter("over")
        self._begin(kind, "join" if lost else "drain")
        self._change(revoked=partitions, in_flight=in_flight)
        what = "partitions are lost" if lost else "partitions are being revoked"
        tell(kind, what, {"partitions": partitions, "in_flight": in_flight})

    def drained(self, cancelled: int) -> None:
        """End the drain; records that were still running were cancelled."""
        report = self._enter("commit")
        if report is not None:
            self._drains[report.kind].add(report.drain_seconds)
            ended = max(report.in_flight - cancelled, 0)
            self._change(drained=ended, cancelled=cancelled)
            tell("drained", "running records of the revoked partitions", {"drained": ended, "cancelled": cancelled})

    def released(self) -> None:
        """Enter the join phase: none of the revoked partitions are ours until the group assigns them again."""
        self._enter("join")

    def assigned(self, partitions: int, untouched: int, generation: int, *, manual: bool = False) -> None:
        """Record an assignment, by the group or manual, of *partitions*, *untouched* of which were never revoked."""
        if self._current is None:
            self._begin("manual" if manual else "assigned", "join")
        self._enter("resume")
        self._change(assigned=partitions, kept=untouched, generation=generation)

    def opened(self, *, in_place: bool) -> None:
        """Count an opened partition as kept if it resumed in place rather than in a new epoch."""
        if self._current is not None and in_place:
            self._change(kept=self._current.kept + 1)

    def dropped(self, records: int) -> None:
        """Count the incomplete records that an ended ownership dropped."""
        if self._current is not None:
            self._change(dropped=self._current.dropped + records)

    def settled(self) -> None:
        """End the rebalance: every owned partition has resumed."""
        report = self._enter("over")
        if report is not None:
            figures = {name: getattr(report, name) for name in _LOGGED}
            tell("rebalanced", f"rebalance {report.number} is over ({report.cause})", figures)

    # Phases ---------------------------------------------------------------------------

    @property
    def _current(self) -> RebalanceReport | None:
        report = self._reports[-1] if self._reports else None
        return None if report is None or report.phase == "over" else report

    def _begin(self, kind: RebalanceKind, phase: RebalancePhase) -> None:
        self._reports = deque(self.reports(), _KEPT)  # with the replayed records of the one before
        self._replayed_before = self._replayed()
        self._timed_at = self._clock()
        self._counts[kind] += 1
        number = self._counts.total()
        report = RebalanceReport(number=number, at=time.time(), cause=_CAUSES[kind], phase=phase, kind=kind)
        self._reports.append(report)

    def _change(self, **figures: Any) -> None:
        self._reports[-1] = dataclasses.replace(self._reports[-1], **figures)

    def _timed(self, report: RebalanceReport) -> RebalanceReport:
        """The report including the time spent in its current phase so far."""
        if report.phase == "over":
            return report
        name, more = f"{report.phase}_seconds", self._clock() - self._timed_at
        return dataclasses.replace(report, seconds=report.seconds + more, **{name: getattr(report, name) + more})

    def _enter(self, phase: RebalancePhase) -> RebalanceReport | None:
        """Begin the next phase of the rebalance in progress, if there is one; return its report."""
        current = self._current
        if current is None:
            return None
        report = dataclasses.replace(self._timed(current), phase=phase)
        self._timed_at = self._clock()
        self._reports[-1] = report
        return report


_LOGGED = (
    "generation",
    "seconds",
    "revoked",
    "in_flight",
    "drained",
    "cancelled",
    "assigned",
    "kept",
    "dropped",
    "drain_seconds",
    "commit_seconds",
    "join_seconds",
    "resume_seconds",
)
"""Figures of a finished rebalance in the log."""


def tell(event: str, what: str, figures: Mapping[str, Any], **about: object) -> None:
    """Log an event of a rebalance.

    Args:
        event: Name of the event.
        what: Beginning of the text.
        figures: Figures that the text repeats.
        about: Fields that only programs need.
    """
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    text = ", ".join(f"{name} {value}" for name, value in rounded.items())
    logger.info("%s: %s", what, text, extra={"event": event, **about, **rounded})
