"""Raw records in the columns of Spark's own Kafka connector."""

import time
from collections.abc import Collection, Iterator, Mapping

import pyarrow as pa

from aioshard.errors import TransportError
from aioshard.kafka.ranges import RangeTransport
from aioshard.ports import Allowance, Fault, FetchedBatch, LogRange, Membership
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings
from aioshard.spark.tasks.rows import raw_batch
from aioshard.spark.tasks.worker_loop import worker_loop

__all__ = ["read_raw"]

_ROWS = 2_000
"""Rows of one Arrow batch."""
_MORE = Allowance(_ROWS, 64 * 1024 * 1024, alone=True)
_POLL_TIMEOUT = 0.5
_STALLED = 30.0
"""Seconds without progress after which a read fails."""


def read_raw(
    settings: Settings,
    ranges: Mapping[TopicPartition, LogRange],
    finished: Mapping[TopicPartition, Collection[int]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of some ranges; records of the same partition come in offset order.

    Args:
        settings: The brokers and the isolation level.
        ranges: At most one per partition.
        finished: Offsets to leave out.

    Raises:
        DataLossError: Retention has deleted the start of a range.
        TransportError: The records cannot be read.
    """
    loop = worker_loop()
    reader = _Reader(settings, ranges, finished)
    try:
        loop.submit(reader.open()).result()
        while not reader.done:
            records = loop.submit(reader.some()).result()
            if records:
                yield raw_batch(records)
    finally:
        loop.submit(reader.close()).result()


class _Reader:
    """Reads with the engine's transport, but without an engine."""

    def __init__(
        self,
        settings: Settings,
        ranges: Mapping[TopicPartition, LogRange],
        finished: Mapping[TopicPartition, Collection[int]] | None,
    ) -> None:
        self._transport = RangeTransport(settings, ranges, finished)
        self._left = {name: bounds for name, bounds in ranges.items() if bounds.start < bounds.end}
        self._progress_at = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether all ranges have been read."""
        return not self._left

    async def open(self) -> None:
        await self._transport.start({name.topic for name in self._left}, None, self)

    async def close(self) -> None:
        await self._transport.close()

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:  # noqa: ARG002
        """See `GroupListener.assigned`."""
        for name in partitions:
            if name in self._left:
                self._transport.seek(name, self._left[name].start)
        self._transport.resume([name for name in partitions if name in self._left])

    async def revoked(self, partitions: Collection[TopicPartition], *, lost: bool) -> None:
        """See `GroupListener.revoked`; partitions without a group are never revoked."""

    async def some(self) -> list[Record]:
        """Return some records, or none if none arrived for a while.

        Raises:
            TransportError: The records cannot be read.
        """
        records: list[Record] = []
        for found in await self._transport.poll(lambda _: _MORE, _POLL_TIMEOUT):
            if isinstance(found, FetchedBatch):
                records += found.records
                self._progress_at = time.monotonic()
                if found.next_offset >= self._left[found.topic_partition].end:
                    del self._left[found.topic_partition]
            elif isinstance(found, Fault) and not found.error.retriable:
                raise found.error
        if time.monotonic() - self._progress_at > _STALLED:
            raise TransportError(
                f"{', '.join(map(str, self._left))} could not be read on for {_STALLED:g} s: check that the brokers "
                "run, and that each partition has a leader"
            )
        return records
