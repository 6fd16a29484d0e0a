"""The `SideTopics` port on the in-memory broker."""

import asyncio
import itertools
from collections.abc import Collection, Sequence

from aioshard.errors import ClientLostError, SideTopicError, TransportError
from aioshard.kafka.errors import undecided
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.ports import record_size
from aioshard.records import Record, TopicPartition


class InMemorySideTopics:
    """Reads an `InMemoryBroker` outside of any group; implements `aioshard.ports.SideTopics`.

    Every topic there counts as compacted, and is compacted when a test compacts its logs. Errors set with
    `fail_fetches` apply to `poll` and `read`.

    Invariants:
        * Records are returned and the position is moved in one step, so a cancelled poll loses nothing.

    Example:
        >>> import asyncio
        >>> broker = InMemoryBroker(partitions=1)
        >>> _ = broker.publish("parked", b"later", key=b"orders/0/7")
        >>> async def read() -> list[bytes | None]:
        ...     side_topics = InMemorySideTopics(broker)
        ...     side_topics.watch([TopicPartition("parked", 0)])
        ...     return [record.value for record in await side_topics.poll(1.0)]
        >>> asyncio.run(read())
        [b'later']
    """

    def __init__(self, broker: InMemoryBroker, *, max_records: int = 500) -> None:
        """Create a reader that watches nothing.

        Args:
            broker: Broker with the topics.
            max_records: Maximum number of records of one partition in a poll, and of a read.
        """
        self._broker = broker
        self._max_records = max_records
        self._positions: dict[TopicPartition, int] = {}
        self._closed = False

    async def ensure(self, topic: str, partitions: int) -> None:
        """See `SideTopics.ensure`; here an existing topic is rejected only if it has too few partitions."""
        await self._request()
        count = self._broker.topics().get(topic)
        if count is None:
            self._broker.create_topic(topic, partitions)
        elif count < partitions:
            raise SideTopicError(
                f"topic {topic!r} has {count} partitions and needs {partitions}, as many as the topic whose records it "
                f"keeps: add {partitions - count}"
            )

    def watch(self, partitions: Collection[TopicPartition]) -> None:
        """See `SideTopics.watch`."""
        self._positions = {partition: self._positions.get(partition, 0) for partition in partitions}
        self._broker.notify()

    async def poll(self, timeout: float) -> Sequence[Record]:
        """See `SideTopics.poll`.

        Raises:
            ClientLostError: The reader is closed.
            ConnectError: Nothing arrived within *timeout* seconds, and the broker is not available.
            TransportError: A partition does not exist, or the error set with `fail_fetches`.
        """
        records: list[Record] = []
        try:
            async with asyncio.timeout(timeout):
                await self._broker.until(lambda: self._collect(records))
        except TimeoutError:
            self._broker.check_available()
        return records

    def _collect(self, records: list[Record]) -> bool:
        """Add the readable records to *records*; return whether a position has moved."""
        self._check_open()
        moved, failure = False, None
        for topic_partition, position in self._positions.items() if self._broker.available else ():
            try:
                found, following = self._read(topic_partition, position)
            except TransportError as error:
                failure = error
                continue
            records += found
            moved = moved or following != position
            self._positions[topic_partition] = following
        if failure is not None and not moved:
            raise failure
        return moved

    def _read(self, topic_partition: TopicPartition, position: int) -> tuple[list[Record], int]:
        """Return the records from a position on, and the position after them."""
        if (fault := self._broker.fetch_faults.get(topic_partition)) is not None:
            raise fault
        log = self._broker.existing_log(topic_partition)
        records = log.read(position, log.stable_end)
        if len(records) > self._max_records:
            return records[: self._max_records], records[self._max_records].offset
        return records, max(position, log.stable_end)

    def position(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.position`."""
        return self._positions.get(topic_partition, 0)

    async def end(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.end`.

        Raises:
            ConnectError: The broker is not available.
            TransportError: The partition does not exist, or a transaction is open.
        """
        await self._request()
        log = self._broker.existing_log(topic_partition)
        if log.stable_end < log.end:
            raise undecided(topic_partition)
        return log.end

    async def read(
        self, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        """See `SideTopics.read`.

        Raises:
            ConnectError: The broker is not available.
            TransportError: The partition does not exist, or the error set with `fail_fetches`.
        """
        await self._request()
        records = self._read(topic_partition, offset)[0]
        if max_bytes is None:
            return records
        sizes = itertools.accumulate(record_size(record.key, record.value, record.headers) for record in records)
        return records[: max(sum(size <= max_bytes for size in sizes), 1)]

    async def close(self) -> None:
        """See `SideTopics.close`."""
        self._closed = True
        self._broker.notify()

    async def _request(self) -> None:
        """Let other tasks run, as a network would; raise if closed or the broker is not available."""
        await asyncio.sleep(0)
        self._check_open()
        self._broker.check_available()

    def _check_open(self) -> None:
        if self._closed:
            raise ClientLostError("the reader of side topics is closed")
