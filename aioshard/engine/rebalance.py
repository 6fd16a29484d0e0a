"""What is ours: partitions revoked, lost and assigned; drained, handed back, continued in place."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

import anyio

from aioshard.core.ownership import Claim
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Epoch, Gate, Rerun
from aioshard.engine.feed import Feed
from aioshard.engine.fetcher import Fetcher
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.opening import Limits, Opening
from aioshard.engine.rebalance_log import RebalanceLog, tell_opened
from aioshard.engine.seeking import Seeks
from aioshard.engine.tasks import TaskSet
from aioshard.engine.worker import Worker
from aioshard.errors import (
    AioshardError,
    ClientLostError,
    OffsetOutOfRangeError,
    OffsetRegressionError,
    TransportError,
)
from aioshard.ports import NOT_A_MEMBER, Membership, Transport
from aioshard.records import TopicPartition

__all__ = ["APPLICATION", "Outside", "Rebalance"]

logger = logging.getLogger("aioshard.engine.rebalance")

_RETRY_DELAY = 0.2
_LEADER_DELAY = 1.0
"""Seconds until a partition whose leader was away is asked for again."""

APPLICATION = "application"
"""Who has paused a partition when the application asked for it; see `Epoch.pauses`."""


class Outside(Protocol):
    """Where the rebalance finds what others own."""

    @property
    def workers(self) -> Collection[Worker]:
        """All workers of all handlers."""

    def feed_of(self, topic: str) -> Feed:
        """Where the records of a topic go."""

    @property
    def replayed(self) -> int:
        """How many records this process has run again."""

    def why_paused(self, topic_partition: TopicPartition) -> str | None:
        """Why the application has paused a partition, or None."""

    def make_epoch(self, topic_partition: TopicPartition, number: int, start: int) -> Epoch:
        """Make an epoch, closed."""

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
        tasks: TaskSet,
        clock: Callable[[], float],
    ) -> None:
        self.fetchers: dict[TopicPartition, Fetcher] = {}
        """Of the partitions that are ours, or may be ours again."""
        self.rebalances = 0
        self.log = RebalanceLog(clock, lambda: outside.replayed)
        """What each of them did."""
        self.settled = asyncio.Event()
        """Set while all partitions of an assignment are open, but for those whose leader is away."""
        self.ends: dict[TopicPartition, int] = {}
        """End of each partition's log as first seen; for consuming up to there."""
        self.unsettled: dict[TopicPartition, str] = {}
        """Why it is not known yet where to resume a partition that is ours."""
        self.seeks = Seeks()
        """Where partitions are to go on, as the application asked for."""
        self._limits = limits
        self._outside = outside
        self._committer = committer
        self._tasks = tasks
        self._clock = clock
        self._transport: Transport | None = None
        self._fetch_tasks: dict[Epoch, asyncio.Task[object]] = {}
        self._claims: dict[TopicPartition, Claim] = {}
        self._opened_in: dict[Epoch, Membership] = {}
        """Of the epochs that are ours for certain: the membership of the latest assignment."""
        self._reruns: dict[TopicPartition, Rerun] = {}
        self._given: frozenset[TopicPartition] = frozenset()
        """The latest assignment."""
        self._given_in = NOT_A_MEMBER
        self._settling: asyncio.Task[object] | None = None
        self._news = asyncio.Event()
        """Set when something is to be opened, also while that is under way."""
        self._stopping = False
        self._epochs = 0
        self._opening = Opening(self, committer, limits)

    def attach(self, transport: Transport) -> None:
        """From now on *transport* is the client."""
        self._transport = transport
        self._claims.clear()

    @property
    def client(self) -> Transport:
        """The client of now.

        Raises:
            ClientLostError: There is none.
        """
        if self._transport is None:
            raise ClientLostError("there is no Kafka client now: one is being built, or the app has stopped")
        return self._transport

    @property
    def epochs(self) -> list[Epoch]:
        """Every epoch that has not ended."""
        return [fetcher.epoch for fetcher in tuple(self.fetchers.values())]

    @property
    def in_place(self) -> bool:
        """Whether every partition is open where it is to resume: no rebalance, seek or absent leader is waited for."""
        return self.settled.is_set() and not self.unsettled and not self.seeks.under_way

    @property
    def trouble(self) -> str | None:
        """Why partitions that are ours are not open, else None."""
        if not self.unsettled:
            return None
        name, reason = min(self.unsettled.items())
        waiting = f"{len(self.unsettled)} partitions wait, {name} first" if len(self.unsettled) > 1 else f"{name} waits"
        return f"{waiting}: {reason}"

    # Taken away ----------------------------------------------------------------------

    async def revoked(self, partitions: Collection[TopicPartition], *, lost: bool) -> None:
        """Drain, commit and let go of partitions; see `GroupListener.revoked`."""
        self.settled.clear()
        self._stop_settling()
        epochs = [fetcher.epoch for name in partitions if (fetcher := self.fetchers.get(name)) is not None]
        for epoch in epochs:
            self.seeks.let_go(epoch)
        self.log.revoked(len(epochs), self._in_flight(epochs), lost=lost)
        if lost:
            for epoch in epochs:
                self.end(epoch, "the group membership was lost")
            return
        for epoch in [epoch for epoch in epochs if epoch not in self._opened_in]:
            epochs.remove(epoch)
            self.end(epoch, "it was revoked again before it was ours for certain")
        try:
            late = await self.drain(epochs, self._limits.drain_timeout)
            if late:
                logger.warning("%d record(s) still ran when the time to drain was over, and were cancelled", late)
            self.log.drained(late)
            await self._committer.flush(epochs, self._limits.commit_timeout)
        finally:
            self.log.handed_back()
            for epoch in epochs:
                self._committer.disown(epoch)
        if uncommitted := {str(epoch.topic_partition): epoch.uncommitted for epoch in epochs if epoch.uncommitted}:
            logger.warning(
                "the last commit before the hand-over was not acknowledged, so records that finished may run again: %s",
                ", ".join(f"{name} ({count})" for name, count in uncommitted.items()),
                extra={"event": "uncommitted", "records": sum(uncommitted.values()), "group": self._limits.group_id},
            )
        for epoch in epochs:
            if epoch.gate is not Gate.ENDED:
                self._claim(epoch)

    def _in_flight(self, epochs: Collection[Epoch]) -> int:
        """How many records of these run."""
        theirs = {both for epoch in epochs for both in self._with_side(epoch)}
        return sum(delivery.epoch in theirs for worker in self._outside.workers for delivery in worker.deliveries)

    def _claim(self, epoch: Epoch) -> None:
        held = self._opened_in.pop(epoch)
        self._claims[epoch.topic_partition] = Claim(*held, epoch.acknowledged, epoch.tracker.position)

    async def drain(self, epochs: Collection[Epoch], timeout: float) -> int:
        """Close the gates and wait for what has to end; cancel what has not within *timeout* seconds.

        Returns:
            How many records had not ended.
        """
        running = {delivery for worker in self._outside.workers for delivery in worker.deliveries}
        for epoch in epochs:
            if epoch.is_open:
                self.fetchers[epoch.topic_partition].feed.close(epoch, running)
        draining = [both for epoch in epochs for both in self._with_side(epoch)]
        with anyio.move_on_after(timeout):
            for epoch in draining:
                if epoch.drained is not None:
                    await epoch.drained.wait()
        late = {delivery for epoch in draining for delivery in epoch.stop_draining()}
        ran_on = 0
        for worker in self._outside.workers:
            still = late.intersection(worker.deliveries)
            ran_on += len(still)
            if still:
                worker.interrupt()
        return ran_on

    def wait_no_more(self) -> None:
        """Let a drain end as if its time were over: nobody is left to run anything."""
        for epoch in self.epochs:
            for both in self._with_side(epoch):
                if both.drained is not None:
                    both.drained.set()

    def _with_side(self, epoch: Epoch) -> list[Epoch]:
        fetcher = self.fetchers.get(epoch.topic_partition)
        return fetcher.feed.with_side(epoch) if fetcher is not None else [epoch]

    def claim_of(self, topic_partition: TopicPartition) -> Claim | None:
        """What speaks for going on with a partition where we were, when it was taken from us just before."""
        return self._claims.get(topic_partition)

    def end_all(self, reason: str) -> None:
        """End every epoch: the client is gone, or the app is."""
        self.settled.clear()
        self._stop_settling()
        for epoch in self.epochs:
            self.end(epoch, reason)

    def end(self, epoch: Epoch, reason: str) -> None:
        """End an ownership; what of it is incomplete is dropped, and what runs is told to end."""
        dropped = len(epoch.tracker)
        self.log.dropped(dropped)
        ended = self._with_side(epoch)
        self.seeks.let_go(epoch)
        self._committer.disown(epoch)
        self._reruns[epoch.topic_partition] = epoch.end()
        self.fetchers.pop(epoch.topic_partition).feed.purge(epoch)
        self._tasks.dismiss(self._fetch_tasks.pop(epoch))
        self._opened_in.pop(epoch, None)
        self._claims.pop(epoch.topic_partition, None)
        for worker in self._outside.workers:
            if any(delivery.epoch in ended for delivery in worker.deliveries):
                worker.interrupt()
        logger.log(
            logging.WARNING if dropped else logging.INFO,
            "epoch %d of %s ended: %s; %d incomplete record(s) were dropped and are fetched again where it goes on",
            epoch.number,
            epoch.topic_partition,
            reason,
            dropped,
            extra=partition_fields(
                "epoch_ended", epoch.topic_partition, epoch=epoch.number, dropped=dropped, group=self._limits.group_id
            ),
        )

    # Given ------------------------------------------------------------------------------

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Take note of an assignment and look into it; see `GroupListener.assigned`."""
        self.rebalances += 1
        given = self._given = frozenset(partitions)
        self._given_in = membership
        self.seeks.keep(given)
        for epoch in self.epochs:
            if epoch in self._opened_in:
                self._opened_in[epoch] = membership
            elif epoch.topic_partition in given:
                epoch.fetching_again = False
                self.client.seek(epoch.topic_partition, epoch.tracker.position)
            else:
                self.end(epoch, "the partition was given to another member")
        untouched = sum(epoch.topic_partition in given for epoch in self._opened_in)
        by_hand = not membership.member_id and membership != NOT_A_MEMBER
        self.log.assigned(len(given), untouched, membership.generation, by_hand=by_hand)
        self.client.adjust_prefetch(max(len(self.fetchers.keys() | given), 1), self._limits.max_buffered_bytes // 2)
        # What came with an assignment before this one and is not open yet is in this one too.
        self._stop_settling()
        self._look_into()

    def restart(self, epoch: Epoch, error: OffsetOutOfRangeError | OffsetRegressionError) -> None:
        """An epoch's position is not in its log any more: find where to go on."""
        topic_partition = epoch.topic_partition
        self.client.pause([topic_partition])
        if isinstance(error, OffsetOutOfRangeError):
            epoch.outside_log = error.position
        else:
            self.end(epoch, str(error))
        self._look_into()

    def seek(self, epoch: Epoch, start: int) -> asyncio.Future[None]:
        """Have an open partition go on at *start*, drained first; the future ends when it does.

        The position is committed before a record of it is handed out, with nothing of what was finished before.

        Raises:
            StateError: Another position was asked for, and is not reached yet.
        """
        done = self.seeks.ask(epoch, start)
        self.client.pause([epoch.topic_partition])  # what comes while it drains would be fetched for nothing
        self._tasks.start(self._leave(epoch, start), f"seek {epoch.topic_partition}")
        return done

    async def _leave(self, epoch: Epoch, start: int) -> None:
        """Drain an epoch and commit what it finished; then look into its partition, unless a rebalance does."""
        late = await self.drain([epoch], self._limits.drain_timeout)
        if late:
            logger.warning("%d record(s) still ran when the time to drain was over, and were cancelled", late)
        await self._committer.flush([epoch], self._limits.commit_timeout)
        if self.seeks.drains(epoch):
            self.end(epoch, f"the application asked to go on at offset {start}")
            self._look_into()

    def stop_opening(self) -> None:
        """From now on no gate opens: the app is draining for good."""
        self._stopping = True
        self.seeks.give_up_all()
        self._stop_settling()

    def _look_into(self) -> None:
        """Open what is ours and is not open: now, or once more if that is under way."""
        self.settled.clear()
        self._news.set()
        if not self._stopping and (self._settling is None or self._settling.done()):
            self._settling = self._tasks.start(self._settle(), f"settle generation {self._given_in.generation}")

    def _stop_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        self.unsettled.clear()

    async def _settle(self) -> None:
        """Open the partitions of the assignment, each in place or in a new epoch; try until done or overtaken."""
        given, membership = self._given, self._given_in
        while self.client.membership() == membership:
            self._news.clear()
            try:
                self.unsettled = await self._opening.settle(given, membership)
            except (TransportError, TimeoutError) as error:
                if isinstance(error, OffsetOutOfRangeError):
                    self._outside.fail(error)
                    return
                why = str(error) or "the brokers do not answer"
                self.unsettled = {name: why for name in given if not self._opening.is_open(name)}
                delay = _RETRY_DELAY
            except AioshardError as error:
                self._outside.fail(error)
                return
            else:
                if self.client.membership() != membership:
                    return
                if not self._news.is_set():
                    self.settled.set()
                    self.log.settled()
                    if not self.unsettled:
                        return
                delay = _LEADER_DELAY
            with anyio.move_on_after(delay):
                await self._news.wait()

    def begin(self, topic_partition: TopicPartition, start: int) -> Epoch:
        """Make a new epoch, closed."""
        self._epochs += 1
        epoch = self._outside.make_epoch(topic_partition, self._epochs, start)
        epoch.rerun = self._reruns.pop(topic_partition, None)
        why = self._outside.why_paused(topic_partition)
        if why is not None:
            epoch.pause(APPLICATION, why)
        fetcher = Fetcher(epoch, self._outside.feed_of(topic_partition.topic), self._clock)
        self.fetchers[topic_partition] = fetcher
        self._fetch_tasks[epoch] = self._tasks.start(fetcher.run(), f"fetch {topic_partition}", lasts=True)
        self.client.seek(topic_partition, start)
        return epoch

    def open(self, epoch: Epoch, membership: Membership) -> None:
        """Let an epoch go on: it is ours for certain under *membership*."""
        self._opened_in[epoch] = membership
        self.log.opened(in_place=epoch.topic_partition in self._claims)
        self._opening.opened(epoch)
        self._committer.own(epoch)
        epoch.open()
        tell_opened(epoch, self._limits.group_id)
        self.fetchers[epoch.topic_partition].feed.reopen(epoch)
        self.client.resume([epoch.topic_partition])
        self.seeks.reached(epoch.topic_partition)
