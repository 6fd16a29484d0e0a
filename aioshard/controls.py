"""Control and inspect a running app."""

import asyncio
import concurrent.futures
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from aioshard.engine.control import (
    SeekTo,
    answered,
    assigned_partitions,
    handler_name,
    open_epoch,
    pause,
    release,
    release_parked,
    resume,
    seek,
    set_concurrency,
)
from aioshard.engine.failing.recourse import skipping
from aioshard.engine.handler import Running
from aioshard.engine.insight.doctor import diagnose
from aioshard.engine.insight.snapshot import explain, statistics, workload
from aioshard.engine.outcomes import Detour
from aioshard.engine.runtime import Engine
from aioshard.errors import StateError
from aioshard.handlers import Registration
from aioshard.observe import Diagnosis, Statistics, Workload
from aioshard.records import TopicPartition
from aioshard.serde.messages import message

if TYPE_CHECKING:
    from aioshard.settings import Settings
    from aioshard.telemetry.journal import Journal

__all__ = ["Controls"]

T = TypeVar("T")

_ANSWER_TIMEOUT = 10.0


class Controls:
    """The part of an app that controls and inspects its running engine.

    Call coroutines in the app's event loop. You can call the other methods from any thread; they return when the
    engine has acted. In another thread they raise `TimeoutError` if the event loop is blocked for 10 s; the engine may
    still act later.
    """

    group_id: str
    _registrations: list[Registration]
    # Set only by the lifecycle, and only read here.
    _engine: Engine | None = None
    _draining: asyncio.Task[None] | None = None
    """The task that ends the engine; set from the start of the drain until the app has ended."""
    _loop: asyncio.AbstractEventLoop | None = None
    _last: Statistics | None = None
    _journal: "Journal | None" = None

    @property
    @abstractmethod
    def settings(self) -> "Settings":
        """The settings in effect."""

    async def publish(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | None = None,
        headers: Iterable[tuple[str, bytes | str | None]] = (),
        partition: int | None = None,
    ) -> int:
        """Publish with the app's idempotent producer; return once the brokers have acknowledged (`acks=all`).

        It also works after the app has drained, until it ends: requests in flight in a web server may need it.

        Args:
            topic: Destination topic.
            value: Bytes; a string, in UTF-8; None for a tombstone; anything else as JSON.
            key: Bytes or a string. Without *partition* it chooses the partition, as in Java's partitioner.
            headers: Pairs of name and content.
            partition: Overrides the partition chosen by the key.

        Returns:
            The offset.

        Raises:
            StateError: The app is not running.
            TransportError: The message was not acknowledged; subclasses include `AuthorizationError` and
                `MessageTooLargeError`.
        """
        outgoing = message(topic, value, key=key, headers=headers, partition=partition)
        if self._engine is None:
            raise self._does_not_run()
        return await self._engine.producer.publish(outgoing)

    def retry_now(self, topic: str, partition: int, offset: int) -> None:
        """Retry a halted record now, with all its attempts; also a record that waits for its next attempt.

        Raises:
            StateError: The app is not running, or the record is not waiting in this process.
        """
        self._release(TopicPartition(topic, partition), offset, None)

    def skip(self, topic: str, partition: int, offset: int) -> None:
        """Complete a halted record without processing it: its shard resumes, and its offset can be committed.

        Raises:
            StateError: As for `retry_now`.
        """
        self._release(TopicPartition(topic, partition), offset, skipping("the application asked for it"))

    def release_parked(self, topic: str, partition: int, offset: int) -> None:
        """Retry a parked record now, followed in order by the records parked behind it under the same key.

        `aioshard park release` requests the same from outside, and stores the request if no member owns the partition.

        Args:
            topic: Topic that the record came from, not the one where it is parked.
            partition: Partition number in that topic.
            offset: Offset of any parked record of the key.

        Raises:
            StateError: The app is not running, or the record is not parked in this process.
        """
        self._do(lambda engine: release_parked(engine, TopicPartition(topic, partition), offset))

    def _release(self, topic_partition: TopicPartition, offset: int, detour: Detour | None) -> None:
        self._do(lambda engine: release(engine, topic_partition, offset, detour))

    def pause(self, topic: str, partition: int | None = None, *, why: str = "the application asked for it") -> None:
        """Pause a partition, or all partitions of a topic: no record starts, while running ones continue.

        Fetching stops too. The pause lasts until `resume`, even if the partition is revoked and comes back.

        Args:
            topic: A topic that the app consumes.
            partition: Partition number; None means every partition that this process owns now.
            why: Shown by `explain` and in the statistics.

        Raises:
            StateError: The app is not running, or does not own such a partition now.
        """
        self._do(lambda engine: pause(engine, assigned_partitions(engine, topic, partition), why))

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Undo `pause`; None resumes every paused partition of the topic.

        Raises:
            StateError: The app is not running.
        """

        def act(engine: Engine) -> None:
            if partition is not None:
                resume(engine, [TopicPartition(topic, partition)])
            else:
                resume(engine, [p for p in engine.pauses if isinstance(p, TopicPartition) and p.topic == topic])

        self._do(act)

    def pause_handler(self, name: str, *, why: str = "the application asked for it") -> None:
        """Pause everything that the handler of that name consumes, now and later; see `pause`.

        Raises:
            StateError: The app is not running, or has no such handler.
        """
        self._do(lambda engine: pause(engine, handler_name(engine, name), why))

    def resume_handler(self, name: str) -> None:
        """Undo `pause_handler`.

        Raises:
            StateError: As for `pause_handler`.
        """
        self._do(lambda engine: resume(engine, handler_name(engine, name)))

    async def seek(self, topic: str, partition: int, to: SeekTo) -> int:
        """Move an assigned partition to another position; return once it has resumed there.

        No new records of the partition start, running ones have `drain_timeout` to end, and their completions are
        committed. Then the new position is committed, before any record from there is delivered. Earlier completions
        do not carry over: records from the new position on are processed again even if they were stored as finished,
        and those before it are skipped. Other partitions continue throughout.

        The new position survives a rebalance as long as the partition stays with this process, and also a cancelled
        call. To seek the partition of a running handler, call this in a separate task: the drain waits for the handler.

        Args:
            topic: A topic that the app consumes.
            partition: Partition number.
            to: An offset; a datetime with a time zone, or seconds since the epoch as a float, for the first record at
                or after that time (the end of the log if there is none); `"beginning"` or `"end"` of the log.

        Returns:
            The offset. If retention passes it before the partition resumes, the partition resumes at the start of its
            log.

        Raises:
            StateError: The app is not running, or does not own the partition now; the offset is outside the log;
                another seek is in progress; or the partition was assigned to another member before the seek was done.
            TransportError: The brokers did not report the position.
        """
        return await seek(self.running_engine(), TopicPartition(topic, partition), to)

    def assignment(self) -> tuple[TopicPartition, ...]:
        """Return the partitions that this process owns now, sorted, except those that are being handed over.

        Raises:
            StateError: The app is not running.
        """
        return self._do(lambda engine: tuple(sorted(e.topic_partition for e in engine.rebalance.epochs if e.is_open)))

    def position(self, topic: str, partition: int) -> int:
        """Return the next offset to read of an assigned partition; earlier records may still be incomplete.

        Raises:
            StateError: The app is not running, or does not own the partition now.
        """
        return self._do(lambda engine: open_epoch(engine, TopicPartition(topic, partition)).tracker.position)

    async def committed(self, topic: str, partition: int) -> int | None:
        """Query the brokers for the group's committed offset of a partition, assigned or not; None if there is none.

        Raises:
            StateError: The app is not running.
            TransportError: The brokers did not report it.
        """
        engine, one = self.running_engine(), TopicPartition(topic, partition)
        found = await answered(engine, engine.rebalance.client.committed([one]), f"what is committed on {one}")
        commit = found[one]
        return None if commit is None else commit.offset

    async def partitions(self, topic: str) -> tuple[int, ...]:
        """Return the partition numbers of a topic, in order; empty if it does not exist. The topic is not created.

        Raises:
            StateError: The app is not running.
            TransportError: The brokers did not report them.
        """
        engine = self.running_engine()
        asking = engine.rebalance.client.partitions(topic)
        return tuple(sorted(await answered(engine, asking, f"the partitions of topic {topic!r}")))

    async def topics(self) -> tuple[str, ...]:
        """Return the names of all topics visible to this user, sorted, without Kafka's internal topics.

        Raises:
            StateError: The app is not running.
            TransportError: The brokers did not report them.
        """
        engine = self.running_engine()
        return tuple(sorted(await answered(engine, engine.rebalance.client.topics(), "the topics")))

    def set_concurrency(self, handler: str | Callable[..., Any], concurrency: int) -> None:
        """Change the number of workers of a handler until the app stops.

        Additional workers start immediately. Of surplus workers, idle ones end immediately and the others after their
        current run: nothing is interrupted, and order is kept. The threads of a plain `def` are adjusted too.

        Args:
            handler: The handler's function, or its name.
            concurrency: 1 to 10,000; to stop a handler completely, use `pause_handler`.

        Raises:
            StateError: The app is not running, or has no such handler.
            HandlerError: The number was refused, or the handler has fixed shards.
        """

        def act(engine: Engine) -> None:
            set_concurrency(self._running(engine, handler), concurrency)

        self._do(act)

    def _running(self, engine: Engine, handler: str | Callable[..., Any]) -> Running:
        """Return the running handler."""
        if isinstance(handler, str):
            found = [running for running in engine.handlers if running.spec.name == handler_name(engine, handler)]
        else:
            found = [
                running
                for running, registration in zip(engine.handlers, self._registrations, strict=True)
                if registration.function is handler
            ]
        if not found:
            raise StateError(
                f"{handler!r} is no handler of app {self.group_id!r}: give the function that was decorated"
            )
        if len(found) > 1:
            raise StateError(f"{len(found)} handlers are meant by {handler!r}: give the function of one")
        return found[0]

    def _do(self, act: Callable[[Engine], T]) -> T:
        """Act on the engine in its event loop, from any thread."""
        engine, loop = self.running_engine(), self._loop
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is loop or loop is None:
            return act(engine)
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def act_there() -> None:
            try:
                answer.set_result(act(engine))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                answer.set_exception(error)

        loop.call_soon_threadsafe(act_there)
        return answer.result(_ANSWER_TIMEOUT)

    def running_engine(self) -> Engine:
        """Return the engine, for parts of this package that run handlers in another way.

        Raises:
            StateError: The app is not running.
        """
        if self._engine is None:
            raise self._does_not_run()
        if self._has_drained:
            raise StateError(f"app {self.group_id!r} has drained: it consumes nothing until it is started again")
        return self._engine

    @property
    def _has_drained(self) -> bool:
        return self._draining is not None and self._draining.done()

    def _does_not_run(self) -> StateError:
        return StateError(f"app {self.group_id!r} does not run")

    # Inspection ---------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return a frozen snapshot of the app's activity; safe to call from any thread.

        After the app has ended, it returns the last state.
        """
        engine = self._engine
        if engine is not None:
            found = statistics(engine, self.group_id, self.settings.client)
            journal = self._journal
            return found if journal is None else dataclasses.replace(found, journal=journal.statistics())
        if self._last is not None:
            return self._last
        return Statistics(
            state="stopped",
            group_id=self.group_id,
            member_id=None,
            rebalances=0,
            commits=0,
            commit_failures=0,
            replayed=0,
            already_done=0,
            buffered_records=0,
            buffered_bytes=0,
            client_losses=0,
            trouble=None,
            partitions=(),
            handlers=(),
        )

    def explain(self) -> str:
        """Explain in sentences why each partition does not advance; safe to call from any thread."""
        engine = self._engine
        if engine is None:
            return "The app does not run.\n"
        if self._has_drained:
            return "The app has drained: it consumes nothing more.\n"
        return explain(engine, show_keys=self.settings.show_keys)

    def diagnose(self) -> Diagnosis:
        """Return the data behind `explain`: findings and oldest records with their stacks; from any thread."""
        engine = self._engine
        if engine is None:
            return Diagnosis(state=self.statistics().state, findings=(), partitions=(), outliving=())
        return diagnose(engine, show_keys=self.settings.show_keys)

    def workload(self) -> Workload | None:
        """Return current runs, deep shards, and failed and parked records; from any thread.

        It contains only the worst few of each kind. None while the app is not running.
        """
        engine = self._engine
        return None if engine is None else workload(engine, show_keys=self.settings.show_keys)
