"""Rows of the journal: what they are in memory, and as Arrow."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aioshard.core.key_hash import key_hash
from aioshard.core.sharding import ShardKey
from aioshard.engine.handler import HandlerSpec
from aioshard.errors import MissingExtraError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise MissingExtraError("the journal", "journal") from error

__all__ = ["NO_RUN", "SCHEMA", "Row", "Trouble", "record_batch"]

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("handler", pa.string()),
        ("status", pa.string()),
        ("attempts", pa.int32()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("timestamp", pa.float64()),
        ("arrived", pa.float64()),
        ("started", pa.float64()),
        ("duration", pa.float64()),
        ("shard", pa.int64()),
        ("key_hash", pa.int64()),
        ("key", pa.binary()),
        ("result", pa.binary()),
    ]
)
"""Of a journal's files. Moments are seconds since the epoch, `duration` is seconds; docs/journal.md says the rest."""

NO_RUN = (math.nan, math.nan, None)
"""In place of a record's latest run where there was none."""

_LONGEST_CACHED = 128


class Trouble(NamedTuple):
    """How a record ended that was not processed."""

    status: str
    error_type: str | None
    error: str | None


Row = tuple[
    HandlerSpec,
    tuple[str, int, int, bytes | None],
    float,
    float,
    tuple[float, float, bytes | None],
    ShardKey,
    int,
    Trouble | None,
]
"""One record that is complete: its handler; topic, partition, offset and key; timestamp; loop time of its arrival;
begin and end of its latest run in loop time, and its result; what its delivery has as key; attempts; None if it was
processed.

A tuple in tuples, because one is made for each record in the event loop. Nothing in it refers to the record's value.
"""


def record_batch(rows: Sequence[Row], *, ahead: float, show_keys: bool) -> pa.RecordBatch:
    """Some rows as Arrow.

    Args:
        rows: At least one.
        ahead: Seconds to add to loop time for the time of day.
        show_keys: Whether keys are written, beside their hashes.
    """
    count = len(rows)
    specs, places, timestamps, arrivals, runs, shard_keys, attempts, troubles = zip(*rows, strict=True)
    topics, partitions, offsets, keys = zip(*places, strict=True)
    begins, ends, results = zip(*runs, strict=True)
    if troubles.count(None) == count:
        statuses = pa.repeat("processed", count)
        kinds = errors = pa.nulls(count, pa.string())
    else:
        statuses = pa.array(["processed" if one is None else one.status for one in troubles], pa.string())
        kinds = pa.array([None if one is None else one.error_type for one in troubles], pa.string())
        errors = pa.array([None if one is None else one.error for one in troubles], pa.string())
    began, ended = _known(begins), _known(ends)
    key_hashes = pa.array(map(_hash, keys), pa.int64(), size=count)
    columns = [
        _strings(topics),
        pa.array(partitions, pa.int32()),
        pa.array(offsets, pa.int64()),
        _strings([spec.name for spec in specs]),
        statuses,
        pa.array(attempts, pa.int32()),
        kinds,
        errors,
        pa.array(timestamps, pa.float64()),
        pc.add(pa.array(arrivals, pa.float64()), ahead),
        pc.add(began, ahead),
        pc.subtract(ended, began),
        key_hashes if shard_keys == keys and specs[0].shards is None else _shards(specs, shard_keys),
        key_hashes,
        pa.array(keys, pa.binary()) if show_keys else pa.nulls(count, pa.binary()),
        pa.nulls(count, pa.binary()) if results.count(None) == count else pa.array(results, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _strings(values: Sequence[str]) -> pa.Array:
    """Mostly one and the same."""
    if values.count(values[0]) == len(values):
        return pa.repeat(values[0], len(values))
    return pa.array(values, pa.string())


def _known(moments: Iterable[float]) -> pa.Array:
    """Null where there is none."""
    found = pa.array(moments, pa.float64())
    return pc.if_else(pc.is_nan(found), None, found)


def _shards(specs: Sequence[HandlerSpec], keys: Sequence[ShardKey]) -> pa.Array:
    """The number of a fixed shard, else the hash of the shard key."""
    fixed = specs[0].shards is not None
    if specs.count(specs[0]) == len(specs):
        return pa.array(keys if fixed else map(_hash, keys), pa.int64(), size=len(keys))
    numbers = [key if spec.shards is not None else _hash(key) for spec, key in zip(specs, keys, strict=True)]
    return pa.array(numbers, pa.int64())


@functools.lru_cache(maxsize=20_000)
def _cached_hash(key: ShardKey) -> int | None:
    return key_hash(key)


def _hash(key: ShardKey) -> int | None:
    """The hash of a record's key or a shard key; None also for a key of the user's own that has none."""
    try:
        # The cache is to hold neither keys of any length nor objects of the user's.
        return _cached_hash(key) if _is_short(key) else key_hash(key)
    except Exception:  # noqa: BLE001 - what the user's own methods raise
        return None


def _is_short(key: ShardKey) -> bool:
    if isinstance(key, bytes | str):
        return len(key) <= _LONGEST_CACHED
    return key is None or isinstance(key, int) or (isinstance(key, tuple) and all(map(_is_short, key)))
