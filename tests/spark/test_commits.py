"""The metadata that a handover commits, at the limits of the format."""

import pytest

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.handovers import moved
from aioshard.spark.plans import PlannedRange, metadata_of

BEYOND = CommitMetadata(finished=(Run(5, 7), Run(9, 12))).text(4)
"""5, 6 and 9 to 11 are finished."""


@pytest.mark.parametrize(("end", "left"), [(11, ((11, 12),)), (12, ()), (13, ())])
def test_completions_before_the_end_are_not_stored_again(end: int, left: tuple[tuple[int, int], ...]) -> None:
    planned = PlannedRange(topic="orders", partition=0, start=4, end=end, committed=4, metadata=BEYOND)
    assert metadata_of(planned.commit(end)).finished == left


def test_a_moved_offset_and_other_metadata_are_described() -> None:
    one, then = TopicPartition("orders", 0), Committed(4, BEYOND)
    same = Committed(4, BEYOND)

    assert list(moved({one: then}, {one: same})) == []
    assert list(moved({one: then}, {one: same._replace(offset=5)})) == ["orders/0: then 4, now 5"]
    assert list(moved({one: then}, {one: same._replace(metadata="")})) == ["orders/0: 4, with other commit metadata"]
    assert list(moved({one: then}, {one: None})) == ["orders/0: then 4, now no commit"]
