"""A plan has each record once, leaves out finished ones, and learns what others have finished meanwhile."""

import asyncio
from typing import Any

import pytest

from aioshard.dead_letters.dead_letter import Position
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.plan import Plan, make_plan
from aioshard.dead_letters.progress import ReplayProgress
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.ports import Committed
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates
from tests.support.dead_letters import dead_letters_in_memory, failure, record


def topic_of(*partitions: list[Record]) -> DeadLetterTopic:
    """Dead letters of these records, at the offsets 0, 1, 2, …; the error is that of the number of the record."""
    made, _ = dead_letters_in_memory(
        "orders.dlt",
        {
            number: [
                (offset, original, failure(offset, error=("ValueError", "TimeoutError")[original.offset % 2]))
                for offset, original in enumerate(records)
            ]
            for number, records in enumerate(partitions)
        },
    )
    return made


def plan_of(
    topic: DeadLetterTopic, filters: Filters = EVERYTHING, *, limit: int | None = None, again: bool = False
) -> Plan:
    return asyncio.run(make_plan(topic, filters, limit=limit, again=again))


def test_the_dead_letters_of_a_record_are_one() -> None:
    """A process that is killed after a dead letter and before the commit writes it again."""
    topic = topic_of([record(1), record(2), record(1)], [record(2)])

    assert plan_of(topic).due == {(0, 0): [(0, 0), (0, 2)], (0, 1): [(0, 1), (1, 0)]}


def test_dead_letters_that_do_not_match_are_done_with_the_one_that_does() -> None:
    topic = topic_of([record(1)], [record(1)])

    assert plan_of(topic, Filters(partitions=(1,))).due == {(1, 0): [(0, 0), (1, 0)]}


def test_a_record_whose_other_dead_letter_is_done_is_not_sent() -> None:
    topic = topic_of([record(1), record(2), record(1)])
    topic.progress[0] = ReplayProgress(Committed(1, ""))

    plan = plan_of(topic)

    assert plan.due == {(0, 1): [(0, 1)]}
    assert plan.covered == [(0, 2)]


@pytest.mark.parametrize("change", [{"value": b"other"}, {"key": b"bob"}, {"key": None}, {"timestamp": 1.7e9}])
def test_another_record_at_the_same_position_is_another_one(change: dict[str, Any]) -> None:
    """Its topic was deleted and created again."""
    topic = topic_of([record(1), record(1)._replace(**change)])
    topic.progress[0] = ReplayProgress(Committed(1, ""))

    assert plan_of(topic).due == {(0, 1): [(0, 1)]}


def test_key_and_value_are_apart() -> None:
    topic = topic_of([record(1, key=b"ab", value=b"c"), record(1, key=b"a", value=b"bc")])

    assert len(plan_of(topic)) == 2


def test_done_ones_are_included_again_on_request() -> None:
    topic = topic_of([record(1), record(2)])
    topic.progress[0] = ReplayProgress(Committed(1, ""))

    assert list(plan_of(topic, again=True).due) == [(0, 0), (0, 1)]
    assert list(plan_of(topic).due) == [(0, 1)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(at=(Coordinates("orders.dlt", 0, 1), Coordinates("orders.dlt", 1, 0))), [(0, 1), (1, 0)]),
        (Filters(at=(Coordinates("other.dlt", 0, 1),)), []),
        (Filters(error="TimeoutError"), [(0, 0), (0, 2), (1, 0)]),
        (Filters(error="TimeoutError", at=(Coordinates("orders.dlt", 0, 1),)), []),
    ],
)
def test_filters_and_positions_select(filters: Filters, expected: list[Position]) -> None:
    topic = topic_of([record(1), record(2), record(3)], [record(5)])

    assert list(plan_of(topic, filters).due) == expected


def test_a_limit_counts_records() -> None:
    topic = topic_of([record(1), record(1), record(2), record(3)])

    plan = plan_of(topic, limit=2)

    assert list(plan.due) == [(0, 0), (0, 2)]
    assert (plan.topics, plan.errors) == ({"orders": 2}, {"TimeoutError": 1, "ValueError": 1})


def test_a_plan_counts_the_matching_ones_that_it_leaves_out() -> None:
    """Otherwise an operator cannot tell a wrong filter from finished work."""
    topic = topic_of([record(number) for number in range(1, 8)])
    topic.progress[0] = ReplayProgress(Committed(2, ""))
    odd = Filters(error="TimeoutError")

    assert (plan_of(topic, odd).done, plan_of(topic, odd).beyond_limit) == (1, 0)
    assert (plan_of(topic, odd, limit=1).done, plan_of(topic, odd, limit=1).beyond_limit) == (1, 2)
    assert (plan_of(topic, again=True).done, plan_of(topic, again=True, limit=3).beyond_limit) == (0, 4)


def test_a_plan_adopts_what_another_run_has_done_meanwhile() -> None:
    """Also a second dead letter of the same record, which then is not sent any more."""
    topic = topic_of([record(1), record(2), record(3), record(1)])
    plan = plan_of(topic)
    others = ReplayProgress()
    others.finish([3, 1])
    topic.progress[0] = ReplayProgress(others.commit())

    plan.adopt(topic)

    assert plan.due == {(0, 2): [(0, 2)]}
    assert plan.covered == [(0, 0)]


def test_offsets_between_dead_letters_take_no_room_in_the_progress() -> None:
    """They hold other records, or the markers of transactions; a plan knows all dead letters, also those left out."""
    made = [(offset, record(offset), failure(offset)) for offset in (0, 3, 4, 8, 9)]
    topic, _ = dead_letters_in_memory("orders.dlt", {0: made})
    plan_of(topic, Filters(records=(Coordinates("orders", 0, 0),))).adopt(topic)

    topic.progress[0].finish([0, 3, 8])

    assert topic.progress[0].commit().offset == 4
    topic.progress[0].finish([4, 9])
    assert topic.progress[0].commit() == Committed(10, "")


def test_the_bounds_of_a_plan_are_those_of_its_dead_letters() -> None:
    topic = topic_of([record(1), record(2), record(4), record(3)], [record(6)])

    assert plan_of(topic, Filters(error="ValueError")).bounds() == ({0: 1, 1: 0}, {0: 3, 1: 1})
    assert plan_of(topic, Filters(error="KeyError")).bounds() == ({}, {0: 0, 1: 0})
