"""`format("aioshard")`: read ranges of Kafka topics as raw records, or as outcome rows of an app's handlers."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from aioshard.app import App
from aioshard.kafka.ranges import RangeTransport
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import STOP
from aioshard.spark.source.request import Request, TaskRanges, check_options, log_ends, request_of
from aioshard.spark.source.vectors import Vector, advanced, ends_of, ranges_between, starts_of
from aioshard.spark.source.writer import StreamTopicWriter, TopicWriter
from aioshard.spark.tasks.rows import OUTCOMES, RAW

__all__ = ["OUTCOME_COLUMNS", "RAW_COLUMNS", "AioshardSource"]

OUTCOME_COLUMNS = from_arrow_schema(OUTCOMES)
"""Spark's schema of outcome rows."""

RAW_COLUMNS = from_arrow_schema(RAW)
"""The schema of Spark's own Kafka connector, with headers."""


class AioshardSource(DataSource):
    """The data source; `docs/spark.md` lists its options.

    Without `app` and without a plan it yields records in the columns of Spark's own Kafka connector. With either of
    them a task runs the app's handlers over the records it reads, and yields the outcome of each.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name that you pass to `format`."""
        return "aioshard"

    def schema(self) -> StructType:
        """Return the columns of outcome rows with an app or a plan, otherwise those of records."""
        options = self.options
        check_options(options)
        raw = not options.get("app") and ("plan" not in options or options.get("app") == "")
        return RAW_COLUMNS if raw else OUTCOME_COLUMNS

    def reader(self, schema: StructType) -> "_RangeReader":  # noqa: ARG002 - Spark's signature
        """Read ranges that are resolved now."""
        return _RangeReader(request_of(self.options))

    def streamReader(self, schema: StructType) -> "_RangeStreamReader":  # noqa: ARG002, N802 - Spark's signature
        """Read a planned range in micro-batches, or follow the log."""
        return _RangeStreamReader(request_of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        """Append to topics."""
        return TopicWriter(schema, self.options, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamTopicWriter:  # noqa: N802 - Spark's name
        """Append the micro-batches of a stream to topics."""
        return StreamTopicWriter(schema, self.options, overwrite=overwrite)


class _Task(InputPartition):
    """The input of one Spark task."""

    def __init__(self, ranges: TaskRanges) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class _Reading:
    """Shared part of the batch and stream readers."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one task's ranges, in a worker."""
        from aioshard.spark.tasks.raw import read_raw  # noqa: PLC0415 - in a worker
        from aioshard.spark.tasks.runtime import run_handlers  # noqa: PLC0415

        assert isinstance(partition, _Task)  # noqa: S101 - made by _tasks
        ranges, request = partition.ranges, self._request
        if request.work is None:
            return read_raw(request.connection(), ranges.bounds, ranges.done)

        def transport(app: App) -> RangeTransport:
            return RangeTransport(app.settings, ranges.bounds, ranges.done)

        topics = tuple({one.topic for one in ranges.ranges})
        return run_handlers(request.work._replace(topics=topics), transport)

    def _tasks(self, start: Vector, end: Vector) -> Sequence[_Task]:
        return [_Task(one) for one in self._request.task_ranges(ranges_between(start, end))]


class _RangeReader(_Reading, DataSourceReader):
    """Reads all ranges in one batch."""

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition per task."""
        ranges = self._request.ranges
        return self._tasks(starts_of(ranges), ends_of(ranges))


class _RangeStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches up to the planned ends, or indefinitely. The offset that Spark stores is a `Vector`."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the planned starts."""
        return starts_of(self._request.ranges)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to the plan's maximum of rows, which is also the maximum that a crash can repeat."""
        return ReadMaxRows(self._request.max_rows_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Do nothing: the plan has already frozen the ends."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch, or *start* if the run is to stop here."""
        request = self._request
        if request.directory is not None and RunDirectory(request.directory).exists(STOP):
            return start
        ends: Vector = ends_of(request.ranges)
        if request.follow:
            ends = asyncio.run(log_ends(request.connection(), request.ranges))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else request.max_rows_per_batch
        if isinstance(limit, ReadAllAvailable):
            most = request.max_rows_per_batch
        return advanced(start, ends, most)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the planned ends, or None while following the log."""
        return None if self._request.follow else ends_of(self._request.ranges)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch."""
        return self._tasks(start, end)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint records the progress, and only a hand-over commits to the group."""

    def stop(self) -> None:
        """Do nothing: no resources are kept between batches."""
