"""Snapshots of the engine, safe to take from any thread: statistics, and explanations of stuck partitions."""

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aioshard.core.commit_metadata import MOST_UNITS
from aioshard.core.parking import NEVER
from aioshard.core.recourse import DeadLetter, Park
from aioshard.core.shown_keys import shown
from aioshard.engine.counts import TopicCounts
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.handler import Running
from aioshard.engine.insight.doctor import (
    Ward,
    diagnose,
    diagnose_partition,
    in_words,
    line_of,
    ready_anyway,
    restart_cures,
    trouble_of,
)
from aioshard.engine.insight.stack import stack_of
from aioshard.engine.outcomes import Block
from aioshard.engine.runtime import Engine
from aioshard.engine.worker import Worker
from aioshard.observe import (
    FailedRecord,
    HandlerLoad,
    HandlerStatistics,
    HotShard,
    ParkedKey,
    PartitionStatistics,
    Pause,
    Statistics,
    TopicStatistics,
    WorkerRun,
    Workload,
)
from aioshard.records import TopicPartition

__all__ = ["explain", "explain_partition", "statistics", "workload"]


def statistics(engine: Engine, group_id: str, client: str = "") -> Statistics:
    """Take a snapshot of the statistics; safe to call from any thread."""
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
    """Return the age of the oldest incomplete record; None if nothing is in flight but records are left to read."""
    if oldest is not None:
        written = oldest.record.timestamp
        return max(time.time() - written, 0.0) if written >= 0.0 else None  # without a timestamp it is -1 ms
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
    """Return the deliveries that a worker still runs although they were cancelled or their partition is lost."""
    if worker.cancelled:
        return worker.deliveries
    return [delivery for delivery in worker.deliveries if delivery.epoch.gate is Gate.ENDED]


# In words -------------------------------------------------------------------------------------


def explain(engine: Engine, *, show_keys: bool) -> str:
    """Explain in sentences why each partition does not advance; safe to call from any thread.

    Args:
        engine: The running engine.
        show_keys: Whether record keys may be shown; they may be personal data.
    """
    return in_words(diagnose(engine, show_keys=show_keys))


def explain_partition(engine: Engine, epoch: Epoch, *, show_keys: bool) -> str:
    """Explain on one line, for the log, why a partition does not advance."""
    return line_of(diagnose_partition(engine, epoch, show_keys=show_keys))


_MOST = 50
"""Maximum number of entries of each kind."""


def workload(engine: Engine, *, show_keys: bool, most: int = _MOST) -> Workload:
    """Take a snapshot of the work inside the handlers; safe to call from any thread.

    Args:
        engine: The running engine.
        show_keys: Whether keys may be shown; they may be personal data.
        most: Maximum number of entries of each kind.
    """
    now = engine.clock()
    looks = [_Look(running, engine, now, show_keys=show_keys, most=most) for running in engine.handlers]
    return Workload(
        handlers=tuple(look.load for look in looks),
        workers=tuple(heapq.nlargest(most, (run for look in looks for run in look.runs), key=lambda run: run.seconds)),
        busy=sum(look.busy for look in looks),
        shards=tuple(heapq.nlargest(most, (hot for look in looks for hot in look.hot), key=lambda hot: hot.waiting)),
        deep=sum(look.deep for look in looks),
        failed=tuple(heapq.nsmallest(most, (one for look in looks for one in look.failed), key=_worst_first)),
        failing=sum(look.failing for look in looks),
        parked=tuple([key for look in looks for key in look.parked][:most]),
        parked_keys=sum(look.load.parked_keys for look in looks),
        pauses=tuple(_pauses(engine)),
    )


def _worst_first(failed: FailedRecord) -> tuple[bool, float]:
    return failed.state != "halted", -failed.since


def _pauses(engine: Engine) -> Iterator[Pause]:
    for what, why in tuple(engine.pauses.items()):
        if isinstance(what, TopicPartition):
            yield Pause(what.topic, what.partition, None, why)
        else:
            yield Pause(None, None, what, why)


class _Busy(NamedTuple):
    worker: Worker
    first: Delivery
    records: int


class _Look:
    """Snapshot of one handler."""

    def __init__(self, running: Running, engine: Engine, now: float, *, show_keys: bool, most: int) -> None:
        self._running = running
        self._name = running.spec.name
        self._now = now
        self._show_keys = show_keys
        self._most = most
        self._ward = Ward(running, engine.since, now, show_keys=show_keys)
        busy = list(self._find_busy())
        self.busy = len(busy)
        self.runs = [self._run(one) for one in heapq.nsmallest(most, busy, key=lambda one: one.worker.started)]
        self.hot, self.deep = self._find_hot()
        blocked = [(one, one.block) for part in running.feed.shards for one in part.blocked if one.block is not None]
        self.failing = len(blocked)
        worst = heapq.nsmallest(most, blocked, key=lambda one: (not one[1].halted, one[1].since))
        self.failed = [self._failed(delivery, block) for delivery, block in worst]
        self.parked = list(self._find_parked())
        self.load = self._load()

    def _load(self) -> HandlerLoad:
        spec, parking = self._running.spec, self._running.parking
        policy = spec.on_failure
        lots = [] if parking is None else list(parking.lots)
        return HandlerLoad(
            name=spec.name,
            on_failure=_policy_in_words(policy),
            side_topic=policy.topic if isinstance(policy, DeadLetter | Park) else None,
            fixed_shards=spec.shards,
            adapts=self._running.adapting is not None,
            queued=sum(shards.unseen for shards in self._running.feed.shards),
            parked_records=sum(len(lot.keys) for lot in lots),
            parked_keys=sum(lot.keys.keys for lot in lots),
        )

    # Workers ----------------------------------------------------------------------------

    def _find_busy(self) -> Iterator[_Busy]:
        for worker in tuple(self._running.workers):
            deliveries = tuple(worker.deliveries)
            if deliveries:
                yield _Busy(worker, deliveries[0], len(deliveries))

    def _run(self, busy: _Busy) -> WorkerRun:
        worker, delivery, records = busy
        place = stack_of(worker.running).place
        detour = delivery.detour
        return WorkerRun(
            handler=self._name,
            worker=worker.name,
            topic=delivery.record.topic,
            partition=delivery.record.partition,
            offset=delivery.record.offset,
            records=records,
            key=self._ward.key_of(delivery),
            doing="runs the handler" if detour is None else detour.purpose,
            seconds=max(self._now - worker.started, 0.0),
            cancelled=worker.cancelled,
            place=None if place is None else str(place),
        )

    # Shards -----------------------------------------------------------------------------

    def _find_hot(self) -> tuple[list[HotShard], int]:
        feed = self._running.feed
        if self._running.spec.shards is not None:
            depths: list[tuple[int, Any]] = [(shards.unseen, number) for number, shards in enumerate(feed.shards)]
        else:
            depths = feed.shards[0].depths()
        deep = [one for one in depths if one[0]]
        hottest = heapq.nlargest(self._most, deep, key=lambda one: one[0])
        return [self._hot(waiting, key) for waiting, key in hottest], len(deep)

    def _hot(self, waiting: int, key: Any) -> HotShard:
        owner = self._ward.owner(key)
        fixed = self._running.spec.shards is not None
        if owner is None:
            shard = str(key) if fixed else shown(key, show_keys=self._show_keys)
            return HotShard(self._name, None, shard, waiting, "queued", None, None, None)
        block = owner.block
        state = "running" if block is None else "halted" if block.halted else "retrying"
        record = owner.record
        return HotShard(
            self._name,
            self._ward.key_of(owner),
            self._ward.shard_of(owner),
            waiting,
            state,
            record.topic,
            record.partition,
            record.offset,
        )

    # Failures ---------------------------------------------------------------------------

    def _failed(self, delivery: Delivery, block: Block) -> FailedRecord:
        due = self._running.feed.shards_of(delivery).due(delivery)
        record = delivery.record
        return FailedRecord(
            handler=self._name,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=self._ward.key_of(delivery),
            state="halted" if block.halted else "retrying" if delivery.detour is None else "detour",
            attempts=delivery.failures,
            most_attempts=self._running.spec.retry.attempts,
            since=max(self._now - block.since, 0.0),
            due=None if due is None else max(due - self._now, 0.0),
            error=block.error,
            waiting=self._ward.behind(delivery),
        )

    def _find_parked(self) -> Iterator[ParkedKey]:
        parking, left = self._running.parking, self._most
        if parking is None:
            return
        at = time.time()
        for lot in tuple(parking.lots):
            for entry in lot.keys.heads(left):
                left -= 1
                failure, waits = lot.failures.get(entry.key), lot.keys.waits(entry.key)
                topic, partition = lot.source.topic_partition
                yield ParkedKey(
                    handler=self._name,
                    stored_in=parking.policy.topic,
                    topic=topic,
                    partition=partition,
                    offset=entry.offset,
                    key=None if entry.alone else shown(_record_key(entry.key, topic), show_keys=self._show_keys),
                    replays=entry.replays,
                    due=max(entry.due - at, 0.0) if waits and entry.due < NEVER else None,
                    running=not waits,
                    failed_at=None if failure is None else failure.failed_at,
                    error=None if failure is None else f"{failure.error}: {failure.message}",
                )


def _record_key(identity: object, topic: str) -> object:
    """Reduce a shard key `(topic, key)` to the record key, so that it is named as everywhere else."""
    match identity:
        case (str(within), key) if within == topic:
            return key
        case _:
            return identity


def _policy_in_words(policy: object) -> str:
    match policy:
        case DeadLetter():
            return "dead letter"
        case Park():
            return "park"
        case _:
            return str(policy)
