"""The backfill transport: reads ranges of offsets once, without a group and without commits."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

import anyio

from aioshard.errors import ClientLostError, DataLossError, LogTruncatedError, OffsetOutOfRangeError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.groupless import Groupless
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT
from aioshard.kafka.wire.start import connect, new_cluster
from aioshard.ports import AllowanceOf, Committed, Fault, FetchedBatch, GroupListener, LogRange, Oversized
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings


class RangeTransport(Groupless):
    """Reads ranges of offsets as if they were whole logs; implements `aioshard.ports.Transport`.

    All partitions are assigned at the start and never revoked. Commits stay in this object: the planner of the ranges
    records their progress. One instance is one life of the client.

    Invariants:
        * `poll` returns no record outside its range and no offset that already counts as finished.
        * If retention has deleted the start of a range, that is an error: records are never skipped silently.
    """

    def __init__(
        self,
        settings: Settings,
        ranges: Mapping[TopicPartition, LogRange],
        finished: Mapping[TopicPartition, Collection[int]] | None = None,
    ) -> None:
        """Check the options; connects to nothing yet.

        Args:
            settings: The brokers, sizes and isolation level.
            ranges: The start (inclusive) and end (exclusive) of each range.
            finished: Offsets to skip, as if the log did not contain them.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        super().__init__("range", {partition: Committed(bounds.start, "") for partition, bounds in ranges.items()})
        new_cluster(settings)
        self._settings = settings
        self._ranges = dict(ranges)
        self._finished = {partition: frozenset(offsets) for partition, offsets in (finished or {}).items() if offsets}
        self._cluster: Cluster | None = None
        self._fetcher: Fetcher | None = None
        self._woken = False
        self._closed = False

    @property
    def last_heartbeat(self) -> float | None:
        """See `Transport.last_heartbeat`: nobody has a session."""
        return None

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if self._cluster is None or self._closed or self._cluster.is_connected:
            return None
        return f"no connection to a broker of {self._settings.bootstrap_servers} is open; the client keeps trying"

    @property
    def missing_topics(self) -> Sequence[str]:
        """See `Transport.missing_topics`."""
        if self._cluster is None or self._closed:
            return ()
        topics = {topic_partition.topic for topic_partition in self._ranges}
        return sorted(topics.difference(self._cluster.metadata.topics))

    @property
    def group_protocol(self) -> None:
        """See `Transport.group_protocol`: nobody joins a group."""

    @property
    def slow_join(self) -> str | None:
        """See `Transport.slow_join`: nobody joins a group."""
        return None

    # Lifecycle ------------------------------------------------------------------------

    async def start(
        self,
        topics: Collection[str],  # noqa: ARG002
        pattern: str | None,  # noqa: ARG002
        listener: GroupListener,
        *,
        needs_all: bool = True,  # noqa: ARG002
    ) -> None:
        """See `Transport.start`; reads the ranges, regardless of *topics* and *pattern*."""
        cluster = await connect(self._settings, await self.topics())
        self._cluster = cluster
        fetcher = Fetcher(
            cluster,
            read_committed=self._settings.isolation_level == "read_committed",
            max_bytes=self._settings.max_buffered_bytes // 2,
            max_wait=self._settings.fetch_max_wait,
        )
        self._fetcher = fetcher
        fetcher.start()
        fetcher.add(self._ranges)
        cluster.when_lost(lambda _: fetcher.readable.set())
        listener.assigned(list(self._ranges), self.membership())

    async def close(self) -> None:
        """See `Transport.close`; takes at most 2 s. If a cancellation cuts this short, everything still ends."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        with anyio.CancelScope(shield=True):
            if self._fetcher is not None:
                await self._fetcher.close()
            if self._cluster is not None:
                await self._cluster.close()

    # Records and positions ------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`. Does not suspend if records are ready.

        Raises:
            DataLossError: Retention has deleted records of a range before they were read.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        while True:
            fetcher = self._running()
            result = fetcher.take(allowance)
            if result.new or self._woken or loop.time() >= deadline:
                return [self._within(fetcher, item) for item in result.new + result.repeated]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await fetcher.readable.wait()

    def _running(self) -> Fetcher:
        """Return the fetcher.

        Raises:
            ClientLostError: It fetches nothing any more.
        """
        if self._closed or self._cluster is None or self._fetcher is None:
            raise ClientLostError(f"the Kafka client {'is closed' if self._closed else 'was not started'}")
        failure = self._cluster.failure or self._fetcher.failure
        if failure is not None:
            text = str(failure) or type(failure).__name__
            raise ClientLostError(f"the Kafka client gave up ({text}); a new client is needed") from failure
        return self._fetcher

    def _within(self, fetcher: Fetcher, item: FetchedBatch | Fault | Oversized) -> FetchedBatch | Fault | Oversized:
        """Trim a batch to its range, without finished offsets; pause the partition at the end of the range."""
        topic_partition = item.topic_partition
        if isinstance(item, Fault) and isinstance(item.error, OffsetOutOfRangeError):
            bounds = self._ranges[topic_partition]
            first = item.error.resumes_at if isinstance(item.error, LogTruncatedError) else item.error.position
            lost = f"{topic_partition}: from offset {first} on, of {bounds.start} to {bounds.end - 1}"
            raise DataLossError([lost], "Make a new plan from the remaining offsets")
        if not isinstance(item, FetchedBatch):
            return item
        records, sizes, end = item.records, item.sizes, self._ranges[topic_partition].end
        if item.next_offset >= end:
            fetcher.pause([topic_partition])
            kept = sum(record.offset < end for record in records)
            records, sizes = records[:kept], sizes[:kept]
        if (finished := self._finished.get(topic_partition)) is not None:
            unfinished = [index for index, record in enumerate(records) if record.offset not in finished]
            records, sizes = [records[index] for index in unfinished], [sizes[index] for index in unfinished]
        next_offset = min(item.next_offset, end)
        return FetchedBatch(topic_partition, records, sizes, next_offset, undecodable=item.undecodable)

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        if self._fetcher is not None:
            self._fetcher.readable.set()

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        position = None if self._fetcher is None else self._fetcher.position(topic_partition)
        return None if position is None else min(position, self._ranges[topic_partition].end)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`: the end of the range."""
        bounds = self._ranges.get(topic_partition)
        return None if bounds is None else bounds.end

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        if self._fetcher is not None:
            self._fetcher.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`; a partition stays paused once its range is read.

        Raises:
            StateError: A partition was not seeked, so it has no position.
        """
        if self._fetcher is not None:
            self._fetcher.resume(
                [partition for partition in partitions if (self.position(partition) or 0) < self._ranges[partition].end]
            )

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        if self._fetcher is not None:
            self._fetcher.seek(topic_partition, offset)

    # Queries --------------------------------------------------------------------------

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`: the ranges themselves."""
        return {partition: self._ranges[partition] for partition in partitions}

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        """See `Transport.partitions`."""
        return {name.partition: PartitionInfo(name.partition) for name in self._ranges if name.topic == topic}

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`: the topics of the ranges."""
        return frozenset(topic_partition.topic for topic_partition in self._ranges)

    async def creates_topics(self) -> bool | None:
        """See `Transport.creates_topics`; uses a separate connection."""
        async with KafkaAdmin(self._settings, patience=CONNECT_TIMEOUT) as admin:
            return await admin.creates_topics()
