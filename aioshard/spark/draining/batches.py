"""Micro-batches of a run, written once: a batch is in the outcomes whole, or not at all."""

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
"""Halted records that are named; there may be more."""

Foreach = Callable[["DataFrame", int], None]
"""Takes the rows of a micro-batch and its number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HaltedRecord:
    """A record that ended a drain."""

    topic: str
    partition: int
    offset: int
    key: str | None
    """As text where it is, else as Python shows bytes."""
    error_type: str | None
    error: str | None
    attempts: int

    def __str__(self) -> str:
        """The record, its key and what it failed with."""
        return f"{self.topic}/{self.partition}/{self.offset} (key {self.key}, {self.error_type}: {self.error})"

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


class WriteBatch:
    """What Spark calls with each micro-batch: runs the handlers, by writing, and then moves the rows to their place."""

    def __init__(
        self, place: RunDirectory, foreach: Foreach | None, outcomes: "Callable[[DataFrame], DataFrame]"
    ) -> None:
        """Make one.

        Args:
            place: Of the run.
            foreach: Told of the rows before they count as done.
            outcomes: Makes outcome rows of what is read.
        """
        self._place = place
        self._foreach = foreach
        self._outcomes = outcomes

    def __call__(self, frame: "DataFrame", batch: int) -> None:
        """Write one micro-batch.

        Raises:
            HaltedError: Records halt; the batch is not committed.
        """
        place, name = self._place, f"batch={batch}"
        if place.exists(f"{OUTCOMES}/{name}"):
            return  # it was complete when the driver was lost before Spark had noted that
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
            # Spark passes on text only: this is what the drain finds in it.
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
    """The records that ended the last drain of a run; none where it ended well."""
    return [HaltedRecord(**one) for one in place.read_json(HALTED) or ()]


def summary_of(place: RunDirectory) -> dict[str, int]:
    """Rows by status, of all batches that are complete."""
    counts: Counter[str] = Counter()
    for name in place.list(OUTCOMES):
        counts.update(counts_of(place, name) or {})
    return dict(sorted(counts.items()))


def batches_with_rows(place: RunDirectory) -> int:
    """How many batches are complete, without those that had nothing to do: a drain that is stopped early ends so."""
    return sum(1 for name in place.list(OUTCOMES) if counts_of(place, name) != {})


def counts_of(place: RunDirectory, name: str) -> dict[str, int] | None:
    """Rows by status of a batch that is complete, as it was noted; None where that is not there."""
    content = place.read(f"{SUMMARIES}/{name}.json")
    return None if content is None else {status: int(count) for status, count in json.loads(content).items()}
