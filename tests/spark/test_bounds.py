"""The borders of a planned range, one offset to each side of them."""

import pytest

from aioshard.errors import PlanError
from aioshard.kafka.history import LogBounds
from aioshard.records import TopicPartition
from aioshard.spark.planning.bounds import Facts, end_of, lost, start_of

FACTS = Facts(
    at=TopicPartition("orders", 0),
    committed=None,
    log=LogBounds(start=10, stable=18, end=20),
    last=18,
    knows_topic=False,
)


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (8, "orders/0: offsets 8 to 9"),
        (9, "orders/0: offsets 9 to 9"),
        (10, None),
        (20, None),
        (21, "orders/0: offset 21 is committed, and the log ends at 20"),
    ],
)
def test_what_is_lost_begins_with_one_record(start: int, told: str | None) -> None:
    assert lost(FACTS, start) == told


@pytest.mark.parametrize(("wanted", "end"), [(11, 12), (12, 12), (13, 13), (18, 18), (19, 18), (None, 18)])
def test_an_end_is_between_the_start_and_what_can_be_read(wanted: int | None, end: int) -> None:
    assert end_of(FACTS, 12, given=wanted, timed=None) == end_of(FACTS, 12, given=None, timed=wanted) == end


def test_a_time_that_the_log_has_not_come_to_begins_where_reading_ends() -> None:
    assert start_of(FACTS, 1.0, None, given=None, timed=None) == 18
    assert start_of(FACTS, 1.0, None, given=None, timed=11) == 11


def test_a_named_start_may_be_the_end_of_the_log_and_no_more() -> None:
    assert start_of(FACTS, {}, None, given=20, timed=None) == 20
    with pytest.raises(PlanError, match="orders/0 begins at 21, and its log ends at 20"):
        start_of(FACTS, {}, None, given=21, timed=None)
