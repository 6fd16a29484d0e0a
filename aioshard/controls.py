"""What a running app can be told and asked, beside being stopped."""

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
    """The part of an app that acts on its running engine, and looks into it.

    Coroutines are for the app's event loop. The others may be called from any thread: they return when the engine has
    done it. From another thread they raise `TimeoutError` where something holds that loop for 10 s; it may be done
    later.
    """

    group_id: str
    _registrations: list[Registration]
    # Set by the lifecycle alone, and only read here.
    _engine: Engine | None = None
    _draining: asyncio.Task[None] | None = None
    """Ends the engine; set from the first moment of that until the app has ended."""
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
        """Publish with the app's idempotent producer; returns when the brokers have acknowledged (`acks=all`).

        Also when the app has drained, until it ends: requests that a web server still answers may need it.

        Args:
            topic: Where it goes.
            value: Bytes; a string, in UTF-8; None for a tombstone; anything else as JSON.
            key: Bytes or a string. Without *partition* it chooses the partition, as Java's partitioner does.
            headers: Name and content of each.
            partition: Instead of the key's choice.

        Returns:
            The offset.

        Raises:
            StateError: The app does not run.
            TransportError: Not acknowledged; see `AuthorizationError` and `MessageTooLargeError` among them.
        """
        outgoing = message(topic, value, key=key, headers=headers, partition=partition)
        if self._engine is None:
            raise self._does_not_run()
        return await self._engine.producer.publish(outgoing)

    def retry_now(self, topic: str, partition: int, offset: int) -> None:
        """Run a halted record again now, with all its attempts; also one that waits for its next attempt.

        Raises:
            StateError: The app does not run, or the record does not wait in this process.
        """
        self._release(TopicPartition(topic, partition), offset, None)

    def skip(self, topic: str, partition: int, offset: int) -> None:
        """Complete a halted record without processing it: its shard goes on, and its offset may be committed.

        Raises:
            StateError: As `retry_now`.
        """
        self._release(TopicPartition(topic, partition), offset, skipping("the application asked for it"))

    def release_parked(self, topic: str, partition: int, offset: int) -> None:
        """Run a parked record again now, and what is parked behind it under its key, in order.

        `aioshard park release` asks for the same from outside, and is remembered where nobody has the partition.

        Args:
            topic: Where the record came from, not where it is parked.
            partition: Its number.
            offset: Of any parked record of the key.

        Raises:
            StateError: The app does not run, or the record is not parked in this process.
        """
        self._do(lambda engine: release_parked(engine, TopicPartition(topic, partition), offset))

    def _release(self, topic_partition: TopicPartition, offset: int, detour: Detour | None) -> None:
        self._do(lambda engine: release(engine, topic_partition, offset, detour))

    def pause(self, topic: str, partition: int | None = None, *, why: str = "the application asked for it") -> None:
        """Let no record of a partition start, or of all partitions of a topic; what runs goes on.

        Nothing more of it is taken in. It lasts until `resume`, also when the partition goes away and comes back.

        Args:
            topic: A topic that the app consumes.
            partition: Its number; None is every partition that this process has now.
            why: Shown by `explain` and in the statistics.

        Raises:
            StateError: The app does not run, or has no such partition now.
        """
        self._do(lambda engine: pause(engine, assigned_partitions(engine, topic, partition), why))

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Take `pause` back; None resumes every paused partition of the topic.

        Raises:
            StateError: The app does not run.
        """

        def act(engine: Engine) -> None:
            if partition is not None:
                resume(engine, [TopicPartition(topic, partition)])
            else:
                resume(engine, [p for p in engine.pauses if isinstance(p, TopicPartition) and p.topic == topic])

        self._do(act)

    def pause_handler(self, name: str, *, why: str = "the application asked for it") -> None:
        """As `pause`, for everything that the handler of that name consumes, now and later.

        Raises:
            StateError: The app does not run, or has no such handler.
        """
        self._do(lambda engine: pause(engine, handler_name(engine, name), why))

    def resume_handler(self, name: str) -> None:
        """Take `pause_handler` back.

        Raises:
            StateError: As `pause_handler`.
        """
        self._do(lambda engine: resume(engine, handler_name(engine, name)))

    async def seek(self, topic: str, partition: int, to: SeekTo) -> int:
        """Have an assigned partition go on elsewhere; returns when it does.

        Nothing new of the partition starts, what runs has `drain_timeout` to end, and what it finished is committed.
        Then the new position is committed, before a record from there is handed out. Nothing of what was finished
        before is taken along: records behind the new position are processed again, noted as finished or not, and
        those before it are passed over. Other partitions go on all the time.

        A rebalance meanwhile does not take the position back as long as the partition stays with this process, nor
        does cancelling the call. From a handler of the same partition, ask in a task of its own: the drain waits for
        the handler.

        Args:
            topic: A topic that the app consumes.
            partition: Its number.
            to: An offset; a datetime with its time zone, or seconds since the epoch as a float, for the first record
                that is not older (the end of the log where all are); `"beginning"` or `"end"` of the log.

        Returns:
            The offset. Where retention has passed it by then, the partition goes on at the start of its log.

        Raises:
            StateError: The app does not run, or has no such partition now; an offset outside the log; a seek before
                this one is under way; or the partition was given to another member before it was done.
            TransportError: The brokers did not tell where that is.
        """
        return await seek(self.running_engine(), TopicPartition(topic, partition), to)

    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions that this process has now, sorted; those that are being handed over are not among them.

        Raises:
            StateError: The app does not run.
        """
        return self._do(lambda engine: tuple(sorted(e.topic_partition for e in engine.rebalance.epochs if e.is_open)))

    def position(self, topic: str, partition: int) -> int:
        """The next offset of an assigned partition that is taken in; what lies before it may be incomplete still.

        Raises:
            StateError: The app does not run, or does not have the partition now.
        """
        return self._do(lambda engine: open_epoch(engine, TopicPartition(topic, partition)).tracker.position)

    async def committed(self, topic: str, partition: int) -> int | None:
        """What the group has committed on a partition, assigned or not, asked from the brokers now; None if nothing.

        Raises:
            StateError: The app does not run.
            TransportError: The brokers did not tell.
        """
        engine, one = self.running_engine(), TopicPartition(topic, partition)
        found = await answered(engine, engine.rebalance.client.committed([one]), f"what is committed on {one}")
        commit = found[one]
        return None if commit is None else commit.offset

    async def partitions(self, topic: str) -> tuple[int, ...]:
        """The numbers of a topic's partitions, in order; none where the topic does not exist. It is not created.

        Raises:
            StateError: The app does not run.
            TransportError: The brokers did not tell.
        """
        engine = self.running_engine()
        asking = engine.rebalance.client.partitions(topic)
        return tuple(sorted(await answered(engine, asking, f"the partitions of topic {topic!r}")))

    async def topics(self) -> tuple[str, ...]:
        """The names of all topics that this user may see, sorted, without those of the brokers themselves.

        Raises:
            StateError: The app does not run.
            TransportError: The brokers did not tell.
        """
        engine = self.running_engine()
        return tuple(sorted(await answered(engine, engine.rebalance.client.topics(), "the topics")))

    def set_concurrency(self, handler: str | Callable[..., Any], concurrency: int) -> None:
        """Have another number of workers for a handler from now on, until the app stops.

        More begin at once. Of those that are too many the idle ones end at once, the others after their current run:
        nothing is interrupted, and order is kept. Threads of a plain `def` follow.

        Args:
            handler: Its function, or the name of it.
            concurrency: 1 to 10,000; `pause_handler` lets nothing start.

        Raises:
            StateError: The app does not run, or has no such handler.
            HandlerError: The number was refused, or the handler has fixed shards.
        """

        def act(engine: Engine) -> None:
            set_concurrency(self._running(engine, handler), concurrency)

        self._do(act)

    def _running(self, engine: Engine, handler: str | Callable[..., Any]) -> Running:
        """What serves a handler."""
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
        """Act on the engine in its event loop, from whichever thread."""
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
            except BaseException as error:  # noqa: BLE001 - raised where it was asked
                answer.set_exception(error)

        loop.call_soon_threadsafe(act_there)
        return answer.result(_ANSWER_TIMEOUT)

    def running_engine(self) -> Engine:
        """The engine, for parts of this package that run handlers in another way.

        Raises:
            StateError: The app does not run.
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

    # Looking in ---------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """A frozen snapshot of what the app does; safe to call from any thread.

        After the app has ended: its last state.
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
        """Why each partition does not advance, in sentences; safe to call from any thread."""
        engine = self._engine
        if engine is None:
            return "The app does not run.\n"
        if self._has_drained:
            return "The app has drained: it consumes nothing more.\n"
        return explain(engine, show_keys=self.settings.show_keys)

    def diagnose(self) -> Diagnosis:
        """What `explain` says, for programs: findings and oldest records with their stacks; from any thread."""
        engine = self._engine
        if engine is None:
            return Diagnosis(state=self.statistics().state, findings=(), partitions=(), outliving=())
        return diagnose(engine, show_keys=self.settings.show_keys)

    def workload(self) -> Workload | None:
        """What workers run, which shards are deep, what failed and is parked; from any thread.

        Of each kind the worst few. None while the app does not run.
        """
        engine = self._engine
        return None if engine is None else workload(engine, show_keys=self.settings.show_keys)
