"""What the engine is doing, read from any thread: statistics, and an explanation of what stands still."""

import functools
import sysconfig
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import CoroutineType, FrameType
from typing import TypeVar

from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.handler import Running
from aioshard.engine.runtime import Engine
from aioshard.engine.worker import Worker
from aioshard.observe import HandlerStatistics, PartitionStatistics, Statistics

__all__ = ["explain", "explain_partition", "location_of", "statistics"]

T = TypeVar("T")

_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen", "uvloop")


def _steady(read: Callable[[], T]) -> T:
    """Read what the event loop may be changing: again when it changed under the iteration.

    Reading does not go through the loop, because a handler that blocks it is what a reader may want to
    find out.
    """
    for _ in range(100):
        try:
            return read()
        except (RuntimeError, KeyError, IndexError):
            continue
    return read()


def statistics(engine: Engine, group_id: str) -> Statistics:
    """A snapshot; safe to call from any thread."""
    now = engine.clock()
    transport = engine.transport
    member_id = transport.membership().member_id if transport is not None else ""
    return Statistics(
        state=engine.state,
        group_id=group_id,
        member_id=member_id or None,
        rebalances=engine.rebalance.rebalances,
        commits=engine.committer.commits,
        commit_failures=engine.committer.failures,
        replayed=engine.pump.replayed + sum(running.counters.replayed for running in engine.handlers),
        buffered_records=engine.buffer.records,
        buffered_bytes=engine.buffer.bytes,
        client_losses=engine.client_losses,
        trouble=_trouble(engine, now),
        partitions=tuple(
            _steady(functools.partial(_partition, engine, epoch, now))
            for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
        ),
        handlers=tuple(_handler(running) for running in engine.handlers),
    )


def _trouble(engine: Engine, now: float) -> str | None:
    if engine.trouble is not None:
        return f"no Kafka client for {now - engine.trouble_since:.0f} s: {engine.trouble}"
    standstill = engine.standstill.sentence(now)
    if standstill is not None:
        return standstill
    if engine.producer.trouble is not None:
        return engine.producer.trouble
    committer = engine.committer
    if committer.trouble is not None:
        return f"commits have not been acknowledged for {now - committer.trouble_since:.0f} s: {committer.trouble}"
    return None


def _partition(engine: Engine, epoch: Epoch, now: float) -> PartitionStatistics:
    transport = engine.transport
    tracker = epoch.tracker
    committable = tracker.committable
    end = transport.end_offset(epoch.topic_partition) if transport is not None else None
    if end is not None:
        # The client learns the end with a fetch, and a fetch that found nothing new may be old.
        end = max(end, tracker.position)
    base = committable if epoch.acknowledged is None else epoch.acknowledged
    oldest = tracker.oldest
    return PartitionStatistics(
        topic=epoch.topic_partition.topic,
        partition=epoch.topic_partition.partition,
        epoch=epoch.number,
        position=tracker.position,
        committed=epoch.acknowledged,
        committable=committable,
        end_offset=end,
        lag=None if end is None else max(end - base, 0),
        incomplete=len(tracker),
        buffered_records=epoch.held_usage.records,
        buffered_bytes=epoch.buffered_bytes,
        paused=_why_paused(engine, epoch, now),
        oldest_incomplete_age=None if oldest is None else max(now - oldest.arrived, 0.0),
    )


def _why_paused(engine: Engine, epoch: Epoch, now: float) -> str | None:
    if epoch.gate is Gate.PAUSED:
        return "; ".join(epoch.pauses.values())
    if epoch.gate is not Gate.OPEN:
        if engine.state == "draining":
            return "the app is draining"
        return "the group is rebalancing, or the partition's position is not confirmed yet"
    return epoch.fault(now) or engine.admission.reason(epoch.topic_partition)


def _handler(running: Running) -> HandlerStatistics:
    shards = running.feed.shards
    counters = running.counters
    busy = [worker for worker in running.workers if worker.deliveries]
    return HandlerStatistics(
        name=running.spec.name,
        topics=running.spec.topics if running.spec.pattern is None else (*running.spec.topics, running.spec.pattern),
        concurrency=len(running.workers),
        busy=len(busy),
        shards=len(shards) if running.spec.shards is not None else len(shards[0]),
        processed=counters.processed,
        retried=counters.retried,
        skipped=counters.skipped,
        dead_lettered=counters.dead_lettered,
        parked=counters.parked,
        halted=sum(len(part.halted) for part in shards),
        outliving=tuple(repr(delivery) for worker in busy for delivery in _outliving(worker)),
    )


def _outliving(worker: Worker) -> Sequence[Delivery]:
    """What a worker still runs although it was cancelled, or is not ours any more."""
    if worker.cancelled:
        return worker.deliveries
    return [delivery for delivery in worker.deliveries if delivery.epoch.gate is Gate.ENDED]


# In words -------------------------------------------------------------------------------------


def explain(engine: Engine, *, show_keys: bool) -> str:
    """Why each partition does not advance, in sentences; safe to call from any thread.

    Args:
        engine: The running engine.
        show_keys: Whether record keys may be shown; they may be personal data.
    """
    now = engine.clock()
    lines = [f"The app is {engine.state}."]
    trouble = _trouble(engine, now)
    if trouble is not None:
        lines.append(f"Trouble: {trouble}.")
    if not engine.rebalance.epochs:
        lines.append("No partition is assigned to this process.")
    lines += [
        _steady(functools.partial(explain_partition, engine, epoch, now, show_keys=show_keys))
        for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
    ]
    for worker in engine.workers:
        lines += [
            f"Record {delivery!r} was cancelled or is no longer ours and still runs, for {now - worker.started:.1f} s, "
            f"at {location_of(worker.running)}; its shard key waits for it."
            for delivery in _outliving(worker)
        ]
    return "\n".join(lines) + "\n"


def explain_partition(engine: Engine, epoch: Epoch, now: float, *, show_keys: bool) -> str:
    """Why one partition does not advance, in a sentence or two."""
    tracker = epoch.tracker
    oldest = tracker.oldest
    paused = _why_paused(engine, epoch, now)
    pause = f" Paused: {paused}." if paused else ""
    if oldest is None:
        state = f"nothing is incomplete, position {tracker.position}, committed {epoch.acknowledged}"
        return f"{epoch.topic_partition}: {state}.{pause}"
    key = repr(oldest.record.key) if show_keys else "hidden (show_keys=False)"
    where = _where(engine.workers, oldest, now)
    # The one that runs or comes next; of a record that has halted, its last.
    halted = oldest.block is not None and oldest.block.halted
    attempt = max(oldest.failures, 1) if halted else oldest.failures + 1
    return (
        f"{epoch.topic_partition}: committable offset {tracker.committable}, {len(tracker)} record(s) incomplete. "
        f"The oldest is offset {oldest.offset} (key {key}, attempt {attempt}, in hand for "
        f"{now - oldest.arrived:.1f} s): {where}.{pause}"
    )


def _where(workers: Iterable[Worker], delivery: Delivery, now: float) -> str:
    for worker in workers:
        if delivery in worker.deliveries:
            if delivery.detour is not None:
                return f"{delivery.detour.purpose}, for {now - worker.started:.1f} s"
            return f"it has been running for {now - worker.started:.1f} s, at {location_of(worker.running)}"
    block = delivery.block
    if delivery.offset in delivery.epoch.shed:
        return "it was given back to make room, because its partition could not advance, and is fetched again"
    if block is None:
        return "it waits for its turn"
    if block.halted:
        return (
            f"it halted {now - block.since:.1f} s ago after {delivery.failures} attempt(s) with {block.error}; "
            "nothing is committed past it and its shard waits"
        )
    return f"it waits for its next attempt; the last one failed {now - block.since:.1f} s ago with {block.error}"


def location_of(running: Awaitable[object] | None) -> str:
    """`file:line` of the await in which a handler hangs: the innermost one outside the standard library."""
    best = "an unknown place"
    awaited: object = running
    while awaited is not None:
        frame = _frame_of(awaited)
        if frame is not None and not frame.f_code.co_filename.startswith(_STANDARD_LIBRARY):
            best = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return best


def _frame_of(awaited: object) -> FrameType | None:
    if isinstance(awaited, CoroutineType):
        return awaited.cr_frame
    frame: FrameType | None = getattr(awaited, "gi_frame", None)
    return frame
