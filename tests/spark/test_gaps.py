"""Which offsets of the log a verification reads again: those of blocks with fewer rows than offsets, and no others."""

from aioshard.spark.ending.verify import _Counts, _gaps, _Range
from aioshard.spark.runs.plan import PlannedRange


def planned(start: int, end: int) -> PlannedRange:
    return PlannedRange(topic="t", partition=0, start=start, end=end)


def counts(*blocks: _Counts) -> dict[tuple[str, int, int], _Counts]:
    return {("t", 0, number): block for number, block in enumerate(blocks)}


def test_blocks_that_are_whole_are_not_read_and_neighbours_are_read_together() -> None:
    one = _Range("t", 0, start=5, reached=50, end=60, log_start=0)  # blocks begin at 5, 15, 25, 35 and 45
    found = _gaps([one], counts(_Counts(10), _Counts(9), _Counts(8), _Counts(10), _Counts(4)), 10)

    assert found.to_read == [planned(15, 35), planned(45, 50)]
    assert (found.in_log, found.deleted) == ({"t/0": 4}, {})


def test_a_block_without_a_row_is_read() -> None:
    one = _Range("t", 0, start=0, reached=20, end=20, log_start=0)

    assert _gaps([one], {}, 10).to_read == [planned(0, 20)]


def test_what_is_not_in_the_log_any_more_is_counted_and_not_read() -> None:
    one = _Range("t", 0, start=0, reached=30, end=30, log_start=14)
    found = _gaps([one], counts(_Counts(7, deleted=7), _Counts(9, deleted=4), _Counts(10)), 10)

    assert found.deleted == {"t/0": 3}
    assert (found.to_read, found.in_log) == ([planned(14, 20)], {"t/0": 1})


def test_partitions_are_read_apart() -> None:
    ranges = [_Range("t", number, start=0, reached=10, end=10, log_start=0) for number in (0, 1)]

    assert [(one.partition, one.start, one.end) for one in _gaps(ranges, {}, 10).to_read] == [(0, 0, 10), (1, 0, 10)]
