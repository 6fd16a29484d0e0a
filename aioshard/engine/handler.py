"""A handler, and the parts that serve it in a running app."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aioshard.core.options import Adaptive, Batch, DeadLetter, Limit, OnFailure, Park, Retry
from aioshard.core.sharding import ShardBy, ShardKey, shard_key_of
from aioshard.engine.adaptation import Adaptation
from aioshard.engine.batch_shards import BatchShards
from aioshard.engine.buffer import Buffer
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.failures import FailureHandler
from aioshard.engine.freshness import Expiry, Latest, combined
from aioshard.engine.lease import Lease
from aioshard.engine.limits import KeyLimit, Limits, SharedLimit
from aioshard.engine.log_fields import record_fields
from aioshard.engine.outcomes import Recovery
from aioshard.engine.pacing import KeyLimitedShards, LimitedBatchShards, LimitedShards, ProcessSlots, StartLimits
from aioshard.engine.parking import Parking
from aioshard.engine.partition import ObservedPartition, Partition
from aioshard.engine.recoveries import Send, dead_lettering, skipping
from aioshard.engine.sharder import Sharder
from aioshard.engine.shards import DeliveryBatch, Shards
from aioshard.engine.tasks import TaskSet
from aioshard.engine.timing import precise
from aioshard.engine.worker import BatchWorker, Divert, RecordWorker, RecoveryWorker, Worker
from aioshard.log_fields import get_logger
from aioshard.observe import HandlerStatistics
from aioshard.ports import Publish, SideTopicsFactory
from aioshard.records import Record, TopicPartition, is_subscribed
from aioshard.schema_registry.registries import Registries, RegistryInput, RegistryOutput
from aioshard.serde.payloads import Payload

logger = get_logger("aioshard.engine.handler")

_TIMEOUT_CHECKS = 20
_SHORTEST_CHECK = 0.005
_LONGEST_CHECK = 0.5
"""Attempts are checked twenty times per timeout, but at most every 5 ms and at least every half second."""
_GRACE = 1.0
"""Seconds after a timeout within which a cancelled handler should have ended."""


RunIn = Literal["loop", "thread", "process"]

Keep = Literal["all", "latest"]
"""Which of the waiting records of a key run: all of them, or only the newest."""

Kind = Literal["async", "plain", "async generator", "generator"]
"""How the function of a dependency is declared."""

FIRST_RESULT = 3
"""The number of the first dependency's result among the values of an attempt; see `Dependency.arguments`."""


class Dependency(NamedTuple):
    """A call whose result the handler, or another dependency, takes as an argument."""

    function: Callable[..., Any]
    """The function that the marker names, or its replacement."""
    kind: Kind
    call: Callable[..., Any]
    """The function; for a generator, one that returns a context manager around it."""
    arguments: Mapping[str, int]
    """The number of the value for each parameter: 0 is the argument of the handler, 1 the record or the list of
    records, 2 the context, and `FIRST_RESULT` + n the result of the nth dependency."""


class Dependencies(NamedTuple):
    """The dependencies of a handler, resolved when it was registered: an attempt only calls them."""

    calls: Sequence[Dependency]
    """In the order in which they are called, which is the reverse of the order in which they are closed."""
    arguments: Mapping[str, int]
    """The number of the value for each injected parameter of the handler; its context is one of them."""

    @property
    def are_plain(self) -> bool:
        """Whether none of them needs the event loop."""
        return all(call.kind in {"plain", "generator"} for call in self.calls)


class Handler(NamedTuple):
    """A handler with its checked options and, once the app has started, the function that runs an attempt of it."""

    name: str
    topics: tuple[str, ...]
    pattern: str | None
    shard_by: ShardBy
    shards: int | None
    shard_queue_size: int | None
    concurrency: int
    """The number of workers: with an adaptive concurrency its maximum."""
    adaptive: Adaptive | None
    """Bounds of the concurrency, if it follows the latency."""
    timeout: float | None
    """Seconds that an attempt may take."""
    retry: Retry
    on_failure: OnFailure
    batch: Batch | None
    limit: Limit | None
    function: Callable[..., Any]
    takes_context: bool
    dependencies: Dependencies | None
    """The calls whose results are injected; None without any."""
    run_in: RunIn
    """Where it runs: in the event loop, in threads or in worker processes."""
    payload: Payload | None
    """Conversion of a record for the handler; None if it takes the record itself."""
    decode: Callable[[Record], object] | None
    """The user's function for this conversion, if there is one."""
    publish_to: str | None
    """Topic for what it returns."""
    middleware: tuple[Sequence[Callable[..., Awaitable[object]]], ...]
    """Middleware of the app and of the set that the handler comes from; both may grow until the app starts."""
    call: Callable[[Record], Awaitable[object]] | None = None
    """The handler itself, if it takes nothing but the record."""
    invoke: Callable[[Any], Awaitable[object]] | None = None
    """Runs one attempt at a `Delivery` or, with *batch*, at a `DeliveryBatch`; None if `call` does."""
    read: Callable[[Record], Any] | None = None
    """Decodes a record of a batch before the attempt, if set; raises for a record that cannot be decoded."""
    slots: ProcessSlots | None = None
    """Limits its runs in worker processes, if more records than that may be in flight."""
    publish_dead_letter: Send | None = None
    """Publishes dead letters, if they do not go to the brokers."""
    keep: Keep = "all"
    """Which of the waiting records of a key run."""
    max_age: float | None = None
    """Age in seconds from which a record does not start any more."""
    taken: RegistryInput | None = None
    """How its values are decoded with a schema registry; None without one."""
    output: RegistryOutput | None = None
    """How its results are published with a schema registry; None without one."""

    @property
    def shard_key(self) -> Callable[[Record], ShardKey]:
        """The function that computes a record's shard key."""
        return shard_key_of(self.shard_by, one_topic=len(self.topics) == 1 and self.pattern is None)

    def queue_size(self, room: int) -> int | None:
        """Capacity of a fixed shard's queue if *room* records may be in memory; None for shards on demand."""
        return None if self.shards is None else self.shard_queue_size or max(room // self.shards, 1)

    @property
    def attempt(self) -> Callable[[Any], Awaitable[object]]:
        """Runs one attempt."""
        call = self.call
        if call is not None:
            return lambda delivery: call(delivery.record)
        assert self.invoke is not None  # noqa: S101 - the app has started
        return self.invoke

    def through(self, wrap: "Callable[[Attempt], Attempt]") -> "Handler":
        """The same handler, with *wrap* around each of its attempts."""
        return self._replace(call=None, invoke=wrap(self.attempt))

    def for_history(self) -> "Handler":
        """The same handler for records of the past, each of which runs: all of them are old."""
        return self._replace(keep="all", max_age=None)

    def takes(self, topic: str) -> bool:
        """Whether the handler takes the records of *topic*."""
        return is_subscribed(topic, self.topics, self.pattern)


Adapt = Callable[[Handler], Handler]
"""Replaces a handler by another one, for one run of an app."""

Completed = Callable[[Delivery], None]
"""Called with each complete delivery; its `outcome`, `run`, `failures` and `failure` say how it ended.

Runs in the event loop for each record, so it must be quick. It must neither raise nor keep the delivery, unless it
drops it before the engine takes more records in: the buffer no longer counts its memory.
"""

Observe = Callable[[Handler], Completed]
"""Returns the callback for the deliveries of a handler; called once per epoch."""

Attempt = Callable[[Any], Awaitable[object]]
"""Runs one attempt of a handler, at a `Delivery` or a `DeliveryBatch`."""


def records_of(argument: object) -> list[Record]:
    """The records given to an attempt: those of a batch, or the one of a delivery."""
    deliveries = argument.deliveries if isinstance(argument, DeliveryBatch) else (argument,)
    return [delivery.record for delivery in deliveries if isinstance(delivery, Delivery)]


class Resources(NamedTuple):
    """Resources that the handlers of an engine share."""

    group_id: str
    publish: Publish
    send: Send
    """Publishes dead letters and parked records."""
    make_side_topics: SideTopicsFactory
    buffer: Buffer
    lease: Lease
    limits: Limits
    """The rate limits of the handlers."""
    clock: Callable[[], float]
    """Loop time."""
    exactly_once: bool = False
    """Whether messages become visible with the completions of one epoch."""
    observe: Observe | None = None
    """Observes how deliveries end; None if nobody does."""
    run_ahead: float = 0.0
    """Seconds for which workers may run ahead without yielding to the event loop; see `Worker`."""
    registries: Registries | None = None
    """The schema registries of the app."""
    now: Callable[[], float] = time.time
    """The time on the clock of the records' timestamps, in seconds since the Unix epoch."""


class ActiveHandler:
    """A handler of a running app, with its shards, its workers and the other parts that serve it."""

    parking: Parking | None = None
    """Set for `on_failure=Park(...)`."""

    def __init__(self, spec: Handler, resources: Resources) -> None:
        """Create the parts; nothing runs before `start`."""
        self.spec = spec
        self._resources = resources
        self.limit = None if spec.limit is None else resources.limits.use(spec.limit, spec.name)
        """Set if the handler has a rate limit; other handlers may share it."""
        self.counters = Counters()
        self.shards = [self._make_shards(resources) for _ in range(spec.shards or 1)]
        """One that serves all keys on demand, or the fixed ones."""
        self.failures = failures = self._make_failure_handler(resources)
        self._latest = Latest() if spec.keep == "latest" else None
        writes = spec.batch is None and isinstance(spec.on_failure, DeadLetter | Park)
        make = functools.partial(
            self._make_worker, divert=self._make_divert(), clock=precise(resources.clock), hands_over=writes
        )
        kind: Callable[..., Worker] = RecordWorker if spec.batch is None else BatchWorker
        self.handling = [
            make(kind, f"{spec.name} worker {number}", shards)
            for number, shards in enumerate(self.shards * (spec.concurrency if spec.shards is None else 1))
        ]
        """Workers that run the handler."""
        self.recovering: list[Worker] = []
        """Workers that take the recoveries of handlers that write them to another topic; half as many."""
        if writes:
            half = max(len(self.handling) // 2, 1) if spec.shards is None else 1
            self.recovering = [
                make(RecoveryWorker, f"{spec.name} recovery worker {number}", shards)
                for number, shards in enumerate(self.shards * half)
            ]
        self.workers = self.handling + self.recovering
        self.sharder = Sharder(
            spec.shard_key,
            self.shards,
            fixed=spec.shards is not None,
            workers=len(self.handling),
            at_once=1 if spec.batch is None else spec.batch.max_records,
            failures=failures,
            ahead=self.limit.ahead if isinstance(self.limit, SharedLimit) else None,
            builtin_key=not callable(spec.shard_by),
            parking=self.parking,
            latest=self._latest,
        )
        if spec.shards is None:
            self.shards[0].limit_workers(len(self.handling), len(self.handling))
        self.adaptation = self._make_adaptation()
        """Set if the concurrency is adaptive."""

    def _make_worker(
        self,
        kind: Callable[..., Worker],
        name: str,
        shards: Shards,
        *,
        divert: Divert | None,
        clock: Callable[[], float],
        hands_over: bool,
    ) -> Worker:
        spec, resources = self.spec, self._resources
        return kind(
            name,
            shards,
            invoke=spec.attempt,
            call=spec.call if self.parking is None else None,
            failures=self.failures,
            lease=resources.lease,
            clock=clock,
            timeout=spec.timeout,
            divert=divert,
            read=spec.read,
            is_observed=resources.observe is not None,
            run_ahead=resources.run_ahead,
            registries=resources.registries,
            hands_over=hands_over,
        )

    def _make_adaptation(self) -> Adaptation | None:
        spec = self.spec
        if spec.adaptive is None:
            return None
        (shards,) = self.shards
        return Adaptation(
            spec.adaptive,
            handler=spec.name,
            shards=shards,
            failures=self.failures,
            counters=self.counters,
            clock=self._resources.clock,
            now=self._resources.now,
        )

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent runs now. Safe from any thread."""
        return len(self.handling) if self.adaptation is None else self.adaptation.limit

    def _make_divert(self) -> Divert | None:
        """Return the function that inspects each delivery before it starts; None if nothing can be diverted then."""
        divert = combined(
            None if self._latest is None else self._latest.divert,
            self._expiring(),
            None if self.parking is None else self.parking.divert,
        )
        limit = self.limit
        if divert is None or limit is None or self.spec.batch is not None:
            return divert

        def divert_for_free(delivery: Delivery) -> None:
            was_attempt = delivery.recovery is None
            divert(delivery)
            if was_attempt and delivery.recovery is not None:
                limit.put_back(delivery)

        return divert_for_free

    def _make_shards(self, resources: Resources) -> Shards:
        """Make `Shards` that create shards on demand, or one fixed shard."""
        spec, limit = self.spec, self.limit
        if isinstance(limit, KeyLimit):
            return KeyLimitedShards(limit, spec.slots)
        bound = spec.queue_size(resources.buffer.bounds.records)
        batch, attempts = spec.batch, spec.retry.attempts
        is_limited = limit is not None or spec.slots is not None or spec.adaptive is not None
        limits = StartLimits(limit, spec.slots) if is_limited else None
        if batch is None:
            return Shards(bound) if limits is None else LimitedShards(limits, bound)
        if limits is None:
            return BatchShards(batch, attempts, bound, per_epoch=resources.exactly_once)
        return LimitedBatchShards(limits, batch, attempts, bound, per_epoch=resources.exactly_once)

    def _make_failure_handler(self, resources: Resources) -> FailureHandler:
        """Make the failure handler, with the recovery and the parking that the failure policy needs."""
        spec, recovery = self.spec, None
        match spec.on_failure:
            case "skip":
                recovery = skipping("on_failure='skip'")
            case DeadLetter(topic):
                recovery = self._dead_lettering(topic)
            case Park() as policy:
                self.parking = Parking(
                    policy,
                    group=resources.group_id,
                    handler=spec.name,
                    shards=self.shards,
                    shard_key=spec.shard_key,
                    fixed=spec.shards is not None,
                    batch_workers=None if spec.batch is None else spec.concurrency,
                    publish=resources.publish,
                    send=resources.send,
                    exactly_once=resources.exactly_once,
                    side_topics=resources.make_side_topics(),
                    buffer=resources.buffer,
                    clock=resources.clock,
                    now=resources.now,
                )
                recovery = self.parking.recovery
        return FailureHandler(
            spec.retry,
            recovery,
            shards=self.shards,
            counters=self.counters,
            clock=resources.clock,
            running=lambda: sum(run.recovery is None for worker in self.workers for run in worker.deliveries),
            workers=spec.shards or spec.concurrency,
            parking=self.parking,
            breaker=spec.on_failure.breaker if isinstance(spec.on_failure, DeadLetter) else None,
            handler=spec.name,
            group=resources.group_id,
        )

    def _dead_lettering(self, topic: str) -> Recovery:
        spec, resources = self.spec, self._resources
        send = spec.publish_dead_letter or resources.send
        value_format = None if spec.taken is None else spec.taken.format
        return dead_lettering(topic, send, group=resources.group_id, handler=spec.name, value_format=value_format)

    def _expiring(self) -> Divert | None:
        """Return what gives up the records that are too old; None if none ever is."""
        spec = self.spec
        if spec.max_age is None:
            return None
        dead_letters = None
        if isinstance(spec.on_failure, DeadLetter):
            dead_letters = self._dead_lettering(spec.on_failure.topic)
        return Expiry(spec.max_age, self._resources.now, dead_letters=dead_letters, parking=self.parking).divert

    def make_partition(self, name: TopicPartition, number: int, start: int) -> Partition:
        """Make a partition of one of its topics, with its gate closed.

        Args:
            name: Topic and partition.
            number: The number of its epoch.
            start: The offset of its first record.
        """
        resources, counts = self._resources, self.counters.topics[name.topic]
        observe = resources.observe
        if observe is None and not resources.exactly_once:
            return Partition(
                name, number, start, buffer=resources.buffer, counts=counts, sharder=self.sharder, clock=resources.clock
            )
        return ObservedPartition(
            name,
            number,
            start,
            buffer=resources.buffer,
            counts=counts,
            sharder=self.sharder,
            clock=resources.clock,
            completed=None if observe is None else observe(self.spec),
        )

    def start(self, tasks: TaskSet, clock: Callable[[], float]) -> None:
        """Start its workers and the tasks that watch and control them; *clock* is loop time."""
        name = self.spec.name
        for worker in self.workers:
            worker.task = tasks.start(worker.run(), worker.name, lasts=True)
        if self.spec.timeout is not None:
            tasks.start(_end_overdue(self.workers, self.spec.timeout, clock), f"{name} timeouts")
        if self.parking is not None:
            tasks.start(self.parking.read(), f"{name} reads parked records")
            tasks.start(self.parking.replays.run(), f"{name} replays parked records")

    def statistics(self) -> HandlerStatistics:
        """Return its counts and the state of its workers and shards. Safe from any thread."""
        spec = self.spec
        room = self._resources.buffer.bounds.records
        topics = spec.topics
        if spec.pattern is not None:
            topics = (*topics, spec.pattern)
        by_topic = self.counters.statistics()
        busy = [worker for worker in self.workers if worker.deliveries]
        handling = [worker for worker in self.handling if worker.deliveries]
        return HandlerStatistics(
            name=spec.name,
            topics=topics,
            concurrency=self.concurrency,
            busy=len(handling),
            shards=len(self.shards[0]) if spec.shards is None else len(self.shards),
            processed=sum(topic.processed for topic in by_topic),
            retried=sum(topic.retried for topic in by_topic),
            skipped=sum(topic.skipped for topic in by_topic),
            dead_lettered=sum(topic.dead_lettered for topic in by_topic),
            parked=sum(topic.parked for topic in by_topic),
            halted=sum(len(part.halted) for part in self.shards),
            outliving=_outliving(busy),
            by_topic=by_topic,
            shard_capacity=spec.queue_size(room) or room,
            shard_depth=max(part.depth for part in self.shards),
            queued=sum(part.unseen for part in self.shards),
            on_failure=_describe_policy(spec.on_failure),
            superseded=sum(topic.superseded for topic in by_topic),
            expired=sum(topic.expired for topic in by_topic),
            adaptive=None if self.adaptation is None else self.adaptation.statistics(),
        )


def _outliving(workers: Sequence[Worker]) -> tuple[str, ...]:
    """Return the first delivery of each run that outlives its cancellation or its epoch."""
    outliving = []
    for worker in workers:
        runs = [delivery for delivery in tuple(worker.deliveries) if worker.outlives(delivery)]
        if runs:
            outliving.append(repr(runs[0]))
    return tuple(outliving)


def _describe_policy(policy: OnFailure) -> str:
    """Return a failure policy in words."""
    match policy:
        case DeadLetter(topic):
            return f"dead letters to {topic}"
        case Park():
            return f"parks in {policy.topic}"
        case _:
            return policy


async def _end_overdue(workers: Sequence[Worker], timeout: float, clock: Callable[[], float]) -> None:
    """End overdue attempts of one handler until cancelled, with one timer for all its workers and none per record.

    A handler that does not end when it is cancelled is reported once; its shard waits for it.

    Args:
        workers: Workers of the handler.
        timeout: Seconds that an attempt may take.
        clock: Loop time.
    """
    reported: set[Delivery] = set()
    interval = min(max(timeout / _TIMEOUT_CHECKS, _SHORTEST_CHECK), _LONGEST_CHECK)
    while True:
        await asyncio.sleep(interval)
        now = clock()
        outliving = {
            worker.deliveries[0]: len(worker.deliveries) - 1
            for worker in workers
            if worker.cancelled and now - worker.started > timeout + _GRACE
        }
        for worker in workers:
            if worker.overdue(now):
                worker.time_out()
        for delivery in outliving.keys() - reported:
            message = "the handler of %r%s was cancelled after timeout=%g s and does not end: its shard waits for it"
            more = f" and {outliving[delivery]} more of its batch" if outliving[delivery] > 0 else ""
            logger.error(message, delivery, more, timeout, extra=record_fields("outlives_timeout", delivery))
        reported = set(outliving)
