"""A one-line notation for Kafka's messages, and the codecs it compiles to.

A structure is a sequence of fields, `name:kind`. The kinds:

    i1 i2 i4 i8 bool    integers in network byte order, and a byte that is 0 for false
    s b u               a string or null, bytes or null, a UUID
    kind*               an array of these, or null
    [fields]            an array of structures, or null
    (fields)            a structure
    {fields}            a structure, or null

A suffix restricts a field to some versions: `@3` is version 3 only, `@3+` from 3 on, `@-3` up to 3, `@3-5` from 3 to 5.
`#0` in front of it makes a tagged field with that tag, which is sent unless its value is None. A tagged structure is
not preceded by the byte that tells it from null. White space separates fields.

In flexible versions, strings, bytes and arrays are compact, and every structure ends with its tagged fields. Those that
the notation does not name are skipped.

Source of the formats: https://kafka.apache.org/protocol.
"""

import functools
import itertools
import re
import struct
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Encoder = Callable[[bytearray, Any], None]
"""Appends a value to a message."""
Decoder = Callable[[bytes, int], tuple[Any, int]]
"""Reads a value from a message at a position; returns it and the position behind it."""


class MalformedMessageError(ValueError):
    """A message that does not have the announced form."""


class Codec(NamedTuple):
    """How the values of one kind are written and read."""

    encode: Encoder
    decode: Decoder


class Field(NamedTuple):
    """One field of a structure in the notation."""

    name: str
    kind: str
    """A scalar kind, with `*` for an array of them; the opening bracket if it has `fields`."""
    fields: "tuple[Field, ...]"
    lowest: int
    highest: int
    tag: int | None

    def is_in(self, version: int) -> bool:
        """Whether this version of the message has the field."""
        return self.lowest <= version <= self.highest


# The notation -----------------------------------------------------------------------------

_NEWEST = 999
_OPENING = re.compile(r"\s*([a-z]\w*):(?:([\[({])|((?:i1|i2|i4|i8|bool|s|b|u)\*?))", re.ASCII)
_SUFFIX = re.compile(r"(?:#(\d+))?(?:@(?:(\d+)(\+|-\d+)?|-(\d+)))?(?=[\s\])}]|$)", re.ASCII)
_CLOSING = {"[": re.compile(r"\s*\]"), "(": re.compile(r"\s*\)"), "{": re.compile(r"\s*\}")}


def parse(text: str) -> tuple[Field, ...]:
    """Parse the fields of a structure.

    Raises:
        ValueError: The text is not in the notation.
    """
    fields, end = _fields(text, 0)
    if text[end:].strip():
        raise ValueError(f"not a field: {text[end:]!r}")
    return fields


def _fields(text: str, at: int) -> tuple[tuple[Field, ...], int]:
    """Parse fields up to a closing bracket or the end of the text; return them and the position behind them."""
    fields: list[Field] = []
    while (opening := _OPENING.match(text, at)) is not None:
        name, bracket, scalar = opening.groups()
        at = opening.end()
        nested: tuple[Field, ...] = ()
        if bracket is not None:
            nested, at = _nested_fields(text, at, name, bracket)
        suffix = _SUFFIX.match(text, at)
        if suffix is None:
            raise ValueError(f"not a tag or a range of versions: {text[at:]!r}")
        at = suffix.end()
        tag, lowest, rest, highest = suffix.groups()
        versions = _versions(lowest, rest, highest)
        fields.append(Field(name, bracket or scalar, nested, *versions, None if tag is None else int(tag)))
    _refuse_ambiguous(fields)
    return tuple(fields), at


def _nested_fields(text: str, at: int, name: str, bracket: str) -> tuple[tuple[Field, ...], int]:
    """Parse the fields in brackets; return them and the position behind the closing bracket."""
    fields, at = _fields(text, at)
    closing = _CLOSING[bracket].match(text, at)
    if closing is None:
        raise ValueError(f"{name} has no closing bracket")
    if not fields:
        raise ValueError(f"{name} has no fields")
    return fields, closing.end()


def _versions(lowest: str | None, rest: str | None, highest: str | None) -> tuple[int, int]:
    """Return the range of versions of a suffix: `LOWEST`, `LOWEST+`, `LOWEST-HIGHEST`, `-HIGHEST`, or nothing."""
    if lowest is None:
        return 0, int(highest or _NEWEST)
    first = int(lowest)
    if rest is None:
        return first, first
    last = _NEWEST if rest == "+" else int(rest[1:])
    if last < first:
        raise ValueError(f"no version is in the range {lowest}{rest}")
    return first, last


def _refuse_ambiguous(fields: Sequence[Field]) -> None:
    """Refuse two fields with the same name or tag in one version."""
    for earlier, later in itertools.combinations(fields, 2):
        overlap = earlier.lowest <= later.highest and later.lowest <= earlier.highest
        if overlap and earlier.name == later.name:
            raise ValueError(f"a version has two fields {later.name}")
        if overlap and later.tag is not None and earlier.tag == later.tag:
            raise ValueError(f"a version has two fields with tag {later.tag}")


# Scalars ----------------------------------------------------------------------------------

_LOW_BITS = 0x7F
"""The part of a byte that a variable-length integer uses for its value."""
_MORE = 0x80
"""The bit that says that another byte follows; in a signed byte, the sign."""

_FIXED = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "bool": "?", "u": "16s"}
"""The kinds of fixed size, as `struct` names them."""
_LENGTH_2 = struct.Struct(">h")
_LENGTH_4 = struct.Struct(">i")


def write_varint(out: bytearray, value: int) -> None:
    """Append an unsigned variable-length integer."""
    while value > _LOW_BITS:
        out.append(value & _LOW_BITS | _MORE)
        value >>= 7
    out.append(value)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned variable-length integer of at most five bytes."""
    byte = data[at]
    at += 1
    if byte < _MORE:  # nearly always
        return byte, at
    value = byte & _LOW_BITS
    for shift in range(7, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & _LOW_BITS) << shift
        if byte < _MORE:
            return value, at
    raise MalformedMessageError("a variable-length integer does not end")


def _is_number(kind: str) -> bool:
    """Whether `struct` reads the values of a kind as they are; it returns a UUID as bytes."""
    return kind in _FIXED and kind != "u"


def _fixed(kind: str) -> Codec:
    """Return the codec of a kind of fixed size."""
    layout = struct.Struct(">" + _FIXED[kind])

    def encode(out: bytearray, value: Any) -> None:
        out += layout.pack(value.bytes if kind == "u" else value)

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        (value,) = layout.unpack_from(data, at)
        return uuid.UUID(bytes=value) if kind == "u" else value, at + layout.size

    return Codec(encode, decode)


def _write_length(out: bytearray, length: int, flexible: bool, layout: struct.Struct) -> None:
    """Append a length; -1 stands for null."""
    if flexible:
        write_varint(out, length + 1)
    else:
        out += layout.pack(length)


def _read_length(data: bytes, at: int, flexible: bool, layout: struct.Struct) -> tuple[int, int]:
    """Read a length of bytes or items that must all follow; -1 stands for null."""
    if flexible:
        length, at = read_varint(data, at)
        length -= 1
    else:
        (length,) = layout.unpack_from(data, at)
        at += layout.size
    # Each item takes at least one byte, see `Structure`. A damaged length must not make us allocate memory.
    if length > len(data) - at:
        raise MalformedMessageError(f"{length} bytes or items are announced, but only {len(data) - at} bytes follow")
    return length, at


def _variable(kind: str, *, flexible: bool) -> Codec:
    """Return the codec of strings (`s`) or bytes (`b`)."""
    layout = _LENGTH_2 if kind == "s" else _LENGTH_4
    is_text = kind == "s"

    def encode(out: bytearray, value: str | bytes | None) -> None:
        if value is None:
            _write_length(out, -1, flexible, layout)
            return
        content = value.encode() if isinstance(value, str) else value
        _write_length(out, len(content), flexible, layout)
        out += content

    def decode(data: bytes, at: int) -> tuple[str | bytes | None, int]:
        length, at = _read_length(data, at, flexible, layout)
        if length < 0:
            return None, at
        content = data[at : at + length]
        return content.decode() if is_text else content, at + length

    return Codec(encode, decode)


# Arrays and structures --------------------------------------------------------------------


def _array(item: Codec, *, flexible: bool) -> Codec:
    """Return the codec of an array of items."""
    encode_item, decode_item = item

    def encode(out: bytearray, values: Sequence[Any] | None) -> None:
        _write_length(out, -1 if values is None else len(values), flexible, _LENGTH_4)
        for value in values or ():
            encode_item(out, value)

    def decode(data: bytes, at: int) -> tuple[list[Any] | None, int]:
        count, at = _read_length(data, at, flexible, _LENGTH_4)
        if count < 0:
            return None, at
        values = []
        for _ in range(count):
            value, at = decode_item(data, at)
            values.append(value)
        return values, at

    return Codec(encode, decode)


def _numbers(kind: str, *, flexible: bool) -> Codec:
    """Return the codec of an array of numbers; one call reads all of them."""
    letter = _FIXED[kind]
    size = struct.calcsize(f">{letter}")

    def encode(out: bytearray, values: Sequence[Any] | None) -> None:
        _write_length(out, -1 if values is None else len(values), flexible, _LENGTH_4)
        if values:
            out += struct.pack(f">{len(values)}{letter}", *values)

    def decode(data: bytes, at: int) -> tuple[list[Any] | None, int]:
        count, at = _read_length(data, at, flexible, _LENGTH_4)
        if count <= 0:
            return (None if count < 0 else []), at
        return list(struct.unpack_from(f">{count}{letter}", data, at)), at + count * size

    return Codec(encode, decode)


def _nullable(structure: Codec) -> Codec:
    """Return the codec of a structure or null."""

    def encode(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(0xFF)
            return
        out.append(1)
        structure.encode(out, value)

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        if data[at] & _MORE:  # a negative byte
            return None, at + 1
        return structure.decode(data, at + 1)

    return Codec(encode, decode)


class Structure:
    """The structures at one place of a message: their class, and their codec in each version.

    A decoded structure is a named tuple. It has the fields of all versions, so that the code that reads it is the same
    for each: a field that is not in the message is None.
    """

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        """Build the class; codecs are compiled when they are first used."""
        names = list(dict.fromkeys(field.name for field in fields))
        self._class: Any = namedtuple(name[0].upper() + name[1:], names)  # type: ignore[misc] # noqa: PYI024 - its fields are known only now
        self._positions = {field_name: index for index, field_name in enumerate(names)}
        self._fields = fields
        self._nested = {field: Structure(field.name, field.fields) for field in fields if field.fields}
        self._codecs: dict[tuple[int, bool], Codec] = {}

    @property
    def names(self) -> Iterable[str]:
        """The names of all fields."""
        return self._positions.keys()

    def codec(self, version: int, *, flexible: bool) -> Codec:
        """Return the codec for a version."""
        key = (version, flexible)
        if key not in self._codecs:
            self._codecs[key] = self._compile(version, flexible=flexible)
        return self._codecs[key]

    def _compile(self, version: int, *, flexible: bool) -> Codec:
        present = [field for field in self._fields if field.is_in(version)]
        plain = [
            (field.name, self._codec_of(field, version, flexible=flexible)) for field in present if field.tag is None
        ]
        tagged = {
            field.tag: (field.name, self._codec_of(field, version, flexible=flexible))
            for field in present
            if field.tag is not None
        }
        steps = _steps(present, dict(plain), self._positions)
        count = len(self._positions)
        tag_positions = {tag: (self._positions[name], codec.decode) for tag, (name, codec) in tagged.items()}
        new = functools.partial(tuple.__new__, self._class)  # `_make` does the same, but slower

        def encode(out: bytearray, values: Mapping[str, Any]) -> None:
            for name, codec in plain:
                codec.encode(out, values[name])
            if flexible:
                _write_tags(out, {tag: (codec, values.get(name)) for tag, (name, codec) in tagged.items()})

        def decode(data: bytes, at: int) -> tuple[Any, int]:
            values: list[Any] = [None] * count
            for place, size, unpack, read in steps:
                if unpack is not None:
                    values[place] = unpack(data, at)
                    at += size
                elif read is not None:
                    values[place], at = read(data, at)
            if flexible:
                if data[at]:
                    at = _read_tags(data, at, values, tag_positions)
                else:
                    at += 1
            return new(values), at

        return Codec(encode, decode)

    def _codec_of(self, field: Field, version: int, *, flexible: bool) -> Codec:
        if field.kind == "[":
            if not flexible and not _takes_bytes(field.fields, version):
                raise ValueError(f"{field.name} has no fields in version {version}")
            return _array(self._nested[field].codec(version, flexible=flexible), flexible=flexible)
        if field.kind == "(":
            return self._nested[field].codec(version, flexible=flexible)
        if field.kind == "{":
            structure = self._nested[field].codec(version, flexible=flexible)
            return structure if field.tag is not None else _nullable(structure)
        kind = field.kind.removesuffix("*")
        is_array = kind != field.kind
        if is_array and _is_number(kind):
            return _numbers(kind, flexible=flexible)
        scalar = _fixed(kind) if kind in _FIXED else _variable(kind, flexible=flexible)
        return _array(scalar, flexible=flexible) if is_array else scalar


def _takes_bytes(fields: Iterable[Field], version: int) -> bool:
    """Whether a structure has any bytes in a version that is not flexible."""
    present = [field for field in fields if field.is_in(version) and field.tag is None]
    return any(field.kind != "(" or _takes_bytes(field.fields, version) for field in present)


class _Step(NamedTuple):
    """One step of a decoder: it reads adjacent fields of fixed size in one call, or a single other field."""

    place: Any
    """Where the values belong in the structure: a slice, or the position of the other field."""
    size: int
    """The number of bytes that `unpack` reads."""
    unpack: Callable[[bytes, int], tuple[Any, ...]] | None
    read: Decoder | None


def _steps(fields: Iterable[Field], codecs: Mapping[str, Codec], positions: Mapping[str, int]) -> list[_Step]:
    """Return the steps in which to decode the fields of a version; tagged fields follow behind them."""
    steps: list[_Step] = []
    letters = ""
    first = 0
    for field in fields:
        if field.tag is not None:
            continue
        position = positions[field.name]
        if letters and not (_is_number(field.kind) and position == first + len(letters)):
            steps.append(_unpacking(letters, first))
            letters = ""
        if not _is_number(field.kind):
            steps.append(_Step(position, 0, None, codecs[field.name].decode))
            continue
        if not letters:
            first = position
        letters += _FIXED[field.kind]
    if letters:
        steps.append(_unpacking(letters, first))
    return steps


def _unpacking(letters: str, first: int) -> _Step:
    """Return the step that reads adjacent fields of fixed size, the first of which has this position."""
    layout = struct.Struct(">" + letters)
    return _Step(slice(first, first + len(letters)), layout.size, layout.unpack_from, None)


def _write_tags(out: bytearray, tagged: Mapping[int, tuple[Codec, Any]]) -> None:
    """Append the tagged fields that have a value, in the order of their tags."""
    sent = [(tag, codec, value) for tag, (codec, value) in sorted(tagged.items()) if value is not None]
    write_varint(out, len(sent))
    for tag, codec, value in sent:
        content = bytearray()
        codec.encode(content, value)
        write_varint(out, tag)
        write_varint(out, len(content))
        out += content


def _read_tags(data: bytes, at: int, values: list[Any], known: Mapping[int, tuple[int, Decoder]]) -> int:
    """Read tagged fields into *values*, skip those that are not *known*, and return the position behind them."""
    count, at = read_varint(data, at)
    for _ in range(count):
        tag, at = read_varint(data, at)
        size, at = read_varint(data, at)
        if size > len(data) - at:
            raise MalformedMessageError(f"tagged field {tag} announces {size} bytes, but only {len(data) - at} follow")
        if tag in known:
            position, decode = known[tag]
            values[position], end = decode(data, at)
            if end != at + size:
                raise MalformedMessageError(f"tagged field {tag} announces {size} bytes, but has {end - at}")
        at += size
    return at


# Messages ---------------------------------------------------------------------------------


class Api:
    """One kind of request and its response, in the versions that we speak."""

    def __init__(
        self,
        name: str,
        key: int,
        versions: tuple[int, int],
        *,
        flexible: int,
        request: str,
        response: str,
        skipped: int | None = None,
    ) -> None:
        """Describe it.

        Args:
            name: Kafka's name, such as `OffsetCommit`.
            key: Kafka's number of it.
            versions: The oldest and the newest version that we speak.
            flexible: The first flexible version.
            request: The fields of the request, in the notation of this module.
            response: The fields of the response.
            skipped: A version that is not used, because there are brokers that offer it without speaking it.
        """
        self.skipped = skipped
        self.name = name
        self.key = key
        self.lowest, self.highest = versions
        self._flexible = flexible
        self.request = parse(request)
        self.response = parse(response)
        self._requests = Structure(f"{name}Request", self.request)
        self._responses = Structure(f"{name}Response", self.response)

    def __call__(self, **values: Any) -> "Request":
        """Return a request with these values of its fields; a version sends those that it has.

        Raises:
            TypeError: There is no such field.
        """
        if unknown := values.keys() - set(self._requests.names):
            raise TypeError(f"{self.name} has no field {sorted(unknown)}")
        return Request(self, values)

    def __repr__(self) -> str:
        return f"Api({self.name})"

    def is_flexible(self, version: int) -> bool:
        """Whether a version is flexible."""
        return version >= self._flexible

    def encode(self, version: int, values: Mapping[str, Any]) -> bytes:
        """Return the body of a request.

        Raises:
            KeyError: A field of this version has no value.
        """
        return self._encode(self._requests, version, values)

    def decode(self, version: int, data: bytes, at: int = 0) -> Any:
        """Return the response whose body begins at *at*.

        Raises:
            MalformedMessageError: It does not have the form of this version.
        """
        return self._decode(self._responses, "response", version, data, at)

    def encode_response(self, version: int, values: Mapping[str, Any]) -> bytes:
        """Return the body of a response, as a broker does; raises like `encode`."""
        return self._encode(self._responses, version, values)

    def decode_request(self, version: int, data: bytes, at: int = 0) -> Any:
        """Return the request whose body begins at *at*, as a broker does; raises like `decode`."""
        return self._decode(self._requests, "request", version, data, at)

    def _encode(self, structure: Structure, version: int, values: Mapping[str, Any]) -> bytes:
        out = bytearray()
        structure.codec(version, flexible=self.is_flexible(version)).encode(out, values)
        return bytes(out)

    def _decode(self, structure: Structure, kind: str, version: int, data: bytes, at: int) -> Any:
        codec = structure.codec(version, flexible=self.is_flexible(version))
        try:
            message, end = codec.decode(data, at)
        except (struct.error, IndexError, ValueError) as error:
            raise MalformedMessageError(f"a {kind} of {self.name} version {version} is damaged: {error}") from error
        # librdkafka's mock cluster sends one list of tagged fields too many, which is empty.
        if any(data[end:]):
            raise MalformedMessageError(
                f"a {kind} of {self.name} version {version} is damaged: it ends {len(data) - end} bytes too early"
            )
        return message


class Request(NamedTuple):
    """A request to send; the version is chosen when it is sent, because two brokers may differ."""

    api: Api
    values: Mapping[str, Any]
    most: int = _NEWEST
    """The newest version to use."""

    def up_to(self, version: int) -> "Request":
        """Return the same request, to be sent in this version at most."""
        return self._replace(most=version)
