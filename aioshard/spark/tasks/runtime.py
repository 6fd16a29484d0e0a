"""The engine inside a Spark task: records from a client go in, outcome rows come out.

Spark's thread takes the outcomes. The engine runs in an event loop in another thread of the worker, with the same code
as in an app: shards, workers, retries, timeouts and failure policies.
"""

import asyncio
import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

import anyio
import pyarrow as pa

from aioshard.app import App
from aioshard.core.adaptive import Adaptive
from aioshard.core.recourse import DeadLetter
from aioshard.engine.catching_up import caught_up, halted_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import HandlerSpec
from aioshard.engine.runtime import Engine
from aioshard.errors import HaltedError, NotDrainedError, StuckError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import AllowanceOf, Fault, FetchedBatch, Message, Oversized, Transport
from aioshard.records import TopicPartition
from aioshard.spark.tasks.collecting import Collected
from aioshard.spark.tasks.loading import resolve_app
from aioshard.spark.tasks.work import DEAD_LETTER, Work, check_concurrency
from aioshard.spark.tasks.worker_loop import WorkerLoop, worker_loop

__all__ = ["DEAD_LETTER", "Arriving", "Work", "run_handlers"]

_LOOK_INTERVAL = 0.1
"""Seconds between checks for halted or stuck handlers."""
_END_INTERVAL = 0.01
"""Seconds between checks for the end: a job has many tasks, and each of them waits for its last check."""
_SILENCE = 1.0
"""Seconds that Spark's thread waits for rows before it checks whether the event loop is alive."""
_SETTINGS = {"start_timeout": 60.0, "shutdown_timeout": 5.0}
"""No client waits for a task to become ready, and Spark repeats the unfinished work of an abandoned task."""
_END_TIMEOUT = 30.0
"""Seconds that an abandoned task has to end before its event loop is abandoned too."""


class _Obstacle(NamedTuple):
    """A record that prevents a task from finishing."""

    delivery: Delivery
    error: str
    message: str

    def __str__(self) -> str:
        """Return the record, its key and the error."""
        return f"{self.delivery!r} (key {self.delivery.record.key!r}, {self.error}: {self.message})"


class Arriving(Protocol):
    """A source whose records arrive while the task runs, so that its ends are not known at the start."""

    def ends(self) -> Mapping[TopicPartition, int]:
        """Return the ends of partitions as soon as they are known."""

    @property
    def waiting(self) -> bool:
        """Whether the engine has to wait for more records."""


def run_handlers(
    work: Work, make_transport: Callable[[App], Transport], arriving: Arriving | None = None
) -> Iterator[pa.RecordBatch]:
    """Run the handlers of an app over a client's records until its end; yield outcome rows.

    Args:
        work: The handlers to run and their settings.
        make_transport: Creates the client for the app with the task's settings.
        arriving: The client's source, if the ends of its partitions are not known at the start.

    Raises:
        HaltedError: A record's retries are exhausted and its handler halts, or the diversion budget is exhausted, or no
            record completed for `stuck_after` seconds. Not raised with `Work.halted_rows`.
        StuckError: No records can be read, or a handler blocks the event loop.
        AioshardError: The app cannot be imported, or cannot continue.
    """
    app = resolve_app(work.app, work.places)
    check_concurrency(app.handlers, work.total_concurrency)
    app.configure(**work.settings, auto_offset_reset="error", **_SETTINGS)
    yield from _Task(app, work, make_transport, worker_loop(), arriving).run()


class _Task:
    """One Spark task. `run` belongs to Spark's thread, the coroutines to the event loop's."""

    def __init__(
        self,
        app: App,
        work: Work,
        make_transport: Callable[[App], Transport],
        loop: WorkerLoop,
        arriving: Arriving | None,
    ) -> None:
        self._app = app
        self._arriving = arriving
        self._work = work
        self._make_transport = make_transport
        self._loop = loop
        self._collected = Collected(loop.loop, {handler.name: handler.shards is not None for handler in app.handlers})
        self._progress_at = self._alive_at = time.monotonic()

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield rows until the end."""
        running = self._loop.submit(self._serve())
        try:
            while True:
                try:
                    rows = self._collected.take(_SILENCE)
                except queue.Empty:
                    self._check_alive()
                    self._loop.loop.call_soon_threadsafe(self._note_life)
                    continue
                if rows is None:
                    break
                self._note_life()
                yield rows
                self._note_life()
            running.result()
        finally:
            if not running.done and not self._loop.left:
                running.give_up(_END_TIMEOUT)

    def _check_alive(self) -> None:
        patience = max(self._app.settings.stuck_after, 2 * _SILENCE)
        if time.monotonic() - self._alive_at > patience:
            self._loop.left = True
            raise StuckError(
                f"a handler has kept the event loop for {patience:g} s without an await, and nothing else can run: "
                f"{self._app.explain().strip()}"
            )

    def _note_life(self) -> None:
        """Note that the event loop is alive: it called this, or produced rows."""
        self._alive_at = time.monotonic()

    async def _serve(self) -> None:
        obstacles: Sequence[_Obstacle] = ()
        try:
            try:
                async with self._started() as app:
                    obstacles = await self._until_done(app.running_engine(), self._collected)
                    self._tell(app.running_engine(), obstacles)
            except NotDrainedError:
                if not obstacles:
                    raise
            if obstacles and not self._work.halted_rows:
                raise HaltedError(map(str, obstacles))
        finally:
            self._collected.close()

    def _started(self) -> AbstractAsyncContextManager[App]:
        app, collected = self._app, self._collected
        return app.started(
            lambda: _Paced(self._make_transport(app), collected.room),
            (lambda: KafkaProducer(app.settings)) if app.settings.bootstrap_servers else None,
            adapt=functools.partial(_adapted, self._work, self._work.concurrency_of(app.handlers)),
            observe=collected.observe,
            replay=True,
        )

    async def _until_done(self, engine: Engine, collected: Collected) -> Sequence[_Obstacle]:
        """Wait until all records are complete; otherwise return the records that prevent it."""
        done = asyncio.create_task(caught_up(engine, _END_INTERVAL), name="caught up")
        seen = -1
        try:
            while True:
                await asyncio.wait([done], timeout=_LOOK_INTERVAL)
                now = time.monotonic()
                if collected.ended != seen or not collected.room.is_set() or self._awaits_more(engine):
                    seen, self._progress_at = collected.ended, now
                if done.done():
                    done.result()
                    return ()
                # Records after a halted one would be repeated together with it, so continuing gains nothing.
                obstacles = _halted(engine) or _spent(engine) or self._stuck(engine)
                if obstacles:
                    return obstacles
        except HaltedError:
            return _halted(engine)
        finally:
            done.cancel()
            await asyncio.wait([done])

    def _awaits_more(self, engine: Engine) -> bool:
        """Return whether all records so far are complete and more may arrive; update the known ends."""
        if self._arriving is None:
            return False
        engine.rebalance.ends.update(self._arriving.ends())
        return self._arriving.waiting and not engine.buffer.records

    def _stuck(self, engine: Engine) -> Sequence[_Obstacle]:
        """Return the oldest records if nothing has completed for too long."""
        stuck_after = self._app.settings.stuck_after
        if time.monotonic() - self._progress_at < stuck_after:
            return ()
        epochs = engine.rebalance.epochs
        oldest = [delivery for epoch in epochs if (delivery := epoch.tracker.oldest) is not None]
        if not oldest:
            left = ", ".join(f"{epoch.topic_partition} from offset {epoch.tracker.position} on" for epoch in epochs)
            trouble = engine.trouble or (engine.transport and engine.transport.trouble) or "the brokers send nothing"
            raise StuckError(
                f"nothing was read for stuck_after={stuck_after:g} s, {left or 'of no partition'}: {trouble}"
            )
        why = f"nothing came to its end for stuck_after={stuck_after:g} s. {self._app.explain().strip()}"
        return [_Obstacle(delivery, StuckError.__name__, why) for delivery in oldest]

    def _tell(self, engine: Engine, obstacles: Sequence[_Obstacle]) -> None:
        """Add the blocking records to the rows."""
        for delivery, error, message in obstacles:
            spec = engine.handler_of(delivery.epoch.topic_partition.topic).spec
            self._collected.add(spec, delivery, "halted", error, message)


class _Paced:
    """Wraps a client so that it delivers nothing while Spark does not keep up."""

    def __init__(self, transport: Transport, room: asyncio.Event) -> None:
        self._transport = transport
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`."""
        if not self._room.is_set():
            with anyio.move_on_after(timeout):
                await self._room.wait()
            return ()
        return await self._transport.poll(allowance, timeout)


def _adapted(work: Work, most: int | None, spec: HandlerSpec) -> HandlerSpec:
    """Return a handler adapted to one of several tasks, which share its limits."""
    concurrency, adaptive = spec.concurrency, spec.adaptive
    if most is not None:
        concurrency = min(concurrency, most)
        adaptive = adaptive and _bounded(adaptive, most)
        if spec.resized is not None:
            spec.resized(concurrency)
    policy = spec.on_failure
    if work.on_failure == "skip":
        policy = "skip"
    elif work.on_failure is not None:
        policy = DeadLetter(work.on_failure.removeprefix(DEAD_LETTER))
    rate = spec.rate_limit and spec.rate_limit.shared_by(work.at_once)
    return spec._replace(concurrency=concurrency, adaptive=adaptive, on_failure=policy, letters=_keep, rate_limit=rate)


def _bounded(adaptive: Adaptive, most: int) -> Adaptive:
    initial = adaptive.initial and min(adaptive.initial, most)
    least, highest = min(adaptive.minimum, most), min(adaptive.maximum, most)
    return dataclasses.replace(adaptive, minimum=least, maximum=highest, initial=initial)


async def _keep(message: Message) -> int:  # noqa: ARG001 - the signature of `Publish`
    """Discard the message: the outcome row holds the dead letter, and a planned run sends it later."""
    return 0


def _halted(engine: Engine) -> Sequence[_Obstacle]:
    """Return the records that failed permanently."""
    return [_obstacle(delivery) for delivery in halted_of(engine)]


def _obstacle(delivery: Delivery) -> _Obstacle:
    note = delivery.failure
    return (
        _Obstacle(delivery, "HandlerError", "it halts")
        if note is None
        else _Obstacle(delivery, note.error, note.message)
    )


def _spent(engine: Engine) -> Sequence[_Obstacle]:
    """Return records that can no longer be diverted: a dependency of the handler seems to be down."""
    found = []
    for epoch in engine.rebalance.epochs:
        for why in epoch.pauses.values():
            failed = next((one for one in epoch.tracker.values() if one.failure is not None), epoch.tracker.oldest)
            if failed is not None:
                cause = _obstacle(failed)
                found.append(cause._replace(message=f"{cause.message}; {why}"))
    return found
