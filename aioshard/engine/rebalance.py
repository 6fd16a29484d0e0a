"""Partition ownership: handles revoked, lost and assigned partitions, and drains, hands over or continues them."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import anyio

from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.histogram import Histogram
from aioshard.core.ownership import (
    Claim,
    Origin,
    knows_topic,
    origin_of,
    reason_to_end,
)
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Delivery, Rerun
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.partition import Partition
from aioshard.engine.tasks import TaskSet
from aioshard.engine.worker import Worker
from aioshard.errors import (
    AioshardError,
    ClientLostError,
    NoOffsetError,
    OffsetOutOfRangeError,
    OffsetRegressionError,
    StateError,
    TransportError,
)
from aioshard.observe import RebalanceKind, RebalanceKindStatistics, RebalancePhase, RebalanceReport
from aioshard.ports import NOT_A_MEMBER, Committed, FetchedBatch, LogRange, Membership, Transport
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

logger = logging.getLogger("aioshard.engine.rebalance")

T = TypeVar("T")

_RETRY_DELAY = 0.2
_PARTITIONS_PER_STEP = 100
"""Partitions opened before other tasks run; this takes about 10 ms."""
_LEADER_DELAY = 1.0
"""Seconds between lookups of partitions whose leader is away."""


@dataclasses.dataclass(eq=False)
class Seek:
    """A position that the application requested.

    It survives rebalances as long as the partition stays assigned to us: the partition then opens there instead of at
    the committed offset. Its future is done once the partition opens there, is assigned elsewhere, or the app stops.
    """

    start: int
    done: asyncio.Future[None]


class _BrokerView(NamedTuple):
    """A partition as the brokers see it."""

    committed: Committed | None
    metadata: CommitMetadata
    log: LogRange


class Rebalance:
    """Owns the partitions: creates them, closes and opens their gates, and ends them. Implements `GroupListener`.

    A revoked partition keeps its epoch, with the gate closed. If the group assigns it again and
    `aioshard.core.ownership.reason_to_end` finds no objection, it continues in place. Otherwise its epoch ends and its
    queued records are dropped.

    Invariants:
        * A position that was not committed yet is committed before the first record is handed out.
        * Nothing of a partition is committed between the end of `revoked` and its continuation (I9).
        * `revoked` returns within the drain timeout plus the commit timeout (I7).
        * A gate opens only after the checks, and under the same membership in which they were made.
    """

    def __init__(
        self,
        group_id: str,
        settings: "Settings",
        *,
        make_partition: Callable[[TopicPartition, int, int], Partition],
        workers: Collection[Worker],
        replayed: Callable[[], int],
        fail: Callable[[BaseException], None],
        committer: Committer,
        tasks: TaskSet,
        clock: Callable[[], float],
    ) -> None:
        """Make a rebalance; it owns nothing yet.

        Args:
            group_id: The consumer group.
            settings: Timeouts.
            make_partition: Makes a partition from its name, the number of its epoch and its start, with a closed gate.
            workers: All workers of all handlers.
            replayed: Returns how many records this process has run more than once.
            fail: Ends the app: no retry can help against an error.
            committer: The commit coordinator.
            tasks: Runs the fetch tasks and the lookups.
            clock: Loop time.
        """
        self.partitions: dict[TopicPartition, Partition] = {}
        """Partitions that are ours, or may become ours again."""
        self.rebalances = 0
        self.log = RebalanceLog(clock, replayed)
        """History of the rebalances."""
        self.settled = asyncio.Event()
        """Set while every assigned partition is open, except those whose leader is away."""
        self.ends: dict[TopicPartition, int] = {}
        """End of each partition's log as first seen, for consuming up to that point."""
        self.refused = False
        """Whether the latest lookup failed in a way that waiting does not fix."""
        self.unsettled: dict[TopicPartition, str] = {}
        """Owned partitions whose resume position is not known yet, each with the reason."""
        self.seeks: dict[TopicPartition, Seek] = {}
        """Positions that the application requested and that are not reached yet."""
        self._group_id = group_id
        self._settings = settings
        self._make_partition = make_partition
        self._workers = workers
        self._fail = fail
        self._committer = committer
        self._tasks = tasks
        self._transport: Transport | None = None
        self._reruns: dict[TopicPartition, Rerun] = {}
        """Records of ended ownerships that this process had started."""
        self._opened: set[TopicPartition] = set()
        """Partitions that this process opened: the group has had a position there, even if the brokers dropped it."""
        self._first_commits: dict[str, FirstCommit | None] = {}
        """Marker of the first commit seen on each topic; brokers forget the commits of a deleted topic."""
        self._assignment: frozenset[TopicPartition] = frozenset()
        """The latest assignment, without what was revoked or lost since."""
        self._assigned_under = NOT_A_MEMBER
        self._settling: asyncio.Task[object] | None = None
        self._stopping = False
        self._epochs = 0

    def attach(self, transport: Transport) -> None:
        """Use *transport* as the client from now on."""
        self._transport = transport

    @property
    def client(self) -> Transport:
        """The current client.

        Raises:
            ClientLostError: No client exists now.
        """
        if self._transport is None:
            raise ClientLostError("the Kafka client is gone: a new one is being created, or the app has stopped")
        return self._transport

    @property
    def epochs(self) -> list[Partition]:
        """All partitions whose ownership has not ended. Safe from any thread."""
        return list(self.partitions.values())

    @property
    def in_place(self) -> bool:
        """Whether every partition is open at its resume position: no rebalance, seek or absent leader is pending."""
        return self.settled.is_set() and not self.unsettled and not self.seeks

    @property
    def trouble(self) -> str | None:
        """Why owned partitions are not open; None when all are."""
        if not self.unsettled:
            return None
        name, reason = min(self.unsettled.items())
        waiting = f"{len(self.unsettled)} partitions wait, {name} first" if len(self.unsettled) > 1 else f"{name} waits"
        return f"{waiting}: {reason}"

    # Revoked and lost ----------------------------------------------------------------

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        """End partitions that are not ours any more; see `GroupListener.lost`."""
        self.end(self._leave(partitions, lost=True), "the group membership was lost")

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Drain, commit and release partitions; see `GroupListener.revoked`."""
        leaving: dict[Partition, Membership] = {}
        for partition in self._leave(partitions, lost=False):
            if partition.membership is None:
                self.end([partition], "it was revoked again before it was certain to be ours")
            else:
                leaving[partition], partition.membership = partition.membership, None
        try:
            self.log.drained(await self.drain(leaving, self._settings.drain_timeout))
            await self._committer.flush(leaving, self._settings.commit_timeout)
        finally:
            self.log.enter("join")
            for partition in leaving:
                self._committer.disown(partition)
        if uncommitted := uncommitted_of(leaving):
            logger.warning(
                "the last commit before the partitions were released was not acknowledged; finished records that may "
                "run again: %s",
                ", ".join(f"{name} ({count})" for name, count in uncommitted.items()),
                extra={"event": "uncommitted", "records": sum(uncommitted.values()), "group": self._group_id},
            )
        for partition, membership in leaving.items():
            partition.claim = Claim(*membership, partition.acknowledged, partition.tracker.position)

    def _leave(self, names: Collection[TopicPartition], *, lost: bool) -> list[Partition]:
        """Begin a revocation or loss: stop opening partitions, and return those of *names* that have an epoch."""
        self.settled.clear()
        self._stop_settling()
        self._assignment = self._assignment.difference(names)
        leaving = [partition for name in names if (partition := self.partitions.get(name)) is not None]
        epochs = {epoch for partition in leaving for epoch in partition.epochs}
        self.log.revoked(len(leaving), sum(delivery.epoch in epochs for delivery in self.running()), lost=lost)
        return leaving

    def running(self) -> set[Delivery]:
        """All deliveries that workers run now."""
        return {delivery for worker in self._workers for delivery in worker.deliveries}

    async def drain(self, partitions: Collection[Partition], timeout: float) -> int:
        """Close the gates and wait for the records that must end; cancel those still running after *timeout* seconds.

        Returns:
            How many records were still running.
        """
        running = self.running()
        for partition in partitions:
            if partition.is_open:
                below = not partition.lists_all_finished(self._committer.metadata_limit)
                partition.feed.close(partition, running, below=below)
        draining = [epoch for partition in partitions for epoch in partition.epochs]
        with anyio.move_on_after(timeout):
            for epoch in draining:
                await epoch.drained.wait()
        cancelled = self._interrupt({delivery for epoch in draining for delivery in epoch.stop_draining()})
        if cancelled and timeout:
            logger.warning(
                "records cancelled because they were still running at the drain deadline: %d",
                cancelled,
                extra={"event": "drain_cut", "cancelled": cancelled},
            )
        return cancelled

    def _interrupt(self, deliveries: set[Delivery]) -> int:
        """Cancel the runs of these deliveries; return how many of them were running."""
        count = 0
        for worker in self._workers:
            running = deliveries.intersection(worker.deliveries)
            count += len(running)
            if running:
                worker.interrupt()
        return count

    def wait_no_more(self) -> None:
        """End every drain as if its timeout had passed, because no worker is left to run anything."""
        for partition in self.epochs:
            for epoch in partition.epochs:
                epoch.drained.set()

    def end_all(self, reason: str) -> None:
        """End every epoch: the client is lost, or the app stopped."""
        self.settled.clear()
        self._stop_settling()
        self.end(self.epochs, reason)
        self.log.enter("over")

    def end(self, partitions: Collection[Partition], reason: str) -> None:
        """End ownerships: drop their incomplete records and interrupt those that are running."""
        epochs = {epoch for partition in partitions for epoch in partition.epochs}
        for partition in partitions:
            name, dropped = partition.topic_partition, len(partition.tracker)
            self.log.count("dropped", dropped)
            self._committer.disown(partition)
            self._reruns[name] = partition.end()
            del self.partitions[name]
            partition.feed.purge(partition)
            if partition.task is not None:
                self._tasks.dismiss(partition.task)
            logger.debug(
                "epoch %d of %s ended: %s; records that run again at its next owner: %d",
                partition.number,
                name,
                reason,
                dropped,
                extra=partition_fields(
                    "epoch_ended", name, epoch=partition.number, dropped=dropped, group=self._group_id
                ),
            )
        # Once for all: with 1,024 workers, a check for each of 1,000 partitions blocked the event loop for 0.35 s.
        self._interrupt({delivery for delivery in self.running() if delivery.epoch in epochs})

    # Assigned ---------------------------------------------------------------------------

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Record a new assignment and start opening its partitions; see `GroupListener.assigned`."""
        self.rebalances += 1
        assignment = self._assignment = frozenset(partitions)
        self._assigned_under = membership
        for name in sorted(self.seeks.keys() - assignment):
            self._give_up_seek(name, "the group assigned it to another member, which resumes at the committed offset")
        untouched, gone = 0, []
        for partition in self.epochs:
            if partition.membership is not None:
                partition.membership = membership
                untouched += partition.topic_partition in assignment
            elif partition.topic_partition in assignment:
                partition.fetching_again = False
                self.client.seek(partition.topic_partition, partition.tracker.position)
            else:
                gone.append(partition)
        self.end(gone, "the partition was assigned to another member")
        manual = not membership.member_id and membership != NOT_A_MEMBER
        self.log.assigned(len(assignment), untouched, membership.generation, manual=manual)
        # A new assignment also contains the partitions of earlier ones that are not open yet.
        self._settle_soon()

    def restart(self, partition: Partition, error: OffsetOutOfRangeError | OffsetRegressionError) -> None:
        """Find where to resume a partition whose position is no longer in its log."""
        self.client.pause([partition.topic_partition])
        if isinstance(error, OffsetOutOfRangeError):
            partition.outside_log = error.position
        else:
            self.end([partition], str(error))
        self._settle_soon()

    def begin_again(self, partitions: Collection[Partition], why: str) -> None:
        """End the epochs of partitions and begin new ones at the offsets that the brokers report as committed."""
        ours = [partition for partition in partitions if self.partitions.get(partition.topic_partition) is partition]
        self.client.pause([partition.topic_partition for partition in ours])
        self.end(ours, why)
        self._settle_soon()

    def stop_opening(self) -> None:
        """Open no gate from now on: the app is draining and will stop."""
        self._stopping = True
        for name in tuple(self.seeks):
            self._give_up_seek(name, "the app stopped, and its next start resumes at the committed offset")
        self._stop_settling()

    def _settle_soon(self) -> None:
        """Open the owned partitions that are not open; if that is in progress already, begin again."""
        self.settled.clear()
        self._stop_settling()
        if not self._stopping:
            self._settling = self._tasks.start(self._settle(), f"settle generation {self._assigned_under.generation}")

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        self.unsettled.clear()

    async def _settle(self) -> None:
        """Open the assigned partitions, in place or in new epochs; retry until done or until the membership changes."""
        assignment, membership = self._assignment, self._assigned_under
        while self.client.membership() == membership:
            try:
                self.unsettled = await self._open_assigned(assignment, membership)
            except (AioshardError, TimeoutError) as error:
                if not isinstance(error, TransportError | TimeoutError) or isinstance(error, OffsetOutOfRangeError):
                    self._fail(error)
                    return
                why = str(error) or "the brokers do not answer"
                self.refused = isinstance(error, TransportError) and not error.retriable
                self.unsettled = {name: why for name in assignment if not self._is_open(name)}
                delay = _RETRY_DELAY
            else:
                if self.client.membership() != membership:
                    return
                self.settled.set()
                self.log.settled()
                if not self.unsettled:
                    return
                delay = _LEADER_DELAY
            await asyncio.sleep(delay)

    def _is_open(self, name: TopicPartition) -> bool:
        """Whether a partition needs no checks before its records are handed out."""
        partition = self.partitions.get(name)
        if partition is None:
            return False
        # A partition that is drained for a seek is still ours; it is checked once the drain is over.
        is_drained = name in self.seeks and partition.membership is not None
        return is_drained or (partition.is_open and partition.outside_log is None)

    async def _open_assigned(
        self, assignment: frozenset[TopicPartition], membership: Membership
    ) -> dict[TopicPartition, str]:
        """Open each partition of *assignment*, in place or in a new epoch, while *membership* lasts.

        Returns:
            The partitions whose leader is away, each with the reason. They do not delay the others.

        Raises:
            TransportError: A lookup or a commit failed; partitions that were opened stay open.
            TimeoutError: The brokers did not answer.
            NoOffsetError: There is neither a committed offset nor a policy that says where to begin.
            OffsetOutOfRangeError: The committed offset is not in the log, and the policy is "error".
        """
        unsettled = [name for name in sorted(assignment) if not self._is_open(name)]
        if not unsettled:
            return {}
        committed = await self._within_timeout(self.client.committed(unsettled))
        logs = await self._within_timeout(self.client.log_ranges(unsettled))
        # Parsing long metadata takes a while through no fault of the brokers, so it has no deadline.
        metadata = await _read(committed)
        fresh: dict[TopicPartition, _BrokerView] = {}
        for count, (name, log) in enumerate((name, logs[name]) for name in unsettled if name in logs):
            if not await self._lasts(membership, count):
                return {}
            # A recreated topic may end earlier than first seen, and nothing will arrive up to the old end.
            self.ends[name] = min(self.ends.get(name, log.end), log.end)
            view = _BrokerView(committed[name], metadata[name], log)
            partition = self.partitions.get(name)
            if partition is None or not self._continue(partition, view, membership):
                fresh[name] = view
        await self._begin_all(fresh, membership)
        return {name: f"no leader of {name} answers" for name in unsettled if name not in logs}

    async def _within_timeout(self, request: Awaitable[T]) -> T:
        with anyio.fail_after(self._settings.commit_timeout):
            return await request

    def _continue(self, partition: Partition, view: _BrokerView, membership: Membership) -> bool:
        """Open a partition in place if it can be continued; otherwise end its epoch."""
        seek = self.seeks.get(partition.topic_partition)
        if seek is not None:
            reason: str | None = f"the application requested offset {seek.start}"
        elif partition.is_open and partition.outside_log is not None:
            reason = self._skip_deleted(partition, partition.outside_log, view.log)
        else:
            offset = view.committed.offset if view.committed else None
            reason = reason_to_end(partition.claim, *membership, offset, view.log[:2])
        if reason is not None:
            self.end([partition], reason)
            return False
        self._open(partition, membership)
        return True

    def _skip_deleted(self, partition: Partition, position: int, log: LogRange) -> str | None:
        """Skip offsets that retention deleted before they were read, like any hole; or return why the epoch ends."""
        name = partition.topic_partition
        if position >= log.start or self._settings.auto_offset_reset == "error":
            return str(OffsetOutOfRangeError(name, position))
        logger.warning(
            "retention deleted offsets %d to %d of %s before they were read; resuming at %d",
            position,
            log.start - 1,
            name,
            log.start,
            extra=partition_fields("passed_over", name, offset=position, position=log.start),
        )
        partition.accept(FetchedBatch(name, (), (), log.start))
        self.client.seek(name, log.start)
        return None

    async def _begin_all(self, fresh: Mapping[TopicPartition, _BrokerView], membership: Membership) -> None:
        """Begin and open new epochs; commit a position first if it is not committed yet or may not be ours.

        Raises:
            TransportError: A lookup or a commit failed.
            TimeoutError: The brokers did not answer.
        """
        sizes = {topic: len(await self._within_timeout(self.client.partitions(topic))) for topic in _topics(fresh)}
        unknown = _topics(name for name, view in fresh.items() if view.committed is None)
        commits = {topic: await self._commits_on(topic, sizes[topic]) for topic in unknown}
        begun = []
        for count, (name, view) in enumerate(fresh.items()):
            if not await self._lasts(membership, count):
                return
            begun.append(self._begin(name, view, commits.get(name.topic, ()), sizes[name.topic]))
        restored = await self._restore_all(begun, sizes, membership)
        uncommitted = []
        for count, (partition, in_doubt) in enumerate(zip(begun, restored, strict=True)):
            if not await self._lasts(membership, count):
                return
            if in_doubt is True:
                partition.acknowledged = None  # commit it again: the response shows whether the partition is ours
            elif in_doubt is not False:
                continue
            if partition.acknowledged == partition.tracker.position:
                self._open(partition, membership)
            else:
                uncommitted.append(partition)
        await self._commit_and_open(uncommitted, membership)
        if failures := [result for result in restored if isinstance(result, BaseException)]:
            raise failures[0]

    def _origin(self, name: TopicPartition, view: _BrokerView, *, group_knows_topic: bool) -> Origin:
        """Decide where to begin a partition.

        Raises:
            NoOffsetError: There is neither a committed offset nor a policy that decides it.
            OffsetOutOfRangeError: The committed offset is not in the log, and the policy is "error".
        """
        seek, log = self.seeks.get(name), view.log
        if seek is not None:
            return Origin(min(max(seek.start, log.start), log.end), resolved=True)
        offset = view.committed.offset if view.committed else None
        origin = origin_of(offset, log[:2], self._settings.auto_offset_reset, group_knows_topic=group_knows_topic)
        if origin is None:
            raise NoOffsetError(self._group_id, name) if offset is None else OffsetOutOfRangeError(name, offset)
        if origin.resolved and offset is not None:
            logger.warning(
                "committed offset %d of %s is outside its log; resuming at %d",
                offset,
                name,
                origin.offset,
                extra=partition_fields("out_of_range", name, offset=offset, position=origin.offset),
            )
        return origin

    async def _commits_on(self, topic: str, partitions: int) -> list[FirstCommit | None]:
        """First-commit markers of the group's commits on a topic, and of the first commit seen there."""
        commits = await self._within_timeout(
            self.client.committed([TopicPartition(topic, number) for number in range(partitions)])
        )
        metadata = await _read({name: committed for name, committed in commits.items() if committed is not None})
        markers = [text.first for text in metadata.values()]
        if topic in self._first_commits:
            markers.append(self._first_commits[topic])
        return markers

    def _begin(
        self, name: TopicPartition, view: _BrokerView, commits: Collection[FirstCommit | None], size: int
    ) -> Partition:
        """Make a partition with a new epoch, its gate closed; `acknowledged` is its start if that is committed."""
        now = time.time()
        knows = view.committed is None and (name in self._opened or knows_topic(commits, name.partition, now))
        origin = self._origin(name, view, group_knows_topic=knows)
        self._epochs += 1
        partition = self.partitions[name] = self._make_partition(name, self._epochs, origin.offset)
        partition.rerun = self._reruns.pop(name, None)
        partition.task = self._tasks.start(partition.run(), f"fetch {name}", lasts=True)
        self.client.seek(name, origin.offset)
        if view.committed is None:
            partition.first_commit = FirstCommit(size, int(now))
            return partition
        first, ignored = view.metadata.first, view.metadata.ignored
        if view.metadata.foreign is not None or ignored:
            _warn_unused(name, view.committed.offset, why="; ".join(ignored) or "another program wrote it")
        if first is not None and first.is_recent(now):
            partition.first_commit = first
        if not origin.resolved:
            finished, end = view.metadata.finished, view.log.end
            if finished and finished[-1].end > end:  # the topic was recreated, or its log truncated
                _warn_unused(name, finished[-1].end, why=f"it belongs to another log: this one ends at offset {end}")
            else:
                partition.finished_ahead = finished
        if name not in self.seeks:  # a seek is always committed, even to the same offset: the metadata differs
            partition.acknowledged = view.committed.offset
        return partition

    async def _restore_all(
        self, partitions: Collection[Partition], sizes: Mapping[str, int], membership: Membership
    ) -> list[bool | BaseException]:
        """Return the result of `_restore` of each partition; transient errors are results too."""
        restored = await asyncio.gather(
            *(self._restore(partition, sizes[partition.topic_partition.topic], membership) for partition in partitions),
            return_exceptions=True,
        )
        for result in restored:
            if isinstance(result, BaseException) and not isinstance(result, TransportError | TimeoutError):
                raise result
        return restored

    async def _restore(self, partition: Partition, size: int, membership: Membership) -> bool:
        """Find out which records of a partition are parked; return whether some may belong to a later owner."""
        parking = partition.feed.parking
        return parking is not None and await parking.restore(partition, size, membership.generation)

    async def _commit_and_open(self, partitions: list[Partition], membership: Membership) -> None:
        """Commit positions that were resolved for the group, or are in doubt, and only then hand out records."""
        for partition in partitions:
            self._committer.own(partition)
        acknowledged = await self._committer.flush(partitions, self._settings.commit_timeout)
        if self.client.membership() != membership:
            return
        if not acknowledged:
            self.end(partitions, "its start position could not be committed")
            raise TransportError(f"the start position of the group was not committed: {self._committer.trouble.why}")
        for count, partition in enumerate(partitions):
            if not await self._lasts(membership, count):
                return
            if partition.feed.parking is not None:
                partition.feed.parking.believe(partition)
            self._open(partition, membership)

    async def _lasts(self, membership: Membership, count: int) -> bool:
        """Let other tasks run after every few partitions; return whether *membership* lasts."""
        if count % _PARTITIONS_PER_STEP == _PARTITIONS_PER_STEP - 1:
            await asyncio.sleep(0)
        return self.client.membership() == membership

    def _open(self, partition: Partition, membership: Membership) -> None:
        """Open a partition that is certain to be ours under *membership*."""
        name, tracker = partition.topic_partition, partition.tracker
        partition.membership = membership
        partition.outside_log = None
        self.log.count("kept", partition.claim is not None)
        self._opened.add(name)
        self._first_commits.setdefault(name.topic, partition.first_commit)
        self._committer.own(partition)
        for epoch in partition.epochs:
            epoch.open()
        _log_event(
            "assigned",
            f"{name} is open",
            {
                "epoch": partition.number,
                "committed": partition.acknowledged,
                "position": tracker.position,
                "incomplete": len(tracker),
                "started": sum(1 for delivery in tracker.values() if delivery.starts),
                "finished": sum(run.end - run.start for run in partition.finished()),
            },
            topic=name.topic,
            partition=name.partition,
            group=self._group_id,
        )
        partition.feed.reopen(partition)
        self.client.resume([name])
        seek = self.seeks.pop(name, None)
        if seek is not None and not seek.done.done():
            seek.done.set_result(None)

    # Seeks ------------------------------------------------------------------------------

    def seek(self, partition: Partition, start: int) -> asyncio.Future[None]:
        """Drain an open partition and resume it at *start*; the future is done when it resumes.

        *start* is committed before its first record is handed out, without any completions from before the seek.

        Raises:
            StateError: Another seek of this partition is still in progress.
        """
        name = partition.topic_partition
        if (pending := self.seeks.get(name)) is not None:
            raise StateError(f"{name} is moving to offset {pending.start} already: await that seek first")
        seek = self.seeks[name] = Seek(start, asyncio.get_running_loop().create_future())
        self.client.pause([name])  # records that arrive during the drain would be fetched for nothing
        self._tasks.start(self._drain_for(seek, partition), f"seek {name}")
        return seek.done

    async def _drain_for(self, seek: Seek, partition: Partition) -> None:
        """Drain a partition and commit its completions, then reopen it unless a rebalance has taken charge."""
        await self.drain([partition], self._settings.drain_timeout)
        await self._committer.flush([partition], self._settings.commit_timeout)
        name, is_ours = partition.topic_partition, partition.membership is not None
        if is_ours and self.partitions.get(name) is partition and self.seeks.get(name) is seek:
            self.end([partition], f"the application requested offset {seek.start}")
            self._settle_soon()

    def _give_up_seek(self, name: TopicPartition, why: str) -> None:
        seek = self.seeks.pop(name)
        if not seek.done.done():
            seek.done.set_exception(StateError(f"{name} did not move to offset {seek.start}: {why}"))
            seek.done.exception()  # raised in the waiter; a waiter that gave up is not an error


def uncommitted_of(partitions: Iterable[Partition]) -> dict[str, int]:
    """How many finished records of each disowned partition were not committed; only partitions with any."""
    return {str(partition.topic_partition): partition.uncommitted for partition in partitions if partition.uncommitted}


async def _read(commits: Mapping[TopicPartition, Committed | None]) -> dict[TopicPartition, CommitMetadata]:
    """Parse the metadata of commits, empty where there is none; let other tasks run, as long texts take milliseconds.

    The group may have changed meanwhile: check again anything that you know from the brokers.
    """
    metadata = {}
    for name, committed in commits.items():
        metadata[name] = CommitMetadata.read(committed.metadata, committed.offset) if committed else CommitMetadata()
        if metadata[name].finished:
            await asyncio.sleep(0)
    return metadata


def _topics(names: Iterable[TopicPartition]) -> list[str]:
    return list(dict.fromkeys(name.topic for name in names))


def _warn_unused(name: TopicPartition, offset: int, *, why: str) -> None:
    logger.warning(
        "the commit metadata of %s at offset %d is not used and will be replaced: %s",
        name,
        offset,
        why,
        extra=partition_fields("note_unused", name, offset=offset, why=why),
    )


# History --------------------------------------------------------------------------------------

_KEPT = 20
"""How many of the latest rebalances are reported."""

_CAUSES: dict[RebalanceKind, str] = {
    "assigned": "we have joined the group, or were assigned more partitions",
    "revoked": "members, topics or partitions of the group have changed",
    "lost": "the group membership was lost",
    "manual": "the partitions were assigned manually",
}
_STEPS: dict[RebalancePhase, str] = {
    "drain": "running records of the revoked partitions are being finished",
    "commit": "finished records are being committed",
    "join": "our partitions are released, and the group has not assigned new ones yet: others drain or join",
    "resume": "the positions to resume at are being looked up",
    "over": "it is over",
}
_LOGGED = (
    "generation",
    "seconds",
    "revoked",
    "in_flight",
    "drained",
    "cancelled",
    "assigned",
    "kept",
    "dropped",
    "drain_seconds",
    "commit_seconds",
    "join_seconds",
    "resume_seconds",
)
"""Figures of a finished rebalance in the log."""


class RebalanceLog:
    """Records what each rebalance does, and the log lines about it; owned by the `Rebalance`.

    Invariants:
        * The phases of a rebalance follow one another without a gap: their seconds add up to `seconds`.
    """

    def __init__(self, clock: Callable[[], float], replayed: Callable[[], int]) -> None:
        """Make a log.

        Args:
            clock: Loop time.
            replayed: Returns how many records this process has run more than once.
        """
        self._clock = clock
        self._replayed = replayed
        self._reports: deque[RebalanceReport] = deque(maxlen=_KEPT)
        """The latest rebalances; the last one may be in progress. Reports are replaced as a whole."""
        self._timed_at = 0.0
        """Loop time up to which the report in progress has its seconds."""
        self._spent: tuple[float, float | None] = 0.0, None
        """Seconds of the rebalances that are over, and when the one in progress began; replaced as a whole."""
        self._counts: Counter[RebalanceKind] = Counter()
        self._drains = {kind: Histogram() for kind in get_args(RebalanceKind)}
        self._replayed_before = 0
        """Value of `replayed` when the latest rebalance began."""
        self.on_end: Callable[[RebalanceReport], object] = lambda _: None
        """Called with the report of each rebalance that is over."""

    def reports(self) -> tuple[RebalanceReport, ...]:
        """The latest rebalances, oldest first; the last one may be in progress. Safe from any thread."""
        reports = list(self._reports)
        if reports:
            reports[-1] = dataclasses.replace(
                self._timed(reports[-1]), replayed=self._replayed() - self._replayed_before
            )
        return tuple(reports)

    def kinds(self) -> tuple[RebalanceKindStatistics, ...]:
        """How many rebalances of each kind there were, including those no longer reported. Safe from any thread."""
        return tuple(
            RebalanceKindStatistics(kind, self._counts[kind], drain.counts()) for kind, drain in self._drains.items()
        )

    @property
    def seconds(self) -> float:
        """Seconds spent in rebalances, including the one in progress. Safe from any thread; it never decreases."""
        now = self._clock()  # before the rest: a rebalance that ends meanwhile has its later end
        spent, began = self._spent
        return spent if began is None else spent + max(now - began, 0.0)

    def doing(self) -> str | None:
        """Current step of the rebalance in progress, as a clause; None without one."""
        current = self._current
        return None if current is None else _STEPS[current.phase]

    # Events ------------------------------------------------------------------------------

    def revoked(self, partitions: int, in_flight: int, *, lost: bool) -> None:
        """Begin a rebalance: partitions are being revoked while *in_flight* of their records run."""
        kind: RebalanceKind = "lost" if lost else "revoked"
        self.enter("over")
        self._begin(kind, "join" if lost else "drain", revoked=partitions, in_flight=in_flight)
        _log_event(
            kind,
            "partitions are lost" if lost else "partitions are being revoked",
            {"partitions": partitions, "in_flight": in_flight},
        )

    def drained(self, cancelled: int) -> None:
        """End the drain; records that were still running were cancelled."""
        report = self.enter("commit")
        if report is not None:
            self._drains[report.kind].add(report.drain_seconds)
            ended = max(report.in_flight - cancelled, 0)
            self._change(drained=ended, cancelled=cancelled)
            _log_event(
                "drained", "running records of the revoked partitions", {"drained": ended, "cancelled": cancelled}
            )

    def assigned(self, partitions: int, untouched: int, generation: int, *, manual: bool = False) -> None:
        """Record an assignment, by the group or manual, of *partitions*, *untouched* of which were never revoked."""
        if self._current is None:
            self._begin("manual" if manual else "assigned", "join")
        self.enter("resume")
        self._change(assigned=partitions, kept=untouched, generation=generation)

    def count(self, figure: str, more: int) -> None:
        """Add to a figure of the rebalance in progress, if there is one."""
        if more and self._current is not None:
            self._change(**{figure: getattr(self._current, figure) + more})

    def settled(self) -> None:
        """End the rebalance: every owned partition has resumed."""
        report = self.enter("over")
        if report is not None:
            _log_event(
                "rebalanced",
                f"rebalance {report.number} is over ({report.cause})",
                {name: getattr(report, name) for name in _LOGGED},
                level=logging.INFO,
            )

    # Phases ---------------------------------------------------------------------------

    @property
    def _current(self) -> RebalanceReport | None:
        report = self._reports[-1] if self._reports else None
        return None if report is None or report.phase == "over" else report

    def _begin(self, kind: RebalanceKind, phase: RebalancePhase, **figures: int) -> None:
        self._reports = deque(self.reports(), _KEPT)  # with the replayed records of the one before
        self._replayed_before = self._replayed()
        self._timed_at = self._clock()
        self._spent = self.seconds, self._timed_at
        self._counts[kind] += 1
        self._reports.append(
            RebalanceReport(
                number=self._counts.total(), at=time.time(), cause=_CAUSES[kind], phase=phase, kind=kind, **figures
            )
        )

    def _change(self, **figures: Any) -> None:
        self._reports[-1] = dataclasses.replace(self._reports[-1], **figures)

    def _timed(self, report: RebalanceReport) -> RebalanceReport:
        """The report including the time spent in its current phase so far."""
        if report.phase == "over":
            return report
        name, more = f"{report.phase}_seconds", self._clock() - self._timed_at
        return dataclasses.replace(report, seconds=report.seconds + more, **{name: getattr(report, name) + more})

    def enter(self, phase: RebalancePhase) -> RebalanceReport | None:
        """Begin the next phase of the rebalance in progress, if there is one; return its report."""
        report = self._current
        if report is not None:
            report = self._reports[-1] = dataclasses.replace(self._timed(report), phase=phase)
            self._timed_at = self._clock()
            if phase == "over":
                self._spent = self.seconds, None
                self.on_end(report)
        return report


def _log_event(event: str, what: str, figures: Mapping[str, Any], level: int = logging.DEBUG, **about: object) -> None:
    """Log an event of a rebalance.

    Args:
        event: Name of the event.
        what: Beginning of the text.
        figures: Figures that the text repeats.
        level: INFO for the one line that sums up a rebalance.
        about: Fields that only programs need.
    """
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    text = ", ".join(f"{name} {value}" for name, value in rounded.items())
    logger.log(level, "%s: %s", what, text, extra={"event": event, **about, **rounded})
