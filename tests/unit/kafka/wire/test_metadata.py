"""The metadata of a cluster: one answer adds to it, and one broker may change only a part of it."""

import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.kafka.wire.metadata import Broker, ClusterMetadata, Leader, Recreation
from aioshard.records import TopicPartition

FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)
ZEROS = uuid.UUID(int=0)
ORDERS = TopicPartition("orders", 0)


def partition(
    number: int = 0, *, leader: int = 1, epoch: int = 7, error: int = 0, replicas: Sequence[int] = (1, 2, 3)
) -> Any:
    return SimpleNamespace(
        partition=number,
        error=error,
        leader=leader,
        epoch=epoch,
        replicas=list(replicas),
        in_sync=list(replicas),
        offline=[],
    )


def topic(
    *partitions: Any, name: str | None = "orders", topic_id: uuid.UUID | None = FIRST, error: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(name=name, id=topic_id, error=error, internal=False, partitions=list(partitions))


def response(*topics: Any, nodes: Sequence[int] = (1, 2, 3), controller: int = 1) -> Any:
    brokers = [(node, f"broker-{node}", 9092, None) for node in nodes]
    return SimpleNamespace(brokers=brokers, controller=controller, topics=list(topics))


def knowing(*topics: Any) -> ClusterMetadata:
    metadata = ClusterMetadata()
    metadata.update(response(*topics), 0.0)
    return metadata


def test_a_topic_has_its_partitions_leaders_and_id() -> None:
    metadata = knowing(topic(partition(0, leader=2, epoch=5), partition(1, leader=-1)))

    assert metadata.leader(ORDERS) == Leader(2, 5)
    assert metadata.leader(TopicPartition("orders", 1)) is None, "an election is going on"
    assert metadata.leader(TopicPartition("orders", 2)) is None
    assert metadata.partitions("orders").keys() == {0, 1}
    assert metadata.topic_id("orders") == FIRST
    assert metadata.name(FIRST) == "orders"
    assert metadata.brokers[2] == Broker(2, "broker-2", 9092, None)


def test_an_answer_without_brokers_changes_nothing() -> None:
    metadata = knowing(topic(partition()))
    version = metadata.version

    update = metadata.update(response(nodes=()), 1.0)

    assert update.is_stale
    assert metadata.brokers.keys() == {1, 2, 3}
    assert metadata.version == version


# Leader epochs ----------------------------------------------------------------------------


def test_a_newer_epoch_moves_the_leader_and_an_older_one_does_not() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7)))

    moved = metadata.update(response(topic(partition(leader=2, epoch=8))), 1.0)
    stale = metadata.update(response(topic(partition(leader=1, epoch=7))), 2.0)

    assert moved.moved == {ORDERS}
    assert not moved.is_stale
    assert stale.is_stale
    assert not stale.moved
    assert metadata.leader(ORDERS) == Leader(2, 8)


def test_the_same_epoch_may_name_another_leader() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7)))

    assert metadata.update(response(topic(partition(leader=2, epoch=7))), 1.0).moved == {ORDERS}
    assert metadata.leader(ORDERS) == Leader(2, 7)


def test_an_epoch_that_only_a_dead_broker_knew_is_given_up_after_five_others_agree() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7)))
    metadata.update(response(topic(partition(leader=3, epoch=9))), 1.0)

    leaders = []
    for _ in range(5):
        metadata.update(response(topic(partition(leader=1, epoch=7))), 2.0)
        leaders.append(metadata.leader(ORDERS))

    assert leaders == [Leader(3, 9)] * 4 + [Leader(1, 7)]


def test_an_answer_with_the_known_epoch_in_between_starts_the_count_again() -> None:
    metadata = knowing(topic(partition(leader=3, epoch=9)))

    for _ in range(4):
        metadata.update(response(topic(partition(leader=1, epoch=7))), 1.0)
    metadata.update(response(topic(partition(leader=3, epoch=9))), 2.0)
    metadata.update(response(topic(partition(leader=1, epoch=7))), 3.0)

    assert metadata.leader(ORDERS) == Leader(3, 9)


def test_an_unknown_epoch_moves_the_leader_but_does_not_replace_the_known_one() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7)))

    metadata.update(response(topic(partition(leader=2, epoch=-1))), 1.0)

    assert metadata.leader(ORDERS) == Leader(2, 7)
    assert metadata.update(response(topic(partition(leader=3, epoch=6))), 2.0).is_stale


def test_there_is_no_leader_during_an_election_and_the_epoch_stays_known() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7)))

    update = metadata.update(response(topic(partition(leader=-1, epoch=-1, error=5))), 1.0)

    assert update.is_stale
    assert metadata.leader(ORDERS) is None
    assert metadata.update(response(topic(partition(leader=1, epoch=6))), 2.0).is_stale
    metadata.update(response(topic(partition(leader=2, epoch=8))), 3.0)
    assert metadata.leader(ORDERS) == Leader(2, 8)


def test_a_leader_named_beside_an_error_counts_if_its_epoch_is_newer() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7)))

    assert not metadata.learn_leader(ORDERS, Leader(2, 7))
    assert not metadata.learn_leader(ORDERS, Leader(9, 8)), "its address is unknown"
    assert not metadata.learn_leader(TopicPartition("unknown", 0), Leader(2, 8))
    assert metadata.learn_leader(ORDERS, Leader(2, 8))
    assert metadata.leader(ORDERS) == Leader(2, 8)
    metadata.learn_broker(Broker(9, "broker-9", 9092, None))
    assert metadata.learn_leader(ORDERS, Leader(9, 9))


# Errors of topics -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [3, 5, 29, -1, 999])
def test_an_error_of_one_topic_leaves_the_others_and_its_own_leaders(code: int) -> None:
    payments = TopicPartition("payments", 0)
    metadata = knowing(topic(partition()), topic(partition(), name="payments", topic_id=SECOND))

    metadata.update(response(topic(error=code), topic(partition(leader=2), name="payments", topic_id=SECOND)), 1.0)

    assert metadata.leader(ORDERS) == Leader(1, 7)
    assert metadata.leader(payments) == Leader(2, 7)


def test_a_denied_topic_is_named_until_the_permission_comes_back() -> None:
    metadata = knowing(topic(partition()))

    metadata.update(response(topic(error=29)), 1.0)
    assert metadata.denied == {"orders"}

    metadata.update(response(topic(partition())), 2.0)
    assert metadata.denied == set()


def test_an_unknown_topic_is_missing_at_once_if_it_was_never_known() -> None:
    metadata = knowing(topic(error=3))
    assert metadata.missing == {"orders"}

    update = metadata.update(response(topic(partition())), 1.0)

    assert metadata.missing == set()
    assert update.moved == {ORDERS}


def test_a_known_topic_is_forgotten_once_no_broker_knew_it_for_thirty_seconds() -> None:
    metadata = knowing(topic(partition()))

    assert metadata.update(response(topic(error=3)), 10.0).is_stale
    metadata.update(response(topic(error=3)), 39.9)
    assert metadata.leader(ORDERS) == Leader(1, 7)
    metadata.update(response(topic(error=3)), 40.0)

    assert metadata.leader(ORDERS) is None
    assert metadata.missing == {"orders"}
    assert metadata.name(FIRST) is None


def test_a_known_topic_is_missing_when_two_answers_in_a_row_say_so() -> None:
    """One broker may be behind."""
    metadata = knowing(topic(partition()))

    for at in (1.0, 3.0):
        metadata.update(response(topic(error=3)), at)
        assert metadata.missing == set()
        metadata.update(response(topic(partition())), at + 1)
    metadata.update(response(topic(error=3)), 5.0)
    metadata.update(response(topic(error=3)), 6.0)

    assert metadata.missing == {"orders"}


def test_a_broker_that_knows_the_topic_starts_the_thirty_seconds_again() -> None:
    metadata = knowing(topic(partition()))

    metadata.update(response(topic(error=3)), 10.0)
    metadata.update(response(topic(partition())), 20.0)
    metadata.update(response(topic(error=3)), 45.0)

    assert metadata.leader(ORDERS) == Leader(1, 7)


def test_a_name_that_is_unknown_to_a_look_up_by_id_changes_nothing() -> None:
    metadata = knowing(topic(partition()))

    assert metadata.update(response(topic(name=None, topic_id=SECOND, error=100)), 1.0).is_stale
    assert set(metadata.topics) == {"orders"}


# Topic ids --------------------------------------------------------------------------------


def test_a_topic_that_was_created_again_is_reported_once_and_its_old_epochs_do_not_count() -> None:
    metadata = knowing(topic(partition(leader=1, epoch=7), partition(1)))

    update = metadata.update(response(topic(partition(leader=2, epoch=0), topic_id=SECOND)), 1.0)
    again = metadata.update(response(topic(partition(leader=2, epoch=0), topic_id=SECOND)), 2.0)

    assert update.recreated == (Recreation("orders", FIRST, SECOND),)
    assert again.recreated == ()
    assert metadata.leader(ORDERS) == Leader(2, 0)
    assert metadata.partitions("orders").keys() == {0}
    assert metadata.name(FIRST) is None
    assert metadata.name(SECOND) == "orders"


def test_a_broker_that_still_names_the_old_id_is_behind() -> None:
    metadata = knowing(topic(partition()))
    metadata.update(response(topic(partition(epoch=0), topic_id=SECOND)), 1.0)

    update = metadata.update(response(topic(partition(epoch=7), topic_id=FIRST)), 2.0)

    assert update.is_stale
    assert update.recreated == ()
    assert metadata.topic_id("orders") == SECOND
    assert metadata.leader(ORDERS) == Leader(1, 0)


@pytest.mark.parametrize("unknown", [None, ZEROS])
def test_topics_without_ids_work_and_a_known_id_stays(unknown: uuid.UUID | None) -> None:
    metadata = knowing(topic(partition(epoch=-1), topic_id=unknown))
    assert metadata.topic_id("orders") is None
    assert metadata.leader(ORDERS) == Leader(1, -1)

    metadata.update(response(topic(partition(), topic_id=FIRST)), 1.0)
    metadata.update(response(topic(partition(), topic_id=unknown)), 2.0)

    assert metadata.topic_id("orders") == FIRST
    assert metadata.name(FIRST) == "orders"


def test_new_partitions_are_added_and_an_answer_without_them_is_old() -> None:
    metadata = knowing(topic(partition(0)))

    update = metadata.update(response(topic(partition(0), partition(1))), 1.0)
    older = metadata.update(response(topic(partition(0))), 2.0)

    assert update.moved == {TopicPartition("orders", 1)}
    assert older.is_stale
    assert metadata.partitions("orders").keys() == {0, 1}


@pytest.mark.parametrize("unknown", [None, ZEROS])
def test_a_topic_without_an_id_may_have_fewer_partitions_if_five_answers_agree(unknown: uuid.UUID | None) -> None:
    """It was created again: nothing else tells it from a broker that is behind."""
    metadata = knowing(topic(partition(0), partition(1), topic_id=unknown))
    fewer = response(topic(partition(0, leader=2), topic_id=unknown))
    more = response(topic(partition(0), partition(1), topic_id=unknown))

    for answer in (fewer, fewer, fewer, fewer, more, fewer, fewer, fewer, fewer):
        assert metadata.update(answer, 1.0).is_stale is (answer is fewer)
        assert metadata.partitions("orders").keys() == {0, 1}
    update = metadata.update(fewer, 1.0)

    assert not update.is_stale
    assert update.moved == {ORDERS}
    assert metadata.partitions("orders").keys() == {0}


def test_a_topic_with_an_id_keeps_its_partitions_whatever_old_answers_say() -> None:
    metadata = knowing(topic(partition(0), partition(1)))

    for _ in range(10):
        assert metadata.update(response(topic(partition(0))), 1.0).is_stale
    assert metadata.partitions("orders").keys() == {0, 1}


def test_a_forgotten_topic_leaves_nothing_behind() -> None:
    metadata = knowing(topic(partition()))
    metadata.update(response(topic(error=29)), 1.0)

    metadata.forget("orders")

    assert set(metadata.topics) == set()
    assert metadata.denied == set()
    assert metadata.name(FIRST) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([FIRST, SECOND, None]),
            st.sampled_from([0, 0, 0, 3, 5, 29]),
            st.integers(-1, 3),
            st.integers(-1, 9),
        ),
        max_size=40,
    )
)
def test_no_history_brings_a_retired_id_back_or_makes_a_known_epoch_unknown(
    answers: list[tuple[uuid.UUID | None, int, int, int]],
) -> None:
    metadata = ClusterMetadata()
    retired: set[uuid.UUID] = set()
    for topic_id, error, leader, epoch in answers:
        id_before = metadata.topic_id("orders")
        before = metadata.partition(ORDERS)
        epoch_before = -1 if before is None else before.epoch
        answer = topic(partition(leader=leader, epoch=epoch), topic_id=topic_id, error=error)

        update = metadata.update(response(answer), 0.0)

        retired |= {recreation.old_id for recreation in update.recreated}
        assert metadata.topic_id("orders") not in retired
        after = metadata.partition(ORDERS)
        if after is not None and metadata.topic_id("orders") == id_before and epoch_before >= 0:
            assert after.epoch >= 0


@pytest.mark.parametrize(("named", "expected"), [(2, 2), (-1, None), (0, None)])
def test_a_controller_is_one_of_the_brokers(named: int, expected: int | None) -> None:
    """librdkafka's mock cluster names broker 0, which it does not have."""
    metadata = ClusterMetadata()
    metadata.update(response(controller=named), 0.0)

    assert metadata.controller == expected
