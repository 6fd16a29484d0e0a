"""Snapshots of the engine, safe to take from any thread: statistics and workload."""

import dataclasses
import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aioshard.core.on_failure import OnFailure, Park
from aioshard.core.parking import NEVER
from aioshard.core.sharding import shown
from aioshard.engine.counts import TopicCounts
from aioshard.engine.diagnosis import HandlerSnapshot, failure_of, outlives, trouble_of
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.partition import Partition
from aioshard.engine.runtime import Engine
from aioshard.engine.watch import Watch
from aioshard.observe import (
    HandlerStatistics,
    IncompleteRecord,
    ParkedKey,
    PartitionStatistics,
    Pause,
    Statistics,
    TopicStatistics,
    Workload,
)
from aioshard.records import TopicPartition


def statistics(watch: Watch) -> Statistics:
    """Take a snapshot of the statistics; safe to call from any thread."""
    engine, loop = watch.engine, watch.loop
    now = engine.clock()
    blocked = None if loop is None else loop.blocked()
    running = Counter(delivery.epoch for worker in engine.workers for delivery in worker.deliveries)
    transport, committer = engine.transport, engine.committer
    commits, failed_commits = committer.durations.counts(), committer.failure_durations.counts()
    member_id = transport.membership().member_id if transport is not None else ""
    return Statistics(
        state=engine.state,
        group_id=engine.group_id,
        member_id=member_id or None,
        rebalances=engine.rebalance.rebalances,
        commits=commits.count,
        commit_failures=failed_commits.count,
        replayed=engine.replayed,
        already_done=engine.intake.already_done,
        buffered_records=engine.buffer.records,
        buffered_bytes=engine.buffer.bytes,
        client_losses=engine.client_losses,
        trouble=trouble_of(watch) or watch.hang.sentence(now) or blocked,
        partitions=tuple(
            _partition(engine, epoch, now, running[epoch])
            for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
        ),
        handlers=tuple(_handler(handler, engine.buffer.bounds.records) for handler in engine.handlers),
        rebalance_reports=engine.rebalance.log.reports(),
        loop_delays=None if loop is None else loop.delays.counts(),
        blocked=blocked,
        restart_cures=tuple(_restart_cures(watch, now)),
        client=engine.settings.client,
        rebalance_kinds=engine.rebalance.log.kinds(),
        commit_durations=commits,
        commit_failure_durations=failed_commits,
    )


def _restart_cures(watch: Watch, now: float) -> Iterator[str]:
    """Yield the reasons why a restart would help.

    Partitions stuck because of their data or of unavailable brokers are not among them: they would be stuck again
    after a restart.
    """
    loop, session_timeout = watch.loop, watch.engine.settings.session_timeout
    if loop is not None and loop.standing() > session_timeout and (blocked := loop.blocked()) is not None:
        yield f"{blocked}; that is longer than session_timeout={session_timeout:g} s"
    failure = failure_of(watch)
    if failure is not None:
        yield failure
    hangs = watch.hang.sentence(now)
    if hangs is not None and watch.engine.state in ("starting", "running"):
        yield hangs


def _partition(engine: Engine, epoch: Partition, now: float, running: int) -> PartitionStatistics:
    tracker = epoch.tracker
    committable = tracker.committable
    end = engine.log_ends.of(epoch)
    base = committable if epoch.acknowledged is None else epoch.acknowledged
    oldest = tracker.oldest
    buffered = epoch.held_usage
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
        buffered_records=buffered.records,
        buffered_bytes=epoch.buffered_bytes,
        paused=_why_paused(engine, epoch, now),
        oldest_incomplete_age=None if oldest is None else max(now - oldest.arrived, 0.0),
        fetched=tracker.arrived,
        in_flight=running,
        queued=max(buffered.records - running, 0),
    )


def _lag_seconds(oldest: Delivery | None, end: int | None, base: int) -> float | None:
    """Return the age of the oldest incomplete record; None if nothing is in flight but records are left to read."""
    if oldest is not None:
        written = oldest.record.timestamp
        return max(time.time() - written, 0.0) if written >= 0.0 else None  # without a timestamp it is -1 ms
    return 0.0 if end is not None and end <= base else None


def _why_paused(engine: Engine, epoch: Partition, now: float) -> str | None:
    if epoch.gate is Gate.PAUSED:
        return "; ".join(epoch.pauses.values())
    if epoch.gate is not Gate.OPEN:
        if engine.state == "draining":
            return "the app is draining"
        return "the group is rebalancing, or the partition's position is not confirmed yet"
    return epoch.fault(now) or engine.intake.reason(epoch)


def _handler(running: ActiveHandler, room: int) -> HandlerStatistics:
    shards = running.feed.shards
    topics = tuple(_topic(topic, counts) for topic, counts in sorted(running.counters.topics.items()))
    busy = [worker for worker in running.workers if worker.deliveries]
    outlived = ([run for run in tuple(worker.deliveries) if outlives(worker, run)] for worker in busy)
    return HandlerStatistics(
        name=running.spec.name,
        topics=running.spec.topics if running.spec.pattern is None else (*running.spec.topics, running.spec.pattern),
        concurrency=running.concurrency,
        busy=len(busy),
        shards=len(shards) if running.spec.shards is not None else len(shards[0]),
        processed=sum(topic.processed for topic in topics),
        retried=sum(topic.retried for topic in topics),
        skipped=sum(topic.skipped for topic in topics),
        dead_lettered=sum(topic.dead_lettered for topic in topics),
        parked=sum(topic.parked for topic in topics),
        halted=sum(len(part.halted) for part in shards),
        outliving=tuple(repr(runs[0]) for runs in outlived if runs),
        by_topic=topics,
        shard_capacity=room if running.spec.shards is None else max(room // running.spec.shards, 1),
        shard_depth=max(part.depth for part in shards),
        queued=sum(part.unseen for part in shards),
        on_failure=_policy(running.spec.on_failure),
        is_resizable=running.spec.shards is None and running.spec.adaptive is None,
    )


def _policy(policy: OnFailure) -> str:
    if isinstance(policy, str):
        return policy
    return f"parks in {policy.topic}" if isinstance(policy, Park) else f"dead letters to {policy.topic}"


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


# Workload -------------------------------------------------------------------------------------

_MOST = 50
"""Maximum number of entries of each kind."""


def workload(watch: Watch) -> Workload:
    """Take a snapshot of the work inside the handlers; safe to call from any thread."""
    handlers = [_HandlerWork(running, watch) for running in watch.engine.handlers]
    runs = [run for handler in handlers for run in handler.runs]
    hot = [record for handler in handlers for record in handler.hot]
    failed = [record for handler in handlers for record in handler.failed]
    return Workload(
        workers=tuple(heapq.nlargest(_MOST, runs, key=lambda run: run.since or 0.0)),
        busy=sum(handler.busy for handler in handlers),
        shards=tuple(heapq.nlargest(_MOST, hot, key=lambda record: record.waiting)),
        deep=sum(handler.deep for handler in handlers),
        failed=tuple(heapq.nsmallest(_MOST, failed, key=_worst_first)),
        failing=sum(handler.failing for handler in handlers),
        parked=tuple([key for handler in handlers for key in handler.parked][:_MOST]),
        parked_keys=sum(handler.parked_keys for handler in handlers),
        pauses=tuple(
            Pause(*what, None, why) if isinstance(what, TopicPartition) else Pause(None, None, what, why)
            for what, why in tuple(watch.engine.pauses.items())
        ),
    )


def _failed_first(delivery: Delivery) -> tuple[bool, float]:
    block = delivery.block
    return (True, math.inf) if block is None else (not block.halted, block.since)


def _worst_first(failed: IncompleteRecord) -> tuple[bool, float]:
    return failed.state != "halted", -(failed.since or 0.0)


class _HandlerWork:
    """Snapshot of the work inside one handler."""

    def __init__(self, running: ActiveHandler, watch: Watch) -> None:
        self._running = running
        self._show_keys = watch.engine.settings.show_keys
        self._snapshot = HandlerSnapshot(running, watch)
        runs = self._snapshot.runs
        self.busy = len(runs)
        longest = heapq.nsmallest(_MOST, runs, key=lambda worker: worker.started)
        self.runs = [self._describe(runs[worker]) for worker in longest]
        self.hot, self.deep = self._find_hot()
        blocked = [delivery for part in running.feed.shards for delivery in part.blocked]
        self.failing = len(blocked)
        self.failed = [self._describe(delivery) for delivery in heapq.nsmallest(_MOST, blocked, key=_failed_first)]
        self.parked = list(self._find_parked())
        partitions = [] if running.parking is None else list(running.parking.partitions)
        self.parked_keys = sum(parked.keys.keys for parked in partitions)

    def _describe(self, delivery: Delivery) -> IncompleteRecord:
        """Describe a record without the frames of its stack: the data of a dashboard must stay small."""
        record = self._snapshot.describe(delivery)
        stack = None if record.stack is None else dataclasses.replace(record.stack, frames=())
        return dataclasses.replace(record, stack=stack)

    def _find_hot(self) -> tuple[list[IncompleteRecord], int]:
        """Describe the records that occupy the deepest shards; count the shards in which records wait."""
        feed = self._running.feed
        if self._running.spec.shards is not None:
            depths: list[tuple[int, Any]] = [(shards.unseen, number) for number, shards in enumerate(feed.shards)]
        else:
            depths = feed.shards[0].depths()
        deep = [entry for entry in depths if entry[0]]
        hottest = heapq.nlargest(_MOST, deep, key=lambda entry: entry[0])
        owners = [(waiting, self._snapshot.owners.get(key)) for waiting, key in hottest]
        hot = [dataclasses.replace(self._describe(owner), waiting=waiting) for waiting, owner in owners if owner]
        return hot, len(deep)

    def _find_parked(self) -> Iterator[ParkedKey]:
        parking, room = self._running.parking, _MOST
        if parking is None:
            return
        unix_time = time.time()
        for parked in tuple(parking.partitions):
            for entry in parked.keys.heads(room):
                room -= 1
                failure, waits = parked.failures.get(entry.key), parked.keys.waits(entry.key)
                topic, partition = parked.source.topic_partition
                yield ParkedKey(
                    handler=self._running.spec.name,
                    stored_in=parking.policy.topic,
                    topic=topic,
                    partition=partition,
                    offset=entry.offset,
                    key=None if entry.alone else shown(_record_key(entry.key, topic), show_keys=self._show_keys),
                    replays=entry.replays,
                    due=max(entry.due - unix_time, 0.0) if waits and entry.due < NEVER else None,
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
