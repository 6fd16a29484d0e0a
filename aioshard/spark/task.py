"""Code that runs in a Spark task: the engine with an app's handlers, or a plain read of the log.

Spark's thread passes on batches of outcomes. The engine runs in an event loop in another thread of the worker, with the
same code as in an app: shards, workers, retries, timeouts and failure policies.

The task that reads a range also runs its handlers: records never cross from Python to Java and back.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import queue
import threading
import time
import types
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import pyarrow as pa

from aioshard.app import App
from aioshard.core.options import DeadLetter
from aioshard.engine.control import caught_up, halted_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Handler
from aioshard.engine.runtime import Engine
from aioshard.errors import HaltedError, NotDrainedError, StuckError, TransportError
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.ranges import RangeTransport
from aioshard.loops import loop_factory
from aioshard.ports import (
    Allowance,
    AllowanceOf,
    Fault,
    FetchedBatch,
    LogRange,
    Message,
    Oversized,
    Transport,
)
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import as_text
from aioshard.settings import Settings
from aioshard.spark.outcomes import Outcomes
from aioshard.spark.plans import DEAD_LETTER
from aioshard.spark.rows import raw_batch
from aioshard.spark.work import Work, check_handlers
from aioshard.telemetry.outcome_rows import Trouble

T = TypeVar("T")

_COLLECT_AFTER = 100_000, 20, 20
"""Thresholds of the garbage collector. Thousands of records and rows are alive at the same time in a task. With the
default first threshold of 700, repeated scans of them cost almost as much as everything else together."""


@functools.cache
def worker_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this worker process, which runs in a separate thread.

    It is created with the first task: threads do not survive the fork that precedes it. Spark reuses its workers, and
    their tasks run one after another, so the event loop outlives a task; nothing that a task started on it may. If a
    coroutine does not end on it, `worker_loop.cache_clear()` gives the next task a new one.
    """
    loop = loop_factory()()
    threading.Thread(target=loop.run_forever, name="aioshard event loop", daemon=True).start()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    return loop


def submit(coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
    """Run a coroutine in the event loop of this process; a thread can wait for its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, worker_loop())


_ROWS = 5_000
"""Rows of one Arrow batch."""
_BATCHES = 6
"""Batches that may wait for Spark; beyond that, reading pauses."""
_HAND_OVER = 0.005
"""Seconds for which the event loop is blocked while Spark's thread writes a batch. Arrow writes each buffer of it by
a call into Python. If handlers never wait, each call would wait that long for the interpreter lock."""
_CHECK_INTERVAL = 0.1
"""Seconds between checks for halted or stuck handlers."""
_SHORT_INTERVAL = 0.01
"""Seconds between checks whether Spark has caught up, and for the end: each task of a job waits for its last check."""
_SILENCE = 1.0
"""Seconds that Spark's thread waits for rows before it checks whether the event loop is alive."""
_SETTINGS: dict[str, Any] = {"start_timeout": 60.0, "shutdown_timeout": 5.0}
"""No client waits for a task to become ready, and Spark repeats the unfinished work of an abandoned task."""
_END_TIMEOUT = 30.0
"""Seconds that an abandoned task has to end before its event loop is abandoned too."""


_Obstacle = tuple[Delivery, Trouble]
"""A record that prevents a task from finishing, and why."""


def run_handlers(
    work: Work, make_transport: Callable[[App], Transport], awaits_more: Callable[[Engine], bool] = lambda _: False
) -> Iterator[pa.RecordBatch]:
    """Run the handlers of an app over a client's records until its end; yield outcome rows.

    Args:
        work: The handlers to run and their settings.
        make_transport: Creates the client for the app with the task's settings.
        awaits_more: Whether the engine waits for records that may still arrive. Called regularly; it adds the ends of
            the engine's partitions once they are known.

    Raises:
        HaltedError: A record's retries are exhausted and its handler halts, or no record completed for `stuck_after`
            seconds. Not raised with `Work.halted_rows`.
        StuckError: No records can be read, or a handler blocks the event loop.
        AioshardError: The app cannot be imported, or cannot continue.
    """
    app = work.load()
    check_handlers(app, work.on_failure, work.total_concurrency)
    app.configure(**work.settings, auto_offset_reset="error", **_SETTINGS)
    yield from _Task(app, work, make_transport, awaits_more).run()


class _Task:
    """One Spark task. `run` belongs to Spark's thread, the coroutines to the event loop's.

    Invariants:
        * Every completed record becomes a row that `run` yields, unless the task fails or is abandoned.
    """

    def __init__(
        self,
        app: App,
        work: Work,
        make_transport: Callable[[App], Transport],
        awaits_more: Callable[[Engine], bool],
    ) -> None:
        self._app = app
        self._awaits_more = awaits_more
        self._work = work
        self._make_transport = make_transport
        # Read once, so that intervals do not change.
        ahead = time.time() - worker_loop().time()
        self._outcomes = Outcomes(self._hand_over, _ROWS, ahead)
        self._ready: queue.SimpleQueue[pa.RecordBatch | None] = queue.SimpleQueue()
        self._written = threading.Event()
        """Set by Spark's thread when it has written a batch."""
        self._ended = threading.Event()

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield rows until the end."""
        running = submit(self._serve())
        try:
            while (batch := self._take()) is not None:
                yield batch
                self._written.set()
            running.result()
        finally:
            running.cancel()
            if not self._ended.wait(_END_TIMEOUT):
                worker_loop.cache_clear()

    def _take(self) -> pa.RecordBatch | None:
        """Return the next rows, or None at the end; check meanwhile that the event loop is alive.

        Raises:
            StuckError: A handler blocks the event loop. The loop is abandoned.
        """
        patience = max(self._app.settings.stuck_after, 2 * _SILENCE)
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_SILENCE)
            alive = threading.Event()
            worker_loop().call_soon_threadsafe(alive.set)
            if not alive.wait(patience):
                worker_loop.cache_clear()
                self._ended.set()
                raise StuckError(
                    f"a handler has blocked the event loop for {patience:g} s without an await, and nothing else runs: "
                    f"{self._app.explain().strip()}"
                )

    def _hand_over(self, batch: pa.RecordBatch) -> None:
        """Pass rows to Spark's thread, and let it write them."""
        self._written.clear()
        self._ready.put(batch)
        self._written.wait(_HAND_OVER)

    def _is_full(self) -> bool:
        """Return whether Spark has fallen behind."""
        return self._ready.qsize() > _BATCHES

    async def _serve(self) -> None:
        app = self._app
        obstacles: Sequence[_Obstacle] = ()
        try:
            try:
                async with app.started(
                    lambda: _Paced(self._make_transport(app), self._is_full, self._outcomes.collect),
                    (lambda: KafkaProducer(app.settings)) if app.settings.bootstrap_servers else None,
                    adapt=functools.partial(_adapted, self._work, self._work.concurrency_of(app.handlers)),
                    observe=self._outcomes.observe,
                    replay=True,
                ):
                    engine = app.running_engine()
                    obstacles = await self._until_done(engine)
                    for delivery, trouble in obstacles:
                        self._outcomes.add(
                            engine.handlers.of(delivery.epoch.topic_partition.topic).spec, delivery, trouble
                        )
            except NotDrainedError:
                if not obstacles:
                    raise
            self._outcomes.finish()
            if obstacles and not self._work.halted_rows:
                raise HaltedError(
                    f"{delivery!r} (key {delivery.record.key!r}, {trouble.error_type}: {trouble.error})"
                    for delivery, trouble in obstacles
                )
        finally:
            self._ready.put(None)
            self._ended.set()

    async def _until_done(self, engine: Engine) -> Sequence[_Obstacle]:
        """Wait until all records are complete; otherwise return the records that prevent it."""
        rows = -1
        progress_at = 0.0
        while True:
            with anyio.move_on_after(_CHECK_INTERVAL), contextlib.suppress(HaltedError):
                await caught_up(engine, _SHORT_INTERVAL)
                return ()
            now = time.monotonic()
            self._outcomes.collect()
            if self._outcomes.count != rows or self._is_full() or self._awaits_more(engine):
                rows = self._outcomes.count
                progress_at = now
            # Records after a halted one would be repeated together with it, so continuing gains nothing.
            obstacles: Sequence[_Obstacle] = [_halted(delivery) for delivery in halted_of(engine)]
            if not obstacles and now - progress_at >= self._app.settings.stuck_after:
                obstacles = self._stuck(engine)
            if obstacles:
                return obstacles

    def _stuck(self, engine: Engine) -> Sequence[_Obstacle]:
        """Return the oldest records, because nothing has completed for too long.

        Raises:
            StuckError: No records are incomplete.
        """
        stuck_after = self._app.settings.stuck_after
        partitions = tuple(engine.rebalance.partitions)
        oldest = [delivery for owned in partitions if (delivery := owned.tracker.oldest) is not None]
        if not oldest:
            waiting = ", ".join(f"{owned.topic_partition} from offset {owned.tracker.position}" for owned in partitions)
            transport = engine.client.transport
            trouble = engine.trouble.why or (transport and transport.trouble) or "the brokers send nothing"
            raise StuckError(
                f"nothing was read for stuck_after={stuck_after:g} s ({waiting or 'no partitions'}): {trouble}"
            )
        message = f"no record completed for stuck_after={stuck_after:g} s. {self._app.explain().strip()}"
        return [_obstacle(delivery, StuckError.__name__, message) for delivery in oldest]


class _Paced:
    """Wraps a client so that it delivers nothing while Spark has fallen behind.

    Outcomes are collected before records are taken in: the records of both never take more memory than those that the
    engine may buffer.
    """

    def __init__(self, transport: Transport, is_full: Callable[[], bool], collect: Callable[[], None]) -> None:
        self._transport = transport
        self._is_full = is_full
        self._collect = collect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`."""
        if self._is_full():
            await asyncio.sleep(min(timeout, _SHORT_INTERVAL))
            return ()

        def collected(topic_partition: TopicPartition) -> Allowance:
            self._collect()
            return allowance(topic_partition)

        return await self._transport.poll(collected, timeout)


def _adapted(work: Work, most: int | None, spec: Handler) -> Handler:
    """Return a handler adapted to one of several tasks, which share its limits."""
    spec = spec._replace(publish_dead_letter=_discard, limit=spec.limit and spec.limit.divided_among(work.at_once))
    if work.on_failure is not None:
        skip = work.on_failure == "skip"
        topic = work.on_failure.removeprefix(DEAD_LETTER)
        spec = spec._replace(on_failure="skip" if skip else DeadLetter(topic))
    if most is not None:
        adaptive = None if spec.adaptive is None else spec.adaptive.at_most(most)
        spec = spec._replace(concurrency=min(spec.concurrency, most), adaptive=adaptive)
    return spec


async def _discard(delivery: Delivery, message: Message) -> int:  # noqa: ARG001 - the signature of `Send`
    """Discard the message: the outcome row holds the dead letter, and a planned run sends it later."""
    return 0


def _halted(delivery: Delivery) -> _Obstacle:
    if delivery.failure is None:
        return _obstacle(delivery, "HandlerError", "the record halted")
    return _obstacle(delivery, delivery.failure.error, delivery.failure.message)


def _obstacle(delivery: Delivery, error: str, message: str) -> _Obstacle:
    return delivery, Trouble("halted", error, as_text(message).decode(), delivery.record)


_ALLOWANCE = Allowance(2_000, 64 * 1024 * 1024, alone=True)
"""Size of one Arrow batch: records and bytes."""
_POLL_TIMEOUT = 0.5
_STALLED = 30.0
"""Seconds without progress after which a read fails."""


def read_raw(
    settings: Settings,
    ranges: Mapping[TopicPartition, LogRange],
    finished: Mapping[TopicPartition, Collection[int]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of some ranges; records of the same partition come in offset order.

    Args:
        settings: The brokers and the isolation level.
        ranges: At most one per partition.
        finished: Offsets to leave out.

    Raises:
        DataLossError: Retention has deleted the start of a range.
        TransportError: The records cannot be read.
    """
    transport = RangeTransport(settings, ranges, finished)
    remaining = {partition: bounds for partition, bounds in ranges.items() if bounds.start < bounds.end}
    progress_at = time.monotonic()
    try:
        submit(_open(transport, remaining)).result()
        while remaining:
            records: list[Record] = []
            for result in submit(transport.poll(lambda _: _ALLOWANCE, _POLL_TIMEOUT)).result():
                if isinstance(result, FetchedBatch):
                    records += result.records
                    progress_at = time.monotonic()
                    if result.next_offset >= remaining[result.topic_partition].end:
                        del remaining[result.topic_partition]
                elif isinstance(result, Fault) and not result.error.retriable:
                    raise result.error
            if records:
                yield raw_batch(records)
                progress_at = time.monotonic()
            elif time.monotonic() - progress_at > _STALLED:
                raise TransportError(
                    f"nothing was read from {', '.join(map(str, remaining))} for {_STALLED:g} s: check that the "
                    "brokers run and that each partition has a leader"
                )
    finally:
        submit(transport.close()).result()


async def _open(transport: RangeTransport, ranges: Mapping[TopicPartition, LogRange]) -> None:
    listener: Any = types.SimpleNamespace(assigned=lambda _partitions, _membership: None)  # nothing is revoked or lost
    await transport.start((), None, listener)
    for partition, bounds in ranges.items():
        transport.seek(partition, bounds.start)
    transport.resume(ranges)
