"""What is ours: partitions revoked, lost and assigned; drained, handed back, continued in place."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, Protocol

import anyio

from aioshard.core.ownership import Claim, Evidence, first_generation, origin_of, reason_to_end
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Epoch, Gate, Rerun
from aioshard.engine.fetcher import Feed, Fetcher
from aioshard.engine.tasks import TaskSet
from aioshard.engine.worker import Worker
from aioshard.errors import (
    AioshardError,
    ClientLostError,
    NoOffsetError,
    OffsetOutOfRangeError,
    OffsetRegressionError,
    TransportError,
)
from aioshard.ports import Committed, FetchedBatch, LogRange, Membership, Transport
from aioshard.records import TopicPartition

__all__ = ["Limits", "Outside", "Rebalance"]

logger = logging.getLogger("aioshard.engine.rebalance")

_RETRY_DELAY = 0.2


class Limits(NamedTuple):
    """The times and the policy that rebalances keep to, in seconds."""

    group_id: str
    drain_timeout: float
    commit_timeout: float
    auto_offset_reset: Literal["earliest", "latest", "error"] | None
    max_buffered_bytes: int


class Outside(Protocol):
    """Where the rebalance finds what others own."""

    @property
    def workers(self) -> Collection[Worker]:
        """All workers of all handlers."""

    def feed_of(self, topic: str) -> Feed:
        """Where the records of a topic go."""

    def fail(self, error: BaseException) -> None:
        """End the app: *error* is something that no retry cures."""


class Rebalance:
    """Owns the epochs: begins them, closes and opens their gates, ends them. The `GroupListener`.

    A partition that is revoked keeps its epoch, closed. When the group gives it back and everything of
    `aioshard.core.ownership.reason_to_end` speaks for it, it goes on where it was; else its epoch ends
    and what was queued is dropped.

    Invariants:
        * Nothing of an epoch is committed between the end of `revoked` and its continuation (I9).
        * `revoked` returns within the drain time-out plus the commit time-out (I7).
        * A gate opens only after the checks, under the membership that the checks were made in.
    """

    def __init__(
        self,
        limits: Limits,
        outside: Outside,
        *,
        committer: Committer,
        buffer: Buffer,
        tasks: TaskSet,
        clock: Callable[[], float],
    ) -> None:
        self.fetchers: dict[TopicPartition, Fetcher] = {}
        """Of the partitions that are ours, or may be ours again."""
        self.rebalances = 0
        self.settled = asyncio.Event()
        """Set while the partitions of an assignment are all open (or there are none)."""
        self.ends: dict[TopicPartition, int] = {}
        """End of each partition's log as first seen; for consuming up to there."""
        self.unsettled: dict[frozenset[TopicPartition], str] = {}
        """Why it is not known yet where to go on with partitions that are ours."""
        self._limits = limits
        self._outside = outside
        self._committer = committer
        self._buffer = buffer
        self._tasks = tasks
        self._clock = clock
        self._transport: Transport | None = None
        self._fetch_tasks: dict[Epoch, asyncio.Task[object]] = {}
        self._claims: dict[TopicPartition, Claim] = {}
        self._opened_in: dict[Epoch, Membership] = {}
        """Of the epochs that are ours for certain: the membership of the latest assignment."""
        self._reruns: dict[TopicPartition, Rerun] = {}
        self._known_topics: set[str] = set()
        self._settling: set[asyncio.Task[object]] = set()
        self._stopping = False
        self._epochs = 0

    def attach(self, transport: Transport) -> None:
        """From now on *transport* is the client."""
        self._transport = transport
        self._claims.clear()

    @property
    def _client(self) -> Transport:
        if self._transport is None:
            raise ClientLostError("there is no Kafka client now: one is being built, or the app has stopped")
        return self._transport

    @property
    def epochs(self) -> list[Epoch]:
        """Every epoch that has not ended."""
        return [fetcher.epoch for fetcher in tuple(self.fetchers.values())]

    # Taken away ----------------------------------------------------------------------

    async def revoked(self, partitions: Collection[TopicPartition], *, lost: bool) -> None:
        """Drain, commit and let go of partitions; see `GroupListener.revoked`."""
        self.settled.clear()
        self._stop_settling()
        epochs = [fetcher.epoch for name in partitions if (fetcher := self.fetchers.get(name)) is not None]
        if lost:
            for epoch in epochs:
                self._end(epoch, "the group has dropped us")
            return
        for epoch in [epoch for epoch in epochs if epoch not in self._opened_in]:
            epochs.remove(epoch)
            self._end(epoch, "it was revoked again before it was ours for certain")
        try:
            late = await self.drain(epochs, self._limits.drain_timeout)
            if late:
                logger.warning("%d record(s) still ran when the time to drain was over, and were cancelled", late)
            await self._committer.flush(epochs, self._limits.commit_timeout)
        finally:
            for epoch in epochs:
                self._committer.disown(epoch)
        for epoch in epochs:
            if epoch.gate is not Gate.ENDED:
                self._claim(epoch)

    def _claim(self, epoch: Epoch) -> None:
        held = self._opened_in.pop(epoch)
        self._claims[epoch.topic_partition] = Claim(*held, epoch.acknowledged, epoch.tracker.position)

    async def drain(self, epochs: Collection[Epoch], timeout: float) -> int:
        """Close the gates and wait for what has to end; cancel what has not within *timeout* seconds.

        Returns:
            How many records had not ended.
        """
        for epoch in epochs:
            if epoch.gate is Gate.OPEN:
                self.fetchers[epoch.topic_partition].feed.close(epoch)
        with anyio.move_on_after(timeout):
            for epoch in epochs:
                if epoch.drained is not None:
                    await epoch.drained.wait()
        late = {delivery for epoch in epochs for delivery in epoch.stop_draining()}
        for worker in (running := [worker for worker in self._outside.workers if worker.delivery in late]):
            worker.interrupt()
        return len(running)

    def end_all(self, reason: str) -> None:
        """End every epoch: the client is gone, or the app is."""
        self.settled.clear()
        self._stop_settling()
        for epoch in self.epochs:
            self._end(epoch, reason)

    def _end(self, epoch: Epoch, reason: str) -> None:
        dropped = len(epoch.tracker)
        self._committer.disown(epoch)
        self._reruns[epoch.topic_partition] = epoch.end()
        self.fetchers.pop(epoch.topic_partition).feed.purge(epoch)
        self._fetch_tasks.pop(epoch).cancel()
        self._opened_in.pop(epoch, None)
        self._claims.pop(epoch.topic_partition, None)
        for worker in self._outside.workers:
            if worker.delivery is not None and worker.delivery.epoch is epoch:
                worker.interrupt()
        logger.log(
            logging.WARNING if dropped else logging.INFO,
            "epoch %d of %s ended: %s; %d incomplete record(s) were dropped and are fetched again where it goes on",
            epoch.number,
            epoch.topic_partition,
            reason,
            dropped,
        )

    # Given ------------------------------------------------------------------------------

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Take note of an assignment and look into it; see `GroupListener.assigned`."""
        self.rebalances += 1
        given = frozenset(partitions)
        for epoch in self.epochs:
            if epoch in self._opened_in:
                self._opened_in[epoch] = membership
            elif epoch.topic_partition in given:
                epoch.fetching_again = False
                self._client.seek(epoch.topic_partition, epoch.tracker.position)
            else:
                self._end(epoch, "the partition was given to another member")
        self._client.adjust_prefetch(max(len(self.fetchers.keys() | given), 1), self._limits.max_buffered_bytes // 2)
        self._look_into(given, membership, f"settle generation {membership.generation}")

    def restart(self, epoch: Epoch, error: OffsetOutOfRangeError | OffsetRegressionError) -> None:
        """An epoch's position is not in its log any more: find where to go on."""
        topic_partition = epoch.topic_partition
        self._client.pause([topic_partition])
        if isinstance(error, OffsetOutOfRangeError):
            epoch.outside_log = error.position
        else:
            self._end(epoch, str(error))
        self._look_into(frozenset([topic_partition]), self._client.membership(), f"restart {topic_partition}")

    def stop_opening(self) -> None:
        """From now on no gate opens: the app is draining for good."""
        self._stopping = True
        self._stop_settling()

    def _look_into(self, partitions: frozenset[TopicPartition], membership: Membership, name: str) -> None:
        self.settled.clear()
        if self._stopping:
            return
        task = self._tasks.start(self._settle(partitions, membership), name)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _stop_settling(self) -> None:
        for task in self._settling:
            task.cancel()
        self.unsettled.clear()

    async def _settle(self, partitions: frozenset[TopicPartition], membership: Membership) -> None:
        """Open each of *partitions*, in place or in a new epoch; try until done or overtaken."""
        while self._client.membership() == membership:
            try:
                await self._try_to_settle(partitions, membership)
            except OffsetOutOfRangeError as error:
                self._outside.fail(error)
                return
            except (TransportError, TimeoutError) as error:
                reason = str(error) or "the brokers do not answer"
                self.unsettled[partitions] = f"{len(partitions)} partition(s) wait, {min(partitions)} first: {reason}"
                await asyncio.sleep(_RETRY_DELAY)
            except AioshardError as error:
                self._outside.fail(error)
                return
            else:
                self.unsettled.pop(partitions, None)
                self._settling.difference_update([asyncio.current_task()])
                if not self._settling:
                    self.settled.set()
                return

    async def _try_to_settle(self, partitions: frozenset[TopicPartition], membership: Membership) -> None:
        unsettled = [topic_partition for topic_partition in partitions if not self._is_open(topic_partition)]
        if not unsettled:
            return
        client = self._client
        with anyio.fail_after(self._limits.commit_timeout):
            committed = await client.committed(unsettled)
            ranges = await client.log_ranges(unsettled)
        if client.membership() != membership:
            return
        fresh: list[TopicPartition] = []
        for topic_partition in unsettled:
            log = ranges[topic_partition]
            # Lower than at first when the topic was made anew, and then there is no more to come.
            self.ends[topic_partition] = min(self.ends.get(topic_partition, log.end), log.end)
            fetcher = self.fetchers.get(topic_partition)
            if fetcher is None or not self._continue(fetcher, committed[topic_partition], log, membership):
                fresh.append(topic_partition)
        await self._open_resolved(await self._begin_all(fresh, committed, ranges, membership), membership)

    def _is_open(self, topic_partition: TopicPartition) -> bool:
        fetcher = self.fetchers.get(topic_partition)
        return fetcher is not None and fetcher.epoch.gate is Gate.OPEN and fetcher.epoch.outside_log is None

    def _continue(self, fetcher: Fetcher, committed: Committed | None, log: LogRange, now: Membership) -> bool:
        epoch = fetcher.epoch
        if epoch.gate is Gate.OPEN and epoch.outside_log is not None:
            reason = self._pass_over(fetcher, epoch.outside_log, log)
        else:
            evidence = Evidence(*now, committed.offset if committed else None, log.start, log.end)
            reason = reason_to_end(self._claims.get(epoch.topic_partition), evidence)
        if reason is not None:
            self._end(epoch, reason)
            return False
        self._open(epoch, now)
        return True

    def _pass_over(self, fetcher: Fetcher, position: int, log: LogRange) -> str | None:
        """Pass over what retention has deleted unread, a hole like any other; or say why the epoch ends."""
        topic_partition = fetcher.epoch.topic_partition
        if position >= log.start or self._limits.auto_offset_reset == "error":
            return str(OffsetOutOfRangeError(topic_partition, position))
        message = "retention has deleted offsets %d to %d of %s before they were read; going on at %d"
        logger.warning(message, position, log.start - 1, topic_partition, log.start)
        fetcher.accept(FetchedBatch(topic_partition, (), (), log.start))
        self._client.seek(topic_partition, log.start)
        return None

    async def _begin_all(
        self,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, Committed | None],
        ranges: Mapping[TopicPartition, LogRange],
        membership: Membership,
    ) -> list[Epoch]:
        """New epochs for *partitions*, closed; those whose position was committed are opened."""
        topics = {name.topic for name in partitions if committed[name] is None}
        known = {topic for topic in topics if await self._group_knows(topic, membership)}
        if self._client.membership() != membership:
            return []
        resolved = []
        for topic_partition in partitions:
            ours = committed[topic_partition]
            offset = ours.offset if ours else None
            origin = origin_of(
                offset,
                ranges[topic_partition],
                self._limits.auto_offset_reset,
                group_knows_topic=topic_partition.topic in known,
            )
            if origin is None:
                lost = OffsetOutOfRangeError(topic_partition, ours.offset) if ours else None
                raise lost or NoOffsetError(self._limits.group_id, topic_partition)
            epoch = self._begin(topic_partition, origin.offset)
            epoch.acknowledged = offset
            epoch.first_generation = first_generation(ours.metadata) if ours else membership.generation
            if origin.resolved:
                if ours is not None:
                    message = "committed offset %d of %s is outside its log; going on at %d"
                    logger.warning(message, ours.offset, topic_partition, origin.offset)
                resolved.append(epoch)
            else:
                self._open(epoch, membership)
        return resolved

    async def _group_knows(self, topic: str, membership: Membership) -> bool:
        """Whether the group had committed on a topic before this generation's members began to."""
        if topic in self._known_topics:
            return True
        client = self._client
        with anyio.fail_after(self._limits.commit_timeout):
            partitions = [TopicPartition(topic, number) for number in await client.partitions(topic)]
            commits = await client.committed(partitions)
        return any(c is not None and first_generation(c.metadata) != membership.generation for c in commits.values())

    async def _open_resolved(self, epochs: list[Epoch], membership: Membership) -> None:
        """Commit the positions that were found for the group, and only then hand out records."""
        for epoch in epochs:
            self._committer.own(epoch)
        acknowledged = await self._committer.flush(epochs, self._limits.commit_timeout)
        if self._client.membership() != membership:
            return
        if not acknowledged:
            for epoch in epochs:
                self._end(epoch, "its start position could not be committed")
            raise TransportError(f"where the group begins could not be committed: {self._committer.trouble}")
        for epoch in epochs:
            self._open(epoch, membership)

    def _begin(self, topic_partition: TopicPartition, start: int) -> Epoch:
        self._epochs += 1
        epoch = Epoch(topic_partition, self._epochs, start, self._buffer)
        epoch.rerun = self._reruns.pop(topic_partition, None)
        fetcher = Fetcher(epoch, self._outside.feed_of(topic_partition.topic), self._clock)
        self.fetchers[topic_partition] = fetcher
        self._fetch_tasks[epoch] = self._tasks.start(fetcher.run(), f"fetch {topic_partition}")
        self._client.seek(topic_partition, start)
        return epoch

    def _open(self, epoch: Epoch, membership: Membership) -> None:
        self._known_topics.add(epoch.topic_partition.topic)
        self._opened_in[epoch] = membership
        self._committer.own(epoch)
        epoch.open()
        logger.info(
            "%s: epoch %d, committed %s, position %d, %d record(s) in hand of which %d were started",
            epoch.topic_partition,
            epoch.number,
            epoch.acknowledged,
            epoch.tracker.position,
            len(epoch.tracker),
            sum(1 for delivery in epoch.tracker.values() if delivery.starts),
        )
        self.fetchers[epoch.topic_partition].feed.reopen(epoch)
        self._client.resume([epoch.topic_partition])
