"""History of the rebalances: what each did, how long its phases took, and the log lines about it."""

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, get_args

from aioshard.core.histogram import Histogram
from aioshard.engine.counts import Counters
from aioshard.log_fields import get_logger
from aioshard.observe import RebalanceKind, RebalanceKindStatistics, RebalancePhase, RebalanceReport

logger = get_logger("aioshard.engine.rebalance")

_KEPT = 20
"""How many of the latest rebalances are reported."""

_CAUSES: dict[RebalanceKind, str] = {
    "assigned": "we have joined the group, or were assigned more partitions",
    "revoked": "members, topics or partitions of the group have changed",
    "lost": "the group membership was lost",
    "manual": "the partitions were assigned manually",
}
_STEPS: dict[RebalancePhase, str] = {
    "drain": "running records of the revoked partitions are being finished",
    "commit": "finished records are being committed",
    "join": "our partitions are released, and the group has not assigned new ones yet: others drain or join",
    "resume": "the positions to resume at are being looked up",
    "over": "it is over",
}
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


Rebalanced = Callable[[RebalanceReport], object]
"""Called with the report of each rebalance that is over."""


class RebalanceStatistics(NamedTuple):
    """The part of the statistics of an app that is about rebalances."""

    assignments: int
    reports: tuple[RebalanceReport, ...]
    """The latest rebalances, oldest first; the last one may be in progress."""
    kinds: tuple[RebalanceKindStatistics, ...]
    seconds: float
    """Seconds spent in rebalances, including the one in progress."""
    lost_offsets: int
    """Offsets that the group had read and that the cluster has lost."""


class RebalanceLog:
    """Records what each rebalance does, and the log lines about it; owned by the `Rebalance`.

    Invariants:
        * The phases of a rebalance follow one another without a gap: their seconds add up to `seconds`.
    """

    def __init__(
        self, clock: Callable[[], float], counters: Collection[Counters], rebalanced: Rebalanced | None = None
    ) -> None:
        """Make a log.

        Args:
            clock: Loop time.
            counters: Counters of all handlers; they say how many records this process has run more than once.
            rebalanced: Observes the rebalances; None if nobody does.
        """
        self._clock = clock
        self._counters = counters
        self._rebalanced = rebalanced
        self._reports: deque[RebalanceReport] = deque(maxlen=_KEPT)
        """The latest rebalances; the last one may be in progress. Reports are replaced as a whole."""
        self._timed_at = 0.0
        """Loop time up to which the report in progress has its seconds."""
        self._spent: tuple[float, float | None] = 0.0, None
        """Seconds of the rebalances that are over, and when the one in progress began; replaced as a whole."""
        self._counts: Counter[RebalanceKind] = Counter()
        self._drains = {kind: Histogram() for kind in get_args(RebalanceKind)}
        self._replayed_before = 0
        """How many records had run more than once when the latest rebalance began."""

    def _replayed(self) -> int:
        return sum(counters.replayed for counters in self._counters)

    def reports(self) -> tuple[RebalanceReport, ...]:
        """The latest rebalances, oldest first; the last one may be in progress. Safe from any thread."""
        reports = list(self._reports)
        if reports:
            reports[-1] = dataclasses.replace(
                self._timed(reports[-1]), replayed=self._replayed() - self._replayed_before
            )
        return tuple(reports)

    def kinds(self) -> tuple[RebalanceKindStatistics, ...]:
        """How many rebalances of each kind there were, including those no longer reported. Safe from any thread."""
        return tuple(
            RebalanceKindStatistics(kind, self._counts[kind], drain.counts()) for kind, drain in self._drains.items()
        )

    @property
    def seconds(self) -> float:
        """Seconds spent in rebalances, including the one in progress. Safe from any thread; it never decreases."""
        now = self._clock()  # before the rest: a rebalance that ends meanwhile has its later end
        spent, began = self._spent
        return spent if began is None else spent + max(now - began, 0.0)

    def doing(self) -> str | None:
        """Current step of the rebalance in progress, as a clause; None without one."""
        current = self._current
        return None if current is None else _STEPS[current.phase]

    # Events ------------------------------------------------------------------------------

    def revoked(self, partitions: int, in_flight: int, *, lost: bool) -> None:
        """Begin a rebalance: partitions are being revoked while *in_flight* of their records run."""
        kind: RebalanceKind = "lost" if lost else "revoked"
        self.enter("over")
        self._begin(kind, "join" if lost else "drain", revoked=partitions, in_flight=in_flight)
        log_event(
            kind,
            "partitions are lost" if lost else "partitions are being revoked",
            {"partitions": partitions, "in_flight": in_flight},
        )

    def drained(self, cancelled: int) -> None:
        """End the drain; records that were still running were cancelled."""
        report = self.enter("commit")
        if report is not None:
            self._drains[report.kind].add(report.drain_seconds)
            ended = max(report.in_flight - cancelled, 0)
            self._change(drained=ended, cancelled=cancelled)
            log_event(
                "drained", "running records of the revoked partitions", {"drained": ended, "cancelled": cancelled}
            )

    def assigned(self, partitions: int, untouched: int, generation: int, *, manual: bool = False) -> None:
        """Record an assignment, by the group or manual, of *partitions*, *untouched* of which were never revoked."""
        if self._current is None:
            self._begin("manual" if manual else "assigned", "join")
        self.enter("resume")
        self._change(assigned=partitions, kept=untouched, generation=generation)

    def count(self, figure: str, more: int) -> None:
        """Add to a figure of the rebalance in progress, if there is one."""
        if more and self._current is not None:
            self._change(**{figure: getattr(self._current, figure) + more})

    def resumed(self) -> None:
        """End the rebalance: every owned partition has resumed."""
        report = self.enter("over")
        if report is not None:
            log_event(
                "rebalanced",
                f"rebalance {report.number} is over ({report.cause})",
                {name: getattr(report, name) for name in _LOGGED},
                level=logging.INFO,
            )

    # Phases ---------------------------------------------------------------------------

    @property
    def _current(self) -> RebalanceReport | None:
        report = self._reports[-1] if self._reports else None
        return None if report is None or report.phase == "over" else report

    def _begin(self, kind: RebalanceKind, phase: RebalancePhase, **figures: int) -> None:
        self._reports = deque(self.reports(), _KEPT)  # with the replayed records of the one before
        self._replayed_before = self._replayed()
        self._timed_at = self._clock()
        self._spent = self.seconds, self._timed_at
        self._counts[kind] += 1
        self._reports.append(
            RebalanceReport(
                number=self._counts.total(), at=time.time(), cause=_CAUSES[kind], phase=phase, kind=kind, **figures
            )
        )

    def _change(self, **figures: Any) -> None:
        self._reports[-1] = dataclasses.replace(self._reports[-1], **figures)

    def _timed(self, report: RebalanceReport) -> RebalanceReport:
        """The report including the time spent in its current phase so far."""
        if report.phase == "over":
            return report
        more = self._clock() - self._timed_at
        name = f"{report.phase}_seconds"
        return dataclasses.replace(report, seconds=report.seconds + more, **{name: getattr(report, name) + more})

    def enter(self, phase: RebalancePhase) -> RebalanceReport | None:
        """Begin the next phase of the rebalance in progress, if there is one; return its report."""
        report = self._current
        if report is not None:
            report = self._reports[-1] = dataclasses.replace(self._timed(report), phase=phase)
            self._timed_at = self._clock()
            if phase == "over":
                self._spent = self.seconds, None
                if self._rebalanced is not None:
                    self._rebalanced(report)
        return report


def log_event(event: str, what: str, figures: Mapping[str, Any], level: int = logging.DEBUG, **about: object) -> None:
    """Log an event of a rebalance.

    Args:
        event: Name of the event.
        what: Beginning of the text.
        figures: Figures that the text repeats.
        level: INFO for the one line that sums up a rebalance.
        about: Fields that only programs need.
    """
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    text = ", ".join(f"{name} {value}" for name, value in rounded.items())
    logger.log(level, "%s: %s", what, text, extra={"event": event, **about, **rounded})
