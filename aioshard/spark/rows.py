"""Outcome rows: what became of each record, as Arrow; and records as the official connector gives them."""

import functools
import time
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from aioshard.core.key_hash import key_hash
from aioshard.core.sharding import ShardKey
from aioshard.records import Record

__all__ = ["OUTCOMES", "RAW", "Ended", "WallClock", "outcome_batch", "raw_batch"]

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
"""Of outcome rows. `duration` is in seconds; `value`, `headers` and `timestamp` are null for what was processed."""

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
_shard_hash = functools.lru_cache(maxsize=100_000)(key_hash)


class WallClock:
    """Turns loop time into the time of day; asked once, so that the distance of two moments stays what it was."""

    def __init__(self, loop_time: float) -> None:
        self.ahead = time.time() - loop_time
        """Seconds to add to loop time."""


Ended = tuple[Record, str, str, int, str | None, str | None, tuple[float, float, bytes | None], ShardKey]
"""A record that has come to its end: record, handler, status, attempts, name and message of the error, last attempt,
shard. Of the attempt: begin and end in loop time, 0 where none ran, and the encoded result. The shard is the number of
a fixed one, or the shard key. A plain tuple: one is made of each record.
"""


def outcome_batch(ended: Sequence[Ended], clock: WallClock, *, numbered: bool) -> pa.RecordBatch:
    """Outcome rows of some records.

    Args:
        ended: At least one.
        clock: For `started`.
        numbered: Whether shards are fixed, so that `shard` is a number already; else it is the hash of the shard key.
    """
    records, handlers, statuses, attempts, kinds, errors, runs, shards = zip(*ended, strict=True)
    topics, partitions, offsets, keys, values, headers, timestamps = zip(*records, strict=True)
    begins, ends, results = zip(*runs, strict=True)
    columns = [
        _column(topics, pa.string()),
        _column(partitions, pa.int32()),
        pa.array(offsets, pa.int64()),
        pa.array(keys, pa.binary()),
        _column(statuses, pa.string()),
        _column(attempts, pa.int32()),
        _column(kinds, pa.string()),
        _column(errors, pa.string()),
        _started(begins, clock),
        pc.subtract(pa.array(ends, pa.float64()), pa.array(begins, pa.float64())),
        pa.array(shards if numbered else map(_shard_hash, shards), pa.int64()),
        pa.array(results, pa.binary()),
        _column(handlers, pa.string()),
    ]
    if statuses.count("processed") == len(statuses):
        columns += [pa.nulls(len(ended), kind) for kind in (pa.binary(), _HEADERS, _MOMENT)]
    else:
        left_out = [status == "processed" for status in statuses]
        columns += [
            pa.array([None if out else value for out, value in zip(left_out, values, strict=True)], pa.binary()),
            pa.array([None if out else _pairs(pairs) for out, pairs in zip(left_out, headers, strict=True)], _HEADERS),
            _moments([None if out else moment for out, moment in zip(left_out, timestamps, strict=True)]),
        ]
    return pa.RecordBatch.from_arrays(columns, schema=OUTCOMES)


def raw_batch(records: Sequence[Record]) -> pa.RecordBatch:
    """Records as rows of the official connector's columns."""
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
    """An array; of values that are all the same, as most of these are, in no time."""
    if values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], kind), len(values))
    return pa.array(values, kind)


def _started(begins: Sequence[float], clock: WallClock) -> pa.Array:
    """When runs began, in the time of day; null where none ran."""
    began = pa.array(begins, pa.float64())
    began = pc.if_else(pc.equal(began, 0.0), None, began)
    return pc.multiply(pc.add(began, clock.ahead), _MICROSECONDS).cast(pa.int64(), safe=False).cast(_MOMENT)


def _moments(seconds: Iterable[float | None]) -> pa.Array:
    # Kafka counts in milliseconds: rounding gives back what it said, and a product alone would miss it by one.
    milliseconds = pc.round(pc.multiply(pa.array(seconds, pa.float64()), 1000.0))
    return pc.multiply(milliseconds, 1000.0).cast(pa.int64()).cast(_MOMENT)


def _pairs(headers: Iterable[tuple[str, bytes | None]]) -> list[dict[str, object]] | None:
    return [{"key": name, "value": content} for name, content in headers] or None
