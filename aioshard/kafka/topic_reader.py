"""Read a topic once, without a group, from its start to the end that it has when the reader opens."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.structs import TopicPartition as KafkaPartition

from aioshard.errors import StateError, TransportError
from aioshard.kafka.answers import IncompleteAnswerError
from aioshard.kafka.connecting import connected
from aioshard.kafka.internals import Internals
from aioshard.kafka.options import consumer_options
from aioshard.kafka.translate import request_error
from aioshard.ports import LogRange
from aioshard.records import Record

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["TopicReader"]

_POLL_MS = 500
_STALLED = 30.0
"""Seconds without progress after which we give up. The consumer itself retries forever."""


class TopicReader:
    """Reads partitions of a topic concurrently. Owned by one event loop.

    Example:
        ```python
        async with TopicReader(settings, "orders.dlt", partitions) as reader:
            async for records in reader.read():
                ...
        ```
    """

    def __init__(self, settings: "Settings", topic: str, partitions: Collection[int]) -> None:
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
        self._partitions = [KafkaPartition(topic, partition) for partition in sorted(partitions)]
        self._settings = settings
        options = consumer_options(settings, "")
        # If retention overtakes us while we read, continue at the new start of the log.
        self._options = options | {"group_id": None, "group_instance_id": None, "auto_offset_reset": "earliest"}
        self._internals: Internals | None = None

    async def __aenter__(self) -> Self:
        """Connect, and record the start and end of each partition.

        Raises:
            TransportError: No broker answers, or a broker refuses the connection or the topic.
        """
        internals = self._internals = await connected(
            self._settings,
            self._options,
            lambda options: Internals(AIOKafkaConsumer(**options), ""),
            begin=Internals.start,
            end=Internals.tear_down,
        )
        try:
            await self._take_note_of_ends(internals)
        except BaseException:
            await internals.tear_down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._running().tear_down()

    def _running(self) -> Internals:
        if self._internals is None:
            raise StateError("the reader was not opened: use it with `async with`")
        return self._internals

    async def _take_note_of_ends(self, internals: Internals) -> None:
        try:
            async with asyncio.timeout(_STALLED):
                # Otherwise the client would look up the unknown topic and wait 0.1 s before it sends the request.
                await internals.client.add_topic(self.topic)
                # In this order, so that no end is older than its start.
                starts = await internals.consumer.beginning_offsets(self._partitions)
                ends = await internals.consumer.end_offsets(self._partitions)
                if missing := set(self._partitions) - (starts.keys() & ends.keys()):
                    raise IncompleteAnswerError(f"{len(missing)} partitions are missing in the answer")
        except (TimeoutError, kafka.KafkaError) as error:
            raise request_error(error, f"the offsets of topic {self.topic!r}", "") from error
        self.ranges = {one.partition: LogRange(starts[one], ends[one]) for one in self._partitions}

    async def read(self, start: Mapping[int, int] | None = None) -> AsyncIterator[list[Record]]:
        """Yield all records in chunks, those of one partition in offset order.

        Args:
            start: Offsets to begin at, for partitions that do not begin at their start.

        Raises:
            TransportError: The records cannot be read.
        """
        begin = {number: max(bounds.start, (start or {}).get(number, 0)) for number, bounds in self.ranges.items()}
        left = {one for one in self._partitions if begin[one.partition] < self.ranges[one.partition].end}
        consumer = self._running().consumer
        consumer.assign(left)
        for one in left:
            consumer.seek(one, begin[one.partition])
        progress = _Progress(begin)
        while left:
            records = await self._poll(consumer)
            for one in sorted(left):
                position = await consumer.position(one)
                progress.note(one.partition, position)
                if position >= self.ranges[one.partition].end:
                    consumer.pause(one)
                    left.remove(one)
            if records:
                yield records
                progress.note_life()
            elif progress.stalled:
                named = ", ".join(f"{one.topic}/{one.partition}" for one in sorted(left))
                raise TransportError(
                    f"{named} could not be read on for {_STALLED:g} s: check that the brokers run, and that each "
                    "partition has a leader"
                )

    async def _poll(self, consumer: AIOKafkaConsumer) -> list[Record]:
        try:
            batches = await consumer.getmany(timeout_ms=_POLL_MS)
        except kafka.KafkaError as error:
            raise request_error(error, f"the records of topic {self.topic!r}", "") from error
        return [
            _record(found)
            for one, batch in batches.items()
            for found in batch
            if found.offset < self.ranges[one.partition].end
        ]


class _Progress:
    """Detects when positions stop moving."""

    def __init__(self, positions: Mapping[int, int]) -> None:
        self._positions = dict(positions)
        self.note_life()

    def note(self, partition: int, position: int) -> None:
        """Record a position."""
        if self._positions.get(partition) != position:
            self._positions[partition] = position
            self.note_life()

    def note_life(self) -> None:
        """Restart the timer."""
        self._since = time.monotonic()

    @property
    def stalled(self) -> bool:
        """Whether no position has moved for too long."""
        return time.monotonic() - self._since > _STALLED


def _record(found: Any) -> Record:
    headers = tuple((name, value) for name, value in found.headers)
    timestamp = -1 if found.timestamp is None else found.timestamp
    return Record(found.topic, found.partition, found.offset, found.key, found.value, headers, timestamp / 1000)
