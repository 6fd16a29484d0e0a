"""The group coordinator, step by step and without an event loop."""

import pytest

from aioshard.errors import CommitRefusedError
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition
from aioshard.testing import ConsumerGroup

ORDERS = [TopicPartition("orders", number) for number in range(4)]


@pytest.fixture
def group() -> ConsumerGroup:
    return ConsumerGroup("billing", lambda: {"orders": 4, "clicks": 1}, lambda: None)


def join(group: ConsumerGroup, *, topic: str = "orders") -> str:
    return group.join([topic])


def complete(group: ConsumerGroup) -> None:
    """Let every member release and adopt partitions."""
    for member_id in group.members:
        group.rejoin(member_id)
    for member_id in group.members:
        group.adopt(member_id)


def test_the_first_member_gets_every_subscribed_partition(group: ConsumerGroup) -> None:
    member_id = join(group)

    assert group.assignment(member_id) == tuple(ORDERS)
    assert group.duty(member_id) == "adopt"
    assert group.adopt(member_id) == Membership(member_id, 1)
    assert group.duty(member_id) == "nothing"


def test_a_second_member_waits_until_the_first_has_released(group: ConsumerGroup) -> None:
    first = join(group)
    group.adopt(first)

    second = join(group)
    duties = group.duty(first), group.duty(second)
    generation_while_preparing = group.generation
    group.rejoin(first)

    assert duties == ("rejoin", "nothing")
    assert generation_while_preparing == 1
    assert group.generation == 2
    assert group.assignment(first) == (ORDERS[0], ORDERS[2])
    assert group.assignment(second) == (ORDERS[1], ORDERS[3])


def test_commits_under_the_old_generation_are_accepted_until_the_last_has_rejoined(group: ConsumerGroup) -> None:
    first = join(group)
    old = group.adopt(first)
    second = join(group)

    group.commit({ORDERS[0]: Committed(3, "")}, old)
    group.rejoin(first)

    assert group.committed(ORDERS[0]) == Committed(3, "")
    with pytest.raises(CommitRefusedError, match="generation 2 is in force"):
        group.commit({ORDERS[0]: Committed(4, "")}, old)
    with pytest.raises(CommitRefusedError, match="does not know the member 'nobody'"):
        group.commit({ORDERS[0]: Committed(4, "")}, Membership("nobody", 2))
    assert group.committed(ORDERS[0]) == Committed(3, "")
    assert second in group.members


def test_overlapping_rebalances_skip_a_generation_for_the_late_member(group: ConsumerGroup) -> None:
    """Such a member must not take its partitions for those it had: somebody else had them in between."""
    first, second = join(group), join(group)
    complete(group)
    before = group.generation
    group.rebalance()
    group.rejoin(first)
    group.rejoin(second)
    group.adopt(second)

    group.rebalance()

    assert group.duty(first) == "rejoin"
    complete(group)
    assert group.generation == before + 2


def test_a_revoked_partition_has_no_owner_until_reassigned(group: ConsumerGroup) -> None:
    member_id = join(group)
    group.revoke(ORDERS[1])
    complete(group)
    without = group.assignment(member_id)

    group.assign(ORDERS[1])
    complete(group)

    assert without == (ORDERS[0], ORDERS[2], ORDERS[3])
    assert group.withheld == frozenset()
    assert group.assignment(member_id) == tuple(ORDERS)


def test_a_partition_can_be_given_to_a_chosen_member(group: ConsumerGroup) -> None:
    first, second = join(group), join(group)

    group.assign(*ORDERS, member_id=second)
    complete(group)

    assert group.assignment(first) == ()
    assert group.assignment(second) == tuple(ORDERS)


def test_a_lost_member_rejoins_under_another_id(group: ConsumerGroup) -> None:
    member_id = join(group)
    membership = group.adopt(member_id)

    group.leave(member_id)

    assert group.duty(member_id) == "join anew"
    assert join(group) != member_id
    assert group.generation > membership.generation


def test_a_member_that_releases_too_late_is_removed(group: ConsumerGroup) -> None:
    slow, quick = join(group), join(group)
    complete(group)
    generation = group.generation
    group.rebalance()
    group.rejoin(quick)

    group.leave(slow)

    assert group.members == (quick,)
    assert group.generation == generation + 1
    assert group.assignment(quick) == tuple(ORDERS)


def test_members_get_only_subscribed_partitions(group: ConsumerGroup) -> None:
    orders, clicks = join(group), join(group, topic="clicks")
    complete(group)

    assert group.assignment(orders) == tuple(ORDERS)
    assert group.assignment(clicks) == (TopicPartition("clicks", 0),)
    assert group.subscribed() == (TopicPartition("clicks", 0), *ORDERS)


def test_a_pattern_matches_whole_names(group: ConsumerGroup) -> None:
    group.join((), "order")
    assert not group.subscribed()

    group.join((), "order.")
    assert group.subscribed() == tuple(ORDERS)


def test_commits_from_outside_need_no_membership(group: ConsumerGroup) -> None:
    group.commit_from_outside({ORDERS[0]: 7, ORDERS[1]: 1}, metadata="reset")
    group.commit_from_outside({ORDERS[1]: None})

    assert group.committed(ORDERS[0]) == Committed(7, "reset")
    assert group.committed(ORDERS[1]) is None


def test_rebalancing_lasts_until_every_member_has_adopted(group: ConsumerGroup) -> None:
    first, second = join(group), join(group)
    group.rejoin(first)
    group.adopt(first)
    half = group.rebalancing
    group.adopt(second)

    assert half
    assert not group.rebalancing
