"""Controls of a running engine: release records, pause, resume, seek, wait for the log ends."""

import asyncio
import datetime as dt
from collections.abc import Awaitable, Collection
from typing import Literal, TypeVar

import anyio

from aioshard.core.text import encodable
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.log_fields import partition_fields, record_fields
from aioshard.engine.outcomes import Recovery
from aioshard.engine.partition import Partition
from aioshard.engine.pauses import APPLICATION
from aioshard.engine.runtime import Engine
from aioshard.errors import HaltedError, StateError, TransportError
from aioshard.log_fields import get_logger
from aioshard.records import TopicPartition

logger = get_logger("aioshard.engine.control")

T = TypeVar("T")

SeekTo = int | float | dt.datetime | Literal["beginning", "end"]
"""An offset; a time, as a datetime or as seconds since the epoch in a float; or an end of the log."""


def release(engine: Engine, topic_partition: TopicPartition, offset: int, recovery: Recovery | None) -> None:
    """Release a record that is halted or waits for its next attempt: it runs now.

    Args:
        engine: The engine of this process.
        topic_partition: Partition of the record.
        offset: Offset of the record.
        recovery: The recovery to take; None runs the handler again, with all its attempts.

    Raises:
        StateError: The record is not incomplete in this process, or needs no release.
    """
    delivery = _blocked(engine, topic_partition, offset)
    handler = engine.handlers.of(topic_partition.topic)
    is_parked = delivery.epoch.topic_partition != topic_partition
    if recovery is not None and handler.parking is not None and is_parked:
        recovery = handler.parking.drop
    delivery.release(recovery)
    logger.warning(
        "record %r was released: %s",
        delivery,
        "its handler runs again" if recovery is None else recovery.purpose,
        extra=record_fields("released", delivery),
    )
    handler.sharder.shards_of(delivery).unblock(delivery)


def _blocked(engine: Engine, topic_partition: TopicPartition, offset: int) -> Delivery:
    """Return the delivery of a record that is halted or waits for its next attempt.

    Raises:
        StateError: The record is not incomplete in this process, or needs no release.
    """
    delivery = _incomplete(_owned(engine, topic_partition), offset)
    if delivery is None:
        raise StateError(
            f"record {topic_partition}/{offset} is not incomplete here: it is done, or was not taken in yet; "
            "explain() names the halted records"
        )
    if delivery.block is None or delivery.offset in delivery.epoch.evicted:
        raise StateError(
            f"record {delivery!r} is neither halted nor waiting for its next attempt: it needs no release; if its run "
            "hangs, cancel_run() ends the attempt"
        )
    return delivery


def _incomplete(partition: Partition, offset: int) -> Delivery | None:
    """Return the delivery of a record, also of a parked one that runs again; None if it is not incomplete."""
    delivery = partition.tracker.incomplete.get(offset)
    if delivery is not None or partition.replays is None:
        return delivery
    for replay in partition.replays.tracker.values():
        if replay.record.offset == offset:
            return replay
    return None


def stop_run(engine: Engine, topic_partition: TopicPartition, offset: int) -> None:
    """Cancel the run of a record; its attempt fails, and retries and the failure policy follow as usual.

    Raises:
        StateError: The record is not in flight in this process.
    """
    partition = _owned(engine, topic_partition)
    for worker in engine.handlers.of(topic_partition.topic).workers:
        for delivery in worker.deliveries:
            record = delivery.record
            is_same = record.offset == offset and record.topic_partition == topic_partition
            if is_same and delivery.epoch in partition.epochs:
                fields = record_fields("run_cancelled", delivery)
                logger.warning("the run of record %r is cancelled: it was requested", delivery, extra=fields)
                worker.stop_run()
                return
    raise StateError(
        f"record {topic_partition}/{offset} is not in flight here: see explain(); retry_now() and skip() are "
        "for records that halted or wait for their next attempt"
    )


def release_parked(engine: Engine, topic_partition: TopicPartition, offset: int) -> None:
    """Run the key of a parked record again now.

    Raises:
        StateError: The partition is not ours, or the record is not parked.
    """
    _owned(engine, topic_partition)
    parking = engine.handlers.of(topic_partition.topic).parking
    if parking is None or not parking.release(topic_partition, offset):
        raise StateError(
            f"record {topic_partition}/{offset} is not parked: 'aioshard park list' shows the parked records; "
            "app.retry_now() is for halted ones"
        )
    logger.warning(
        "record %s/%d was released: it and the parked records behind it run again",
        topic_partition,
        offset,
        extra=partition_fields("released", topic_partition, offset=offset),
    )


def pause(engine: Engine, what: Collection[TopicPartition | str], why: str) -> None:
    """Start no records of these partitions, and of the handlers with these names; running records continue.

    The pause lasts across rebalances, until `resume`.
    """
    why = encodable(str(why)) or "no reason was given"
    engine.pauses.add(what, why)
    for partition in _selected(engine, what):
        for epoch in partition.epochs:
            epoch.pause(APPLICATION, why)
        fields = partition_fields("paused", partition.topic_partition, why=why)
        logger.warning("%s is paused: %s", partition.topic_partition, why, extra=fields)


def resume(engine: Engine, what: Collection[TopicPartition | str]) -> None:
    """Undo `pause` for the same partitions and handlers."""
    engine.pauses.remove(what)
    for partition in _selected(engine, what):
        name = partition.topic_partition
        if engine.pauses.of(name) is not None:
            continue
        resumed = [epoch.resume(APPLICATION) for epoch in partition.epochs]
        if any(resumed):
            logger.warning("%s resumes: the application resumed it", name, extra=partition_fields("resumed", name))
            partition.sharder.reopen(partition)


def _selected(engine: Engine, what: Collection[TopicPartition | str]) -> list[Partition]:
    """Return the partitions that are named, or whose handler is."""
    selected = []
    for partition in engine.rebalance.partitions:
        name = partition.topic_partition
        if name in what or engine.handlers.of(name.topic).spec.name in what:
            selected.append(partition)
    return selected


async def seek(engine: Engine, topic_partition: TopicPartition, to: SeekTo) -> int:
    """Move a partition to another position, and wait until it resumes there.

    Returns:
        The offset.

    Raises:
        StateError: The partition is not ours or moves away meanwhile, or *to* is invalid or outside the log.
        TransportError: The brokers did not report the position.
    """
    open_partition(engine, topic_partition)
    looked_up = _offset_of(engine, topic_partition, to)
    start = await answered(engine, looked_up, f"the offset of {to!r} in {topic_partition}")
    # It may have left meanwhile.
    done = engine.rebalance.seek(open_partition(engine, topic_partition), start)
    fields = partition_fields("seek", topic_partition, offset=start)
    logger.warning("%s moves to offset %d: the application requested %r", topic_partition, start, to, extra=fields)
    await asyncio.shield(done)
    return start


async def _offset_of(engine: Engine, topic_partition: TopicPartition, to: SeekTo) -> int:
    transport = engine.client.get()
    logs = await transport.log_ranges([topic_partition])
    log = logs.get(topic_partition)
    if log is None:
        raise TransportError(f"the brokers did not report where {topic_partition} begins and ends: no leader answers")
    if isinstance(to, dt.datetime) and to.tzinfo is not None:
        to = max(to.timestamp(), 0.0)
    match to:
        case "beginning":
            return log.start
        case "end":
            return log.end
        case int() if not isinstance(to, bool):
            if log.start <= to <= log.end:
                return to
            raise StateError(
                f"seek of {topic_partition} to offset {to} is impossible: its log is from {log.start} to {log.end}; "
                "use 'beginning' or 'end' for its ends"
            )
        case float() if 0 <= to < float("inf"):
            offset = await transport.offset_at(topic_partition, to)
            return log.end if offset is None else offset
    raise StateError(
        f"seek of {topic_partition} to {to!r} is impossible: expected an offset (int), a datetime with its time zone, "
        "seconds since the epoch (float), 'beginning' or 'end'"
    )


async def answered(engine: Engine, request: Awaitable[T], what: str) -> T:
    """Wait for a response of the brokers, at most `commit_timeout`.

    Raises:
        TransportError: They did not report *what* in time.
    """
    timeout = engine.settings.commit_timeout
    try:
        with anyio.fail_after(timeout):
            return await request
    except TimeoutError:
        raise TransportError(f"the brokers did not report {what} within commit_timeout={timeout:g} s") from None


def open_partition(engine: Engine, topic_partition: TopicPartition) -> Partition:
    """Return a partition that is certain to be ours.

    Raises:
        StateError: The partition is not ours, or not open now.
    """
    partition = _owned(engine, topic_partition)
    if not partition.is_open or partition.outside_log is not None:
        seek = engine.rebalance.seeks.get(topic_partition)
        why = "is being handed over or looked up now" if seek is None else seek.progress
        raise StateError(f"{topic_partition} {why}: try again when it is open")
    return partition


def _owned(engine: Engine, topic_partition: TopicPartition) -> Partition:
    partition = engine.rebalance.partitions.get(topic_partition)
    if partition is None:
        raise StateError(f"{topic_partition} is not assigned to this process: ask the process that owns it")
    return partition


def assigned_partitions(engine: Engine, topic: str, partition: int | None) -> list[TopicPartition]:
    """The partitions of a topic that this process owns, or only the given one.

    Raises:
        StateError: It owns none of the topic, or not the given one.
    """
    names = [owned.topic_partition for owned in engine.rebalance.partitions]
    selected = [name for name in names if name.topic == topic and partition in (None, name.partition)]
    if not selected:
        what = f"partition {topic}/{partition}" if partition is not None else f"partition of topic {topic!r}"
        raise StateError(f"no {what} is assigned to this process: pause it in the process that owns it")
    return selected


def set_topics(engine: Engine, handler: ActiveHandler, topics: tuple[str, ...]) -> None:
    """Replace the topics of a handler, and so the subscription of the client, in one step.

    A removed topic keeps its handler while this process has a partition of it, and never gets another handler: two
    handlers would run records of one key at the same time.

    Raises:
        StateError: Another handler has read one of the topics, and may still have a partition of it.
        ClientLostError: The client is being replaced. Nothing has changed.
    """
    for other in engine.handlers:
        read = other.counters.topics.keys() & set(topics)
        if read and other is not handler:
            raise StateError(
                f"topic {min(read)!r} was read by handler {other.spec.name!r} of this process: restart the app to give "
                f"it to handler {handler.spec.name!r}"
            )
    before = handler.spec
    handler.spec = before._replace(topics=topics)
    try:
        engine.client.get().subscribe(*engine.handlers.subscription())
    except BaseException:
        handler.spec = before
        raise
    engine.rebalance.handlers_changed()


def handler_name(engine: Engine, name: str) -> str:
    """Return the name of a handler unchanged.

    Raises:
        StateError: No handler has this name.
    """
    names = [handler.spec.name for handler in engine.handlers]
    if name not in names:
        raise StateError(f"unknown handler {name!r}: the app has {', '.join(names)}")
    return name


async def caught_up(engine: Engine, interval: float = 0.05) -> None:
    """Wait until all records up to the ends seen at the start are complete.

    Without partitions, wait until it is certain that those of dead members went to others.

    Args:
        engine: The engine that consumes.
        interval: Seconds between checks.

    Raises:
        HaltedError: The records that are left are halted, or wait behind halted ones.
    """
    began = engine.clock()
    while True:
        if engine.failed.done():
            engine.failed.result()
        rebalance = engine.rebalance
        if rebalance.all_resumed and not any(_is_behind(engine, owned) for owned in rebalance.partitions):
            transport = engine.client.transport
            if rebalance.partitions or (transport and engine.clock() - began >= transport.inherits_within):
                return
        halted = halted_of(engine)
        if halted and nothing_moves(engine):
            raise HaltedError(repr(delivery) for delivery in halted)
        await asyncio.wait([engine.failed], timeout=interval)


def _is_behind(engine: Engine, partition: Partition) -> bool:
    """Whether records of a partition up to the end seen at the start are not complete."""
    return partition.tracker.committable < engine.rebalance.ends[partition.topic_partition]


def halted_of(engine: Engine) -> list[Delivery]:
    """Deliveries that occupy their shard until they are released."""
    return [delivery for handler in engine.handlers for shards in handler.shards for delivery in shards.halted]


def nothing_moves(engine: Engine) -> bool:
    """Whether nothing runs, and nothing can start or be taken in."""
    if not engine.rebalance.all_resumed or engine.handlers.in_flight():
        return False
    if not all(shards.at_rest for handler in engine.handlers for shards in handler.shards):
        return False
    return not any(_brings_more(engine, partition) for partition in engine.rebalance.partitions)


def _brings_more(engine: Engine, partition: Partition) -> bool:
    """Whether records of a partition are on their way to a shard, or can be taken in."""
    if partition.has_unsharded:
        return True
    is_read = partition.tracker.position >= engine.rebalance.ends[partition.topic_partition]
    return not is_read and bool(engine.intake.allowance(partition.topic_partition).records)
