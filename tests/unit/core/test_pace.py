"""Rate limits and their token buckets."""

import math

import pytest

from aioshard.core.options import RateLimit
from aioshard.engine.pacing import TokenBucket
from aioshard.errors import HandlerError


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "100", None, True])
def test_a_rate_that_is_not_positive_is_refused(rate: object) -> None:
    with pytest.raises(HandlerError, match=r"RateLimit\(per_second=.*greater than 0"):
        RateLimit(rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("burst", [0, -1, 1.0, "2", True])
def test_a_burst_that_is_not_a_positive_integer_is_refused(burst: object) -> None:
    with pytest.raises(HandlerError, match=r"RateLimit\(burst=.*at least 1"):
        RateLimit(10.0, burst)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "at_once"), [(0.1, 1), (10, 1), (39.0, 1), (40, 2), (1000, 50)])
def test_the_default_burst_is_a_twentieth_of_a_second(rate: float, at_once: int) -> None:
    assert RateLimit(rate).at_once == at_once


def test_a_new_bucket_is_full() -> None:
    bucket = TokenBucket(RateLimit(1.0, burst=3))

    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_tokens_come_back_one_by_one() -> None:
    bucket = TokenBucket(RateLimit(2.0, burst=2))
    bucket.take(0.0)
    bucket.take(0.0)

    assert bucket.due(0.0) == 0.5
    assert not bucket.take(0.49)
    assert bucket.take(0.5)
    assert not bucket.take(0.5)
    assert bucket.take(1.0)


def test_unused_tokens_beyond_the_burst_are_lost() -> None:
    bucket = TokenBucket(RateLimit(10.0, burst=2))
    bucket.take(0.0)

    assert [bucket.take(3600.0) for _ in range(3)] == [True, True, False]


def test_a_bucket_does_not_drift_in_a_day() -> None:
    """Adding a thousandth to the loop's time again and again would be off by then."""
    bucket = TokenBucket(RateLimit(1000.0, burst=2))
    now = began = 123_456.789
    taken = 0
    while bucket.take(now):
        taken += 1
    step = 0.0005  # checking twice per token never finds the bucket full
    for number in range(1, 400_001):
        now = began + number * step
        taken += bucket.take(now)

    assert taken == 2 + 200_000


def test_a_timer_that_fires_early_is_followed_by_another() -> None:
    bucket = TokenBucket(RateLimit(3.0, burst=1))
    bucket.take(0.1)
    now = 0.1 + bucket.due(0.1) - 1e-9

    assert not bucket.take(now)
    assert 0 < bucket.due(now) < 1e-8
    assert bucket.take(now + bucket.due(now))
