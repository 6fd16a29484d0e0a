"""What has ended in the event loop, on its way to Spark's thread: in batches, and no faster than Spark takes them."""

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
"""Of one Arrow batch."""
_BATCHES = 6
"""So many may wait for Spark; nothing is read meanwhile."""
_VALUES = _ROWS * PROCESSED_WIDTH
_NO_RUN = (0.0, 0.0, None)


class Collected:
    """The ended records of one task. `take` belongs to Spark's thread, everything else to the loop's.

    Invariants:
        * Every record that was added is taken, unless the task is given up.
        * While `room` is not set, nothing more is to be read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fixed: Mapping[str, bool]) -> None:
        """Make one with nothing in it.

        Args:
            loop: The one that adds to it.
            fixed: Whether the shards of a handler are fixed, by its name.
        """
        self.room = asyncio.Event()
        """Set while Spark keeps up."""
        self.room.set()
        self._loop = loop
        self._clock = WallClock(loop.time())
        self._fixed = fixed
        self._flushed = 0
        self._processed: dict[str, list[Any]] = {name: [] for name in fixed}
        """Records that were processed, `PROCESSED_WIDTH` values for each; by handler."""
        self._open: dict[str, list[Ended]] = {name: [] for name in fixed}
        """All others."""
        self._ready: queue.SimpleQueue[Callable[[], pa.RecordBatch] | None] = queue.SimpleQueue()

    def observe(self, spec: HandlerSpec) -> Completed:
        """What adds the records of a handler that are complete; see `aioshard.engine.observed.Observe`."""
        name, rows = spec.name, self._processed[spec.name]

        processed = Outcome.PROCESSED  # to get at a member costs a call each time in Python 3.11

        def completed(delivery: Delivery) -> None:
            if delivery.outcome is not processed:
                note = delivery.failure
                error, message = (None, None) if note is None else (note.error, note.message)
                self.add(spec, delivery, delivery.outcome.value, error, message)
                return
            began, ended, result = delivery.run
            if result is not None:
                result = encoded_result(result)  # now, because whoever else has it may change it
            rows.extend(delivery.record[:4])
            rows.extend((began, ended, result, delivery.key, delivery.failures))
            if len(rows) >= _VALUES:
                self._flush_processed(name)

        return completed

    @property
    def ended(self) -> int:
        """Records so far."""
        processed = sum(map(len, self._processed.values())) // PROCESSED_WIDTH
        return self._flushed + processed + sum(map(len, self._open.values()))

    def add(self, spec: HandlerSpec, delivery: Delivery, status: str, error: str | None, message: str | None) -> None:
        """Add a record that was not processed."""
        began, ended, _ = getattr(delivery, "run", _NO_RUN)
        run = (began, ended, None)
        message = message and as_text(message).decode()  # Arrow refuses half a surrogate pair
        row = (delivery.record, spec.name, status, delivery.failures, error, message, run, delivery.key)
        self._open[spec.name].append(row)
        if len(self._open[spec.name]) >= _ROWS:
            self._flush(spec.name)

    def close(self) -> None:
        """No more comes."""
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
            rows.clear()  # the same list goes on: those who add to it have it at hand
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
        """The next rows, or None when there are no more.

        Raises:
            Empty: There were none for *timeout* seconds.
        """
        make = self._ready.get(timeout=timeout)
        if make is None:
            return None
        if not self.room.is_set():
            self._loop.call_soon_threadsafe(self._make_room)
        return make()
