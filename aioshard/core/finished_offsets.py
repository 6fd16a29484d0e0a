"""Encode the offsets finished beyond the committed one as text that a broker stores; the shortest of three forms wins.

The text is `FORM:OFFSET:CHECKSUM:CONTENT`. The form determines the content:

* `r`: the lengths of gaps and runs as numbers of seven bits per byte, in base 64; short ones stay readable;
* `z`: the same, deflated;
* `b`: one bit per offset, for irregular patterns. Its size depends on the span, not on which offsets are finished.

`z` and `b` store fifteen bits in each character, because brokers count characters.
"""

import base64
import binascii
import bisect
import operator
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["LAST_OFFSET", "Run", "beyond", "holds", "read_finished", "records_with_room", "runs_of", "written"]

LAST_OFFSET: Final = (1 << 63) - 1

_TEXT = re.compile(r"([rzb]):(\d{1,19}):([A-Za-z0-9_-]{4}):(.+)", re.DOTALL)
_INFLATED = 1 << 18
"""Maximum bytes of run lengths before compression."""
_LEVEL = 7
"""Compression level: 9 makes full-length texts 0.7 % shorter and takes three times as long."""
_SHORT = 64
"""A text up to this length is not worth compressing."""
_OFFSET_BITS = 63

# 32,768 characters, each a single code unit: no surrogates, spaces or control characters.
_LOW, _LOW_COUNT = 0x3400, 0xA000 - 0x3400
_HIGH = 0xAC00
_BITS = 15
_LARGEST = (1 << _BITS) - 1
_GROUP_BYTES, _GROUP_UNITS = 15, 8
"""This many bytes fill exactly this many characters."""

_CONTINUED = 0x80
"""Marks a byte of a number that is followed by more bytes, of seven bits each."""
_NUMBER_BASE = 0x80


_START, _END = operator.itemgetter(0), operator.itemgetter(1)


class Run(NamedTuple):
    """Offsets from *start* up to but excluding *end*."""

    start: int
    end: int


def runs_of(offsets: Iterable[int]) -> tuple[Run, ...]:
    """Group offsets, in any order, into runs.

    Example:
        >>> runs_of([7, 3, 4])
        (Run(start=3, end=5), Run(start=7, end=8))
    """
    runs: list[Run] = []
    for offset in sorted(set(offsets)):
        if runs and runs[-1].end == offset:
            runs[-1] = Run(runs[-1].start, offset + 1)
        else:
            runs.append(Run(offset, offset + 1))
    return tuple(runs)


def holds(runs: Sequence[Run], offset: int) -> bool:
    """Whether an offset is in one of the ascending *runs*."""
    place = bisect.bisect_right(runs, offset, key=_START) - 1
    return place >= 0 and offset < runs[place].end


def beyond(runs: Sequence[Run], offset: int) -> tuple[Run, ...]:
    """Return the part of *runs* at or above *offset*.

    Example:
        >>> beyond((Run(3, 5), Run(7, 10)), 8)
        (Run(start=8, end=10),)
    """
    return tuple(Run(max(run.start, offset), run.end) for run in runs if run.end > offset)


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
        59900
        >>> records_with_room(span=1_000_000, incomplete=1, units=4_000) > 1_500
        True
        >>> records_with_room(span=1_000_000, incomplete=5_000, units=4_000)
        0
    """
    by_bitmap = units * _BITS - span
    if by_bitmap > 0:
        return by_bitmap
    room = units * _BITS // 8
    low, high = 0, room
    while low < high:
        more = (low + high + 1) // 2
        if _bytes_at_most(span + more, incomplete + more) <= room:
            low = more
        else:
            high = more - 1
    return low


def _bytes_at_most(span: int, incomplete: int) -> int:
    """Return the maximum size of the encoded lengths: two per incomplete record, of which few need several bytes."""
    numbers = most = 2 * incomplete + 1
    longer = span // _NUMBER_BASE
    while longer:
        most += min(numbers, longer)
        longer //= _NUMBER_BASE
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
    packed, borders = _packed(_checked(runs, offset), offset)
    text = _fitting(packed, offset, room) if len(borders) == len(runs) else ""
    if text:
        return text
    in_bits, reached = _bitmap(runs, offset, room)
    if reached == runs[-1].end:
        return in_bits
    least = bisect.bisect_left(runs, reached, key=_END) + 1
    return _longest_prefix(packed, borders, least, offset, room) or in_bits


def _checked(runs: Sequence[Run], offset: int) -> Sequence[Run]:
    before = offset - 1
    for run in runs:
        if not before < run.start < run.end <= LAST_OFFSET:
            raise ValueError(f"finished={run} does not come after what is before it, which ends at {before}")
        before = run.end
    return runs


def _packed(runs: Sequence[Run], offset: int) -> tuple[bytes, list[int]]:
    """Encode the lengths as numbers, with the position where each run ends; excess runs are left out."""
    packed = bytearray()
    borders = []
    before = offset
    for run in runs:
        packed += _number(run.start - before) + _number(run.end - run.start)
        if len(packed) > _INFLATED:
            break
        borders.append(len(packed))
        before = run.end
    return bytes(packed), borders


def _longest_prefix(packed: bytes, borders: Sequence[int], least: int, offset: int, room: int) -> str:
    """Encode the longest prefix of the runs that fits; empty if *least* runs do not fit, which one attempt shows."""
    best = ""
    fits, too_many = least - 1, len(borders) + 1
    tried = least
    while fits < too_many - 1:
        text = _fitting(packed[: borders[tried - 1]], offset, room)
        if text:
            best, fits = text, tried
        elif tried == least:
            break
        else:
            too_many = tried
        tried = (fits + too_many) // 2
    return best


def _fitting(packed: bytes, offset: int, room: int) -> str:
    """Choose the shorter form of run lengths, without compressing short ones; empty if neither fits."""
    plain, deflated = (_head(form, offset, packed) for form in "rz")
    in_letters = len(plain) + -(-len(packed) * 8 // 6)
    if in_letters <= min(room, _SHORT):
        return plain + _in_letters(packed)
    content = zlib.compress(packed, _LEVEL)
    in_units = len(deflated) + -(-len(content) * 8 // _BITS)
    if min(in_letters, in_units) > room:
        return ""
    return plain + _in_letters(packed) if in_letters <= in_units else deflated + _in_units(content)


def _bitmap(runs: Sequence[Run], offset: int, room: int) -> tuple[str, int]:
    """Encode one bit per offset as far as they fit; return the text and the offset reached. Empty if nothing fits."""
    bits_left = (room - len(_head("b", offset, b""))) * _BITS // 8 * 8
    if bits_left <= 0:
        return "", offset
    end = min(offset + bits_left, runs[-1].end)
    digits = []
    reached = before = offset
    for run in runs:
        if run.start >= end:
            break
        reached = min(run.end, end)
        digits.append("0" * (run.start - before) + "1" * (reached - run.start))
        before = run.end
    bits = "".join(digits)
    if not bits:
        return "", offset
    content = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    return _head("b", offset, content) + _in_units(content), reached


def _head(form: str, offset: int, content: bytes) -> str:
    return f"{form}:{offset}:{_checksum(offset, content)}:"


def _checksum(offset: int, content: bytes) -> str:
    """Return four letters that keep a damaged text from marking records as finished."""
    return _in_letters(zlib.crc32(content, offset & 0xFFFFFFFF).to_bytes(4, "big")[1:])


# Reading ------------------------------------------------------------------------------


def read_finished(text: str, offset: int) -> tuple[Run, ...]:
    """Decode the output of `written` for *offset*.

    Raises:
        ValueError: The text is damaged, in an unknown form, or was written for another offset.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError("it is in no form that this version of aioshard knows")
    form, its_offset, checksum, content = found.groups()
    if int(its_offset) != offset:
        raise ValueError(f"it was noted for offset {its_offset} and the committed one is {offset}")
    packed = _from_letters(content) if form == "r" else _from_units(content)
    if form == "z":
        packed = _inflated(packed)
    elif form == "b":
        packed = packed.rstrip(b"\0")
    if checksum != _checksum(offset, packed):
        raise ValueError("it is damaged: its checksum does not fit")
    return _runs_in_bits(packed, offset) if form == "b" else _runs_in_numbers(packed, offset)


def _runs_in_bits(content: bytes, offset: int) -> tuple[Run, ...]:
    bits = f"{int.from_bytes(content, 'big'):0{len(content) * 8}b}"
    if bits[:1] == "1":
        raise ValueError("its runs make no sense")
    return tuple(Run(offset + found.start(), offset + found.end()) for found in re.finditer("1+", bits))


def _runs_in_numbers(packed: bytes, offset: int) -> tuple[Run, ...]:
    numbers = _numbers(packed)
    if len(numbers) % 2:
        raise ValueError("it is cut off")
    runs: list[Run] = []
    before = offset
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        start = before + gap
        if length == 0 or (gap == 0 and runs) or start + length > LAST_OFFSET:
            raise ValueError("its runs make no sense")
        before = start + length
        runs.append(Run(start, before))
    return tuple(runs)


# Bytes and characters -------------------------------------------------------------------


def _number(number: int) -> bytes:
    encoded = bytearray()
    while number >= _CONTINUED:
        encoded.append(number & 0x7F | _CONTINUED)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


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
        raise ValueError("it is cut off")
    return numbers


def _inflated(data: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(data, _INFLATED)
    except zlib.error as error:
        raise ValueError(f"it cannot be inflated ({error})") from None
    if not inflate.eof:
        raise ValueError("it is cut off, or larger than it may be")
    return content


def _in_letters(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _from_letters(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is damaged ({error})") from None


def _in_units(content: bytes) -> str:
    """Store fifteen bits in each character, which is one code unit; by groups, to stay fast for long texts."""
    units: list[str] = []
    for start in range(0, len(content), _GROUP_BYTES):
        group = content[start : start + _GROUP_BYTES]
        bits = int.from_bytes(group.ljust(_GROUP_BYTES, b"\0"), "big")
        for place in range(_GROUP_UNITS - 1, -1, -1):
            value = bits >> (_BITS * place) & _LARGEST
            units.append(chr(_LOW + value) if value < _LOW_COUNT else chr(_HIGH + value - _LOW_COUNT))
    return "".join(units[: -(-len(content) * 8 // _BITS)])


def _from_units(text: str) -> bytes:
    content = bytearray()
    for start in range(0, len(text), _GROUP_UNITS):
        group = text[start : start + _GROUP_UNITS]
        bits = 0
        for character in group:
            bits = bits << _BITS | _value(character)
        bits <<= _BITS * (_GROUP_UNITS - len(group))
        content += bits.to_bytes(_GROUP_BYTES, "big")
    # The padding is shorter than one character but may be longer than a byte: each form knows its own end.
    return bytes(content[: len(text) * _BITS // 8])


def _value(character: str) -> int:
    code = ord(character)
    value = code - _LOW if code < _HIGH else code - _HIGH + _LOW_COUNT
    if not (_LOW <= code < _LOW + _LOW_COUNT or code >= _HIGH) or value > _LARGEST:
        raise ValueError(f"character {code:#x} is none of ours")
    return value
