"""The backfill transport: reads ranges of offsets once, without a group and without commits."""

from collections.abc import Collection, Mapping, Sequence

from aioshard.errors import DataLossError, OffsetOutOfRangeError
from aioshard.kafka.aiokafka.transport import AiokafkaTransport
from aioshard.kafka.groupless import Groupless
from aioshard.ports import AllowanceOf, Committed, Fault, FetchedBatch, GroupListener, LogRange, Oversized
from aioshard.records import PartitionInfo, TopicPartition
from aioshard.settings import Settings


class RangeTransport(Groupless, AiokafkaTransport):
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
            SettingsError: TLS and SASL settings cannot work.
        """
        AiokafkaTransport.__init__(self, settings, "")
        Groupless.__init__(
            self, "range", {partition: Committed(bounds.start, "") for partition, bounds in ranges.items()}
        )
        self._options |= {"group_id": None, "group_instance_id": None}
        self._ranges = dict(ranges)
        self._finished = {partition: frozenset(offsets) for partition, offsets in (finished or {}).items() if offsets}

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:  # noqa: ARG002
        """See `Transport.start`; reads the ranges, regardless of *topics* and *pattern*."""
        self._topics = await self.topics()
        internals = await self._connect()
        internals.keep_fetched_bytes()
        internals.consumer.assign(list(self._ranges))
        self._buffer.begin(internals, internals.assignment())
        self._watch_tasks(internals)
        listener.assigned(list(self._ranges), self.membership())

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`.

        Raises:
            DataLossError: Retention has deleted records of a range before they were read.
        """
        return [self._within(item) for item in await super().poll(allowance, timeout)]

    def _within(self, item: FetchedBatch | Fault | Oversized) -> FetchedBatch | Fault | Oversized:
        """Trim a batch to its range, without finished offsets; pause the partition at the end of the range."""
        topic_partition = item.topic_partition
        if isinstance(item, Fault) and isinstance(item.error, OffsetOutOfRangeError):
            bounds = self._ranges[topic_partition]
            lost = f"{topic_partition}: from offset {item.error.position} on, of {bounds.start} to {bounds.end - 1}"
            raise DataLossError([lost], "Make a new plan from the remaining offsets")
        if not isinstance(item, FetchedBatch):
            return item
        records, sizes, end = item.records, item.sizes, self._ranges[topic_partition].end
        if item.next_offset >= end:
            self._buffer.pause([topic_partition])
            kept = sum(record.offset < end for record in records)
            records, sizes = records[:kept], sizes[:kept]
        if (finished := self._finished.get(topic_partition)) is not None:
            unfinished = [index for index, record in enumerate(records) if record.offset not in finished]
            records, sizes = [records[index] for index in unfinished], [sizes[index] for index in unfinished]
        next_offset = min(item.next_offset, end)
        return FetchedBatch(topic_partition, records, sizes, next_offset, undecodable=item.undecodable)

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        position = super().position(topic_partition)
        return None if position is None else min(position, self._ranges[topic_partition].end)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`: the end of the range."""
        bounds = self._ranges.get(topic_partition)
        return None if bounds is None else bounds.end

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`; a partition stays paused once its range is read."""
        super().resume(
            [partition for partition in partitions if (self.position(partition) or 0) < self._ranges[partition].end]
        )

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`: the ranges themselves."""
        return {partition: self._ranges[partition] for partition in partitions}

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        """See `Transport.partitions`."""
        return {name.partition: PartitionInfo(name.partition) for name in self._ranges if name.topic == topic}

    async def topics(self) -> frozenset[str]:
        """See `Transport.topics`: the topics of the ranges."""
        return frozenset(topic_partition.topic for topic_partition in self._ranges)
