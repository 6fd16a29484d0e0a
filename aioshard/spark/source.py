"""`format("aioshard")`: read ranges of Kafka topics as raw records, or as outcome rows of an app's handlers."""

import asyncio
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from aioshard.errors import PlanError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.ranges import RangeTransport
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.planning import layout_of
from aioshard.spark.plans import (
    MAX_ROWS,
    Layout,
    PlannedRange,
    Vector,
    advanced,
    ends_of,
    offsets_in,
    packed,
    ranges_between,
    split,
    starts_of,
    vector_of,
)
from aioshard.spark.rows import OUTCOMES, RAW
from aioshard.spark.run_directory import STOP, RunDirectory
from aioshard.spark.work import Work, module_paths, resolve_app

OPTIONS = (
    "plan",
    "app",
    "bootstrap_servers",
    "topics",
    "start",
    "end",
    "isolation_level",
    "on_failure",
    "total_concurrency",
    "tasks",
    "max_rows_per_batch",
    "slots",
    "halted",
    "follow",
    "module_paths",
    "version",
)
"""Supported options; see `docs/spark.md`."""

OUTCOME_COLUMNS = from_arrow_schema(OUTCOMES)
"""Spark's schema of outcome rows."""

RAW_COLUMNS = from_arrow_schema(RAW)
"""The schema of Spark's own Kafka connector, with headers."""

_SPLIT_TASKS = 8
"""Number of tasks for records without order, if no option sets it."""
_TASKS_PER_SLOT = 4
"""Maximum tasks per slot, if there are several and no option sets their number. A task costs as much as ten thousand
quick records, but with more tasks, a slow one delays the end less. A single slot has nothing to balance."""
_DEFAULTS = {"start": "earliest", "end": "latest"}
"""Values of the options `start` and `end` that do not name offsets."""


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
        check_options(self.options)
        return OUTCOME_COLUMNS if self.options.get("app", self.options.get("plan")) else RAW_COLUMNS

    def reader(self, schema: StructType) -> "_RangeReader":  # noqa: ARG002 - Spark's signature
        """Read ranges that are resolved now."""
        return _RangeReader(request_of(self.options))

    def streamReader(self, schema: StructType) -> "_RangeStreamReader":  # noqa: ARG002, N802 - Spark's signature
        """Read a planned range in micro-batches, or follow the log."""
        return _RangeStreamReader(request_of(self.options))


# Options ------------------------------------------------------------------------------


class Request(NamedTuple):
    """A read as it is sent to the tasks. It contains no secrets."""

    ranges: tuple[PlannedRange, ...]
    layouts: Mapping[str, Layout]
    """How the partitions of a topic are spread over tasks; without an app, all of them are split."""
    work: Work
    """The app, and the settings of the read."""
    raw: bool
    """True to yield records instead of running the app's handlers."""
    tasks: int | None
    max_rows_per_batch: int
    directory: str | None = None
    """Directory of the run that the plan belongs to; a stop flag may appear in it."""
    follow: bool = False
    """True if reading continues to the current end of the log, which is looked up for every batch."""


def check_options(options: Mapping[str, str]) -> None:
    """Check options as far as possible without contacting the brokers.

    Raises:
        PlanError: An option is missing, unknown, or has an invalid value.
    """
    if unknown := sorted(name for name in options if name not in OPTIONS and name != "path"):
        raise PlanError(f"format('aioshard') has no option {unknown[0]!r}: its options are {', '.join(OPTIONS)}")
    if not options.keys() & {"plan", "app", "topics"}:
        raise PlanError(
            "format('aioshard') needs the option plan (the directory of a planned run), app=MODULE:APP, or topics and "
            "bootstrap_servers"
        )
    for name in ("tasks", "max_rows_per_batch", "total_concurrency", "slots"):
        _number(options, name)
    for name in _DEFAULTS:
        _offsets(options, name)


def request_of(options: Mapping[str, str]) -> Request:
    """Turn the options of a read into a request; contacts the brokers unless a plan defines the ranges.

    Raises:
        PlanError: As in `check_options`, or the options contradict the app.
        TransportError: The brokers do not answer.
    """
    check_options(options)
    if "plan" in options:
        return _planned(options)
    settings = {name: options[name] for name in ("bootstrap_servers", "isolation_level") if name in options}
    named = [text.strip() for text in options.get("topics", "").split(",")]
    topics = [topic for topic in named if topic]
    layouts: dict[str, Layout] = {}
    work = _work(options, options.get("app", ""), settings)
    if work.app:
        layouts = _layouts(work, topics)
        topics = list(layouts)
    if not topics:
        raise PlanError("no topics: name them in the option topics, separated by commas")
    first = _offsets(options, "start")
    last = _offsets(options, "end")
    logs = asyncio.run(_logs(work.connection(), topics))
    ranges = []
    for at, log in sorted(logs.items()):
        end = min(last.get(at, log.end), log.end)
        start = min(first.get(at, log.start), end)
        ranges.append(PlannedRange(topic=at.topic, partition=at.partition, start=start, end=end))
    return Request(
        ranges=tuple(ranges),
        layouts=layouts,
        work=work,
        raw=not work.app,
        tasks=_tasks(options),
        max_rows_per_batch=_number(options, "max_rows_per_batch") or MAX_ROWS,
    )


def _layouts(work: Work, topics: Sequence[str]) -> dict[str, Layout]:
    """Return the layout of each topic, by default of all that the app's handlers name.

    Raises:
        PlanError: The app has no handler for a topic, or its records would have to be shuffled.
    """
    handlers = resolve_app(work.app, work.module_paths).handlers
    layouts: dict[str, Layout] = {}
    for topic in topics or [topic for handler in handlers for topic in handler.topics]:
        handler = next((candidate for candidate in handlers if candidate.takes(topic)), None)
        if handler is None:
            raise PlanError(f"app {work.app} has no handler for topic {topic!r}")
        layouts[topic] = layout_of(handler)
        if layouts[topic] == "shuffle":
            raise PlanError(
                f"handler {handler.name!r} has a function as shard_by, so its records have to be shuffled: use "
                "aioshard.spark.apply_handlers, or a planned run"
            )
    return layouts


def _planned(options: Mapping[str, str]) -> Request:
    plan = RunDirectory(options["plan"]).plan()
    first = _offsets(options, "start")
    last = _offsets(options, "end")
    # A verification reads the log in part.
    ranges = tuple(ranges_between(vector_of(first), vector_of(last))) if first and last else plan.ranges
    settings: dict[str, Any] = {"isolation_level": plan.isolation_level}
    if plan.bootstrap_servers is not None:
        settings["bootstrap_servers"] = plan.bootstrap_servers
    work = _work(options, plan.app, settings)
    return Request(
        ranges=ranges,
        layouts={topic: handler.layout for handler in plan.handlers for topic in handler.topics},
        work=work._replace(on_failure=plan.on_failure, total_concurrency=plan.total_concurrency),
        raw=options.get("app") == "",  # these records are shuffled before the handlers run
        tasks=plan.tasks or _tasks(options),
        max_rows_per_batch=plan.max_rows_per_batch,
        directory=options["plan"],
        follow=options.get("follow") == "true",
    )


def _work(options: Mapping[str, str], app: str, settings: Mapping[str, Any]) -> Work:
    # The driver may know more directories of modules than its planner process.
    paths = tuple(options["module_paths"].split(os.pathsep)) if "module_paths" in options else module_paths()
    return Work(
        app=app,
        version=options.get("version"),
        module_paths=paths,
        settings=settings,
        on_failure=options.get("on_failure"),
        total_concurrency=_number(options, "total_concurrency"),
        at_once=_number(options, "slots") or 1,
        halted_rows=options.get("halted") == "row",
    )


def _tasks(options: Mapping[str, str]) -> int | None:
    tasks = _number(options, "tasks")
    slots = _number(options, "slots")
    if tasks is None and slots is not None:
        return _TASKS_PER_SLOT * slots if slots > 1 else 1
    return tasks


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise PlanError(f"option {name}={text!r}: expected a whole number of at least 1")
    return int(text)


def _offsets(options: Mapping[str, str], name: str) -> dict[TopicPartition, int]:
    text = options.get(name, _DEFAULTS[name])
    if text == _DEFAULTS[name]:
        return {}
    try:
        vector = json.loads(text)
    except ValueError:
        vector = text
    return offsets_in(vector, f"option {name}")


async def _logs(settings: Settings, topics: Collection[str]) -> dict[TopicPartition, LogRange]:
    """Return the current log of all partitions of some topics, up to the last readable record."""
    async with KafkaAdmin(settings) as brokers:
        partitions = [TopicPartition(topic, number) for topic in topics for number in await brokers.partitions(topic)]
        bounds = await brokers.bounds(partitions)
    return {at: log.readable(settings.isolation_level) for at, log in bounds.items()}


# Readers ------------------------------------------------------------------------------


class _Task(InputPartition):
    """The input of one Spark task: at most one range per partition."""

    def __init__(self, ranges: Sequence[PlannedRange], finished: Mapping[TopicPartition, Collection[int]]) -> None:
        super().__init__(None)
        self.ranges = {planned.topic_partition: LogRange(planned.start, planned.end) for planned in ranges}
        self.finished = {partition: finished[partition] for partition in self.ranges}


class _Reading:
    """Shared part of the batch and stream readers."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one task's ranges, in a worker."""
        from aioshard.spark.task import read_raw, run_handlers  # noqa: PLC0415 - in a worker

        assert isinstance(partition, _Task)  # noqa: S101 - made by _tasks
        request = self._request
        if request.raw:
            return read_raw(request.work.connection(), partition.ranges, partition.finished)
        work = request.work._replace(topics=tuple({at.topic for at in partition.ranges}))
        return run_handlers(work, lambda app: RangeTransport(app.settings, partition.ranges, partition.finished))

    def _tasks(self, start: Vector, end: Vector) -> Sequence[_Task]:
        request = self._request
        ranges = ranges_between(start, end)
        # Shuffled topics are read in whole partitions: the order after the shuffle depends on their offset order.
        divided = [planned for planned in ranges if request.layouts.get(planned.topic, "split") == "split"]
        whole = [planned for planned in ranges if request.layouts.get(planned.topic, "split") != "split"]
        finished = {planned.topic_partition: planned.finished for planned in request.ranges}
        return [
            _Task(task, finished)
            for task in packed(whole, request.tasks) + split(divided, request.tasks or _SPLIT_TASKS)
        ]


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
            logs = asyncio.run(_logs(request.work.connection(), {planned.topic for planned in request.ranges}))
            ends = {topic: {p: logs[TopicPartition(topic, int(p))].end for p in ends[topic]} for topic in ends}
        return advanced(start, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else request.max_rows_per_batch)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch."""
        return self._tasks(start, end)
