"""How many workers failing keys may hold, and which key takes most of the time."""

from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.fairness import KeyTimes, most_failing_runs


@given(st.integers(1, 10_000), st.booleans())
def test_failing_keys_have_a_worker_and_leave_one(workers: int, others_wait: bool) -> None:
    most = most_failing_runs(workers, others_wait=others_wait)

    assert 1 <= most <= workers
    assert most < workers or workers == 1


@given(st.integers(4, 10_000))
def test_failing_keys_hold_at_most_three_tenths_while_others_wait(workers: int) -> None:
    assert most_failing_runs(workers, others_wait=True) <= 0.3 * workers


def test_only_the_last_minute_counts() -> None:
    times = KeyTimes()
    for _ in range(100):
        times.look(["then"])
    for _ in range(60):
        times.look(["now", "other"])
        times.look(["now"])

    assert times.dominant is not None
    assert times.dominant.key == "now"
    assert times.dominant.share == 2 / 3


def test_a_key_that_rarely_runs_is_not_dominant() -> None:
    """Although nothing else runs."""
    times = KeyTimes()
    for number in range(60):
        times.look(["k"] if number % 2 else [])

    assert times.dominant is None


def test_records_without_a_key_are_not_dominant() -> None:
    times = KeyTimes()
    for _ in range(60):
        times.look([None, None, "k"])

    assert times.dominant is None


def test_a_few_looks_show_nothing() -> None:
    times = KeyTimes()
    for _ in range(19):
        times.look(["k"])
    assert times.dominant is None

    times.look(["k"])
    assert times.dominant is not None
