"""Decode records from one fetch response: the hot path of reading."""

import struct
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final

from aiokafka.consumer.fetcher import READ_COMMITTED
from aiokafka.errors import CorruptRecordException

from aioshard.errors import DecodeError
from aioshard.kafka.aiokafka.lenient import lenient_records
from aioshard.ports import RECORD_OVERHEAD
from aioshard.records import Record, TopicPartition
from aioshard.serde.header_names import undecodable

_NEW_RECORD: Final = tuple.__new__
"""Builds a `Record` from a tuple in half the time of calling the class."""
_BATCH_HEAD: Final = struct.Struct(">qi")
"""The head of a batch: its first offset, and its length without this head."""


class Chunk:
    """The records of one partition from one fetch, decoded one at a time as they are taken.

    Follows aiokafka's `PartitionRecords`, with aioshard's record class and limits. The position lives in aiokafka's
    `next_fetch_offset`, so that aiokafka's own checks still hold.
    """

    __slots__ = (
        "_batch",
        "_data",
        "_part",
        "_raw",
        "_unfit",
        "drained",
        "error",
        "oversized",
        "reported",
        "result",
        "topic_partition",
        "undecodable",
    )

    def __init__(self, topic_partition: TopicPartition, result: Any, data: bytes = b"") -> None:
        """Start at the first record.

        Args:
            topic_partition: The partition.
            result: The fetch result of aiokafka.
            data: The bytes of the fetch, from which a batch is decoded whose header names are not UTF-8.
        """
        self.topic_partition = topic_partition
        self.result = result
        self._part: Any = result._partition_records
        self._batch: Any = None
        self._raw: Any = None
        self._unfit: Any = None
        """The raw record that did not fit; the next `take` begins with it."""
        self.drained = False
        """Whether nothing is left, so the next fetch may be sent."""
        self.error: Exception | None = None
        """The error that stopped the decoding; the position is before it."""
        self.oversized = 0
        """Size of the first record of the latest `take` if it did not fit, else 0."""
        self.reported = False
        """Whether the record that did not fit was reported."""
        self.undecodable: dict[int, DecodeError] = {}
        """The error of each record so far that has a header whose name is not UTF-8, by offset."""
        self._data = data

    @property
    def next_offset(self) -> int:
        """The offset of the next record, if known."""
        return int(self._part.next_fetch_offset)

    def take(self, limit: int, room: int, *, alone: bool) -> tuple[list[Record], list[int]]:
        """Decode up to *limit* records with at most *room* bytes in total; with *alone* the first may be larger.

        Never raises: a decoding error ends up in `error`.

        Returns:
            The records and their sizes.
        """
        records: list[Record] = []
        sizes: list[int] = []
        self.oversized = 0
        try:
            self._decode(records, sizes, limit, room, alone=alone)
        except Exception as error:  # noqa: BLE001 - a broken batch can make the decoders raise anything
            self.error = error
        return records, sizes

    def _decode(  # noqa: C901, PLR0912, PLR0915 - a call in this loop would cost more than anything else in it
        self, records: list[Record], sizes: list[int], limit: int, room: int, *, alone: bool
    ) -> None:
        part, record_type = self._part, Record
        topic, partition = self.topic_partition
        add_record, add_size = records.append, sizes.append
        while True:
            batch = self._batch
            if batch is None:
                self._batch = batch = self._next_batch()
                if batch is None:
                    self.drained = True
                    return
                # A batch allows `iter` only once; this continues where it stopped.
                self._raw = islice(batch, None)
            next_offset = part.next_fetch_offset
            raw_records = self._raw if self._unfit is None else chain([self._unfit], self._raw)
            self._unfit = None
            try:
                # The hot loop: each line costs about 3 % of the total reading time.
                for raw in raw_records:
                    offset = raw.offset
                    if offset < next_offset:
                        continue  # A broker always returns whole batches, even if the fetch starts in the middle.
                    key = raw.key
                    value = raw.value
                    headers = raw.headers
                    size = RECORD_OVERHEAD
                    if key is not None:
                        size += len(key)
                    if value is not None:
                        size += len(value)
                    if headers:
                        headers = tuple(headers)
                        size += sum([len(name) + len(content or b"") for name, content in headers])
                    else:
                        headers = ()
                    record = _NEW_RECORD(
                        record_type, (topic, partition, offset, key, value, headers, raw.timestamp / 1000)
                    )
                    if size > room:
                        if not alone:
                            self._unfit = raw
                            next_offset = offset
                            if not records:
                                self.oversized = size
                            return
                        room = size
                    alone = False
                    room -= size
                    add_record(record)
                    add_size(size)
                    next_offset = offset + 1
                    limit -= 1
                    if not limit:
                        return
            except UnicodeDecodeError as error:
                # Only header names are text. aiokafka cannot get past this record, so read the whole batch again.
                self._raw = self._leniently(batch, error)
            else:
                # A batch keeps its last offset even if compaction removed that record.
                next_offset = batch.next_offset
                self._batch = None
            finally:
                part.next_fetch_offset = next_offset

    def _leniently(self, batch: Any, error: UnicodeDecodeError) -> Iterator[Any]:
        """Return the records of a batch, with header names in `surrogateescape`.

        Raises:
            UnicodeDecodeError: The bytes of the batch are unknown.
        """
        data = _batch_at(self._data, batch.base_offset)
        if data is None:
            raise error
        return self._marked(lenient_records(data))

    def _marked(self, raw_records: Iterator[Any]) -> Iterator[Any]:
        """Yield the records, and note the errors of those that no handler may see."""
        topic, partition = self.topic_partition
        for raw in raw_records:
            headers = tuple(raw.headers)
            decode_error = undecodable(Record(topic, partition, raw.offset, None, None, headers, 0.0))
            if decode_error is not None:
                self.undecodable[raw.offset] = decode_error
            yield raw

    def _next_batch(self) -> Any:
        """Return the next batch with records for us, to be iterated from its first; None at the end of the chunk."""
        part = self._part
        memory = part._records
        while memory.has_next():
            batch = memory.next_batch()
            if part._check_crcs and not batch.validate_crc():
                raise CorruptRecordException("its checksum is wrong")
            skipped = batch.is_control_batch
            if part._isolation_level == READ_COMMITTED and batch.producer_id is not None:
                part._consume_aborted_up_to(batch.base_offset)
                if batch.is_control_batch and part._contains_abort_marker(batch):
                    part._aborted_producers.discard(batch.producer_id)
                skipped = skipped or (batch.is_transactional and batch.producer_id in part._aborted_producers)
            if not skipped:
                return batch
            part.next_fetch_offset = batch.next_offset
        return None


def _batch_at(data: bytes, base_offset: int) -> memoryview | None:
    """Find a batch in the bytes of a fetch by its first offset; None if it is not there."""
    position = 0
    while position + _BATCH_HEAD.size <= len(data):
        offset, length = _BATCH_HEAD.unpack_from(data, position)
        end = position + _BATCH_HEAD.size + length
        if offset == base_offset and end <= len(data):
            return memoryview(data)[position:end]
        position = end
    return None
