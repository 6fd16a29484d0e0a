"""The adaptive limit by itself; against a model of a back end it is tested in tests/simulation."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard import Adaptive
from aioshard.core.adaptive import AdaptiveLimit, Figures
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
        ({"minimum": 1, "maximum": 8, "tolerance": 11}, "tolerance"),
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
def test_it_begins_with_eight_or_the_nearest_allowed_number(adaptive: Adaptive, beginning: int) -> None:
    assert AdaptiveLimit(adaptive).limit == beginning


@pytest.mark.parametrize("adaptive", [Adaptive(16, 512), Adaptive(1, 4), Adaptive(8, 512, initial=400, tolerance=2.0)])
@pytest.mark.parametrize("most", [1, 5, 1_000])
def test_a_lower_maximum_lowers_the_other_bounds(adaptive: Adaptive, most: int) -> None:
    lowered = adaptive.at_most(most)

    assert lowered.maximum == min(adaptive.maximum, most)
    assert 1 <= lowered.minimum <= lowered.beginning <= lowered.maximum
    assert lowered.tolerance == adaptive.tolerance


class Handler:
    """Totals of a handler that a test tells what happened in each second."""

    def __init__(self, adaptive: Adaptive) -> None:
        self.limit = AdaptiveLimit(adaptive)
        self.total = Figures(0.5, 0, 0.0, 0, 0)
        self.limit.look(self.total)

    def second(self, latency: float, *, succeed: int = 0, fail: int = 0, overload: int = 0) -> int:
        runs = succeed + fail + overload
        total = self.total
        self.total = Figures(
            total.at + 1.0,
            total.runs + runs,
            total.seconds + runs * latency,
            total.processed + succeed,
            total.overloads + overload,
        )
        return self.limit.look(self.total)


def test_without_runs_nothing_changes() -> None:
    handler = Handler(Adaptive(1, 512))

    assert {handler.second(0.0) for _ in range(1_000)} == {8}
    assert handler.limit.move.reason == "start"
    assert handler.limit.baseline is None


def test_it_doubles_while_the_latency_stays_the_same_and_it_is_used() -> None:
    handler = Handler(Adaptive(1, 512))

    assert [handler.second(0.01, succeed=count) for count in (800, 1_600, 3_200)] == [16, 32, 64]
    assert handler.second(0.01, succeed=3_000) == 64
    assert (handler.limit.move.reason, handler.limit.move.before) == ("spare", 32)


def test_the_latency_brings_it_back_to_the_tolerance() -> None:
    handler = Handler(Adaptive(1, 512))
    for count in (800, 1_600, 3_200):
        handler.second(0.01, succeed=count)

    assert 40 <= handler.second(0.0195, succeed=3_200) <= 41  # 64 × 1.2 / 1.95
    moved = handler.limit.move
    assert moved.reason == "queue"
    assert moved.latency == pytest.approx(0.0195)
    assert moved.baseline == pytest.approx(0.01)
    handler.second(0.011, succeed=3_600)
    assert handler.limit.move is moved, "it says what was so when the limit moved"


def test_an_overload_takes_back_the_last_raise_and_then_halves() -> None:
    handler = Handler(Adaptive(1, 512))
    handler.second(0.01, succeed=800)

    assert handler.second(0.01, succeed=1_000, overload=100) == 8
    assert handler.limit.move.reason == "overload"
    assert [handler.second(0.01, succeed=500, overload=100) for _ in range(4)] == [4, 2, 1, 1]


def test_after_an_overload_it_does_not_double_for_a_while() -> None:
    handler = Handler(Adaptive(1, 512))
    handler.second(0.01, succeed=800)
    handler.second(0.01, succeed=1_000, overload=100)
    limits = [handler.second(0.01, succeed=100 * handler.limit.limit) for _ in range(40)]

    assert max(limits[:22]) <= 12
    assert max(limits) >= 32


@pytest.mark.parametrize(("succeed", "overload"), [(1_000, 20), (3, 1)])
def test_a_few_records_that_are_retried_later_are_no_overload(succeed: int, overload: int) -> None:
    handler = Handler(Adaptive(1, 512))
    handler.second(0.01, succeed=800)
    handler.second(0.01, succeed=succeed, overload=overload)

    assert handler.limit.limit >= 16


def test_while_nothing_succeeds_it_falls() -> None:
    handler = Handler(Adaptive(1, 512))
    handler.second(0.01, succeed=800)

    assert [handler.second(0.01, fail=100) for _ in range(5)] == [8, 4, 2, 1, 1]
    assert handler.limit.move.reason == "failures"


def test_a_few_failures_while_there_is_little_to_do_change_nothing() -> None:
    handler = Handler(Adaptive(1, 512))

    assert {handler.second(0.01, fail=1) for _ in range(15)} == {8}


def test_it_probes_at_the_same_times_in_every_process() -> None:
    """Also if they started at different times."""
    probed: set[float] = set()
    for offset in (0.0, 3.0, 7.0):
        handler = Handler(Adaptive(1, 8))
        handler.total = handler.total._replace(at=offset + 0.25)
        while handler.total.at < 50:
            handler.second(0.01, succeed=100 * handler.limit.limit)
            move = handler.limit.move
            if move.reason == "probe" and handler.limit.limit < move.before:
                probed.add(move.at)

    assert probed == {16.25, 32.25, 48.25}


ROUNDS = st.tuples(
    st.floats(0.0, 20.0), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.floats(0.0, 30.0)
)


@given(st.integers(1, 20), st.integers(0, 500), st.lists(ROUNDS, max_size=60))
def test_its_bounds_hold_whatever_happens(
    least: int, more: int, rounds: list[tuple[float, int, int, int, float]]
) -> None:
    limit = AdaptiveLimit(Adaptive(least, least + more))
    total = Figures(0.0, 0, 0.0, 0, 0)
    for latency, succeeded, failed, overloaded, passed in rounds:
        runs = succeeded + failed + overloaded
        total = Figures(
            total.at + passed,
            total.runs + runs,
            total.seconds + runs * latency,
            total.processed + succeeded,
            total.overloads + overloaded,
        )
        assert least <= limit.look(total) <= least + more


def test_two_looks_at_the_same_moment_are_one() -> None:
    limit = AdaptiveLimit(Adaptive(1, 512))
    limit.look(Figures(1.0, 0, 0.0, 0, 0))

    assert limit.look(Figures(1.0, 100, 1.0, 100, 0)) == 8
