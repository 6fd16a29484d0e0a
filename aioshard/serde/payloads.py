"""Convert values: records to the arguments of handlers, and values to bytes.

The conversion for a handler is chosen once, by its annotation or its `decode` function, and called per record.
"""

import functools
import inspect
import math
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NewType, NoReturn, Union, cast, get_args, get_origin

from aioshard.errors import DecodeError, HandlerError, MessageError
from aioshard.ports import Message, Partitioner
from aioshard.records import TOPIC_NAME, Record
from aioshard.serde.header_names import is_utf8
from aioshard.serde.side_records import Coordinates

_Content = bytes | str | None
Headers = Mapping[str, _Content] | Mapping[bytes, _Content] | Iterable[tuple[str | bytes, _Content]]
"""Headers of a message: a mapping, or pairs of a name and a content. A name in bytes, as in ASGI, is UTF-8."""

_MOST_PARTITIONS = 2**31
_MAX_FAULTS = 3
"""Maximum number of faults reported per value."""
_MSGSPEC_NOT_UTF8 = "Invalid UTF-8 encoded string"
"""The message of msgspec 0.23; versions before raise `UnicodeDecodeError`."""
_MSGSPEC_VALUE = re.compile(r"(Invalid (?:enum )?value) .*?( - at `\$[^`]*`)?", re.DOTALL)
"""Matches messages in which msgspec repeats the value."""


PASSED_ON = (DecodeError, HandlerError, OSError, MemoryError)
"""Passed on unchanged: a decoder's own errors, and transient ones, such as an unreachable schema registry. The attempt
then fails like any other. They include `TimeoutError` and `ConnectionError`."""


class Payload(NamedTuple):
    """The conversion of a record to the argument of its handler."""

    read: Callable[[Record], Any]
    """Returns the argument, or an awaitable of it; raises `DecodeError` for a record that cannot be decoded."""
    is_async: bool
    type: Any
    """The handler's annotation; None if a function decodes."""


# Decoding by a function ------------------------------------------------------------------------


def decoded_by(decode: Callable[[Record], object], *, is_async: bool) -> Payload:
    """Decode records with a user's function.

    Args:
        decode: Takes the record. Its exceptions become `DecodeError`, except `OSError`, which may be transient.
        is_async: Whether its result is awaited.

    Example:
        >>> payload = decoded_by(lambda record: float(record.value), is_async=False)
        >>> payload.read(Record("orders", 0, 41, None, b"7", (), 0.0))
        7.0
        >>> payload.read(Record("orders", 0, 42, None, b"x", (), 0.0))
        Traceback (most recent call last):
        aioshard.errors.DecodeError: orders/0/42 was not decoded: ValueError: could not convert string to float: b'x'
    """

    def read(record: Record) -> object:
        try:
            return decode(record)
        except Exception as error:  # noqa: BLE001 - the user's own function
            _raise_not_decoded(record, error)

    async def read_async(record: Record) -> object:
        try:
            return await cast("Awaitable[object]", decode(record))
        except Exception as error:  # noqa: BLE001 - the user's own function
            _raise_not_decoded(record, error)

    return Payload(read_async if is_async else read, is_async, None)


def _raise_not_decoded(record: Record, error: Exception) -> NoReturn:
    if isinstance(error, PASSED_ON):
        raise error
    fault = _fault(error)
    parts = (f"{Coordinates.of(record)} was not decoded", type(error).__name__, fault or str(error))
    # A validator's error shows the value, so the traceback in the log must not contain it.
    raise DecodeError(": ".join(filter(None, parts))) from (None if fault else error)


# Decoding by an annotation ---------------------------------------------------------------------


def payload_of(annotation: Any, owner: str) -> Payload | None:
    """Decode values into a type; None if the handler takes the record itself.

    `bytes` is the unchanged value, `str` its text in UTF-8; msgspec decodes its own structs, and pydantic anything
    else, both from JSON. `X | None` accepts tombstones as None; otherwise they are refused.

    Args:
        annotation: Annotation of the parameter, or of the elements of its list.
        owner: Owner of the annotation, for messages.

    Raises:
        HandlerError: The type cannot be decoded.

    Example:
        >>> payload = payload_of(dict[str, bool], "handler 'on_order'")
        >>> payload.read(Record("orders", 0, 41, None, b'{"paid": true}', (), 0.0))
        {'paid': True}
        >>> payload.read(Record("orders", 0, 42, None, b'{"paid": []}', (), 0.0))
        Traceback (most recent call last):
        aioshard.errors.DecodeError: orders/0/42 is not a valid dict[str, bool]: paid: Input should be a valid boolean
    """
    allowed = alternatives(annotation)
    if annotation in (Any, object, inspect.Parameter.empty) or Record in allowed:
        return None
    raw = raw_type(annotation)
    if raw is None:
        convert, _ = validators(annotation, owner)
    else:
        convert = functools.partial(str, encoding="utf-8") if raw is str else raw
        if annotation not in (raw, raw | None):  # it may have constraints
            convert = _then(convert, validators(annotation, owner)[1])
    return Payload(_reader(convert, shown(annotation), takes_none=NoneType in allowed), is_async=False, type=annotation)


def _reader(convert: Callable[[bytes], Any], name: str, *, takes_none: bool) -> Callable[[Record], Any]:
    def read(record: Record) -> Any:
        value = record.value
        if value is None:
            if takes_none:
                return None
            raise no_value(record, name) from None
        try:
            return convert(value)
        except PASSED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - of the user's own types too
            raise not_valid(record, name, error) from None

    return read


def no_value(record: Record, name: str) -> DecodeError:
    """Return the error of a tombstone whose handler takes *name*."""
    return DecodeError(
        f"{Coordinates.of(record)} has no value (it is a tombstone) and its handler takes {name}: annotate "
        f"{name} | None to get it as None"
    )


def not_valid(record: Record, name: str, error: Exception) -> DecodeError:
    """Return the error of a record whose value cannot be converted to *name*, without the value.

    A validator's message shows the value, which may be personal, and goes to logs and dead letters.
    """
    fault = _fault(error, record.value) or _raised_in(error)
    return DecodeError(f"{Coordinates.of(record)} is not a valid {name}: {fault}")


def _then(first: Callable[[bytes], Any], second: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    return lambda value: second(first(value))


def validators(annotation: Any, owner: str) -> tuple[Callable[[bytes], Any], Callable[[Any], Any]]:
    """Return the functions of a validation library that convert JSON, and an object, to a type.

    Raises:
        HandlerError: The library does not know the type; *owner* names who takes it.
    """
    from pydantic import PydanticUserError, TypeAdapter  # noqa: PLC0415 - pydantic is imported on use
    from pydantic_core import SchemaError  # noqa: PLC0415

    try:
        if read_by_msgspec(annotation):
            import msgspec  # noqa: PLC0415 - installed, because the annotation uses it

            return msgspec.json.Decoder(annotation).decode, functools.partial(msgspec.convert, type=annotation)
        adapter = TypeAdapter(annotation)
        if not adapter.pydantic_complete:  # a name may be undefined, and only the first record would show it
            adapter.rebuild(raise_errors=True)
    except (PydanticUserError, SchemaError, TypeError, NameError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise HandlerError(
            f"{owner} takes {shown(annotation)}, which values cannot be decoded into ({first}): annotate "
            "aioshard.Record, a pydantic model, a dataclass, a TypedDict or a msgspec struct, defined before the "
            "handler and outside 'if TYPE_CHECKING', or give consume() decode=…"
        ) from error
    return adapter.validate_json, adapter.validate_python


# Annotations --------------------------------------------------------------------------


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, with unions, `Annotated`, aliases and `NewType` resolved.

    Example:
        >>> alternatives(Annotated[int, "a number"] | None)
        [<class 'int'>, <class 'NoneType'>]
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [alternative for argument in get_args(annotation) for alternative in alternatives(argument)]
    if _is_alias(origin or annotation):
        return alternatives((origin or annotation).__value__)
    if isinstance(annotation, NewType):
        return alternatives(annotation.__supertype__)
    return [NoneType if annotation is None else annotation]


def raw_type(annotation: Any) -> Any:
    """Return `bytes`, `bytearray`, `memoryview` or `str` if it is the annotated type; None if JSON is decoded.

    Example:
        >>> raw_type(str | None), raw_type(str | int)
        (<class 'str'>, None)
    """
    types = [alternative for alternative in alternatives(annotation) if alternative is not NoneType]
    if len(types) == 1 and types[0] in (bytes, bytearray, memoryview, str):
        return types[0]
    return None


def read_by_msgspec(annotation: Any) -> bool:
    """Return whether msgspec decodes this type: the annotation contains a msgspec struct or constraint."""
    return any(
        hasattr(part, "__struct_fields__") or (type(part).__module__, type(part).__name__) == ("msgspec", "Meta")
        for part in _mentioned(annotation, frozenset())
    )


def shown(annotation: Any) -> str:
    """Format a type as users write it.

    Example:
        >>> shown(dict[str, Union[int, None]])
        'dict[str, int | None]'
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation in (None, NoneType):
        return "None"
    if origin is Annotated:
        return shown(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(shown, arguments))
    if origin is None:
        return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")
    if origin in (Literal, Callable) or not arguments:
        return str(annotation).replace("typing.", "").replace("collections.abc.", "")
    return f"{shown(origin)}[{', '.join('...' if argument is ... else shown(argument) for argument in arguments)}]"


def _is_alias(annotation: Any) -> bool:
    """Return whether it was defined by `type X = …`, or by the backport for older Pythons."""
    return type(annotation).__name__ == "TypeAliasType"


def _mentioned(annotation: Any, seen: frozenset[int]) -> Iterator[Any]:
    """Iterate over the classes that an annotation mentions, at any depth."""
    if id(annotation) in seen:
        return  # an alias may be recursive
    seen |= {id(annotation)}
    if _is_alias(annotation):
        yield from _mentioned(annotation.__value__, seen)
        return
    yield get_origin(annotation) or annotation
    for argument in get_args(annotation):
        yield from _mentioned(argument, seen)


# Errors without the value, which may be personal: messages go to logs and dead letters --


def _fault(error: Exception, value: bytes | None = None) -> str:
    r"""Describe a decoder's error without the decoded value; empty for an unknown error.

    The message contains names of fields and keys, and the text of a `ValueError` raised by a user's own validator.

    Args:
        error: The error that the decoder raised.
        value: The decoder's input, if known.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 from byte {error.start} on" if error.object == value else "a text in it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    pydantic = sys.modules.get("pydantic_core")
    msgspec = sys.modules.get("msgspec")
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        return _listed(error.errors(include_url=False, include_input=False))
    if msgspec is not None and isinstance(error, msgspec.DecodeError):
        text = str(error)
        return "a text in it is not UTF-8" if text == _MSGSPEC_NOT_UTF8 else _without_value(text)
    return ""


class Fault(NamedTuple):
    """A part of a value that cannot be decoded."""

    location: str
    """Names of fields and numbers of elements with dots between them; empty for the whole value."""
    message: str
    """The decoder's message, without the decoded value."""


def faults_of(error: DecodeError) -> list[Fault]:
    """Return all parts of a value that a validation library has refused; the whole value for any other error.

    Example:
        >>> payload = payload_of(dict[str, bool], "handler 'on_order'")
        >>> try:
        ...     payload.read(Record("orders", 0, 41, None, b'{"paid": [], "late": 1.5}', (), 0.0))
        ... except DecodeError as error:
        ...     [fault.location for fault in faults_of(error)]
        ['paid', 'late']
    """
    cause = error.__context__
    pydantic = sys.modules.get("pydantic_core")
    msgspec = sys.modules.get("msgspec")
    if pydantic is not None and isinstance(cause, pydantic.ValidationError):
        faults = cause.errors(include_url=False, include_input=False)
        return [Fault(".".join(map(str, fault["loc"])), _message_of(fault)) for fault in faults]
    if msgspec is not None and isinstance(cause, msgspec.ValidationError):
        message, _, location = _without_value(str(cause)).partition(" - at `$")
        return [Fault(location.rstrip("`").lstrip("."), message)]
    return [Fault("", str(error))]


def _listed(faults: Sequence[Any]) -> str:
    """List the first faults that pydantic has found."""
    first = "; ".join(map(_format_fault, faults[:_MAX_FAULTS]))
    if len(faults) > _MAX_FAULTS:
        return f"{first}; and {len(faults) - _MAX_FAULTS} more"
    return first


def _without_value(text: str) -> str:
    """Remove the value from a message of msgspec that repeats it."""
    repeats = _MSGSPEC_VALUE.fullmatch(text)
    if repeats is None:
        return text
    return "".join(part or "" for part in repeats.groups())


def _format_fault(fault: Mapping[str, Any]) -> str:
    """Format one fault reported by pydantic."""
    return f"{'.'.join(map(str, fault['loc']))}: {_message_of(fault)}".removeprefix(": ")


def _message_of(fault: Mapping[str, Any]) -> str:
    """Return the message of a fault; those of some types repeat the value, so the type is named."""
    return str(fault["type"] if fault["type"] in ("union_tag_invalid", "uuid_parsing") else fault["msg"])


def _raised_in(error: BaseException) -> str:
    """Describe an exception by its type and place only, because its message may contain the value."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return (
        f"{type(error).__name__} was raised, by {frame.name}() in {PurePath(frame.filename).name}, line {frame.lineno}"
    )


# Encoding -----------------------------------------------------------------------------


def encoded(value: object) -> bytes:
    """Encode a value: bytes stay as they are, text becomes UTF-8, anything else JSON, as pydantic and msgspec write it.

    Raises:
        MessageError: JSON cannot represent the value.

    Example:
        >>> import datetime
        >>> encoded({"at": datetime.date(2026, 1, 31)})
        b'{"at":"2026-01-31"}'
    """
    if type(value) is bytes:  # most often
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise MessageError(
                f"a text was not published ({error}): expected text that UTF-8 can represent; encode it yourself"
            ) from None
    from pydantic_core import PydanticSerializationError, to_json  # noqa: PLC0415 - pydantic is imported on use

    try:
        return to_json(value, fallback=_builtins)
    except (PydanticSerializationError, ValueError) as error:
        raise MessageError(
            f"a {shown(type(value))} was not published ({error}): expected bytes, str, a pydantic model, a dataclass, "
            "a TypedDict, a msgspec struct or a JSON value; encode anything else yourself"
        ) from error


def _builtins(value: object) -> object:
    """Convert an object that pydantic does not know."""
    if not read_by_msgspec(type(value)):
        raise ValueError(f"JSON has no {shown(type(value))}")
    import msgspec  # noqa: PLC0415 - a struct needs it

    return msgspec.to_builtins(value)


def message(
    topic: str,
    value: object,
    *,
    key: bytes | str | None = None,
    headers: Headers = (),
    partition: int | None = None,
    partitioner: Partitioner = "key",
) -> Message:
    """Build a message: for a handler with `publish_to` that returns several, or one with another topic or key.

    Args:
        topic: Destination topic.
        value: None is a tombstone; see `encoded` for the rest.
        key: Bytes, or text in UTF-8.
        headers: A mapping, or pairs of name and content; a name is text, or bytes in UTF-8.
        partition: None lets the partitioner choose.
        partitioner: See `App.publish`.

    Raises:
        MessageError: The topic name is invalid, JSON cannot represent the value, or Kafka cannot represent a header.

    Example:
        >>> message("invoices", {"total": 7}, key="a").value
        b'{"total":7}'
    """
    if not _is_topic_name(str(topic)) or not isinstance(topic, str):
        raise MessageError(f"{topic!r} is not a topic name: expected 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'")
    if partition is not None and (type(partition) is not int or not 0 <= partition < _MOST_PARTITIONS):
        raise MessageError(f"partition={partition!r} was refused: expected a whole number from 0, or None")
    if partitioner not in ("key", "round_robin"):
        raise MessageError(f"partitioner={partitioner!r} was refused: expected 'key' or 'round_robin'")
    return Message(
        topic,
        None if value is None else encoded(value),
        None if key is None else encoded(key),
        encoded_headers(headers),
        partition,
        partitioner=partitioner,
    )


def encoded_headers(headers: Headers) -> tuple[tuple[str, bytes | None], ...]:
    """Return headers as brokers store them.

    Raises:
        MessageError: They are not pairs, or Kafka cannot represent a name or a content.

    Example:
        >>> encoded_headers({"id": "7"}), encoded_headers([(b"trace-id", None)])
        ((('id', b'7'),), (('trace-id', None),))
    """
    if isinstance(headers, tuple) and not headers:
        return ()
    try:
        pairs = [_pair(header) for header in (headers.items() if isinstance(headers, Mapping) else headers)]
    except (TypeError, ValueError):
        raise MessageError(
            f"headers={headers!r} was refused: expected a mapping, or pairs of a name and a content"
        ) from None
    return tuple((_header_name(name), _header_content(name, content)) for name, content in pairs)


def _pair(header: object) -> tuple[object, object]:
    if isinstance(header, str | bytes):
        raise TypeError(header)  # a text of two characters would unpack into a pair
    name, content = cast("tuple[object, object]", header)
    return name, content


def _header_name(name: object) -> str:
    if not isinstance(name, str | bytes):
        raise MessageError(
            f"a header name of type {shown(type(name))} was refused ({name!r}): expected str, or bytes in UTF-8"
        )
    try:
        # Via bytes even from text: it finds what UTF-8 cannot represent, and makes a plain str of an enum's member.
        return (name if isinstance(name, bytes) else name.encode()).decode()
    except UnicodeError as error:
        raise MessageError(
            f"the header name {name!r} was refused ({error}): Kafka stores names in UTF-8; rename the header"
        ) from None


def _header_content(name: object, content: object) -> bytes | None:
    if content is None:
        return None
    if not isinstance(content, bytes | str | bytearray | memoryview):
        raise MessageError(
            f"the header {name!r} with a content of type {shown(type(content))} was refused: expected bytes, str or "
            "None; encode anything else yourself"
        )
    return encoded(content)


def unwritable(message: Message) -> str | None:
    """Return why no broker can be sent a message; None if it can be encoded.

    `message` builds only messages that can be. Records of other programs and middleware can lead to others.

    Example:
        >>> unwritable(Message("orders", b"1", headers=(("trace", "7"),)))  # type: ignore[arg-type]
        "the content of header 'trace' is a str and not bytes"
    """
    topic: object = message.topic
    if not isinstance(topic, str) or not _is_topic_name(topic):
        return f"{topic!r} is not a topic name"
    partition: object = message.partition
    if partition is not None and not isinstance(partition, int):
        return f"the partition {partition!r} is not a whole number"
    key: object = message.key
    if key is not None and not isinstance(key, bytes):
        return f"the key is a {shown(type(key))} and not bytes"
    value: object = message.value
    if value is not None and not isinstance(value, bytes):
        return f"the value is a {shown(type(value))} and not bytes"
    timestamp: object = message.timestamp
    if timestamp is not None and not (isinstance(timestamp, int | float) and math.isfinite(timestamp)):
        return f"the timestamp {timestamp!r} is not a time"
    return None if message.headers == () else _unwritable_header(message.headers)


@functools.lru_cache(maxsize=1_000)
def _is_topic_name(topic: str) -> bool:
    return TOPIC_NAME.fullmatch(topic) is not None


def _unwritable_header(headers: object) -> str | None:
    try:
        pairs = [_pair(header) for header in cast("Iterable[object]", headers)]
    except (TypeError, ValueError):
        return f"the headers {headers!r} are not pairs of a name and a content"
    for name, content in pairs:
        if not isinstance(name, str):
            return f"the header name {name!r} is a {shown(type(name))} and not a str"
        if content is not None and not isinstance(content, bytes):
            return f"the content of header {name!r} is a {shown(type(content))} and not bytes"
        if not is_utf8(name):
            return f"the header name {name!r} cannot be represented in UTF-8"
    return None


def encoded_result(result: object) -> bytes | None:
    """Encode the result of a handler for storage, in outcome rows and the journal.

    Args:
        result: None stays None, bytes stay as they are, and anything else becomes JSON: models, dataclasses, dates
            and numbers in pydantic's format, and unsupported objects as their `repr`.

    Raises:
        Exception: An object contains itself, or the user's own `repr` failed.

    Example:
        >>> encoded_result(None), encoded_result(b"raw"), encoded_result({"paid": True})
        (None, b'raw', b'{"paid":true}')
    """
    if result is None or isinstance(result, bytes):
        return result
    from pydantic_core import to_json  # noqa: PLC0415 - pydantic is imported on use

    return to_json(result, fallback=repr)
