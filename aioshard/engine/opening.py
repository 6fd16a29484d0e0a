"""Where an assignment goes on: each partition in place, or in a new epoch at a position that is committed first."""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Protocol

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
from aioshard.engine.epoch import Epoch
from aioshard.engine.fetcher import Fetcher
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.seeking import Seeks
from aioshard.errors import LeasedError, NoOffsetError, OffsetOutOfRangeError, TransportError
from aioshard.ports import Committed, FetchedBatch, LogRange, Membership, Transport
from aioshard.records import TopicPartition

__all__ = ["Limits", "Opening", "Owner"]

logger = logging.getLogger("aioshard.engine.rebalance")


class Limits(NamedTuple):
    """The times and the policy that rebalances keep to, in seconds."""

    group_id: str
    drain_timeout: float
    commit_timeout: float
    auto_offset_reset: Literal["earliest", "latest", "error"] | None
    max_buffered_bytes: int


class Owner(Protocol):
    """Who owns the epochs: the rebalance."""

    @property
    def client(self) -> Transport:
        """The client of now."""

    @property
    def fetchers(self) -> Mapping[TopicPartition, Fetcher]:
        """Of the partitions that are ours, or may be ours again."""

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """End of each partition's log as first seen."""

    @property
    def seeks(self) -> Seeks:
        """Where partitions are to go on, as the application asked for."""

    def claim_of(self, topic_partition: TopicPartition) -> Claim | None:
        """What speaks for going on with a partition where we were."""

    def begin(self, topic_partition: TopicPartition, start: int) -> Epoch:
        """Make a new epoch, closed."""

    def open(self, epoch: Epoch, membership: Membership) -> None:
        """Let an epoch go on."""

    def end(self, epoch: Epoch, reason: str) -> None:
        """End an ownership."""


class Opening:
    """Asks the brokers what they know of a partition, and has its owner open it by that.

    Invariants:
        * Nothing is opened under another membership than the one that the answers came in.
        * A position that was not committed is committed before the first record is handed out.
    """

    def __init__(self, owner: Owner, committer: Committer, limits: Limits) -> None:
        """Make an opening for the epochs of *owner*."""
        self._told: set[tuple[TopicPartition, Committed | None]] = set()
        """Texts of others that were spoken of: a position that is looked up again and again is told once."""
        self._opened: set[TopicPartition] = set()
        """What was ours in this process: the group has had a position on it, whatever the brokers have kept of that."""
        self._marks: dict[str, CommitMetadata] = {}
        """What the first commit that was seen of each topic carried."""
        self._owner = owner
        self._committer = committer
        self._limits = limits

    async def settle(self, partitions: frozenset[TopicPartition], membership: Membership) -> dict[TopicPartition, str]:
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
        unsettled = [topic_partition for topic_partition in sorted(partitions) if not self.is_open(topic_partition)]
        if not unsettled:
            return {}
        client = self._owner.client
        with anyio.fail_after(self._limits.commit_timeout):
            committed = await client.committed(unsettled)
        with anyio.fail_after(self._limits.commit_timeout):
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
            self._owner.ends[topic_partition] = min(self._owner.ends.get(topic_partition, log.end), log.end)
            fetcher = self._owner.fetchers.get(topic_partition)
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
                raise LeasedError(self._limits.group_id, topic_partition, *noted.lease)
            if (noted.foreign is not None or noted.ignored) and (topic_partition, ours) not in self._told:
                self._told.add((topic_partition, ours))
                why = "; ".join(noted.ignored) or "another program wrote it"
                message = (
                    "the text that was committed with offset %d of %s is not used, and the next commit replaces it: %s"
                )
                offset = ours.offset if ours else -1
                fields = partition_fields("note_unused", topic_partition, offset=offset, why=why)
                logger.warning(message, offset, topic_partition, why, extra=fields)

    def is_open(self, topic_partition: TopicPartition) -> bool:
        """Whether nothing has to be looked into before records of a partition are handed out."""
        fetcher = self._owner.fetchers.get(topic_partition)
        if fetcher is None:
            return False
        # What is drained for a seek is ours, and looked into when it is drained.
        return (fetcher.epoch.is_open and fetcher.epoch.outside_log is None) or self._owner.seeks.drains(fetcher.epoch)

    def _continue(self, fetcher: Fetcher, committed: Committed | None, log: LogRange, now: Membership) -> bool:
        epoch = fetcher.epoch
        start = self._owner.seeks.start_of(epoch.topic_partition)
        reason: str | None
        if start is not None:
            reason = f"the application asked to go on at offset {start}"
        elif epoch.is_open and epoch.outside_log is not None:
            reason = self._pass_over(fetcher, epoch.outside_log, log)
        else:
            evidence = Evidence(*now, committed.offset if committed else None, log.start, log.end)
            reason = reason_to_end(self._owner.claim_of(epoch.topic_partition), evidence)
        if reason is not None:
            self._owner.end(epoch, reason)
            return False
        self._owner.open(epoch, now)
        return True

    def _pass_over(self, fetcher: Fetcher, position: int, log: LogRange) -> str | None:
        """Pass over what retention has deleted unread, a hole like any other; or say why the epoch ends."""
        topic_partition = fetcher.epoch.topic_partition
        if position >= log.start or self._limits.auto_offset_reset == "error":
            return str(OffsetOutOfRangeError(topic_partition, position))
        message = "retention has deleted offsets %d to %d of %s before they were read; going on at %d"
        fields = partition_fields("passed_over", topic_partition, offset=position, position=log.start)
        logger.warning(message, position, log.start - 1, topic_partition, log.start, extra=fields)
        fetcher.accept(FetchedBatch(topic_partition, (), (), log.start))
        self._owner.client.seek(topic_partition, log.start)
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
        with anyio.fail_after(self._limits.commit_timeout):
            numbers = {topic: len(await self._owner.client.partitions(topic)) for topic in topics}
        unknown = dict.fromkeys(name.topic for name in partitions if committed[name] is None)
        noted = {topic: await self._noted(topic, numbers[topic]) for topic in unknown}
        if self._owner.client.membership() != membership:
            return [], []
        now = time.time()
        found: list[Epoch] = []
        resolved: list[Epoch] = []
        for name in partitions:
            knows = committed[name] is None and (
                name in self._opened or knows_topic(noted[name.topic], name.partition, membership.generation, now)
            )
            origin = self._origin(name, committed[name], ranges[name], group_knows_topic=knows)
            epoch = self._owner.begin(name, origin.offset)
            if committed[name] is None:
                epoch.mark = first_mark(membership.generation, numbers[name.topic], now)
            else:
                epoch.mark = kept_mark(texts[name], now)
                if not origin.resolved:
                    epoch.inherited = _believable(texts[name].finished, name, ranges[name])
            self._acknowledge(epoch, committed[name])
            (resolved if origin.resolved else found).append(epoch)
        restored = await self._restore([*found, *resolved], numbers, membership.generation)
        if self._owner.client.membership() != membership:
            return [], []
        for epoch in found:
            if restored[epoch] is True:
                epoch.acknowledged = None  # it is committed once more: that shows whose the partition is
                resolved.append(epoch)
            elif restored[epoch] is False:
                self._owner.open(epoch, membership)
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
        asked = _within(self._owner.seeks.start_of(topic_partition), log)
        origin = asked or origin_of(offset, log, self._limits.auto_offset_reset, group_knows_topic=group_knows_topic)
        if origin is None:
            lost = OffsetOutOfRangeError(topic_partition, ours.offset) if ours else None
            raise lost or NoOffsetError(self._limits.group_id, topic_partition)
        if origin.resolved and ours is not None and asked is None:
            message = "committed offset %d of %s is outside its log; going on at %d"
            fields = partition_fields("out_of_range", topic_partition, offset=ours.offset, position=origin.offset)
            logger.warning(message, ours.offset, topic_partition, origin.offset, extra=fields)
        return origin

    def _acknowledge(self, epoch: Epoch, ours: Committed | None) -> None:
        """Take note of what is committed. What was asked for is committed although the offset may be the same."""
        asked = self._owner.seeks.start_of(epoch.topic_partition)
        epoch.acknowledged = ours.offset if ours and asked is None else None  # the text with it is another

    async def _restore(
        self, epochs: Collection[Epoch], numbers: Mapping[str, int], generation: int
    ) -> dict[Epoch, bool | TransportError | TimeoutError]:
        """Find out what of new epochs is kept elsewhere, before a record of them is handed out.

        Returns:
            Whether something is kept of an epoch that is of a later owner, or why that cannot be found out now.
        """
        feeds = {epoch: self._owner.fetchers[epoch.topic_partition].feed for epoch in epochs}
        found = await asyncio.gather(
            *(feed.restore(epoch, numbers[epoch.topic_partition.topic], generation) for epoch, feed in feeds.items()),
            return_exceptions=True,
        )
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, TransportError | TimeoutError):
                raise error
        return dict(zip(feeds, found, strict=True))  # type: ignore[arg-type]

    def opened(self, epoch: Epoch) -> None:
        """An ownership goes on."""
        self._opened.add(epoch.topic_partition)
        self._marks.setdefault(epoch.topic_partition.topic, epoch.mark)

    async def _noted(self, topic: str, partitions: int) -> list[CommitMetadata]:
        """What the group's commits on a topic carry, of all partitions, and what the first that we saw did."""
        with anyio.fail_after(self._limits.commit_timeout):
            commits = await self._owner.client.committed(
                [TopicPartition(topic, number) for number in range(partitions)]
            )
        texts = await _read({one: found for one, found in commits.items() if found is not None})
        noted = list(texts.values())
        if topic in self._marks:
            noted.append(self._marks[topic])  # the brokers forget the commits of a topic that is deleted
        return noted

    async def _open_resolved(self, epochs: list[Epoch], membership: Membership) -> None:
        """Commit the positions that were found for the group, or are in doubt, and only then hand out records."""
        for epoch in epochs:
            self._committer.own(epoch)
        acknowledged = await self._committer.flush(epochs, self._limits.commit_timeout)
        if self._owner.client.membership() != membership:
            return
        if not acknowledged:
            for epoch in epochs:
                self._owner.end(epoch, "its start position could not be committed")
            raise TransportError(f"where the group begins could not be committed: {self._committer.trouble}")
        for epoch in epochs:
            self._owner.fetchers[epoch.topic_partition].feed.believe(epoch)
            self._owner.open(epoch, membership)


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
