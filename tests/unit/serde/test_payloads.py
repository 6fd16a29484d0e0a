"""What a value becomes by an annotation or a function, and what is said where it does not."""

import dataclasses
import datetime as dt
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from typing_extensions import TypedDict

from aioshard.errors import DecodeError, HandlerError
from aioshard.records import Record
from aioshard.serde.payloads import decoded_by, payload_of


class Model(pydantic.BaseModel):
    customer: str
    total: int


@dataclasses.dataclass
class Data:
    customer: str
    at: dt.date


class Typed(TypedDict):
    customer: str


class Struct(msgspec.Struct):
    customer: str
    total: int


class Other(msgspec.Struct, tag=True):
    name: str


class Another(msgspec.Struct, tag=True):
    number: int


def record(value: bytes | None) -> Record:
    return Record("orders", 3, 41, b"key", value, (), 0.0)


def read(annotation: Any, value: bytes | None) -> Any:
    payload = payload_of(annotation, "handler 'h'")
    assert payload is not None
    assert not payload.is_async
    return payload.read(record(value))


@pytest.mark.parametrize("annotation", [Record, Any, object, Record | None, Annotated[Record, "as it is"]])
def test_a_handler_that_takes_the_record_gets_it(annotation: Any) -> None:
    assert payload_of(annotation, "handler 'h'") is None


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Model, b'{"customer": "a", "total": 7}', Model(customer="a", total=7)),
        (Model | None, b'{"customer": "a", "total": 7}', Model(customer="a", total=7)),
        (Model | None, None, None),
        (Data, b'{"customer": "a", "at": "2026-01-31"}', Data("a", dt.date(2026, 1, 31))),
        (Typed, b'{"customer": "a"}', {"customer": "a"}),
        (Struct, b'{"customer": "a", "total": 7}', Struct("a", 7)),
        (Struct | None, None, None),
        (Other | Another, b'{"type": "Another", "number": 7}', Another(7)),
        (dict[str, int], b'{"a": 1}', {"a": 1}),
        (list[int], b"[1, 2]", [1, 2]),
        (Annotated[int, pydantic.Field(gt=0)], b"1", 1),
        (bytes, b"\xff", b"\xff"),
        (bytes | None, None, None),
        (str, "grüße".encode(), "grüße"),
        (str | None, b"null", "null"),
    ],
    ids=str,
)
def test_a_value_becomes_what_the_annotation_says(annotation: Any, value: bytes | None, expected: object) -> None:
    found = read(annotation, value)

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (Model, b'{"customer": "a"}', "orders/3/41 is no Model: total: Field required"),
        (Model, b"not json", "orders/3/41 is no Model: Invalid JSON: expected ident at line 1 column 2"),
        (
            Model,
            None,
            "orders/3/41 has no value (it is a tombstone) and its handler takes Model: annotate Model | None",
        ),
        (bytes, None, "annotate bytes | None"),
        (Annotated[int, pydantic.Field(gt=0)], b"0", "Input should be greater than 0"),
        (Struct, b'{"customer": "a", "total": "x"}', "orders/3/41 is no Struct: Expected `int`, got `str`"),
        (Struct, b"{", "orders/3/41 is no Struct: Input data was truncated"),
        (str, b"ab\xff", "orders/3/41 is no str: it is not UTF-8 from byte 2 on"),
    ],
    ids=str,
)
def test_a_value_that_is_something_else_is_refused(annotation: Any, value: bytes | None, said: str) -> None:
    with pytest.raises(DecodeError) as refused:
        read(annotation, value)

    assert said in str(refused.value)


def test_what_is_said_does_not_show_the_value() -> None:
    with pytest.raises(DecodeError) as refused:
        read(Model, b'{"customer": 4711, "total": "secret"}')

    error: BaseException | None = refused.value
    assert str(error).count("should be") == 2
    assert "4711" not in str(error)
    assert "secret" not in str(error)
    assert refused.value.__suppress_context__


def test_only_the_first_three_faults_are_named() -> None:
    with pytest.raises(DecodeError, match=r"0: .*; 1: .*; 2: .*; and 2 more$"):
        read(list[int], b'["a", "b", "c", "d", "e"]')


class Opaque:
    """Nothing that a value could be decoded to."""


@pytest.mark.parametrize("annotation", [Opaque, Opaque | None, dict[str, Opaque]])
def test_a_type_that_nothing_can_be_decoded_to_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(HandlerError, match=r"handler 'h' takes .* for which no value can be decoded"):
        payload_of(annotation, "handler 'h'")


def fails_with(error: Exception) -> Any:
    def decode(_: Record) -> object:
        raise error

    return decoded_by(decode, is_async=False)


def test_what_a_function_raises_is_a_record_that_was_not_decoded() -> None:
    with pytest.raises(DecodeError, match="orders/3/41 was not decoded: LookupError: no schema 7") as refused:
        fails_with(LookupError("no schema 7")).read(record(b""))

    assert isinstance(refused.value.__cause__, LookupError)


@pytest.mark.parametrize("error", [ConnectionError("no registry"), TimeoutError(), DecodeError("magic byte 3")])
def test_what_may_pass_and_what_it_says_itself_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        fails_with(error).read(record(b""))

    assert raised.value is error


async def test_an_async_function_is_awaited() -> None:
    async def decode(of: Record) -> int:
        return int(of.value or b"")

    payload = decoded_by(decode, is_async=True)

    assert payload.is_async
    assert await payload.read(record(b"7")) == 7
    with pytest.raises(DecodeError, match="ValueError"):
        await payload.read(record(b"x"))
