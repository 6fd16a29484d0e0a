"""What was read of side topics and is going to be run again."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable

from aioshard.records import Record, TopicPartition

__all__ = ["Shelf"]

_MOST = 8
"""Reads that are kept, of all partitions together. One brings about a megabyte."""


class Shelf:
    """What the last few reads brought, less what was taken since.

    What runs again comes from a few places at a time: the first record of a key after the first of another, and what
    is behind each. With one read kept for a partition, each record would be read, and decoded, with all its neighbours.

    Example:
        >>> shelf, at = Shelf(), TopicPartition("parked", 0)
        >>> shelf.keep(at, [Record("parked", 0, 7, b"orders/0/41", b"", (), 0.0)])
        >>> shelf.take(at, 7).key, shelf.take(at, 7)
        (b'orders/0/41', None)
    """

    def __init__(self) -> None:
        self._reads: OrderedDict[int, tuple[TopicPartition, dict[int, Record]]] = OrderedDict()
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self._reads)

    def take(self, topic_partition: TopicPartition, offset: int) -> Record | None:
        """A record, which is not on the shelf any more then; None when it was not."""
        for number, (at, records) in reversed(self._reads.items()):
            if at == topic_partition and offset in records:
                record = records.pop(offset)
                self._reads.move_to_end(number)
                if not records:
                    del self._reads[number]
                return record
        return None

    def keep(self, topic_partition: TopicPartition, records: Iterable[Record]) -> None:
        """Put on the shelf what was read, and take off it what was used least lately."""
        self._reads[next(self._numbers)] = topic_partition, {record.offset: record for record in records}
        if len(self._reads) > _MOST:
            self._reads.popitem(last=False)

    def clear(self) -> None:
        """Take everything off it."""
        self._reads.clear()
