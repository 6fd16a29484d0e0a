"""Records and outcomes as Arrow rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aioshard.records import Record
from aioshard.serde.header_names import escaped
from aioshard.telemetry.outcome_rows import ROW_WIDTH, outcome_columns

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

_MICROSECONDS = 1_000_000


def outcome_batch(flat: Sequence[Any], ahead: float) -> pa.RecordBatch:
    """Convert outcome rows.

    Args:
        flat: Values of `aioshard.telemetry.outcome_rows`; at least one row.
        ahead: Seconds to add to loop time for wall-clock time.
    """
    columns = outcome_columns(flat, ahead)
    troubles = flat[ROW_WIDTH - 1 :: ROW_WIDTH]
    count = len(troubles)
    if troubles.count(None) == count:
        values, headers, timestamps = (
            pa.nulls(count, OUTCOMES.field(name).type) for name in ("value", "headers", "timestamp")
        )
    else:
        records = [None if trouble is None else trouble.record for trouble in troubles]
        values = pa.array([None if record is None else record.value for record in records], pa.binary())
        headers = pa.array([None if record is None else _pairs(record.headers) for record in records], _HEADERS)
        timestamps = _moments([None if record is None else record.timestamp for record in records])
    started = pc.multiply(columns["started"], _MICROSECONDS).cast(pa.int64(), safe=False).view(_MOMENT)
    columns |= {"started": started, "value": values, "headers": headers, "timestamp": timestamps}
    return pa.RecordBatch.from_arrays([columns[name] for name in OUTCOMES.names], schema=OUTCOMES)


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
            pa.repeat(pa.scalar(0, pa.int32()), len(records)),  # `CreateTime`
            pa.array([_pairs(pairs) for pairs in headers], _HEADERS),
        ],
        schema=RAW,
    )


def _moments(seconds: Iterable[float | None]) -> pa.Array:
    # Kafka timestamps are whole milliseconds. Without rounding, the product could be off by one.
    milliseconds = pc.round(pc.multiply(pa.array(seconds, pa.float64()), 1000.0))
    return pc.multiply(milliseconds, 1000.0).cast(pa.int64()).cast(_MOMENT)


def _pairs(headers: Iterable[tuple[str, bytes | None]]) -> list[dict[str, object]] | None:
    return [{"key": name, "value": content} for name, content in escaped(tuple(headers))] or None


def records_of(rows: pa.RecordBatch) -> list[Record]:
    """Return the records of some rows.

    Args:
        rows: Rows with the columns `topic`, `partition`, `offset`, `key`, `value` and `timestamp`, and optionally
            `headers`.
    """
    headers = rows.column("headers").to_pylist() if "headers" in rows.schema.names else [None] * len(rows)
    columns = zip(
        rows.column("topic").to_pylist(),
        rows.column("partition").to_pylist(),
        rows.column("offset").to_pylist(),
        rows.column("key").to_pylist(),
        rows.column("value").to_pylist(),
        (tuple((header["key"], header["value"]) for header in pairs or ()) for pairs in headers),
        _seconds(rows.column("timestamp")),
        strict=True,
    )
    return list(map(Record._make, columns))


def _seconds(moments: pa.Array) -> Sequence[float]:
    microseconds = moments.cast(pa.timestamp("us", tz=moments.type.tz)).cast(pa.int64())
    seconds: list[float] = pc.divide(microseconds.cast(pa.float64()), _MICROSECONDS).to_pylist()
    return seconds
