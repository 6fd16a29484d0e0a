"""Record batches as brokers store them."""

import struct
from collections.abc import Callable, Sequence
from typing import Literal

from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

Header = tuple[str, bytes | None]
Content = tuple[bytes | None, bytes | None, list[Header]]
"""Key, value and headers of a record."""

TIMESTAMP = 1_700_000_000_000
"""Milliseconds of the first record of each batch; the next ones follow 1 ms apart."""
EPOCH_AT = 12
CRC_AT = 17
ATTRIBUTES_AT = 21
LAST_DELTA_AT = 23
COUNT_AT = 57
HEAD_SIZE = 61

_ENCODERS: dict[int, Callable[[bytes], bytes]] = {1: gzip_encode, 2: snappy_encode, 3: lz4_encode, 4: zstd_encode}


def batch(
    base: int,
    contents: Sequence[Content],
    *,
    codec: int = 0,
    producer: int = -1,
    transactional: bool = False,
    gap: int = 0,
    epoch: int = -1,
) -> bytes:
    """A batch as a broker keeps it; *gap* offsets at its end hold nothing."""
    builder = DefaultRecordBatchBuilder(2, 0, int(transactional), producer, 0, 0, 1 << 20)
    for number, (key, value, headers) in enumerate(contents):
        assert builder.append(number, TIMESTAMP + number, key, value, headers) is not None
    raw = bytearray(stored_at(base, builder.build(), epoch))
    if gap:
        struct.pack_into(">i", raw, LAST_DELTA_AT, len(contents) - 1 + gap)
    return compressed(with_checksum(raw), codec)


def stored_at(base: int, raw: bytes, epoch: int) -> bytes:
    """The batch of a producer as the leader of an epoch keeps it; no checksum covers the changed fields."""
    stored = bytearray(raw)
    struct.pack_into(">q", stored, 0, base)
    struct.pack_into(">i", stored, EPOCH_AT, epoch)
    return bytes(stored)


def compressed(raw: bytes, codec: int) -> bytes:
    """The same batch with compressed content, even where that is longer: builders leave such content as it is."""
    if not codec:
        return raw
    packed = bytearray(raw[:HEAD_SIZE] + _ENCODERS[codec](raw[HEAD_SIZE:]))
    (attributes,) = struct.unpack_from(">h", raw, ATTRIBUTES_AT)
    struct.pack_into(">h", packed, ATTRIBUTES_AT, attributes | codec)
    struct.pack_into(">i", packed, 8, len(packed) - 12)
    return with_checksum(packed)


def control(
    base: int, producer: int, kind: Literal["abort", "commit"], *, epoch: int = -1, key: bytes | None = None
) -> bytes:
    """The marker that ends a transaction; or a control batch with another *key*."""
    if key is None:
        key = struct.pack(">hh", 0, 0 if kind == "abort" else 1)
    contents: list[Content] = [(key, struct.pack(">hi", 0, 0), [])]
    raw = bytearray(batch(base, contents, producer=producer, transactional=True, epoch=epoch))
    (attributes,) = struct.unpack_from(">h", raw, ATTRIBUTES_AT)
    struct.pack_into(">h", raw, ATTRIBUTES_AT, attributes | 0x20)
    return with_checksum(raw)


def emptied(raw: bytes) -> bytes:
    """A batch from which compaction has removed all records."""
    head = bytearray(raw[:HEAD_SIZE])
    struct.pack_into(">i", head, 8, HEAD_SIZE - 12)
    struct.pack_into(">i", head, COUNT_AT, 0)
    return with_checksum(head)


def with_checksum(raw: bytearray) -> bytes:
    """A batch with the checksum of its content."""
    struct.pack_into(">I", raw, CRC_AT, calc_crc32c(bytes(raw[ATTRIBUTES_AT:])))
    return bytes(raw)
