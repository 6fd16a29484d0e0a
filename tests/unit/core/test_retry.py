"""Delays and attempts after a failure."""

import pytest

from aioshard.core.options import Growing, Retry
from aioshard.errors import HandlerError, RetryLater


def test_delays_grow_to_the_maximum_and_end_with_the_attempts() -> None:
    retry = Retry(attempts=6, initial=0.1, maximum=0.5, jitter=0.0)

    delays = [retry.delay(ValueError(), attempt, 0.5) for attempt in range(1, 7)]

    assert delays == [0.1, 0.2, 0.4, 0.5, 0.5, None]


def test_attempts_count_the_first_run() -> None:
    assert Retry(attempts=1).delay(ValueError(), 1, 0.5) is None


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_jitter_moves_a_delay_by_half_its_share_in_either_direction(chance: float) -> None:
    delay = Retry(initial=1.0, jitter=0.4).delay(ValueError(), 1, chance)

    assert delay == pytest.approx(0.8 + 0.4 * chance)


def test_permanent_errors_end_at_once() -> None:
    retry = Retry(retry_on=(OSError,), give_up_on=(FileNotFoundError,))

    assert retry.delay(TimeoutError(), 1, 0.5) is not None
    assert retry.delay(FileNotFoundError(), 1, 0.5) is None
    assert retry.delay(ValueError(), 1, 0.5) is None


@pytest.mark.parametrize("factor", [1.01, 2, 1e10, 1e300])
def test_delays_grow_to_the_maximum_by_any_factor(factor: float) -> None:
    retry = Retry(attempts=100_000, initial=0.1, maximum=30.0, factor=factor, jitter=0.0)

    assert retry.delay(ValueError(), 90_000, chance=0.0) == 30.0
    assert Growing(0.1, factor=min(factor, 100.0), maximum=30.0).after(90_000) == 30.0


def test_a_retry_without_a_delay_has_none_after_any_number_of_attempts() -> None:
    assert Retry(attempts=100_000, initial=0.0, factor=1e300, jitter=0.0).delay(ValueError(), 90_000, chance=0.0) == 0.0


def test_an_error_may_choose_its_delay() -> None:
    retry = Retry(attempts=3, maximum=1.0, retry_on=(OSError,), give_up_on=(RetryLater,))
    assert [retry.delay(RetryLater(90), attempt, 0.9) for attempt in (1, 2, 3)] == [90.0, 90.0, None]


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_an_invalid_delay_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="was refused"):
        RetryLater(seconds)


def test_a_late_attempt_does_not_overflow() -> None:
    assert Retry(attempts=10_000, maximum=7.0, jitter=0.0).delay(ValueError(), 9_000, 0.5) == 7.0


@pytest.mark.parametrize(
    "values",
    [
        {"attempts": 0},
        {"attempts": "3"},
        {"attempts": 2.5},
        {"initial": -1.0},
        {"initial": "1"},
        {"maximum": 0.01},
        {"factor": 0.5},
        {"jitter": 1.5},
    ],
)
def test_values_outside_their_range_are_refused_by_name(values: dict[str, object]) -> None:
    with pytest.raises(HandlerError, match=next(iter(values))):
        Retry(**values)  # type: ignore[arg-type]


def test_no_delay_exceeds_the_maximum_under_any_jitter() -> None:
    assert Retry(initial=30.0, maximum=30.0, jitter=1.0).delay(ValueError(), 1, 1.0) == 30.0


@pytest.mark.parametrize("name", ["retry_on", "give_up_on"])
@pytest.mark.parametrize("given", [[ValueError], (ValueError, "TimeoutError"), "ValueError", ValueError()])
def test_values_that_are_not_exception_classes_are_refused_early(name: str, given: object) -> None:
    with pytest.raises(HandlerError, match=f"{name}=.*exception class"):
        Retry(**{name: given})  # type: ignore[arg-type]


def test_a_single_exception_class_is_accepted() -> None:
    assert Retry(give_up_on=OSError).delay(TimeoutError(), 1, 0.5) is None  # type: ignore[arg-type]
