"""The bounds of a planned range, one offset to each side."""

import pytest

from aioshard.errors import DataLossError, PlanError
from aioshard.kafka.admin import LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.planning import Facts, planned_ranges

AT = TopicPartition("orders", 0)
LOG = LogBounds(start=10, stable=18, end=20)


def planned(committed: int, *, start: int | None = None, end: int | None = None) -> tuple[int, int]:
    facts = Facts(at=AT, committed=Committed(committed, ""), log=LOG, last=18, knows_topic=True)
    starts, ends = ({} if offset is None else {AT: offset} for offset in (start, end))
    (found,) = planned_ranges([facts], "committed", starts, ends, None)
    return found.start, found.end


@pytest.mark.parametrize(
    ("committed", "loss"),
    [
        (8, "orders/0: offsets 8 to 9"),
        (9, "orders/0: offsets 9 to 9"),
        (10, None),
        (20, None),
        (21, "orders/0: offset 21 is committed, and the log ends at 20"),
    ],
)
def test_a_single_deleted_record_counts_as_loss(committed: int, loss: str | None) -> None:
    if loss is None:
        assert planned(committed) == (committed, max(committed, 18))
        return
    with pytest.raises(DataLossError) as refused:
        planned(committed)
    assert refused.value.lost == (loss,)


@pytest.mark.parametrize(("wanted", "end"), [(11, 12), (12, 12), (13, 13), (18, 18), (19, 18), (None, 18)])
def test_an_end_is_between_the_start_and_the_last_readable_offset(wanted: int | None, end: int) -> None:
    assert planned(12, end=wanted) == (12, end)


def test_a_start_may_be_at_most_the_end_of_the_log() -> None:
    assert planned(12, start=20) == (20, 20)
    with pytest.raises(PlanError, match="orders/0 starts at 21, and its log ends at 20"):
        planned(12, start=21)
