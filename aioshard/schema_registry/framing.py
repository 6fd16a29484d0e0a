"""The bytes and headers with which a value says which schema it was written with.

Most values begin with a 0 and the number of the schema in four bytes. Newer clients can leave the value alone and put
the number, or a GUID after a 1, into a header. Of Protobuf, the position of the message in its schema follows.
"""

import uuid
from typing import NamedTuple

from aioshard.records import Record

SchemaId = int | str
"""The number of a schema, or its GUID."""

_HEADER = "__value_schema_id"
_MAGIC = 0
_MAGIC_OF_GUID = 1
_ID_END = 5
_GUID_END = 17
_MOST_INDEXES = 100
_LONGEST_VARINT = 63


class FramingError(Exception):
    """A value does not say which schema it was written with; the sentence continues after the name of the record."""


class Frame(NamedTuple):
    """The parts of a value that was written with a schema."""

    schema: SchemaId
    content: bytes
    """The value without the schema's number."""
    rest: bytes | None = None
    """The rest of the header, if that has the number: of Protobuf, the position of the message."""


def frame_of(record: Record) -> Frame:
    r"""Split the value of a record.

    Raises:
        FramingError: It does not name a schema.

    Example:
        >>> frame_of(Record("orders", 0, 41, None, b"\0\0\0\0\7{}", (), 0.0))
        Frame(schema=7, content=b'{}', rest=None)
    """
    value = record.value or b""
    if record.headers:
        for name, content in record.headers:
            if name == _HEADER and content:
                schema, rest = _named_by(content)
                return Frame(schema, value, rest)
    if len(value) >= _ID_END and value[0] == _MAGIC:
        return Frame(int.from_bytes(value[1:_ID_END]), value[_ID_END:])
    raise FramingError(_found(value))


def schema_named_in(record: Record) -> SchemaId | None:
    """Return the schema that a record names; None if it names none."""
    try:
        return frame_of(record).schema
    except FramingError:
        return None


def framed(schema: int, content: bytes) -> bytes:
    r"""Return a value that names its schema.

    Example:
        >>> framed(7, b"{}")
        b'\x00\x00\x00\x00\x07{}'
    """
    return bytes((_MAGIC,)) + schema.to_bytes(_ID_END - 1) + content


def _named_by(content: bytes) -> tuple[SchemaId, bytes]:
    if content[0] == _MAGIC_OF_GUID and len(content) >= _GUID_END:
        return str(uuid.UUID(bytes=content[1:_GUID_END])), content[_GUID_END:]
    if content[0] == _MAGIC and len(content) >= _ID_END:
        return int.from_bytes(content[1:_ID_END]), content[_ID_END:]
    raise FramingError(f"names no schema in its header {_HEADER!r}, which has {len(content)} bytes")


def _found(value: bytes) -> str:
    expected = "expected a 0 and the number of a schema in 4 bytes, as a schema registry's serializers write it"
    if not value:
        return f"does not name a schema: its value is empty; {expected}"
    if value[0] == _MAGIC:
        return f"does not name a schema: its value has only {len(value)} bytes; {expected}"
    hint = ""
    if value[:1] in (b"{", b"["):
        hint = " (plain JSON? annotate the handler's type without a schema registry)"
    return f"does not name a schema: its value begins with byte 0x{value[0]:02x}{hint}; {expected}"


# Positions of Protobuf messages -------------------------------------------------------


def split_indexes(content: bytes) -> tuple[tuple[int, ...], bytes]:
    r"""Split off the position of a message in its schema: that of the outer message first.

    Raises:
        FramingError: It is cut off, or is not one.

    Example:
        >>> split_indexes(b"\0rest"), split_indexes(b"\4\2\0rest")
        (((0,), b'rest'), ((1, 0), b'rest'))
    """
    count, start = _varint(content, 0)
    if count == 0:
        return (0,), content[start:]
    if not 0 < count <= _MOST_INDEXES:
        raise FramingError(f"does not name a message of its schema: it claims to be nested {count} times")
    indexes = []
    for _ in range(count):
        index, start = _varint(content, start)
        indexes.append(index)
    return tuple(indexes), content[start:]


def joined_indexes(indexes: tuple[int, ...]) -> bytes:
    r"""Return the bytes of a message's position.

    Example:
        >>> joined_indexes((0,)), joined_indexes((1, 0))
        (b'\x00', b'\x04\x02\x00')
    """
    if indexes == (0,):
        return b"\0"
    return b"".join(map(_zigzag, (len(indexes), *indexes)))


def _varint(content: bytes, start: int) -> tuple[int, int]:
    """Read a number in zigzag encoding; return it and the place behind it."""
    value = 0
    for number, byte in enumerate(content[start : start + _LONGEST_VARINT // 7]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:  # noqa: PLR2004 - the last byte of the number
            return (value >> 1) ^ -(value & 1), start + number + 1
    raise FramingError("does not name a message of its schema: its value ends too early")


def _zigzag(number: int) -> bytes:
    value = number << 1
    encoded = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - seven bits in each byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
