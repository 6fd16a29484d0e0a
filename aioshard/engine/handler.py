"""A handler as the engine runs it, and what serves it."""

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aioshard.core.recourse import DeadLetter, OnFailure, Park
from aioshard.core.retry import Retry
from aioshard.core.sharding import ShardKey
from aioshard.engine.fetcher import Feed
from aioshard.engine.probing import Probing
from aioshard.engine.recourse import DeadLettering, Halting, Publish, Skipping
from aioshard.engine.settling import Counters, Recourse, Settlement
from aioshard.engine.shards import Shards
from aioshard.engine.worker import Invoke, Worker
from aioshard.records import Record

__all__ = ["HandlerSpec", "Running", "serve"]


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


def serve(
    spec: HandlerSpec, *, group_id: str, publish: Publish, max_buffered_records: int, clock: Callable[[], float]
) -> Running:
    """Make what serves a handler; nothing runs yet."""
    if spec.shards is None:
        shards = [Shards()]
        served = shards * spec.concurrency
    else:
        bound = max(max_buffered_records // spec.shards, 1)
        shards = served = [Shards(bound) for _ in range(spec.shards)]
    counters = Counters()
    recourse: Recourse
    probing = Probing(shards, lambda: True)
    match spec.on_failure:
        case "halt":
            recourse = Halting()
        case "skip":
            recourse = Skipping()
        case DeadLetter():
            recourse = letters = DeadLettering(
                spec.on_failure, publish, group=group_id, handler=spec.name, counters=counters
            )
            probing = Probing(shards, lambda: letters.affordable)
        case Park():
            raise NotImplementedError
    settlement = Settlement(
        spec.retry, recourse, counters=counters, clock=clock, paused=lambda d, why: probing.pause(d.epoch, why)
    )
    workers = [
        Worker(
            f"{spec.name} worker {number}",
            part,
            call=spec.call,
            invoke=spec.invoke,
            settlement=settlement,
            clock=clock,
            timeout=spec.timeout,
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
    )
    return Running(spec, feed, workers, counters)
