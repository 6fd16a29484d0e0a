"""Each part of the engine returns its own figures, without an app around it."""

import time

import pytest

from aioshard.engine.counts import Counters
from aioshard.engine.outcomes import Outcome
from tests.engine.deliveries import make_buffer, make_intake, make_partition


def test_a_partition_returns_its_figures() -> None:
    partition, (oldest, *_) = make_partition(["a", "b", "c"], clock=lambda: 7.0)
    partition.commits.acknowledged = 0
    oldest.arrived = 2.0

    figures = partition.statistics(5, in_flight=1, paused="why")

    assert (figures.topic, figures.partition, figures.epoch) == ("orders", 0, 1)
    assert (figures.position, figures.committed, figures.committable, figures.end_offset) == (3, 0, 0, 5)
    assert (figures.lag, figures.incomplete, figures.in_flight, figures.queued) == (5, 3, 1, 2)
    assert (figures.oldest_incomplete_age, figures.buffered_bytes, figures.paused) == (5.0, 30, "why")
    assert figures.lag_seconds == pytest.approx(time.time(), rel=0.01)


@pytest.mark.parametrize(("end", "seconds"), [(None, None), (0, 0.0), (4, None)], ids=["unknown", "read", "unread"])
def test_the_lag_in_seconds_is_unknown_while_unread_records_are_left(end: int | None, seconds: float | None) -> None:
    partition, _ = make_partition()

    assert partition.statistics(end, 0, None).lag_seconds == seconds


def test_the_lag_in_seconds_of_a_record_without_a_timestamp_is_unknown() -> None:
    partition, (delivery,) = make_partition(["a"])
    delivery.record = delivery.record._replace(timestamp=-0.001)

    assert partition.statistics(1, 0, None).lag_seconds is None


def test_an_intake_returns_what_is_in_memory() -> None:
    buffer = make_buffer()
    partition, _ = make_partition(["a", "b"], buffer=buffer)
    intake = make_intake(partition, buffer=buffer)
    intake.already_done = 4

    assert intake.statistics() == (4, 2, 20)


def test_the_figures_of_topics_are_in_order() -> None:
    counters = Counters()
    counters.topics["orders"].count(Outcome.PARKED)
    counters.topics["clicks"].count(Outcome.PROCESSED)
    counters.topics["clicks"].durations.add(0.5)

    clicks, orders = counters.statistics()

    assert (clicks.topic, clicks.processed, clicks.parked, clicks.durations.count) == ("clicks", 1, 0, 1)
    assert (orders.topic, orders.processed, orders.parked, orders.durations.count) == ("orders", 0, 1, 0)
