"""A stable hash of a key for stored data: it identifies the key and yields its shard for any number of shards."""

import hashlib

from aioshard.core.sharding import ShardKey, shard_number

__all__ = ["SHARD_BITS", "key_hash", "shard_of_hash"]

SHARD_BITS = 32
"""Number of high bits of a hash from which `shard_number` takes the shard; the low bits distinguish keys."""

_SHARDS = 1 << SHARD_BITS


def key_hash(key: ShardKey) -> int | None:
    """Return a signed 64-bit hash of a key, the same in every process; None for no key.

    The high half is the value that `shard_number` starts from. So the hash alone tells which of N fixed shards serves
    the key, for every N, without revealing the key, which may be a name.

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
    data = _data(last)
    high = shard_number(data, _SHARDS)
    told_apart = data if last is key else repr(key).encode()
    low = int.from_bytes(hashlib.blake2b(told_apart, digest_size=4).digest(), "big")
    unsigned = high << SHARD_BITS | low
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def shard_of_hash(hashed: int, shards: int) -> int:
    """Return which of *shards* fixed shards serves the key with this hash.

    Example:
        >>> shard_of_hash(key_hash(b"alice"), 8) == shard_number(b"alice", 8)
        True
    """
    return ((hashed >> SHARD_BITS & 0xFFFFFFFF) * shards) >> SHARD_BITS


def _data(key: object) -> bytes:
    """Return the bytes that `shard_number` hashes."""
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, int):
        return b"%d" % key
    return repr(key).encode()
