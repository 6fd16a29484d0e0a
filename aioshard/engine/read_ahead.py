"""Parked records that were read in bulk and run soon, until they do."""

import itertools
from collections.abc import Sequence

from aioshard.core.flow import NONE, Usage
from aioshard.core.parking import ParkedEntry
from aioshard.engine.buffer import Buffer
from aioshard.engine.parked_partition import ParkedPartition
from aioshard.ports import record_size
from aioshard.records import Record

_USUAL_SIZE = 1024.0
"""Bytes of a parked record until some were read: it has a dozen headers."""
_LEAST_READ = 16 * 1024
"""Minimum bytes of a read; smaller ones cost more than they save."""


class ReadAhead:
    """The records of one side partition that were read before they are needed.

    One fetch returns thousands of records, and the keys that are due together are stored close to each other. Without
    this, each parked record would cost a fetch. Owned by the event loop.

    Invariants:
        * Its records count in the buffer.
    """

    __slots__ = ("_average", "_buffer", "_parked", "_records", "held", "read_at")

    def __init__(self, parked: ParkedPartition, buffer: Buffer) -> None:
        self._parked = parked
        self._buffer = buffer
        self._average = _USUAL_SIZE
        """Mean size of the records of the latest read."""
        self._records: dict[int, Record] = {}
        """By offset in the side topic."""
        self.held = NONE
        """Usage of the buffer."""
        self.read_at = 0.0
        """Loop time of the latest read."""

    def take(self, entry: ParkedEntry) -> Record | None:
        """Remove and return the stored record of an entry; None if it must be read."""
        record = self._records.pop(entry.stored_at, None)
        if record is not None:
            self._count(-1, -_size(record))
        return record

    def bytes_for(self, records: int) -> int:
        """Return how many bytes a read has to return for a number of records, judging by the latest one."""
        return max(int(records * self._average), _LEAST_READ)

    def store(self, records: Sequence[Record], share: Usage, *, until: float, now: float) -> None:
        """Keep records that were just read, and earlier ones that still run soon.

        Args:
            records: The result of a read. Its first record is kept even if there is no room.
            share: Maximum usage. Records of keys that are due soon come first.
            until: Time until which a key must be due to count as such, in seconds since the epoch.
            now: Loop time.
        """
        self.read_at = now
        if records:
            self._average = sum(map(_size, records)) / len(records)
        keys = self._parked.keys
        soon = {entry.stored_at for entry in keys.run_soon(until, share.records)}
        self._release([record for at, record in self._records.items() if at not in soon])
        self._records = {at: record for at, record in self._records.items() if at in soon}
        for record in records[:1]:
            self._keep(record)
        rest = records[1:]
        # Keys that are released one after the other are often neighbours of those that run soon.
        others = (record for record in rest if record.offset not in soon and record.value is not None)
        for record in itertools.chain((record for record in rest if record.offset in soon), others):
            if self.held.records >= share.records or self.held.bytes + _size(record) > share.bytes:
                return
            self._keep(record)

    def _keep(self, record: Record) -> None:
        if record.offset not in self._records:
            self._records[record.offset] = record
            self._count(1, _size(record))

    def clear(self) -> None:
        """Forget all records."""
        self._release(list(self._records.values()))
        self._records.clear()

    def _release(self, records: Sequence[Record]) -> None:
        if records:
            self._count(-len(records), -sum(map(_size, records)))
            self._buffer.wake()

    def _count(self, records: int, size: int) -> None:
        self.held = Usage(self.held.records + records, self.held.bytes + size)
        self._buffer.take_in(records, size)


def _size(record: Record) -> int:
    return record_size(record.key, record.value, record.headers)
