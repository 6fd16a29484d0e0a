"""The adaptive limit by itself; against a model of a back end it is tested in tests/simulation."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.adaptive import Adaptive, LatencyGradient
from aioshard.errors import HandlerError


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"minimum": 0, "maximum": 8}, "minimum"),
        ({"minimum": 1.0, "maximum": 8}, "minimum"),
        ({"minimum": True, "maximum": 8}, "minimum"),
        ({"minimum": 9, "maximum": 8}, "maximum"),
        ({"minimum": 1, "maximum": 8.5}, "maximum"),
        ({"minimum": 4, "maximum": 8, "initial": 3}, "initial"),
        ({"minimum": 4, "maximum": 8, "initial": 9}, "initial"),
        ({"minimum": 1, "maximum": 8, "tolerance": 1.0}, "tolerance"),
        ({"minimum": 1, "maximum": 8, "tolerance": math.nan}, "tolerance"),
        ({"minimum": 1, "maximum": 8, "tolerance": "2"}, "tolerance"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(HandlerError, match=rf"Adaptive\({name}=.*expected"):
        Adaptive(**values)


@pytest.mark.parametrize(
    ("adaptive", "beginning"),
    [(Adaptive(1, 512), 8), (Adaptive(1, 4), 4), (Adaptive(16, 512), 16), (Adaptive(1, 512, initial=100), 100)],
)
def test_it_begins_with_eight_or_what_is_nearest(adaptive: Adaptive, beginning: int) -> None:
    assert LatencyGradient(adaptive).look(0.0) == beginning


def test_without_runs_nothing_changes() -> None:
    gradient = LatencyGradient(Adaptive(1, 512))

    assert {gradient.look(number / 10) for number in range(10_000)} == {8}
    assert gradient.baseline is None


def test_the_baseline_is_told_in_seconds() -> None:
    gradient = LatencyGradient(Adaptive(1, 8))
    for number in range(100):
        gradient.look(number / 10)
        for _ in range(10):
            gradient.ended(0.25)

    assert gradient.baseline == pytest.approx(0.25, rel=1e-3)


def test_a_run_that_took_no_time_is_no_error() -> None:
    gradient = LatencyGradient(Adaptive(1, 512))
    for number in range(200):
        gradient.look(number / 10)
        for _ in range(10):
            gradient.ended(0.0)

    assert 1 <= gradient.limit <= 512


RUNS = st.tuples(st.floats(0.0, 20.0), st.integers(0, 40), st.integers(0, 40), st.floats(0.0, 3.0))


@given(st.integers(1, 20), st.integers(0, 500), st.lists(RUNS, max_size=60))
def test_its_bounds_hold_whatever_it_is_told(
    least: int, more: int, rounds: list[tuple[float, int, int, float]]
) -> None:
    gradient = LatencyGradient(Adaptive(least, least + more))
    now = 0.0
    for seconds, succeeded, failed, passed in rounds:
        for _ in range(succeeded):
            gradient.ended(seconds)
        for _ in range(failed):
            gradient.failed(seconds)
        now += passed
        assert least <= gradient.look(now) <= least + more
        assert gradient.look(now) == gradient.limit
