"""From a record to what its handler takes: chosen once, by an annotation or a function, and called for each record."""

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
"""Raised on as they are: what a decoder says itself, and what may pass, such as that a schema registry does not answer:
then the attempt fails like any other. Among them are `TimeoutError` and `ConnectionError`."""


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
    """For the traceback in the log: not what a validator says, which shows the value."""
    return None if fault(error) else error


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
            # What a validator says shows the value, which may be personal, and goes to logs and dead letters.
            raise DecodeError(f"{_place(record)} is no {name}: {fault(error, value) or raised_in(error)}") from None

    return read


def _place(record: Record) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


class _Validator(NamedTuple):
    """A library, for one type."""

    of_json: Callable[[bytes], Any]
    of_object: Callable[[Any], Any]


def _then(first: Callable[[bytes], Any], second: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    return lambda value: second(first(value))


def _validator(annotation: Any, owner: str) -> _Validator:
    if read_by_msgspec(annotation):
        import msgspec  # noqa: PLC0415 - something of it is there, so it is

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
        if not adapter.pydantic_complete:  # it may be that a name in it is not defined, and only the first record tells
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
