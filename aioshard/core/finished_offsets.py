"""Encode the offsets finished beyond the committed one as text that a broker stores.

The text is `OFFSET:CONTENT`. The content is the lengths of gaps and runs, as numbers of seven bits per byte, deflated.
Each character stores fifteen bits, because brokers count characters. For any pattern, the text takes little more than
one bit per offset.
"""

import bisect
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

LAST_OFFSET: Final = (1 << 63) - 1

_TEXT = re.compile(r"(\d{1,19}):(.+)", re.DOTALL)
_INFLATED = 1 << 18
"""Maximum bytes of run lengths before compression."""
_OFFSET_BITS = 63

_BITS = 15
_FIRST_CHARACTER = 0x3400
"""The first of 32,768 characters of one code unit each: no surrogates, spaces or control characters."""
_OVERHEAD_BITS = 400
"""Bits of a text in addition to one per offset."""

_STRATEGIES = (zlib.Z_RLE, zlib.Z_HUFFMAN_ONLY)
"""Ways to compress: the first is shorter for regular patterns, the second for irregular ones."""

_SMALLEST_WINDOW = 9
"""The smallest window of deflate, as the binary logarithm of its bytes."""

_CONTINUED = 0x80
"""Marks a byte of a number that is followed by more bytes, of seven bits each."""


class Run(NamedTuple):
    """Offsets from *start* up to but excluding *end*."""

    start: int
    end: int


def joined(runs: Iterable[Run]) -> list[Run]:
    """Join ascending runs that adjoin.

    Example:
        >>> joined([Run(3, 5), Run(5, 6), Run(7, 8)])
        [Run(start=3, end=6), Run(start=7, end=8)]
    """
    result: list[Run] = []
    for run in runs:
        if result and result[-1].end == run.start:
            result[-1] = Run(result[-1].start, run.end)
        else:
            result.append(run)
    return result


def holds(runs: Sequence[Run], offset: int) -> bool:
    """Whether an offset is in one of the ascending *runs*."""
    index = bisect.bisect_left(runs, (offset + 1,)) - 1  # a shorter tuple is less than the run that starts there
    return index >= 0 and offset < runs[index].end


def beyond(runs: Sequence[Run], offset: int) -> tuple[Run, ...]:
    """Return the part of *runs* at or above *offset*.

    Example:
        >>> beyond((Run(3, 5), Run(7, 10)), 8)
        (Run(start=8, end=10),)
    """
    return tuple(Run(max(run.start, offset), run.end) for run in runs if run.end > offset)


def below(runs: Sequence[Run], offset: int) -> tuple[Run, ...]:
    """Return the part of *runs* below *offset*.

    Example:
        >>> below((Run(3, 5), Run(7, 10)), 8)
        (Run(start=3, end=5), Run(start=7, end=8))
    """
    return tuple(Run(run.start, min(run.end, offset)) for run in runs if run.start < offset)


# Available room ------------------------------------------------------------------------


def records_with_room(span: int, incomplete: int, units: int) -> int:
    """Return how many more records may be buffered so that any completions among them still fit into the text.

    Takes constant time, from two figures alone, without building the text. If offsets have gaps between them, the text
    may get longer, and `written` then leaves out the highest.

    Args:
        span: From the committable offset to the end of the buffered records.
        incomplete: Number of incomplete records in that span; at most *span*.
        units: Number of characters available for the content.

    Example:
        >>> records_with_room(span=100, incomplete=100, units=4_000)
        59500
        >>> records_with_room(span=1_000_000, incomplete=1, units=4_000) > 1_500
        True
        >>> records_with_room(span=1_000_000, incomplete=5_000, units=4_000)
        0
    """
    by_span = units * _BITS - _OVERHEAD_BITS - span
    if by_span > 0:
        return by_span
    room = units * _BITS // 8
    return bisect.bisect_right(
        range(1, room + 1), room, key=lambda more: _bytes_at_most(span + more, incomplete + more)
    )


def _bytes_at_most(span: int, incomplete: int) -> int:
    """Return the maximum size of the encoded lengths: two per incomplete record, few of them of several bytes."""
    numbers = most = 2 * incomplete + 1
    while span := span >> 7:
        most += min(numbers, span)
    return most


# Writing ------------------------------------------------------------------------------


def written(runs: Sequence[Run], offset: int, room: int) -> str:
    """Encode as many runs as fit, from the lowest on; empty if none fits.

    Args:
        runs: Runs beyond *offset*, ascending and not adjacent.
        offset: The committed offset.
        room: Number of characters available.

    Raises:
        ValueError: *runs* are out of order, or not beyond *offset*.
    """
    packed, ends = _packed(runs, offset)
    head = f"{offset}:"
    limit = (room - len(head)) * _BITS // 8
    strategy, content = _shortest(packed)
    if len(content) > limit:
        fitting = bisect.bisect_right(ends, limit, key=lambda end: len(_deflated(packed[:end], strategy)))
        if not fitting:
            return ""
        content = _deflated(packed[: ends[fitting - 1]], strategy)
    return head + _to_units(content)


def written_whole(runs: Sequence[Run], offset: int, room: int) -> str | None:
    """Encode all runs; None if they do not fit.

    Args:
        runs: As for `written`.
        offset: As for `written`.
        room: As for `written`.

    Raises:
        ValueError: As for `written`.
    """
    packed, ends = _packed(runs, offset)
    head = f"{offset}:"
    _, content = _shortest(packed)
    if len(ends) < len(runs) or len(content) > (room - len(head)) * _BITS // 8:
        return None
    return head + _to_units(content)


def _shortest(packed: bytes) -> tuple[int, bytes]:
    """Return the strategy that compresses best, with its result."""
    deflated = {strategy: _deflated(packed, strategy) for strategy in _STRATEGIES}
    return min(deflated.items(), key=lambda result: len(result[1]))


def _packed(runs: Sequence[Run], offset: int) -> tuple[bytes, list[int]]:
    """Encode the lengths as numbers; also return where each run ends in the bytes. Excess runs are left out."""
    packed = bytearray()
    ends: list[int] = []
    previous_end = offset
    least_gap = 0
    for start, end in runs:
        gap = start - previous_end
        length = end - start
        if gap < least_gap or length <= 0 or end > LAST_OFFSET:
            raise ValueError(f"runs must be ascending: {Run(start, end)} does not begin after {previous_end}")
        if gap < _CONTINUED and length < _CONTINUED:  # most are: no calls
            packed.append(gap)
            packed.append(length)
        else:
            packed += _number(gap) + _number(length)
        if len(packed) > _INFLATED:
            break
        ends.append(len(packed))
        previous_end = end
        least_gap = 1
    return bytes(packed[: ends[-1]]), ends


def _deflated(packed: bytes, strategy: int) -> bytes:
    # Neither strategy looks back for more than a byte, and a small window is made in less time.
    deflate = zlib.compressobj(wbits=_SMALLEST_WINDOW, strategy=strategy)
    return deflate.compress(packed) + deflate.flush()


def _number(number: int) -> bytes:
    encoded = bytearray()
    while number >= _CONTINUED:
        encoded.append(number & 0x7F | _CONTINUED)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _to_units(content: bytes) -> str:
    """Store fifteen bits in each character, which is one code unit."""
    padding = -8 * len(content) % _BITS
    length = 8 * len(content) + padding
    bits = f"{int.from_bytes(content, 'big') << padding:0{length}b}"
    return "".join([chr(_FIRST_CHARACTER + int(bits[start : start + _BITS], 2)) for start in range(0, length, _BITS)])


# Reading ------------------------------------------------------------------------------


def read_finished(text: str, offset: int) -> tuple[Run, ...]:
    """Decode the output of `written` for *offset*.

    Raises:
        ValueError: The text is damaged, or was written for another offset.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError("damaged")
    its_offset, content = match.groups()
    if int(its_offset) != offset:
        raise ValueError(f"written for offset {its_offset}, but the committed offset is {offset}")
    numbers = _numbers(_inflated(_from_units(content)))
    if len(numbers) % 2:
        raise ValueError("truncated")
    runs: list[Run] = []
    end = offset
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        start = end + gap
        if length == 0 or (gap == 0 and runs) or start + length > LAST_OFFSET:
            raise ValueError("invalid runs")
        end = start + length
        runs.append(Run(start, end))
    return tuple(runs)


def _from_units(text: str) -> bytes:
    values = [ord(character) - _FIRST_CHARACTER for character in text]
    if not all(0 <= value < 1 << _BITS for value in values):
        raise ValueError("damaged: unexpected character")
    bits = "".join(f"{value:0{_BITS}b}" for value in values)
    return bytes(int(bits[start : start + 8], 2) for start in range(0, len(bits) - 7, 8))


def _inflated(data: bytes) -> bytes:
    """Inflate the run lengths, whose checksum keeps a damaged text from marking records as finished."""
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(data, _INFLATED)
    except zlib.error as error:
        raise ValueError(f"cannot be inflated ({error})") from None
    if not inflate.eof or inflate.unused_data.strip(b"\0"):
        raise ValueError("truncated, or too large")
    return content


def _numbers(packed: bytes) -> list[int]:
    numbers = []
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        if byte & _CONTINUED:
            shift += 7
        else:
            numbers.append(number)
            number = shift = 0
        if shift > _OFFSET_BITS:
            raise ValueError("a run is too long")
    if shift:
        raise ValueError("truncated")
    return numbers
