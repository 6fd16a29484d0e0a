"""Options of failure policies, and the circuit breaker."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard import CircuitBreaker, DeadLetter, Park
from aioshard.core.breaker import BreakerState
from aioshard.errors import HandlerError


@pytest.mark.parametrize(
    ("option", "arguments", "named"),
    [
        (CircuitBreaker, {"failure_rate": 0.0}, "failure_rate=0.0"),
        (CircuitBreaker, {"failure_rate": 1.0}, "failure_rate=1.0"),
        (CircuitBreaker, {"failure_rate": "0.1"}, "failure_rate='0.1'"),
        (CircuitBreaker, {"window": 0}, "window=0"),
        (CircuitBreaker, {"window": 2.5}, "window=2.5"),
        (CircuitBreaker, {"minimum": True}, "minimum=True"),
        (CircuitBreaker, {"minimum": 30, "window": 29}, "minimum=30"),
        (DeadLetter, {"topic": ""}, "topic=''"),
        (DeadLetter, {"topic": "not a topic"}, "topic='not a topic'"),
        (DeadLetter, {"topic": None}, "topic=None"),
        (DeadLetter, {"topic": "t", "breaker": 0.1}, "breaker=0.1"),
        (Park, {"topic": ".."}, r"topic='\.\.'"),
        (Park, {"topic": "t", "delay": 0}, "delay=0"),
        (Park, {"topic": "t", "delay": float("nan")}, "delay=nan"),
        (Park, {"topic": "t", "delay": float("inf")}, "delay=inf"),
        (Park, {"topic": "t", "delay": "60"}, "delay='60'"),
        (Park, {"topic": "t", "attempts": 0}, "attempts=0"),
        (Park, {"topic": "t", "attempts": 1.0}, "attempts=1.0"),
    ],
)
def test_impossible_policies_are_refused_with_a_reason(option: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(HandlerError, match=f"{option.__name__}.*{named}.*was refused: expected"):
        option(**arguments)


def test_dead_letters_have_a_circuit_breaker_by_default() -> None:
    assert DeadLetter("d").breaker == CircuitBreaker(failure_rate=0.5, window=100, minimum=20)
    assert DeadLetter("d", breaker=None).breaker is None


def opened_after(successes: Iterable[int], **limits: Any) -> int | None:
    """How many failures it takes; each comes with the number of successes before its first attempt failed."""
    state = BreakerState(CircuitBreaker(**limits))
    return next((number for number, before in enumerate(successes, 1) if state.fail(before, "E")), None)


def test_with_only_failures_it_opens_at_the_minimum_or_half_a_window() -> None:
    assert opened_after([0] * 100) == 20
    assert opened_after([0] * 100, minimum=1) == 1
    assert opened_after([10_000] * 100) == 51
    assert opened_after([10_000] * 100, failure_rate=0.9) == 91


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2, 0.3])
def test_a_lower_failure_share_never_opens_it_in_any_order(share: float) -> None:
    failures_at = [round(number * (1 - share) / share) for number in range(2_000)]
    for seed in range(20):
        random.Random(seed).shuffle(failures_at)
        assert opened_after(failures_at) is None


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_a_higher_failure_share_opens_it_soon(share: float) -> None:
    failures_at = [5_000 + round(number * (1 - share) / share) for number in range(500)]
    opened = opened_after(failures_at)
    assert opened is not None
    assert opened <= 100


@given(st.lists(st.integers(0, 300)), st.integers(1, 50), st.integers(1, 50), st.floats(0.05, 0.95))
def test_it_opens_only_above_the_failure_share_of_a_window(
    failures_at: list[int], window: int, minimum: int, share: float
) -> None:
    limits = CircuitBreaker(failure_rate=share, window=window, minimum=min(minimum, window))
    state = BreakerState(limits)
    for number, before in enumerate(failures_at, 1):
        if state.fail(before, "E"):
            assert state.failed > share * min(window, number + before)
            assert number + before >= limits.minimum
            state.close(before)
            assert not state.is_open
            return


def test_a_closed_circuit_breaker_starts_over() -> None:
    state = BreakerState(CircuitBreaker(window=10, minimum=4))
    assert [state.fail(0, "E") for _ in range(4)] == [False, False, False, True]
    assert state.fail(0, "E"), "it stays open"
    state.close(1)
    assert [state.fail(1, "E") for _ in range(4)] == [False, False, False, True]


def test_a_circuit_breaker_suspected_once_waits_again_for_the_records_that_run() -> None:
    state = BreakerState(CircuitBreaker(window=4, minimum=2))

    def running() -> int:
        return 2

    assert [state.fail(0, "E", running) for _ in range(3)] == [False, False, False], "the next failure opens it"
    assert not state.fail(4, "E", running), "but then, most of the latest records had succeeded"

    assert [state.fail(4, "E", running) for _ in range(4)] == [False, False, False, True]
