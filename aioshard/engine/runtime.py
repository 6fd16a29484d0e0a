"""A running engine: its tasks from start to stop, and the supervisor of the client."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from aioshard.core.flow import Usage
from aioshard.core.ownership import Losses
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.current_client import CurrentClient
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.group_shares import GroupShares
from aioshard.engine.guard import Guard
from aioshard.engine.handler import Handler, Observe, Resources
from aioshard.engine.handler_set import HandlerSet
from aioshard.engine.intake import Intake
from aioshard.engine.lease import Lease
from aioshard.engine.lifecycle import Lifecycle
from aioshard.engine.limits import Limits
from aioshard.engine.outgoing import add_message
from aioshard.engine.partition import Partition
from aioshard.engine.pauses import Pauses
from aioshard.engine.rebalance import Rebalance, uncommitted_of
from aioshard.engine.rebalance_log import Rebalanced, RebalanceLog
from aioshard.engine.recoveries import Send
from aioshard.engine.tasks import TaskSet, finish
from aioshard.engine.timing import precise
from aioshard.engine.topics import MissingTopic, missing_outputs, written_topics
from aioshard.engine.trouble import Trouble
from aioshard.errors import (
    AioshardError,
    GroupHasMembersError,
    InstanceIdTakenError,
    MissingTopicError,
    NotDrainedError,
    StartError,
    TaskCancelledError,
    TransportError,
)
from aioshard.log_fields import get_logger
from aioshard.observe import AppState
from aioshard.ports import ChosenProtocol, Clients, Message, Producer, Transport
from aioshard.records import TopicPartition, counted
from aioshard.schema_registry.registries import Registries

if TYPE_CHECKING:
    from aioshard.processes import Processes
    from aioshard.settings import Settings

logger = get_logger("aioshard.engine")

_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 5.0
_CLIENT_FAILURES = {
    "client_lost": "the Kafka client was lost; a new one is created in %.1f s: %s",
    "client_not_started": "the Kafka client could not start; a new one is created in %.1f s: %s",
}
"""Messages of the log, by event."""
_LOG_END_INTERVAL = 10.0
"""Seconds between two requests; with the time that a response may take, an end is at most 15 s old."""
_LOG_END_TIMEOUT = 5.0
_TOPICS_INTERVAL = 0.5
"""Seconds between two look-ups of topics that did not exist when the app started."""
_OUTPUTS_INTERVAL = 10.0
"""Seconds between two look-ups of output topics, as long as one is missing or the brokers do not answer."""
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
        registries: Registries,
        observe: Observe | None = None,
        rebalanced: Rebalanced | None = None,
        exactly_once: bool = False,
        awaits_topics: bool = True,
        run_ahead: float = 0.0,
        processes: "Processes | None" = None,
    ) -> None:
        """Make an engine; nothing runs yet.

        Args:
            group_id: The consumer group.
            settings: Timeouts and limits.
            specs: The handlers.
            clients: Makes the client, again after each loss, and the readers of parked records.
            producer: Publishes for handlers and failure policies; its creator closes it.
            registries: Schema registries of the handlers, whose trouble is reported with the engine's.
            observe: Receives the outcome of each record.
            rebalanced: Receives a report of each rebalance.
            exactly_once: Whether commits are transactions with the messages of completed records.
            awaits_topics: Whether the start waits for topics of the handlers that do not exist; a backfill reads only
                some of them.
            run_ahead: Seconds for which workers may run ahead without yielding to the event loop; see `Worker`.
            processes: Worker processes of the handlers, whose trouble is reported with the engine's.
        """
        self.group_id = group_id
        self.settings = settings
        self.clock = clock = asyncio.get_running_loop().time
        self.processes = processes
        self.registries = registries
        self.producer = producer
        self.client_losses = 0
        self.trouble = Trouble(clock)
        """Why nothing can be consumed: the client was lost or cannot be created."""
        self.missing_outputs: Sequence[MissingTopic] = ()
        """The topics that the handlers cannot write to, as far as the brokers have said."""
        self._make_transport = clients.transport
        self._supervisor: asyncio.Task[object] | None = None
        self._reached = False
        """Whether a broker has ever answered."""
        self._client_started = False
        """Whether the current client could be started."""
        self._awaits_topics = awaits_topics
        self._missing_topics: Sequence[str] = ()
        """Topics for which the start waits."""
        self._outputs = written_topics(specs) if awaits_topics else []
        self._instance_losses = Losses(clock)
        self._backoff = _FIRST_BACKOFF
        """Seconds until a new client is created if this one is lost."""
        self._tasks = TaskSet(self._crashed)
        # The parts: each knows only those made before it.
        self.lifecycle = Lifecycle()
        self.client = CurrentClient()
        self.buffer = Buffer(Usage(settings.max_buffered_records, settings.max_buffered_bytes), self.client)
        self.limits = Limits(clock)
        self.handlers = HandlerSet(
            specs,
            Resources(
                group_id=group_id,
                publish=producer.publish,
                send=add_message if exactly_once else _sending(producer),
                make_side_topics=clients.side_topics,
                buffer=self.buffer,
                lease=Lease(self.client, precise(clock)),
                limits=self.limits,
                clock=clock,
                exactly_once=exactly_once,
                observe=observe,
                run_ahead=run_ahead,
                registries=registries,
                now=clients.now,
            ),
        )
        self.shares = GroupShares(self.handlers)
        self.pauses = Pauses(self.handlers)
        self.committer = Committer(
            self.buffer,
            clock,
            interval=settings.commit_interval,
            timeout=settings.commit_timeout,
            records=None if exactly_once else settings.commit_records,  # an early commit would be one more transaction
            transactional=exactly_once,
        )
        self.rebalance = Rebalance(
            group_id,
            settings,
            handlers=self.handlers,
            shares=self.shares,
            pauses=self.pauses,
            client=self.client,
            committer=self.committer,
            lifecycle=self.lifecycle,
            log=RebalanceLog(clock, [handler.counters for handler in self.handlers], rebalanced),
            tasks=self._tasks,
        )
        self.intake = Intake(self.buffer, self.rebalance, self.committer, clock, stuck_after=settings.stuck_after)

    @property
    def state(self) -> AppState:
        """The state of the app. Safe from any thread."""
        return self.lifecycle.state

    @property
    def failed(self) -> asyncio.Future[None]:
        """Done with an exception once the app cannot continue."""
        return self.lifecycle.failed

    def _crashed(self, task: str, error: BaseException) -> None:
        fields = self._fields("crashed", task=task)
        # A closing event loop cancels all tasks: only the first is logged as critical.
        again = self.failed.done() and isinstance(error, TaskCancelledError)
        level = logging.DEBUG if again else logging.CRITICAL
        logger.log(level, "the task %r of the engine crashed; the app stops", task, exc_info=error, extra=fields)
        self.lifecycle.fail(error)
        if self._has_no_workers:
            self.rebalance.wait_no_more()

    @property
    def _has_no_workers(self) -> bool:
        """Whether all workers have ended, as when a closing event loop cancels them: no running record will end."""
        return {worker.name for worker in self.handlers.workers}.isdisjoint(self._tasks.names)

    def log_end(self, partition: Partition) -> int | None:
        """End of a log, under `read_committed` its last stable offset; None while unknown. Safe from any thread."""
        transport = self.client.transport
        fetched = None if transport is None else transport.end_offset(partition.topic_partition)
        known = [end for end in (fetched, partition.log_end.offset) if end is not None]
        # The end from a fetch that found nothing new may be older than the records taken in since.
        return max(*known, partition.tracker.position) if known else None

    def lags(self) -> dict[TopicPartition, int]:
        """The lag of each partition whose log end is known. Safe from any thread."""
        lags = {}
        for partition in self.rebalance.partitions:
            end = self.log_end(partition)
            if end is not None:
                lags[partition.topic_partition] = max(end - partition.commits.lag_base, 0)
        return lags

    async def _query_log_ends(self) -> None:
        """Request the log ends repeatedly until cancelled.

        The client learns the end of a log with each fetch. It learns nothing about a partition that is paused or full:
        without these requests, the lag would freeze just when it grows.
        """
        guard = Guard()
        while True:
            await asyncio.sleep(_LOG_END_INTERVAL)
            partitions = {partition.topic_partition: partition for partition in self.rebalance.partitions}
            transport = self.client.transport
            if transport is None or not partitions:
                continue
            with guard.watching("the ends of the logs"):
                await _update_log_ends(transport, partitions)

    async def _follow_topics(self) -> None:
        """Divide the limits of the group again when its topics have grown, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.metadata_max_age)
            transport = self.client.transport
            if transport is None:
                continue
            try:
                await self.shares.look_up(transport, self.settings.commit_timeout)
            except (TransportError, TimeoutError) as error:
                logger.debug("the brokers did not report the partitions: %s", str(error) or "no answer in time")
            self.shares.divide(self.rebalance.partitions)

    # Start ----------------------------------------------------------------------------------

    async def start(self, watching: Coroutine[Any, Any, None]) -> None:
        """Start all tasks, with *watching* as one of them, and wait for the first assignment.

        Raises:
            MissingTopicError: A topic does not exist after `start_timeout`.
            StartError: No broker answered within `start_timeout`, or the brokers refused us. Once a broker has
                answered, an outage or a rebalance is waited for.
            AioshardError: Consuming is impossible, for example because of `NoOffsetError`.
        """
        self._tasks.start(watching, "watch")
        self._tasks.start(self._query_log_ends(), "log ends")
        if self.shares.are_needed:
            self._tasks.start(self._follow_topics(), "shares of rate limits")
        for handler in self.handlers:
            handler.start(self._tasks, self.clock)
        if not self.handlers:
            self._only_publish()
            return
        self._supervisor = self._tasks.start(self._supervise(), "client", lasts=True)
        if self.settings.start_timeout is None:
            return
        timeout = self.settings.start_timeout
        began = self.clock()
        while True:
            # The first assignment counts, even if another one has begun since and is incomplete.
            started = self.lifecycle.started
            await asyncio.wait({started, self.failed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
            if started.done():
                return
            slow = "the group has not assigned its partitions (another member may be slow to rejoin)"
            is_final = not self._reached or self.rebalance.lookups_refused or await self._misses_topics(timeout)
            reason = self.trouble.why or self.standstill or self.committer.trouble.why or slow
            if is_final:
                kind = StartError if self.absence is None else MissingTopicError
                failure = kind(f"the app did not start within start_timeout={timeout:g} s: {reason}")
                self.lifecycle.fail(failure)
                raise failure
            waited = self.clock() - began
            message = "the brokers have answered, but the app has not started for %.0f s; it keeps trying: %s"
            logger.warning(message, waited, reason, extra=self._fields("starting", seconds=round(waited, 1)))

    def _only_publish(self) -> None:
        """Run without a group: nothing is consumed."""
        self.lifecycle.begin_running()
        self.rebalance.opened.set()
        logger.info("the app is running; it has no handlers and only publishes", extra=self._fields("running"))

    async def _misses_topics(self, timeout: float) -> bool:
        """Whether the brokers say that a topic does not exist without which the app must not start.

        False if they do not answer.
        """
        if not self._awaits_topics:
            return False
        assigned = {partition.topic_partition.topic for partition in self.rebalance.partitions}
        unseen = {topic for handler in self.handlers for topic in handler.spec.topics} - assigned
        try:
            transport = self.client.get()
            with anyio.fail_after(timeout):
                self._missing_topics = [topic for topic in sorted(unseen) if not await transport.partitions(topic)]
        except (TransportError, TimeoutError):
            self._missing_topics = ()
        if self._missing_topics or not self._fails_without_outputs:
            return bool(self._missing_topics)
        await self._look_up_outputs(timeout)
        return bool(self.missing_outputs)

    @property
    def _fails_without_outputs(self) -> bool:
        """Whether the app must not start without the topics that its handlers write to."""
        return self.settings.missing_output_topics == "fail" and self.state == "starting"

    async def _look_up_outputs(self, timeout: float) -> bool:
        """Look for the topics that the handlers write to; return whether the brokers say that all of them exist."""
        try:
            with anyio.fail_after(timeout):
                missing = await missing_outputs(self.client.get(), self._outputs)
        except (TransportError, TimeoutError) as error:
            logger.debug("the brokers did not say which output topics exist: %s", str(error) or "no answer in time")
            self.missing_outputs = ()
            return False
        for topic in missing:
            if topic not in self.missing_outputs:
                logger.warning("%s: %s", topic.sentence, topic.what_to_do, extra=self._fields("missing_topic"))
        self.missing_outputs = missing
        return not missing

    async def _supervise(self) -> None:
        """Keep a client alive: build it, use it, and build a new one when it is lost."""
        while True:
            try:
                await self._live()
            except TransportError as error:
                if not error.retriable and self._fail_if_final(error):
                    return
                if self.lifecycle.stopping:  # a new client could not commit for the partitions of this one
                    self.trouble.report(str(error))
                    return
                self.client_losses += 1
                if self.trouble.report(str(error)):
                    event = "client_lost" if self._client_started else "client_not_started"
                    logger.error(_CLIENT_FAILURES[event], self._backoff, error, extra=self._fields(event))  # noqa: TRY400
            except AioshardError as error:
                logger.error("the Kafka client cannot be created, and the app stops: %s", error)  # noqa: TRY400 - a sentence
                self.lifecycle.fail(error)
                return
            await asyncio.sleep(self._backoff)
            self._backoff = min(self._backoff * 2, _LONGEST_BACKOFF)

    def _fail_if_final(self, error: Exception) -> bool:
        """Fail the app, and return True, if a refusal is final, as during the start; otherwise the caller retries."""
        lost = isinstance(error, InstanceIdTakenError) and (
            error.persists or self._instance_losses.again(error.session_timeout)
        )
        if lost or isinstance(error, GroupHasMembersError):
            self.lifecycle.fail(error)
            return True
        if self.state != "starting" or self.settings.start_timeout is None:
            return False
        failure = StartError(str(error))
        failure.__cause__ = error
        self.lifecycle.fail(failure)
        return True

    @property
    def standstill(self) -> str | None:
        """Why consuming makes no progress although the client is alive; None when it does."""
        trouble = self.hang
        if trouble is None and self.client.transport is not None:
            trouble = self.client.transport.trouble
        return trouble or self.rebalance.trouble or self.slow_join or self.absence

    @property
    def group_protocol(self) -> ChosenProtocol | None:
        """The group protocol in use, and why; None outside a group."""
        return None if self.client.transport is None else self.client.transport.group_protocol

    @property
    def hang(self) -> str | None:
        """The request that the transaction in progress has waited for too long; None without one."""
        return None if self.client.transport is None else self.client.transport.hang

    @property
    def missing_topics(self) -> Sequence[str]:
        """The topics of the handlers that do not exist, or that this user may not see, as far as it is known."""
        known = () if self.client.transport is None else self.client.transport.missing_topics
        return known or self._missing_topics

    @property
    def slow_join(self) -> str | None:
        """The part of `standstill` that is about a join without an answer; None if the group has answered."""
        return None if self.client.transport is None else self.client.transport.slow_join

    @property
    def absence(self) -> str | None:
        """The part of `standstill` that is about missing topics; None if none is missing that must exist."""
        missing = self.missing_topics
        if not missing:
            outputs = self.missing_outputs if self._fails_without_outputs else ()
            return "; ".join(f"{topic.sentence}: {topic.what_to_do}" for topic in outputs) or None
        return f"topics that do not exist, or that this user may not see: {', '.join(map(repr, missing))}"

    async def _live(self) -> None:
        """Run one client, from connecting until it is lost."""
        self._client_started = False
        transport = self._make_transport()
        self.client.use(transport)
        waiting = self._tasks.start(self._finish_start(), "first assignment")
        committing = self._tasks.start(self._commit(transport), "commit coordinator", lasts=True)
        try:
            needs_all = self.state == "starting" and self.settings.start_timeout is not None
            await transport.start(*self.handlers.subscription(), self.rebalance, needs_all=needs_all)
            self._reached = True
            self._client_started = True
            await self.intake.run(transport)
        finally:
            waiting.cancel()
            self.missing_outputs = ()  # a new client finds out again
            self._tasks.dismiss(committing)
            if not self.lifecycle.stopping:
                self.rebalance.end_all("the client was lost")
                await self._close(transport, self.settings.commit_timeout)

    async def _commit(self, transport: Transport) -> None:
        """Commit until cancelled. A failure may end the app, or make partitions begin again."""
        try:
            while True:
                failure = await self.committer.run(transport)
                if failure.is_refusal:
                    self._fail_if_final(failure.error)
                if failure.restarts:
                    self.rebalance.restart(failure.restarts, f"its transaction failed: {failure.why}")
        finally:
            self.committer.stop()

    async def _finish_start(self) -> None:
        """Wait until the client's first assignment is open; then end the start, or the trouble after a lost client.

        With a `start_timeout`, the start also waits for topics that do not exist yet. In the end, look for those that
        the handlers write to, until they exist.
        """
        await self.rebalance.opened.wait()
        timeout = self.settings.start_timeout
        if self.state == "starting" and timeout is not None:
            # Otherwise a mistyped topic would hardly show. No event tells when one has been created.
            while await self._misses_topics(timeout):  # noqa: ASYNC110
                await asyncio.sleep(_TOPICS_INTERVAL)
        self._backoff = _FIRST_BACKOFF
        lasted = self.trouble.end()
        if lasted is not None:
            logger.warning("a Kafka client works again after %.1f s", lasted, extra=self._fields("client_rebuilt"))
        if self.state == "starting":
            self.lifecycle.begin_running()
            count = len(self.rebalance.partitions)
            logger.info(
                "the app is running; assigned partitions: %d", count, extra=self._fields("running", partitions=count)
            )
        while self._outputs and not await self._look_up_outputs(_LOG_END_TIMEOUT):  # noqa: ASYNC110 - as above
            await asyncio.sleep(_OUTPUTS_INTERVAL)

    def _fields(self, event: str, **more: object) -> dict[str, object]:
        """Fields of a log line about the app as a whole."""
        return {"event": event, "group": self.group_id, **more}

    async def _close(self, transport: Transport, within: float) -> None:
        """Close a client; wait up to *within* seconds, at least 1 s, but never longer than `commit_timeout`."""
        self.client.retire()
        with anyio.move_on_after(min(max(within, 1.0), self.settings.commit_timeout), shield=True):
            try:
                await transport.close()
            except TransportError as error:
                logger.warning("the client did not close cleanly: %s", error)
        self.client.forget()

    # Stop -------------------------------------------------------------------------------------

    def be_draining(self) -> None:
        """Enter the draining state; `stop` calls this. A start that is still waiting ends."""
        if self.lifecycle.begin_stopping():
            in_flight = len(self.handlers.in_flight())
            rest = f"{counted(in_flight, 'record')} may run for up to {self.settings.shutdown_timeout:g} s"
            fields = self._fields("draining", in_flight=in_flight)
            logger.info("draining: nothing new is taken in%s", f"; {rest}" if in_flight else "", extra=fields)

    async def stop(self) -> None:
        """Drain, commit and end all tasks within `shutdown_timeout`.

        Raises:
            NotDrainedError: Records were still running and were cancelled, finished records are not committed, or a
                failed record could not be recovered.
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
        partitions = tuple(self.rebalance.partitions)
        await self.rebalance.drain(partitions, 0.0 if self._has_no_workers else timeout - reserve)
        late = {delivery for delivery in self.handlers.in_flight() if delivery.epoch.gate is not Gate.ENDED}
        # The commit coordinator was cancelled together with the workers.
        await self.committer.flush(partitions, 0.1 if self._has_no_workers else soft_deadline - self.clock())
        # Runs of revoked partitions may have been cancelled just now: they are late only if they do not end.
        while not self.handlers.in_flight() <= late and self.clock() < soft_deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_STOP_CHECK_INTERVAL)
        late |= self.handlers.in_flight()
        self._log_failed(partitions)
        for partition in partitions:
            self.committer.disown(partition)
        return self._left_behind(partitions, late)

    def _left_behind(self, partitions: Collection[Partition], late: Collection[Delivery]) -> NotDrainedError | None:
        """Return an error that names what the stop leaves uncommitted; None if that is nothing.

        Args:
            partitions: The partitions that were drained.
            late: The deliveries that are still in flight.
        """
        records = sorted(repr(delivery) for delivery in late if delivery.recovery is None)
        unrecovered = _unrecovered(partitions, late)
        ended = self.rebalance.uncommitted
        uncommitted = uncommitted_of(partitions)
        uncommitted |= {str(name): found.records for name, found in ended.items()}
        if not records and not uncommitted and not unrecovered:
            return None
        before = [partition.commits.before for partition in partitions]
        causes = [found.why for found in (*ended.values(), *before) if found is not None]
        why = causes[0] if causes else "the partitions were revoked before"
        reason = self.hang or self.committer.trouble.why or self.trouble.why or why
        timeout = self.settings.shutdown_timeout
        return NotDrainedError(records, timeout, uncommitted=uncommitted, reason=reason, unrecovered=unrecovered)

    def _log_failed(self, partitions: Iterable[Partition]) -> None:
        """Log which records stay uncommitted because they have halted or wait for their next attempt."""
        deliveries = (delivery for partition in partitions for delivery in partition.tracker.values())
        failed = [repr(delivery) for delivery in deliveries if delivery.block is not None and delivery.recovery is None]
        if failed:
            message = "failed records that stay uncommitted: %d, %s first; they are delivered again"
            logger.warning(
                message, len(failed), failed[0], extra=self._fields("failed_uncommitted", records=len(failed))
            )

    async def _tear_down(self, deadline: float) -> None:
        """End the client and all tasks; records that still run are cancelled and stay uncommitted."""
        for worker in self.handlers.workers:
            worker.interrupt()
        try:
            with anyio.move_on_after(max(deadline - self.clock(), 1.0)):
                if self._supervisor is not None:
                    self._tasks.dismiss(self._supervisor)
                    await asyncio.wait([self._supervisor])
                if self.client.transport is not None:
                    await self._close(self.client.transport, deadline - self.clock())
            self.rebalance.end_all("the app stopped")
        finally:
            for worker in self.handlers.workers:
                worker.abandoned = True  # the process must be able to end although a thread does not
        await self._tasks.close(max(min(deadline - self.clock(), 1.0), 0.2))
        logger.info("the app has stopped", extra=self._fields("stopped"))
        self.lifecycle.end()


def _sending(producer: Producer) -> Send:
    """Return the function that publishes what is written instead of a run, such as dead letters."""

    def send(_: Delivery, message: Message) -> Awaitable[int]:
        return producer.publish(message)

    return send


def _unrecovered(partitions: Iterable[Partition], late: Iterable[Delivery]) -> dict[str, str]:
    """Return the records whose attempts are exhausted and whose recovery has not ended, each with the reason.

    Args:
        partitions: The partitions that are drained.
        late: The deliveries that were still running at the end.
    """
    unrecovered = {}
    for delivery in late:
        if delivery.recovery is not None:
            unrecovered[repr(delivery)] = f"{delivery.recovery.purpose}: it was still being written"
    epochs = itertools.chain.from_iterable(partition.epochs for partition in partitions)
    for epoch in epochs:
        for delivery in epoch.tracker.values():
            if delivery.recovery is not None and delivery.recovery_error is not None:
                unrecovered[repr(delivery)] = f"{delivery.recovery.purpose}: {delivery.recovery_error}"
    return dict(sorted(unrecovered.items()))


async def _update_log_ends(transport: Transport, partitions: Mapping[TopicPartition, Partition]) -> None:
    """Request the log ends once; a client that does not answer is not an error here."""
    try:
        with anyio.fail_after(_LOG_END_TIMEOUT):
            ranges = await transport.log_ranges(list(partitions))
    except (TransportError, TimeoutError) as error:
        logger.debug("the brokers did not report the log ends: %s", str(error) or "no answer in time")
        return
    for name, log in ranges.items():
        partitions[name].log_end.report(log)
