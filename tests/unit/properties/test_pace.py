"""Token buckets against exact arithmetic, at times and rates that Hypothesis invents."""

import itertools
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.options import RateLimit, TokenBucket

RATES = st.one_of(st.floats(0.01, 5_000.0), st.sampled_from([1.0, 3.0, 7.0, 10.0, 1000.0]))
LIMITS = st.builds(RateLimit, RATES, st.integers(1, 20))
STEPS = st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60)
GRAIN = 1e-6
"""Tokens by which times in floating point may be off."""


def times_from(start: float, steps: list[float], limit: RateLimit) -> list[float]:
    """Times whose distances are of the order of one token."""
    return list(itertools.accumulate((step / limit.per_second for step in steps), initial=start))


@given(LIMITS, st.floats(0.0, 1e6), STEPS)
def test_a_bucket_matches_exact_arithmetic(limit: RateLimit, start: float, steps: list[float]) -> None:
    bucket = TokenBucket(limit)
    rate, burst = Fraction(limit.per_second), limit.at_once
    level, before = Fraction(burst), Fraction(start)
    for now in times_from(start, steps, limit):
        level = min(Fraction(burst), level + (Fraction(now) - before) * rate)
        before = Fraction(now)
        taken = bucket.take(now)
        if abs(level - 1) > max(GRAIN, limit.per_second * 1e-9):
            assert taken == (level >= 1)
        level -= taken


@given(LIMITS, st.floats(0.0, 1e6), STEPS)
def test_no_interval_exceeds_the_burst_plus_its_rate(limit: RateLimit, start: float, steps: list[float]) -> None:
    bucket = TokenBucket(limit)
    taken: list[float] = []
    for now in times_from(start, steps, limit):
        while bucket.take(now):
            taken.append(now)
    for first, last in itertools.combinations(range(len(taken)), 2):
        seconds = taken[last] - taken[first]
        assert last - first + 1 <= limit.at_once + limit.per_second * (seconds + 1e-9) + GRAIN


@given(LIMITS, st.floats(0.0, 1e6), st.integers(1, 300))
def test_taking_every_due_token_gets_all_of_them(limit: RateLimit, start: float, tokens: int) -> None:
    bucket = TokenBucket(limit)
    now = start
    for _ in range(limit.at_once + tokens):
        for _ in range(3):  # a sum of two floats may fall short of the time that is due
            now += bucket.due(now)
            if bucket.due(now) == 0.0:
                break
        assert bucket.take(now)

    assert now - start <= tokens / limit.per_second * (1 + 1e-9) + tokens * 1e-9
    assert now - start >= tokens / limit.per_second * (1 - 1e-9) - tokens * 1e-9
