"""The options of `format("aioshard")`, checked and turned into ranges and tasks."""

import asyncio
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aioshard.errors import PlanError
from aioshard.handlers import Registration
from aioshard.kafka.administration import Administration
from aioshard.kafka.topic_reader import TopicReader
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.plan import Layout, PlannedRange
from aioshard.spark.source.vectors import packed, split
from aioshard.spark.tasks.loading import resolve_app
from aioshard.spark.tasks.work import Work

__all__ = ["OPTIONS", "Request", "TaskRanges", "check_options", "layout_of", "log_ends", "places", "request_of"]

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
    "places",
)
"""Supported options; see `docs/spark.md`."""

_TASKS_OF_SPLIT = 8
"""Number of tasks for records without order, if no option sets it."""
_DEFAULT_ROWS = 500_000
_EARLIEST = "earliest"
_LATEST = "latest"


class TaskRanges(NamedTuple):
    """The input of one task: at most one range per partition."""

    ranges: tuple[PlannedRange, ...]
    finished: tuple[tuple[str, int, tuple[int, ...]], ...] = ()

    @property
    def bounds(self) -> dict[TopicPartition, LogRange]:
        """Return the ranges by partition."""
        return {TopicPartition(one.topic, one.partition): LogRange(one.start, one.end) for one in self.ranges}

    @property
    def done(self) -> dict[TopicPartition, frozenset[int]]:
        """Return the offsets that already count as finished."""
        return {TopicPartition(topic, partition): frozenset(offsets) for topic, partition, offsets in self.finished}


class Request(NamedTuple):
    """A read as it is sent to the tasks. It contains no secrets."""

    ranges: tuple[PlannedRange, ...]
    layouts: Mapping[str, Layout]
    """How the partitions of a topic are spread over tasks; without an app, all of them are split."""
    work: Work | None
    """The handlers to run; None reads raw records."""
    settings: Mapping[str, Any]
    tasks: int | None
    max_rows_per_batch: int
    finished: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    directory: str | None = None
    """Directory of the run that the plan belongs to; a stop flag may appear in it."""
    follow: bool = False
    """True if reading continues to the current end of the log, which is looked up for every batch."""
    app: str | None = None
    """The app whose settings complete those of the plan, even if its handlers do not run."""
    places: tuple[str, ...] = ()

    def connection(self) -> Settings:
        """Return the settings for a read without handlers: those of the app, in the environment of the reader."""
        if self.app is None:
            return Settings(**self.settings)
        app = resolve_app(self.app, self.places)
        app.configure(**self.settings)
        return app.settings

    def task_ranges(self, ranges: Sequence[PlannedRange]) -> list[TaskRanges]:
        """Return the tasks of a batch of these ranges."""
        # Shuffled topics are read in whole partitions: the order after the shuffle depends on their offset order.
        in_order = ("partition", "shuffle")
        whole = [one for one in ranges if self.layouts.get(one.topic) in in_order]
        divided = [one for one in ranges if self.layouts.get(one.topic) not in in_order]
        tasks = packed(whole, self.tasks) + split(divided, self.tasks or _TASKS_OF_SPLIT)
        return [TaskRanges(tuple(task), self._finished_of(task)) for task in tasks]

    def _finished_of(self, ranges: Sequence[PlannedRange]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        names = {(one.topic, one.partition) for one in ranges}
        return tuple(found for found in self.finished if found[:2] in names)


def check_options(options: Mapping[str, str]) -> None:
    """Check options as far as possible without contacting the brokers.

    Raises:
        PlanError: An option is missing, unknown, or has an invalid value.
    """
    unknown = sorted(name for name in options if name not in OPTIONS and name != "path")
    if unknown:
        raise PlanError(f"format('aioshard') has no option {unknown[0]!r}: its options are {', '.join(OPTIONS)}")
    if not options.keys() & {"plan", "app", "topics"}:
        raise PlanError(
            "format('aioshard') needs the option plan (the directory of a planned run), or topics and "
            "bootstrap_servers to read from, or app=MODULE:APP to run its handlers; none of them was found"
        )
    for name in ("tasks", "max_rows_per_batch", "total_concurrency", "slots"):
        _number(options, name)
    _offsets("start", options.get("start", _EARLIEST), _EARLIEST)
    _offsets("end", options.get("end", _LATEST), _LATEST)


def request_of(options: Mapping[str, str]) -> Request:
    """Turn the options of a read into a request; contacts the brokers unless a plan defines the ranges.

    Raises:
        PlanError: As in `check_options`, or the options contradict the app.
        TransportError: The brokers do not answer.
    """
    check_options(options)
    if "plan" in options:
        return _planned(options)
    settings = _settings(options)
    topics = [topic for text in options.get("topics", "").split(",") if (topic := text.strip())]
    app = resolve_app(options["app"], _given_places(options)) if "app" in options else None
    if app is not None and not topics:
        topics = [topic for handler in app.handlers for topic in handler.topics]
    if not topics:
        raise PlanError(
            "no topic was found: the option topics names them, with commas between, or the app's handlers do"
        )
    given = settings if app is None else dict(app.settings) | settings
    ranges = asyncio.run(
        _asked(Settings(**given), topics, options.get("start", _EARLIEST), options.get("end", _LATEST))
    )
    layouts: dict[str, Layout] = {}
    if app is not None:
        for topic in topics:
            handler = next((one for one in app.handlers if one.takes(topic)), None)
            if handler is None:
                raise PlanError(f"app {options['app']} has no handler for topic {topic!r}: its handlers take others")
            layouts[topic] = layout_of(handler)
    return Request(
        ranges=tuple(ranges),
        layouts=layouts,
        work=None if app is None else _work(options, options["app"], settings),
        settings=settings,
        tasks=_number(options, "tasks"),
        max_rows_per_batch=_number(options, "max_rows_per_batch") or _DEFAULT_ROWS,
    )


def layout_of(handler: Registration) -> Layout:
    """Return how to spread the records of a handler over tasks without breaking the order it requires.

    Raises:
        PlanError: Its shard key is a function, which can return the same value in several partitions.
    """
    if handler.shard_by in {"key", "partition"}:
        return "partition"
    if handler.shard_by == "record":
        return "split"
    raise PlanError(
        f"handler {handler.name!r} has a function as shard_by, whose values can be the same in several partitions: "
        "its records have to be shuffled; use aioshard.spark.apply_handlers, or a planned run"
    )


def _planned(options: Mapping[str, str]) -> Request:
    directory = RunDirectory(options["plan"])
    plan = directory.plan()
    settings: dict[str, Any] = {"isolation_level": plan.isolation_level}
    if plan.bootstrap_servers is not None:
        settings["bootstrap_servers"] = plan.bootstrap_servers
    told = {"on_failure": plan.on_failure, "total_concurrency": plan.total_concurrency}
    raw = options.get("app") == ""  # an empty app requests raw records, which are shuffled before the handlers run
    work = (
        None if raw else _work({**{k: str(v) for k, v in told.items() if v is not None}, **options}, plan.app, settings)
    )
    return Request(
        ranges=plan.ranges,
        layouts={topic: handler.layout for handler in plan.handlers for topic in handler.topics},
        work=work,
        settings=settings,
        tasks=plan.tasks,
        max_rows_per_batch=plan.max_rows_per_batch,
        finished=tuple((topic, number, offsets) for topic, number, offsets in plan.finished),
        directory=options["plan"],
        follow=options.get("follow") == "true",
        app=plan.app,
        places=_given_places(options),
    )


def _work(options: Mapping[str, str], app: str, settings: Mapping[str, Any]) -> Work:
    return Work(
        app=app,
        places=_given_places(options),
        settings=settings,
        on_failure=options.get("on_failure"),
        total_concurrency=_number(options, "total_concurrency"),
        at_once=_number(options, "slots") or 1,
        halted_rows=options.get("halted") == "row",
    )


def places() -> tuple[str, ...]:
    """Return the driver's directories of modules that are not installed; tasks of a local master can use them too."""
    installed = tuple(set(sysconfig.get_paths().values()))
    found = (str(Path(path).resolve()) for path in ("", *sys.path))
    return tuple(dict.fromkeys(path for path in found if Path(path).is_dir() and not path.startswith(installed)))


def _given_places(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories of the option, set by a driver that knows more than its planner process, or `places()`."""
    return tuple(options["places"].split(os.pathsep)) if "places" in options else places()


def _settings(options: Mapping[str, str]) -> dict[str, Any]:
    return {name: options[name] for name in ("bootstrap_servers", "isolation_level") if name in options}


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise PlanError(f"option {name}={text!r} was found, a whole number of at least 1 was expected")
    return int(text)


async def log_ends(settings: Settings, ranges: Sequence[PlannedRange]) -> dict[str, dict[str, int]]:
    """Return the current log ends of the ranges' partitions, never before the start of a range."""
    ends: dict[str, dict[str, int]] = {}
    for topic in sorted({one.topic for one in ranges}):
        starts = {one.partition: one.start for one in ranges if one.topic == topic}
        async with TopicReader(settings, topic, starts) as reader:
            logs = reader.ranges
        ends[topic] = {str(partition): max(logs[partition].end, start) for partition, start in starts.items()}
    return ends


async def _asked(settings: Settings, topics: Sequence[str], start: str, end: str) -> list[PlannedRange]:
    """Return the ranges that the topics have now, narrowed to the requested offsets."""
    first = _offsets("start", start, _EARLIEST)
    last = _offsets("end", end, _LATEST)
    found = []
    async with Administration(settings) as administration:
        partitions = {topic: await administration.partitions(topic) for topic in topics}
    for topic in topics:
        async with TopicReader(settings, topic, partitions[topic]) as reader:
            for partition, log in sorted(reader.ranges.items()):
                begin = first.get(topic, {}).get(str(partition), log.start)
                stop = min(last.get(topic, {}).get(str(partition), log.end), log.end)
                found.append(PlannedRange(topic=topic, partition=partition, start=min(begin, stop), end=stop))
    return found


def _offsets(name: str, text: str, default: str) -> dict[str, dict[str, int]]:
    if text == default:
        return {}
    try:
        found = json.loads(text)
        return {topic: {str(int(p)): int(offset) for p, offset in given.items()} for topic, given in found.items()}
    except (ValueError, AttributeError, TypeError):
        raise PlanError(
            f"option {name}={text!r} was found; {default} was expected, or offsets by topic and partition as JSON, "
            'such as {"orders": {"0": 41}}'
        ) from None
