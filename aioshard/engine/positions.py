"""Where partitions begin: what the brokers know of them, and the position that follows from it."""

import asyncio
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import Run, below
from aioshard.core.ownership import Origin, knows_topic, origin_of
from aioshard.engine.current_client import CurrentClient
from aioshard.engine.log_fields import partition_fields
from aioshard.engine.partition import Partition
from aioshard.errors import AuthorizationError, LogTruncatedError, NoOffsetError, OffsetOutOfRangeError
from aioshard.log_fields import get_logger
from aioshard.ports import Committed, LogRange
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

logger = get_logger("aioshard.engine.positions")

T = TypeVar("T")


class BrokerView(NamedTuple):
    """A partition as the brokers see it."""

    committed: Committed | None
    metadata: CommitMetadata
    """Parsed from the commit; empty without one."""
    log: LogRange
    parts_at: int | None = None
    """Where the log parts from the one that the group has read, if it does; None if nobody can tell."""

    @property
    def lost_from(self) -> int | None:
        """The first offset before the committed one that the cluster has lost; None if it has lost nothing there."""
        if self.parts_at is None or self.committed is None or self.parts_at >= self.committed.offset:
            return None
        return self.parts_at


class TopicView(NamedTuple):
    """A topic as the brokers see it."""

    partitions: int
    """How many it has."""
    markers: Collection[FirstCommit | None]
    """First-commit markers of the group's commits on it; looked up only if one of our partitions has no commit."""


class Lookup(NamedTuple):
    """The answers of the brokers about partitions; those whose leader is away are left out."""

    views: Mapping[TopicPartition, BrokerView]
    refused: Mapping[str, AuthorizationError]
    """Topics that this user may not see."""


class PositionResolver:
    """Looks up partitions, and decides where their epochs begin. Owned by the rebalance."""

    def __init__(self, group_id: str, settings: "Settings", client: CurrentClient) -> None:
        """Make a resolver; it remembers what this process has seen, also when the client is replaced.

        Args:
            group_id: The consumer group.
            settings: Timeouts, and the policy for a group without a commit.
            client: The member of the group.
        """
        self._group_id = group_id
        self._settings = settings
        self._client = client
        self.lost_offsets = 0
        """Offsets that the group had read and that the cluster has lost."""
        self._parted: dict[TopicPartition, int] = {}
        """Where the logs of partitions part that have not opened since; each loss is noted once."""
        self._opened: set[TopicPartition] = set()
        """Partitions that this process opened: the group has had a position there, even if the brokers dropped it."""
        self._first_commits: dict[str, FirstCommit | None] = {}
        """Marker of the first commit seen on each topic; brokers forget the commits of a deleted topic."""

    def remember(self, partition: Partition) -> None:
        """Remember a partition that opens: from now on the group knows it and its topic."""
        name = partition.topic_partition
        self._parted.pop(name, None)
        self._opened.add(name)
        self._first_commits.setdefault(name.topic, partition.commits.first_commit)

    # Lookups ----------------------------------------------------------------------------

    async def look_up(self, names: Sequence[TopicPartition]) -> Lookup:
        """Look up partitions. A topic that this user may not see does not hold back the others.

        The group may have changed meanwhile: check again anything that you know from the brokers.

        Raises:
            AuthorizationError: This user may not see any of them.
            TransportError: A lookup failed.
            TimeoutError: The brokers did not answer.
        """
        try:
            return Lookup(await self._views(names), {})
        except AuthorizationError:
            topics = _topics(names)
            if len(topics) == 1:
                raise
        views: dict[TopicPartition, BrokerView] = {}
        refused: dict[str, AuthorizationError] = {}
        for topic in topics:
            try:
                views |= await self._views([name for name in names if name.topic == topic])
            except AuthorizationError as error:
                refused[topic] = error
        if len(refused) == len(topics):
            raise refused[topics[0]]
        return Lookup(views, refused)

    async def _views(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, BrokerView]:
        committed = await self._within_timeout(self._client.get().committed(names))
        commits = {name: stored for name, stored in committed.items() if stored is not None}
        parting = await self._within_timeout(self._client.get().truncations(commits)) if commits else {}
        logs = await self._within_timeout(self._client.get().log_ranges(names))
        # Parsing long metadata takes a while through no fault of the brokers, so it has no deadline.
        metadata = await _read(committed)
        return {
            name: BrokerView(committed[name], metadata[name], logs[name], parting.get(name))
            for name in names
            if name in logs and (name in parting or name not in commits)
        }

    async def look_up_topics(self, views: Mapping[TopicPartition, BrokerView]) -> dict[str, TopicView]:
        """Look up the topics of partitions whose epochs begin.

        Raises:
            TransportError: A lookup failed.
            TimeoutError: The brokers did not answer.
        """
        sizes: dict[str, int] = {}
        for topic in _topics(views):
            sizes[topic] = await self.partition_count(topic)
        markers: dict[str, list[FirstCommit | None]] = {}
        for topic in _topics(name for name, view in views.items() if view.committed is None):
            markers[topic] = await self._markers_on(topic, sizes[topic])
        return {topic: TopicView(size, markers.get(topic, ())) for topic, size in sizes.items()}

    async def partition_count(self, topic: str) -> int:
        """Look up the number of partitions of a topic; 0 if it does not exist. Raises as `look_up_topics`."""
        return len(await self._within_timeout(self._client.get().partitions(topic)))

    async def _markers_on(self, topic: str, partitions: int) -> list[FirstCommit | None]:
        """First-commit markers of the group's commits on a topic, and of the first commit seen there."""
        names = [TopicPartition(topic, number) for number in range(partitions)]
        commits = await self._within_timeout(self._client.get().committed(names))
        metadata = await _read({name: committed for name, committed in commits.items() if committed is not None})
        markers = [text.first for text in metadata.values()]
        if topic in self._first_commits:
            markers.append(self._first_commits[topic])
        return markers

    async def _within_timeout(self, request: Awaitable[T]) -> T:
        with anyio.fail_after(self._settings.commit_timeout):
            return await request

    # Decisions --------------------------------------------------------------------------

    def origin(self, name: TopicPartition, view: BrokerView, topic: TopicView, seek: int | None) -> Origin:
        """Decide where the epoch of a partition begins.

        Args:
            name: Topic and partition.
            view: The partition as the brokers see it.
            topic: Its topic as the brokers see it.
            seek: The position that the application requested; None without one.

        Raises:
            NoOffsetError: There is neither a committed offset nor a policy that decides it.
            OffsetOutOfRangeError: The committed offset is not in the log, or the log has lost records before it, and
                the policy is "error".
        """
        log = view.log
        # 1. The application requested a position; retention may have passed it.
        if seek is not None:
            return Origin(min(max(seek, log.start), log.end), resolved=True)
        offset = None if view.committed is None else view.committed.offset
        # 2. The cluster has lost records that the group has read.
        if view.lost_from is not None and offset is not None:
            return self._after_loss(LogTruncatedError(name, view.lost_from, offset), log)
        # 3. The committed offset, or the policy decides.
        origin = origin_of(
            offset, log[:2], self._settings.auto_offset_reset, group_knows_topic=self._knows(name, view, topic)
        )
        # 4. Neither does.
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

    def note_loss(self, error: LogTruncatedError) -> None:
        """Log and count the offsets that the cluster has lost, unless that was done already."""
        name = error.topic_partition
        if self._parted.get(name) == error.resumes_at:
            return
        self._parted[name] = error.resumes_at
        self.lost_offsets += error.position - error.resumes_at
        fields = partition_fields("records_lost", name, offset=error.position, position=error.resumes_at)
        logger.warning("%s; resuming at offset %d", error, error.resumes_at, extra=fields)

    def _after_loss(self, error: LogTruncatedError, log: LogRange) -> Origin:
        """Begin where the log parts from what the group has read: the records from there on are new to it.

        Raises:
            LogTruncatedError: The policy is "error".
        """
        if self._settings.auto_offset_reset == "error":
            raise error
        self.note_loss(error)
        return Origin(max(error.resumes_at, log.start), resolved=True)

    def _knows(self, name: TopicPartition, view: BrokerView, topic: TopicView) -> bool:
        """Whether the group had a position on the topic before; asked only about a partition without a commit."""
        if view.committed is not None:
            return False
        return name in self._opened or knows_topic(topic.markers, name.partition, time.time())


def first_commit_of(view: BrokerView, topic: TopicView) -> FirstCommit | None:
    """Return the first-commit marker that the commits of a new epoch carry."""
    now = time.time()
    # 1. Its first commit is ours.
    if view.committed is None:
        return FirstCommit(topic.partitions, int(now))
    # 2. The commit carries a marker that may still matter.
    first = view.metadata.first
    return first if first is not None and first.is_recent(now) else None


def finished_of(name: TopicPartition, view: BrokerView, *, resolved: bool) -> tuple[Run, ...] | None:
    """Return the finished records that a commit lists, which do not run again; None if the text is not used.

    Args:
        name: Topic and partition.
        view: The partition as the brokers see it.
        resolved: Whether its epoch begins elsewhere than at the committed offset.
    """
    metadata = view.metadata
    # 1. Without a commit there is no text.
    if view.committed is None:
        return None
    if metadata.foreign is not None or metadata.ignored:
        _warn_unused(name, view.committed.offset, why="; ".join(metadata.ignored) or "another program wrote it")
    # 2. It says nothing about other offsets.
    if resolved:
        return None
    # 3. It belongs to another log: the topic was created again, or its log truncated.
    finished = metadata.finished
    end = view.log.end
    if finished and finished[-1].end > end:
        _warn_unused(name, finished[-1].end, why=f"it belongs to another log: this one ends at offset {end}")
        return None
    # 4. The cluster has lost some of them, and other records may have their offsets.
    parts_at = view.parts_at
    if finished and parts_at is not None and finished[-1].end > parts_at:
        _warn_unused(name, parts_at, why=f"the cluster has lost the records from offset {parts_at} on")
        return below(finished, parts_at)
    return finished


async def _read(commits: Mapping[TopicPartition, Committed | None]) -> dict[TopicPartition, CommitMetadata]:
    """Parse the metadata of commits; let other tasks run meanwhile, as long texts take milliseconds."""
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
        extra=partition_fields("commit_metadata_unused", name, offset=offset, why=why),
    )
