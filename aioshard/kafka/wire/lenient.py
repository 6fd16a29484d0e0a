"""Decode batches that aiokafka's decoder cannot: with header names that are not UTF-8, or without timestamps."""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_NO_TIMESTAMP = -1
_HEAD = struct.Struct(">qiibIhiqqqhii")
_LOG_APPEND_TIME = 8
"""The attribute of a batch whose records have the time at which the broker appended it."""
_LOW_BITS = 0x7F
_MORE = 0x80
"""The bit of a byte that says that another byte follows."""


class DamagedBatchError(Exception):
    """A batch does not have the form that it announces."""


class RawRecord(NamedTuple):
    """A record as it is in a batch, with the names that aiokafka's records have."""

    offset: int
    timestamp: int
    """Milliseconds since the epoch; -1 if there is none."""
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def timed(raw_records: Iterable[Any]) -> Iterator[RawRecord]:
    """Yield records from before Kafka 0.10, which have no timestamps and no headers."""
    for raw in raw_records:
        yield RawRecord(raw.offset, _NO_TIMESTAMP, raw.key, raw.value)


def lenient_records(batch: bytes) -> Iterator[RawRecord]:
    """Decode an uncompressed batch of the present format; bytes of a header name that are not UTF-8 become surrogates.

    Raises:
        DamagedBatchError: A length in the batch is wrong.
        IndexError: The batch ends too early.
    """
    base_offset, _, _, _, _, attributes, _, first_timestamp, max_timestamp, _, _, _, count = _HEAD.unpack_from(batch)
    at = _HEAD.size
    for _ in range(count):
        length, at = _varint(batch, at)
        end = at + length
        if end > len(batch):
            raise DamagedBatchError(f"a record of {length} bytes is cut off")
        at += 1  # the attributes of a record have no meaning yet
        timestamp_delta, at = _varint(batch, at)
        offset_delta, at = _varint(batch, at)
        key, at = _content(batch, at)
        value, at = _content(batch, at)
        headers, at = _headers(batch, at)
        if at != end:
            raise DamagedBatchError(f"a record of {length} bytes has {length + at - end}")
        timestamp = max_timestamp if attributes & _LOG_APPEND_TIME else first_timestamp + timestamp_delta
        yield RawRecord(base_offset + offset_delta, timestamp, key, value, headers)
    if at != len(batch):
        raise DamagedBatchError(f"{len(batch) - at} bytes follow the last record")


def _headers(batch: bytes, at: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, at = _varint(batch, at)
    headers = []
    for _ in range(count):
        name, at = _content(batch, at)
        if name is None:
            raise DamagedBatchError("a header has no name")
        value, at = _content(batch, at)
        headers.append((name.decode("utf-8", "surrogateescape"), value))
    return tuple(headers), at


def _content(batch: bytes, at: int) -> tuple[bytes | None, int]:
    """Read bytes behind their length; a negative length stands for null."""
    length, at = _varint(batch, at)
    if length < 0:
        return None, at
    return batch[at : at + length], at + length


def _varint(batch: bytes, at: int) -> tuple[int, int]:
    """Read a signed integer of variable length ("zigzag")."""
    value = 0
    shift = 0
    while True:
        byte = batch[at]
        at += 1
        value |= (byte & _LOW_BITS) << shift
        if byte < _MORE:
            return value >> 1 ^ -(value & 1), at
        shift += 7
