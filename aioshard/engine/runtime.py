"""A running engine: its tasks from start to stop, and the supervisor of the client."""

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from aioshard.core.flow import Usage
from aioshard.core.losses import Losses
from aioshard.engine.admission import Admission
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.feed import Feed
from aioshard.engine.fetcher import Pump
from aioshard.engine.handler import HandlerSpec, Running, Surroundings, serve
from aioshard.engine.log_ends import LogEnds
from aioshard.engine.loop_watch import Holder, LoopWatch
from aioshard.engine.observed import Observe, ObservedEpoch, noted
from aioshard.engine.rebalance import Rebalance
from aioshard.engine.tasks import TaskSet, finish
from aioshard.engine.watch import Liveness, SinceWatch, StuckWatch, TroubleWatch, facts_of
from aioshard.engine.worker import Worker
from aioshard.errors import AioshardError, HandlerError, NotDrainedError, StartError, TaskCancelledError, TransportError
from aioshard.observe import AppState
from aioshard.ports import Clients, GroupHasMembersError, InstanceIdTakenError, Producer, Transport
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Engine"]

logger = logging.getLogger("aioshard.engine")

_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 5.0
_TURN = 0.01
"""Seconds between checks of cancelled runs while the app stops: nothing signals their end."""


class Engine:
    """Consumes with the given handlers until stopped; each start of an app makes a new one.

    `start` returns once the first assignment is complete; `stop` drains and commits. In between, the supervisor
    rebuilds the client whenever it is lost. Owned by the event loop that started it.
    """

    def __init__(
        self,
        group_id: str,
        settings: "Settings",
        specs: Sequence[HandlerSpec],
        clients: Clients,
        producer: Producer,
        *,
        describe: Callable[["Engine", Epoch], str],
        find_holder: Callable[["Engine", LoopWatch], Holder],
        watch_loop: bool = True,
        observe: Observe | None = None,
    ) -> None:
        """Make an engine; nothing runs yet.

        Args:
            group_id: The consumer group.
            settings: Timeouts and limits.
            specs: The handlers.
            clients: Makes the client, again after each loss, and the readers of parked records.
            producer: Publishes for handlers and failure policies; its creator closes it.
            describe: Describes a partition that does not advance, for the log.
            find_holder: Finds what blocks the event loop, for the log and for explanations.
            watch_loop: Whether to watch from a thread for a blocked event loop.
            observe: Receives the outcome of each record.
        """
        loop = asyncio.get_running_loop()
        self.group_id = group_id
        self.settings = settings
        self.clock = loop.time
        self.started_at = self.clock()
        self.state: AppState = "starting"
        self.transport: Transport | None = None
        self.client_losses = 0
        self.trouble: str | None = None
        """Why nothing can be consumed at all now; None while it can."""
        self.trouble_since = 0.0
        self.failed: asyncio.Future[None] = loop.create_future()
        """Done with an exception once the app cannot continue."""
        self.producer = producer
        self.pauses: dict[TopicPartition | str, str] = {}
        """Partitions and handler names that the application paused, each with the reason as a sentence."""
        self._make_transport = clients.transport
        self._supervisor: asyncio.Task[object] | None = None
        self._stopping = False
        self._ending: asyncio.Future[None] = loop.create_future()
        """Done when the app begins to stop, which also ends a start that is still waiting."""
        self._lost_id = Losses(self.clock)
        self._settled_once = False
        """Whether the current client has received an assignment and all its partitions were opened."""
        self._tasks = TaskSet(self._crashed)
        self.buffer = Buffer(Usage(settings.max_buffered_records, settings.max_buffered_bytes), self._wake_pump)
        around = Surroundings(group_id, producer.publish, clients.side_topics, self.buffer, self.clock)
        self._observe = observe
        self.handlers = tuple(serve(spec if observe is None else noted(spec, self.clock), around) for spec in specs)
        self.committer = Committer(settings.commit_interval, settings.commit_timeout, self.clock)
        self.committer.refused = self._refused
        self.rebalance = Rebalance(
            group_id, settings, self, committer=self.committer, tasks=self._tasks, clock=self.clock
        )
        self.standstill = TroubleWatch(self._why_nothing_moves, self.clock)
        self.loop_watch = LoopWatch(functools.partial(find_holder, self)) if watch_loop else None
        self.log_ends = LogEnds(lambda: self.transport, lambda: self.rebalance.epochs)
        self._watch = StuckWatch(
            lambda: self.rebalance.epochs,
            lambda epoch: describe(self, epoch),
            self._behind,
            settings.stuck_after,
            self.clock,
        )
        self.admission = Admission(
            self.buffer, self.rebalance.fetchers, self.clock, settings.stuck_after, self.committer.notes
        )
        self.pump = Pump(self.buffer, self.rebalance.fetchers, self.clock, self.admission, self.rebalance.restart)
        self.since = SinceWatch(self._facts, self.clock)
        self.liveness = Liveness(self.pump, self.committer, settings, self.since, self)

    # For the rebalance ------------------------------------------------------------------

    @property
    def workers(self) -> Collection[Worker]:
        """All workers of all handlers."""
        return [worker for handler in self.handlers for worker in handler.workers]

    def feed_of(self, topic: str) -> Feed:
        """Router for the records of a topic.

        Raises:
            HandlerError: The patterns of several handlers match the topic, which may have only one handler.
        """
        return self.handler_of(topic).feed

    def make_epoch(self, topic_partition: TopicPartition, number: int, start: int) -> Epoch:
        """Make an epoch, with its gate closed; an observed one if outcomes are observed."""
        handler = self.handler_of(topic_partition.topic)
        counts = handler.counters.of(topic_partition.topic)
        if self._observe is None:
            return Epoch(topic_partition, number, start, self.buffer, counts)
        completed = self._observe(handler.spec)
        return ObservedEpoch(topic_partition, number, start, self.buffer, counts, completed=completed)

    @property
    def replayed(self) -> int:
        """How many records this process has run more than once."""
        return self.pump.replayed + sum(handler.counters.replayed for handler in self.handlers)

    def why_paused(self, topic_partition: TopicPartition) -> str | None:
        """Why the application paused a partition or its handler; None when it did not."""
        by_handler = self.pauses.get(self.handler_of(topic_partition.topic).spec.name)
        return self.pauses.get(topic_partition) or by_handler

    def handler_of(self, topic: str) -> Running:
        """The handler of a topic; raises as `feed_of` does."""
        first, *others = [handler for handler in self.handlers if handler.spec.takes(topic)]
        if others:
            names = ", ".join(repr(handler.spec.name) for handler in (first, *others))
            raise HandlerError(f"topic {topic!r} belongs to several handlers ({names}): narrow their patterns")
        return first

    def fail(self, error: BaseException) -> None:
        """Mark the app as failed and raise *error* where it is served."""
        if self.state not in ("draining", "stopped"):
            self.state = "failed"
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # raised where the app is served; nobody has to retrieve it here

    def _crashed(self, task: str, error: BaseException) -> None:
        fields = self._fields("crashed", task=task)
        # A closing event loop cancels all tasks: only the first is logged as critical.
        again = self.failed.done() and isinstance(error, TaskCancelledError)
        level = logging.DEBUG if again else logging.CRITICAL
        logger.log(level, "the task %r of the engine crashed; the app stops", task, exc_info=error, extra=fields)
        self.fail(error)
        if self._deserted:
            self.rebalance.wait_no_more()

    @property
    def _deserted(self) -> bool:
        """Whether no worker is alive, as after a closing event loop cancelled them: no running record will end."""
        return {worker.name for worker in self.workers}.isdisjoint(self._tasks.names)

    def _facts(self) -> Iterable[tuple[Hashable, object]]:
        """The facts that the explanations and the liveness check need."""
        rebalance, pauses = self.rebalance, self.pauses.items()
        yield from facts_of(rebalance.epochs, self.workers, pauses, settled=rebalance.settled.is_set())
        yield from self.liveness.facts()

    def _behind(self, delivery: Delivery) -> int:
        return self.feed_of(delivery.record.topic).shards_of(delivery).behind(delivery)

    def _wake_pump(self) -> None:
        if self.transport is not None:
            self.transport.wake()

    # Start ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all tasks and wait for the first assignment.

        Raises:
            StartError: The assignment was not complete within `start_timeout`, or the brokers refused us.
            AioshardError: Consuming is impossible, for example because of `NoOffsetError`.
        """
        self._tasks.start(self._watch.run(), "stuck watch")
        if self.loop_watch is not None:
            self._tasks.start(self.loop_watch.run(), "loop watch")
        self._tasks.start(self.since.run(), "since watch")
        self._tasks.start(self.standstill.run(self.liveness.watch), "trouble watch")
        self._tasks.start(self.log_ends.run(), "log ends")
        for handler in self.handlers:
            handler.start(self._tasks, self.clock)
        self._supervisor = self._tasks.start(self._supervise(), "client", lasts=True)
        if self.settings.start_timeout is None:
            return
        timeout = self.settings.start_timeout
        settled: asyncio.Future[Any] = asyncio.create_task(self.rebalance.settled.wait(), name="first assignment")
        try:
            over = {settled, self.failed, self._ending}
            await asyncio.wait(over, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            # The first assignment counts, even if another one has begun since and is incomplete.
            complete = settled.done() or self._ending.done()
        finally:
            settled.cancel()
        if self.failed.done():
            self.failed.result()
        if not complete:
            slow = "the group has not given out its partitions (another member may be slow to rejoin)"
            reason = self.trouble or self._why_nothing_moves() or self.committer.trouble or slow
            failure = StartError(f"the app did not start within start_timeout={timeout:g} s: {reason}")
            self.fail(failure)
            raise failure

    async def _supervise(self) -> None:
        """Keep a client alive: build it, use it, and build a new one when it is lost."""
        backoff = _FIRST_BACKOFF
        while True:
            self._settled_once = False
            try:
                await self._live()
            except TransportError as error:
                backoff = _FIRST_BACKOFF if self._settled_once else backoff
                if not error.retriable and self._refused(error):
                    return
                if self._stopping:  # another client could not commit for the partitions of this one
                    self.trouble = str(error)
                    return
                self._note_trouble(error, backoff)
            except AioshardError as error:
                logger.error("no Kafka client can be built, and the app stops: %s", error)  # noqa: TRY400 - a sentence
                self.fail(error)
                return
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _LONGEST_BACKOFF)

    def _refused(self, error: TransportError) -> bool:
        """Fail the app if a refusal ends it, as during the start; otherwise retry, as access may be granted again."""
        lost = isinstance(error, InstanceIdTakenError) and (error.goes_on or self._lost_id.again(error.session_timeout))
        if lost or isinstance(error, GroupHasMembersError):
            self.fail(error)
            return True
        if self.state != "starting" or self.settings.start_timeout is None:
            return False
        failure = StartError(str(error))
        failure.__cause__ = error
        self.fail(failure)
        return True

    @property
    def calm(self) -> bool:
        """Whether the brokers answer, according to the client."""
        return self.trouble is None and self._why_nothing_moves() is None

    def _why_nothing_moves(self) -> str | None:
        """Why consuming makes no progress although the client is alive; None when it does."""
        trouble = self.transport.trouble if self.transport is not None else None
        return trouble or self.rebalance.trouble

    def _note_trouble(self, error: TransportError, backoff: float) -> None:
        self.client_losses += 1
        if self.trouble is None:
            self.trouble_since = self.clock()
        if str(error) != self.trouble:
            message = "the Kafka client is gone and will be built anew in %.1f s: %s"
            logger.error(message, backoff, error, extra=self._fields("client_lost"))
        self.trouble = str(error)

    async def _live(self) -> None:
        """Run one client, from connecting until it is lost."""
        transport = self._make_transport()
        self.transport = transport
        self.rebalance.attach(transport)
        committing: asyncio.Task[object] | None = None
        watching = self._tasks.start(self._watch_settled(), "settled")
        try:
            committing = self._tasks.start(self.committer.run(transport), "commit coordinator", lasts=True)
            topics = list(dict.fromkeys(topic for handler in self.handlers for topic in handler.spec.topics))
            pattern = "|".join(f"(?:{each.spec.pattern})" for each in self.handlers if each.spec.pattern)
            await transport.start(topics, pattern or None, self.rebalance)
            await self.pump.run(transport)
        finally:
            watching.cancel()
            if committing is not None:
                self._tasks.dismiss(committing)
            if not self._stopping:
                self.rebalance.end_all("the client was lost")
                await self._close(transport, self.settings.commit_timeout)

    async def _watch_settled(self) -> None:
        """Wait until the client's first assignment is open: it ends the start, or the trouble after a lost client."""
        await self.rebalance.settled.wait()
        self._settled_once = True
        if self.trouble is not None:
            lasted = self.clock() - self.trouble_since
            logger.warning("a Kafka client works again, after %.1f s", lasted, extra=self._fields("client_rebuilt"))
        self.trouble = None
        if self.state == "starting":
            self.state = "running"
            count = len(self.rebalance.epochs)
            logger.info("the app runs, with %d partition(s)", count, extra=self._fields("running", partitions=count))

    def _fields(self, event: str, **more: object) -> dict[str, object]:
        """Fields of a log line about the app as a whole."""
        return {"event": event, "group": self.group_id, **more}

    async def _close(self, transport: Transport, within: float) -> None:
        """Close a client; wait up to *within* seconds, at least 1 s, but never longer than `commit_timeout`."""
        with anyio.move_on_after(min(max(within, 1.0), self.settings.commit_timeout), shield=True):
            try:
                await transport.close()
            except TransportError as error:
                logger.warning("the client did not close cleanly: %s", error)
        self.transport = None

    # Stop -------------------------------------------------------------------------------------

    def be_draining(self) -> None:
        """Enter the draining state; `stop` calls this. A start that is still waiting ends."""
        self._stopping = True
        if self.state not in ("failed", "draining"):
            self.state = "draining"
            running = len(self._running_now())
            message = "draining: nothing new is taken in; %d record(s) run"
            logger.info(message, running, extra=self._fields("draining", in_flight=running))
        if not self._ending.done():
            self._ending.set_result(None)

    async def stop(self) -> None:
        """Drain, commit and end all tasks within `shutdown_timeout`.

        Raises:
            NotDrainedError: Records were still running and were cancelled, or the last commit was not acknowledged.
        """
        deadline = self.clock() + self.settings.shutdown_timeout
        try:
            failure = await self._drain(deadline)
        finally:
            await finish(self._tear_down(deadline), "tear down")
        if failure is None:
            return
        if not failure.records and self.failed.done():
            logger.error("%s", failure)  # the app's own failure is raised instead, and says why
            return
        raise failure

    async def _drain(self, deadline: float) -> NotDrainedError | None:
        """Let running records end and commit them; return an error for those that did not end or commit in time."""
        self.be_draining()
        timeout = self.settings.shutdown_timeout
        reserve = min(self.settings.commit_timeout, timeout / 3)
        enough = deadline - min(reserve / 2, 1.0)
        self.rebalance.stop_opening()
        epochs = self.rebalance.epochs
        await self.rebalance.drain(epochs, 0.0 if self._deserted else timeout - reserve)
        late = dict.fromkeys(d for d in self._running_now() if d.epoch.gate is not Gate.ENDED)
        # The commit coordinator was cancelled together with the workers.
        await self.committer.flush(epochs, 0.1 if self._deserted else enough - self.clock())
        # Runs of revoked partitions were cancelled, maybe just now: they are late only if they do not end.
        while any(d not in late for d in self._running_now()) and self.clock() < enough:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_TURN)
        records = [repr(delivery) for delivery in (*late, *(d for d in self._running_now() if d not in late))]
        reason = self.committer.trouble or self.trouble or "the partitions were taken away before"
        for epoch in epochs:
            self.committer.disown(epoch)
        uncommitted = {str(epoch.topic_partition): epoch.uncommitted for epoch in epochs if epoch.uncommitted}
        if not records and not uncommitted:
            return None
        return NotDrainedError(records, timeout, uncommitted=uncommitted, reason=reason)

    def _running_now(self) -> list[Delivery]:
        return [delivery for worker in self.workers for delivery in worker.deliveries]

    async def _tear_down(self, deadline: float) -> None:
        """End the client and all tasks; records that still run are cancelled and stay uncommitted."""
        for worker in self.workers:
            worker.interrupt()
        with anyio.move_on_after(max(deadline - self.clock(), 1.0)):
            if self._supervisor is not None:
                await self._tasks.cancel(self._supervisor)
            if self.transport is not None:
                await self._close(self.transport, deadline - self.clock())
        self.rebalance.end_all("the app stopped")
        await self._tasks.close(max(min(deadline - self.clock(), 1.0), 0.2))
        logger.info("the app has stopped", extra=self._fields("stopped"))
        if self.state != "failed":
            self.state = "stopped"
