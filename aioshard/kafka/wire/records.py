"""Decode the records of one partition from the bytes of a fetch: the hot path of reading.

Uses aiokafka's public record API: `MemoryRecords` decodes one batch at a time. The heads of batches are also read here,
for their leader epochs, and compressed batches are unpacked here, to limit their size.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

from aiokafka.errors import KafkaError
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords

from aioshard.errors import CorruptRecordError, DecodeError
from aioshard.kafka.errors import corrupt_batch
from aioshard.kafka.wire.compression import UnknownCodecError, UnpackLimitError, unpack
from aioshard.kafka.wire.epochs import UNKNOWN, EpochStart, epoch_before
from aioshard.kafka.wire.lenient import DamagedBatchError, lenient_records, timed
from aioshard.ports import RECORD_OVERHEAD
from aioshard.records import Record, TopicPartition
from aioshard.serde.header_names import undecodable

UNPACK_LIMIT: Final = 256 * 1024 * 1024
"""Bytes that one batch may unpack to by default. A batch has 1 MB by default, and text shrinks to about a tenth."""

_NEW_RECORD: Final = tuple.__new__
"""Builds a `Record` from a tuple in half the time of calling the class."""

_FRAME: Final = struct.Struct(">qi")
"""The beginning of a batch: its first offset, and its length without this frame."""
_MAGIC_AT: Final = 16
"""The byte of a batch that has the version of its format; the same in all versions."""

# The present format (magic 2).
_HEAD: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH_AT: Final = 8
_EPOCH_AT: Final = 12
_ATTRIBUTES_AT: Final = 21
_TIMES_AT: Final = 23
_CODEC: Final = 7
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20

# The formats from before Kafka 0.11 (magic 0 and 1): each message is a batch, or a wrapper of compressed messages.
_OLD_ATTRIBUTES_AT: Final = 17
_OLD_KEY_AT: Final = (18, 26)
_NEWEST_MAGIC: Final = 2
_LEAST_SIZES: Final = (26, 34, 61)
"""The size of the smallest batch, by its magic."""


class Chunk:
    """The records of one partition from one fetch, decoded one at a time as they are taken.

    Invariants:
        * `next_offset` never decreases. It also passes offsets without a record for us: transaction markers, aborted
          batches, compacted records.
        * At most one batch is unpacked at a time.
        * Nothing at or after an error is delivered or passed.
    """

    __slots__ = (
        "_aborted",
        "_aborting",
        "_at",
        "_batch_end",
        "_data",
        "_decoders",
        "_magic",
        "_next_at",
        "_raw",
        "_start",
        "_unfit",
        "_unpack_limit",
        "_unpacked",
        "drained",
        "epoch_starts",
        "error",
        "next_offset",
        "oversized",
        "topic_partition",
        "undecodable",
    )

    def __init__(
        self,
        topic_partition: TopicPartition,
        data: bytes,
        position: int,
        *,
        aborted: Iterable[Sequence[int]] = (),
        unpack_limit: int = UNPACK_LIMIT,
    ) -> None:
        """Start at the first record.

        Args:
            topic_partition: The partition.
            data: Its batches in the response. The last one may be cut off.
            position: The offset from which records were requested. Batches are complete, so the first one may begin
                before it.
            aborted: The aborted transactions in the response, each as the producer's id and the first offset. Only
                responses for read committed have them.
            unpack_limit: Bytes that one batch may unpack to; at least `max_buffered_bytes`.
        """
        self.topic_partition = topic_partition
        self.next_offset = position
        """The offset of the next record, if known; else the lowest that it can have."""
        self.drained = False
        """Whether nothing is left, so the next fetch may be sent."""
        self.error: CorruptRecordError | None = None
        """The error that stopped the decoding; the position is before it."""
        self.oversized = 0
        """Size of the first record of the latest `take` if it did not fit, else 0."""
        self.undecodable: dict[int, DecodeError] = {}
        """The error of each record so far that has a header whose name is not UTF-8, by offset."""
        self.epoch_starts: list[EpochStart] = []
        """The leader epochs of the batches so far, in the order of their offsets."""
        self._data = data
        self._magic = -1
        """The format of the present batch."""
        self._decoders: Any = None
        """Gives the decoders of the batches that have this format, one after the other."""
        self._start = position
        self._unpack_limit = unpack_limit
        self._at = 0
        """The index of the present batch in the data."""
        self._next_at = 0
        """The index of the batch after it."""
        self._unpacked = b""
        """The present batch with its content uncompressed; empty if it is not compressed."""
        self._batch_end = 0
        """One past the last offset of the present batch."""
        self._raw: Any = None
        """The rest of the records of the present batch; None if it is finished."""
        self._unfit: Any = None
        """The raw record that did not fit; the next `take` begins with it."""
        # Not every broker sorts them.
        self._aborted = sorted(((entry[1], entry[0]) for entry in aborted), reverse=True)
        """The aborted transactions that begin later: first offset and producer id, the next one last."""
        self._aborting: set[int] = set()
        """The producers whose transactional batches are dropped until their abort marker."""

    @property
    def leader_epoch(self) -> int:
        """The leader epoch of the batch before `next_offset`.

        `UNKNOWN` if nothing was delivered or passed yet, or if that batch has an old format.
        """
        return epoch_before(self.epoch_starts, self.next_offset)

    @property
    def size(self) -> int:
        """Bytes of the batches in the response."""
        return len(self._data)

    @property
    def unpacked_bytes(self) -> int:
        """Memory of the present batch, of which records are still to be taken, if it was compressed."""
        return len(self._unpacked)

    @property
    def stalled(self) -> bool:
        """Whether all data were read, without an error, and none moved the position."""
        return self.drained and bool(self._data) and self.next_offset == self._start

    def take(self, limit: int, room: int, *, alone: bool) -> tuple[list[Record], list[int]]:
        """Decode up to *limit* records with at most *room* bytes in total; with *alone* the first may be larger.

        Never raises: a decoding error ends up in `error`.

        Returns:
            The records and their sizes.
        """
        records: list[Record] = []
        sizes: list[int] = []
        self.oversized = 0
        if self.drained or self.error is not None:
            return records, sizes
        try:
            self._decode(records, sizes, limit, room, alone=alone)
        except Exception as error:  # noqa: BLE001 - a broken batch can make the decoders raise anything
            self.error = _fault(error, self.topic_partition, self.next_offset)
            self._close_batch()
        return records, sizes

    def _decode(  # noqa: C901, PLR0912, PLR0915 - a call in this loop would cost more than anything else in it
        self, records: list[Record], sizes: list[int], limit: int, room: int, *, alone: bool
    ) -> None:
        record_type = Record
        topic, partition = self.topic_partition
        add_record = records.append
        add_size = sizes.append
        while True:
            if self._raw is None and not self._open_batch():
                self.drained = True
                return
            next_offset: Any = self.next_offset  # as raw offsets are, so that compiled code converts neither
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
            except UnicodeDecodeError:
                # Only header names are text. aiokafka cannot get past this record, so read the whole batch again.
                batch = self._unpacked or self._data[self._at : self._next_at]
                self._raw = self._marked(lenient_records(batch))
            else:
                # A batch keeps its last offset even if compaction removed that record.
                next_offset = max(next_offset, self._batch_end)
                self._close_batch()
            finally:
                self.next_offset = next_offset

    def _marked(self, raw_records: Iterator[Any]) -> Iterator[Any]:
        """Yield the records, and note the errors of those that no handler may see."""
        topic, partition = self.topic_partition
        for raw in raw_records:
            decode_error = undecodable(Record(topic, partition, raw.offset, None, None, raw.headers, 0.0))
            if decode_error is not None:
                self.undecodable[raw.offset] = decode_error
            yield raw

    # Batches --------------------------------------------------------------------------

    def _open_batch(self) -> bool:
        """Open the next batch with records for us; return False at the end of the data.

        Raises:
            Exception: The batch cannot be read. Nothing of it was passed.
        """
        while True:
            at = self._next_at
            end = self._end_of_batch(at)
            if end < 0:
                return False
            magic = self._data[at + _MAGIC_AT]
            if magic > _NEWEST_MAGIC:
                raise DamagedBatchError(f"its format {magic} is unknown")
            if end - at < _LEAST_SIZES[magic]:
                raise DamagedBatchError(f"it has {end - at} bytes, fewer than its head")
            if magic != self._magic:
                # aiokafka reads all batches of its buffer in the format of the first one.
                self._magic = magic
                self._decoders = MemoryRecords(self._data[at:] if at else self._data)
            decoder: Any = self._decoders.next_batch()
            if not decoder.validate_crc():
                raise DamagedBatchError("its checksum is wrong")
            self._at = at
            self._next_at = end
            opened = self._open(decoder) if magic == _NEWEST_MAGIC else self._open_old(decoder, magic)
            if opened:
                return True

    def _end_of_batch(self, at: int) -> int:
        """Return the index behind the batch at *at*; -1 at the end of the data.

        Raises:
            DamagedBatchError: The first batch is cut off. Brokers return at least one that is complete.
        """
        left = len(self._data) - at
        if left >= _FRAME.size:
            _, length = _FRAME.unpack_from(self._data, at)
            size = _FRAME.size + int(length)
            if size < _LEAST_SIZES[0]:
                raise DamagedBatchError(f"its length is {length}")
            if size <= left:
                return at + size
        if left and not at:
            raise DamagedBatchError(f"only {left} bytes of it were returned")
        return -1

    def _open(self, decoder: Any) -> bool:
        """Open a batch of the present format; return False if all of it is passed."""
        base_offset, _, epoch, _, _, attributes, last_delta, _, _, producer, _, _, count = _HEAD.unpack_from(
            self._data, self._at
        )
        end = base_offset + last_delta + 1
        skipped = self._is_skipped(end, attributes, producer, decoder)
        if end <= self.next_offset:
            return False
        self._enter(max(base_offset, self.next_offset), epoch)
        is_empty = not count and self._next_at - self._at == _HEAD.size  # compaction removed all records
        if skipped or is_empty:
            self.next_offset = end
            return False
        if attributes & _CODEC:
            self._unpacked = self._unpack(attributes)
            decoder = MemoryRecords(self._unpacked).next_batch()
        self._begin(end, decoder)
        return True

    def _unpack(self, attributes: int) -> bytes:
        """Return the present batch with its content uncompressed. Its checksum stays that of the compressed one.

        Raises:
            UnpackError: Its codec is unknown, its content is damaged, or too large.
        """
        head = self._data[self._at : self._at + _HEAD.size]
        compressed = memoryview(self._data)[self._at + _HEAD.size : self._next_at]
        content = unpack(attributes & _CODEC, compressed, self._unpack_limit)
        return b"".join(
            (
                head[:_LENGTH_AT],
                struct.pack(">i", _HEAD.size - _FRAME.size + len(content)),
                head[_EPOCH_AT:_ATTRIBUTES_AT],
                struct.pack(">h", attributes & ~_CODEC),
                head[_TIMES_AT:],
                content,
            )
        )

    def _is_skipped(self, end: int, attributes: int, producer: int, decoder: Any) -> bool:
        """Whether a batch has no records for us: a transaction marker, or a part of an aborted transaction."""
        while self._aborted and self._aborted[-1][0] < end:
            _, aborted_producer = self._aborted.pop()
            self._aborting.add(aborted_producer)
        if attributes & _CONTROL:
            if producer in self._aborting and _is_abort_marker(decoder):
                self._aborting.discard(producer)
            return True
        return bool(attributes & _TRANSACTIONAL) and producer in self._aborting

    def _open_old(self, decoder: Any, magic: int) -> bool:
        """Open a message or a wrapper from before Kafka 0.11; return False if all of it is passed."""
        last_offset, _ = _FRAME.unpack_from(self._data, self._at)
        if last_offset < self.next_offset:
            return False
        self._enter(self.next_offset, UNKNOWN)
        codec = self._data[self._at + _OLD_ATTRIBUTES_AT] & _CODEC
        if codec:
            # aiokafka unpacks it again. That is rare, and its size must be known before.
            compressed = _old_value(memoryview(self._data)[self._at : self._next_at], _OLD_KEY_AT[magic])
            self._unpacked = bytes(unpack(codec, compressed, self._unpack_limit))
        self._begin(last_offset + 1, decoder if magic else timed(decoder))
        return True

    def _begin(self, end: int, raw_records: Iterable[Any]) -> None:
        self._batch_end = end
        # A batch allows `iter` only once; this continues where it stopped.
        self._raw = islice(raw_records, None)

    def _close_batch(self) -> None:
        self._unpacked = b""
        self._raw = None

    def _enter(self, offset: int, epoch: int) -> None:
        """Note the leader epoch of a batch of which *offset* is the first to be delivered or passed."""
        if not self.epoch_starts or self.epoch_starts[-1].epoch != epoch:
            self.epoch_starts.append(EpochStart(offset, epoch))


def _old_value(batch: memoryview, key_at: int) -> memoryview:
    """Return the value of an old message, which in a wrapper has the compressed messages."""
    (key_length,) = struct.unpack_from(">i", batch, key_at)
    value_at = key_at + 4 + max(key_length, 0)
    (length,) = struct.unpack_from(">i", batch, value_at)
    return batch[value_at + 4 : value_at + 4 + max(length, 0)]


def _is_abort_marker(decoder: Any) -> bool:
    """Whether a control batch ends an aborted transaction; its first record says so."""
    first = next(iter(decoder), None)
    return first is not None and ControlRecord.parse(first.key).type_ == ABORT_MARKER.type_


def _fault(error: Exception, topic_partition: TopicPartition, offset: int) -> CorruptRecordError:
    """Return the error of a batch that cannot be read."""
    if isinstance(error, UnpackLimitError):
        return CorruptRecordError(
            f"the batch at offset {offset} of {topic_partition} is too large ({error}): raise max_buffered_bytes"
        )
    if isinstance(error, UnknownCodecError):
        return CorruptRecordError(
            f"the batch at offset {offset} of {topic_partition} cannot be decompressed ({error}): upgrade aioshard"
        )
    text = str(error.args[0]) if isinstance(error, KafkaError) and error.args else str(error)
    return corrupt_batch(text.rstrip(".") or type(error).__name__, topic_partition, offset)
