"""Records and outcomes as Arrow rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aioshard.records import Record
from aioshard.serde.header_names import escaped
from aioshard.telemetry.outcome_rows import ROW_WIDTH, column, hashes, outcome_columns, times

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
    columns |= {
        "started": _in_microseconds(columns["started"]),
        "value": values,
        "headers": headers,
        "timestamp": timestamps,
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in OUTCOMES.names], schema=OUTCOMES)


_CHUNK = 400
"""Rows that are converted to Arrow together. Their values are then still in the cache of the processor: with the rows
of a whole batch, each conversion would take twice as long."""


class ProcessedRows:
    """The outcomes of records that one handler has processed at the first attempt and without a result."""

    def __init__(self, handler: str, *, fixed_shards: bool) -> None:
        """Create an empty collection.

        Args:
            handler: The name of the handler.
            fixed_shards: Whether the shard keys are the numbers of fixed shards.
        """
        self._handler = handler
        self._fixed_shards = fixed_shards
        self._values: list[list[Any]] = [[] for _ in range(7)]
        """The values of the rows that are not converted yet, by column."""
        self._chunks: list[list[pa.Array]] = []
        """The others, by column."""
        self._converted = 0
        """Number of rows in the chunks."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._converted + len(self._values[0])

    def extend(
        self, records: Iterable[Record], began: Iterable[float], ended: Iterable[float], shard_keys: Iterable[Any]
    ) -> None:
        """Add rows, at least one, without keeping the records."""
        topics, partitions, offsets, keys, _, _, _ = zip(*records, strict=True)
        columns = (topics, partitions, offsets, keys, began, ended, shard_keys)
        for values, more in zip(self._values, columns, strict=True):
            values.extend(more)
        if len(self._values[0]) >= _CHUNK:
            self._convert()

    def take(self, ahead: float) -> pa.RecordBatch:
        """Remove the rows, at least one, and return them.

        Args:
            ahead: Seconds to add to loop time for wall-clock time.
        """
        if self._values[0]:
            self._convert()
        topic, partition, offset, key, began, ended, shard = map(pa.concat_arrays, zip(*self._chunks, strict=True))
        count = self._converted
        self._chunks.clear()
        self._converted = 0
        columns = {
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "key": key,
            "status": pa.repeat(pa.scalar("processed"), count),
            "attempts": pa.repeat(pa.scalar(1, pa.int32()), count),
            "started": _in_microseconds(pc.add(began, ahead)),
            "duration": pc.subtract(ended, began),
            "shard": shard,
            "handler": pa.repeat(pa.scalar(self._handler), count),
        }
        return pa.RecordBatch.from_arrays(
            [columns.get(field.name, pa.nulls(count, field.type)) for field in OUTCOMES], schema=OUTCOMES
        )

    def _convert(self) -> None:
        topics, partitions, offsets, keys, began, ended, shard_keys = self._values
        count = len(topics)
        self._chunks.append(
            [
                column(topics, pa.string(), count),
                column(partitions, pa.int32(), count),
                pa.array(offsets, pa.int64()),
                pa.array(keys, pa.binary()),
                times(began),
                times(ended),
                pa.array(shard_keys, pa.int64()) if self._fixed_shards else hashes(shard_keys),
            ]
        )
        self._converted += count
        for values in self._values:
            values.clear()


def _in_microseconds(seconds: pa.Array) -> pa.Array:
    return pc.multiply(seconds, _MICROSECONDS).cast(pa.int64(), safe=False).view(_MOMENT)


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
