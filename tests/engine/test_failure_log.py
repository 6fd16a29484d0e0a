"""The log of failures: the first one of a kind is shown, the later ones are counted."""

import logging

import pytest

from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.failure_log import FailureLog
from aioshard.engine.outcomes import RunAgain
from tests.engine.deliveries import make_epoch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def handle(delivery: Delivery) -> None:
    raise ValueError(str(delivery.offset))


def fail(log: FailureLog, delivery: Delivery) -> None:
    """A record fails, always at the same line."""
    try:
        handle(delivery)
    except ValueError as error:
        failure = delivery.fail(error, 0)
        log.decided(delivery, RunAgain(str(failure), 0.5), error)


def test_repeated_failures_are_counted_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aioshard.engine.failures")
    clock = Clock()
    log = FailureLog(handler="on_order", group="billing", counters=Counters(), clock=clock)
    _, deliveries = make_epoch(["k"] * 5)

    def lines() -> list[tuple[int, bool, str]]:
        found = [(line.levelno, bool(line.exc_info), line.getMessage()[:28]) for line in caplog.records]
        caplog.clear()
        return found

    for delivery in deliveries[:3]:
        fail(log, delivery)
    assert lines() == [
        (logging.WARNING, True, "record orders/0/0 failed att"),
        (logging.DEBUG, False, "record orders/0/1 failed att"),
        (logging.DEBUG, False, "record orders/0/2 failed att"),
    ]

    clock.now = 59.0
    log.report_repeats()
    assert lines() == []

    clock.now = 60.0
    log.report_repeats()
    assert lines() == [(logging.WARNING, False, "2 more failures like this on")]

    fail(log, deliveries[3])
    assert lines() == [(logging.DEBUG, False, "record orders/0/3 failed att")]

    for now in (120.0, 180.0, 240.0):
        clock.now = now
        log.report_repeats()
    assert lines() == [(logging.WARNING, False, "1 more failure like this one")], "and then none"

    fail(log, deliveries[4])
    assert lines() == [(logging.WARNING, False, "record orders/0/4 failed att")], "its traceback is known"
