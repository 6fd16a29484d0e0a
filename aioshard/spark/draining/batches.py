"""Micro-batches of a run, each written once: the outcomes contain a batch completely or not at all."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioshard.errors import DrainError, HaltedError
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import HALTED, OUTCOMES, STAGING, SUMMARIES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Foreach", "HaltedRecord", "WriteBatch", "batches_with_rows", "counts_of", "read_halted", "summary_of"]

_MOST_HALTED = 100
"""How many halted records a report names at most."""

Foreach = Callable[["DataFrame", int], None]
"""Receives the rows of a micro-batch and its number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HaltedRecord:
    """A record that stopped a drain."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """The text of the key if it is UTF-8, otherwise the Python notation of its bytes."""
    error_type: str | None
    error: str | None
    attempts: int

    def __str__(self) -> str:
        """Return the record, its key and its error."""
        return f"{self.topic}/{self.partition}/{self.offset} (key {self.key}, {self.error_type}: {self.error})"

    def asdict(self) -> dict[str, Any]:
        """Return the record as a dictionary for JSON."""
        return dataclasses.asdict(self)


class WriteBatch:
    """Spark's callback for each micro-batch: runs the handlers by writing the rows, then moves the rows into place."""

    def __init__(
        self, place: RunDirectory, foreach: Foreach | None, outcomes: "Callable[[DataFrame], DataFrame]"
    ) -> None:
        """Create the callback.

        Args:
            place: The directory of the run.
            foreach: Called with the rows before they count as done.
            outcomes: Turns the input of a batch into outcome rows.
        """
        self._place = place
        self._foreach = foreach
        self._outcomes = outcomes

    def __call__(self, frame: "DataFrame", batch: int) -> None:
        """Write one micro-batch.

        Raises:
            HaltedError: Records halted; the batch is not committed.
        """
        place, name = self._place, f"batch={batch}"
        if place.exists(f"{OUTCOMES}/{name}"):
            return  # it was complete, but the driver was lost before Spark recorded that
        staged = place.uri(f"{STAGING}/{name}")
        self._outcomes(frame).write.mode("overwrite").parquet(staged)
        written = frame.sparkSession.read.schema(_columns()).parquet(staged)
        counts = {row["status"]: int(row["count"]) for row in written.groupBy("status").count().collect()}
        if "halted" in counts:
            self._halt(written)
        if self._foreach is not None:
            self._tell(self._foreach, written, batch)
        place.write_json(f"{SUMMARIES}/{name}.json", counts)
        place.move(f"{STAGING}/{name}", f"{OUTCOMES}/{name}")

    def _tell(self, foreach: Foreach, written: "DataFrame", batch: int) -> None:
        try:
            foreach(written, batch)
        except Exception as error:
            # Spark passes on only the text of an error; the drain recognizes this text.
            raise DrainError(f"foreach of micro-batch {batch} failed ({type(error).__name__}: {error})") from error

    def _halt(self, written: "DataFrame") -> None:
        found = written.where("status = 'halted'").orderBy("topic", "partition", "offset").limit(_MOST_HALTED).collect()
        halted = [
            HaltedRecord(
                topic=row["topic"],
                partition=row["partition"],
                offset=row["offset"],
                key=_shown(row["key"]),
                error_type=row["error_type"],
                error=row["error"],
                attempts=row["attempts"],
            )
            for row in found
        ]
        self._place.write_json(HALTED, [one.asdict() for one in halted])
        raise HaltedError(map(str, halted))


def _columns() -> Any:
    from aioshard.spark.source.data_source import OUTCOME_COLUMNS  # noqa: PLC0415 - pyspark is imported on use

    return OUTCOME_COLUMNS


def _shown(key: bytes | bytearray | None) -> str | None:
    if key is None:
        return None
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        return repr(bytes(key))


def read_halted(place: RunDirectory) -> list[HaltedRecord]:
    """Return the records that stopped the last drain of a run; empty if it ended well."""
    return [HaltedRecord(**one) for one in place.read_json(HALTED) or ()]


def summary_of(place: RunDirectory) -> dict[str, int]:
    """Return the row counts by status of all complete batches."""
    counts: Counter[str] = Counter()
    for name in place.list(OUTCOMES):
        counts.update(counts_of(place, name) or {})
    return dict(sorted(counts.items()))


def batches_with_rows(place: RunDirectory) -> int:
    """Return the number of complete batches with rows; a drain that is stopped early ends with an empty one."""
    return sum(1 for name in place.list(OUTCOMES) if counts_of(place, name) != {})


def counts_of(place: RunDirectory, name: str) -> dict[str, int] | None:
    """Return the recorded row counts by status of a complete batch, or None without a recorded summary."""
    content = place.read(f"{SUMMARIES}/{name}.json")
    return None if content is None else {status: int(count) for status, count in json.loads(content).items()}
