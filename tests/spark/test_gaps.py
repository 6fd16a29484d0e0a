"""Which offsets of the log a verification reads again: those of blocks with fewer rows than offsets, and no others."""

from aioshard.spark.plans import PlannedRange
from aioshard.spark.verification import _Range, find_gaps

Counts = tuple[int, int]


def planned(start: int, end: int, partition: int = 0) -> PlannedRange:
    return PlannedRange(topic="t", partition=partition, start=start, end=end)


def counts(*blocks: Counts) -> dict[tuple[str, int, int], Counts]:
    return {("t", 0, number): block for number, block in enumerate(blocks)}


def test_blocks_that_are_whole_are_not_read_and_neighbours_are_read_together() -> None:
    one = _Range("t", 0, start=5, reached=50, end=60, log_start=0)  # blocks begin at 5, 15, 25, 35 and 45
    found = find_gaps([one], counts((10, 0), (9, 0), (8, 0), (10, 0), (4, 0)), 10)

    assert found == ([planned(15, 35), planned(45, 50)], {})


def test_a_block_without_a_row_is_read() -> None:
    one = _Range("t", 0, start=0, reached=20, end=20, log_start=0)

    assert find_gaps([one], {}, 10) == ([planned(0, 20)], {})


def test_what_is_not_in_the_log_any_more_is_counted_and_not_read() -> None:
    one = _Range("t", 0, start=0, reached=30, end=30, log_start=14)

    assert find_gaps([one], counts((7, 7), (9, 4), (10, 0)), 10) == ([planned(14, 20)], {"t/0": 3})


def test_partitions_are_read_apart() -> None:
    ranges = [_Range("t", number, start=0, reached=10, end=10, log_start=0) for number in (0, 1)]

    assert find_gaps(ranges, {}, 10)[0] == [planned(0, 10), planned(0, 10, 1)]
