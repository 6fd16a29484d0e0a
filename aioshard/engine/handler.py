"""A handler as the engine runs it, and the parts that serve it."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from aioshard.core.adaptive import Adaptive
from aioshard.core.batching import Batch
from aioshard.core.pace import RateLimit
from aioshard.core.recourse import DeadLetter, OnFailure, Park
from aioshard.core.retry import Retry
from aioshard.core.sharding import ShardKey
from aioshard.engine.batches.batch_shards import BatchShards
from aioshard.engine.batches.batch_worker import BatchWorker, InvokeBatch
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.failing.parking import Parking
from aioshard.engine.failing.probing import Probing
from aioshard.engine.failing.recourse import DeadLettering, Halting, Publish, Skipping
from aioshard.engine.failing.settling import Recourse, Settlement
from aioshard.engine.feed import Feed
from aioshard.engine.flow.adapting import Adapting
from aioshard.engine.flow.pacing import Pace, PacedBatchShards, PacedShards
from aioshard.engine.flow.staffing import Staff
from aioshard.engine.record_worker import RecordWorker
from aioshard.engine.shards import Shards
from aioshard.engine.tasks import TaskSet
from aioshard.engine.timing import precise
from aioshard.engine.watch import TimeoutWatch
from aioshard.engine.worker import Invoke, Worker
from aioshard.ports import SideTopicsFactory
from aioshard.records import Record, is_subscribed

__all__ = ["Adapt", "Batched", "HandlerSpec", "Running", "Surroundings", "Wrap", "records_of", "serve"]

T = TypeVar("T")


class Batched(NamedTuple):
    """How a handler takes batches."""

    batch: Batch
    invoke: InvokeBatch
    """Runs one attempt of a batch."""
    read: Callable[[Record], Any] | None = None
    """Decodes a record before the handler gets it, if set; raises for a record that cannot be decoded."""


class HandlerSpec(NamedTuple):
    """A handler as the engine runs it."""

    name: str
    topics: tuple[str, ...]
    pattern: str | None
    shard_key: Callable[[Record], ShardKey]
    sure_key: bool
    """Whether the sharding function is built in: it neither raises nor returns a key without a hash."""
    shards: int | None
    concurrency: int
    timeout: float | None
    """Seconds that an attempt may take."""
    retry: Retry
    on_failure: OnFailure
    call: Callable[[Record], Awaitable[object]] | None
    """The handler itself, if it takes nothing but the record."""
    invoke: Invoke | None
    """Runs one attempt in every other case; None if the handler takes batches."""
    batched: Batched | None = None
    """Runs attempts if the handler takes batches, instead of the two fields above."""
    resized: Callable[[int], None] | None = None
    """Called after the concurrency changed."""
    rate_limit: RateLimit | None = None
    key_rate_limit: RateLimit | None = None
    adaptive: Adaptive | None = None
    """Bounds of the concurrency, if it follows the latency."""
    letters: Publish | None = None
    """Publishes dead letters, if they do not go to the brokers."""

    @property
    def in_threads(self) -> bool:
        """Whether the handler is a plain function, which runs in threads."""
        return self.resized is not None

    @property
    def attempt(self) -> Invoke:
        """Runs one attempt of a handler that takes single records."""
        call = self.call
        if call is not None:
            return lambda delivery: call(delivery.record)
        assert self.invoke is not None  # noqa: S101 - otherwise it takes batches
        return self.invoke

    def through(self, wrap: "Wrap") -> "HandlerSpec":
        """The same handler, with *wrap* around each of its attempts."""
        batched = self.batched
        if batched is not None:
            return self._replace(batched=batched._replace(invoke=wrap(batched.invoke)))
        return self._replace(call=None, invoke=wrap(self.attempt))

    def takes(self, topic: str) -> bool:
        """Whether the handler takes the records of *topic*."""
        return is_subscribed(topic, self.topics, self.pattern)


Adapt = Callable[[HandlerSpec], HandlerSpec]
"""Replaces a handler by another one, for one run of an app."""


class Wrap(Protocol):
    """Wraps the attempts of a handler, of single records or of batches."""

    def __call__(self, attempt: Callable[[T], Awaitable[object]], /) -> Callable[[T], Awaitable[object]]:
        """Return the wrapped attempt; its argument is a `Delivery` or a `DeliveryBatch`."""


def records_of(given: object) -> list[Record]:
    """The records given to an attempt: those of a batch, or the one of a delivery."""
    deliveries = given.deliveries if isinstance(given, DeliveryBatch) else (given,)
    return [delivery.record for delivery in deliveries if isinstance(delivery, Delivery)]


class Running(NamedTuple):
    """A handler with the parts that serve it."""

    spec: HandlerSpec
    feed: Feed
    workers: list[Worker]
    staff: Staff
    counters: Counters
    parking: Parking | None
    """Set for `on_failure=Park(...)`."""
    pace: Pace | None
    """Set if the handler has rate limits."""
    adapting: Adapting | None
    """Set if its concurrency is adaptive."""

    def start(self, tasks: TaskSet, clock: Callable[[], float]) -> None:
        """Start its workers and the tasks that watch and control them; *clock* is loop time."""
        name = self.spec.name
        self.staff.start(tasks)
        if self.spec.timeout is not None:
            tasks.start(TimeoutWatch(self.workers, self.spec.timeout, clock).run(), f"{name} time-outs")
        if self.adapting is not None:
            tasks.start(self.adapting.run(self.staff, name), f"{name} adapts its concurrency")
        if self.parking is not None:
            tasks.start(self.parking.read(), f"{name} reads what is parked")
            tasks.start(self.parking.replay(), f"{name} runs again what is parked")


class Surroundings(NamedTuple):
    """Resources that the handlers of an engine share."""

    group_id: str
    publish: Publish
    make_side_topics: SideTopicsFactory
    buffer: Buffer
    clock: Callable[[], float]
    """Loop time."""


def serve(spec: HandlerSpec, around: Surroundings) -> Running:
    """Make the parts that serve a handler; nothing runs yet."""
    adapting = None
    if spec.adaptive is not None:
        adapting = Adapting(spec.adaptive, around.clock, spec.timeout)
        spec = spec.through(adapting.measured)
    pace = _pace(spec, around)
    shards = _shards(spec, around, pace)
    served = shards * spec.concurrency if spec.shards is None else shards
    counters = Counters()
    parking = _parking(spec, around, shards, len(served))
    recourse, probing = _recourse(spec, around, shards, counters)
    settlement = Settlement(
        spec.retry,
        parking or recourse,
        counters=counters,
        clock=around.clock,
        paused=lambda delivery, why: probing.pause(delivery.epoch, why),
        workers=lambda: len(workers),
        about={"handler": spec.name, "group": around.group_id},
    )
    make = functools.partial(_worker, spec, around, settlement=settlement, parking=parking)
    workers = [make(f"{spec.name} worker {number}", part) for number, part in enumerate(served)]
    feed = Feed(
        spec.shard_key,
        shards,
        fixed=spec.shards is not None,
        workers=len(workers),
        at_once=1 if spec.batched is None else spec.batched.batch.max_records,
        unkeyed=settlement.unkeyed,
        ahead=None if pace is None else pace.ahead,
        sure=spec.sure_key,
        aside=parking,
    )
    staff = Staff(
        workers,
        lambda name: make(name, shards[0]),
        feed,
        spec.resized,
        handler=spec.name,
        group=around.group_id,
    )
    return Running(spec, feed, workers, staff, counters, parking, pace, adapting)


def _pace(spec: HandlerSpec, around: Surroundings) -> Pace | None:
    if spec.rate_limit is None and spec.key_rate_limit is None:
        return None
    return Pace(spec.rate_limit, spec.key_rate_limit, around.clock)


def _shards(spec: HandlerSpec, around: Surroundings, pace: Pace | None) -> list[Shards]:
    """One `Shards` that makes shards on demand, or the fixed ones."""
    bound = None if spec.shards is None else max(around.buffer.bounds.records // spec.shards, 1)

    def make() -> Shards:
        if spec.batched is None:
            return Shards(bound) if pace is None else PacedShards(pace, bound)
        batch, attempts = spec.batched.batch, spec.retry.attempts
        return BatchShards(batch, attempts, bound) if pace is None else PacedBatchShards(pace, batch, attempts, bound)

    return [make() for _ in range(spec.shards or 1)]


def _worker(
    spec: HandlerSpec,
    around: Surroundings,
    name: str,
    shards: Shards,
    *,
    settlement: Settlement,
    parking: Parking | None,
) -> Worker:
    divert = None if parking is None else parking.divert
    clock = precise(around.clock)
    if spec.batched is not None:
        assert isinstance(shards, BatchShards)  # noqa: S101 - made by `_shards`
        return BatchWorker(
            name,
            shards,
            invoke=spec.batched.invoke,
            settlement=settlement,
            clock=clock,
            timeout=spec.timeout,
            divert=divert,
            read=spec.batched.read,
        )
    assert spec.invoke is not None  # noqa: S101 - only batches have none
    return RecordWorker(
        name,
        shards,
        call=spec.call if parking is None else None,
        invoke=spec.invoke if parking is None else spec.attempt,
        settlement=settlement,
        clock=clock,
        timeout=spec.timeout,
        divert=divert,
    )


def _recourse(
    spec: HandlerSpec, around: Surroundings, shards: list[Shards], counters: Counters
) -> tuple[Recourse, Probing]:
    match spec.on_failure:
        case DeadLetter() as policy:
            publish = spec.letters or around.publish
            letters = DeadLettering(policy, publish, group=around.group_id, handler=spec.name, counters=counters)
            return letters, Probing(shards, lambda: letters.affordable)
        case "skip":
            return Skipping(), Probing(shards, lambda: True)
        case _:
            return Halting(), Probing(shards, lambda: True)


def _parking(spec: HandlerSpec, around: Surroundings, shards: list[Shards], workers: int) -> Parking | None:
    if not isinstance(spec.on_failure, Park):
        return None
    return Parking(
        spec.on_failure,
        group=around.group_id,
        handler=spec.name,
        shards=shards,
        shard_key=spec.shard_key,
        fixed=spec.shards is not None,
        workers=workers,
        publish=around.publish,
        side_topics=around.make_side_topics(),
        buffer=around.buffer,
        clock=around.clock,
    )
