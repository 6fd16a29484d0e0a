"""Mapping records to shards."""

from collections import Counter
from typing import Any

import pytest

from aioshard.core.sharding import identity, record_key, shard_key_of, shard_number, shown
from aioshard.errors import HandlerError
from aioshard.records import Record


def record(key: bytes | None, topic: str = "orders", partition: int = 0) -> Record:
    return Record(topic, partition, 0, key, b"", (), 0.0)


def test_one_topic_shards_by_the_key_alone() -> None:
    shard_key = shard_key_of("key", one_topic=True)

    assert shard_key(record(b"a")) == shard_key(record(b"a", partition=3))


def test_the_same_key_in_two_topics_is_two_shards() -> None:
    shard_key = shard_key_of("key", one_topic=False)

    assert shard_key(record(b"a", "orders")) != shard_key(record(b"a", "clicks"))


@pytest.mark.parametrize("one_topic", [True, False])
def test_records_without_a_key_ask_for_no_order(one_topic: bool) -> None:
    assert shard_key_of("key", one_topic=one_topic)(record(None)) is None


def test_an_empty_key_is_a_key() -> None:
    assert shard_key_of("key", one_topic=False)(record(b"")) is not None


def test_shard_by_partition_keeps_a_whole_partition_in_order() -> None:
    shard_key = shard_key_of("partition", one_topic=True)

    assert shard_key(record(b"a")) == shard_key(record(b"b"))
    assert shard_key(record(b"a")) != shard_key(record(b"a", partition=1))


def test_shard_by_record_keeps_no_order() -> None:
    assert shard_key_of("record", one_topic=True)(record(b"a")) is None


def test_an_unknown_shard_by_is_refused() -> None:
    with pytest.raises(HandlerError, match="'keys'"):
        shard_key_of("keys", one_topic=True)  # type: ignore[arg-type]


def test_the_fixed_shard_of_a_key_never_changes() -> None:
    """Spark computes the same figures in SQL; a change would send keys to other shards in an upgrade."""
    assert [shard_number(key, 64) for key in (b"N725MQ", "N725MQ", 725, b"", "ä")] == [41, 41, 4, 0, 52]


def test_fixed_shards_spread_the_keys_of_one_partition() -> None:
    """With the partitioner's hash modulo N a partition of 64 would use one shard of 64."""
    import zlib  # noqa: PLC0415

    keys = [b"key-%d" % number for number in range(100_000)]
    one_partition = [key for key in keys if zlib.crc32(key) % 64 == 5]

    used = Counter(shard_number(key, 64) for key in one_partition)

    assert len(used) == 64
    assert max(used.values()) < 3 * len(one_partition) / 64


def test_types_with_a_hash_that_differs_between_processes_are_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        shard_number(1.5, 8)


def test_a_coroutine_function_is_refused_as_sharding_function() -> None:
    async def by_customer(record: Record) -> bytes | None:
        return record.key

    with pytest.raises(HandlerError, match="plain function"):
        shard_key_of(by_customer, one_topic=True)  # type: ignore[arg-type] # what a type checker would have said


def test_a_past_record_with_an_unhashable_key_has_no_identity() -> None:
    def key(_: Record) -> Any:
        return []

    assert identity(key, record(b"a")) is None


def nested(depth: int) -> tuple[Any, ...]:
    """A tuple in a tuple in a tuple, and so on."""
    value: tuple[Any, ...] = ()
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize("show_keys", [False, True])
@pytest.mark.parametrize(
    ("key", "kind"),
    [(10**5_000, "int"), (("tenant", -(10**5_000)), "tuple"), (nested(100_000), "tuple")],
    ids=["integer", "tuple", "nested"],
)
def test_a_key_without_a_text_is_shown_by_its_type(key: object, kind: str, show_keys: bool) -> None:
    """Python converts no integer of more than 4,300 digits."""
    assert shown(key, show_keys=show_keys) == f"of type {kind}"


@pytest.mark.parametrize(
    ("shard_key", "key"),
    [
        (("orders", b"a"), b"a"),
        (("clicks", b"a"), ("clicks", b"a")),
        (("orders", b"a", 1), ("orders", b"a", 1)),
        (b"orders", b"orders"),
    ],
    ids=["of-the-topic", "of-another-topic", "of-three-parts", "plain"],
)
def test_the_key_of_a_record_is_the_shard_key_without_its_topic(shard_key: object, key: object) -> None:
    assert record_key(shard_key, "orders") == key
