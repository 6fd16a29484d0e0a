"""Plan a backfill: determine what it does from the app and the brokers, then freeze it."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from aioshard.app import App
from aioshard.errors import GroupBusyError, GroupMovedError, PlanError, TransportError
from aioshard.kafka.history import HistoryBrokers
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.planning.bounds import (
    End,
    Facts,
    Start,
    end_of,
    lost,
    offsets_given,
    refuse_losses,
    start_of,
    timestamp_of,
)
from aioshard.spark.planning.commits import after, noted
from aioshard.spark.planning.lease import check_lease, take_lease
from aioshard.spark.planning.planned_handlers import (
    Tell,
    check_dead_letters,
    check_policies,
    planned_handlers,
    target_of,
)
from aioshard.spark.runs.access import settings_of
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.plan import CommittedThen, FinishedBeyond, Plan, PlannedHandler, PlannedRange
from aioshard.spark.runs.versions import versions_of
from aioshard.spark.tasks.loading import resolve_app
from aioshard.spark.tasks.work import check_concurrency

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["plan"]

logger = logging.getLogger("aioshard.spark.planning")

_MAX_ROWS = 500_000


class _Found(NamedTuple):
    """Answers of the brokers."""

    facts: dict[TopicPartition, Facts]
    timed_starts: Mapping[TopicPartition, int | None]
    timed_ends: Mapping[TopicPartition, int | None]


async def plan(
    app: str | App,
    *,
    directory: str | os.PathLike[str] | RunDirectory | None,
    group: str | None = None,
    bootstrap_servers: str | Sequence[str] | None = None,
    start: Start = "committed",
    end: End = "latest",
    tasks: int | None = None,
    max_rows_per_batch: int = _MAX_ROWS,
    total_concurrency: int | None = None,
    on_failure: str | None = None,
    shuffle: bool = False,
    lease: float | None = None,
    tell: Tell = logger.warning,
) -> Plan:
    """Determine what a backfill would do, and write the plan into a new run directory.

    Live members of the group cause a warning, not an error: only the hand-over requires that there are none. A plan
    with nothing to read is valid and empty.

    Args:
        app: `MODULE:APP`, or an app that is an attribute of the module of one of its handlers.
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
        total_concurrency: Maximum handlers running in parallel in the whole job. A task runs at least one of each
            handler that it has records for. Handlers with fixed shards cannot be limited this way and are refused.
        on_failure: `skip` or `dead-letter:TOPIC`; replaces the handlers' own policies, including `Park`.
        shuffle: Bring the records of a key together across topics and partitions, instead of one task per partition.
        lease: Seconds for which the group's apps must stay off; see `aioshard.spark.planning.lease.take_lease` for
            its limits. If the lease cannot be obtained, you get a warning and the plan stays valid.
        tell: Receives warnings for the user; logs them by default.

    Returns:
        The plan, as written to the directory.

    Raises:
        PlanError: The plan is impossible: unknown topic, `Park`, a key in several topics without *shuffle*, an invalid
            value, or a directory that already has a run.
        DataLossError: The log no longer has some of the records; the error names them.
        SettingsError: The brokers are unknown, or a setting is invalid.
        TransportError: The brokers do not answer, or refuse access.

    Example:
        ```python
        found = await plan("orders.app:app", directory="runs/7", start="earliest")
        print(found.records)
        ```
    """
    target, loaded = (app, resolve_app(app)) if isinstance(app, str) else (target_of(app), app)
    place = None if directory is None else _new_run(directory)
    _check_numbers(tasks=tasks, max_rows_per_batch=max_rows_per_batch, total_concurrency=total_concurrency)
    servers = bootstrap_servers
    if servers is not None and not isinstance(servers, str):
        servers = ",".join(servers)
    settings = settings_of(loaded, servers)
    group_id = group if group is not None else loaded.group_id
    check_policies(loaded, on_failure)
    check_concurrency(loaded.handlers, total_concurrency)
    if lease is not None:
        check_lease(lease)
    async with HistoryBrokers(settings) as brokers:
        handlers = await planned_handlers(loaded, brokers, shuffle=shuffle, tell=tell)
        await check_dead_letters(handlers, on_failure, brokers, tell)
        found = await _ask(brokers, settings, group_id, handlers, times=(start, end))
        ranges, finished = _ranges(found, start, end, settings)
        made = Plan(
            id=uuid.uuid4().hex[:12],
            created=time.time(),
            app=target,
            group_id=group_id,
            bootstrap_servers=servers,
            isolation_level=settings.isolation_level,
            ranges=ranges,
            committed=tuple(_then(found.facts[TopicPartition(one.topic, one.partition)]) for one in ranges),
            handlers=handlers,
            tasks=tasks,
            max_rows_per_batch=max_rows_per_batch,
            total_concurrency=total_concurrency,
            on_failure=on_failure,
            finished=finished,
            versions=versions_of(loaded),
        )
        _tell_of(made, tell)
        await _tell_of_members(brokers, group_id, tell)
        if place is not None:
            place.begin(made)
        if lease is not None:
            await _lease(brokers, made, lease, tell)
    return made


# User input ---------------------------------------------------------------------------


def _new_run(directory: str | os.PathLike[str] | RunDirectory) -> RunDirectory:
    place = RunDirectory.of(directory)
    place.refuse_used()
    return place


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        optional = name != "max_rows_per_batch"
        if (value is None and optional) or (type(value) is int and value >= 1):
            continue
        raise PlanError(f"{name}={value!r} was found, a whole number of at least 1 was expected")


# Broker state -------------------------------------------------------------------------


async def _ask(
    brokers: HistoryBrokers,
    settings: "Settings",
    group_id: str,
    handlers: Sequence[PlannedHandler],
    *,
    times: tuple[object, object],
) -> _Found:
    topics = sorted({topic for handler in handlers for topic in handler.topics})
    numbers = await asyncio.gather(*(brokers.partitions(topic) for topic in topics))
    partitions = [
        TopicPartition(topic, number) for topic, found in zip(topics, numbers, strict=True) for number in sorted(found)
    ]
    if not partitions:
        return _Found({}, {}, {})
    isolation = settings.isolation_level
    # Read the commits first: if an app is running meanwhile, the range only becomes longer than necessary.
    commits = await brokers.group_commits(group_id, partitions)
    bounds = await brokers.bounds(partitions)
    known = {one.topic for one, committed in commits.items() if committed is not None}
    timed: list[Mapping[TopicPartition, int | None]] = []
    for when, option in zip(times, ("start", "end"), strict=True):
        timestamp = timestamp_of(when, option)
        timed.append({} if timestamp is None else await brokers.offsets_at(partitions, timestamp, isolation))
    facts = {
        one: Facts(
            at=one,
            committed=commits[one],
            log=log,
            last=log.stable if isolation == "read_committed" else log.end,
            knows_topic=one.topic in known,
        )
        for one, log in bounds.items()
    }
    return _Found(facts, *timed)


def _ranges(
    found: _Found, start: Start, end: End, settings: "Settings"
) -> tuple[tuple[PlannedRange, ...], tuple[FinishedBeyond, ...]]:
    _check_words(start, "start", ("committed", "earliest"))
    _check_words(end, "end", ("latest",))
    starts, ends = (offsets_given(when, name, found.facts) for when, name in ((start, "start"), (end, "end")))
    ranges, finished, losses = [], [], []
    for at, facts in sorted(found.facts.items()):
        first = start_of(
            facts,
            start,
            settings.auto_offset_reset,
            given=(starts or {}).get(at),
            timed=found.timed_starts.get(at),
        )
        loss = lost(facts, first)
        if loss is not None:
            losses.append(loss)
            continue
        last = end_of(facts, first, given=(ends or {}).get(at), timed=found.timed_ends.get(at))
        ranges.append(PlannedRange(topic=at.topic, partition=at.partition, start=first, end=last))
        after(_then(facts), last)
        if start == "committed":
            done = [
                n for run in noted(facts.committed).finished for n in range(max(run.start, first), min(run.end, last))
            ]
            if done:
                finished.append(FinishedBeyond(at.topic, at.partition, tuple(done)))
    refuse_losses(losses)
    return tuple(ranges), tuple(finished)


def _check_words(when: object, option: Literal["start", "end"], words: tuple[str, ...]) -> None:
    if isinstance(when, Mapping) or when in words or timestamp_of(when, option) is not None:
        return
    expected = " or ".join(map(repr, words))
    raise PlanError(f"{option}={when!r} was found; {expected}, a time or offsets of each partition were expected")


def _then(facts: Facts) -> CommittedThen:
    committed: Committed | None = facts.committed
    if committed is None:
        return CommittedThen(*facts.at, None, "")
    return CommittedThen(*facts.at, *committed)


# Warnings -----------------------------------------------------------------------------


def _tell_of(made: Plan, tell: Tell) -> None:
    if not made.records:
        tell(f"there is nothing to read: group {made.group_id!r} has everything up to the end of the range")
    for planned, then in zip(made.ranges, made.committed, strict=True):
        if then.offset is not None and planned.end < then.offset:
            tell(
                f"the range of {planned.topic}/{planned.partition} ends at {planned.end}, and the group has committed "
                f"{then.offset}: after the hand-over the app processes {planned.end} to {then.offset - 1} once more"
            )
        for reason in noted(then).ignored:
            tell(f"what is noted with the commit of {planned.topic}/{planned.partition} is not used: {reason}")


async def _tell_of_members(brokers: HistoryBrokers, group_id: str, tell: Tell) -> None:
    try:
        members = (await brokers.describe_group(group_id)).members
    except TransportError as error:
        tell(f"it is not known whether group {group_id!r} has members: {error}")
        return
    if members:
        tell(
            f"group {group_id!r} has {len(members)} member(s), {members[0]} first: what they commit while the run "
            "lasts keeps it from being handed over; stop them before it begins"
        )


async def _lease(brokers: HistoryBrokers, made: Plan, seconds: float, tell: Tell) -> None:
    try:
        without = await take_lease(brokers, made, seconds)
    except (GroupBusyError, GroupMovedError) as error:
        tell(f"the group could not be leased, and its apps may start: {error}")
    else:
        if without:
            tell(
                f"{len(without)} partition(s) could not be leased, {without[0]} first: nothing is committed there, or "
                "another program has noted something with it. Apps that are given only those start"
            )
