"""The rebalance log counts every second and every record exactly once."""

import pytest

from aioshard.engine.counts import Counters
from aioshard.engine.rebalance_log import RebalanceLog
from aioshard.observe import RebalanceReport


class ClockedLog:
    """A rebalance log with the clock and the count of replays that it reads."""

    def __init__(self) -> None:
        self.now = 100.0
        counters = Counters()
        self.counts = counters.topics["orders"]
        self.log = RebalanceLog(lambda: self.now, [counters])

    def rebalance(self, *, replayed: int = 0) -> None:
        """Log a whole rebalance with records that ran again after its begin."""
        self.log.revoked(1, 0, lost=False)
        self.log.drained(0)
        self.log.enter("join")
        self.log.assigned(1, 0, 1)
        self.log.resumed()
        self.counts.replayed += replayed


@pytest.fixture
def clocked() -> ClockedLog:
    return ClockedLog()


def seconds(report: RebalanceReport) -> tuple[float, float, float, float, float]:
    return (
        report.drain_seconds,
        report.commit_seconds,
        report.join_seconds,
        report.resume_seconds,
        report.seconds,
    )


def test_each_phase_has_its_own_seconds(clocked: ClockedLog) -> None:
    clocked.log.revoked(2, 5, lost=False)
    clocked.now += 1.0
    clocked.log.drained(2)
    clocked.now += 0.5
    clocked.log.enter("join")
    clocked.now += 4.0
    assert seconds(clocked.log.reports()[-1]) == (1.0, 0.5, 4.0, 0.0, 5.5)
    clocked.log.assigned(3, 0, 7)
    clocked.now += 0.25
    clocked.log.resumed()
    clocked.now += 60.0

    (report,) = clocked.log.reports()
    assert seconds(report) == (1.0, 0.5, 4.0, 0.25, 5.75)
    assert (report.in_flight, report.drained, report.cancelled) == (5, 3, 2)
    assert (report.revoked, report.assigned, report.generation, report.phase) == (2, 3, 7, "over")


def test_a_dropped_member_neither_drains_nor_commits(clocked: ClockedLog) -> None:
    clocked.log.revoked(2, 5, lost=True)
    assert clocked.log.reports()[-1].phase == "join"
    clocked.now += 3.0
    clocked.log.assigned(2, 0, 7)
    clocked.log.resumed()

    (report,) = clocked.log.reports()
    assert seconds(report) == (0.0, 0.0, 3.0, 0.0, 3.0)
    assert (report.in_flight, report.drained) == (5, 0)


def test_dropped_records_are_summed_over_partitions(clocked: ClockedLog) -> None:
    clocked.log.revoked(2, 0, lost=True)
    clocked.log.count("dropped", 3)
    clocked.log.count("dropped", 0)
    clocked.log.count("dropped", 4)
    clocked.log.resumed()
    clocked.log.count("dropped", 9)  # afterwards, and for another reason

    assert [report.dropped for report in clocked.log.reports()] == [7]


def test_replayed_records_count_for_the_latest_started_rebalance(clocked: ClockedLog) -> None:
    clocked.counts.replayed = 4
    clocked.rebalance(replayed=3)
    assert [report.replayed for report in clocked.log.reports()] == [3]
    clocked.rebalance(replayed=2)
    clocked.log.revoked(1, 0, lost=False)
    clocked.counts.replayed += 1

    assert [report.replayed for report in clocked.log.reports()] == [3, 2, 1]


def test_a_rebalance_interrupted_by_the_next_ends_there_and_is_reported(clocked: ClockedLog) -> None:
    clocked.log.revoked(2, 5, lost=False)
    clocked.log.drained(0)
    clocked.log.enter("join")
    clocked.now += 2.0
    clocked.log.revoked(1, 1, lost=True)
    clocked.now += 1.0
    clocked.log.assigned(2, 1, 9)
    clocked.log.count("kept", 1)
    clocked.log.resumed()

    first, second = clocked.log.reports()
    assert (first.number, first.phase, first.revoked, seconds(first)) == (1, "over", 2, (0.0, 0.0, 2.0, 0.0, 2.0))
    assert (second.number, second.revoked, second.kept, seconds(second)) == (2, 1, 2, (0.0, 0.0, 1.0, 0.0, 1.0))


def test_the_seconds_of_all_rebalances_include_the_one_in_progress(clocked: ClockedLog) -> None:
    clocked.log.revoked(2, 5, lost=False)
    clocked.now += 1.0
    assert clocked.log.seconds == 1.0
    clocked.log.drained(2)
    clocked.log.enter("join")
    clocked.now += 4.0
    clocked.log.assigned(3, 0, 7)
    clocked.now += 0.5
    clocked.log.resumed()
    clocked.now += 60.0
    assert clocked.log.seconds == 5.5
    clocked.log.revoked(1, 0, lost=True)
    clocked.now += 2.0
    clocked.log.revoked(1, 0, lost=True)  # the next one begins in it
    clocked.now += 1.0
    assert clocked.log.seconds == 8.5
