"""Snapshots of the engine, safe to take from any thread: statistics, workload, and why partitions do not advance."""

import dataclasses
import functools
import heapq
import itertools
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from aioshard.core.options import OnFailure, Park
from aioshard.core.parking import NEVER
from aioshard.core.sharding import is_plain, shown
from aioshard.core.tail import Tail, tail_of
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.outcomes import Block
from aioshard.engine.partition import Partition
from aioshard.engine.runtime import APPLICATION, Engine
from aioshard.engine.stack import stack_of
from aioshard.engine.watch import Watch
from aioshard.engine.worker import Asked, Worker
from aioshard.observe import (
    Diagnosis,
    Finding,
    HandlerStatistics,
    IncompleteRecord,
    ParkedKey,
    PartitionDiagnosis,
    PartitionStatistics,
    Pause,
    RecordState,
    Sample,
    Stack,
    Statistics,
    TopicStatistics,
    Verdict,
    Workload,
)
from aioshard.records import TopicPartition, counted

_BRIEF = 0.05


def _for_seconds(since: float | None) -> str:
    """Return `" for 1.5 s"`, or an empty string if the duration is unknown."""
    if since is None:
        return ""
    return f" for {since:.1f} s" if since >= _BRIEF else " for a moment"


def _outlives(worker: Worker, delivery: Delivery) -> bool:
    """Return whether a run was cancelled, or its partition is gone, although it has not ended."""
    return bool(worker.cancelled) or delivery.epoch.gate is Gate.ENDED


class Cause(NamedTuple):
    """Reason why a record is incomplete."""

    state: RecordState
    since: float | None
    """Duration in seconds."""
    reason: str
    """Sentence without a subject: it follows the record's name."""
    what_to_do: str | None = None
    stack: Stack | None = None
    owner: Delivery | None = None
    """The record of its shard that it waits for."""


class HandlerSnapshot:
    """Snapshot of one handler's deliveries: which worker runs each of them, and which ones occupy shards."""

    def __init__(self, running: ActiveHandler, watch: Watch) -> None:
        """Take the snapshot; safe from any thread."""
        self.running = running
        self.shards = running.feed.shards
        self._watch = watch
        self._now = watch.engine.clock()
        self._show_keys = watch.engine.settings.show_keys
        self._workers: dict[Delivery, Worker] = {}
        self.runs: dict[Worker, Delivery] = {}
        """The busy workers, each with the first delivery that it runs."""
        for worker in running.workers:
            for delivery in tuple(worker.deliveries):
                self._workers[delivery] = worker
                self.runs.setdefault(worker, delivery)
        owning = [delivery for shards in self.shards for delivery in shards.owning]
        self.owners: dict[Hashable, Delivery] = {
            delivery.key: delivery for delivery in (*owning, *self._workers) if delivery.key is not None
        }
        """The delivery that occupies each shard; shards that are just changing are missing."""

    def describe(self, delivery: Delivery) -> IncompleteRecord:
        """Return everything known about an incomplete record."""
        cause, block, worker = self.cause_of(delivery), delivery.block, self._workers.get(delivery)
        over = delivery.recovery is not None or (block is not None and block.halted)
        record = delivery.record
        due = None if block is None else self.running.feed.shards_of(delivery).due(delivery)
        return IncompleteRecord(
            handler=self.running.spec.name,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=self.shown(record.key),
            shard=self._shard_of(delivery),
            age=max(self._now - delivery.arrived, 0.0),
            attempt=min(max(delivery.failures, 1) if over else delivery.failures + 1, self.running.spec.retry.attempts),
            attempts=self.running.spec.retry.attempts,
            state=cause.state,
            since=cause.since,
            reason=f"it {cause.reason}",
            what_to_do=cause.what_to_do,
            stack=cause.stack,
            due=None if due is None else max(due - self._now, 0.0),
            error=None if (failed := (cause.owner or delivery).block) is None else failed.error,
            waiting=self.behind(delivery),
            worker=None if worker is None else worker.name,
            records=1 if worker is None else len(worker.deliveries),
            waits_for=None if cause.owner is None else repr(cause.owner),
        )

    def depths(self) -> list[tuple[int, Hashable]]:
        """How many deliveries wait in each shard, with the shard's key."""
        if self.running.spec.shards is not None:
            return [(shards.unseen, number) for number, shards in enumerate(self.shards)]
        return self.shards[0].depths()

    def shown(self, key: object) -> str | None:
        """Format a key: itself with `show_keys`, otherwise its hash."""
        return shown(key, show_keys=self._show_keys)

    def behind(self, delivery: Delivery) -> int:
        """Count the deliveries waiting in a shard behind the delivery that occupies it; 0 for other deliveries."""
        if delivery.key is None or self.owners.get(delivery.key) is not delivery:
            return 0
        return self.running.feed.shards_of(delivery).behind(delivery)

    def _shard_of(self, delivery: Delivery) -> str | None:
        """Return the displayed shard of a delivery; None if it has none or it is the record key."""
        key, record = delivery.key, delivery.record
        if key is None or self.running.spec.shards is not None:
            return None if key is None else str(key)
        if is_plain(key) and key in (record.key, (record.topic, record.key)):
            return None
        if is_plain(key) and key == tuple(record.topic_partition):
            return str(record.topic_partition)
        return self.shown(key)

    # Causes ---------------------------------------------------------------------------

    def cause_of(self, delivery: Delivery) -> Cause:
        """Find out why a delivery is incomplete."""
        worker, epoch = self._workers.get(delivery), delivery.epoch
        if worker is not None:
            return self._running_now(delivery, worker)
        if delivery.offset in epoch.evicted:
            again = "is being fetched again" if epoch.fetching_again else "will be fetched again"
            return Cause(
                "evicted", None, f"was evicted to make room for others while its partition was stuck, and {again}"
            )
        if delivery.block is not None:
            return self._blocked(delivery, delivery.block)
        if epoch.gate and not epoch.may_start(delivery):
            why = "paused" if epoch.gate is Gate.PAUSED else "being revoked, or is not confirmed yet"
            return Cause("held", None, f"may not start: its partition is {why}")
        return self._in_line(delivery)

    def _in_line(self, delivery: Delivery) -> Cause:
        shards = self.running.feed.shards_of(delivery)
        if isinstance(shards, BatchShards) and (position := shards.position_of(delivery)) is not None:
            return Cause("collecting", self._now - delivery.arrived, position.removeprefix("it "))
        owner = None if delivery.key is None else self.owners.get(delivery.key)
        return self._behind(delivery, owner) if owner is not None and owner is not delivery else self._queued(delivery)

    def _running_now(self, delivery: Delivery, worker: Worker) -> Cause:
        ran, stack = self._now - worker.started, stack_of(worker.running)
        if delivery not in worker.deliveries:
            # Seen from another thread, where the stack may already be that of the next run.
            return Cause("running", 0.0, f"has just been run by handler {self.running.spec.name}")
        if _outlives(worker, delivery):
            return self._outliving(worker, ran, stack)
        if delivery.recovery is not None:
            failures = delivery.recovery_failures
            failed = f" (failed {counted(failures, 'time')} before)" if failures else ""
            advice = "check whether the brokers answer" if ran > 1 else None
            return Cause(
                "recovery", ran, f"is being recovered{_for_seconds(ran)}: {delivery.recovery.purpose}{failed}", advice
            )
        batch = f" in a batch of {len(worker.deliveries)} records" if len(worker.deliveries) > 1 else ""
        reason = f"has been running in handler {self.running.spec.name}{batch}{_for_seconds(ran)}{_place(stack)}"
        if stack.executing and stack.thread is None:
            advice = (
                "nothing else can run meanwhile: move the work to a thread or a process, with a plain 'def' handler, "
                "or to asyncio.to_thread"
            )
        elif worker.timeout is not None and worker.timeout > ran:
            advice = f"wait: the attempt times out in {worker.timeout - ran:.1f} s, and counts as failed then"
        else:
            advice = "find out what it waits for there; with timeout= on the handler, such an attempt ends as failed"
        return Cause("running", ran, reason, advice, stack)

    def _outliving(self, worker: Worker, ran: float, stack: Stack) -> Cause:
        cancelled_for = self._watch.lasts(worker, worker.started)
        ago = "" if cancelled_for is None else f" {cancelled_for:.1f} s ago"
        why = (
            f"its attempt exceeded timeout={worker.timeout:g} s"
            if worker.asked & Asked.TIME_OUT and worker.timeout is not None
            else "its partition was revoked or the app is stopping"
        )
        reason = f"was cancelled{ago} because {why}, but still runs{_for_seconds(ran)}{_place(stack)}; its shard waits"
        advice = (
            "a thread cannot be stopped: set a timeout on the calls that it makes"
            if stack.thread is not None
            else "let CancelledError propagate: a bare 'except', 'except BaseException' or a shield there suppresses it"
        )
        return Cause("outliving", ran, reason, f"{advice}; a restart of the process ends it", stack)

    def _blocked(self, delivery: Delivery, block: Block) -> Cause:
        ago = self._now - block.since
        call = f"({delivery.record.topic!r}, {delivery.record.partition}, {delivery.record.offset})"
        if block.halted:
            return Cause(
                "halted",
                ago,
                f"halted {ago:.1f} s ago after {counted(delivery.failures, 'attempt')} ({block.error}); nothing is "
                "committed past it, and its shard waits",
                f"fix the cause, then call app.retry_now{call}; or call app.skip{call} to complete it without "
                "processing; or deploy a fixed handler, which runs it again",
            )
        due = self.running.feed.shards_of(delivery).due(delivery)
        soon = "soon" if due is None else f"in {max(due - self._now, 0.0):.1f} s"
        if delivery.recovery is not None:
            return Cause(
                "recovery",
                ago,
                f"is incomplete because this failed {ago:.1f} s ago: {block.error}; the next try is {soon}",
                f"check that the topic exists, may be written to, and accepts a record of this size; or call "
                f"app.skip{call} to give the record up",
            )
        return Cause(
            "retrying",
            ago,
            f"waits for its next attempt, number {delivery.failures + 1} of {self.running.spec.retry.attempts}, "
            f"{soon}; the last one failed {ago:.1f} s ago with {block.error}",
            f"nothing if the failure is temporary; app.retry_now{call} runs it now",
        )

    def _behind(self, delivery: Delivery, owner: Delivery) -> Cause:
        whose = "" if owner.record.topic_partition == delivery.record.topic_partition else " of another partition"
        key = self.shown(owner.record.key)
        named = f"record {owner!r}{whose}" + ("" if key is None else f" (key {key})")
        cause = self.cause_of(owner)
        waits = "cannot run because {}" if cause.state == "halted" else "waits in its shard behind {}, which"
        return Cause("behind", None, f"{waits.format(named)} {cause.reason}", cause.what_to_do, cause.stack, owner)

    def _queued(self, delivery: Delivery) -> Cause:
        waited, count = self._now - delivery.arrived, len(self.running.workers)
        busy, pace = len(self.runs), self.running.pace
        if busy >= count:
            spec, (reason, stack) = self.running.spec, self._longest_run
            limit = "processes" if spec.run_in == "process" else "concurrency" if spec.shards is None else "shards"
            return Cause(
                "queued",
                waited,
                f"waits for its turn: all {count} workers of handler {spec.name} are busy; {reason}",
                f"raise {limit}= to run more of them concurrently, if the systems that they call can take it; or "
                "find out why the runs take so long",
                stack,
            )
        if pace is not None and (due := pace.due()):
            return Cause(
                "limited",
                waited,
                f"waits for the rate limit of its handler, rate_limit={pace.limit}; the next run starts in {due:.3g} s",
                "nothing if the rate is intended; otherwise raise rate_limit=",
            )
        return Cause("queued", waited, "waits for its turn, and starts next")

    @functools.cached_property
    def _longest_run(self) -> tuple[str, Stack]:
        """The longest run in words, with its stack; computed once, because many records may wait for a worker."""
        worker, record = min(self.runs.items(), key=lambda run: run[0].started)
        ran, stack = self._now - worker.started, stack_of(worker.running)
        return f"the longest run is that of record {record!r},{_for_seconds(ran)}{_place(stack)}", stack


def _place(stack: Stack) -> str:
    """Format a stack as `, at file:line in function, waiting in ...`."""
    if stack.place is None:
        return ""
    called = "" if stack.waits_in is None else f" in {stack.waits_in}"
    if stack.thread is not None:
        return f" in thread {stack.thread}, at {stack.place}{called}"
    if stack.executing:
        return f", at {stack.place}, which computes or blocks{called} without an await"
    return f", at {stack.place}" + (called and f", waiting{called}")


# Statistics -----------------------------------------------------------------------------------


def statistics(watch: Watch) -> Statistics:
    """Take a snapshot of the statistics; safe to call from any thread."""
    engine, loop = watch.engine, watch.loop
    now = engine.clock()
    blocked = None if loop is None else loop.blocked()
    running = Counter(delivery.epoch for worker in engine.workers for delivery in worker.deliveries)
    transport, committer = engine.transport, engine.committer
    heartbeat = None if transport is None else transport.last_heartbeat
    commits, failed_commits = committer.durations.counts(), committer.failure_durations.counts()
    return Statistics(
        state=engine.state,
        group_id=engine.group_id,
        member_id=None if transport is None else transport.membership().member_id or None,
        rebalances=engine.rebalance.rebalances,
        commits=commits.count,
        commit_failures=failed_commits.count,
        replayed=engine.replayed,
        already_done=engine.intake.already_done,
        buffered_records=engine.buffer.records,
        buffered_bytes=engine.buffer.bytes,
        client_losses=engine.client_losses,
        trouble=_trouble_of(watch) or watch.hang.sentence(now) or blocked,
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
        rebalance_seconds=engine.rebalance.log.seconds,
        catch_up_seconds=tail(watch).seconds,
        heartbeat_age=None if heartbeat is None else max(now - heartbeat, 0.0),
        commit_durations=commits,
        commit_failure_durations=failed_commits,
        transactions=committer.transactions(),
    )


def tail(watch: Watch) -> Tail:
    """Describe which partitions of this process finish last, as fast as in the last minute."""
    engine = watch.engine
    at, before = watch.lags[0] if watch.lags else (0.0, {})
    return tail_of(engine.lags(), before, engine.clock() - at)


def sample(watch: Watch) -> Sample:
    """Take a sample of the figures that the dashboard plots.

    It runs in the event loop, so it does not take all statistics: with 1,000 partitions they cost 60 ms.
    """
    engine, now = watch.engine, watch.engine.clock()
    lags = engine.lags()
    topics = [topic for handler in engine.handlers for topic in handler.counters.topics.values()]
    return Sample(
        at=time.time(),
        processed=sum(topic.processed for topic in topics),
        lag=sum(lags.values()) if lags else None,
        oldest_age=max(
            (now - oldest.arrived for epoch in engine.rebalance.epochs if (oldest := epoch.tracker.oldest) is not None),
            default=0.0,
        ),
        durations=tuple(map(sum, zip(*(topic.durations.counts().counts for topic in topics), strict=True))),
    )


def _restart_cures(watch: Watch, now: float) -> Iterator[str]:
    """Yield the reasons why a restart would help.

    Partitions stuck because of their data or of unavailable brokers are not among them: they would be stuck again
    after a restart.
    """
    loop, session_timeout = watch.loop, watch.engine.settings.session_timeout
    if loop is not None and loop.standing() > session_timeout and (blocked := loop.blocked()) is not None:
        yield f"{blocked}; that is longer than session_timeout={session_timeout:g} s"
    if (failure := _failure_of(watch)) is not None:
        yield failure
    hangs = watch.hang.sentence(now)
    if hangs is not None and watch.engine.state in ("starting", "running"):
        yield hangs


def _partition(engine: Engine, epoch: Partition, now: float, running: int) -> PartitionStatistics:
    tracker = epoch.tracker
    end = engine.log_end(epoch)
    base = epoch.lag_base
    oldest = tracker.oldest
    buffered = epoch.held_usage
    return PartitionStatistics(
        topic=epoch.topic_partition.topic,
        partition=epoch.topic_partition.partition,
        epoch=epoch.number,
        position=tracker.position,
        committed=epoch.acknowledged,
        committable=tracker.committable,
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
        held_back=epoch.held_back,
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
    topics = tuple(
        TopicStatistics(
            topic=topic,
            processed=counts.processed,
            retried=counts.retried,
            skipped=counts.skipped,
            dead_lettered=counts.dead_lettered,
            parked=counts.parked,
            durations=counts.durations.counts(),
            waits=counts.waits.counts(),
        )
        for topic, counts in sorted(running.counters.topics.items())
    )
    busy = [worker for worker in running.workers if worker.deliveries]
    outlived = ([run for run in tuple(worker.deliveries) if _outlives(worker, run)] for worker in busy)
    return HandlerStatistics(
        name=running.spec.name,
        topics=running.spec.topics if running.spec.pattern is None else (*running.spec.topics, running.spec.pattern),
        concurrency=len(running.workers),
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
        shard_capacity=running.spec.queue_size(room) or room,
        shard_depth=max(part.depth for part in shards),
        queued=sum(part.unseen for part in shards),
        on_failure=_policy(running.spec.on_failure),
    )


def _policy(policy: OnFailure) -> str:
    if isinstance(policy, str):
        return policy
    return f"parks in {policy.topic}" if isinstance(policy, Park) else f"dead letters to {policy.topic}"


# Workload -------------------------------------------------------------------------------------

_MOST = 50
"""Maximum number of entries of each kind."""


def workload(watch: Watch) -> Workload:
    """Take a snapshot of the work inside the handlers; safe to call from any thread."""
    snapshots = [HandlerSnapshot(running, watch) for running in watch.engine.handlers]
    runs = [(worker.started, snapshot, run) for snapshot in snapshots for worker, run in snapshot.runs.items()]
    deep = [(waiting, snapshot, key) for snapshot in snapshots for waiting, key in snapshot.depths() if waiting]
    deepest = heapq.nlargest(_MOST, deep, key=operator.itemgetter(0))
    blocked = [(snapshot, run) for snapshot in snapshots for shards in snapshot.shards for run in shards.blocked]
    parkings = [snapshot.running.parking for snapshot in snapshots if snapshot.running.parking is not None]
    return Workload(
        workers=tuple(
            _without_frames(snapshot.describe(run))
            for _, snapshot, run in heapq.nsmallest(_MOST, runs, key=operator.itemgetter(0))
        ),
        busy=len(runs),
        shards=tuple(
            dataclasses.replace(_without_frames(snapshot.describe(owner)), waiting=waiting)
            for waiting, snapshot, key in deepest
            if (owner := snapshot.owners.get(key)) is not None
        ),
        deep=len(deep),
        failed=tuple(
            _without_frames(snapshot.describe(run))
            for snapshot, run in heapq.nsmallest(_MOST, blocked, key=lambda entry: _failed_first(entry[1]))
        ),
        failing=len(blocked),
        parked=tuple(itertools.islice((key for snapshot in snapshots for key in _parked_keys(snapshot)), _MOST)),
        parked_keys=sum(parked.keys.keys for parking in parkings for parked in tuple(parking.partitions)),
        pauses=tuple(
            Pause(*what, None, why) if isinstance(what, TopicPartition) else Pause(None, None, what, why)
            for what, why in tuple(watch.engine.pauses.items())
        ),
    )


def _without_frames(record: IncompleteRecord) -> IncompleteRecord:
    """Leave out the frames of a stack: the data of a dashboard must stay small."""
    return dataclasses.replace(record, stack=record.stack and dataclasses.replace(record.stack, frames=()))


def _failed_first(delivery: Delivery) -> tuple[bool, float]:
    return (True, math.inf) if (block := delivery.block) is None else (not block.halted, block.since)


def _parked_keys(snapshot: HandlerSnapshot) -> Iterator[ParkedKey]:
    parking, unix_time = snapshot.running.parking, time.time()
    if parking is None:
        return
    for parked in tuple(parking.partitions):
        for entry in parked.keys.heads(_MOST):
            failure, waits = parked.failures.get(entry.key), parked.keys.waits(entry.key)
            topic, partition = parked.source.topic_partition
            yield ParkedKey(
                handler=snapshot.running.spec.name,
                stored_in=parking.policy.topic,
                topic=topic,
                partition=partition,
                offset=entry.offset,
                key=None if entry.alone else snapshot.shown(_record_key(entry.key, topic)),
                replays=entry.replays,
                due=max(entry.due - unix_time, 0.0) if waits and entry.due < NEVER else None,
                running=not waits,
                failed_at=None if failure is None else failure.failed_at,
                error=None if failure is None else f"{failure.error}: {failure.message}",
            )


def _record_key(identity: object, topic: str) -> object:
    """Reduce a shard key `(topic, key)` to the record key, so that it is displayed as everywhere else."""
    match identity:
        case (str(within), key) if within == topic:
            return key
        case _:
            return identity


# Diagnosis of the whole app -----------------------------------------------------------------------------

_MOMENT = 1.0
"""Seconds after which the oldest record of a partition is reported as holding it back."""
_SLOW_FETCH = 5.0
"""Seconds without a record, although there are more, after which that is reported."""
_PARKED = "parked"
"""Kind of finding about a parked record, which does not hold its partition back."""
_HALTED = "halted"
"""Kind of finding about halted records behind the oldest record, which do not hold their partition back yet."""
_MUCH_LEFT, _FEW = 1_000, 4
"""A tail is reported if at least this many records are left, most of them in at most a quarter of the partitions."""
_NAMED = 3
"""Maximum number of records named when a drain waits for several."""
_NAMED_HALTED = 10
"""Maximum number of halted records named per error, because each must be released individually; and of errors."""
_VARIABLE = re.compile(r"[\w-]*\d[\w-]*")
"""Matches numbers and identifiers in an error: errors that differ only in these count as equal."""


def diagnose(watch: Watch) -> Diagnosis:
    """Explain why each partition does not advance; safe to call from any thread."""
    engine = watch.engine
    snapshots = {id(running): HandlerSnapshot(running, watch) for running in engine.handlers}
    return Diagnosis(
        state=engine.state,
        findings=tuple(_general(watch)),
        partitions=tuple(
            _examine(watch, epoch, snapshots[id(engine.handler_of(epoch.topic_partition.topic))])
            for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
        ),
        outliving=tuple(
            snapshot.describe(run)
            for snapshot in snapshots.values()
            for worker, run in snapshot.runs.items()
            if _outlives(worker, run)
        ),
    )


def _trouble_of(watch: Watch) -> str | None:
    """Describe a problem beyond single partitions, and its duration; None if all is well."""
    engine, now = watch.engine, watch.engine.clock()
    commits = engine.committer.trouble
    if engine.trouble.why is not None:
        return f"no Kafka client for {now - engine.trouble.since:.0f} s: {engine.trouble.why}"
    trouble = watch.standstill.sentence(now) or engine.producer.trouble
    if trouble is None and commits.why is not None:
        return f"commits have not been acknowledged for {now - commits.since:.0f} s: {commits.why}"
    return trouble


def _failure_of(watch: Watch) -> str | None:
    """Say why the app has failed; None if it has not."""
    if watch.engine.state != "failed":
        return None
    failed = watch.engine.failed
    return f"the app has failed: {(failed.exception() if failed.done() else None) or 'the log says why'}"


def _general(watch: Watch) -> Iterator[Finding]:
    engine = watch.engine
    blocked = None if watch.loop is None else watch.loop.blocked()
    problems = (
        (
            "event loop",
            None if blocked is None else f"{blocked}; nothing else runs meanwhile",
            "move the work to a thread or a process, with a plain 'def' handler, or to asyncio.to_thread",
        ),
        ("failed", _failure_of(watch), "fix the cause, then restart the process"),
        ("hung", watch.hang.sentence(engine.clock()), "restart the process; /livez returns 503 until then"),
        (
            "trouble",
            _trouble_of(watch),
            "check that the brokers answer and allow the request; the app keeps retrying",
        ),
    )
    for kind, sentence, what_to_do in problems:
        if sentence is not None:
            yield Finding(kind, sentence, None, what_to_do)
    for running in engine.handlers:
        if running.parking is not None and running.parking.trouble is not None:
            topic, why = running.parking.policy.topic, running.parking.trouble
            yield Finding(
                "parking",
                f"the records that handler {running.spec.name} parked in {topic} cannot be read or written: {why}",
                None,
                f"check that topic {topic} exists, and may be read and written",
            )
    if engine.state in ("starting", "running") and not engine.rebalance.settled.is_set():
        since = watch.lasts("settled", fact=False)
        doing = engine.rebalance.log.doing()
        what = f"the group is rebalancing: {doing}" if doing else "the group is rebalancing"
        if (reason := engine.rebalance.trouble) is not None:
            what = f"the start position is not known yet: {reason}"
        yield Finding("rebalancing", f"{what}{_for_seconds(since)}", since, None)
    elif not engine.rebalance.epochs:
        yield Finding("nothing assigned", "no partition is assigned to this process", None, None)
    left = tail(watch)
    if left.lag >= _MUCH_LEFT and left.heaviest * _FEW <= left.partitions:
        yield Finding(
            "tail",
            f"{counted(left.lag, 'record')} are left, and {left}",
            None,
            "`aioshard group lag --over 10` shows it for the whole group; assignor='lag' balances backlogs",
        )


# One partition -----------------------------------------------------------------------------


def _examine(watch: Watch, epoch: Partition, snapshot: HandlerSnapshot) -> PartitionDiagnosis:
    tracker, oldest = epoch.tracker, epoch.tracker.oldest
    head = None if oldest is None else snapshot.describe(oldest)
    findings = tuple(_findings(watch, epoch, head, snapshot))
    stalled_for = _stalled_for(watch, epoch, head)
    verdict = _verdict(watch, epoch, head, findings, stalled_for)
    since = stalled_for if verdict in ("waiting", "stuck") else None
    window = 0 if head is None else tracker.position - head.offset
    waiting = 0 if head is None else min(head.waiting + len(epoch.evicted), len(tracker) - 1)
    return PartitionDiagnosis(
        topic=epoch.topic_partition.topic,
        partition=epoch.topic_partition.partition,
        verdict=verdict,
        since=since,
        sentence=_sentence_without_head(watch, epoch, verdict, findings)
        if head is None
        else _sentence(epoch, head, verdict, since),
        head=head,
        findings=findings,
        window=window,
        behind=0 if head is None else max(window - len(tracker), 0) + waiting,
    )


def _stalled_for(watch: Watch, epoch: Partition, head: IncompleteRecord | None) -> float:
    """Return for how many seconds the partition has not advanced."""
    stands = watch.stands(epoch)
    if head is None:
        return stands
    # Not simply its age: it may have waited behind slower records. Sampled times are a moment late.
    return head.age if stands and stands > head.age - 2 * _MOMENT else min(stands, head.age)


def _verdict(
    watch: Watch, epoch: Partition, head: IncompleteRecord | None, findings: tuple[Finding, ...], stalled_for: float
) -> Verdict:
    engine, limit = watch.engine, watch.engine.settings.stuck_after
    if head is not None and epoch.stuck(engine.clock(), limit) and (stalled_for > limit or head.state == "halted"):
        return "stuck"
    if any(finding.kind not in (_PARKED, _HALTED) for finding in findings):
        return "waiting"
    if head is not None:
        waits = head.state in ("outliving", "retrying", "halted", "evicted", "held")
        return "waiting" if waits or stalled_for >= _MOMENT else "advancing"
    end = engine.log_end(epoch)
    up_to_date = epoch.acknowledged == epoch.tracker.position and (end is None or end <= epoch.tracker.position)
    return "up to date" if up_to_date else "advancing"


def _sentence(epoch: Partition, head: IncompleteRecord, verdict: Verdict, since: float | None) -> str:
    verb = "advances" if verdict == "advancing" else f"has not advanced{_for_seconds(since)}"
    key = "" if head.key is None else f"key {head.key}, "
    shard = "" if head.shard is None else f"shard {head.shard}, "
    # For a halted record, the reason gives the number of attempts; it may have been given up before the last one.
    attempt = "" if head.state == "halted" else f"attempt {head.attempt} of {head.attempts}"
    known = f"{key}{shard}{attempt}".removesuffix(", ")
    return (
        f"{epoch.topic_partition} {verb}: {counted(len(epoch.tracker), 'record')} incomplete, the oldest is offset "
        f"{head.offset}{f' ({known})' if known else ''}, which arrived {head.age:.1f} s ago; {head.reason}"
    )


def _sentence_without_head(watch: Watch, epoch: Partition, verdict: Verdict, findings: tuple[Finding, ...]) -> str:
    name, position = epoch.topic_partition, epoch.tracker.position
    if verdict == "up to date":
        return f"{name} is up to date: everything up to offset {position} is done and committed"
    end = watch.engine.log_end(epoch)
    log_end = f", of a log that ends at {end}" if end is not None and end > position else ""
    why = f": {findings[0].sentence}" if findings else ""
    return f"{name} has no record in flight at position {position}, committed {epoch.acknowledged}{log_end}{why}"


# Findings besides the oldest record ---------------------------------------------------------


def _findings(
    watch: Watch, epoch: Partition, head: IncompleteRecord | None, snapshot: HandlerSnapshot
) -> Iterator[Finding]:
    now = watch.engine.clock()
    if epoch.gate is Gate.PAUSED:
        yield from _pauses(watch, epoch)
    elif epoch.gate is not Gate.OPEN:
        yield _closed(watch, epoch)
    fault = epoch.fault(now)
    if fault is not None:
        yield Finding(
            "unreadable", f"it cannot be read: {fault}", None, "fix the cause at the brokers; the app keeps retrying"
        )
    if epoch.outside_log is not None:
        yield Finding(
            "outside log",
            f"its position {epoch.outside_log} is not in the log; the new position is being looked up",
            None,
            None,
        )
    since = watch.lasts(("held back", epoch.topic_partition), epoch.log_end)
    if epoch.held_back and since is not None and since > _SLOW_FETCH:
        yield Finding(
            "transaction",
            f"{counted(epoch.held_back, 'offset')} from {epoch.log_end} on cannot be read yet: a producer has held a "
            f"transaction open{_for_seconds(since)}",
            since,
            "wait, or end that producer: the brokers abort it after its transaction timeout",
        )
    yield from _slow_replays(epoch, now, snapshot)
    yield from _also_halted(epoch)
    if epoch.gate is Gate.OPEN and fault is None:
        yield from _intake(watch, epoch, head)
    trouble, committable = watch.engine.committer.trouble, epoch.tracker.committable
    if trouble.why is not None and committable != epoch.acknowledged:
        since = now - trouble.since
        yield Finding(
            "commit",
            f"records are complete up to offset {committable} but not committed (committed: {epoch.acknowledged}); "
            f"commits have not been acknowledged{_for_seconds(since)}: {trouble.why}",
            since,
            "check that the brokers answer and allow commits; the app keeps retrying",
        )


def _pauses(watch: Watch, epoch: Partition) -> Iterator[Finding]:
    name, engine = epoch.topic_partition, watch.engine
    handler = engine.handler_of(name.topic).spec.name
    calls: dict[TopicPartition | str, str] = {
        name: f"app.resume({name.topic!r}, {name.partition})",
        handler: f"app.resume_handler({handler!r})",
    }
    for paused, call in calls.items():
        if (why := engine.pauses.get(paused)) is not None:
            since = watch.lasts(("application", paused), why)
            yield Finding(
                "paused", f"paused by the application{_for_seconds(since)}: {why}", since, f"call {call} to resume"
            )
    for who, why in tuple(epoch.pauses.items()):
        if who == APPLICATION:
            continue
        since = watch.lasts(("pause", name, who), why)
        oldest, probe = epoch.tracker.oldest, epoch.probe
        failure = None if oldest is None else oldest.failure
        failed = "" if failure is None else f" (record {oldest!r} failed with {failure})"
        tried = "" if probe is None else f"; record {probe!r} is being tried"
        yield Finding(
            "paused",
            f"paused{_for_seconds(since)}: {why}{tried}",
            since,
            f"fix why the records fail{failed}: a system that the handler calls, the handler or the schema; the "
            "partition resumes by itself",
        )


def _closed(watch: Watch, epoch: Partition) -> Finding:
    since = watch.lasts(("gate", epoch.topic_partition), epoch.gate)
    due = [delivery for part in epoch.epochs for delivery in tuple(part.pending.values())]
    waits = ""
    if due:
        names = ", ".join(repr(delivery) for delivery in due[:_NAMED]) + (", ..." if len(due) > _NAMED else "")
        waits = f", and waits for {counted(len(due), 'record')} to end first: {names}"
    if watch.engine.state == "draining":
        return Finding("draining", f"the app is draining{_for_seconds(since)}{waits}", since, None)
    if due:
        return Finding(
            "rebalancing",
            f"the partition is being revoked{_for_seconds(since)}{waits}",
            since,
            "end handlers soon after Context.revoked is set, to keep rebalances short",
        )
    reason = watch.engine.rebalance.unsettled.get(epoch.topic_partition)
    what = "the group is rebalancing, or the partition's position is not confirmed yet"
    if reason is not None:
        what = f"the start position is not known yet: {reason}"
    return Finding("rebalancing", f"{what}{_for_seconds(since)}", since, None)


def _slow_replays(epoch: Partition, now: float, snapshot: HandlerSnapshot) -> Iterator[Finding]:
    """Yield a finding if the oldest replay of a parked record takes long."""
    oldest = None if epoch.replays is None else epoch.replays.tracker.oldest
    if oldest is not None and now - oldest.arrived > _MOMENT:
        cause = snapshot.cause_of(oldest)
        yield Finding(
            _PARKED,
            f"record {oldest!r}, which was parked and is run again, {cause.reason}",
            now - oldest.arrived,
            cause.what_to_do,
        )


def _also_halted(epoch: Partition) -> Iterator[Finding]:
    """Yield findings about halted records that will hold the partition back once the oldest one is done, per error."""
    halted = sorted(
        (_VARIABLE.sub("#", block.error), delivery.offset, block.error)
        for shards in epoch.feed.shards
        for delivery in shards.halted
        if delivery.epoch is epoch and delivery is not epoch.tracker.oldest and (block := delivery.block) is not None
    )
    for _, group in itertools.islice(itertools.groupby(halted, key=operator.itemgetter(0)), _NAMED_HALTED):
        (_, _, error), *_ = records = list(group)
        offsets = tuple(offset for _, offset, _ in records[:_NAMED_HALTED])
        named = ", ".join(map(str, offsets)) + (", ..." if len(records) > _NAMED_HALTED else "")
        sentence = f"{counted(len(records), 'record')} behind it halted with {error}: offset {named}"
        yield Finding(_HALTED, sentence, None, None, error, offsets, len(records))


def _intake(watch: Watch, epoch: Partition, head: IncompleteRecord | None) -> Iterator[Finding]:
    """Yield a finding if nothing is taken in although the log has more records."""
    # Use the end offset of the last fetch: a newer one may include records that are just being fetched.
    transport = watch.engine.transport
    position, end = epoch.tracker.position, None if transport is None else transport.end_offset(epoch.topic_partition)
    if end is not None and end <= position and head is None:
        return
    since = watch.lasts(("position", epoch.topic_partition), position)
    if (limit := watch.engine.intake.limit(epoch)) is not None:
        yield Finding(
            "no room", f"nothing more is taken in{_for_seconds(since)}: {limit.reason}", since, limit.what_to_do
        )
    elif end is not None and head is None and since is not None and since > _SLOW_FETCH:
        yield Finding(
            "nothing comes",
            f"no record has arrived{_for_seconds(since)}, although its log ends at {end} and there is room",
            since,
            "check that the leader of the partition answers; the app keeps fetching",
        )


# In words ------------------------------------------------------------------------------------


def explain(watch: Watch) -> str:
    """Explain in sentences, partition by partition, why each does not advance; safe to call from any thread."""
    diagnosis = diagnose(watch)
    lines = [f"The app is {diagnosis.state}."]
    for finding in diagnosis.findings:
        lines.append(f"{'Trouble: ' if finding.kind == 'trouble' else ''}{_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    for partition in diagnosis.partitions:
        lines += _lines_of(partition)
    for run in diagnosis.outliving:
        lines += [
            f"Record {run.topic}/{run.partition}/{run.offset} {run.reason.removeprefix('it ')}.",
            *_advice(run.what_to_do),
        ]
    return "\n".join(lines) + "\n"


def explain_partition(watch: Watch, epoch: Partition) -> str:
    """Explain on one line, for the log, why a partition does not advance."""
    snapshot = HandlerSnapshot(watch.engine.handler_of(epoch.topic_partition.topic), watch)
    return " ".join(line.strip() for line in _lines_of(_examine(watch, epoch, snapshot)))


def _lines_of(partition: PartitionDiagnosis) -> list[str]:
    lines = [f"{partition.sentence}."]
    if partition.behind:
        lines.append(f"  {partition.behind} of the {partition.window} offsets from there on wait for that record.")
    head = partition.head
    if head is not None and partition.verdict in ("waiting", "stuck"):
        lines += _advice(head.what_to_do)
        if head.stack is not None and head.stack.frames:
            lines.append(f"  Stack, innermost last: {' > '.join(map(str, head.stack.frames))}")
    for finding in partition.findings:
        if head is not None or finding is not partition.findings[0]:
            lines.append(f"  {_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    return lines


def _advice(what_to_do: str | None) -> list[str]:
    return [] if what_to_do is None else [f"  What to do: {what_to_do}."]


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
