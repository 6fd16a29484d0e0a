"""Pass completed records from the event loop to Spark's thread, in batches and with backpressure."""

import asyncio
import functools
import queue
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import HandlerSpec
from aioshard.engine.observed import Completed
from aioshard.engine.outcomes import Outcome
from aioshard.serde.results import encoded_result
from aioshard.serde.side_records import as_text
from aioshard.spark.tasks.rows import PROCESSED_WIDTH, Ended, WallClock, outcome_batch, processed_batch

__all__ = ["Collected"]

_ROWS = 5_000
"""Rows of one Arrow batch."""
_BATCHES = 6
"""Batches that may wait for Spark; beyond that, reading pauses."""
_VALUES = _ROWS * PROCESSED_WIDTH
_NO_RUN = (0.0, 0.0, None)


class Collected:
    """The completed records of one task. `take` belongs to Spark's thread, everything else to the event loop's.

    Invariants:
        * Every added record is taken, unless the task is abandoned.
        * Nothing more should be read while `room` is not set.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fixed: Mapping[str, bool]) -> None:
        """Create an empty collection.

        Args:
            loop: The event loop that adds records.
            fixed: Whether a handler has fixed shards, by its name.
        """
        self.room = asyncio.Event()
        """Set while Spark keeps up."""
        self.room.set()
        self._loop = loop
        self._clock = WallClock(loop.time())
        self._fixed = fixed
        self._flushed = 0
        self._processed: dict[str, list[Any]] = {name: [] for name in fixed}
        """Processed records by handler, `PROCESSED_WIDTH` values each."""
        self._open: dict[str, list[Ended]] = {name: [] for name in fixed}
        """All other records by handler."""
        self._ready: queue.SimpleQueue[Callable[[], pa.RecordBatch] | None] = queue.SimpleQueue()

    def observe(self, spec: HandlerSpec) -> Completed:
        """Return the callback that adds a handler's completed records; see `aioshard.engine.observed.Observe`."""
        name, rows = spec.name, self._processed[spec.name]

        processed = Outcome.PROCESSED  # in Python 3.11 each access to an enum member costs a call

        def completed(delivery: Delivery) -> None:
            if delivery.outcome is not processed:
                note = delivery.failure
                error, message = (None, None) if note is None else (note.error, note.message)
                self.add(spec, delivery, delivery.outcome.value, error, message)
                return
            began, ended, result = delivery.run
            if result is not None:
                result = encoded_result(result)  # now, because other code that holds it may change it
            rows.extend(delivery.record[:4])
            rows.extend((began, ended, result, delivery.key, delivery.failures))
            if len(rows) >= _VALUES:
                self._flush_processed(name)

        return completed

    @property
    def ended(self) -> int:
        """Number of records added so far."""
        processed = sum(map(len, self._processed.values())) // PROCESSED_WIDTH
        return self._flushed + processed + sum(map(len, self._open.values()))

    def add(self, spec: HandlerSpec, delivery: Delivery, status: str, error: str | None, message: str | None) -> None:
        """Add a record that was not processed."""
        began, ended, _ = getattr(delivery, "run", _NO_RUN)
        run = (began, ended, None)
        message = message and as_text(message).decode()  # Arrow rejects lone surrogates
        row = (delivery.record, spec.name, status, delivery.failures, error, message, run, delivery.key)
        self._open[spec.name].append(row)
        if len(self._open[spec.name]) >= _ROWS:
            self._flush(spec.name)

    def close(self) -> None:
        """Flush all rows and mark the end; nothing may be added afterwards."""
        for name in self._open:
            self._flush_processed(name)
            self._flush(name)
        self._ready.put(None)

    def _flush(self, name: str) -> None:
        rows = self._open[name]
        if rows:
            self._open[name] = []
            self._put(len(rows), functools.partial(outcome_batch, rows, self._clock, numbered=self._fixed[name]))

    def _flush_processed(self, name: str) -> None:
        rows = self._processed[name]
        if rows:
            taken = rows.copy()
            rows.clear()  # keep the same list: `observe` holds a reference to it
            count = len(taken) // PROCESSED_WIDTH
            self._put(count, functools.partial(processed_batch, taken, name, self._clock, numbered=self._fixed[name]))

    def _put(self, rows: int, make: Callable[[], pa.RecordBatch]) -> None:
        self._flushed += rows
        self._ready.put(make)
        if self._ready.qsize() > _BATCHES:
            self.room.clear()

    def _make_room(self) -> None:
        if self._ready.qsize() <= _BATCHES:
            self.room.set()

    # Spark's thread ----------------------------------------------------------------------

    def take(self, timeout: float) -> pa.RecordBatch | None:
        """Return the next rows, or None at the end.

        Raises:
            Empty: No rows arrived within *timeout* seconds.
        """
        make = self._ready.get(timeout=timeout)
        if make is None:
            return None
        if not self.room.is_set():
            self._loop.call_soon_threadsafe(self._make_room)
        return make()
