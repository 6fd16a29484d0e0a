"""Rows of the journal, in memory and as Arrow."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aioshard.core.key_hash import key_hash
from aioshard.core.sharding import ShardKey
from aioshard.engine.handler import HandlerSpec
from aioshard.errors import MissingExtraError

try:
    import pyarrow as pa
except ImportError as error:
    raise MissingExtraError("the journal", "journal") from error

__all__ = ["NO_RUN", "ROW_WIDTH", "SCHEMA", "Trouble", "record_batch", "warm_up"]

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
"""Schema of journal files. Times are seconds since the epoch, `duration` is in seconds; see docs/journal.md."""

NO_RUN = (math.nan, math.nan, None)
"""Start, end and result of a record that never ran."""

_LONGEST_CACHED = 128
_PLAIN = frozenset({bytes, str, type(None)})


class Trouble(NamedTuple):
    """The outcome of a record that was not processed."""

    status: str
    error_type: str | None
    error: str | None


ROW_WIDTH = 13
"""Number of values per record: its handler (a `HandlerSpec`); topic, partition, offset, key and timestamp; loop time of
its arrival; start, end and result of its latest run, or `NO_RUN`; the key of its delivery; the number of attempts; and
a `Trouble`, or None if it was processed.

They are kept in one flat list, row after row. Tuples would cost twice as much: each is another object that the garbage
collector scans repeatedly for as long as the row waits.
"""


def record_batch(flat: Sequence[Any], *, ahead: float, show_keys: bool) -> pa.RecordBatch:
    """Convert rows to Arrow.

    Args:
        flat: `ROW_WIDTH` values per row; at least one row.
        ahead: Seconds to add to loop time for wall-clock time.
        show_keys: Whether to write keys in addition to their hashes.
    """
    columns = (flat[number::ROW_WIDTH] for number in range(ROW_WIDTH))
    specs, topics, partitions, offsets, keys, timestamps, arrivals, begins, ends, results, *rest = columns
    shard_keys, attempts, troubles = rest
    count = len(specs)
    if troubles.count(None) == count:
        statuses = pa.repeat("processed", count)
        kinds = errors = pa.nulls(count, pa.string())
    else:
        statuses = pa.array(["processed" if one is None else one.status for one in troubles], pa.string())
        kinds = pa.array([None if one is None else one.error_type for one in troubles], pa.string())
        errors = pa.array([None if one is None else one.error for one in troubles], pa.string())
    # Compute sums here instead of in Arrow, which releases the interpreter lock for each: while the event loop is busy,
    # it takes 5 ms to get the lock back.
    key_hashes = _hashes(keys)
    return pa.RecordBatch.from_arrays(
        [
            _strings(topics),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
            _names(specs),
            statuses,
            pa.array(attempts, pa.int32()),
            kinds,
            errors,
            pa.array(timestamps, pa.float64()),
            pa.array([arrived + ahead for arrived in arrivals], pa.float64()),
            _known([began + ahead for began in begins]),
            _known([ended - began for began, ended in zip(begins, ends, strict=True)]),
            key_hashes if shard_keys == keys and specs[0].shards is None else _shards(specs, shard_keys),
            key_hashes,
            pa.array(keys, pa.binary()) if show_keys else pa.nulls(count, pa.binary()),
            pa.nulls(count, pa.binary()) if results.count(None) == count else pa.array(results, pa.binary()),
        ],
        schema=SCHEMA,
    )


def warm_up() -> None:
    """Let Arrow do the imports for its first array (pandas, if it is installed).

    While the event loop is busy, that would take seconds.
    """
    pa.array((b"",), pa.binary())


def _strings(values: Sequence[str]) -> pa.Array:
    """Create an array, with a fast path for equal values, which are the usual case."""
    if values.count(values[0]) == len(values):
        return pa.repeat(values[0], len(values))
    return pa.array(values, pa.string())


def _names(specs: Sequence[HandlerSpec]) -> pa.Array:
    if specs.count(specs[0]) == len(specs):
        return pa.repeat(specs[0].name, len(specs))
    return pa.array([spec.name for spec in specs], pa.string())


def _known(moments: Iterable[float]) -> pa.Array:
    """Create an array, with null for missing times."""
    return pa.array(moments, pa.float64(), from_pandas=True)


def _shards(specs: Sequence[HandlerSpec], keys: Sequence[ShardKey]) -> pa.Array:
    """Return the numbers of fixed shards, otherwise the hashes of the shard keys."""
    fixed = specs[0].shards is not None
    if specs.count(specs[0]) == len(specs):
        return pa.array(keys, pa.int64()) if fixed else _hashes(keys)
    numbers = [key if spec.shards is not None else _hash(key) for spec, key in zip(specs, keys, strict=True)]
    return pa.array(numbers, pa.int64())


def _hashes(keys: Sequence[ShardKey]) -> pa.Array:
    # The cache must not keep long keys or the user's own objects alive.
    plain = all(map(_PLAIN.__contains__, map(type, keys)))
    if plain and max(map(len, filter(None, keys)), default=0) <= _LONGEST_CACHED:  # type: ignore[arg-type]
        return pa.array(map(_cached_hash, keys), pa.int64(), size=len(keys))
    return pa.array(map(_hash, keys), pa.int64(), size=len(keys))


@functools.lru_cache(maxsize=20_000)
def _cached_hash(key: ShardKey) -> int | None:
    return key_hash(key)


def _hash(key: ShardKey) -> int | None:
    """Return the hash of a record key or shard key; None without a key, or if the user's own key cannot be hashed."""
    try:
        return _cached_hash(key) if _is_short(key) else key_hash(key)
    except Exception:  # noqa: BLE001 - the user's own methods may raise anything
        return None


def _is_short(key: ShardKey) -> bool:
    if isinstance(key, bytes | str):
        return len(key) <= _LONGEST_CACHED
    return key is None or isinstance(key, int) or (isinstance(key, tuple) and all(map(_is_short, key)))
