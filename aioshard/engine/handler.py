"""A handler as the engine runs it, and what serves it."""

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aioshard.core.recourse import DeadLetter, OnFailure, Park
from aioshard.core.retry import Retry
from aioshard.core.sharding import ShardKey
from aioshard.engine.buffer import Buffer
from aioshard.engine.feed import Feed
from aioshard.engine.parking import Parking
from aioshard.engine.probing import Probing
from aioshard.engine.recourse import DeadLettering, Halting, Publish, Skipping
from aioshard.engine.settling import Counters, Recourse, Settlement
from aioshard.engine.shards import Shards
from aioshard.engine.worker import Invoke, RecordWorker, Worker
from aioshard.ports import SideTopicsFactory
from aioshard.records import Record

__all__ = ["HandlerSpec", "Running", "Surroundings", "serve"]


class HandlerSpec(NamedTuple):
    """A handler as the engine runs it."""

    name: str
    topics: tuple[str, ...]
    pattern: str | None
    shard_key: Callable[[Record], ShardKey]
    sure_key: bool
    """Whether that function is ours: it neither raises nor gives what has no hash."""
    shards: int | None
    concurrency: int
    timeout: float | None
    """Seconds that an attempt may take."""
    retry: Retry
    on_failure: OnFailure
    call: Callable[[Record], Awaitable[object]] | None
    """The handler itself where it takes nothing but the record."""
    invoke: Invoke
    """Runs one attempt in every other case."""

    def takes(self, topic: str) -> bool:
        """Whether the records of *topic* are this handler's."""
        return topic in self.topics or (self.pattern is not None and re.fullmatch(self.pattern, topic) is not None)


class Running(NamedTuple):
    """One handler with what serves it."""

    spec: HandlerSpec
    feed: Feed
    workers: list[Worker]
    counters: Counters
    parking: Parking | None
    """Where `on_failure=Park(...)`."""


class Surroundings(NamedTuple):
    """What the handlers of an engine have in common."""

    group_id: str
    publish: Publish
    make_side_topics: SideTopicsFactory
    buffer: Buffer
    clock: Callable[[], float]
    """Loop time."""


def serve(spec: HandlerSpec, around: Surroundings) -> Running:
    """Make what serves a handler; nothing runs yet."""
    if spec.shards is None:
        shards = [Shards()]
        served = shards * spec.concurrency
    else:
        bound = max(around.buffer.bounds.records // spec.shards, 1)
        shards = served = [Shards(bound) for _ in range(spec.shards)]
    counters = Counters()
    parking = _parking(spec, around, shards, len(served))
    recourse, probing = _recourse(spec, around, shards, counters)
    settlement = Settlement(
        spec.retry,
        parking or recourse,
        counters=counters,
        clock=around.clock,
        paused=lambda delivery, why: probing.pause(delivery.epoch, why),
    )
    workers: list[Worker] = [
        RecordWorker(
            f"{spec.name} worker {number}",
            part,
            call=spec.call if parking is None else None,
            invoke=spec.invoke if parking is None else parking.wrap(_invocation(spec)),
            settlement=settlement,
            clock=around.clock,
            timeout=spec.timeout,
            divert=None if parking is None else parking.divert,
        )
        for number, part in enumerate(served)
    ]
    feed = Feed(
        spec.shard_key,
        shards,
        fixed=spec.shards is not None,
        workers=len(workers),
        unkeyed=settlement.unkeyed,
        sure=spec.sure_key,
        aside=parking,
    )
    return Running(spec, feed, workers, counters, parking)


def _recourse(
    spec: HandlerSpec, around: Surroundings, shards: list[Shards], counters: Counters
) -> tuple[Recourse, Probing]:
    match spec.on_failure:
        case DeadLetter() as policy:
            letters = DeadLettering(policy, around.publish, group=around.group_id, handler=spec.name, counters=counters)
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


def _invocation(spec: HandlerSpec) -> Invoke:
    call = spec.call
    return spec.invoke if call is None else lambda delivery: call(delivery.record)
