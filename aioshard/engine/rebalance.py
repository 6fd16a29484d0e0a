"""What is ours: partitions revoked, lost and assigned; drained, handed back, continued in place."""

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
        * A position that was not committed is committed before the first record is handed out.
        * Nothing of an epoch is committed between the end of `revoked` and its continuation (I9).
        * `revoked` returns within the drain time-out plus the commit time-out (I7).
        * A gate opens only after the checks, under the membership that the checks were made in.
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
        self._told: set[tuple[TopicPartition, Committed | None]] = set()
        """Texts of others that were spoken of: a position that is looked up again and again is told once."""
        self._ever_opened: set[TopicPartition] = set()
        """What was ours in this process: the group has had a position on it, whatever the brokers have kept of that."""
        self._marks: dict[str, CommitMetadata] = {}
        """What the first commit that was seen of each topic carried."""

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
                "epoch_ended", epoch.topic_partition, epoch=epoch.number, dropped=dropped, group=self._group_id
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
        self.client.adjust_prefetch(max(len(self.fetchers.keys() | given), 1), self._settings.max_buffered_bytes // 2)
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
        late = await self.drain([epoch], self._settings.drain_timeout)
        if late:
            logger.warning("%d record(s) still ran when the time to drain was over, and were cancelled", late)
        await self._committer.flush([epoch], self._settings.commit_timeout)
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
        """Open each of *partitions*, in place or in a new epoch, as long as *membership* lasts.

        Returns:
            The partitions whose leader is away, each with a sentence. They keep no other partition waiting.

        Raises:
            TransportError: Something could not be found out, or not be committed; what was opened stays so.
            TimeoutError: The brokers did not answer.
            NoOffsetError: Nothing says where to begin.
            OffsetOutOfRangeError: The committed offset is not in the log, and the policy is "error".
            LeasedError: A run over history has one of *partitions*.
        """
        unsettled = [topic_partition for topic_partition in sorted(partitions) if not self._is_open(topic_partition)]
        if not unsettled:
            return {}
        client = self.client
        with anyio.fail_after(self._settings.commit_timeout):
            committed = await client.committed(unsettled)
        with anyio.fail_after(self._settings.commit_timeout):
            ranges = await client.log_ranges(unsettled)
        # Reading long texts takes a while, which is none of the brokers': there is no deadline for it.
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
            # Lower than at first when the topic was made anew, and then there is no more to come.
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
        """Keep off partitions that a run over history has; say what other programs noted before it is replaced."""
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
        """Whether nothing has to be looked into before records of a partition are handed out."""
        fetcher = self.fetchers.get(topic_partition)
        if fetcher is None:
            return False
        # What is drained for a seek is ours, and looked into when it is drained.
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
        """Pass over what retention has deleted unread, a hole like any other; or say why the epoch ends."""
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
        """Begin epochs for *partitions*, and open those whose position was committed.

        Returns:
            The epochs that are closed until their position is committed, and why others of them stay closed.
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
                epoch.acknowledged = None  # it is committed once more: that shows whose the partition is
                resolved.append(epoch)
            elif restored[epoch] is False:
                self._open(epoch, membership)
        failures = [result for result in restored.values() if not isinstance(result, bool)]
        return [epoch for epoch in resolved if isinstance(restored[epoch], bool)], failures

    def _origin(
        self, topic_partition: TopicPartition, ours: Committed | None, log: LogRange, *, group_knows_topic: bool
    ) -> Origin:
        """Where to go on with a partition.

        Raises:
            NoOffsetError: Nothing says it.
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
        """Take note of what is committed. What was asked for is committed although the offset may be the same."""
        asked = self.seeks.start_of(epoch.topic_partition)
        epoch.acknowledged = ours.offset if ours and asked is None else None  # the text with it is another

    async def _restore(
        self, epochs: Collection[Epoch], numbers: Mapping[str, int], generation: int
    ) -> dict[Epoch, bool | TransportError | TimeoutError]:
        """Find out what of new epochs is kept elsewhere, before a record of them is handed out.

        Returns:
            Whether something is kept of an epoch that is of a later owner, or why that cannot be found out now.
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
        """What the group's commits on a topic carry, of all partitions, and what the first that we saw did."""
        with anyio.fail_after(self._settings.commit_timeout):
            commits = await self.client.committed([TopicPartition(topic, number) for number in range(partitions)])
        texts = await _read({one: found for one, found in commits.items() if found is not None})
        noted = list(texts.values())
        if topic in self._marks:
            noted.append(self._marks[topic])  # the brokers forget the commits of a topic that is deleted
        return noted

    async def _open_resolved(self, epochs: list[Epoch], membership: Membership) -> None:
        """Commit the positions that were found for the group, or are in doubt, and only then hand out records."""
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

    def _open(self, epoch: Epoch, membership: Membership) -> None:
        """Let an epoch go on: it is ours for certain under *membership*."""
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
    """A position that was asked for."""

    def __init__(self, start: int, epoch: Epoch) -> None:
        self.start = start
        self.draining: Epoch | None = epoch
        """The ownership that is left, while only who asked drains it; None when whoever looks into it may go on."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Seeks:
    """The positions that were asked for and are not reached yet. Owned by the rebalance.

    A position stays due across rebalances, as long as the partition is ours in each of them: whoever looks into an
    assignment begins there, instead of where the group has committed.

    Invariants:
        * A partition has at most one.
        * Every future ends: with the epoch that begins there, with the partition given away, or with the app.
    """

    def __init__(self) -> None:
        """Nothing is asked for."""
        self._asked: dict[TopicPartition, _Seek] = {}

    def ask(self, epoch: Epoch, start: int) -> asyncio.Future[None]:
        """Take note that a partition is to go on at *start*; the future ends when it does.

        Raises:
            StateError: Another position was asked for, and is not reached yet.
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
        """Whether a position was asked for that is not reached yet."""
        return bool(self._asked)

    def start_of(self, topic_partition: TopicPartition) -> int | None:
        """Where a partition is to go on, or None."""
        seek = self._asked.get(topic_partition)
        return None if seek is None else seek.start

    def drains(self, epoch: Epoch) -> bool:
        """Whether an epoch is being drained for a seek, and nobody else has taken over since."""
        seek = self._asked.get(epoch.topic_partition)
        return seek is not None and seek.draining is epoch

    def let_go(self, epoch: Epoch) -> None:
        """An epoch is handed over or has ended: where its partition goes on is settled as for any other."""
        seek = self._asked.get(epoch.topic_partition)
        if seek is not None and seek.draining is epoch:
            seek.draining = None

    def reached(self, topic_partition: TopicPartition) -> None:
        """A partition goes on; at the position that was asked for, if one was."""
        seek = self._asked.pop(topic_partition, None)
        if seek is not None and not seek.done.done():
            seek.done.set_result(None)

    def keep(self, given: Collection[TopicPartition]) -> None:
        """Give up what was asked of partitions that are not among the assigned ones."""
        for topic_partition in sorted(self._asked.keys() - set(given)):
            why = "the group gave it to another member meanwhile"
            self._give_up(topic_partition, f"{why}, which goes on at the committed offset: seek there")

    def give_up_all(self) -> None:
        """The app stops."""
        for topic_partition in tuple(self._asked):
            self._give_up(topic_partition, "the app stopped meanwhile: what is committed says where it goes on")

    def _give_up(self, topic_partition: TopicPartition, why: str) -> None:
        seek = self._asked.pop(topic_partition)
        if not seek.done.done():
            seek.done.set_exception(StateError(f"{topic_partition} did not go to offset {seek.start}: {why}"))
            seek.done.exception()  # it is raised to who waits; not waiting any more is no error


async def _read(commits: Mapping[TopicPartition, Committed | None]) -> dict[TopicPartition, CommitMetadata]:
    """What is noted with commits; nothing where there is none. One of full length takes milliseconds: others may run.

    What is asked of the brokers before is to be checked after it.
    """
    texts = {}
    for name, found in commits.items():
        texts[name] = CommitMetadata.read(found.metadata, found.offset) if found else CommitMetadata()
        if texts[name].finished:
            await asyncio.sleep(0)
    return texts


def _within(asked: int | None, log: LogRange) -> Origin | None:
    """Where to begin for who asked: there, or as near as the log is by now."""
    return None if asked is None else Origin(min(max(asked, log.start), log.end), resolved=True)


def _believable(finished: tuple[Run, ...], topic_partition: TopicPartition, log: LogRange) -> tuple[Run, ...]:
    """What was noted as finished, unless it is of another log: a topic that was made anew, or a log cut off."""
    if finished and finished[-1].end > log.end:
        message = (
            "what was noted as finished of %s, up to offset %d, is not used: its log ends at %d, so it is not the log "
            "that it was noted for"
        )
        fields = partition_fields("note_unused", topic_partition, offset=finished[-1].end, end_offset=log.end)
        logger.warning(message, topic_partition, finished[-1].end, log.end, extra=fields)
        return ()
    return finished
