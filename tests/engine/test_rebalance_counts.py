"""The rebalance log counts every second and every record exactly once."""

import pytest

from aioshard.engine.rebalance import RebalanceLog
from aioshard.observe import RebalanceReport


class Told:
    """A log, and the clock and the count of replays that it looks at."""

    def __init__(self) -> None:
        self.now = 100.0
        self.replayed = 0
        self.log = RebalanceLog(lambda: self.now, lambda: self.replayed)

    def rebalance(self, *, replayed: int = 0) -> None:
        """A whole one, with what ran again after it had begun."""
        self.log.revoked(1, 0, lost=False)
        self.log.drained(0)
        self.log.enter("join")
        self.log.assigned(1, 0, 1)
        self.log.settled()
        self.replayed += replayed


@pytest.fixture
def told() -> Told:
    return Told()


def seconds(report: RebalanceReport) -> tuple[float, float, float, float, float]:
    return (
        report.drain_seconds,
        report.commit_seconds,
        report.join_seconds,
        report.resume_seconds,
        report.seconds,
    )


def test_each_phase_has_its_own_seconds(told: Told) -> None:
    told.log.revoked(2, 5, lost=False)
    told.now += 1.0
    told.log.drained(2)
    told.now += 0.5
    told.log.enter("join")
    told.now += 4.0
    assert seconds(told.log.reports()[-1]) == (1.0, 0.5, 4.0, 0.0, 5.5)
    told.log.assigned(3, 0, 7)
    told.now += 0.25
    told.log.settled()
    told.now += 60.0

    (report,) = told.log.reports()
    assert seconds(report) == (1.0, 0.5, 4.0, 0.25, 5.75)
    assert (report.in_flight, report.drained, report.cancelled) == (5, 3, 2)
    assert (report.revoked, report.assigned, report.generation, report.phase) == (2, 3, 7, "over")


def test_a_dropped_member_neither_drains_nor_commits(told: Told) -> None:
    told.log.revoked(2, 5, lost=True)
    assert told.log.reports()[-1].phase == "join"
    told.now += 3.0
    told.log.assigned(2, 0, 7)
    told.log.settled()

    (report,) = told.log.reports()
    assert seconds(report) == (0.0, 0.0, 3.0, 0.0, 3.0)
    assert (report.in_flight, report.drained) == (5, 0)


def test_dropped_records_are_summed_over_partitions(told: Told) -> None:
    told.log.revoked(2, 0, lost=True)
    told.log.count("dropped", 3)
    told.log.count("dropped", 0)
    told.log.count("dropped", 4)
    told.log.settled()
    told.log.count("dropped", 9)  # afterwards, and for another reason

    assert [report.dropped for report in told.log.reports()] == [7]


def test_replayed_records_count_for_the_latest_started_rebalance(told: Told) -> None:
    told.replayed = 4
    told.rebalance(replayed=3)
    assert [report.replayed for report in told.log.reports()] == [3]
    told.rebalance(replayed=2)
    told.log.revoked(1, 0, lost=False)
    told.replayed += 1

    assert [report.replayed for report in told.log.reports()] == [3, 2, 1]


def test_a_rebalance_interrupted_by_the_next_ends_there_and_is_reported(told: Told) -> None:
    told.log.revoked(2, 5, lost=False)
    told.log.drained(0)
    told.log.enter("join")
    told.now += 2.0
    told.log.revoked(1, 1, lost=True)
    told.now += 1.0
    told.log.assigned(2, 1, 9)
    told.log.count("kept", 1)
    told.log.settled()

    first, second = told.log.reports()
    assert (first.number, first.phase, first.revoked, seconds(first)) == (1, "over", 2, (0.0, 0.0, 2.0, 0.0, 2.0))
    assert (second.number, second.revoked, second.kept, seconds(second)) == (2, 1, 2, (0.0, 0.0, 1.0, 0.0, 1.0))


def test_the_seconds_of_all_rebalances_include_the_one_in_progress(told: Told) -> None:
    told.log.revoked(2, 5, lost=False)
    told.now += 1.0
    assert told.log.seconds == 1.0
    told.log.drained(2)
    told.log.enter("join")
    told.now += 4.0
    told.log.assigned(3, 0, 7)
    told.now += 0.5
    told.log.settled()
    told.now += 60.0
    assert told.log.seconds == 5.5
    told.log.revoked(1, 0, lost=True)
    told.now += 2.0
    told.log.revoked(1, 0, lost=True)  # the next one begins in it
    told.now += 1.0
    assert told.log.seconds == 8.5
