"""Choosing partitions: by key as Java does, round-robin without one, and while brokers report fewer partitions."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from aioshard.kafka import partitioning
from aioshard.kafka.partitioning import Partitioner
from aioshard.kafka.wire.metadata import ClusterMetadata
from aioshard.ports import Message


def cluster(*leaders: int) -> ClusterMetadata:
    """Metadata of a cluster whose topic "orders" has these leaders; -1 for none."""
    metadata = ClusterMetadata()
    lead(metadata, leaders)
    return metadata


def lead(metadata: ClusterMetadata, leaders: Sequence[int]) -> None:
    partitions = [
        SimpleNamespace(partition=number, leader=leader, epoch=-1, replicas=[1], in_sync=[1], offline=[])
        for number, leader in enumerate(leaders)
    ]
    topic = SimpleNamespace(name="orders", id=None, error=0, internal=False, partitions=partitions)
    metadata.update(SimpleNamespace(brokers=[(1, "kafka-1", 9092, None)], controller=1, topics=[topic]), 0.0)


def spread(partitioner: Partitioner, metadata: ClusterMetadata, messages: int = 12) -> Counter[int]:
    """The number of messages without a key by partition."""
    count = partitioner.count(metadata, "orders")
    return Counter(partitioner.choose(metadata, Message("orders", b"v"), count) for _ in range(messages))


@pytest.mark.parametrize(
    ("key", "hashed"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536), (b"abc", 479470107)],
)
def test_a_key_is_hashed_as_in_java(key: bytes, hashed: int) -> None:
    """The values are those of the tests of Kafka's `Utils.murmur2`."""
    partitioner = Partitioner()
    message = Message("orders", b"v", key)
    assert partitioner.choose(cluster(*[1] * 7), message, 7) == (hashed & 0x7FFFFFFF) % 7


@pytest.mark.parametrize("partition", [0, 2, 99])
def test_a_named_partition_is_not_checked(partition: int) -> None:
    message = Message("orders", b"v", b"key", partition=partition)
    assert Partitioner().choose(cluster(1, 1, 1), message, 3) == partition


@pytest.mark.parametrize("key", ["key", 1, [b"key"], {}])
def test_a_key_of_a_wrong_type_is_refused(key: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Partitioner().choose(cluster(1), Message("orders", b"v", key), 1)  # type: ignore[arg-type]


def test_a_key_that_does_not_decide_spreads_the_messages() -> None:
    metadata = cluster(1, 1)
    message = Message("orders", b"v", b"key", partitioner="round_robin")
    partitioner = Partitioner()
    count = partitioner.count(metadata, "orders")
    assert {partitioner.choose(metadata, message, count) for _ in range(2)} == {0, 1}


def test_messages_without_a_key_avoid_partitions_without_a_leader() -> None:
    assert spread(Partitioner(), cluster(1, -1, 1)) == {0: 6, 2: 6}
    assert spread(Partitioner(), cluster(-1, -1, -1)) == {0: 4, 1: 4, 2: 4}, "one may get a leader soon"


def test_a_count_reads_the_leaders_again() -> None:
    metadata = cluster(1, -1)
    partitioner = Partitioner()
    assert spread(partitioner, metadata).keys() == {0}
    lead(metadata, [-1, 1])
    assert spread(partitioner, metadata).keys() == {1}


def test_the_round_robin_continues_after_a_count() -> None:
    metadata = cluster(1, 1, 1)
    partitioner = Partitioner()
    assert sum((spread(partitioner, metadata, 1) for _ in range(3)), Counter()) == {0: 1, 1: 1, 2: 1}


def test_an_unknown_topic_has_no_partitions_yet() -> None:
    assert Partitioner().count(ClusterMetadata(), "orders") == 0


def test_fewer_partitions_are_not_used_before_that_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(partitioning, "time", clock)
    partitioner = Partitioner()
    assert partitioner.count(cluster(1, 1, 1), "orders") == 3
    assert partitioner.count(cluster(1), "orders") == 0
    now = 104.9
    assert partitioner.count(cluster(1), "orders") == 0
    assert partitioner.count(cluster(1, 1, 1), "orders") == 3, "the broker was behind"
    now = 105.1
    assert partitioner.count(cluster(1), "orders") == 0, "the time begins again"
    now = 110.2
    assert partitioner.count(cluster(1), "orders") == 1
    assert partitioner.count(cluster(1), "orders") == 1


def test_a_forgotten_topic_may_have_fewer_partitions_at_once() -> None:
    partitioner = Partitioner()
    assert partitioner.count(cluster(1, 1, 1), "orders") == 3
    partitioner.forget("orders")
    partitioner.forget("unknown")
    assert partitioner.count(cluster(1), "orders") == 1
