"""Partitions that a leader withholds for the replacement of a missing member, and for how long."""

import pytest

from aioshard.core.assignment import DelayedReassignment, Member
from aioshard.records import TopicPartition

TOPIC = frozenset({"t"})
PARTITIONS = {"t": range(6)}


def parts(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("t", number) for number in numbers)


def having(*numbers: int, generation: int = 4) -> Member:
    return Member(TOPIC, tuple(sorted(parts(*numbers))), generation)


NEW = Member(TOPIC)


def test_partitions_of_a_missing_member_are_withheld_until_the_delay_ends() -> None:
    delayed = DelayedReassignment(30)
    rest = {"a": having(0, 1), "b": having(2, 3)}

    assert delayed.withheld(rest, PARTITIONS, 100.0) == parts(4, 5)
    assert delayed.until == 130.0
    assert delayed.withheld(rest, PARTITIONS, 129.9) == parts(4, 5)
    assert delayed.withheld(rest, PARTITIONS, 130.0) == frozenset()
    assert delayed.until is None


def test_a_second_dead_member_does_not_extend_the_first_delay() -> None:
    delayed = DelayedReassignment(30)
    delayed.withheld({"a": having(0, 1), "b": having(2, 3)}, PARTITIONS, 100.0)

    assert delayed.withheld({"a": having(0, 1)}, PARTITIONS, 120.0) == parts(2, 3, 4, 5)
    assert delayed.until == 130.0


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"a": NEW, "b": NEW}, id="a new group"),
        pytest.param({"a": having(0, 1), "b": having(2, 3), "c": NEW}, id="a replacement has joined"),
        pytest.param({"a": having(0, 1, 2), "b": having(3, 4, 5)}, id="no member is missing"),
        pytest.param({}, id="no members"),
    ],
)
def test_nothing_is_withheld_unnecessarily(members: dict[str, Member]) -> None:
    delayed = DelayedReassignment(30)

    assert delayed.withheld(members, PARTITIONS, 100.0) == frozenset()
    assert delayed.until is None


def test_a_joining_member_ends_the_delay_and_the_next_death_starts_its_own() -> None:
    delayed = DelayedReassignment(30)
    delayed.withheld({"a": having(0, 1), "b": having(2, 3)}, PARTITIONS, 100.0)
    delayed.withheld({"a": having(0, 1), "b": having(2, 3), "c": NEW}, PARTITIONS, 110.0)

    assert delayed.withheld({"a": having(0, 1), "b": having(2, 3)}, PARTITIONS, 200.0) == parts(4, 5)
    assert delayed.until == 230.0


def test_a_member_without_the_topic_is_not_a_replacement() -> None:
    other = Member(frozenset({"u"}))

    withheld = DelayedReassignment(30).withheld({"a": having(0, 1), "b": other}, {"t": range(3), "u": range(1)}, 100.0)

    assert withheld == parts(2)


def test_new_partitions_are_assigned_at_once_by_an_experienced_leader() -> None:
    delayed = DelayedReassignment(30)
    everybody = {"a": having(0, 1, 2), "b": having(3, 4, 5)}
    delayed.withheld(everybody, PARTITIONS, 100.0)

    assert delayed.withheld(everybody, {"t": range(8)}, 110.0) == frozenset()

    delayed.forget()
    assert delayed.withheld(everybody, {"t": range(8)}, 120.0) == parts(6, 7), "it is unknown that they are new"


def test_without_a_delay_nothing_is_withheld() -> None:
    assert DelayedReassignment(0).withheld({"a": having(0, 1)}, PARTITIONS, 100.0) == frozenset()
