"""A verification rereads only partitions with fewer rows than offsets."""

from aioshard.spark.plans import PlannedRange
from aioshard.spark.verification import _Range, find_gaps


def planned(start: int, end: int, partition: int = 0) -> PlannedRange:
    return PlannedRange(topic="t", partition=partition, start=start, end=end)


def test_only_incomplete_partitions_are_read_up_to_the_end_of_the_run() -> None:
    ranges = [_Range("t", number, start=5, reached=50, end=60, log_start=0) for number in (0, 1)]

    assert find_gaps(ranges, {("t", 0): (45, 0), ("t", 1): (44, 0)}) == ([planned(5, 50, 1)], {})


def test_a_partition_without_a_row_is_read() -> None:
    one = _Range("t", 0, start=0, reached=20, end=20, log_start=0)

    assert find_gaps([one], {}) == ([planned(0, 20)], {})


def test_records_deleted_from_the_log_are_counted_and_not_read() -> None:
    one = _Range("t", 0, start=0, reached=30, end=30, log_start=14)

    assert find_gaps([one], {("t", 0): (26, 11)}) == ([planned(14, 30)], {"t/0": 3})
    assert find_gaps([one], {("t", 0): (27, 11)}) == ([], {"t/0": 3})


def test_a_range_deleted_from_the_log_is_not_read() -> None:
    one = _Range("t", 0, start=0, reached=30, end=30, log_start=40)

    assert find_gaps([one], {("t", 0): (29, 29)}) == ([], {"t/0": 1})
