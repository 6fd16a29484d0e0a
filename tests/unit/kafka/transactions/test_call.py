"""How long a request of a transaction has had no final answer."""

import time

import pytest

from aioshard.kafka.transactions import call as module
from aioshard.kafka.transactions.call import Call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_request_is_late_after_a_while(clock: list[float]) -> None:
    call = Call(60.0)
    call.expect("Produce")
    assert call.delay is None
    clock[0] += module._LATE
    assert call.delay is not None
    call.finish()
    assert call.delay is None


def test_a_request_that_no_call_ends_is_as_late_as_in_the_first_one(clock: list[float]) -> None:
    """Each call may be shorter than a delay that is reported."""
    first = Call(1.0)
    first.expect("Produce")
    clock[0] += module._LATE / 2
    abort = Call(1.0)
    abort.follow(first)
    abort.expect("InitProducerId")
    abort.finish()
    assert abort.delay is None
    clock[0] += module._LATE / 2
    second = Call(1.0)
    second.follow(abort)
    second.expect("Produce")

    assert second.delay is not None
    second.finish()
    third = Call(1.0)
    third.follow(second)
    third.expect("Produce")
    assert third.delay is None
