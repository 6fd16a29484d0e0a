from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.histogram import DURATION_BOUNDS, Histogram


def test_a_value_at_a_bound_counts_below_it() -> None:
    histogram = Histogram((0.1, 1.0))

    for value in (0.1, 0.11, 1.0, 1.01):
        histogram.add(value)

    assert histogram.counts().counts == (1, 2, 1)


@given(st.lists(st.tuples(st.floats(-1, 100), st.integers(1, 50))))
def test_each_value_is_counted_once_in_the_first_bucket_that_holds_it(values: list[tuple[float, int]]) -> None:
    histogram = Histogram()

    for value, weight in values:
        histogram.add(value, weight)

    found = histogram.counts()
    assert found.count == sum(weight for _, weight in values)
    assert abs(found.total - sum(value * weight for value, weight in values)) < 1e-6
    for number, bound in enumerate(DURATION_BOUNDS):
        assert sum(found.counts[: number + 1]) == sum(weight for value, weight in values if value <= bound)


def test_a_snapshot_does_not_change() -> None:
    histogram = Histogram((1.0,))
    before = histogram.counts()

    histogram.add(0.5)

    assert before.counts == (0, 0)
