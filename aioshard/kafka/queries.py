"""Questions of a client about logs, topics and committed offsets; none of them needs a member."""

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from typing import Final, TypeVar

from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.errors import UNSTABLE_OFFSET, named, request_error
from aioshard.kafka.lifetime import Lifetime
from aioshard.kafka.offsets import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    GroupOffsets,
    epoch_ends,
    log_ranges,
    offsets_at,
)
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.epochs import UNKNOWN
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.metadata import PartitionMetadata
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.kafka.wire.responses import CommittedOffset, EpochEnd
from aioshard.ports import Committed, LogRange
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings

T = TypeVar("T")

_RETRY_BACKOFF: Final = 0.1
"""Seconds between two attempts of a query."""
_NO_TOPIC: Final = frozenset({3, 17})
"""Error codes for topics that do not exist and for invalid topic names."""


class Queries:
    """Answers the queries of `aioshard.ports.Transport`, and remembers the leader epochs of the commits that it reads.

    A query raises `ClientLostError` if the client was not started, or has left its group.
    """

    def __init__(
        self, cluster: Cluster, offsets: GroupOffsets, settings: Settings, group_id: str, lifetime: Lifetime
    ) -> None:
        """Ask nothing yet."""
        self.isolation = READ_COMMITTED if settings.isolation_level == "read_committed" else READ_UNCOMMITTED
        """How far a log counts as readable, as in requests."""
        self._cluster = cluster
        self._offsets = offsets
        self._settings = settings
        self._timeout = settings.commit_timeout
        self._group_id = group_id
        self._lifetime = lifetime
        self._commits: dict[TopicPartition, CommittedOffset] = {}
        """The latest known commits, or where we stopped reading since, for the leader epochs in them."""

    def epoch_of(self, topic_partition: TopicPartition, offset: int) -> int | None:
        """Return the leader epoch of the record before a committed offset; None if we know no commit of that offset."""
        committed = self._commits.get(topic_partition)
        return None if committed is None or committed.offset != offset else committed.epoch

    def remember(self, topic_partition: TopicPartition, offset: int, epoch: int) -> None:
        """Note where we stopped reading a partition, which may be beyond the commit."""
        self._commits[topic_partition] = CommittedOffset(offset, epoch, "")

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """See `Transport.committed`. Has no deadline; retries transient errors."""
        while partitions:
            self._lifetime.check()
            try:
                commits = await self._offsets.committed(partitions)
            except WireError as error:
                cause = error.cause
                if not cause.retriable or cause.code == UNSTABLE_OFFSET:
                    what = f"return the committed offsets of {named(partitions)}"
                    raise request_error(cause, what, self._group_id) from error
                await asyncio.sleep(_RETRY_BACKOFF)
            else:
                self._commits |= commits
                return {name: _committed(commits.get(name)) for name in partitions}
        return {}

    async def truncations(self, commits: Mapping[TopicPartition, Committed]) -> Mapping[TopicPartition, int | None]:
        """See `Transport.truncations`. Takes at most two thirds of `commit_timeout`.

        The newest leader epoch that the group had read is stored beside the committed offset (KIP-320).
        """
        self._lifetime.check()
        epochs: dict[TopicPartition, int] = {}
        for name, committed in commits.items():
            epoch = self.epoch_of(name, committed.offset)
            if epoch is not None and epoch != UNKNOWN:
                epochs[name] = epoch
        found: dict[TopicPartition, int | None] = dict.fromkeys(commits.keys() - epochs.keys())
        if not epochs:
            return found
        ends = await self._answered(
            epoch_ends(self._cluster, epochs, self._timeout / 3),
            f"return the ends of leader epochs of {named(epochs)}",
        )
        for name, end in ends.items():
            found[name] = self._parting(name, epochs[name], end)
        return found

    def _parting(self, topic_partition: TopicPartition, epoch: int, end: EpochEnd | None) -> int | None:
        """Return where a log parts from the one that was read up to an epoch; None if nobody can tell."""
        # 1. The leader has no history of the epoch, or answers about another one.
        if end is None or end.epoch > epoch:
            return None
        # 2. It is another log, and all of it is new to the group.
        if not self._was_elected_since(topic_partition, epoch):
            return None
        # 3. It is the same log up to the end of the epoch.
        return end.end

    def _was_elected_since(self, topic_partition: TopicPartition, epoch: int) -> bool:
        """Return whether a leader was elected after an epoch, as far as brokers that have accepted our epoch know.

        Only an election can lose records. Without one, a log that is too short is another one: its topic was created
        again, and its first records are new to the group.
        """
        leader = self._cluster.metadata.leader(topic_partition)
        return leader is None or leader.epoch == UNKNOWN or leader.epoch > epoch

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`. Takes at most two thirds of `commit_timeout`."""
        self._lifetime.check()
        return await self._answered(
            log_ranges(self._cluster, partitions, self.isolation, self._timeout / 3),
            f"return the bounds of {named(partitions)}",
        )

    async def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        """See `Transport.partitions`. Looks up an unknown topic once, without creating it."""
        self._lifetime.check()
        known = self._cluster.metadata.partitions(topic)
        if known:
            return {number: _partition_info(number, partition) for number, partition in known.items()}
        what = f"return the partitions of topic {topic!r}"
        described = await self._answered(self._cluster.describe([topic]), what)
        error = described.errors.get(topic)
        if error is None:
            return described.topics[topic].partitions
        if error.code in _NO_TOPIC:
            return {}
        raise request_error(error.cause, what, self._group_id) from error

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`."""
        self._lifetime.check()
        return await self._answered(self._cluster.list_topics(), "list the topics")

    async def creates_topics(self) -> bool | None:
        """See `Transport.creates_topics`; uses a separate connection."""
        async with KafkaAdmin(self._settings, patience=CONNECT_TIMEOUT) as admin:
            return await admin.creates_topics()

    async def offset_at(self, topic_partition: TopicPartition, timestamp: float) -> int | None:
        """See `Transport.offset_at`. Has no deadline; retries transient errors."""
        times = {topic_partition: round(timestamp * 1000)}
        what = f"return the offsets of {topic_partition} by time"
        while True:
            self._lifetime.check()
            try:
                offsets = await offsets_at(self._cluster, times, self.isolation)
            except WireError as error:
                if not error.retriable:
                    raise request_error(error.cause, what, self._group_id) from error
                offsets = {}
            if topic_partition in offsets:
                offset = offsets[topic_partition]
                return None if offset < 0 else offset
            await asyncio.sleep(_RETRY_BACKOFF)

    async def _answered(self, request: Awaitable[T], what: str) -> T:
        try:
            return await request
        except WireError as error:
            raise request_error(error.cause, what, self._group_id) from error


def _committed(stored: CommittedOffset | None) -> Committed | None:
    return None if stored is None else Committed(stored.offset, stored.metadata)


def _partition_info(number: int, partition: PartitionMetadata) -> PartitionInfo:
    return PartitionInfo(number, partition.leader, partition.replicas, partition.in_sync)
