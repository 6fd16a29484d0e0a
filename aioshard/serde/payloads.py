"""From a record to what its handler takes: chosen once, by an annotation or a function, and called for each record."""

import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aioshard.errors import DecodeError, HandlerError
from aioshard.records import Record

__all__ = ["Payload", "decoded_by", "payload_of", "read_by_msgspec", "shown"]

_OUTSIDE = (DecodeError, OSError)
"""Raised on as they are: what a decoder says itself, and that something which it asks (a schema registry) does not
answer. That may pass, so the attempt fails like any other. `TimeoutError` and `ConnectionError` are among them."""


class Payload(NamedTuple):
    """How the records of a handler become what it takes."""

    read: Callable[[Record], Any]
    """Gives it, or an awaitable of it; raises `DecodeError` for a record of which it cannot be made."""
    is_async: bool
    type: Any
    """As the handler is annotated; None where a function decodes."""


# By a function ------------------------------------------------------------------------


def decoded_by(decode: Callable[[Record], object], *, is_async: bool) -> Payload:
    """What a function of the user makes of a record.

    Args:
        decode: Takes the record. What it raises is a `DecodeError`, but for an `OSError`, which may pass.
        is_async: Whether its result is to be awaited.

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
        except _OUTSIDE:
            raise
        except Exception as error:
            raise _not_decoded(record, error) from error

    async def read_async(record: Record) -> object:
        try:
            return await typing.cast("Awaitable[object]", decode(record))
        except _OUTSIDE:
            raise
        except Exception as error:
            raise _not_decoded(record, error) from error

    return Payload(read_async if is_async else read, is_async, None)


def _not_decoded(record: Record, error: Exception) -> DecodeError:
    said = str(error)
    name = type(error).__name__
    return DecodeError(f"{_place(record)} was not decoded: {name}: {said}" if said else f"{_place(record)}: {name}")


# By an annotation ---------------------------------------------------------------------


def payload_of(annotation: Any, owner: str) -> Payload | None:
    """How a value becomes an object of a type; None where the handler takes the record itself.

    `bytes` is the value as it is, `str` is its text in UTF-8, a msgspec struct is read by msgspec, and anything else by
    pydantic, both from JSON. `X | None` takes tombstones as None, which are refused otherwise.

    Args:
        annotation: Of the parameter, or of what its list is made of.
        owner: For messages: whose annotation it is.

    Raises:
        HandlerError: No object can be made for it.

    Example:
        >>> payload = payload_of(dict[str, bool], "handler 'on_order'")
        >>> payload.read(Record("orders", 0, 41, None, b'{"paid": true}', (), 0.0))
        {'paid': True}
        >>> payload.read(Record("orders", 0, 42, None, b'{"paid": []}', (), 0.0))
        Traceback (most recent call last):
        aioshard.errors.DecodeError: orders/0/42 is no dict[str, bool]: paid: Input should be a valid boolean
    """
    alternatives = _alternatives(annotation)
    if annotation in (Any, object, inspect.Parameter.empty) or Record in alternatives:
        return None
    takes_none = types.NoneType in alternatives or None in alternatives
    wanted = alternatives - {types.NoneType, None}
    if wanted <= {bytes, bytearray, memoryview}:
        convert: Callable[[bytes], Any] = bytes
    elif wanted == {str}:
        convert = functools.partial(str, encoding="utf-8")
    else:
        convert = _from_json(annotation, owner)
    return Payload(_reader(convert, shown(annotation), takes_none=takes_none), is_async=False, type=annotation)


def read_by_msgspec(annotation: Any) -> bool:
    """Whether a value is read by msgspec to become this: it is a struct of it, or may be one."""
    return any(hasattr(one, "__struct_fields__") for one in _alternatives(annotation))


def shown(annotation: Any) -> str:
    """A type as its user writes it."""
    if typing.get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _alternatives(annotation: Any) -> set[Any]:
    """The types that an annotation allows; none of them is a union, or annotated."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return {found for one in typing.get_args(annotation) for found in _alternatives(one)}
    return {annotation}


def _reader(convert: Callable[[bytes], Any], name: str, *, takes_none: bool) -> Callable[[Record], Any]:
    def read(record: Record) -> Any:
        value = record.value
        if value is None:
            if takes_none:
                return None
            raise DecodeError(
                f"{_place(record)} has no value (it is a tombstone) and its handler takes {name}: annotate "
                f"{name} | None to get it as None"
            )
        try:
            return convert(value)
        except ValueError as error:
            # What a validator says shows the value, which may be personal, and goes to logs and dead letters.
            raise DecodeError(f"{_place(record)} is no {name}: {_said(error)}") from None

    return read


def _place(record: Record) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


def _said(error: ValueError) -> str:
    """What is wrong, without the value."""
    from pydantic_core import ValidationError  # noqa: PLC0415 - pydantic is imported on use

    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 from byte {error.start} on"
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in found[:3])
    return f"{first}; and {len(found) - 3} more" if len(found) > 3 else first  # noqa: PLR2004 - three are enough


def _from_json(annotation: Any, owner: str) -> Callable[[bytes], Any]:
    if read_by_msgspec(annotation):
        import msgspec  # noqa: PLC0415 - a struct is there, so it is

        try:
            return msgspec.json.Decoder(annotation).decode
        except TypeError as error:
            raise _cannot(annotation, owner, error) from error
    from pydantic import PydanticUserError, TypeAdapter  # noqa: PLC0415 - pydantic is imported on use
    from pydantic_core import SchemaError  # noqa: PLC0415

    try:
        return TypeAdapter(annotation).validate_json
    except (PydanticUserError, SchemaError, TypeError, NameError) as error:
        raise _cannot(annotation, owner, error) from error


def _cannot(annotation: Any, owner: str, error: Exception) -> HandlerError:
    first = str(error).strip().splitlines()[0].rstrip(".")
    return HandlerError(
        f"{owner} takes {shown(annotation)}, for which no value can be decoded ({first}): annotate aioshard.Record, a "
        "pydantic model, a dataclass, a TypedDict or a msgspec struct, or give consume() decode=…"
    )
