"""Partition ownership: handles revoked, lost and assigned partitions, and drains, hands over or continues them."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import anyio

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.core.ownership import (
    Claim,
    Evidence,
    Origin,
    first_mark,
    kept_mark,
    knows_topic,
    origin_of,
    reason_to_end,
)
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Epoch, Gate, Rerun
from aioshard.engine.feed import Feed
from aioshard.engine.fetcher import Fetcher
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.rebalance_log import RebalanceLog, tell_opened
from aioshard.engine.tasks import TaskSet
from aioshard.engine.worker import Worker
from aioshard.errors import (
    AioshardError,
    ClientLostError,
    LeasedError,
    NoOffsetError,
    OffsetOutOfRangeError,
    OffsetRegressionError,
    StateError,
    TransportError,
)
from aioshard.ports import NOT_A_MEMBER, Committed, FetchedBatch, LogRange, Membership, Transport
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["APPLICATION", "Outside", "Rebalance", "Seeks"]

logger = logging.getLogger("aioshard.engine.rebalance")

_RETRY_DELAY = 0.2
_LEADER_DELAY = 1.0
"""Seconds between lookups of partitions whose leader is away."""

APPLICATION = "application"
"""Key in `Epoch.pauses` of a pause that the application requested."""


class Outside(Protocol):
    """The parts of the engine that the rebalance uses."""

    @property
    def workers(self) -> Collection[Worker]:
        """All workers of all handlers."""

    def feed_of(self, topic: str) -> Feed:
        """Router for the records of a topic."""

    @property
    def replayed(self) -> int:
        """How many records this process has run more than once."""

    def why_paused(self, topic_partition: TopicPartition) -> str | None:
        """Why the application paused a partition; None when it did not."""

    def make_epoch(self, topic_partition: TopicPartition, number: int, start: int) -> Epoch:
        """Make an epoch, with its gate closed."""

    def fail(self, error: BaseException) -> None:
        """End the app: no retry can help against *error*."""


class Rebalance:
    """Owns the epochs: creates them, closes and opens their gates, and ends them. Implements `GroupListener`.

    A revoked partition keeps its epoch, with the gate closed. If the group assigns it again and
    `aioshard.core.ownership.reason_to_end` finds no objection, it continues in place. Otherwise its epoch ends and its
    queued records are dropped.

    Invariants:
        * A position that was not committed yet is committed before the first record is handed out.
        * Nothing of an epoch is committed between the end of `revoked` and its continuation (I9).
        * `revoked` returns within the drain timeout plus the commit timeout (I7).
        * A gate opens only after the checks, and under the same membership in which they were made.
    """

    def __init__(
        self,
        group_id: str,
        settings: "Settings",
        outside: Outside,
        *,
        committer: Committer,
        tasks: TaskSet,
        clock: Callable[[], float],
    ) -> None:
        self.fetchers: dict[TopicPartition, Fetcher] = {}
        """Fetchers of the partitions that are ours, or may become ours again."""
        self.rebalances = 0
        self.log = RebalanceLog(clock, lambda: outside.replayed)
        """History of the rebalances."""
        self.settled = asyncio.Event()
        """Set while every assigned partition is open, except those whose leader is away."""
        self.ends: dict[TopicPartition, int] = {}
        """End of each partition's log as first seen, for consuming up to that point."""
        self.unsettled: dict[TopicPartition, str] = {}
        """Owned partitions whose resume position is not known yet, each with the reason."""
        self.seeks = Seeks()
        """Positions that the application requested and that are not reached yet."""
        self._group_id = group_id
        self._settings = settings
        self._outside = outside
        self._committer = committer
        self._tasks = tasks
        self._clock = clock
        self._transport: Transport | None = None
        self._fetch_tasks: dict[Epoch, asyncio.Task[object]] = {}
        self._claims: dict[TopicPartition, Claim] = {}
        self._opened_in: dict[Epoch, Membership] = {}
        """Epochs that are certain to be ours, each with the membership of the latest assignment."""
        self._reruns: dict[TopicPartition, Rerun] = {}
        self._given: frozenset[TopicPartition] = frozenset()
        """The latest assignment."""
        self._given_in = NOT_A_MEMBER
        self._settling: asyncio.Task[object] | None = None
        self._news = asyncio.Event()
        """Set when there are partitions to open, even while others are being opened."""
        self._stopping = False
        self._epochs = 0
        self._told: set[tuple[TopicPartition, Committed | None]] = set()
        """Foreign commit metadata that was already logged: repeated lookups of a position log it once."""
        self._ever_opened: set[TopicPartition] = set()
        """Partitions opened by this process: the group has had a position on each, even if the brokers dropped it."""
        self._marks: dict[str, CommitMetadata] = {}
        """Metadata of the first commit seen on each topic."""

    def attach(self, transport: Transport) -> None:
        """Use *transport* as the client from now on."""
        self._transport = transport
        self._claims.clear()

    @property
    def client(self) -> Transport:
        """The current client.

        Raises:
            ClientLostError: No client exists now.
        """
        if self._transport is None:
            raise ClientLostError("there is no Kafka client now: one is being built, or the app has stopped")
        return self._transport

    @property
    def epochs(self) -> list[Epoch]:
        """All epochs that have not ended."""
        return [fetcher.epoch for fetcher in tuple(self.fetchers.values())]

    @property
    def in_place(self) -> bool:
        """Whether every partition is open at its resume position: no rebalance, seek or absent leader is pending."""
        return self.settled.is_set() and not self.unsettled and not self.seeks.under_way

    @property
    def trouble(self) -> str | None:
        """Why owned partitions are not open; None when all are."""
        if not self.unsettled:
            return None
        name, reason = min(self.unsettled.items())
        waiting = f"{len(self.unsettled)} partitions wait, {name} first" if len(self.unsettled) > 1 else f"{name} waits"
        return f"{waiting}: {reason}"

    # Taken away ----------------------------------------------------------------------

    async def revoked(self, partitions: Collection[TopicPartition], *, lost: bool) -> None:
        """Drain, commit and release partitions; see `GroupListener.revoked`."""
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
            late = await self.drain(epochs, self._settings.drain_timeout)
            if late:
                logger.warning("%d record(s) still ran when the time to drain was over, and were cancelled", late)
            self.log.drained(late)
            await self._committer.flush(epochs, self._settings.commit_timeout)
        finally:
            self.log.handed_back()
            for epoch in epochs:
                self._committer.disown(epoch)
        if uncommitted := {str(epoch.topic_partition): epoch.uncommitted for epoch in epochs if epoch.uncommitted}:
            logger.warning(
                "the last commit before the hand-over was not acknowledged, so records that finished may run again: %s",
                ", ".join(f"{name} ({count})" for name, count in uncommitted.items()),
                extra={"event": "uncommitted", "records": sum(uncommitted.values()), "group": self._group_id},
            )
        for epoch in epochs:
            if epoch.gate is not Gate.ENDED:
                self._claim(epoch)

    def _in_flight(self, epochs: Collection[Epoch]) -> int:
        """Count the records of *epochs* that handlers are running."""
        theirs = {both for epoch in epochs for both in self._with_side(epoch)}
        return sum(delivery.epoch in theirs for worker in self._outside.workers for delivery in worker.deliveries)

    def _claim(self, epoch: Epoch) -> None:
        held = self._opened_in.pop(epoch)
        self._claims[epoch.topic_partition] = Claim(*held, epoch.acknowledged, epoch.tracker.position)

    async def drain(self, epochs: Collection[Epoch], timeout: float) -> int:
        """Close the gates and wait for the records that must end; cancel those still running after *timeout* seconds.

        Returns:
            How many records were still running.
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
        """End every drain as if its timeout had passed, because no worker is left to run anything."""
        for epoch in self.epochs:
            for both in self._with_side(epoch):
                if both.drained is not None:
                    both.drained.set()

    def _with_side(self, epoch: Epoch) -> list[Epoch]:
        fetcher = self.fetchers.get(epoch.topic_partition)
        return fetcher.feed.with_side(epoch) if fetcher is not None else [epoch]

    def end_all(self, reason: str) -> None:
        """End every epoch: the client is lost, or the app stopped."""
        self.settled.clear()
        self._stop_settling()
        for epoch in self.epochs:
            self.end(epoch, reason)

    def end(self, epoch: Epoch, reason: str) -> None:
        """End an ownership: drop its incomplete records and interrupt those that are running."""
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
                "epoch_ended", epoch.topic_partition, epoch=epoch.number, dropped=dropped, group=self._group_id
            ),
        )

    # Given ------------------------------------------------------------------------------

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        """Record a new assignment and start opening its partitions; see `GroupListener.assigned`."""
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
        self.client.adjust_prefetch(max(len(self.fetchers.keys() | given), 1), self._settings.max_buffered_bytes // 2)
        # A new assignment also contains the partitions of earlier ones that are not open yet.
        self._stop_settling()
        self._look_into()

    def restart(self, epoch: Epoch, error: OffsetOutOfRangeError | OffsetRegressionError) -> None:
        """Find where to resume an epoch whose position is no longer in its log."""
        topic_partition = epoch.topic_partition
        self.client.pause([topic_partition])
        if isinstance(error, OffsetOutOfRangeError):
            epoch.outside_log = error.position
        else:
            self.end(epoch, str(error))
        self._look_into()

    def seek(self, epoch: Epoch, start: int) -> asyncio.Future[None]:
        """Drain an open partition and resume it at *start*; the future is done when it resumes.

        *start* is committed before its first record is handed out, without any completions from before the seek.

        Raises:
            StateError: Another seek of this partition is still under way.
        """
        done = self.seeks.ask(epoch, start)
        self.client.pause([epoch.topic_partition])  # records that arrive during the drain would be fetched for nothing
        self._tasks.start(self._leave(epoch, start), f"seek {epoch.topic_partition}")
        return done

    async def _leave(self, epoch: Epoch, start: int) -> None:
        """Drain an epoch and commit its completions, then reopen its partition unless a rebalance has taken charge."""
        late = await self.drain([epoch], self._settings.drain_timeout)
        if late:
            logger.warning("%d record(s) still ran when the time to drain was over, and were cancelled", late)
        await self._committer.flush([epoch], self._settings.commit_timeout)
        if self.seeks.drains(epoch):
            self.end(epoch, f"the application asked to go on at offset {start}")
            self._look_into()

    def stop_opening(self) -> None:
        """Open no gate from now on: the app is draining and will stop."""
        self._stopping = True
        self.seeks.give_up_all()
        self._stop_settling()

    def _look_into(self) -> None:
        """Open the owned partitions that are not open; if that is under way already, make it check again."""
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
        """Open the assigned partitions, in place or in new epochs; retry until done or until the membership changes."""
        given, membership = self._given, self._given_in
        while self.client.membership() == membership:
            self._news.clear()
            try:
                self.unsettled = await self._open_given(given, membership)
            except (TransportError, TimeoutError) as error:
                if isinstance(error, OffsetOutOfRangeError):
                    self._outside.fail(error)
                    return
                why = str(error) or "the brokers do not answer"
                self.unsettled = {name: why for name in given if not self._is_open(name)}
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

    async def _open_given(
        self, partitions: frozenset[TopicPartition], membership: Membership
    ) -> dict[TopicPartition, str]:
        """Open each of *partitions*, in place or in a new epoch, while *membership* lasts.

        Returns:
            The partitions whose leader is away, each with the reason. They do not delay the others.

        Raises:
            TransportError: A lookup or a commit failed; partitions that were opened stay open.
            TimeoutError: The brokers did not answer.
            NoOffsetError: There is neither a committed offset nor a policy that says where to begin.
            OffsetOutOfRangeError: The committed offset is not in the log, and the policy is "error".
            LeasedError: A backfill holds one of *partitions*.
        """
        unsettled = [topic_partition for topic_partition in sorted(partitions) if not self._is_open(topic_partition)]
        if not unsettled:
            return {}
        client = self.client
        with anyio.fail_after(self._settings.commit_timeout):
            committed = await client.committed(unsettled)
        with anyio.fail_after(self._settings.commit_timeout):
            ranges = await client.log_ranges(unsettled)
        # Parsing long metadata takes a while through no fault of the brokers, so it has no deadline.
        texts = await _read(committed)
        self._refuse_leased(committed, texts)
        if client.membership() != membership:
            return {}
        waiting = {name: f"no leader of {name} answers" for name in unsettled if name not in ranges}
        fresh: list[TopicPartition] = []
        for topic_partition in unsettled:
            if topic_partition in waiting:
                continue
            log = ranges[topic_partition]
            # A recreated topic may end earlier than first seen, and nothing will arrive up to the old end.
            self.ends[topic_partition] = min(self.ends.get(topic_partition, log.end), log.end)
            fetcher = self.fetchers.get(topic_partition)
            if fetcher is None or not self._continue(fetcher, committed[topic_partition], log, membership):
                fresh.append(topic_partition)
        resolved, failures = await self._begin_all(fresh, committed, texts, ranges, membership)
        await self._open_resolved(resolved, membership)
        if failures:
            raise failures[0]
        return waiting

    def _refuse_leased(
        self, committed: Mapping[TopicPartition, Committed | None], texts: Mapping[TopicPartition, CommitMetadata]
    ) -> None:
        """Refuse partitions that a backfill has leased; warn about foreign commit metadata before it is replaced."""
        now = time.time()
        for topic_partition, ours in sorted(committed.items()):
            noted = texts[topic_partition]
            if noted.lease is not None and noted.lease.until > now:
                raise LeasedError(self._group_id, topic_partition, *noted.lease)
            if (noted.foreign is not None or noted.ignored) and (topic_partition, ours) not in self._told:
                self._told.add((topic_partition, ours))
                why = "; ".join(noted.ignored) or "another program wrote it"
                message = (
                    "the text that was committed with offset %d of %s is not used, and the next commit replaces it: %s"
                )
                offset = ours.offset if ours else -1
                fields = partition_fields("note_unused", topic_partition, offset=offset, why=why)
                logger.warning(message, offset, topic_partition, why, extra=fields)

    def _is_open(self, topic_partition: TopicPartition) -> bool:
        """Whether a partition needs no checks before its records are handed out."""
        fetcher = self.fetchers.get(topic_partition)
        if fetcher is None:
            return False
        # A partition that is drained for a seek is still ours; it is checked once the drain is over.
        return (fetcher.epoch.is_open and fetcher.epoch.outside_log is None) or self.seeks.drains(fetcher.epoch)

    def _continue(self, fetcher: Fetcher, committed: Committed | None, log: LogRange, now: Membership) -> bool:
        epoch = fetcher.epoch
        start = self.seeks.start_of(epoch.topic_partition)
        reason: str | None
        if start is not None:
            reason = f"the application asked to go on at offset {start}"
        elif epoch.is_open and epoch.outside_log is not None:
            reason = self._pass_over(fetcher, epoch.outside_log, log)
        else:
            evidence = Evidence(*now, committed.offset if committed else None, log.start, log.end)
            reason = reason_to_end(self._claims.get(epoch.topic_partition), evidence)
        if reason is not None:
            self.end(epoch, reason)
            return False
        self._open(epoch, now)
        return True

    def _pass_over(self, fetcher: Fetcher, position: int, log: LogRange) -> str | None:
        """Skip offsets that retention deleted before they were read, like any hole; or return why the epoch ends."""
        topic_partition = fetcher.epoch.topic_partition
        if position >= log.start or self._settings.auto_offset_reset == "error":
            return str(OffsetOutOfRangeError(topic_partition, position))
        message = "retention has deleted offsets %d to %d of %s before they were read; going on at %d"
        fields = partition_fields("passed_over", topic_partition, offset=position, position=log.start)
        logger.warning(message, position, log.start - 1, topic_partition, log.start, extra=fields)
        fetcher.accept(FetchedBatch(topic_partition, (), (), log.start))
        self.client.seek(topic_partition, log.start)
        return None

    async def _begin_all(
        self,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, Committed | None],
        texts: Mapping[TopicPartition, CommitMetadata],
        ranges: Mapping[TopicPartition, LogRange],
        membership: Membership,
    ) -> tuple[list[Epoch], list[TransportError | TimeoutError]]:
        """Begin epochs for *partitions*, and open those whose position is committed already.

        Returns:
            The epochs that stay closed until their position is committed, and the errors that keep others closed.
        """
        topics = dict.fromkeys(name.topic for name in partitions)
        with anyio.fail_after(self._settings.commit_timeout):
            numbers = {topic: len(await self.client.partitions(topic)) for topic in topics}
        unknown = dict.fromkeys(name.topic for name in partitions if committed[name] is None)
        noted = {topic: await self._noted(topic, numbers[topic]) for topic in unknown}
        if self.client.membership() != membership:
            return [], []
        now = time.time()
        found: list[Epoch] = []
        resolved: list[Epoch] = []
        for name in partitions:
            knows = committed[name] is None and (
                name in self._ever_opened or knows_topic(noted[name.topic], name.partition, membership.generation, now)
            )
            origin = self._origin(name, committed[name], ranges[name], group_knows_topic=knows)
            epoch = self._begin(name, origin.offset)
            if committed[name] is None:
                epoch.mark = first_mark(membership.generation, numbers[name.topic], now)
            else:
                epoch.mark = kept_mark(texts[name], now)
                if not origin.resolved:
                    epoch.inherited = _believable(texts[name].finished, name, ranges[name])
            self._acknowledge(epoch, committed[name])
            (resolved if origin.resolved else found).append(epoch)
        restored = await self._restore([*found, *resolved], numbers, membership.generation)
        if self.client.membership() != membership:
            return [], []
        for epoch in found:
            if restored[epoch] is True:
                epoch.acknowledged = None  # commit it again: the broker's answer shows whether the partition is ours
                resolved.append(epoch)
            elif restored[epoch] is False:
                self._open(epoch, membership)
        failures = [result for result in restored.values() if not isinstance(result, bool)]
        return [epoch for epoch in resolved if isinstance(restored[epoch], bool)], failures

    def _origin(
        self, topic_partition: TopicPartition, ours: Committed | None, log: LogRange, *, group_knows_topic: bool
    ) -> Origin:
        """Decide where to begin a partition.

        Raises:
            NoOffsetError: There is neither a committed offset nor a policy that says it.
            OffsetOutOfRangeError: The committed offset is not in the log, and the policy is "error".
        """
        offset = ours.offset if ours else None
        asked = _within(self.seeks.start_of(topic_partition), log)
        origin = asked or origin_of(offset, log, self._settings.auto_offset_reset, group_knows_topic=group_knows_topic)
        if origin is None:
            lost = OffsetOutOfRangeError(topic_partition, ours.offset) if ours else None
            raise lost or NoOffsetError(self._group_id, topic_partition)
        if origin.resolved and ours is not None and asked is None:
            message = "committed offset %d of %s is outside its log; going on at %d"
            fields = partition_fields("out_of_range", topic_partition, offset=ours.offset, position=origin.offset)
            logger.warning(message, ours.offset, topic_partition, origin.offset, extra=fields)
        return origin

    def _acknowledge(self, epoch: Epoch, ours: Committed | None) -> None:
        """Record the committed offset. A seek is always committed, even to the same offset."""
        asked = self.seeks.start_of(epoch.topic_partition)
        epoch.acknowledged = ours.offset if ours and asked is None else None  # the metadata differs

    async def _restore(
        self, epochs: Collection[Epoch], numbers: Mapping[str, int], generation: int
    ) -> dict[Epoch, bool | TransportError | TimeoutError]:
        """Find out what new epochs have in side topics, before any of their records is handed out.

        Returns:
            For each epoch, whether something of it belongs to a later owner, or the error that prevented finding out.
        """
        feeds = {epoch: self.fetchers[epoch.topic_partition].feed for epoch in epochs}
        found = await asyncio.gather(
            *(feed.restore(epoch, numbers[epoch.topic_partition.topic], generation) for epoch, feed in feeds.items()),
            return_exceptions=True,
        )
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, TransportError | TimeoutError):
                raise error
        return dict(zip(feeds, found, strict=True))  # type: ignore[arg-type]

    async def _noted(self, topic: str, partitions: int) -> list[CommitMetadata]:
        """Metadata of the group's commits on all partitions of a topic, and of the first commit seen on it."""
        with anyio.fail_after(self._settings.commit_timeout):
            commits = await self.client.committed([TopicPartition(topic, number) for number in range(partitions)])
        texts = await _read({one: found for one, found in commits.items() if found is not None})
        noted = list(texts.values())
        if topic in self._marks:
            noted.append(self._marks[topic])  # brokers forget the commits of a deleted topic
        return noted

    async def _open_resolved(self, epochs: list[Epoch], membership: Membership) -> None:
        """Commit positions that were resolved for the group, or are in doubt, and only then hand out records."""
        for epoch in epochs:
            self._committer.own(epoch)
        acknowledged = await self._committer.flush(epochs, self._settings.commit_timeout)
        if self.client.membership() != membership:
            return
        if not acknowledged:
            for epoch in epochs:
                self.end(epoch, "its start position could not be committed")
            raise TransportError(f"where the group begins could not be committed: {self._committer.trouble}")
        for epoch in epochs:
            self.fetchers[epoch.topic_partition].feed.believe(epoch)
            self._open(epoch, membership)

    def _begin(self, topic_partition: TopicPartition, start: int) -> Epoch:
        """Make a new epoch, with its gate closed."""
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

    def _open(self, epoch: Epoch, membership: Membership) -> None:
        """Open an epoch that is certain to be ours under *membership*."""
        self._opened_in[epoch] = membership
        self.log.opened(in_place=epoch.topic_partition in self._claims)
        self._ever_opened.add(epoch.topic_partition)
        self._marks.setdefault(epoch.topic_partition.topic, epoch.mark)
        self._committer.own(epoch)
        epoch.open()
        tell_opened(epoch, self._group_id)
        self.fetchers[epoch.topic_partition].feed.reopen(epoch)
        self.client.resume([epoch.topic_partition])
        self.seeks.reached(epoch.topic_partition)


class _Seek:
    """A requested position."""

    def __init__(self, start: int, epoch: Epoch) -> None:
        self.start = start
        self.draining: Epoch | None = epoch
        """The epoch that the seek is draining; None once the next check of the partition may open it."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Seeks:
    """Requested positions that are not reached yet. Owned by the rebalance.

    A seek survives rebalances as long as the partition stays assigned to us: the partition then opens at the
    requested position instead of the committed offset.

    Invariants:
        * A partition has at most one seek.
        * Every future is done once the partition opens there, is assigned elsewhere, or the app stops.
    """

    def __init__(self) -> None:
        """Start without any seek."""
        self._asked: dict[TopicPartition, _Seek] = {}

    def ask(self, epoch: Epoch, start: int) -> asyncio.Future[None]:
        """Register a seek of a partition to *start*; the future is done when the partition resumes there.

        Raises:
            StateError: Another seek of this partition is still under way.
        """
        topic_partition = epoch.topic_partition
        before = self._asked.get(topic_partition)
        if before is not None:
            raise StateError(
                f"{topic_partition} is on its way to offset {before.start}, which was asked for before: await that seek"
            )
        seek = self._asked[topic_partition] = _Seek(start, epoch)
        return seek.done

    @property
    def under_way(self) -> bool:
        """Whether any requested position is not reached yet."""
        return bool(self._asked)

    def start_of(self, topic_partition: TopicPartition) -> int | None:
        """Requested position of a partition, or None."""
        seek = self._asked.get(topic_partition)
        return None if seek is None else seek.start

    def drains(self, epoch: Epoch) -> bool:
        """Whether an epoch is being drained for a seek and no rebalance has taken charge of it since."""
        seek = self._asked.get(epoch.topic_partition)
        return seek is not None and seek.draining is epoch

    def let_go(self, epoch: Epoch) -> None:
        """Leave an epoch that was revoked or has ended to the rebalance: its partition then opens like any other."""
        seek = self._asked.get(epoch.topic_partition)
        if seek is not None and seek.draining is epoch:
            seek.draining = None

    def reached(self, topic_partition: TopicPartition) -> None:
        """Complete the seek of a partition that has just opened, if there is one."""
        seek = self._asked.pop(topic_partition, None)
        if seek is not None and not seek.done.done():
            seek.done.set_result(None)

    def keep(self, given: Collection[TopicPartition]) -> None:
        """Fail the seeks of partitions that are not in the assignment."""
        for topic_partition in sorted(self._asked.keys() - set(given)):
            why = "the group gave it to another member meanwhile"
            self._give_up(topic_partition, f"{why}, which goes on at the committed offset: seek there")

    def give_up_all(self) -> None:
        """Fail all seeks, because the app stops."""
        for topic_partition in tuple(self._asked):
            self._give_up(topic_partition, "the app stopped meanwhile: what is committed says where it goes on")

    def _give_up(self, topic_partition: TopicPartition, why: str) -> None:
        seek = self._asked.pop(topic_partition)
        if not seek.done.done():
            seek.done.set_exception(StateError(f"{topic_partition} did not go to offset {seek.start}: {why}"))
            seek.done.exception()  # raised in the waiter; a waiter that gave up is not an error


async def _read(commits: Mapping[TopicPartition, Committed | None]) -> dict[TopicPartition, CommitMetadata]:
    """Parse the metadata of commits, empty where there is none; let other tasks run, as long texts take milliseconds.

    The group may have changed meanwhile: check again anything that you know from the brokers.
    """
    texts = {}
    for name, found in commits.items():
        texts[name] = CommitMetadata.read(found.metadata, found.offset) if found else CommitMetadata()
        if texts[name].finished:
            await asyncio.sleep(0)
    return texts


def _within(asked: int | None, log: LogRange) -> Origin | None:
    """Origin for a requested position, moved into the log if it is outside by now; None without a request."""
    return None if asked is None else Origin(min(max(asked, log.start), log.end), resolved=True)


def _believable(finished: tuple[Run, ...], topic_partition: TopicPartition, log: LogRange) -> tuple[Run, ...]:
    """Completions noted with a commit; none if they belong to another log (a recreated topic or a truncated log)."""
    if finished and finished[-1].end > log.end:
        message = (
            "what was noted as finished of %s, up to offset %d, is not used: its log ends at %d, so it is not the log "
            "that it was noted for"
        )
        fields = partition_fields("note_unused", topic_partition, offset=finished[-1].end, end_offset=log.end)
        logger.warning(message, topic_partition, finished[-1].end, log.end, extra=fields)
        return ()
    return finished
