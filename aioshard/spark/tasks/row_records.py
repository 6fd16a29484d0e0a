"""Convert rows in the columns of Spark's own Kafka connector to records."""

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from aioshard.records import Record

__all__ = ["records_of"]

_MICROSECONDS = 1_000_000.0


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
        map(_pairs, headers),
        _seconds(rows.column("timestamp")),
        strict=True,
    )
    return list(map(Record._make, columns))


def _seconds(moments: pa.Array) -> Sequence[float]:
    microseconds = moments.cast(pa.timestamp("us", tz=moments.type.tz)).cast(pa.int64())
    found: list[float] = pc.divide(microseconds.cast(pa.float64()), _MICROSECONDS).to_pylist()
    return found


def _pairs(headers: Iterable[dict[str, object]] | None) -> tuple[tuple[object, object], ...]:
    return tuple((one["key"], one["value"]) for one in headers) if headers else ()
