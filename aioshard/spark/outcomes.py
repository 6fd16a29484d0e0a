"""The outcomes of the records of a task, from their completion to batches of rows for Spark."""

import math
from collections.abc import Callable

import pyarrow as pa

from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Completed, Handler
from aioshard.spark.rows import ProcessedRows, outcome_batch
from aioshard.telemetry.outcome_rows import OutcomeRows, Trouble


class _Processed:
    """The processed records of a handler: deliveries that have no row yet, and rows."""

    def __init__(self, spec: Handler) -> None:
        self.spec = spec
        self.deliveries: list[Delivery] = []
        self.rows = ProcessedRows(spec.name, fixed_shards=spec.shards is not None)

    def collect(self) -> int:
        """Turn the deliveries into rows; return their number."""
        deliveries = self.deliveries
        count = len(deliveries)
        if count:
            began, ended, _ = zip(*[delivery.run for delivery in deliveries], strict=True)
            records = [delivery.record for delivery in deliveries]
            self.rows.extend(records, began, ended, [delivery.key for delivery in deliveries])
            deliveries.clear()  # `Outcomes.observe` refers to this list
        return count


class Outcomes:
    """Collects the outcomes of completed records in the event loop until there are enough for a batch.

    Most completions only append the delivery to a list. Code that runs once per record, among that of the engine,
    costs several times as much as the same code in a loop over many records: `collect` contains that loop.

    Invariants:
        * Each completed record becomes one row.
        * If `collect` is called before the engine takes records in, the deliveries without a row and those that are
          incomplete never take more memory than the engine may buffer.
    """

    def __init__(self, full: Callable[[pa.RecordBatch], None], rows: int, ahead: float) -> None:
        """Create an empty collection.

        Args:
            full: Called with batches of rows.
            rows: Number of rows that are enough for a batch.
            ahead: Seconds to add to loop time for wall-clock time.
        """
        self._full = full
        self._enough = rows
        self._ahead = ahead
        self._handlers: list[_Processed] = []
        self._others = OutcomeRows(self._pass_others, rows, max_bytes=math.inf, keep_failed=True)
        self.count = 0
        """How many records have a row, also if it was passed on."""

    def observe(self, spec: Handler) -> Completed:
        """Return the callback for the deliveries of a handler; see `aioshard.engine.handler.Observe`."""
        processed = next((known for known in self._handlers if known.spec is spec), None)
        if processed is None:
            processed = _Processed(spec)
            self._handlers.append(processed)
        append = processed.deliveries.append

        def completed(delivery: Delivery) -> None:
            # A recovery, such as a skip, sets `aside`. A result has to be encoded now: the handler may change it later.
            if delivery.aside or delivery.starts > 1 or delivery.run[2] is not None:
                self.count += 1
                self._others.add(spec, delivery)
            else:
                append(delivery)

        return completed

    def collect(self) -> None:
        """Turn completed deliveries into rows, and pass on the rows if they are enough."""
        for processed in self._handlers:
            self.count += processed.collect()
            if len(processed.rows) >= self._enough:
                self._full(processed.rows.take(self._ahead))

    def add(self, spec: Handler, delivery: Delivery, trouble: Trouble) -> None:
        """Add a record that cannot be completed because of *trouble*."""
        self.count += 1
        self._others.add(spec, delivery, trouble)

    def finish(self) -> None:
        """Collect the rest, and pass on all rows."""
        self.collect()
        for processed in self._handlers:
            if len(processed.rows):
                self._full(processed.rows.take(self._ahead))
        if len(self._others):
            self._pass_others()

    def _pass_others(self) -> None:
        self._full(outcome_batch(self._others.take()[0], self._ahead))
