"""Arrow rows: the outcome of each record, and raw records in the columns of Spark's own Kafka connector."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aioshard.core.key_hash import key_hash
from aioshard.core.sharding import ShardKey
from aioshard.records import Record

__all__ = ["OUTCOMES", "PROCESSED_WIDTH", "RAW", "Ended", "WallClock", "outcome_batch", "processed_batch", "raw_batch"]

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_MOMENT = pa.timestamp("us", tz="UTC")

OUTCOMES = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("status", pa.string()),
        ("attempts", pa.int32()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("started", _MOMENT),
        ("duration", pa.float64()),
        ("shard", pa.int64()),
        ("result", pa.binary()),
        ("handler", pa.string()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("timestamp", _MOMENT),
    ]
)
"""Schema of outcome rows. `duration` is in seconds; processed records have no `value`, `headers` or `timestamp`."""

RAW = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _MOMENT),
        ("timestampType", pa.int32()),
        ("headers", _HEADERS),
    ]
)
"""The columns of Spark's own Kafka connector, with headers."""

_CREATE_TIME = 0
_MICROSECONDS = 1_000_000
_MOST_HASHES = 20_000

PROCESSED_WIDTH = 9
"""Number of values kept per processed record: topic, partition, offset, key; start and end of its last attempt in
loop time, and the encoded result; its shard as in `Ended`; number of failed attempts.

They are kept in one flat list, row after row. Almost all rows are of this kind. A tuple per row would be one more
object to create, and keeping the record would keep its value in memory instead of freeing it for the next ones.
"""


class WallClock:
    """Converts loop time to wall-clock time; reads the clock once, so that intervals do not change."""

    def __init__(self, loop_time: float) -> None:
        self.ahead = time.time() - loop_time
        """Seconds to add to loop time."""


Ended = tuple[Record, str, str, int, str | None, str | None, tuple[float, float, bytes | None], ShardKey]
"""A record with any other outcome: record, handler, status, attempts, error name and message, last attempt, shard. The
attempt holds its start and end in loop time (0 if none ran) and the encoded result. The shard is the number of a fixed
shard, or the shard key.
"""


def processed_batch(flat: Sequence[Any], handler: str, clock: WallClock, *, numbered: bool) -> pa.RecordBatch:
    """Return the outcome rows of processed records.

    Args:
        flat: `PROCESSED_WIDTH` values per record; at least one record.
        handler: Name of the handler.
        clock: Converts the time in `started`.
        numbered: True if shards are fixed and `shard` is their number; otherwise it is the hash of the shard key.
    """
    topics, partitions, offsets, keys, *rest = (flat[number::PROCESSED_WIDTH] for number in range(PROCESSED_WIDTH))
    begins, ends, results, shards, failures = rest
    count = len(offsets)
    attempts = [failed + 1 for failed in failures] if any(failures) else [1]
    none = pa.nulls(count, pa.binary())
    return pa.RecordBatch.from_arrays(
        [
            _column(topics, pa.string()),
            _column(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
            pa.array(keys, pa.binary()),
            pa.repeat("processed", count),
            pa.array(attempts, pa.int32()) if len(attempts) == count else pa.repeat(pa.scalar(1, pa.int32()), count),
            pa.nulls(count, pa.string()),
            pa.nulls(count, pa.string()),
            _started(pa.array(begins, pa.float64()), clock),
            pc.subtract(pa.array(ends, pa.float64()), pa.array(begins, pa.float64())),
            _numbers(shards, numbered=numbered),
            none if results.count(None) == count else pa.array(results, pa.binary()),
            pa.repeat(handler, count),
            none,
            pa.nulls(count, _HEADERS),
            pa.nulls(count, _MOMENT),
        ],
        schema=OUTCOMES,
    )


def outcome_batch(ended: Sequence[Ended], clock: WallClock, *, numbered: bool) -> pa.RecordBatch:
    """Return the outcome rows of records that were not processed.

    Args:
        ended: At least one record.
        clock: Converts the time in `started`.
        numbered: As in `processed_batch`.
    """
    records, handlers, statuses, attempts, kinds, errors, runs, shards = zip(*ended, strict=True)
    topics, partitions, offsets, keys, values, headers, timestamps = zip(*records, strict=True)
    begins, ends, results = zip(*runs, strict=True)
    began = pa.array([begin or None for begin in begins], pa.float64())
    return pa.RecordBatch.from_arrays(
        [
            _column(topics, pa.string()),
            _column(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
            pa.array(keys, pa.binary()),
            _column(statuses, pa.string()),
            _column(attempts, pa.int32()),
            _column(kinds, pa.string()),
            pa.array(errors, pa.string()),
            _started(began, clock),
            pc.subtract(pa.array(ends, pa.float64()), pa.array(begins, pa.float64())),
            _numbers(shards, numbered=numbered),
            pa.array(results, pa.binary()),
            _column(handlers, pa.string()),
            pa.array(values, pa.binary()),
            pa.array([_pairs(pairs) for pairs in headers], _HEADERS),
            _moments(timestamps),
        ],
        schema=OUTCOMES,
    )


def raw_batch(records: Sequence[Record]) -> pa.RecordBatch:
    """Return records as rows in the columns of Spark's own Kafka connector."""
    topics, partitions, offsets, keys, values, headers, timestamps = zip(*records, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            pa.array(topics, pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
            _moments(timestamps),
            pa.repeat(pa.scalar(_CREATE_TIME, pa.int32()), len(records)),
            pa.array([_pairs(pairs) for pairs in headers], _HEADERS),
        ],
        schema=RAW,
    )


def _column(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Create an array, with a fast path for columns whose values are all equal, which most are."""
    if values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], kind), len(values))
    return pa.array(values, kind)


def _started(began: pa.Array, clock: WallClock) -> pa.Array:
    """Return the wall-clock start of each run, or null if none ran."""
    return pc.multiply(pc.add(began, clock.ahead), _MICROSECONDS).cast(pa.int64(), safe=False).view(_MOMENT)


class _Hashes(dict[ShardKey, int | None]):
    """Cache of shard key hashes; a dictionary, because a lookup must not cost a function call."""

    def __missing__(self, key: ShardKey) -> int | None:
        if len(self) >= _MOST_HASHES:
            self.clear()
        found = self[key] = key_hash(key)
        return found


_hashes = _Hashes()


def _numbers(shards: Sequence[ShardKey], *, numbered: bool) -> pa.Array:
    """Return the numbers of fixed shards, otherwise the hashes of the shard keys."""
    return pa.array(shards if numbered else map(_hashes.__getitem__, shards), pa.int64(), size=len(shards))


def _moments(seconds: Iterable[float | None]) -> pa.Array:
    # Kafka timestamps are whole milliseconds. Without rounding, the product could be off by one.
    milliseconds = pc.round(pc.multiply(pa.array(seconds, pa.float64()), 1000.0))
    return pc.multiply(milliseconds, 1000.0).cast(pa.int64()).cast(_MOMENT)


def _pairs(headers: Iterable[tuple[str, bytes | None]]) -> list[dict[str, object]] | None:
    return [{"key": name, "value": content} for name, content in headers] or None
