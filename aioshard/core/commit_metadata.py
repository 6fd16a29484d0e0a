"""The text that goes with a committed offset: one versioned format for all that is noted there.

`aioshard/1 first=12 lease=7f3a@1750000000 done=r:420:pzt_:AQM foreign=what another program had noted`: fields in this
order, each at most once and only where there is something to say, a space between them. A field that this version
does not know is passed over; what must not be passed over is another version's. `foreign` takes the rest of the text.
"""

import base64
import binascii
import dataclasses
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["MOST_UNITS", "CommitMetadata", "Lease", "Run", "runs_of", "utf16_units"]

MOST_UNITS: Final = 4095
"""What a broker stores at most with its default settings (`offset.metadata.max.bytes`), in UTF-16 code units: it allows
4,096, and librdkafka appends one."""

_VERSION = 1
_HEAD = re.compile(r"aioshard/(\d{1,9})(?: |$)")
_FIELD = re.compile(r"([a-z]+)=([^ ]*)(?: |$)")
_LEASE = re.compile(r"([A-Za-z0-9_.-]{1,64})@(\d{1,12})")
_LATEST = 253_402_300_799
"""The last second that has a date."""
_NUMBER = re.compile(r"\d{1,19}")
_DONE = re.compile(r"([rz]):(\d{1,19}):([A-Za-z0-9_-]{4}):(.+)", re.DOTALL)
_FOREIGN = " foreign="

_INFLATED = 1 << 18
"""Bytes of run lengths at most, before they are deflated."""
_SHORT = 64
"""A text that is not longer than that need not be made shorter."""
_LAST_OFFSET = (1 << 63) - 1
_OFFSET_BITS = 63

# 32,768 characters of which each is one code unit: no surrogates, no spaces, no controls.
_LOW, _LOW_COUNT = 0x3400, 0xA000 - 0x3400
_HIGH = 0xAC00
_BITS = 15
_LARGEST = (1 << _BITS) - 1

_CONTINUED = 0x80
"""Marks a byte of a number after which more come, with seven bits each."""
_PLANE_END = 0xFFFF
"""The last character that is one code unit."""
_HALVES = re.compile("[\ud800-\udfff]")


class Lease(NamedTuple):
    """Somebody has the partition for a time, without being a member of the group."""

    plan: str
    """The id of a run over history; letters, digits, `.`, `_` and `-`, at most 64."""
    until: int
    """Seconds since the epoch, from when on it means nothing any more."""


class Run(NamedTuple):
    """Offsets from *start* up to, and without, *end*."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitMetadata:
    """What is noted with a committed offset.

    Attributes:
        first_generation: In which the group first resolved its position on the partition.
        lease: Who has the partition although the group has no member.
        finished: Records that are complete beyond the committed offset; ascending, apart from each other.
        foreign: What another program had noted. It belongs to the offset that it was committed with.
        ignored: Why something of the text counts as not there; empty in a text that is whole. Never written.

    Example:
        >>> noted = CommitMetadata(first_generation=12, finished=(Run(421, 424),))
        >>> noted.text(420)
        'aioshard/1 first=12 done=r:420:pzt_:AQM'
        >>> CommitMetadata.read(noted.text(420), 420) == noted
        True
        >>> CommitMetadata.read("worker-7", 420)
        CommitMetadata(first_generation=None, lease=None, finished=(), foreign='worker-7', ignored=())
    """

    first_generation: int | None = None
    lease: Lease | None = None
    finished: tuple[Run, ...] = ()
    foreign: str | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str, offset: int) -> "CommitMetadata":
        """Read what was committed with *offset*; never raises, whatever the text.

        Args:
            text: As the broker has it. A NUL at its end, which librdkafka appends, is no part of it.
            offset: The committed offset. What is noted as finished for another one counts as not there: whoever
                moved the offset took the text along.
        """
        text = text.removesuffix("\0")
        if not text:
            return cls()
        head = _HEAD.match(text)
        if head is None:
            damaged = text.startswith("aioshard/")
            return cls(ignored=("it begins like ours and is not",)) if damaged else cls(foreign=text)
        if int(head[1]) != _VERSION:
            return cls(foreign=text, ignored=(f"its format {head[1]} is not known to this version of aioshard",))
        return _read_fields(text, head.end(), offset)

    def text(self, offset: int) -> str:
        """The text to commit with *offset*; empty when there is nothing to note.

        It has at most `MOST_UNITS` code units, no NUL and no half of a surrogate pair. Finished records for which
        there is no room are left out, the highest first: they are processed once more.

        Raises:
            ValueError: `foreign` has no room or cannot be stored, or a value is outside of what the format knows. The
                message is a sentence.
        """
        fields = []
        if self.first_generation is not None:
            if not 0 <= self.first_generation <= _LAST_OFFSET:
                raise ValueError(f"first_generation={self.first_generation} is no generation")
            fields.append(f"first={self.first_generation}")
        if self.lease is not None:
            lease = f"{self.lease.plan}@{self.lease.until}"
            if not _LEASE.fullmatch(lease) or self.lease.until > _LATEST:
                raise ValueError(f"{self.lease} cannot be noted: a plan id of up to 64 letters and digits was expected")
            fields.append(f"lease={lease}")
        foreign = "" if self.foreign is None else _FOREIGN + _storable(self.foreign)
        head = f"aioshard/{_VERSION} "
        room = MOST_UNITS - len(head) - sum(len(field) + 1 for field in fields) - utf16_units(foreign)
        if room < 0:
            raise ValueError(
                f"what another program noted ({utf16_units(self.foreign or '')} characters) does not fit beside ours "
                f"into {MOST_UNITS}"
            )
        done = _written(_checked(self.finished, offset), offset, room - len("done=")) if self.finished else ""
        if done:
            fields.append(f"done={done}")
        if not fields and not foreign:
            return ""
        return (head + " ".join(fields)).rstrip() + foreign


def utf16_units(text: str) -> int:
    """How long a broker finds a text."""
    return len(text) + sum(1 for character in text if ord(character) > _PLANE_END)


def runs_of(offsets: Iterable[int]) -> tuple[Run, ...]:
    """Offsets in any order as runs.

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


# The fields ---------------------------------------------------------------------------


def _read_fields(text: str, position: int, offset: int) -> CommitMetadata:
    first: int | None = None
    lease: Lease | None = None
    finished: tuple[Run, ...] = ()
    foreign: str | None = None
    ignored: list[str] = []
    while position < len(text):
        if text.startswith(_FOREIGN[1:], position):
            foreign = text[position + len(_FOREIGN) - 1 :]
            break
        field = _FIELD.match(text, position)
        if field is None:
            ignored.append(f"what comes from character {position} on is no field")
            break
        position = field.end()
        name, value = field.groups()
        try:
            if name == "first":
                first = _number(value)
            elif name == "lease":
                lease = _read_lease(value)
            elif name == "done":
                finished = _read_done(value, offset)
        except ValueError as error:
            ignored.append(f"{name}: {error}")
    return CommitMetadata(
        first_generation=first, lease=lease, finished=finished, foreign=foreign, ignored=tuple(ignored)
    )


def _number(value: str) -> int:
    if not _NUMBER.fullmatch(value, endpos=19) or int(value) > _LAST_OFFSET:
        raise ValueError("it is no number")
    return int(value)


def _read_lease(value: str) -> Lease:
    found = _LEASE.fullmatch(value)
    if found is None or int(found[2]) > _LATEST:
        raise ValueError("it is no lease")
    return Lease(found[1], int(found[2]))


def _storable(foreign: str) -> str:
    if "\0" in foreign or _HALVES.search(foreign):
        raise ValueError("what another program noted holds characters that no broker stores")
    return foreign


# Finished records ---------------------------------------------------------------------


def _checked(runs: Sequence[Run], offset: int) -> Sequence[Run]:
    before = offset - 1
    for run in runs:
        if not before < run.start < run.end <= _LAST_OFFSET:
            raise ValueError(f"finished={run} does not come after what is before it, which ends at {before}")
        before = run.end
    return runs


def _written(runs: Sequence[Run], offset: int, room: int) -> str:
    """As many runs as there is room for, from the lowest on; empty when there is none."""
    packed = bytearray()
    borders = []
    before = offset
    for run in runs:
        packed += _varint(run.start - before) + _varint(run.end - run.start)
        if len(packed) > _INFLATED:
            break
        borders.append(len(packed))
        before = run.end
    best = ""
    fits, too_many = 0, len(borders) + 1
    tried = len(borders)
    while fits < too_many - 1:
        text = _fitting(bytes(packed[: borders[tried - 1]]), offset, room)
        if text:
            best, fits = text, tried
        else:
            too_many = tried
        tried = (fits + too_many) // 2
    return best


def _fitting(packed: bytes, offset: int, room: int) -> str:
    """The shorter form of run lengths, or the one that spares the work where that is short; empty when too long."""
    plain, deflated = (f"{form}:{offset}:{_checksum(offset, packed)}:" for form in "rz")
    in_letters = len(plain) + -(-len(packed) * 8 // 6)
    if in_letters <= min(room, _SHORT):
        return plain + _in_letters(packed)
    content = zlib.compress(packed, 9)
    in_units = len(deflated) + -(-len(content) * 8 // _BITS)
    if min(in_letters, in_units) > room:
        return ""
    return plain + _in_letters(packed) if in_letters <= in_units else deflated + _in_units(content)


def _read_done(value: str, offset: int) -> tuple[Run, ...]:
    found = _DONE.fullmatch(value)
    if found is None:
        raise ValueError("it is in no form that this version of aioshard knows")
    if int(found[2]) != offset:
        raise ValueError(f"it was noted for offset {found[2]} and the committed one is {offset}")
    packed = _from_letters(found[4]) if found[1] == "r" else _inflated(_from_units(found[4]))
    if found[3] != _checksum(offset, packed):
        raise ValueError("it is damaged: its checksum does not fit")
    numbers = _varints(packed)
    if len(numbers) % 2:
        raise ValueError("it is cut off")
    runs: list[Run] = []
    before = offset
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        start = before + gap
        if length == 0 or (gap == 0 and runs) or start + length > _LAST_OFFSET:
            raise ValueError("its runs make no sense")
        before = start + length
        runs.append(Run(start, before))
    return tuple(runs)


def _checksum(offset: int, packed: bytes) -> str:
    """Four letters: what is damaged must not make records count as finished."""
    return _in_letters(zlib.crc32(packed, offset & 0xFFFFFFFF).to_bytes(4, "big")[1:])


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= _CONTINUED:
        encoded.append(number & 0x7F | _CONTINUED)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _varints(packed: bytes) -> list[int]:
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
    """Fifteen bits to each character, which is one code unit."""
    bits = int.from_bytes(content, "big")
    padding = -len(content) * 8 % _BITS
    bits <<= padding
    count = (len(content) * 8 + padding) // _BITS
    values = [bits >> (_BITS * place) & _LARGEST for place in range(count - 1, -1, -1)]
    return "".join(chr(_LOW + value) if value < _LOW_COUNT else chr(_HIGH + value - _LOW_COUNT) for value in values)


def _from_units(text: str) -> bytes:
    bits = 0
    for character in text:
        code = ord(character)
        value = code - _LOW if code < _HIGH else code - _HIGH + _LOW_COUNT
        if not (_LOW <= code < _LOW + _LOW_COUNT or code >= _HIGH) or value > _LARGEST:
            raise ValueError(f"character {code:#x} is none of ours")
        bits = bits << _BITS | value
    length = len(text) * _BITS // 8
    # What pads the last character is less than one, but may be more than a byte: zlib knows its own end.
    return (bits >> (len(text) * _BITS - length * 8)).to_bytes(length, "big")
