"""Convert records for handlers: the conversion is chosen once, by an annotation or function, and called per record."""

import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aioshard.errors import DecodeError, HandlerError
from aioshard.records import Record
from aioshard.serde.annotations import alternatives, is_constrained, raw_type, read_by_msgspec, shown
from aioshard.serde.faults import fault, raised_in

__all__ = ["Payload", "decoded_by", "payload_of"]

_RAISED_ON = (DecodeError, HandlerError, OSError, MemoryError)
"""Passed on unchanged: a decoder's own errors, and transient ones, such as an unreachable schema registry. The attempt
then fails like any other. They include `TimeoutError` and `ConnectionError`."""


class Payload(NamedTuple):
    """The conversion of a record to the argument of its handler."""

    read: Callable[[Record], Any]
    """Returns the argument, or an awaitable of it; raises `DecodeError` for a record that cannot be decoded."""
    is_async: bool
    type: Any
    """The handler's annotation; None if a function decodes."""


# By a function ------------------------------------------------------------------------


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
            found = decode(record)
            if isinstance(found, types.CoroutineType):
                _refuse_coroutine(found)
        except _RAISED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own function
            raise _not_decoded(record, error) from _shown_cause(error)
        return found

    async def read_async(record: Record) -> object:
        try:
            return await typing.cast("Awaitable[object]", decode(record))
        except _RAISED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own function
            raise _not_decoded(record, error) from _shown_cause(error)

    return Payload(read_async if is_async else read, is_async, None)


def _refuse_coroutine(found: "types.CoroutineType[Any, Any, Any]") -> None:
    found.close()
    raise HandlerError(
        f"decode=… is a plain function and returned the coroutine {found.__qualname__}, which nobody awaits: declare "
        "it, and every function that wraps it, with 'async def'"
    )


def _not_decoded(record: Record, error: Exception) -> DecodeError:
    said = fault(error) or str(error)
    name = type(error).__name__
    return DecodeError(
        f"{_place(record)} was not decoded: {name}: {said}" if said else f"{_place(record)} was not decoded: {name}"
    )


def _shown_cause(error: Exception) -> Exception | None:
    """Return the cause for the traceback in the log; None for a validator's error, which shows the value."""
    return None if fault(error) else error


# By an annotation ---------------------------------------------------------------------


def payload_of(annotation: Any, owner: str) -> Payload | None:
    """Decode values into a type; None if the handler takes the record itself.

    `bytes` is the unchanged value, `str` its text in UTF-8; msgspec decodes its own structs, and pydantic anything
    else, both from JSON. `X | None` accepts tombstones as None; otherwise they are rejected.

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
        aioshard.errors.DecodeError: orders/0/42 is no dict[str, bool]: paid: Input should be a valid boolean
    """
    allowed = alternatives(annotation)
    if annotation in (Any, object, inspect.Parameter.empty) or Record in allowed:
        return None
    takes_none = types.NoneType in allowed
    raw = raw_type(annotation)
    if raw is None:
        convert = _validator(annotation, owner).of_json
    else:
        convert = functools.partial(str, encoding="utf-8") if raw is str else raw
        if is_constrained(annotation):
            convert = _then(convert, _validator(annotation, owner).of_object)
    return Payload(_reader(convert, shown(annotation), takes_none=takes_none), is_async=False, type=annotation)


def _reader(convert: Callable[[bytes], Any], name: str, *, takes_none: bool) -> Callable[[Record], Any]:
    def read(record: Record) -> Any:
        value = record.value
        if value is None:
            if takes_none:
                return None
            raise DecodeError(
                f"{_place(record)} has no value (it is a tombstone) and its handler takes {name}: annotate "
                f"{name} | None to get it as None"
            ) from None
        try:
            return convert(value)
        except _RAISED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - of the user's own types too
            # A validator's message shows the value, which may be personal, and goes to logs and dead letters.
            raise DecodeError(f"{_place(record)} is no {name}: {fault(error, value) or raised_in(error)}") from None

    return read


def _place(record: Record) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


class _Validator(NamedTuple):
    """A validation library, for one type."""

    of_json: Callable[[bytes], Any]
    of_object: Callable[[Any], Any]


def _then(first: Callable[[bytes], Any], second: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    return lambda value: second(first(value))


def _validator(annotation: Any, owner: str) -> _Validator:
    if read_by_msgspec(annotation):
        import msgspec  # noqa: PLC0415 - installed, because the annotation uses it

        try:
            return _Validator(
                msgspec.json.Decoder(annotation).decode, functools.partial(msgspec.convert, type=annotation)
            )
        except (TypeError, NameError) as error:
            raise _cannot(annotation, owner, error) from error
    from pydantic import PydanticUserError, TypeAdapter  # noqa: PLC0415 - pydantic is imported on use
    from pydantic_core import SchemaError  # noqa: PLC0415

    try:
        adapter = TypeAdapter(annotation)
        if not adapter.pydantic_complete:  # a name may be undefined, and only the first record would show it
            adapter.rebuild(raise_errors=True)
    except (PydanticUserError, SchemaError, TypeError, NameError) as error:
        raise _cannot(annotation, owner, error) from error
    return _Validator(adapter.validate_json, adapter.validate_python)


def _cannot(annotation: Any, owner: str, error: Exception) -> HandlerError:
    first = str(error).strip().splitlines()[0].rstrip(".")
    if isinstance(error, NameError):
        return HandlerError(
            f"{owner} takes {shown(annotation)}, for which no value can be decoded ({first}): import or define it "
            "before the handler, in the module and outside 'if TYPE_CHECKING'"
        )
    return HandlerError(
        f"{owner} takes {shown(annotation)}, for which no value can be decoded ({first}): annotate aioshard.Record, a "
        "pydantic model, a dataclass, a TypedDict or a msgspec struct, or give consume() decode=…"
    )
