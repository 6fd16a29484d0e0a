"""The in-memory log of one partition: records by offset, with gaps, a moving start and an open transaction."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from aioshard.records import Record, TopicPartition

__all__ = ["PartitionLog"]

_offset_of = attrgetter("offset")


class PartitionLog:
    """Records of one partition in offset order.

    Offsets are never reused, even after their record is removed: every deletion leaves a gap, as compaction, aborted
    transactions and control records do on a broker.

    Synchronous, owned by one `InMemoryBroker`.

    Invariants:
        * `start <= stable_end <= end`.
        * Every record's offset is in `[start, end)`, strictly increasing.
    """

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self._records: list[Record] = []
        self._start = 0
        self._end = 0
        self._transaction: int | None = None

    @property
    def start(self) -> int:
        """The first offset that can be read."""
        return self._start

    @property
    def end(self) -> int:
        """The offset that the next record will get."""
        return self._end

    @property
    def stable_end(self) -> int:
        """The last stable offset: `end`, or the beginning of the open transaction."""
        return self._end if self._transaction is None else max(self._transaction, self._start)

    @property
    def records(self) -> tuple[Record, ...]:
        """All records in offset order, including uncommitted ones."""
        return tuple(self._records)

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None,
        headers: tuple[tuple[str, bytes | None], ...],
        timestamp: float,
    ) -> Record:
        """Add a record at the end."""
        topic, partition = self.topic_partition
        record = Record(topic, partition, self._end, key, value, headers, timestamp)
        self._records.append(record)
        self._end += 1
        return record

    def skip(self, count: int) -> None:
        """Use up *count* offsets without a record, as a transaction marker does.

        Raises:
            ValueError: *count* is not positive.
        """
        if count < 1:
            message = f"cannot skip {count} offsets of {self.topic_partition}: at least 1 is expected"
            raise ValueError(message)
        self._end += count

    def delete(self, offset: int) -> None:
        """Remove one record and leave a gap.

        Raises:
            LookupError: There is no record at *offset*.
        """
        index = bisect_left(self._records, offset, key=_offset_of)
        if index == len(self._records) or self._records[index].offset != offset:
            message = (
                f"there is no record at offset {offset} of {self.topic_partition}: "
                f"its records are {[record.offset for record in self._records]}"
            )
            raise LookupError(message)
        del self._records[index]

    def compact(self) -> None:
        """Keep the newest record of each key and leave gaps for the others; records without a key are removed too."""
        newest = {record.key: record.offset for record in self._records}
        self._records = [
            record for record in self._records if record.key is not None and newest[record.key] == record.offset
        ]

    def truncate_before(self, offset: int) -> None:
        """Move the start up to *offset*, as retention does; earlier records are removed.

        Raises:
            ValueError: *offset* is beyond the end of the log.
        """
        if offset > self._end:
            message = f"cannot truncate {self.topic_partition} before {offset}: its log ends at {self._end}"
            raise ValueError(message)
        self._start = max(self._start, offset)
        del self._records[: bisect_left(self._records, offset, key=_offset_of)]

    def begin_transaction(self) -> None:
        """Freeze the last stable offset until `end_transaction`.

        Raises:
            ValueError: A transaction is already open; only one at a time is supported.
        """
        if self._transaction is not None:
            message = f"{self.topic_partition} has an open transaction since offset {self._transaction}: end it first"
            raise ValueError(message)
        self._transaction = self._end

    def end_transaction(self, *, commit: bool) -> None:
        """Release the last stable offset; the marker takes one offset.

        Args:
            commit: False removes every record appended since the transaction began.

        Raises:
            ValueError: No transaction is open.
        """
        if self._transaction is None:
            message = f"{self.topic_partition} has no open transaction: call begin_transaction first"
            raise ValueError(message)
        if not commit:
            del self._records[bisect_left(self._records, self._transaction, key=_offset_of) :]
        self._transaction = None
        self._end += 1

    def read(self, position: int, below: int) -> Iterator[Record]:
        """Iterate over the records with `position <= offset < below`."""
        for index in range(bisect_left(self._records, position, key=_offset_of), len(self._records)):
            record = self._records[index]
            if record.offset >= below:
                return
            yield record
