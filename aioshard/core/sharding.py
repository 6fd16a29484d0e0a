"""Shard keys: the key of a record, its fixed shard, and its form in stored data and in explanations."""

import hashlib
import inspect
import operator
import os
import zlib
from collections.abc import Callable, Hashable
from typing import Literal

from aioshard.errors import HandlerError
from aioshard.records import Record

ShardKey = Hashable | None
"""The identity of a shard within its handler. None means no order: the record is its own shard."""

ShardBy = Literal["key", "partition", "record"] | Callable[[Record], ShardKey]

_MULTIPLIER = 1_327_217_885
"""Spreads crc32 over the shards. Do not reuse the partitioner's own hash modulo N: with 64 partitions and 64 shards,
each partition would use a single shard (crc32 is librdkafka's, murmur2 Java's)."""


def shard_key_of(shard_by: ShardBy, *, one_topic: bool) -> Callable[[Record], ShardKey]:
    """Return the function that computes a record's shard key.

    Args:
        shard_by: `"key"` orders records with the same (topic, key), and those without a key have no order;
            `"partition"` orders records of the same partition; `"record"` orders nothing; a function returns
            the shard key itself.
        one_topic: Whether all records come from one topic. The key alone is then the shard key, which saves
            a tuple per record.

    Raises:
        HandlerError: If *shard_by* is anything else, such as an async function.

    Example:
        >>> record = Record("orders", 0, 41, b"k", None, (), 0.0)
        >>> shard_key_of("key", one_topic=True)(record)
        b'k'
        >>> shard_key_of("key", one_topic=False)(record)
        ('orders', b'k')
    """
    if callable(shard_by):
        if inspect.iscoroutinefunction(shard_by):
            raise HandlerError(
                f"shard_by={shard_by!r} is 'async def': each of its coroutines would be a shard; use a plain function"
            )
        return shard_by
    if shard_by == "key":
        return operator.attrgetter("key") if one_topic else _topic_and_key
    if shard_by == "partition":
        return lambda record: (record.topic, record.partition)
    if shard_by == "record":
        return lambda _: None
    raise HandlerError(
        f"shard_by={shard_by!r} is not known: use 'key', 'partition', 'record' or a function of the record"
    )


def _topic_and_key(record: Record) -> ShardKey:
    return None if record.key is None else (record.topic, record.key)


def check_usable(key: ShardKey) -> None:
    """Check that a user's key can be hashed and compared, before anything depends on it.

    Raises:
        Exception: Any error that its methods raise when it is hashed or compared.

    Example:
        >>> check_usable(("tenant", 7))
        >>> check_usable([])
        Traceback (most recent call last):
        TypeError: unhashable type: 'list'
    """
    hash(key)
    operator.eq(key, key)


def identity(shard_key: Callable[[Record], ShardKey], record: Record, shards: int | None = None) -> ShardKey:
    """Return the shard key of a record, or None if the sharding function fails or returns an unusable key.

    Use it for past records only: the failure itself is reported when the record arrives.
    """
    try:
        key = shard_key(record)
        check_usable(key)
        if shards is not None:
            fixed_shard(key, shards, 0)
    except Exception:  # noqa: BLE001 - the user's function
        return None
    return key


def record_key(key: object, topic: str) -> object:
    """Reduce a shard key (topic, key) to the key of the record, which is how it is displayed everywhere."""
    if isinstance(key, tuple) and len(key) == len((topic, key)) and isinstance(key[0], str) and key[0] == topic:
        return key[1]
    return key


def shard_number(key: ShardKey, shards: int) -> int:
    """Return which of *shards* fixed shards serves *key*; the same in Python and in Spark SQL.

    Args:
        key: `bytes`, `str` (as UTF-8), `int` (as decimal digits), or a tuple (topic, key) or (topic,
            partition) from `shard_key_of`'s function: only its last part counts.
        shards: At least 1.

    Raises:
        TypeError: If the key has another type: its hash would differ between processes.

    Example:
        >>> [shard_number(key, 8) for key in (b"alice", "alice", 7)]
        [5, 5, 4]
    """
    if isinstance(key, tuple) and key:
        return shard_number(key[-1], shards)
    data = _as_bytes(key)
    if data is None:
        raise TypeError(f"a shard key for fixed shards must be bytes, str or int, not {type(key).__name__}: {key!r}")
    return ((zlib.crc32(data) * _MULTIPLIER & 0xFFFFFFFF) * shards) >> 32


def _as_bytes(key: object) -> bytes | None:
    """Return the bytes to hash for a key; None for an unsupported type."""
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode(errors="surrogatepass")
    if isinstance(key, int):
        return b"%d" % key
    return None


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
    if key is None:
        return turn % shards
    return shard_number(key, shards)


# Stored data ----------------------------------------------------------------------

SHARD_BITS = 32
"""Number of high bits of a hash from which `shard_number` takes the shard; the low bits distinguish keys."""


def key_hash(key: ShardKey) -> int | None:
    """Return a signed 64-bit hash of a key, the same in every process; None for no key.

    The high half is the value that `shard_number` starts from, so the hash alone determines the fixed shard, for any
    number of shards. It does not reveal the key, which may be personal data.

    Args:
        key: A record's key, or a shard key. Values other than bytes, text, a number or a tuple of these are hashed by
            their `repr`, which must be the same in every process.

    Example:
        >>> key_hash(b"alice"), key_hash("alice"), key_hash(None)
        (-4829638585901695911, -4829638585901695911, None)
    """
    if key is None:
        return None
    last = key[-1] if isinstance(key, tuple) and key else key
    data = _as_bytes(last)
    if data is None:
        data = repr(last).encode()
    distinct = data if last is key else repr(key).encode()
    digest = hashlib.blake2b(distinct, digest_size=4).digest()
    high = shard_number(data, 1 << SHARD_BITS)
    hashed = high.to_bytes(4, "big") + digest
    return int.from_bytes(hashed, "big", signed=True)


def shard_of_hash(hashed: int, shards: int) -> int:
    """Return which of *shards* fixed shards serves the key with this hash.

    Example:
        >>> shard_of_hash(key_hash(b"alice"), 8) == shard_number(b"alice", 8)
        True
    """
    return ((hashed >> SHARD_BITS & 0xFFFFFFFF) * shards) >> SHARD_BITS


def key_bytes(key: ShardKey) -> bytes:
    """Encode a shard key as bytes that are equal, in any process, if and only if the keys are equal.

    Args:
        key: Bytes, text, an integer, None, or a tuple of these.

    Raises:
        HandlerError: The key has another type, whose values other processes cannot compare.

    Example:
        >>> key_bytes(("tenant", 7)) == key_bytes(("tenant", True)), key_bytes("7") == key_bytes(7)
        (False, False)
    """
    if isinstance(key, tuple):
        parts = [key_bytes(part) for part in key]
        return b"t" + b"".join(b"%d:%s" % (len(part), part) for part in parts)
    if key is None:
        return b"n"
    data = _as_bytes(key)
    if data is None:
        raise HandlerError(
            f"a shard key has type {type(key).__name__} ({key!r}): if several processes share the records, it must be "
            "text, bytes, an integer, or a tuple of these, so that all processes agree on it"
        )
    if isinstance(key, bytes):
        return b"b" + data
    if isinstance(key, str):
        return b"s" + data
    return b"i" + data


# Explanations ---------------------------------------------------------------------

_SALT = os.urandom(16)
"""Salt for hashing displayed keys: a key's hash is the same throughout a process, and cannot be looked up."""


def shown(value: object, *, show_keys: bool) -> str | None:
    """Return a key for display, or a hash that distinguishes it without revealing it; None for no key.

    It never raises, whatever the application uses as a shard key.

    Args:
        value: The key of a record, or of a shard.
        show_keys: Whether to show the key as it is; it may be personal data.
    """
    if value is None:
        return None
    by_type = f"of type {type(value).__name__}"
    try:
        if not is_plain(value):
            return by_type  # its repr() would run code of the application
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or tuples in tuples in tuples
        return by_type
    if show_keys:
        return text
    return f"#{hashlib.blake2s(text.encode(), key=_SALT, digest_size=4).hexdigest()}"


def is_plain(value: object) -> bool:
    """Whether a value has only built-in types, so that its methods run no application code."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in (bytes, str, int, float, bool, type(None))
