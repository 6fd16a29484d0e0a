"""Read the offset metadata of Confluent's Parallel Consumer, so that its users can migrate.

The text is base 64 of one byte that names the form, followed by the completed records from the committed offset on.
The forms are:

* a bit set: the number of bits (two bytes, or four), then one bit per offset, lowest first; one unused byte follows;
* run lengths, two bytes each or four: incomplete and complete runs alternate, starting with an incomplete one.

Each of these may be compressed with Zstandard. Offsets beyond the last encoded one were never seen. Parallel Consumer
itself no longer reads the other form that it once had (an experimental byte array).

The metadata of any other program must not mark records as finished. So texts that the encoders of Parallel Consumer
would never write count as foreign.
"""

import base64
import binascii
import re
import struct
from typing import Final

from aioshard.core.finished_offsets import LAST_OFFSET, Run

__all__ = ["read_parallel_consumer"]

_BITS: Final = {ord("l"): ">h", ord("o"): ">i"}
_RUNS: Final = {ord("n"): "h", ord("e"): "i"}
_COMPRESSED: Final = {ord("a"): ord("l"), ord("s"): ord("o"), ord("J"): ord("n"), ord("p"): ord("e")}

_ZSTANDARD = b"\x28\xb5\x2f\xfd"
"""The first bytes of each frame."""
_INFLATED = 1 << 18
"""Maximum number of bytes before compression: two million offsets."""
_MOST_RUNS = _INFLATED // 4
"""Number of runs that fit with lengths of two bytes."""
_SMALL = 256


def read_parallel_consumer(text: str, offset: int) -> tuple[Run, ...] | None:
    """Return the records completed beyond *offset*, or None if the text is not from Parallel Consumer.

    Args:
        text: The text as stored by the broker.
        offset: The committed offset.

    Raises:
        ValueError: It begins as only Parallel Consumer's texts do, but cannot be read. The message is half a sentence.

    Example:
        >>> read_parallel_consumer("bgABAAMAAgAB", 420)  # runs of 1, 3, 2 and 1
        (Run(start=421, end=424), Run(start=426, end=427))
        >>> read_parallel_consumer("worker-7", 420) is None
        True
    """
    content = _bytes(text)
    if not content:
        return None
    form, content = content[0], content[1:]
    compressed = form in _COMPRESSED
    if compressed:
        if not content.startswith(_ZSTANDARD):
            return None
        form, content = _COMPRESSED[form], _inflated(content)
    if form in _BITS:
        runs = _runs_in_bits(content, _BITS[form], offset)
    elif form in _RUNS:
        # A word of letters can be valid base 64 too, but has no small number: better a duplicate than a lost record.
        runs = _runs_in_lengths(content, _RUNS[form], offset, LAST_OFFSET if compressed else _SMALL)
    else:
        return None
    return None if runs and runs[-1].end > LAST_OFFSET else runs


def _bytes(text: str) -> bytes:
    """Decode base 64, exactly as an encoder writes it; empty if the text is anything else."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
    return content if base64.b64encode(content).decode() == text else b""


def _inflated(content: bytes) -> bytes:
    try:
        import cramjam  # noqa: PLC0415 - rarely needed
    except ImportError:
        raise ValueError("it is compressed with Zstandard: install it with  pip install 'aiokafka[zstd]'") from None
    room = bytearray(_INFLATED)
    try:
        return bytes(room[: cramjam.zstd.decompress_into(content, room)])
    except cramjam.DecompressionError as error:
        raise ValueError(f"it cannot be decompressed, or has more than {_INFLATED} bytes ({error})") from None


def _runs_in_bits(content: bytes, count_format: str, offset: int) -> tuple[Run, ...] | None:
    width = struct.calcsize(count_format)
    if len(content) <= width:
        return None
    (count,) = struct.unpack_from(count_format, content)
    if count < 0 or len(content) != width + -(-count // 8) + 1:
        return None
    number = int.from_bytes(content[width:], "little")
    # The committed offset is incomplete, and the last encoded one is complete.
    if number & 1 or number.bit_length() != count:
        return None
    bits = f"{number:b}"[::-1]
    if bits.count("01") > _MOST_RUNS:
        raise ValueError(f"it has more than {_MOST_RUNS} runs")
    return tuple(Run(offset + found.start(), offset + found.end()) for found in re.finditer("1+", bits))


def _runs_in_lengths(content: bytes, length_format: str, offset: int, small: int) -> tuple[Run, ...] | None:
    width = struct.calcsize(f">{length_format}")
    if not content or len(content) % width:
        return None
    lengths = struct.unpack(f">{len(content) // width}{length_format}", content)
    if lengths == (0,):
        return ()  # nothing beyond the committed offset is complete
    if len(lengths) % 2 or not 0 < min(lengths) < small:
        return None
    runs = []
    for incomplete, complete in zip(lengths[::2], lengths[1::2], strict=True):
        start = offset + incomplete
        offset = start + complete
        runs.append(Run(start, offset))
    return tuple(runs)
