"""A running engine: its tasks from start to stop, and the supervisor of the client."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from aioshard.core.flow import Usage
from aioshard.core.ownership import Losses
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Gate
from aioshard.engine.failures import Send
from aioshard.engine.handler import ActiveHandler, Handler, Observe, Resources
from aioshard.engine.intake import Intake
from aioshard.engine.outgoing import add_message
from aioshard.engine.partition import ObservedPartition, Partition
from aioshard.engine.rebalance import Rebalance, uncommitted_of
from aioshard.engine.tasks import TaskSet, finish
from aioshard.engine.trouble import Trouble
from aioshard.errors import AioshardError, HandlerError, NotDrainedError, StartError, TaskCancelledError, TransportError
from aioshard.observe import AppState
from aioshard.ports import Clients, GroupHasMembersError, InstanceIdTakenError, Producer, Transport
from aioshard.records import TopicPartition, counted

if TYPE_CHECKING:
    from aioshard.settings import Settings

logger = logging.getLogger("aioshard.engine")

APPLICATION = "application"
"""Key in `Epoch.pauses` of a pause that the application requested."""

_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 5.0
_LOG_END_INTERVAL = 10.0
"""Seconds between two requests; with the time that a response may take, an end is at most 15 s old."""
_LOG_END_TIMEOUT = 5.0
_STOP_CHECK_INTERVAL = 0.01
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
        specs: Sequence[Handler],
        clients: Clients,
        producer: Producer,
        *,
        observe: Observe | None = None,
        exactly_once: bool = False,
    ) -> None:
        """Make an engine; nothing runs yet.

        Args:
            group_id: The consumer group.
            settings: Timeouts and limits.
            specs: The handlers.
            clients: Makes the client, again after each loss, and the readers of parked records.
            producer: Publishes for handlers and failure policies; its creator closes it.
            observe: Receives the outcome of each record.
            exactly_once: Whether commits are transactions with the messages of completed records.
        """
        loop = asyncio.get_running_loop()
        self.group_id = group_id
        self.settings = settings
        self.clock = loop.time
        self.state: AppState = "starting"
        self.transport: Transport | None = None
        self.client_losses = 0
        self.trouble = Trouble(self.clock)
        """Why nothing can be consumed: the client was lost or cannot be created."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Done with an exception once the app cannot continue."""
        self.producer = producer
        self.pauses: dict[TopicPartition | str, str] = {}
        """Partitions and handler names that the application paused, each with the reason as a sentence."""
        self._make_transport = clients.transport
        self._supervisor: asyncio.Task[object] | None = None
        self._stopping = False
        self._started: asyncio.Future[None] = loop.create_future()
        """Done when the first assignment is complete, or when the app begins to stop."""
        self._reached = False
        """Whether a broker has ever answered."""
        self._instance_losses = Losses(self.clock)
        self._backoff = _FIRST_BACKOFF
        """Seconds until a new client is created if this one is lost."""
        self._tasks = TaskSet(self._crashed)
        self.buffer = Buffer(Usage(settings.max_buffered_records, settings.max_buffered_bytes), self._wake_pump)
        self._exactly_once = exactly_once
        send: Send = add_message if exactly_once else lambda _, message: producer.publish(message)
        resources = Resources(
            group_id, producer.publish, send, clients.side_topics, self.buffer, self.clock, exactly_once
        )
        self._observe = observe
        self.handlers = tuple(
            ActiveHandler(spec if observe is None else spec.timed(self.clock), resources) for spec in specs
        )
        self.workers = [worker for handler in self.handlers for worker in handler.workers]
        """All workers of all handlers."""
        self.committer = Committer(
            settings.commit_interval,
            settings.commit_timeout,
            self.clock,
            self._refused,
            None if exactly_once else settings.commit_records,  # an early commit would be one more transaction
            aborted=(lambda *args: self.rebalance.begin_again(*args)) if exactly_once else None,  # noqa: PLW0108 - made below
        )
        self.buffer.hurry = self.committer.hurry
        self.rebalance = Rebalance(
            group_id,
            settings,
            make_partition=self._make_partition,
            workers=self.workers,
            replayed=lambda: self.replayed,
            fail=self.fail,
            committer=self.committer,
            tasks=self._tasks,
            clock=self.clock,
        )
        self.intake = Intake(
            self.buffer,
            self.rebalance.partitions,
            self.clock,
            stuck_after=settings.stuck_after,
            metadata_limit=lambda: self.committer.metadata_limit,
            out_of_range=self.rebalance.restart,
        )

    def _make_partition(self, name: TopicPartition, number: int, start: int) -> Partition:
        """Make a partition, with its gate closed; an observed one if outcomes are observed."""
        handler = self.handler_of(name.topic)
        counts = handler.counters.topics[name.topic]
        observe = None if self._observe is None else self._observe(handler.spec)
        kind = Partition if observe is None and not self._exactly_once else ObservedPartition
        partition = kind(name, number, start, buffer=self.buffer, counts=counts, feed=handler.feed, clock=self.clock)
        if isinstance(partition, ObservedPartition):
            partition.completed = observe
        why = self.why_paused(name)
        if why is not None:
            partition.pause(APPLICATION, why)
        return partition

    @property
    def replayed(self) -> int:
        """How many records this process has run more than once."""
        return self.intake.replayed + sum(handler.counters.replayed for handler in self.handlers)

    def why_paused(self, topic_partition: TopicPartition) -> str | None:
        """Why the application paused a partition or its handler; None when it did not."""
        by_handler = self.pauses.get(self.handler_of(topic_partition.topic).spec.name)
        return self.pauses.get(topic_partition) or by_handler

    def subscription(self) -> tuple[list[str], str | None]:
        """The topics and the pattern of all handlers."""
        topics = dict.fromkeys(topic for handler in self.handlers for topic in handler.spec.topics)
        pattern = "|".join(f"(?:{handler.spec.pattern})" for handler in self.handlers if handler.spec.pattern)
        return list(topics), pattern or None

    def handler_of(self, topic: str) -> ActiveHandler:
        """The handler of a topic, including one that was removed from its subscription.

        Raises:
            HandlerError: The patterns of several handlers match the topic, which may have only one handler.
        """
        matching = [handler for handler in self.handlers if handler.spec.takes(topic)]
        first, *others = matching or [handler for handler in self.handlers if topic in handler.counters.topics]
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
        if self._has_no_workers:
            self.rebalance.wait_no_more()

    @property
    def _has_no_workers(self) -> bool:
        """Whether all workers have ended, as when a closing event loop cancels them: no running record will end."""
        return {worker.name for worker in self.workers}.isdisjoint(self._tasks.names)

    def _wake_pump(self) -> None:
        if self.transport is not None:
            self.transport.wake()

    def log_end(self, partition: Partition) -> int | None:
        """End of a log, under `read_committed` its last stable offset; None while unknown. Safe from any thread."""
        client = self.transport
        fetched = None if client is None else client.end_offset(partition.topic_partition)
        known = [end for end in (fetched, partition.log_end) if end is not None]
        # The end from a fetch that found nothing new may be older than the records taken in since.
        return max(*known, partition.tracker.position) if known else None

    def lags(self) -> dict[TopicPartition, int]:
        """The lag of each partition whose log end is known. Safe from any thread."""
        ends = [(epoch, end) for epoch in self.rebalance.epochs if (end := self.log_end(epoch)) is not None]
        return {epoch.topic_partition: max(end - epoch.lag_base, 0) for epoch, end in ends}

    async def _query_log_ends(self) -> None:
        """Request the log ends repeatedly until cancelled.

        The client learns the end of a log with each fetch. It learns nothing about a partition that is paused or full:
        without these requests, the lag would freeze just when it grows.
        """
        while True:
            await asyncio.sleep(_LOG_END_INTERVAL)
            partitions = {partition.topic_partition: partition for partition in self.rebalance.epochs}
            if self.transport is None or not partitions:
                continue
            try:
                with anyio.fail_after(_LOG_END_TIMEOUT):
                    ranges = await self.transport.log_ranges(list(partitions))
            except (TransportError, TimeoutError) as error:
                logger.debug("the brokers did not report the log ends: %s", str(error) or "no answer in time")
            else:
                for name, log in ranges.items():
                    partitions[name].log_end = log.end
                    partitions[name].held_back = max(log.newest - log.end, 0)

    # Start ----------------------------------------------------------------------------------

    async def start(self, watching: Coroutine[Any, Any, None]) -> None:
        """Start all tasks, with *watching* as one of them, and wait for the first assignment.

        Raises:
            StartError: No broker answered within `start_timeout`, a topic does not exist, or the brokers refused us.
                Once a broker has answered, an outage or a rebalance is waited for.
            AioshardError: Consuming is impossible, for example because of `NoOffsetError`.
        """
        self._tasks.start(watching, "watch")
        self._tasks.start(self._query_log_ends(), "log ends")
        for handler in self.handlers:
            handler.start(self._tasks, self.clock)
        self._supervisor = self._tasks.start(self._supervise(), "client", lasts=True)
        if self.settings.start_timeout is None:
            return
        timeout = self.settings.start_timeout
        while True:
            # The first assignment counts, even if another one has begun since and is incomplete.
            await asyncio.wait({self._started, self.failed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
            if self._started.done():
                return
            slow = "the group has not assigned its partitions (another member may be slow to rejoin)"
            reason = self.trouble.why or self.standstill or self.committer.trouble.why or slow
            if not self._reached or self.rebalance.refused or await self._misses_topics(timeout):
                failure = StartError(f"the app did not start within start_timeout={timeout:g} s: {reason}")
                self.fail(failure)
                raise failure
            message = "the brokers have answered, but the app has not started within %g s; it keeps trying: %s"
            logger.warning(message, timeout, reason, extra=self._fields("starting"))

    async def _misses_topics(self, timeout: float) -> bool:
        """Whether the brokers say that a topic does not exist; False if they do not answer."""
        try:
            with anyio.fail_after(timeout):
                known = await self.rebalance.client.topics()
        except (TransportError, TimeoutError):
            return False
        return any(topic not in known for handler in self.handlers for topic in handler.spec.topics)

    async def _supervise(self) -> None:
        """Keep a client alive: build it, use it, and build a new one when it is lost."""
        while True:
            try:
                await self._live()
            except TransportError as error:
                if not error.retriable and self._refused(error):
                    return
                if self._stopping:  # a new client could not commit for the partitions of this one
                    self.trouble.report(str(error))
                    return
                self.client_losses += 1
                if self.trouble.report(str(error)):
                    message = "the Kafka client was lost; a new one is created in %.1f s: %s"
                    logger.error(message, self._backoff, error, extra=self._fields("client_lost"))  # noqa: TRY400
            except AioshardError as error:
                logger.error("the Kafka client cannot be created, and the app stops: %s", error)  # noqa: TRY400 - a sentence
                self.fail(error)
                return
            await asyncio.sleep(self._backoff)
            self._backoff = min(self._backoff * 2, _LONGEST_BACKOFF)

    def _refused(self, error: TransportError) -> bool:
        """Fail the app, and return True, if a refusal is final, as during the start; otherwise the caller retries."""
        lost = isinstance(error, InstanceIdTakenError) and (
            error.goes_on or self._instance_losses.again(error.session_timeout)
        )
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
    def standstill(self) -> str | None:
        """Why consuming makes no progress although the client is alive; None when it does."""
        return (self.transport is not None and self.transport.trouble) or self.rebalance.trouble

    async def _live(self) -> None:
        """Run one client, from connecting until it is lost."""
        transport = self._make_transport()
        self.transport = transport
        self.rebalance.attach(transport)
        watching = self._tasks.start(self._watch_settled(), "settled")
        committing = self._tasks.start(self.committer.run(transport), "commit coordinator", lasts=True)
        try:
            await transport.start(*self.subscription(), self.rebalance)
            self._reached = True
            await self.intake.run(transport)
        finally:
            watching.cancel()
            self._tasks.dismiss(committing)
            if not self._stopping:
                self.rebalance.end_all("the client was lost")
                await self._close(transport, self.settings.commit_timeout)

    async def _watch_settled(self) -> None:
        """Wait until the client's first assignment is open; then end the start, or the trouble after a lost client."""
        await self.rebalance.settled.wait()
        self._backoff = _FIRST_BACKOFF
        lasted = self.trouble.end()
        if lasted is not None:
            logger.warning("a Kafka client works again after %.1f s", lasted, extra=self._fields("client_rebuilt"))
        if self.state == "starting":
            self.state = "running"
            self._started.set_result(None)
            count = len(self.rebalance.epochs)
            logger.info(
                "the app is running; assigned partitions: %d", count, extra=self._fields("running", partitions=count)
            )

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
            running = len(self.rebalance.running())
            rest = f"{counted(running, 'record')} may run for up to {self.settings.shutdown_timeout:g} s"
            fields = self._fields("draining", in_flight=running)
            logger.info("draining: nothing new is taken in%s", f"; {rest}" if running else "", extra=fields)
        if not self._started.done():
            self._started.set_result(None)

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
        soft_deadline = deadline - min(reserve / 2, 1.0)
        self.rebalance.stop_opening()
        partitions = self.rebalance.epochs
        await self.rebalance.drain(partitions, 0.0 if self._has_no_workers else timeout - reserve)
        late = {delivery for delivery in self.rebalance.running() if delivery.epoch.gate is not Gate.ENDED}
        # The commit coordinator was cancelled together with the workers.
        await self.committer.flush(partitions, 0.1 if self._has_no_workers else soft_deadline - self.clock())
        # Runs of revoked partitions may have been cancelled just now: they are late only if they do not end.
        while not self.rebalance.running() <= late and self.clock() < soft_deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_STOP_CHECK_INTERVAL)
        records = sorted(map(repr, late | self.rebalance.running()))
        reason = self.committer.trouble.why or self.trouble.why or "the partitions were revoked before"
        for partition in partitions:
            self.committer.disown(partition)
        uncommitted = uncommitted_of(partitions)
        if not records and not uncommitted:
            return None
        return NotDrainedError(records, timeout, uncommitted=uncommitted, reason=reason)

    async def _tear_down(self, deadline: float) -> None:
        """End the client and all tasks; records that still run are cancelled and stay uncommitted."""
        for worker in self.workers:
            worker.interrupt()
        with anyio.move_on_after(max(deadline - self.clock(), 1.0)):
            if self._supervisor is not None:
                self._tasks.dismiss(self._supervisor)
                await asyncio.wait([self._supervisor])
            if self.transport is not None:
                await self._close(self.transport, deadline - self.clock())
        self.rebalance.end_all("the app stopped")
        await self._tasks.close(max(min(deadline - self.clock(), 1.0), 0.2))
        logger.info("the app has stopped", extra=self._fields("stopped"))
        if self.state != "failed":
            self.state = "stopped"
