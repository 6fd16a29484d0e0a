"""Plan a backfill: work out its ranges and handlers from the app and the brokers, then freeze them."""

import datetime as dt
import logging
import math
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from aioshard.app import App
from aioshard.core.ownership import origin_of
from aioshard.engine.handler import Handler
from aioshard.errors import DataLossError, PlanError
from aioshard.kafka.admin import KafkaAdmin, LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.plans import (
    MAX_ROWS,
    Layout,
    Plan,
    PlannedHandler,
    PlannedRange,
    app_version,
    metadata_of,
    offsets_in,
    on_failure_text,
)
from aioshard.spark.run_directory import RunDirectory
from aioshard.spark.work import check_handlers, resolve_app, settings_of

logger = logging.getLogger("aioshard.spark.planning")

Offsets = Mapping[str, Mapping[int, int]]
"""Topic, partition, offset."""
Start = Literal["committed", "earliest"] | dt.datetime | float | Offsets
End = Literal["latest"] | dt.datetime | float | Offsets
Tell = Callable[[str], None]
"""Receives warnings for the user: sentences that do not make the plan fail."""


class Facts(NamedTuple):
    """The state of one partition when a plan is made."""

    at: TopicPartition
    committed: Committed | None
    log: LogBounds
    last: int
    """The exclusive upper bound of a read: the last stable offset under `read_committed`."""
    knows_topic: bool
    """True if the group has a commit on any partition of the topic."""


async def plan(
    app: str,
    *,
    directory: str | os.PathLike[str] | RunDirectory | None,
    group: str | None = None,
    bootstrap_servers: str | None = None,
    start: Start = "committed",
    end: End = "latest",
    tasks: int | None = None,
    max_rows_per_batch: int = MAX_ROWS,
    total_concurrency: int | None = None,
    on_failure: str | None = None,
    shuffle: bool = False,
    tell: Tell = logger.warning,
) -> Plan:
    """Determine what a backfill would do, and write the plan into a new run directory.

    Live members of the group cause a warning, not an error: only the hand-over requires that there are none. A plan
    with nothing to read is valid and empty.

    Args:
        app: `MODULE:APP`.
        directory: A new directory for the run; None writes nothing.
        group: Consumer group that the run stands in for; the app's group by default.
        bootstrap_servers: Override those of the app's settings and the environment. They become part of the plan.
        start: `"committed"`: the group's committed offsets; a group without commits on a topic follows the app's
            `auto_offset_reset`. `"earliest"`: the start of the log. A time (aware `datetime`, or seconds since the
            epoch): the first record that is not older. A mapping topic → partition → offset: exactly there.
        end: `"latest"`: the current end (the last stable offset under `read_committed`). A time: before the first
            record that is not older. A mapping: exactly there, or at the end of the log if that comes first.
        tasks: Number of tasks; None lets the run decide.
        max_rows_per_batch: Maximum records per micro-batch, which is also the maximum that a crash can repeat.
        total_concurrency: Maximum number of concurrent handler calls in the whole job. A task runs at least one of each
            handler that it has records for. Handlers with fixed shards cannot be limited this way and are refused.
        on_failure: `skip` or `dead-letter:TOPIC`; replaces the handlers' own policies, including `Park`.
        shuffle: Bring the records of a key together across topics and partitions, instead of one task per partition.
        tell: Receives warnings for the user; logs them by default.

    Returns:
        The plan, as written to the directory.

    Raises:
        PlanError: The plan is impossible: unknown topic, `Park`, an invalid value, or a used directory.
        DataLossError: The log no longer has some of the records; the error names them.
        SettingsError: The brokers are unknown, or a setting is invalid.
        TransportError: The brokers do not answer, or refuse access.

    Example:
        ```python
        backfill = await plan("orders.app:app", directory="runs/7", start="earliest")
        print(backfill.records)
        ```
    """
    loaded = resolve_app(app)
    for name, value in (
        ("tasks", tasks),
        ("max_rows_per_batch", max_rows_per_batch),
        ("total_concurrency", total_concurrency),
    ):
        if value is not None and value < 1:
            raise PlanError(f"{name}={value!r}: expected a whole number of at least 1")
    settings = settings_of(loaded, bootstrap_servers)
    group_id = group if group is not None else loaded.group_id
    check_handlers(loaded, on_failure, total_concurrency)
    async with KafkaAdmin(settings) as brokers:
        handlers = await _planned_handlers(loaded, brokers, shuffle=shuffle)
        facts = await _facts(brokers, settings, group_id, {topic for handler in handlers for topic in handler.topics})
        starts = await _offsets_of(
            brokers, settings, facts, option="start", when=start, words=("committed", "earliest")
        )
        ends = await _offsets_of(brokers, settings, facts, option="end", when=end, words=("latest",))
        result = Plan(
            id=uuid.uuid4().hex[:12],
            app=app,
            group_id=group_id,
            bootstrap_servers=bootstrap_servers,
            isolation_level=settings.isolation_level,
            ranges=planned_ranges(facts, start, starts, ends, settings.auto_offset_reset),
            handlers=handlers,
            tasks=tasks,
            max_rows_per_batch=max_rows_per_batch,
            total_concurrency=total_concurrency,
            on_failure=on_failure,
            version=app_version(loaded),
        )
        _warn(result, tell)
        if settings.processing_guarantee == "exactly_once":
            tell("the messages of handlers are published at least once in a backfill, not exactly once")
        if members := (await brokers.group(group_id)).members:
            tell(
                f"group {group_id!r} has {len(members)} members, such as {members[0]}: if they commit during the run, "
                "it cannot be handed over; stop them first"
            )
    if directory is not None:
        RunDirectory.of(directory).begin(result)
    return result


# Ranges -------------------------------------------------------------------------------


async def _facts(brokers: KafkaAdmin, settings: "Settings", group_id: str, topics: Collection[str]) -> list[Facts]:
    """Return the state of all partitions, in order."""
    partitions = [TopicPartition(topic, number) for topic in topics for number in await brokers.partitions(topic)]
    # Read the commits first: if an app is running meanwhile, the range only becomes longer than necessary.
    commits = await brokers.group_commits(group_id, partitions)
    bounds = await brokers.bounds(partitions)
    known_topics = {partition.topic for partition, committed in commits.items() if committed is not None}
    return [
        Facts(at, commits[at], log, log.readable(settings.isolation_level).end, at.topic in known_topics)
        for at, log in sorted(bounds.items())
    ]


async def _offsets_of(
    brokers: KafkaAdmin,
    settings: "Settings",
    facts: Sequence[Facts],
    *,
    option: str,
    when: object,
    words: tuple[str, ...],
) -> Mapping[TopicPartition, int]:
    """Return the offset of each partition that a time or a mapping stands for; empty for a word.

    A time stands for the first record that is not older, or for the end of the log if all records are older.

    Raises:
        PlanError: The time is invalid, or the mapping does not fit the partitions.
    """
    if isinstance(when, Mapping):
        given = offsets_in(when, option)
        if different := sorted(given.keys() ^ {fact.at for fact in facts}):
            raise PlanError(
                f"{option} must name an offset for each of the {len(facts)} partitions that the handlers read, and "
                f"no others: check {different[0]}"
            )
        return given
    if isinstance(when, str) and when in words:
        return {}
    time = _timestamp_of(when, option, words)
    by_partition = await brokers.offsets_at([fact.at for fact in facts], time, settings.isolation_level)
    offsets = {}
    for fact in facts:
        offset = by_partition[fact.at]
        offsets[fact.at] = fact.last if offset is None else offset
    return offsets


def _timestamp_of(when: object, option: str, words: tuple[str, ...]) -> float:
    """Return a time in seconds since the epoch.

    Raises:
        PlanError: It is not a time.
    """
    if isinstance(when, dt.datetime):
        if when.tzinfo is None:
            raise PlanError(f"{option}={when.isoformat()} has no time zone: add one, as in {when.isoformat()}+00:00")
        return when.timestamp()
    if isinstance(when, int | float) and not isinstance(when, bool) and math.isfinite(when) and when >= 0:
        return float(when)
    expected = " or ".join(map(repr, words))
    raise PlanError(f"{option}={when!r}: expected {expected}, a time, or an offset for each partition")


def planned_ranges(
    facts: Sequence[Facts],
    start: object,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    policy: Literal["earliest", "latest", "error"] | None,
) -> tuple[PlannedRange, ...]:
    """Return the range of each partition.

    Raises:
        PlanError: The start of a partition is undecided, or past the end of its log.
        DataLossError: The log no longer has the start of a range.
    """
    ranges: list[PlannedRange] = []
    losses: list[str] = []
    for fact in facts:
        first = starts[fact.at] if starts else start_of(fact, start, policy)
        if first < fact.log.start:
            losses.append(f"{fact.at}: offsets {first} to {fact.log.start - 1}")
        elif first > fact.log.end:
            if starts:
                raise PlanError(f"start: {fact.at} starts at {first}, and its log ends at {fact.log.end}")
            losses.append(f"{fact.at}: offset {first} is committed, and the log ends at {fact.log.end}")
        last = max(first, min(ends.get(fact.at, fact.last), fact.last))
        offset, metadata = fact.committed or (None, "")
        runs = metadata_of(fact.committed).finished if start == "committed" else ()
        finished = tuple(done for run in runs for done in range(max(run.start, first), min(run.end, last)))
        ranges.append(
            PlannedRange(
                topic=fact.at.topic,
                partition=fact.at.partition,
                start=first,
                end=last,
                committed=offset,
                metadata=metadata,
                finished=finished,
            )
        )
    if losses:
        raise DataLossError(losses, "To accept the loss, plan with start='earliest' or with offsets")
    return tuple(ranges)


def start_of(facts: Facts, start: object, policy: Literal["earliest", "latest", "error"] | None) -> int:
    """Return the start of a partition's range for `earliest` or `committed`. It may lie outside the log.

    Args:
        facts: The state of the partition.
        start: The start that the user requested.
        policy: `auto_offset_reset`, for a group without commits on the topic.

    Raises:
        PlanError: The start is undecided: no commit, and no `auto_offset_reset`.
    """
    if start == "earliest":
        return facts.log.start
    if facts.committed is not None:
        return facts.committed.offset
    origin = origin_of(None, (facts.log.start, facts.last), policy, group_knows_topic=facts.knows_topic)
    if origin is None:
        raise PlanError(
            f"the group has no committed offset for {facts.at}, and auto_offset_reset is not set: set it, or plan with "
            "start='earliest' or a time"
        )
    return origin.offset


# Handlers -----------------------------------------------------------------------------


async def _planned_handlers(app: App, brokers: KafkaAdmin, *, shuffle: bool) -> tuple[PlannedHandler, ...]:
    """Return the handlers of an app with the topics that exist for them now.

    Raises:
        PlanError: A topic does not exist, or belongs to several handlers.
        TransportError: The brokers did not answer.
    """
    existing = await brokers.topics()
    if missing := sorted({topic for handler in app.handlers for topic in handler.topics} - existing):
        raise PlanError(
            f"topic {missing[0]!r} does not exist, or this user may not see it: create it, check its name, or grant "
            "DESCRIBE on it"
        )
    planned: list[PlannedHandler] = []
    for handler in app.handlers:
        topics = tuple(sorted(topic for topic in existing if handler.takes(topic)))
        for other in planned:
            if shared := sorted({*topics} & {*other.topics}):
                raise PlanError(
                    f"topic {shared[0]!r} belongs to the handlers {other.name!r} and {handler.name!r}: narrow their "
                    "patterns"
                )
        planned.append(
            PlannedHandler(
                name=handler.name,
                topics=topics,
                shard_by="function" if callable(handler.shard_by) else handler.shard_by,
                on_failure=on_failure_text(handler.on_failure),
                layout=layout_of(handler, shuffle=shuffle),
            )
        )
    return tuple(planned)


def layout_of(handler: Handler, *, shuffle: bool = False) -> Layout:
    """Return how to spread the records of a handler over tasks without breaking the order that it requires."""
    if callable(handler.shard_by) or (handler.shard_by == "key" and shuffle):
        return "shuffle"
    return "split" if handler.shard_by == "record" else "partition"


# Warnings -----------------------------------------------------------------------------


def _warn(plan: Plan, tell: Tell) -> None:
    if not plan.records:
        tell(f"nothing to read: group {plan.group_id!r} has committed everything up to the end of the range")
    for planned in plan.ranges:
        if planned.committed is not None and planned.end < planned.committed:
            tell(
                f"the range of {planned.topic_partition} ends at {planned.end}, and the group has committed "
                f"{planned.committed}: after the hand-over the app processes {planned.end} to {planned.committed - 1} "
                "again"
            )
        if metadata_of(planned.before).foreign:
            tell(
                f"another program committed metadata for {planned.topic_partition}: it is not read, so records that it "
                "finished beyond the offset run again, and the hand-over replaces it"
            )
