"""What the engine is doing, read from any thread: statistics, and an explanation of what stands still."""

import time
from collections import Counter
from collections.abc import Sequence

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.handler import Running
from aioshard.engine.insight.doctor import diagnose, diagnose_partition, in_words, line_of, trouble_of
from aioshard.engine.insight.process import ready_anyway, restart_cures
from aioshard.engine.runtime import Engine
from aioshard.engine.worker import Worker
from aioshard.observe import HandlerStatistics, PartitionStatistics, Statistics, TopicStatistics

__all__ = ["explain", "explain_partition", "statistics"]


def statistics(engine: Engine, group_id: str, client: str = "") -> Statistics:
    """A snapshot; safe to call from any thread."""
    now, watch = engine.clock(), engine.loop_watch
    blocked = None if watch is None else watch.blocked()
    running = Counter(delivery.epoch for worker in engine.workers for delivery in worker.deliveries)
    transport = engine.transport
    member_id = transport.membership().member_id if transport is not None else ""
    return Statistics(
        state=engine.state,
        group_id=group_id,
        member_id=member_id or None,
        rebalances=engine.rebalance.rebalances,
        commits=engine.committer.commits,
        commit_failures=engine.committer.failures,
        replayed=engine.replayed,
        already_done=engine.pump.already_done,
        buffered_records=engine.buffer.records,
        buffered_bytes=engine.buffer.bytes,
        client_losses=engine.client_losses,
        trouble=trouble_of(engine, now) or engine.liveness.watch.sentence(now) or blocked,
        partitions=tuple(
            _partition(engine, epoch, now, running[epoch])
            for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
        ),
        handlers=tuple(_handler(handler, engine.buffer.bounds.records) for handler in engine.handlers),
        rebalance_reports=engine.rebalance.log.reports(),
        loop_delays=None if watch is None else watch.delays.counts(),
        blocked=blocked,
        ready_anyway=ready_anyway(engine, now),
        restart_cures=tuple(restart_cures(engine, now)),
        client=client,
        rebalance_kinds=engine.rebalance.log.kinds(),
        commit_durations=engine.committer.durations.counts(),
        commit_failure_durations=engine.committer.failure_durations.counts(),
    )


def _partition(engine: Engine, epoch: Epoch, now: float, running: int) -> PartitionStatistics:
    tracker = epoch.tracker
    committable = tracker.committable
    end = engine.log_ends.of(epoch)
    base = committable if epoch.acknowledged is None else epoch.acknowledged
    oldest = tracker.oldest
    held = epoch.held_usage
    return PartitionStatistics(
        topic=epoch.topic_partition.topic,
        partition=epoch.topic_partition.partition,
        epoch=epoch.number,
        position=tracker.position,
        committed=epoch.acknowledged,
        committable=committable,
        end_offset=end,
        lag=None if end is None else max(end - base, 0),
        lag_seconds=_lag_seconds(oldest, end, base),
        incomplete=len(tracker),
        buffered_records=held.records,
        buffered_bytes=epoch.buffered_bytes,
        paused=_why_paused(engine, epoch, now),
        oldest_incomplete_age=None if oldest is None else max(now - oldest.arrived, 0.0),
        noted=epoch.note_length / MOST_UNITS,
        fetched=tracker.arrived,
        in_flight=running,
        queued=max(held.records - running, 0),
    )


def _lag_seconds(oldest: Delivery | None, end: int | None, base: int) -> float | None:
    """How old the oldest incomplete record is; unknown where nothing is in hand, and something is left to read."""
    if oldest is not None:
        written = oldest.record.timestamp
        return max(time.time() - written, 0.0) if written >= 0.0 else None  # one without a timestamp has -1 ms
    return 0.0 if end is not None and end <= base else None


def _why_paused(engine: Engine, epoch: Epoch, now: float) -> str | None:
    if epoch.gate is Gate.PAUSED:
        return "; ".join(epoch.pauses.values())
    if epoch.gate is not Gate.OPEN:
        if engine.state == "draining":
            return "the app is draining"
        return "the group is rebalancing, or the partition's position is not confirmed yet"
    return epoch.fault(now) or engine.admission.reason(epoch.topic_partition)


def _handler(running: Running, room: int) -> HandlerStatistics:
    shards = running.feed.shards
    topics = tuple(_topic(topic, counts) for topic, counts in sorted(running.counters.topics.items()))
    busy = [worker for worker in running.workers if worker.deliveries]
    return HandlerStatistics(
        name=running.spec.name,
        topics=running.spec.topics if running.spec.pattern is None else (*running.spec.topics, running.spec.pattern),
        concurrency=running.staff.concurrency,
        busy=len(busy),
        shards=len(shards) if running.spec.shards is not None else len(shards[0]),
        processed=sum(topic.processed for topic in topics),
        retried=sum(topic.retried for topic in topics),
        skipped=sum(topic.skipped for topic in topics),
        dead_lettered=sum(topic.dead_lettered for topic in topics),
        parked=sum(topic.parked for topic in topics),
        halted=sum(len(part.halted) for part in shards),
        outliving=tuple(repr(first) for worker in busy for first in _outliving(worker)[:1]),
        by_topic=topics,
        shard_capacity=room if running.spec.shards is None else max(room // running.spec.shards, 1),
        shard_depth=max(part.depth for part in shards),
    )


def _topic(topic: str, counts: TopicCounts) -> TopicStatistics:
    return TopicStatistics(
        topic=topic,
        processed=counts.processed,
        retried=counts.retried,
        skipped=counts.skipped,
        dead_lettered=counts.dead_lettered,
        parked=counts.parked,
        durations=counts.durations.counts(),
        waits=counts.waits.counts(),
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
    return in_words(diagnose(engine, show_keys=show_keys))


def explain_partition(engine: Engine, epoch: Epoch, *, show_keys: bool) -> str:
    """Why one partition does not advance, in a line for the log."""
    return line_of(diagnose_partition(engine, epoch, show_keys=show_keys))
