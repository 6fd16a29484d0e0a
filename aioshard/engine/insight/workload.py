"""What the workers run, which shards are deep, which records failed and what is parked: for the page and the terminal.

Everything is bounded: of each kind the worst few are told, and how many there are.
"""

import heapq
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from aioshard.core.parking import NEVER
from aioshard.core.recourse import DeadLetter, Park
from aioshard.core.shown_keys import shown
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Running
from aioshard.engine.insight.head import Ward
from aioshard.engine.insight.stack import stack_of
from aioshard.engine.outcomes import Block
from aioshard.engine.runtime import Engine
from aioshard.engine.worker import Worker
from aioshard.observe import FailedRecord, HandlerLoad, HotShard, ParkedKey, Pause, WorkerRun, Workload
from aioshard.records import TopicPartition

__all__ = ["workload"]

_MOST = 50
"""Of each kind so many are told."""


def workload(engine: Engine, *, show_keys: bool, most: int = _MOST) -> Workload:
    """What is going on inside the handlers; safe to call from any thread.

    Args:
        engine: The running engine.
        show_keys: Whether keys may be shown; they may be personal data.
        most: How many of each kind are told.
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
    """One handler at one moment."""

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
    """The key of a record where that, with its topic, is the shard key: named as everywhere else."""
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
