"""Map a record to its shard key, and a shard key to one of N fixed shards."""

import inspect
import operator
import zlib
from collections.abc import Callable, Hashable
from typing import Literal

from aioshard.errors import HandlerError
from aioshard.records import Record

__all__ = ["ShardBy", "ShardKey", "check_usable", "fixed_shard", "identity", "shard_key_of", "shard_number"]

ShardKey = Hashable | None
"""The identity of a shard within its handler. None means no order: the record is its own shard."""

ShardBy = Literal["key", "partition", "record"] | Callable[[Record], ShardKey]

_MULTIPLIER = 1_327_217_885
"""Spreads crc32 over the shards. Do not reuse the partitioner's own hash modulo N: with 64 partitions and 64 shards,
each partition would use a single shard (crc32 is librdkafka's, murmur2 Java's)."""


def _topic_and_key(record: Record) -> ShardKey:
    return None if record.key is None else (record.topic, record.key)


def _topic_partition(record: Record) -> ShardKey:
    return (record.topic, record.partition)


def _no_order(record: Record) -> ShardKey:  # noqa: ARG001 - same signature as the other functions
    return None


def shard_key_of(shard_by: ShardBy, *, one_topic: bool) -> Callable[[Record], ShardKey]:
    """Return the function that computes a record's shard key.

    Args:
        shard_by: `"key"`: the identity is (topic, key), and records without a key have no order;
            `"partition"`; `"record"`: no order at all; or a function whose value is the identity.
        one_topic: Whether all records come from one topic. The key alone is then the identity, which saves
            a tuple per record.

    Raises:
        HandlerError: If *shard_by* is none of these.

    Example:
        >>> record = Record("orders", 0, 41, b"k", None, (), 0.0)
        >>> shard_key_of("key", one_topic=True)(record)
        b'k'
        >>> shard_key_of("key", one_topic=False)(record)
        ('orders', b'k')
    """
    if callable(shard_by):
        if inspect.iscoroutinefunction(shard_by):
            message = (
                f"shard_by={shard_by!r} is 'async def': each of its coroutines would be a shard; use a plain function"
            )
            raise HandlerError(message)
        return shard_by
    if shard_by == "key":
        return operator.attrgetter("key") if one_topic else _topic_and_key
    if shard_by == "partition":
        return _topic_partition
    if shard_by == "record":
        return _no_order
    message = f"shard_by={shard_by!r} is not known: use 'key', 'partition', 'record' or a function of the record"
    raise HandlerError(message)


def check_usable(key: ShardKey) -> None:
    """Check that a user's key can be hashed and compared, before anything depends on it.

    Raises:
        Exception: Anything that its own methods raise when it is hashed or compared.

    Example:
        >>> check_usable(("tenant", 7))
        >>> check_usable([])
        Traceback (most recent call last):
        TypeError: unhashable type: 'list'
    """
    hash(key)
    operator.eq(key, key)


def identity(shard_key: Callable[[Record], ShardKey], record: Record) -> ShardKey:
    """Return the shard key of a record, or None if the sharding function fails or returns an unusable key.

    For looking at past records only: the failure itself is reported when the record arrives.
    """
    try:
        key = shard_key(record)
        check_usable(key)
    except Exception:  # noqa: BLE001 - the user's function
        return None
    return key


def shard_number(key: ShardKey, shards: int) -> int:
    """Return which of *shards* fixed shards serves *key*; the same in Python and in Spark SQL.

    Args:
        key: `bytes`, `str` (as UTF-8), `int` (as decimal digits), or a tuple (topic, key) or (topic,
            partition) as returned by `shard_key_of`'s function, of which the last part counts.
        shards: At least 1.

    Raises:
        TypeError: If the key has another type: its hash would differ between processes.

    Example:
        >>> [shard_number(key, 8) for key in (b"alice", "alice", 7)]
        [5, 5, 4]
    """
    if isinstance(key, bytes):
        data = key
    elif isinstance(key, str):
        data = key.encode()
    elif isinstance(key, int):
        data = b"%d" % key
    elif isinstance(key, tuple) and key:
        return shard_number(key[-1], shards)
    else:
        message = f"a shard key for fixed shards must be bytes, str or int, not {type(key).__name__}: {key!r}"
        raise TypeError(message)
    return ((zlib.crc32(data) * _MULTIPLIER & 0xFFFFFFFF) * shards) >> 32


def fixed_shard(key: ShardKey, shards: int, turn: int) -> int:
    """Return which of *shards* fixed shards gets a record: by its key, or in turn if it has none.

    Args:
        key: As for `shard_number`, or None.
        shards: At least 1.
        turn: Any number that differs between records, so that those without a key spread over the shards.

    Raises:
        TypeError: As for `shard_number`.

    Example:
        >>> [fixed_shard(b"alice", 8, turn) for turn in (6, 7)], [fixed_shard(None, 8, turn) for turn in (6, 7, 8)]
        ([5, 5], [6, 7, 0])
    """
    return turn % shards if key is None else shard_number(key, shards)
