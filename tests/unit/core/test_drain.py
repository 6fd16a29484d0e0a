"""What must end before a partition is handed over."""

from typing import NamedTuple

from aioshard.core.drain import DrainPlan


class Queued(NamedTuple):
    offset: int
    key: str | None


def queued(*keys: str | None) -> list[Queued]:
    return [Queued(offset, key) for offset, key in enumerate(keys)]


def test_nothing_started_means_nothing_to_wait_for() -> None:
    assert DrainPlan(queued("a", "b"), highest_started=-1).done


def test_what_is_queued_below_the_highest_started_offset_is_waited_for() -> None:
    """Each is a hole in what can be committed; what is above has not begun."""
    a, b, c, _ = deliveries = queued("a", "a", "c", "d")

    plan = DrainPlan(deliveries, highest_started=2)

    assert set(plan.pending.values()) == {a, b, c}


def test_it_is_done_when_all_of_that_has_ended() -> None:
    deliveries = queued("a", "b")
    plan = DrainPlan(deliveries, highest_started=1)

    plan.settle(deliveries[1])
    assert not plan.done
    plan.settle(deliveries[0])
    assert plan.done


def test_a_failure_takes_its_shard_out_of_the_wait() -> None:
    deliveries = queued("a", "b", "a", "b")
    plan = DrainPlan(deliveries, highest_started=3)

    plan.block("a")

    assert set(plan.pending) == {1, 3}


def test_records_without_order_do_not_block_each_other() -> None:
    deliveries = queued(None, None)
    plan = DrainPlan(deliveries, highest_started=1)

    plan.settle(deliveries[0])
    plan.block(None)

    assert set(plan.pending) == {1}


def test_ending_twice_changes_nothing() -> None:
    deliveries = queued("a")
    plan = DrainPlan(deliveries, highest_started=0)

    plan.settle(deliveries[0])
    plan.block("a")

    assert plan.done
