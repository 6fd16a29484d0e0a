"""Partition ownership: handles revoked, lost and assigned partitions, and drains, hands over or continues them."""

import asyncio
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio

from aioshard.core.ownership import Claim, reason_to_end
from aioshard.engine.commits import Uncommitted
from aioshard.engine.committer import Committer
from aioshard.engine.current_client import CurrentClient
from aioshard.engine.ended_epochs import EndedEpochs
from aioshard.engine.epoch import Refused
from aioshard.engine.group_shares import GroupShares
from aioshard.engine.handler_set import HandlerSet
from aioshard.engine.lifecycle import Lifecycle
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.partition import Partition
from aioshard.engine.partitions import Partitions
from aioshard.engine.pauses import Pauses
from aioshard.engine.positions import BrokerView, PositionResolver, TopicView, finished_of, first_commit_of
from aioshard.engine.rebalance_log import RebalanceLog, RebalanceStatistics, log_event
from aioshard.engine.tasks import TaskSet
from aioshard.errors import (
    AioshardError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    OffsetRegressionError,
    StateError,
    TopicRecreatedError,
    TransportError,
)
from aioshard.log_fields import get_logger
from aioshard.ports import NOT_A_MEMBER, FetchedBatch, LogRange, Membership, Transport
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

logger = get_logger("aioshard.engine.rebalance")

_RETRY_DELAY = 0.2
_PARTITIONS_PER_STEP = 100
"""Partitions opened before other tasks run; this takes about 10 ms."""
_LEADER_DELAY = 1.0
"""Seconds between lookups of partitions whose leader is away, or whose topic is denied."""


@dataclasses.dataclass(eq=False)
class Seek:
    """A position that the application requested, or where a partition resumes in another log.

    One that was requested survives rebalances as long as the partition stays assigned to us: the partition then opens
    there instead of at the committed offset. Its future is done once the partition opens there, is assigned elsewhere,
    or the app stops.
    """

    start: int
    done: asyncio.Future[None]
    why: str
    """Why the partition moves, as a sentence."""
    repeats_unfinished: bool = False
    """Whether records before `start` that do not finish until then must run again."""

    @property
    def progress(self) -> str:
        """Where the partition moves, and why, as the end of a sentence."""
        return f"is moving to offset {self.start} now, because {self.why}"


class _Restoration(NamedTuple):
    """The result of finding out which records of a partition are parked."""

    in_doubt: bool = False
    """Whether some of them may belong to a later owner of the partition."""
    failure: TransportError | TimeoutError | None = None
    """Why they could not be read; they may be later."""


class Rebalance:
    """Owns the partitions: creates them, closes and opens their gates, and ends them. Implements `GroupListener`.

    If everything is revoked, each partition keeps its epoch, with the gate closed. If the group assigns it again and
    `aioshard.core.ownership.reason_to_end` finds no objection, it continues in place. Otherwise its epoch ends and its
    queued records are dropped.

    If only some partitions are revoked, their epochs end with their release, because others get them. Those that stay
    are not disturbed: open ones continue to run, and others continue to open during the drain.

    Invariants:
        * A position that was not committed yet is committed before the first record is handed out.
        * Nothing of a partition is committed between the end of `revoked` and its continuation (I9).
        * `revoked` returns within the drain timeout plus the commit timeout (I7).
        * A gate opens only after the checks, and while the membership lasts under which they were made.
    """

    def __init__(
        self,
        group_id: str,
        settings: "Settings",
        *,
        handlers: HandlerSet,
        shares: GroupShares,
        pauses: Pauses,
        client: CurrentClient,
        committer: Committer,
        lifecycle: Lifecycle,
        log: RebalanceLog,
        tasks: TaskSet,
    ) -> None:
        """Make a rebalance; it owns nothing yet.

        Args:
            group_id: The consumer group.
            settings: Timeouts.
            handlers: Run the records of the partitions.
            shares: The shares of the group's rate limits, which follow the partitions.
            pauses: The pauses of the application.
            client: The member of the group.
            committer: The commit coordinator.
            lifecycle: Fails if no retry can help against an error.
            log: Records what the rebalances do.
            tasks: Runs the sharding tasks and the lookups.
        """
        self.partitions = Partitions()
        """Partitions that are ours, or may become ours again."""
        self.rebalances = 0
        self.log = log
        """History of the rebalances."""
        self.opened = asyncio.Event()
        """Set while every assigned partition is open, except those whose leader is away or whose topic is denied, and
        none is being released."""
        self.ends: dict[TopicPartition, int] = {}
        """End of each partition's log as first seen, for consuming up to that point."""
        self.lookups_refused = False
        """Whether the brokers refused the latest lookup, so that waiting does not help."""
        self.unresolved: dict[TopicPartition, str] = {}
        """Owned partitions whose resume position is not known yet, each with the reason."""
        self.unhandled: frozenset[str] = frozenset()
        """Assigned topics without a handler: nothing of them is read or committed."""
        self.seeks: dict[TopicPartition, Seek] = {}
        """Positions that partitions move to and have not reached yet."""
        self._group_id = group_id
        self._settings = settings
        self._handlers = handlers
        self._shares = shares
        self._pauses = pauses
        self._client = client
        self._committer = committer
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._ended = EndedEpochs()
        self._positions = PositionResolver(group_id, settings, client)
        self._assignment: frozenset[TopicPartition] = frozenset()
        """The latest assignment, without what was revoked or lost since."""
        self._assigned_under = NOT_A_MEMBER
        self._opening: asyncio.Task[object] | None = None
        """Opens the partitions of the assignment; None if all are open, or none may be."""
        self._is_opened = False
        """Whether it has opened all that can be opened now."""
        self._releases = 0
        """How many calls of `revoked` are draining or committing."""
        self._epochs = 0
        """How many epochs have begun."""

    @property
    def _transport(self) -> Transport:
        """The current client.

        Raises:
            ClientLostError: No client exists now.
        """
        return self._client.get()

    @property
    def uncommitted(self) -> Mapping[TopicPartition, Uncommitted]:
        """Finished records of ended epochs that were not committed, until the partition begins again."""
        return self._ended.uncommitted

    def statistics(self) -> RebalanceStatistics:
        """Return how many rebalances there were, what they did and how long they took. Safe from any thread."""
        return RebalanceStatistics(
            self.rebalances, self.log.reports(), self.log.kinds(), self.log.seconds, self._positions.lost_offsets
        )

    @property
    def all_resumed(self) -> bool:
        """Whether every partition is open at its resume position: no rebalance, seek or absent leader is pending."""
        return self.opened.is_set() and not self.unresolved and not self.seeks

    @property
    def trouble(self) -> str | None:
        """Why owned partitions are not open; None when all are."""
        unresolved = self.unresolved
        if not unresolved:
            return None
        name, reason = min(unresolved.items())
        if len(unresolved) == 1:
            return f"{name} waits: {reason}"
        return f"{len(unresolved)} partitions wait, {name} first: {reason}"

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
                leaving[partition] = self._newest(partition.membership)
                partition.membership = None
        self._releases += 1
        try:
            self.log.drained(await self.drain(leaving, self._settings.drain_timeout))
            self._shares.divide(self.partitions)  # before the next owner may use theirs
            await self._committer.flush(leaving, self._settings.commit_timeout)
        finally:
            self._releases -= 1
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
            if partition.lost_from is None:
                partition.claim = Claim(*membership, partition.commits.acknowledged, partition.tracker.position)
            elif self.partitions.get(partition.topic_partition) is partition:
                self.end([partition], _loss(partition.lost_from))
        if self._assignment:
            self._end_revocation()

    def _end_revocation(self) -> None:
        """Continue with the partitions that were not revoked; others get those that were."""
        self.rebalances += 1
        self._give_to_others()
        kept = sum(partition.membership is not None for partition in self.partitions)
        self.log.assigned(len(self._assignment), kept, self._assigned_under.generation)
        self._note_opened()

    def _leave(self, names: Collection[TopicPartition], *, lost: bool) -> list[Partition]:
        """Begin a revocation or loss: open only the other partitions, and return those of *names* with an epoch."""
        self._assignment = self._assignment.difference(names)
        if self._assignment:
            self._open_soon()
        else:
            self.opened.clear()
            self._cancel_opening()
        self._ended.forget_restarts(names)
        self._committer.forget_failures(names)
        self._forget_losses(names)
        leaving = [partition for name in names if (partition := self.partitions.get(name)) is not None]
        epochs = {epoch for partition in leaving for epoch in partition.epochs}
        in_flight = sum(delivery.epoch in epochs for delivery in self._handlers.in_flight())
        self.log.revoked(len(leaving), in_flight, lost=lost)
        return leaving

    async def drain(self, partitions: Collection[Partition], timeout: float) -> int:
        """Close the gates and wait for the records that must end; cancel those still in flight after *timeout* seconds.

        Returns:
            How many records were still in flight.
        """
        in_flight = self._handlers.in_flight()
        for partition in partitions:
            if partition.is_open:
                below = not partition.commits.lists_all_finished(self._committer.metadata_limit)
                partition.sharder.close(partition, in_flight, below=below)
        draining = [epoch for partition in partitions for epoch in partition.epochs]
        with anyio.move_on_after(timeout):
            for epoch in draining:
                await epoch.drained.wait()
        cancelled = self._handlers.interrupt({delivery for epoch in draining for delivery in epoch.stop_draining()})
        if cancelled and timeout:
            logger.warning(
                "records cancelled because they were still in flight at the drain deadline: %d",
                cancelled,
                extra={"event": "drain_cut", "cancelled": cancelled},
            )
        return cancelled

    def wait_no_more(self) -> None:
        """End every drain as if its timeout had passed, because no worker is left to run anything."""
        for partition in self.partitions:
            for epoch in partition.epochs:
                epoch.drained.set()

    def end_all(self, reason: str) -> None:
        """End every epoch: the client is lost, or the app stopped."""
        self.opened.clear()
        self._cancel_opening()
        self._assignment = frozenset()
        self._forget_losses(tuple(self.seeks))
        self.end(tuple(self.partitions), reason)
        self.log.enter("over")

    def end(self, partitions: Collection[Partition], reason: str) -> None:
        """End ownerships: drop their incomplete records and interrupt those that are running."""
        epochs = {epoch for partition in partitions for epoch in partition.epochs}
        for partition in partitions:
            name = partition.topic_partition
            dropped = len(partition.tracker)
            self._keep_outputs(partition)
            self.log.count("dropped", dropped)
            self._committer.disown(partition)
            self._ended.end(partition, reason)
            self.partitions.remove(partition)
            partition.sharder.purge(partition)
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
        self._shares.divide(self.partitions)
        # Once for all: with 1,024 workers, a check for each of 1,000 partitions blocked the event loop for 0.35 s.
        self._handlers.interrupt({delivery for delivery in self._handlers.in_flight() if delivery.epoch in epochs})

    # Assigned ---------------------------------------------------------------------------

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Record a new assignment and start opening its partitions; see `GroupListener.assigned`."""
        assignment = frozenset(partitions)
        is_repeated = assignment == self._assignment and membership == self._assigned_under
        if is_repeated and self.opened.is_set():
            return
        self.rebalances += 1
        self._assignment = assignment
        self._assigned_under = membership
        untouched = 0
        for partition in self.partitions:
            name = partition.topic_partition
            # 1. It was never revoked.
            if partition.membership is not None:
                partition.membership = membership
                untouched += name in assignment
            # 2. It comes back. The client must not read from anywhere else before the checks.
            elif name in assignment:
                partition.fetching_again = False
                self._transport.seek(name, partition.tracker.position)
        self._give_to_others()
        manual = not membership.member_id and membership != NOT_A_MEMBER
        self.log.assigned(len(assignment), untouched, membership.generation, manual=manual)
        # A new assignment also contains the partitions of earlier ones that are not open yet.
        self._open_soon()

    def _give_to_others(self) -> None:
        """Give up the released partitions that are not assigned to us: other members get them, or have them already."""
        for name in sorted(self.seeks.keys() - self._assignment):
            self._give_up_seek(name, "the group assigned it to another member, which resumes at the committed offset")
        released = [partition for partition in self.partitions if partition.membership is None]
        gone = [partition for partition in released if partition.topic_partition not in self._assignment]
        self.end(gone, "the partition was assigned to another member")
        self._committer.forget_failures(self._ended.forget_others(self._assignment))

    def reset_position(self, partition: Partition, error: OffsetOutOfRangeError | OffsetRegressionError) -> None:
        """Find where to resume a partition whose position is no longer in its log."""
        name = partition.topic_partition
        self._transport.pause([name])
        # 1. Its topic was created again: the log is another one.
        if isinstance(error, TopicRecreatedError):
            self.end([partition], str(error))
            if self._settings.auto_offset_reset == "error":
                self._lifecycle.fail(error)
                return
            self._seek_new_log(name, error)
            if name not in self._assignment:
                return
        # 2. The cluster has lost the end of its log.
        elif isinstance(error, LogTruncatedError):
            self._resume_after_loss(partition, error)
            return
        # 3. Its log does not reach the position: the epoch may continue if retention has passed it.
        elif isinstance(error, OffsetOutOfRangeError):
            partition.outside_log = error.position
        # 4. The client went back.
        else:
            self.end([partition], str(error))
        self._open_soon()

    def _resume_after_loss(self, partition: Partition, error: LogTruncatedError) -> None:
        """Let a partition continue where its log parts from what was read; what runs and is lost may finish first."""
        if self._settings.auto_offset_reset == "error":
            self.end([partition], str(error))
            self._lifecycle.fail(error)
            return
        name = partition.topic_partition
        self._positions.note_loss(error)
        partition.lost_from = error.resumes_at
        partition.commits.acknowledged = None  # the stored text may list what is lost as finished
        if name not in self.seeks:
            future = asyncio.get_running_loop().create_future()
            seek = self.seeks[name] = Seek(error.resumes_at, future, _loss(error.resumes_at), repeats_unfinished=True)
            self._tasks.start(self._drain_for(seek, partition), f"resume {name} after a loss")

    def _forget_losses(self, names: Collection[TopicPartition]) -> None:
        """Let partitions begin at their commits, by which the next owner finds out what the cluster has lost.

        It may be another member; and what has not finished until then must run again, also before the loss.
        """
        for name in names:
            seek = self.seeks.get(name)
            if seek is not None and seek.repeats_unfinished:
                del self.seeks[name]

    def _seek_new_log(self, name: TopicPartition, error: TopicRecreatedError) -> None:
        """Make a partition of a topic that was created again begin at the start of its log, regardless of its commit.

        A commit may be of the old log, or of records that were read from the new one at a position of the old one.
        """
        logger.warning("%s; resuming at the start of the new one", error, extra=partition_fields("out_of_range", name))
        self._forget_losses([name])
        if name not in self.seeks:
            self.seeks[name] = Seek(0, asyncio.get_running_loop().create_future(), str(error))

    def restart(self, partitions: Mapping[Partition, Mapping[int, Refused]], why: str) -> None:
        """End the epochs of partitions and begin new ones at the offsets that the brokers report as committed.

        Args:
            partitions: The partitions of a transaction that has failed. Each with its records with a message that
                cannot be written, by offset: these fail when they arrive again.
            why: The reason, as a sentence.
        """
        ours = [partition for partition in partitions if self.partitions.get(partition.topic_partition) is partition]
        for partition in ours:
            self._ended.remember_restart(partition, why, partitions[partition])
        self._transport.pause([partition.topic_partition for partition in ours])
        self._forget_losses([partition.topic_partition for partition in ours])
        self.end(ours, why)
        if any(partition.topic_partition in self._assignment for partition in ours):
            self._open_soon()

    def stop_opening(self) -> None:
        """Stop opening partitions, because the app stops: no gate opens from now on."""
        for name in tuple(self.seeks):
            self._give_up_seek(name, "the app stopped, and its next start resumes at the committed offset")
        self._cancel_opening()

    def _open_soon(self) -> None:
        """Open the owned partitions that are not open; if that is in progress already, begin again."""
        unresolved = {name: why for name, why in self.unresolved.items() if name in self._assignment}
        self.opened.clear()
        self._cancel_opening()
        self.unresolved = unresolved  # the reasons last until they are looked up again
        self._find_unhandled()
        if not self._lifecycle.stopping:
            generation = self._assigned_under.generation
            self._opening = self._tasks.start(self._open_all(), f"open partitions of generation {generation}")

    def handlers_changed(self) -> None:
        """Open the assigned partitions of topics that have a handler now, and stop opening those that have none."""
        unhandled = self._without_handler()
        if unhandled != self.unhandled:
            self.unhandled = unhandled
            self._open_soon()

    def _find_unhandled(self) -> None:
        """Find the assigned topics without a handler, and warn about new ones."""
        unhandled = self._without_handler()
        for topic in sorted(unhandled - self.unhandled):
            logger.warning("%s; %s", no_handler(topic), ADD_HANDLER, extra={"event": "no_handler", "topic": topic})
        self.unhandled = unhandled

    def _without_handler(self) -> frozenset[str]:
        topics = {name.topic for name in self._assignment}
        return frozenset(topic for topic in topics if not self._handlers.takes(topic))

    def _cancel_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._is_opened = False
        self.unresolved = {}

    def _note_opened(self) -> None:
        """Report that all owned partitions have resumed, once nothing is being released any more."""
        if self._is_opened and not self._releases:
            self.opened.set()
            self.log.resumed()

    def _newest(self, membership: Membership) -> Membership:
        """Return a membership with its newest generation, if it lasts; otherwise return it unchanged."""
        return self._transport.membership() if self._is_ours(membership) else membership

    def _is_ours(self, membership: Membership) -> bool:
        """Whether a membership lasts. A rebalance that changes nothing for us only raises its generation."""
        current = self._transport.membership()
        return current.member_id == membership.member_id and current.generation >= membership.generation

    async def _open_all(self) -> None:
        """Open the assigned partitions, in place or in new epochs; retry until done or until the membership ends."""
        assignment = frozenset(name for name in self._assignment if name.topic not in self.unhandled)
        membership = self._assigned_under
        while True:
            # 1. Nobody opens partitions during a pause of the membership. If it has ended, this task is cancelled soon.
            if not self._is_ours(membership):
                await asyncio.sleep(_RETRY_DELAY)
                continue
            try:
                self.unresolved = await self._open_assigned(assignment, membership)
            except (AioshardError, TimeoutError) as error:
                # 2. No retry can help.
                if not _may_pass(error):
                    self._lifecycle.fail(error)
                    return
                # 3. The brokers did not answer, or refused a request.
                self.lookups_refused = isinstance(error, TransportError) and not error.retriable
                why = str(error) or self._transport.hang or "the brokers do not answer"
                self.unresolved = {name: why for name in assignment if not self._is_open(name)}
                delay = _RETRY_DELAY
            else:
                # 4. The membership has paused or ended meanwhile.
                if not self._is_ours(membership):
                    continue
                self._is_opened = True
                self._note_opened()
                # 5. All are open.
                if not self.unresolved:
                    return
                # 6. All are open except those whose leader is away, and those of a topic that is denied.
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
            The partitions whose leader is away or whose topic is denied, each with the reason. They do not delay the
            others.

        Raises:
            TransportError: A lookup or a commit failed; partitions that were opened stay open.
            TimeoutError: The brokers did not answer.
            NoOffsetError: There is neither a committed offset nor a policy that says where to begin.
            OffsetOutOfRangeError: The committed offset is not in the log, and the policy is "error".
        """
        closed = [name for name in sorted(assignment) if not self._is_open(name)]
        if not closed:
            return {}
        if self._shares.are_needed:
            await self._shares.look_up(self._transport, self._settings.commit_timeout)
        try:
            return await self._open_closed(closed, membership)
        finally:
            self._shares.divide(self.partitions)

    async def _open_closed(self, closed: Sequence[TopicPartition], membership: Membership) -> dict[TopicPartition, str]:
        """Open the partitions of an assignment that are not open; see `_open_assigned`."""
        views, refused = await self._positions.look_up(closed)
        fresh: dict[TopicPartition, BrokerView] = {}
        for count, (name, view) in enumerate(views.items()):
            if not await self._lasts(membership, count):
                return {}
            # A recreated topic may end earlier than first seen, and nothing will arrive up to the old end.
            self.ends[name] = min(self.ends.get(name, view.log.end), view.log.end)
            partition = self.partitions.get(name)
            if partition is None or not self._continue(partition, view, membership):
                fresh[name] = view
        await self._begin_all(fresh, membership)
        return {
            name: str(refused.get(name.topic) or f"no leader of {name} answers") for name in closed if name not in views
        }

    def _continue(self, partition: Partition, view: BrokerView, membership: Membership) -> bool:
        """Open a partition in place if it can be continued; otherwise end its epoch."""
        seek = self.seeks.get(partition.topic_partition)
        # 1. It moves to another position.
        if seek is not None:
            reason: str | None = seek.why
        # 2. The cluster has lost records that were committed.
        elif view.lost_from is not None:
            reason = _loss(view.lost_from)
        # 3. It was not revoked, but its position is not in the log.
        elif partition.is_open and partition.outside_log is not None:
            reason = self._skip_deleted(partition, partition.outside_log, view.log)
        # 4. It was revoked, and comes back.
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
            extra=partition_fields("records_deleted", name, offset=position, position=log.start),
        )
        partition.accept(FetchedBatch(name, (), (), log.start))
        self._transport.seek(name, log.start)
        return None

    async def _begin_all(self, fresh: Mapping[TopicPartition, BrokerView], membership: Membership) -> None:
        """Begin and open new epochs; commit a position first if it is not committed yet or may not be ours.

        Raises:
            TransportError: A lookup or a commit failed.
            TimeoutError: The brokers did not answer.
        """
        topics = await self._positions.look_up_topics(fresh)
        begun = []
        for count, (name, view) in enumerate(fresh.items()):
            if not await self._lasts(membership, count):
                return
            begun.append(self._begin(name, view, topics[name.topic]))
        restored = await self._restore_all(begun, topics, membership)
        to_commit: list[Partition] = []
        for count, (partition, restoration) in enumerate(zip(begun, restored, strict=True)):
            if not await self._lasts(membership, count):
                return
            # 1. Its parked records could not be read: it is tried again.
            if restoration.failure is not None:
                continue
            # 2. Some of them may belong to a later owner: the response to another commit shows whether it is ours.
            if restoration.in_doubt:
                partition.commits.acknowledged = None
            # 3. Only a position that is committed may be used.
            if partition.commits.acknowledged == partition.tracker.position:
                self._open(partition, membership)
            else:
                to_commit.append(partition)
        await self._commit_and_open(to_commit, membership)
        for restoration in restored:
            if restoration.failure is not None:
                raise restoration.failure

    def _begin(self, name: TopicPartition, view: BrokerView, topic: TopicView) -> Partition:
        """Make a partition with a new epoch, its gate closed; `acknowledged` is its start if that is committed."""
        seek = self.seeks.get(name)
        origin = self._positions.origin(name, view, topic, None if seek is None else seek.start)
        self._epochs += 1
        partition = self._handlers.of(name.topic).make_partition(name, self._epochs, origin.offset)
        self.partitions.add(partition)
        self._pauses.pass_on(partition)
        self._ended.pass_on(partition, view.committed, moves=seek is not None)
        partition.task = self._tasks.start(partition.run(), f"shard {name}", lasts=True)
        self._transport.seek(name, origin.offset)
        commits = partition.commits
        commits.first_commit = first_commit_of(view, topic)
        finished = finished_of(name, view, resolved=origin.resolved)
        if view.committed is None:
            return partition
        if finished is not None:
            partition.finished_ahead = finished
            commits.published = finished
            commits.stored_units = len(view.committed.metadata)
        # A seek is always committed, even to the same offset: the metadata differs.
        if seek is None:
            commits.acknowledged = view.committed.offset
        return partition

    async def _restore_all(
        self, partitions: Collection[Partition], topics: Mapping[str, TopicView], membership: Membership
    ) -> list[_Restoration]:
        """Find out which records of the partitions are parked, of all partitions at the same time."""
        sizes = {topic: view.partitions for topic, view in topics.items()}
        # A side topic has room for all topics that are parked there, although we may own partitions of only one.
        together = {topic: self._handlers.parked_with(topic) for topic in topics}
        for topic in sorted(set().union(*together.values()) - sizes.keys()):
            sizes[topic] = await self._positions.partition_count(topic)
        needed = {topic: max(sizes[other] for other in others | {topic}) for topic, others in together.items()}
        results = await asyncio.gather(
            *(self._restore(partition, needed, membership) for partition in partitions),
            return_exceptions=True,
        )
        restored: list[_Restoration] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            restored.append(result)
        return restored

    async def _restore(self, partition: Partition, needed: Mapping[str, int], membership: Membership) -> _Restoration:
        parking = partition.sharder.parking
        if parking is None:
            return _Restoration()
        size = needed[partition.topic_partition.topic]
        try:
            return _Restoration(in_doubt=await parking.restore(partition, size, membership.generation))
        except (TransportError, TimeoutError) as error:
            return _Restoration(failure=error)

    async def _commit_and_open(self, partitions: list[Partition], membership: Membership) -> None:
        """Commit positions that were resolved for the group, or are in doubt, and only then hand out records."""
        for partition in partitions:
            self._committer.own(partition)
        await self._committer.flush(partitions, self._settings.commit_timeout)
        why = self._committer.trouble.why
        if not self._is_ours(membership):
            return
        # Those of a topic that the brokers refuse do not hold back the others.
        uncommitted = [part for part in partitions if part.commits.acknowledged != part.tracker.position]
        self.end(uncommitted, "its start position could not be committed")
        for count, partition in enumerate(partitions):
            if not await self._lasts(membership, count):
                return
            if partition in uncommitted:
                continue
            parking = partition.sharder.parking
            if parking is not None:
                parking.believe(partition)
            self._open(partition, membership)
        if uncommitted:
            raise TransportError(f"the start position of the group was not committed: {why}")

    async def _lasts(self, membership: Membership, count: int) -> bool:
        """Let other tasks run after every few partitions; return whether *membership* lasts."""
        if count % _PARTITIONS_PER_STEP == _PARTITIONS_PER_STEP - 1:
            await asyncio.sleep(0)
        return self._is_ours(membership)

    def _open(self, partition: Partition, membership: Membership) -> None:
        """Open a partition that is certain to be ours under *membership*."""
        name = partition.topic_partition
        tracker = partition.tracker
        partition.membership = membership
        partition.outside_log = None
        self.log.count("kept", partition.claim is not None)
        self._positions.remember(partition)
        self._committer.own(partition)
        for epoch in partition.epochs:
            epoch.open()
        log_event(
            "assigned",
            f"{name} is open",
            {
                "epoch": partition.number,
                "committed": partition.commits.acknowledged,
                "position": tracker.position,
                "incomplete": len(tracker),
                "started": sum(1 for delivery in tracker.values() if delivery.starts),
                "finished": sum(run.end - run.start for run in partition.finished()),
            },
            topic=name.topic,
            partition=name.partition,
            group=self._group_id,
        )
        partition.sharder.reopen(partition)
        self._transport.resume([name])
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
            raise StateError(f"{name} {pending.progress}: try again when it is open")
        why = f"the application requested offset {start}"
        seek = self.seeks[name] = Seek(start, asyncio.get_running_loop().create_future(), why)
        self._transport.pause([name])  # records that arrive during the drain would be fetched for nothing
        self._tasks.start(self._drain_for(seek, partition), f"seek {name}")
        return seek.done

    async def _drain_for(self, seek: Seek, partition: Partition) -> None:
        """Drain a partition and commit its completions, then reopen it unless a rebalance has taken charge."""
        await self.drain([partition], self._settings.drain_timeout)
        while not await self._committer.flush([partition], self._settings.commit_timeout):
            # The outcome of a transaction decides where the partition resumes if it cannot move.
            if not partition.unsent_bytes or not self._moves(partition, seek):
                break
            await asyncio.sleep(_RETRY_DELAY)
        if not self._moves(partition, seek):
            return
        if seek.repeats_unfinished:
            seek.start = min(seek.start, partition.tracker.committable)
        self.end([partition], seek.why)
        self._open_soon()

    def _moves(self, partition: Partition, seek: Seek) -> bool:
        """Whether a partition that was drained for a seek is still ours, and the seek is still wanted."""
        name = partition.topic_partition
        is_ours = partition.membership is not None and self.partitions.get(name) is partition
        return is_ours and self.seeks.get(name) is seek

    def _keep_outputs(self, partition: Partition) -> None:
        """Give up a seek that would skip finished records whose outputs are not published (exactly once).

        The partition resumes at the committed offset instead, and they run again.
        """
        name = partition.topic_partition
        seek = self.seeks.get(name)
        if seek is None or not partition.unsent_bytes or seek.start <= (partition.commits.acknowledged or 0):
            return
        trouble = self._committer.trouble.why
        why = "outputs of finished records before that offset could not be published"
        if trouble is not None:
            why = f"{why} ({trouble})"
        logger.warning(
            "%s does not move to offset %d: %s, and the records run again",
            name,
            seek.start,
            why,
            extra=partition_fields("seek_given_up", name, offset=seek.start),
        )
        self._give_up_seek(name, f"{why}; they run again now, so seek again later")

    def _give_up_seek(self, name: TopicPartition, why: str) -> None:
        seek = self.seeks.pop(name)
        if not seek.done.done():
            seek.done.set_exception(StateError(f"{name} did not move to offset {seek.start}: {why}"))
            seek.done.exception()  # raised in the waiter; a waiter that gave up is not an error


def uncommitted_of(partitions: Iterable[Partition]) -> dict[str, int]:
    """How many finished records of each disowned partition were not committed; only partitions with any."""
    return {
        str(partition.topic_partition): partition.commits.uncommitted
        for partition in partitions
        if partition.commits.uncommitted
    }


ADD_HANDLER = (
    "add a handler for it, or let the group assign it only to members that subscribe to it: check the assignor, and "
    "the patterns and versions of the other members"
)
"""What to do about `no_handler`."""


def no_handler(topic: str) -> str:
    """Return the sentence about an assigned topic without a handler."""
    return f"topic {topic!r} is assigned to this process, which has no handler for it: nothing of it is consumed"


def _loss(offset: int) -> str:
    return f"the cluster has lost the records from offset {offset} on"


def _may_pass(error: AioshardError | TimeoutError) -> bool:
    """Whether a lookup or a commit that failed may succeed when it is retried."""
    return isinstance(error, TransportError | TimeoutError) and not isinstance(error, OffsetOutOfRangeError)
