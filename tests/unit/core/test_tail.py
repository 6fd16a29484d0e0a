"""Which partitions finish last, and when."""

import pytest

from aioshard.core.tail import tail_of
from aioshard.records import TopicPartition


def lags(*values: int) -> dict[TopicPartition, int]:
    return {TopicPartition("orders", number): lag for number, lag in enumerate(values)}


@pytest.mark.parametrize(
    ("now", "heaviest"),
    [
        (lags(), 0),
        (lags(0, 0), 0),
        (lags(5), 1),
        (lags(10, 10, 10, 10), 4),
        (lags(900, 50, 50), 1),
        (lags(899, 51, 50), 2),
        (lags(*[1] * 29, 300, 300, 300), 3),
    ],
)
def test_the_tail_is_the_fewest_partitions_with_nine_tenths_of_the_lag(
    now: dict[TopicPartition, int], heaviest: int
) -> None:
    found = tail_of(now, {}, 1.0)
    assert (found.heaviest, found.partitions, found.lag) == (heaviest, len(now), sum(now.values()))


@pytest.mark.parametrize(
    ("now", "before", "seconds"),
    [
        (lags(0, 0), lags(9, 9), 0.0),
        (lags(100, 30), lags(200, 40), 30.0),
        (lags(100, 0), lags(200, 0), 10.0),
        (lags(100, 30), lags(200, 30), None),
        (lags(100, 30), lags(200, 20), None),
        (lags(100, 30), lags(200), None),
    ],
)
def test_the_last_partition_finishes_at_its_own_pace(
    now: dict[TopicPartition, int], before: dict[TopicPartition, int], seconds: float | None
) -> None:
    assert tail_of(now, before, 10.0).seconds == seconds


def test_the_tail_is_described_in_words() -> None:
    assert str(tail_of(lags(6_000, 1), lags(6_100, 2), 41.0)) == (
        "90% of the lag is in 1 of 2 partitions; the last is done in 41 min"
    )
    assert str(tail_of(lags(6_000, 1), {}, 41.0)) == "90% of the lag is in 1 of 2 partitions"
