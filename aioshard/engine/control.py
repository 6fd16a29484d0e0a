"""Operator controls of a running engine: release halted records, pause and resume, seek, change concurrency."""

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Collection
from typing import Literal, TypeVar

import anyio

from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.handler import Running
from aioshard.engine.log_fields import partition_fields, record_fields
from aioshard.engine.outcomes import Detour
from aioshard.engine.rebalance import APPLICATION
from aioshard.engine.runtime import Engine
from aioshard.errors import HandlerError, StateError, TransportError
from aioshard.records import TopicPartition

__all__ = [
    "MOST_WORKERS",
    "SeekTo",
    "answered",
    "assigned_partitions",
    "handler_name",
    "open_epoch",
    "pause",
    "release",
    "release_parked",
    "resume",
    "seek",
    "set_concurrency",
]

logger = logging.getLogger("aioshard.engine.control")

T = TypeVar("T")

MOST_WORKERS = 10_000
"""Limit for changing a handler's workers at runtime: a mistyped digit must not hang the process."""
SeekTo = int | float | dt.datetime | Literal["beginning", "end"]
"""An offset; a time, as a datetime or as seconds since the epoch in a float; or an end of the log."""


def release(engine: Engine, topic_partition: TopicPartition, offset: int, detour: Detour | None) -> None:
    """Release a record that is halted or waits for its next attempt: it runs now.

    Args:
        engine: The engine of this process.
        topic_partition: Partition of the record.
        offset: Offset of the record.
        detour: The detour to take; None runs the handler again, with all its attempts.

    Raises:
        StateError: The record is not incomplete in this process, or needs no release.
    """
    delivery = _waiting(engine, topic_partition, offset)
    parking = engine.handler_of(topic_partition.topic).parking
    if detour is not None and parking is not None and delivery.epoch.topic_partition != topic_partition:
        detour = parking.drop
    delivery.failures = delivery.detours = 0
    delivery.detour = detour
    delivery.aside = detour is not None or delivery.cancelled or delivery.then is not None
    what = "its handler runs again" if detour is None else detour.purpose
    logger.warning("record %r was released: %s", delivery, what, extra=record_fields("released", delivery))
    feed = engine.rebalance.fetchers[topic_partition].feed
    feed.unblock(delivery)


def _waiting(engine: Engine, topic_partition: TopicPartition, offset: int) -> Delivery:
    fetcher = engine.rebalance.fetchers.get(topic_partition)
    if fetcher is None:
        raise StateError(f"{topic_partition} is not assigned to this process: ask the one that has it")
    delivery = fetcher.epoch.tracker.get(offset)
    for side in fetcher.feed.with_side(fetcher.epoch)[1:]:
        run_again = (found for found in side.tracker.values() if found.record.offset == offset)
        delivery = delivery or next(run_again, None)
    if delivery is None:
        raise StateError(
            f"record {topic_partition}/{offset} is not incomplete here: it is done, or was not taken in yet; "
            "explain() names the halted ones"
        )
    if delivery.block is None or delivery.offset in delivery.epoch.shed:
        raise StateError(f"record {delivery!r} neither is halted nor waits for its next attempt: it needs no release")
    return delivery


def release_parked(engine: Engine, topic_partition: TopicPartition, offset: int) -> None:
    """Run the key of a parked record again now.

    Raises:
        StateError: The partition is not ours, or the record is not parked.
    """
    if topic_partition not in engine.rebalance.fetchers:
        raise StateError(f"{topic_partition} is not assigned to this process: ask the one that has it")
    parking = engine.handler_of(topic_partition.topic).parking
    lots = [] if parking is None else [lot for lot in parking.lots if lot.source.topic_partition == topic_partition]
    if parking is None or not any(parking.release(lot, offset) for lot in lots):
        raise StateError(
            f"record {topic_partition}/{offset} is not parked: 'aioshard park list' shows what is, and "
            "app.retry_now() is for what is halted"
        )
    message = "record %s/%d and what is parked behind it were released: they run again"
    fields = partition_fields("released", topic_partition, offset=offset)
    logger.warning(message, topic_partition, offset, extra=fields)


def pause(engine: Engine, what: Collection[TopicPartition] | str, why: str) -> None:
    """Start no records of these partitions, or of the handler with that name; running records continue.

    The pause lasts across rebalances, until `resume`.
    """
    names: Collection[TopicPartition | str] = [what] if isinstance(what, str) else what
    for name in names:
        engine.pauses[name] = why
    for epoch in _meant(engine, what):
        for both in engine.feed_of(epoch.topic_partition.topic).with_side(epoch):
            both.pause(APPLICATION, why)
        fields = partition_fields("paused", epoch.topic_partition, why=why)
        logger.warning("%s is paused: %s", epoch.topic_partition, why, extra=fields)


def resume(engine: Engine, what: Collection[TopicPartition] | str) -> None:
    """Undo `pause` for the same partitions or the same handler."""
    names: Collection[TopicPartition | str] = [what] if isinstance(what, str) else what
    for name in names:
        engine.pauses.pop(name, None)
    for epoch in _meant(engine, what):
        if engine.why_paused(epoch.topic_partition) is not None:
            continue
        feed = engine.feed_of(epoch.topic_partition.topic)
        resumed = [both.resume(APPLICATION) for both in feed.with_side(epoch)]
        if any(resumed):
            fields = partition_fields("resumed", epoch.topic_partition)
            logger.warning("%s goes on: the application resumed it", epoch.topic_partition, extra=fields)
            feed.reopen(epoch)


def set_concurrency(running: Running, concurrency: int) -> None:
    """Change the number of workers of a handler.

    Raises:
        HandlerError: The handler has fixed shards or adaptive concurrency, or *concurrency* is not a whole number from
            1 to `MOST_WORKERS`.
    """
    name, shards = running.spec.name, running.spec.shards
    if type(concurrency) is not int or concurrency < 1:
        raise HandlerError(
            f"set_concurrency({name!r}, {concurrency!r}) was refused: expected a whole number of at least 1; "
            "pause_handler() lets nothing start"
        )
    if concurrency > MOST_WORKERS:
        raise HandlerError(
            f"set_concurrency({name!r}, {concurrency}) was refused: expected at most {MOST_WORKERS}, since each worker "
            "is a task and the event loop stands still while they are made; concurrency= of the handler may be more"
        )
    if shards is not None:
        raise HandlerError(
            f"set_concurrency({name!r}, {concurrency}) was refused: the handler has shards={shards}, each with one "
            "worker; leave shards out for a concurrency that can be changed"
        )
    if running.adapting is not None:
        raise HandlerError(
            f"set_concurrency({name!r}, {concurrency}) was refused: the handler has concurrency={running.spec.adaptive}"
            ", which follows its back end; give it a number for one that you change"
        )
    before = running.staff.concurrency
    running.staff.change(concurrency, name)
    fields = {"event": "concurrency", "handler": name, "concurrency": concurrency}
    logger.info("handler %s: concurrency %d, %d before", name, concurrency, before, extra=fields)


def _meant(engine: Engine, what: Collection[TopicPartition] | str) -> list[Epoch]:
    if isinstance(what, str):
        return [e for e in engine.rebalance.epochs if engine.handler_of(e.topic_partition.topic).spec.name == what]
    return [epoch for epoch in engine.rebalance.epochs if epoch.topic_partition in what]


async def seek(engine: Engine, topic_partition: TopicPartition, to: SeekTo) -> int:
    """Move a partition to another position, and wait until it resumes there.

    Returns:
        The offset.

    Raises:
        StateError: The partition is not ours or moves away meanwhile, or *to* is invalid or outside the log.
        TransportError: The brokers did not report the position.
    """
    open_epoch(engine, topic_partition)
    start = await answered(engine, _offset_of(engine, topic_partition, to), f"where {to!r} is in {topic_partition}")
    done = engine.rebalance.seek(open_epoch(engine, topic_partition), start)
    fields = partition_fields("seek", topic_partition, offset=start)
    logger.warning("%s goes on at offset %d: the application asked for %r", topic_partition, start, to, extra=fields)
    await asyncio.shield(done)
    return start


async def _offset_of(engine: Engine, topic_partition: TopicPartition, to: SeekTo) -> int:
    client = engine.rebalance.client
    log = (await client.log_ranges([topic_partition])).get(topic_partition)
    if log is None:
        raise TransportError(f"the brokers did not tell where {topic_partition} begins and ends: no leader answers")
    match to:
        case "beginning":
            return log.start
        case "end":
            return log.end
        case int() if not isinstance(to, bool):
            if log.start <= to <= log.end:
                return to
            raise StateError(
                f"seek of {topic_partition} to offset {to} was refused: its log is from {log.start} to {log.end}; "
                "'beginning' and 'end' are where these are by then"
            )
        case dt.datetime() if to.tzinfo is not None:
            return await _offset_at(engine, topic_partition, to.timestamp(), log.end)
        case float() if 0 <= to < float("inf"):
            return await _offset_at(engine, topic_partition, to, log.end)
    raise StateError(
        f"seek of {topic_partition} to {to!r} was refused: expected an offset (int), a datetime with its time zone, "
        "seconds since the epoch (float), 'beginning' or 'end'"
    )


async def _offset_at(engine: Engine, topic_partition: TopicPartition, timestamp: float, end: int) -> int:
    found = await engine.rebalance.client.offset_at(topic_partition, max(timestamp, 0.0))
    return end if found is None else found


async def answered(engine: Engine, asking: Awaitable[T], what: str) -> T:
    """Wait for an answer of the brokers, at most `commit_timeout`.

    Raises:
        TransportError: They did not report *what* in time.
    """
    timeout = engine.settings.commit_timeout
    try:
        with anyio.fail_after(timeout):
            return await asking
    except TimeoutError:
        raise TransportError(f"the brokers did not tell {what} within commit_timeout={timeout:g} s") from None


def open_epoch(engine: Engine, topic_partition: TopicPartition) -> Epoch:
    """The epoch of a partition that is certain to be ours.

    Raises:
        StateError: The partition is not ours, or not open now.
    """
    fetcher = engine.rebalance.fetchers.get(topic_partition)
    if fetcher is None:
        raise StateError(f"{topic_partition} is not assigned to this process: ask the one that has it")
    epoch = fetcher.epoch
    if not epoch.is_open or epoch.outside_log is not None:
        start = engine.rebalance.seeks.start_of(topic_partition)
        why = "is being handed over or looked into" if start is None else f"is on its way to offset {start}"
        raise StateError(f"{topic_partition} {why} now: try again when it goes on")
    return epoch


def assigned_partitions(engine: Engine, topic: str, partition: int | None) -> list[TopicPartition]:
    """The partitions of a topic that this process owns, or only the given one.

    Raises:
        StateError: It owns none of the topic, or not the given one.
    """
    ours = [epoch.topic_partition for epoch in engine.rebalance.epochs if epoch.topic_partition.topic == topic]
    meant = [name for name in ours if partition in (None, name.partition)]
    if not meant:
        what = f"partition {topic}/{partition}" if partition is not None else f"partition of topic {topic!r}"
        raise StateError(f"no {what} is assigned to this process: pause it in the process that has it")
    return meant


def handler_name(engine: Engine, name: str) -> str:
    """Return the name of a handler unchanged.

    Raises:
        StateError: No handler has this name.
    """
    names = [handler.spec.name for handler in engine.handlers]
    if name not in names:
        raise StateError(f"there is no handler {name!r}: the app has {', '.join(names)}")
    return name
