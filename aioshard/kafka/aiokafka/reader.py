"""Read a topic once, without a group, from its start to the end that it has when the reader opens."""

import time
from collections.abc import AsyncIterator, Collection, Mapping
from types import TracebackType
from typing import Self

from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED

from aioshard.errors import TransportError
from aioshard.kafka.aiokafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.side_topics import KafkaSideTopics
from aioshard.kafka.errors import named
from aioshard.ports import LogRange
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings

_WAIT = 1.0
_STALLED = 30.0
"""Seconds without progress after which we give up."""


class TopicReader:
    """Reads partitions of a topic concurrently. Owned by one event loop.

    Example:
        ```python
        async with TopicReader(settings, "orders.dlt", partitions) as reader:
            async for records in reader.read():
                ...
        ```
    """

    def __init__(self, settings: Settings, topic: str, partitions: Collection[int]) -> None:
        """Make a reader; connects to nothing yet.

        Args:
            settings: The brokers; `isolation_level` decides whether records of open transactions are read.
            topic: The topic; it must exist.
            partitions: The partitions to read.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self.topic = topic
        self.ranges: dict[int, LogRange] = {}
        """Start and end of each partition when the reader was opened."""
        self._partitions = [TopicPartition(topic, partition) for partition in sorted(partitions)]
        self._settings = settings
        self._committed = settings.isolation_level == "read_committed"
        self._reader = KafkaSideTopics(settings, READ_COMMITTED if self._committed else READ_UNCOMMITTED)

    async def __aenter__(self) -> Self:
        """Look up the start and end of each partition.

        Raises:
            TransportError: No broker answers, or a broker refuses the connection or the topic.
        """
        async with KafkaAdmin(self._settings) as admin:
            bounds = await admin.bounds(self._partitions)
        for topic_partition, (start, stable, end) in bounds.items():
            self.ranges[topic_partition.partition] = LogRange(start, stable if self._committed else end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._reader.close()

    async def read(self, start: Mapping[int, int] | None = None) -> AsyncIterator[list[Record]]:
        """Yield all records in chunks, those of one partition in offset order.

        If retention overtakes us while we read, continue at the new start of the log.

        Args:
            start: Offsets to begin at, for partitions that do not begin at their start.

        Raises:
            TransportError: The records cannot be read.
        """
        ends = {topic_partition: self.ranges[topic_partition.partition].end for topic_partition in self._partitions}
        self._reader.watch(ends)
        for topic_partition in ends:
            number = topic_partition.partition
            self._reader.seek(topic_partition, max(self.ranges[number].start, (start or {}).get(number, 0)))
        moved_at = time.monotonic()
        while unread := [partition for partition, end in ends.items() if self._reader.position(partition) < end]:
            ends = {topic_partition: ends[topic_partition] for topic_partition in unread}
            self._reader.watch(ends)
            before = sum(map(self._reader.position, unread))
            records: list[Record] = []
            try:
                records = [
                    record for record in await self._reader.poll(_WAIT) if record.offset < ends[record.topic_partition]
                ]
            except TransportError as error:
                if not error.retriable:
                    raise
            if records:
                yield records
            if records or sum(map(self._reader.position, unread)) != before:
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _STALLED:
                raise TransportError(
                    f"{named(unread)} could not be read for {_STALLED:g} s: check that the brokers run, and that each "
                    "partition has a leader"
                )
