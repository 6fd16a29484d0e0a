"""What a leader withholds for the member that comes in the place of one that is gone, and for how long."""

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


def test_what_is_missing_is_withheld_until_the_delay_is_over() -> None:
    delayed = DelayedReassignment(30)
    rest = {"a": having(0, 1), "b": having(2, 3)}

    assert delayed.withheld(rest, PARTITIONS, 100.0) == parts(4, 5)
    assert delayed.until == 130.0
    assert delayed.withheld(rest, PARTITIONS, 129.9) == parts(4, 5)
    assert delayed.withheld(rest, PARTITIONS, 130.0) == frozenset()
    assert delayed.until is None


def test_a_second_member_that_dies_does_not_prolong_the_first_ones_delay() -> None:
    delayed = DelayedReassignment(30)
    delayed.withheld({"a": having(0, 1), "b": having(2, 3)}, PARTITIONS, 100.0)

    assert delayed.withheld({"a": having(0, 1)}, PARTITIONS, 120.0) == parts(2, 3, 4, 5)
    assert delayed.until == 130.0


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"a": NEW, "b": NEW}, id="a group in which nobody had anything"),
        pytest.param({"a": having(0, 1), "b": having(2, 3), "c": NEW}, id="somebody takes the place"),
        pytest.param({"a": having(0, 1, 2), "b": having(3, 4, 5)}, id="nobody is missing"),
        pytest.param({}, id="nobody is there"),
    ],
)
def test_nothing_is_withheld_without_need(members: dict[str, Member]) -> None:
    delayed = DelayedReassignment(30)

    assert delayed.withheld(members, PARTITIONS, 100.0) == frozenset()
    assert delayed.until is None


def test_who_comes_ends_the_waiting_and_the_next_death_waits_its_own_time() -> None:
    delayed = DelayedReassignment(30)
    delayed.withheld({"a": having(0, 1), "b": having(2, 3)}, PARTITIONS, 100.0)
    delayed.withheld({"a": having(0, 1), "b": having(2, 3), "c": NEW}, PARTITIONS, 110.0)

    assert delayed.withheld({"a": having(0, 1), "b": having(2, 3)}, PARTITIONS, 200.0) == parts(4, 5)
    assert delayed.until == 230.0


def test_one_that_cannot_read_the_topic_does_not_take_the_place() -> None:
    other = Member(frozenset({"u"}))

    withheld = DelayedReassignment(30).withheld({"a": having(0, 1), "b": other}, {"t": range(3), "u": range(1)}, 100.0)

    assert withheld == parts(2)


def test_new_partitions_are_given_out_at_once_by_a_leader_that_knows_the_old_ones() -> None:
    delayed = DelayedReassignment(30)
    everybody = {"a": having(0, 1, 2), "b": having(3, 4, 5)}
    delayed.withheld(everybody, PARTITIONS, 100.0)

    assert delayed.withheld(everybody, {"t": range(8)}, 110.0) == frozenset()

    delayed.forget()
    assert delayed.withheld(everybody, {"t": range(8)}, 120.0) == parts(6, 7), "nobody knows that they are new"


def test_without_a_delay_nothing_is_withheld() -> None:
    assert DelayedReassignment(0).withheld({"a": having(0, 1)}, PARTITIONS, 100.0) == frozenset()
