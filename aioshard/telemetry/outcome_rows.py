"""One row per completed record, as the journal and Spark write it: collected in the event loop, converted to Arrow."""

import logging
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from aioshard.core.sharding import ShardKey, key_hash
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Completed, Handler
from aioshard.engine.outcomes import PROCESSED, Outcome
from aioshard.observe import RebalanceReport
from aioshard.records import Record
from aioshard.serde.payloads import encoded_result
from aioshard.serde.side_records import as_text

logger = logging.getLogger("aioshard.telemetry.outcome_rows")

ROW_WIDTH = 13
"""Number of values per record: its handler (a `Handler`); topic, partition, offset, key and timestamp; loop time of
its arrival; start, end and result of its latest run, or `_NO_RUN`; the key of its delivery; the number of attempts; and
a `Trouble`, or None if it was processed.

They are kept in one flat list, row after row. Tuples would cost twice as much: each is another object that the garbage
collector scans repeatedly for as long as the row waits.
"""

_NO_RUN = (math.nan, math.nan, None)
_NO_HANDLER = types.SimpleNamespace(name=None, shards=None)
_RETURNED = Outcome.RETURNED  # in Python 3.11 each access to an enum member costs a call


class Trouble(NamedTuple):
    """The outcome of a record that was not processed."""

    status: str
    error_type: str | None
    error: str | None
    record: Record | None
    """The record, if its value and headers are to be written."""


_PROCESSED_ROW = Trouble("processed", None, None, None)
"""Stands for a row without trouble."""
_PROCESSED_ROWS = [_PROCESSED_ROW]
"""Stands for rows without any."""


class OutcomeRows:
    """Collects rows in the event loop until there are enough to pass on."""

    def __init__(self, full: Callable[[], None], rows: int, *, max_bytes: float, keep_failed: bool = False) -> None:
        """Create an empty collection.

        Args:
            full: Called when there are enough rows; it should `take` them.
            rows: Number of rows that are enough.
            max_bytes: Bytes of keys, results and messages that are enough.
            keep_failed: Whether to keep the records that were not processed.
        """
        self._full = full
        self._values = rows * ROW_WIDTH
        self._max_bytes = max_bytes
        self._keep_failed = keep_failed
        self._flat: list[Any] = []
        self._size = 0
        self._encoded: tuple[object, bytes | None] = (None, None)
        """The latest run with a result, and the result as bytes: encoded once for all records of a batch."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._flat) // ROW_WIDTH

    def take(self) -> tuple[list[Any], int]:
        """Return and remove the rows: `ROW_WIDTH` values each, and the bytes of their keys, results and messages."""
        rows = self._flat.copy(), self._size
        self._flat.clear()  # `observe` refers to this list
        self._size = 0
        return rows

    def observe(self, spec: Handler) -> Completed:
        """Return the callback that adds a handler's completed records; see `aioshard.engine.handler.Observe`."""
        flat = self._flat
        most_values = self._values
        is_sized = self._max_bytes < math.inf

        def completed(delivery: Delivery) -> None:
            began, ended, result = getattr(delivery, "run", _NO_RUN)
            if result is not None or delivery.outcome is not PROCESSED:
                self.add(spec, delivery)
                return
            # The usual case, in half the time of `add`.
            topic, partition, offset, key, _, _, timestamp = delivery.record
            arrived = delivery.arrived
            shard_key = delivery.key
            attempts = delivery.failures + 1
            flat.extend(
                (spec, topic, partition, offset, key, timestamp, arrived, began, ended, None, shard_key, attempts, None)
            )
            if is_sized and key is not None:
                self._size += len(key)
            if len(flat) >= most_values or (is_sized and self._size >= self._max_bytes):
                self._full()

        return completed

    def add(self, spec: Handler, delivery: Delivery, trouble: Trouble | None = None) -> None:
        """Add a completed record, or one that cannot be completed because of *trouble*."""
        outcome = delivery.outcome
        attempts = delivery.failures
        topic, partition, offset, key, _, _, timestamp = delivery.record
        began, ended, result = run = getattr(delivery, "run", _NO_RUN)
        if trouble is not None:
            result = None
        elif outcome is PROCESSED:
            attempts += 1
            result = self._as_bytes(run)
        elif outcome is _RETURNED:
            return  # parked again: the record has not ended yet
        else:
            result = None
            trouble = self._trouble_of(delivery)
        if key is not None:
            self._size += len(key)
        flat = self._flat
        flat += (
            spec,
            topic,
            partition,
            offset,
            key,
            timestamp,
            delivery.arrived,
            began,
            ended,
            result,
            delivery.key,
            attempts,
            trouble,
        )
        if len(flat) >= self._values or self._size >= self._max_bytes:
            self._full()

    def add_rebalance(self, began: float, report: RebalanceReport) -> None:
        """Add a rebalance, which began at loop time *began*, as a row without handler and record."""
        trouble = Trouble("rebalance", report.kind, report.cause, None)
        times = (None, began, began, began + report.seconds)
        self._flat += (_NO_HANDLER, None, None, None, None, *times, None, None, report.revoked, trouble)

    def _trouble_of(self, delivery: Delivery) -> Trouble:
        failure = delivery.failure
        record = delivery.record if self._keep_failed else None
        if failure is None:
            return Trouble(delivery.outcome.value, None, None, record)
        self._size += len(failure.message)
        # Arrow rejects lone surrogates, such as in a file name that is not UTF-8.
        return Trouble(delivery.outcome.value, failure.error, as_text(failure.message).decode(), record)

    def _as_bytes(self, run: tuple[float, float, object]) -> bytes | None:
        """Encode the result of a run now, because other code that holds it may change it."""
        if self._encoded[0] is not run:
            try:
                result = encoded_result(run[2])
            except Exception as error:  # noqa: BLE001 - the user's own methods; the record is complete anyway
                logger.warning(
                    "a result of type %s cannot be encoded and is left out: %r", type(run[2]).__name__, error
                )
                result = None
            self._encoded = (run, result)
            self._size += len(result or b"")
        return self._encoded[1]


def outcome_columns(flat: Sequence[Any], ahead: float) -> dict[str, pa.Array]:
    """Convert rows to the columns that the journal and Spark share.

    Sums are computed here instead of in Arrow, which releases the interpreter lock for each: while the event loop is
    busy, it takes 5 ms to get the lock back.

    Args:
        flat: `ROW_WIDTH` values per row; at least one row.
        ahead: Seconds to add to loop time for wall-clock time.
    """
    specs, topics, partitions, offsets, keys, _, _, begins, ends, *rest = columns_of(flat)
    results, shard_keys, attempts, troubles = rest
    count = len(specs)
    outcomes = _PROCESSED_ROWS
    if troubles.count(None) != count:
        outcomes = [_PROCESSED_ROW if trouble is None else trouble for trouble in troubles]
    first = specs[0]
    has_one_handler = specs.count(first) == count
    names = [first.name] if has_one_handler else [spec.name for spec in specs]
    shards = hashes(shard_keys) if has_one_handler and first.shards is None else _shards(specs, shard_keys)
    durations = [ended - began for began, ended in zip(begins, ends, strict=True)]
    return {
        "topic": column(topics, pa.string(), count),
        "partition": column(partitions, pa.int32(), count),
        "offset": pa.array(offsets, pa.int64()),
        "handler": column(names, pa.string(), count),
        "status": column([outcome.status for outcome in outcomes], pa.string(), count),
        "attempts": column(attempts, pa.int32(), count),
        "error_type": column([outcome.error_type for outcome in outcomes], pa.string(), count),
        "error": column([outcome.error for outcome in outcomes], pa.string(), count),
        "started": times([began + ahead for began in begins]),
        "duration": times(durations),
        "shard": shards,
        "key": pa.array(keys, pa.binary()),
        "result": column(results, pa.binary(), count),
    }


def _shards(specs: Sequence[Any], shard_keys: Sequence[Any]) -> pa.Array:
    """Return the hash of each shard key, or the number of a fixed shard, which is the key itself."""
    shards = [
        _hash(shard_key) if spec.shards is None else shard_key
        for spec, shard_key in zip(specs, shard_keys, strict=True)
    ]
    return pa.array(shards, pa.int64())


def columns_of(flat: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the `ROW_WIDTH` columns of rows."""
    return [flat[number::ROW_WIDTH] for number in range(ROW_WIDTH)]


def hashes(keys: Sequence[ShardKey]) -> pa.Array:
    """Return the hashes of record keys or shard keys; null without a key."""
    try:
        found: list[int | None] = list(map(_known_hashes.__getitem__, keys))
    except Exception:  # noqa: BLE001 - the user's own methods may raise anything: only those keys have no hash
        found = [_hash(key) for key in keys]
    if len(_known_hashes) > _MOST_HASHES:
        _known_hashes.clear()
    return pa.array(found, pa.int64())


def column(values: Sequence[object], kind: pa.DataType, count: int) -> pa.Array:
    """Create an array, with a fast path for equal values, which are the usual case."""
    if values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], kind), count)
    return pa.array(values, kind)


def times(moments: Iterable[float]) -> pa.Array:
    """Create an array, with null for missing times."""
    return pa.array(moments, pa.float64(), from_pandas=True)


class _Hashes(dict[ShardKey, int | None]):
    """The hashes of keys; a new key is hashed when it is looked up."""

    def __missing__(self, key: ShardKey) -> int | None:
        found = key_hash(key)
        self[key] = found
        return found


_known_hashes = _Hashes()
_MOST_HASHES = 10_000
"""Known hashes after which all are forgotten."""


def _hash(key: ShardKey) -> int | None:
    """Return the hash of a record key or shard key; None without a key, or if the user's own key cannot be hashed."""
    try:
        return _known_hashes[key]
    except Exception:  # noqa: BLE001 - the user's own methods may raise anything, also those that a dictionary calls
        return None
