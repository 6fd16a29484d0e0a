"""The `SideTopics` port on the in-memory broker."""

import asyncio
from collections.abc import Collection, Sequence

from aioshard.errors import ClientLostError, SideTopicError, TransportError
from aioshard.records import Record, TopicPartition
from aioshard.testing.broker import InMemoryBroker
from aioshard.testing.log import PartitionLog

__all__ = ["InMemorySideTopics"]


class InMemorySideTopics:
    """Reads an `InMemoryBroker` outside of any group; implements `aioshard.ports.SideTopics`.

    Every topic there counts as compacted, and is compacted when a test calls `broker.compact`. Errors set with
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
        self._changed = asyncio.Event()
        self._closed = False
        self._unwatch = broker.watch(self._changed.set)

    async def ensure(self, topic: str, partitions: int) -> None:
        """See `SideTopics.ensure`; here an existing topic is rejected only if it has too few partitions."""
        await self._ask()
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
        self._changed.set()

    async def poll(self, timeout: float) -> Sequence[Record]:
        """See `SideTopics.poll`.

        Raises:
            ClientLostError: The reader is closed.
            ConnectError: Nothing arrived within *timeout* seconds, and the broker is not available.
            TransportError: A partition does not exist, or the error set with `fail_fetches`.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            self._check_open()
            self._changed.clear()
            if self._broker.available:
                before = dict(self._positions)
                found, error = self._collect()
                if found or self._positions != before:
                    return found
                if error is not None:
                    raise error
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                self._broker.check_available()
                return []

    def _collect(self) -> tuple[list[Record], TransportError | None]:
        found: list[Record] = []
        failure: TransportError | None = None
        for topic_partition, position in self._positions.items():
            try:
                records, following = self._read(topic_partition, position)
            except TransportError as error:
                failure = failure or error
            else:
                found += records
                self._positions[topic_partition] = following
        return found, failure

    def _read(self, topic_partition: TopicPartition, position: int) -> tuple[list[Record], int]:
        """Return the records from a position on, and the position after them."""
        fault = self._broker.fault(topic_partition)
        if fault is not None:
            raise fault
        log = self._log(topic_partition)
        records: list[Record] = []
        for record in log.read(max(position, log.start), log.stable_end):
            if len(records) == self._max_records:
                return records, records[-1].offset + 1
            records.append(record)
        return records, max(position, log.stable_end)

    def position(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.position`."""
        return self._positions.get(topic_partition, 0)

    async def end(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.end`.

        Raises:
            ConnectError: The broker is not available.
            TransportError: There is no such partition.
        """
        await self._ask()
        return self._log(topic_partition).stable_end

    async def read(self, topic_partition: TopicPartition, offset: int) -> Sequence[Record]:
        """See `SideTopics.read`.

        Raises:
            ConnectError: The broker is not available.
            TransportError: There is no such partition, or the error set with `fail_fetches`.
        """
        await self._ask()
        return self._read(topic_partition, offset)[0]

    async def close(self) -> None:
        """See `SideTopics.close`."""
        self._closed = True
        self._unwatch()
        self._changed.set()

    async def _ask(self) -> None:
        """Let other tasks run, as a network would; raise if closed or the broker is not available."""
        await asyncio.sleep(0)
        self._check_open()
        self._broker.check_available()

    def _log(self, topic_partition: TopicPartition) -> PartitionLog:
        try:
            self._broker.check_partition(*topic_partition)
        except LookupError as missing:
            raise TransportError(f"{topic_partition} cannot be read: {missing.args[0]}") from missing
        return self._broker.log(*topic_partition)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientLostError("the reader of side topics is closed")
