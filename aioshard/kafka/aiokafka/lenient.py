"""Decode batches whose header names are not UTF-8.

This module is apart from the hot path, because a compiled module cannot have a subclass of `bytearray`.
"""

from collections.abc import Iterator
from typing import Any, Self, SupportsIndex, overload

from aiokafka.record.default_records import _DefaultRecordBatchPy


class _LenientBytes(bytearray):
    """Bytes whose parts decode without an error: bytes that are not UTF-8 become surrogates."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> int | Self:
        part = super().__getitem__(index)
        return part if isinstance(part, int) else type(self)(part)

    def decode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> str:  # noqa: ARG002 - the caller's are strict
        return bytes(self).decode(encoding, "surrogateescape")


def lenient_records(data: memoryview) -> Iterator[Any]:
    """Decode a batch with aiokafka's decoder in Python, which decodes header names by a method of its buffer."""
    batch: Any = _DefaultRecordBatchPy(data)
    batch._maybe_uncompress()
    batch._buffer = _LenientBytes(batch._buffer)
    return iter(batch)
