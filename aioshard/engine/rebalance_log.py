"""History of the rebalances: the effect of each one and how long its phases took."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

from aioshard.core.histogram import Histogram
from aioshard.engine.epoch import Epoch
from aioshard.engine.log_fields import partition_fields
from aioshard.observe import RebalanceKind, RebalanceKindStatistics, RebalancePhase, RebalanceReport

__all__ = ["RebalanceLog", "tell_opened"]

logger = logging.getLogger("aioshard.engine.rebalance")

_KEPT = 20
"""How many of the latest rebalances are reported."""

_DOING: dict[RebalancePhase, str] = {
    "drain": "what runs of the partitions that are taken away is being finished",
    "commit": "what was finished is being committed",
    "join": "our partitions are handed back, and the group has not said yet what is ours: others drain, or join",
    "resume": "the brokers are being asked where to go on",
    "over": "it is over",
}


@dataclasses.dataclass
class _Current:
    """A rebalance that is under way."""

    report: RebalanceReport
    began: float
    """Loop time at which the rebalance began; `phase_began` is that of its current phase."""
    phase_began: float


class RebalanceLog:
    """Records what each rebalance and each opening of partitions does; owned by the `Rebalance`.

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
        self._over: deque[RebalanceReport] = deque(maxlen=_KEPT)
        self._current: _Current | None = None
        self._count = 0
        self._kinds: dict[RebalanceKind, int] = dict.fromkeys(get_args(RebalanceKind), 0)
        self._drains = {kind: Histogram() for kind in self._kinds}
        self._replayed_then = 0
        """Value of `replayed` when the latest rebalance began."""

    def reports(self) -> tuple[RebalanceReport, ...]:
        """The latest rebalances, oldest first; the last one may be under way. Safe from any thread."""
        current = self._current
        over = tuple(self._over)
        if current is not None:
            now = self._clock()
            under_way = dataclasses.replace(
                self._timed(current, now),
                seconds=now - current.began,
                replayed=self._replayed() - self._replayed_then,
            )
            return (*over, under_way)
        if over:
            return (*over[:-1], dataclasses.replace(over[-1], replayed=self._replayed() - self._replayed_then))
        return ()

    def kinds(self) -> tuple[RebalanceKindStatistics, ...]:
        """How many rebalances of each kind there were, including those no longer reported. Safe from any thread."""
        return tuple(
            RebalanceKindStatistics(kind, count, self._drains[kind].counts()) for kind, count in self._kinds.items()
        )

    def doing(self) -> str | None:
        """Current step of the rebalance under way, as a clause; None without one."""
        current = self._current
        return None if current is None else _DOING[current.report.phase]

    # Events ------------------------------------------------------------------------------

    def revoked(self, partitions: int, in_flight: int, *, lost: bool) -> None:
        """Begin a rebalance: partitions are being revoked while *in_flight* of their records run."""
        self._finish()
        cause = "the group membership was lost" if lost else "members, topics or partitions of the group have changed"
        current = self._begin(cause, "join" if lost else "drain", "lost" if lost else "revoked")
        current.report = dataclasses.replace(current.report, revoked=partitions, in_flight=in_flight)
        what = "lost with the group membership" if lost else "being taken away"
        fields = {"event": "lost" if lost else "revoked", "partitions": partitions, "in_flight": in_flight}
        logger.info("%d partition(s) are %s; %d record(s) of them run", partitions, what, in_flight, extra=fields)

    def drained(self, cancelled: int) -> None:
        """End the drain; records that were still running were cancelled."""
        current = self._enter("commit")
        if current is not None:
            self._drains[current.report.kind].add(current.report.drain_seconds)
            ended = max(current.report.in_flight - cancelled, 0)
            current.report = dataclasses.replace(current.report, drained=ended, cancelled=cancelled)
            fields = {"event": "drained", "drained": ended, "cancelled": cancelled}
            message = "the partitions that are taken away are drained: %d record(s) ended, %d were cancelled"
            logger.info(message, ended, cancelled, extra=fields)

    def handed_back(self) -> None:
        """Enter the join phase: none of the revoked partitions are ours until the group assigns them again."""
        self._enter("join")

    def assigned(self, partitions: int, untouched: int, generation: int, *, by_hand: bool = False) -> None:
        """Record an assignment, by the group or manual, of *partitions*, *untouched* of which were never revoked."""
        cause = "the partitions were given by hand" if by_hand else "we have joined the group, or got more of it"
        current = self._current or self._begin(cause, "join", "by_hand" if by_hand else "assigned")
        self._enter("resume")
        current.report = dataclasses.replace(current.report, assigned=partitions, kept=untouched, generation=generation)

    def opened(self, *, in_place: bool) -> None:
        """Count an opened partition as kept if it resumed in place rather than in a new epoch."""
        if self._current is not None and in_place:
            report = self._current.report
            self._current.report = dataclasses.replace(report, kept=report.kept + 1)

    def dropped(self, records: int) -> None:
        """Count the incomplete records that an ended ownership dropped."""
        if self._current is not None and records:
            report = self._current.report
            self._current.report = dataclasses.replace(report, dropped=report.dropped + records)

    def settled(self) -> None:
        """End the rebalance: every owned partition has resumed."""
        if self._current is not None:
            self._finish()
            _tell(self._over[-1])

    # Phases ---------------------------------------------------------------------------

    def _begin(self, cause: str, phase: Literal["drain", "join"], kind: RebalanceKind) -> _Current:
        self._count += 1
        self._kinds[kind] += 1
        if self._over:
            replayed = self._replayed() - self._replayed_then
            self._over[-1] = dataclasses.replace(self._over[-1], replayed=replayed)
        now = self._clock()
        report = RebalanceReport(number=self._count, at=time.time(), cause=cause, phase=phase, kind=kind)
        self._replayed_then = self._replayed()
        self._current = _Current(report, now, now)
        return self._current

    def _enter(self, phase: RebalancePhase) -> _Current | None:
        current = self._current
        if current is not None:
            now = self._clock()
            current.report = dataclasses.replace(self._timed(current, now), phase=phase)
            current.phase_began = now
        return current

    def _timed(self, current: _Current, now: float) -> RebalanceReport:
        """The report including the time spent in the current phase so far."""
        report = current.report
        if report.phase == "over":
            return report
        name = f"{report.phase}_seconds"
        return dataclasses.replace(report, **{name: getattr(report, name) + now - current.phase_began})

    def _finish(self) -> None:
        current = self._enter("over")
        if current is not None:
            self._over.append(dataclasses.replace(current.report, seconds=current.phase_began - current.began))
            self._current = None


def _tell(report: RebalanceReport) -> None:
    logger.info(
        "rebalance %d, generation %s, took %.2f s: %s; %d partition(s) taken away with %d record(s) in flight, of "
        "which %d ended and %d were cancelled; %d given, %d kept in place, %d record(s) in hand dropped; drain %.2f s, "
        "commit %.2f s, join %.2f s, resume %.2f s",
        report.number,
        report.generation,
        report.seconds,
        report.cause,
        report.revoked,
        report.in_flight,
        report.drained,
        report.cancelled,
        report.assigned,
        report.kept,
        report.dropped,
        report.drain_seconds,
        report.commit_seconds,
        report.join_seconds,
        report.resume_seconds,
        extra={
            "event": "rebalanced",
            "generation": report.generation,
            "seconds": round(report.seconds, 3),
            "revoked": report.revoked,
            "assigned": report.assigned,
            "kept": report.kept,
            "dropped": report.dropped,
        },
    )


def tell_opened(epoch: Epoch, group: str) -> None:
    """Log the state in which a partition resumes: committed offset, position and records that this process holds."""
    tracker = epoch.tracker
    started = sum(1 for delivery in tracker.values() if delivery.starts)
    finished = sum(run.end - run.start for run in epoch.finished())
    logger.info(
        "%s: epoch %d, committed %s, position %d, %d record(s) in hand of which %d were started, %d offset(s) finished "
        "beyond the commit",
        epoch.topic_partition,
        epoch.number,
        epoch.acknowledged,
        tracker.position,
        len(tracker),
        started,
        finished,
        extra=partition_fields(
            "assigned",
            epoch.topic_partition,
            epoch=epoch.number,
            committed=epoch.acknowledged,
            position=tracker.position,
            incomplete=len(tracker),
            started=started,
            finished=finished,
            group=group,
        ),
    )
