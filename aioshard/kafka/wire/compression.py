"""Unpack what a batch holds compressed, within a limit: one of 1 MB may unpack to gigabytes."""

from collections.abc import Callable
from typing import Any

import cramjam

from aioshard.records import counted

CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
"""The compression codecs of Kafka, by their number in the attributes of a batch."""
_SNAPPY = 2

_GUESS = 16
"""How many times larger than its compressed form a batch is expected to be, and by how much a wrong guess grows."""
_LEAST_GUESS = 64 * 1024
_FULL = "whole buffer"
"""A part of cramjam's message for an output that does not fit into its buffer."""

_XERIAL = b"\x82SNAPPY\0"
"""The beginning of snappy in blocks, as Java writes it: two version numbers and the blocks follow."""
_XERIAL_HEAD = len(_XERIAL) + 8
_LENGTH = 4
"""Bytes of the length in front of a block."""


class UnpackError(Exception):
    """A batch cannot be unpacked."""


class UnknownCodecError(UnpackError):
    """A batch has a compression codec that is unknown."""


class UnpackLimitError(UnpackError):
    """A batch unpacks to more than the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"it unpacks to more than {counted(limit, 'byte')}")


def unpack(codec: int, content: memoryview, limit: int) -> bytes | memoryview:
    """Return the uncompressed content, of at most *limit* bytes. Uses up to three times as much memory meanwhile.

    Raises:
        UnknownCodecError: Kafka has no codec of this number.
        UnpackLimitError: The content is larger than the limit.
        UnpackError: The content is damaged.
    """
    name = CODECS.get(codec)
    if name is None:
        raise UnknownCodecError(f"its compression codec {codec} is unknown")
    try:
        if codec == _SNAPPY:
            return _unpack_snappy(content, limit)
        return _unpack_stream(getattr(cramjam, name).decompress_into, content, limit)
    except cramjam.DecompressionError as error:
        raise UnpackError(f"its {name} content is damaged: {error}") from error


def _unpack_stream(decompress_into: Callable[[Any, bytearray], int], content: memoryview, limit: int) -> memoryview:
    """Unpack a format that does not tell its size: into a buffer that grows until it is large enough."""
    size = max(len(content) * _GUESS, _LEAST_GUESS)
    while True:
        buffer = bytearray(min(size, limit))
        try:
            length = decompress_into(content, buffer)
        except cramjam.DecompressionError as error:
            if _FULL not in str(error):
                raise
            if size >= limit:
                raise UnpackLimitError(limit) from None
            size *= _GUESS
        else:
            return memoryview(buffer)[:length]


def _unpack_snappy(content: memoryview, limit: int) -> bytes:
    """Unpack snappy, which begins with its unpacked size."""
    blocks = [content]
    if content[: len(_XERIAL)] == _XERIAL:
        blocks = []
        at = _XERIAL_HEAD
        while at < len(content):
            length = int.from_bytes(content[at : at + _LENGTH], "big")
            at += _LENGTH
            blocks.append(content[at : at + length])
            at += length
    if sum(cramjam.snappy.decompress_raw_len(block) for block in blocks) > limit:
        raise UnpackLimitError(limit)
    return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)
