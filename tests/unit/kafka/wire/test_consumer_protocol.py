"""Consumers read the metadata of each other, also of other versions and other clients."""

import struct

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from hypothesis import given
from hypothesis import strategies as st

from aioshard.kafka.wire.consumer_protocol import (
    Subscription,
    assigned_partitions,
    read_subscription,
    subscribed_topics,
    write_assignment,
    write_subscription,
)
from aioshard.records import TopicPartition

TOPICS = st.text(st.characters(codec="utf-8"), max_size=5)
PARTITIONS = st.frozensets(st.builds(TopicPartition, TOPICS, st.integers(0, 2**31 - 1)), max_size=6)
ZERO, ONE = TopicPartition("orders", 0), TopicPartition("orders", 1)


@given(st.builds(Subscription, st.frozensets(TOPICS), st.binary(max_size=5), PARTITIONS, st.integers(-1, 2**31 - 1)))
def test_subscriptions_arrive_as_they_were_written(subscription: Subscription) -> None:
    assert read_subscription(write_subscription(subscription)) == subscription


@given(PARTITIONS)
def test_assignments_arrive_as_they_were_written(partitions: frozenset[TopicPartition]) -> None:
    assert assigned_partitions(write_assignment(partitions)) == tuple(sorted(partitions))


def test_older_members_read_what_they_know() -> None:
    """Those of version 0 ignore the fields behind it."""
    written = write_subscription(Subscription(frozenset({"orders"}), b"data", frozenset({ONE}), 7))

    read = ConsumerProtocolMemberMetadata.decode(written)
    assert (list(read.subscription), read.user_data) == (["orders"], b"data")
    assert ConsumerProtocolMemberAssignment.decode(write_assignment([ONE])).assignment == [("orders", [1])]


def version(number: int, *rest: bytes) -> bytes:
    topics = struct.pack(">ih6s", 1, 6, b"orders")
    return b"".join((struct.pack(">h", number), topics, struct.pack(">i", -1), *rest))


OWNED = struct.pack(">ih6sii", 1, 6, b"orders", 1, 1)
GENERATION = struct.pack(">i", 7)


def test_the_fields_of_each_version_are_read() -> None:
    orders = frozenset({"orders"})

    assert read_subscription(version(0)) == Subscription(orders, b"", None, -1)
    assert read_subscription(version(1, OWNED)) == Subscription(orders, b"", frozenset({ONE}), -1)
    assert read_subscription(version(2, OWNED, GENERATION)) == Subscription(orders, b"", frozenset({ONE}), 7)
    newer = version(4, OWNED, GENERATION, struct.pack(">h", -1), b"and what we do not know")
    assert read_subscription(newer) == Subscription(orders, b"", frozenset({ONE}), 7)


def test_a_member_that_announces_more_than_it_writes_says_nothing_of_its_partitions() -> None:
    assert read_subscription(version(1)) == Subscription(frozenset({"orders"}), b"", None, -1)


def test_no_subscription_has_no_topics() -> None:
    for content in (None, b"", b"\0", b"\0\1\0\0\0\5", b"\xff" * 9):
        assert subscribed_topics(content) == frozenset()
        assert read_subscription(content).owned is None
        assert assigned_partitions(content) == ()


def test_impossible_and_repeated_partitions_of_an_assignment_are_left_out() -> None:
    """A partition that is named twice is not a new one the second time."""
    content = struct.pack(">hih6siiiiii", 0, 1, 6, b"orders", 4, 1, 0, -5, 1, -1)

    assert assigned_partitions(content) == (ZERO, ONE)
