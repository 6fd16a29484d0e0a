"""Decoding a value by annotation or function, and the errors if that fails."""

import asyncio
import dataclasses
import datetime as dt
import enum
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NewType, NotRequired, Optional, Required, TypeVar

import msgspec
import pydantic
import pytest
from typing_extensions import TypeAliasType, TypedDict

from aioshard.errors import DecodeError, HandlerError
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.payloads import decoded_by, encoded_headers, message, payload_of, shown, unwritable


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


T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"


class Colored(msgspec.Struct):
    color: Color


class Of(msgspec.Struct, Generic[T]):
    it: T


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Partial(TypedDict, total=False):
    customer: Required[str]
    total: NotRequired[int]


@dataclasses.dataclass(slots=True)
class Scaled:
    number: int
    factor: dataclasses.InitVar[int] = 2
    scaled: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, factor: int) -> None:
        self.scaled = factor * self.number


@dataclasses.dataclass
class Asks:
    """One whose own check finds what it does not know, or nobody to ask."""

    number: int

    def __post_init__(self) -> None:
        if self.number == 503:
            raise ConnectionError("the catalogue is away")
        raise LookupError(f"no number {self.number}")


class AsksToo(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        raise LookupError(f"no number {self.number}")


class Checked(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number % 2:
            raise ValueError("an even number was expected")
        return number


class Nested(msgspec.Struct):
    within: "Nested | None" = None


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
CustomerId = NewType("CustomerId", str)
MayBeModel = TypeAliasType("MayBeModel", Model | None)


def record(value: bytes | None) -> Record:
    return Record("orders", 3, 41, b"key", value, (), 0.0)


def read(annotation: Any, value: bytes | None) -> Any:
    payload = payload_of(annotation, "handler 'h'")
    assert payload is not None
    assert not payload.is_async
    return payload.read(record(value))


def text_of(error: BaseException | None) -> str:
    """Return the text of its traceback without lines of source."""
    said = ""
    while error is not None:
        said += f"{error}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return said


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
        # The older form of a union; since Python 3.14 both forms are the same type.
        pytest.param(Optional[bytes], None, None, id="optional without a value"),  # noqa: UP045
        pytest.param(Optional[bytes], b"x", b"x", id="optional with a value"),  # noqa: UP045
        (Annotated[bytes, "as it is"], b"x", b"x"),
        (Annotated[str | None, "text"], b"x", "x"),
        (bytearray, b"x", bytearray(b"x")),
        (CustomerId, b"alice", "alice"),
        (Annotated[str, pydantic.Field(max_length=3)], b'"a"', '"a"'),
        (Annotated[str | None, pydantic.AfterValidator(str.upper)], b"a", "A"),
        (MayBeModel, None, None),
        (MayBeModel, b'{"customer": "a", "total": 7}', Model(customer="a", total=7)),
        (Struct | None, b'{"customer": "a", "total": 7}', Struct("a", 7)),
        (Of[int], b'{"it": 7}', Of(7)),
        (list[Struct], b'[{"customer": "a", "total": 7}]', [Struct("a", 7)]),
        (dict[str, Struct | None], b'{"a": null}', {"a": None}),
        (Page[int], b'{"items": [1]}', Page[int](items=[1])),
        (Pet, b'{"kind": "dog"}', Dog(kind="dog")),
        (Partial, b'{"customer": "a"}', {"customer": "a"}),
        (Decimal, b'"1.10"', Decimal("1.10")),
        (Color, b'"red"', Color.RED),
        (dict[str, Annotated[int, {}]], b'{"a": 1}', {"a": 1}),  # what has no hash
    ],
    ids=str,
)
def test_a_value_becomes_the_annotated_type(annotation: Any, value: bytes | None, expected: object) -> None:
    found = read(annotation, value)

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (Model, b'{"customer": "a"}', "orders/3/41 is not a valid Model: total: Field required"),
        (Model, b"not json", "orders/3/41 is not a valid Model: Invalid JSON: expected ident at line 1 column 2"),
        (
            Model,
            None,
            "orders/3/41 has no value (it is a tombstone) and its handler takes Model: annotate Model | None",
        ),
        (bytes, None, "annotate bytes | None"),
        (Annotated[int, pydantic.Field(gt=0)], b"0", "Input should be greater than 0"),
        (Struct, b'{"customer": "a", "total": "x"}', "orders/3/41 is not a valid Struct: Expected `int`, got `str`"),
        (Struct, b"{", "orders/3/41 is not a valid Struct: Input data was truncated"),
        (str, b"ab\xff", "orders/3/41 is not a valid str: it is not UTF-8 from byte 2 on"),
        (Struct, b'{"customer": "\xff", "total": 7}', "orders/3/41 is not a valid Struct: a text in it is not UTF-8"),
        # Since Python 3.14 the limit is the size of the stack of the thread, usually 8 MiB.
        pytest.param(
            Nested,
            b'{"within":' * 200_000,
            "orders/3/41 is not a valid Nested: it is nested too deeply",
            id="nested too deeply",
        ),
        (dict[str, Any], b'{"within":' * 10_000, "recursion limit exceeded"),
        (int, b"9" * 5000, "number out of range"),
        (MayBeModel | int, b"", "orders/3/41 is not a valid MayBeModel | int: "),
        (dict[str, Annotated[int, pydantic.Field(gt=0)]], b"", "orders/3/41 is not a valid dict[str, int]: "),
        (Optional[Page[int]], b"{}", "orders/3/41 is not a valid Page[int] | None: items: Field required"),  # noqa: UP045
        (
            Annotated[str, pydantic.Field(max_length=3)],
            b"four",
            "orders/3/41 is not a valid str: String should have at most 3",
        ),
        (
            Annotated[bytes, pydantic.Field(max_length=3)] | None,
            b"four",
            "is not a valid bytes | None: Data should have at most 3",
        ),
        (Annotated[str, msgspec.Meta(max_length=3)], b"four", "is not a valid str: Expected `str` of length <= 3"),
        (Annotated[int, msgspec.Meta(gt=0)], b"0", "is not a valid int: Expected `int` >= 1"),
        (
            TypeAliasType("Short", Annotated[str, pydantic.Field(max_length=3)]),
            b"four",
            "is not a valid Short: String should have",
        ),
        (type(None), b"0", "orders/3/41 is not a valid None: Input should be null"),
        (Checked, b'{"number": 1}', "number: Value error, an even number was expected"),
        (list[int], b'["a", "b", "c"]', "unable to parse string as an integer"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused(annotation: Any, value: bytes | None, said: str) -> None:
    with pytest.raises(DecodeError) as refused:
        read(annotation, value)

    assert said in str(refused.value)


def test_an_error_does_not_show_the_value() -> None:
    with pytest.raises(DecodeError) as refused:
        read(Model, b'{"customer": 4711, "total": "secret"}')

    assert str(refused.value).count("should be") == 2
    assert "4711" not in text_of(refused.value)
    assert "secret" not in text_of(refused.value)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (Pet, b'{"kind": "4711"}', "union_tag_invalid"),
        (Color, b'"4711"', "Input should be 'red'"),
        (Colored, b'{"color": "4711"}', "Invalid enum value - at `$.color`"),
        (Colored, b'{"color": "a - at `$.4711` b"}', "Invalid enum value - at `$.color`"),
        (Other | Another, b'{"type": "4711"}', "Invalid value - at `$.type`"),
        (
            Asks,
            b'{"number": 4711}',
            "orders/3/41 is not a valid Asks: LookupError was raised, by __post_init__() in test_payloads.py",
        ),
        (
            AsksToo,
            b'{"number": 4711}',
            "is not a valid AsksToo: LookupError was raised, by __post_init__() in",
        ),
    ],
    ids=str,
)
def test_an_error_hides_the_value_even_if_library_or_type_would_show_it(
    annotation: Any, value: bytes, said: str
) -> None:
    with pytest.raises(DecodeError) as refused:
        read(annotation, value)

    assert said in str(refused.value)
    assert "4711" not in text_of(refused.value)


def test_an_error_shows_no_character_of_an_invalid_uuid() -> None:
    with pytest.raises(DecodeError, match=r"orders/3/41 is not a valid UUID: uuid_parsing$"):
        read(uuid.UUID, b'"4711secret"')


def test_a_transient_error_in_a_validator_is_not_a_decode_error() -> None:
    with pytest.raises(ConnectionError, match="the catalogue is away"):
        read(Asks, b'{"number": 503}')


def test_constructor_only_fields_are_decoded_too() -> None:
    assert read(Scaled, b'{"number": 7, "factor": 3}').scaled == 21


def test_only_the_first_three_errors_are_named() -> None:
    with pytest.raises(DecodeError, match=r"0: .*; 1: .*; 2: .*; and 2 more$"):
        read(list[int], b'["a", "b", "c", "d", "e"]')
    with pytest.raises(DecodeError, match=r"0: .*; 1: .*; 2: [^;]*$"):
        read(list[int], b'["a", "b", "c"]')


class Opaque:
    """Nothing that a value could be decoded to."""


@pytest.mark.parametrize("annotation", [Opaque, Opaque | None, dict[str, Opaque]])
def test_an_undecodable_type_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(HandlerError, match=r"handler 'h' takes .* which values cannot be decoded into"):
        payload_of(annotation, "handler 'h'")


class Later(pydantic.BaseModel):
    it: "NowhereDefined"  # type: ignore[name-defined] # noqa: F821


@dataclasses.dataclass
class LaterData:
    it: "list[NowhereDefined]"  # type: ignore[name-defined] # noqa: F821


class LaterStruct(msgspec.Struct):
    it: "NowhereDefined"  # type: ignore[name-defined] # noqa: F821


class Deferred(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(defer_build=True)
    it: int


@pytest.mark.parametrize("annotation", [Later, LaterData, LaterStruct, list[Later]], ids=str)
def test_a_type_with_an_undefined_name_is_refused_before_the_first_record(annotation: Any) -> None:
    with pytest.raises(HandlerError, match=r"'NowhereDefined' is not defined\): .* defined before the handler"):
        payload_of(annotation, "handler 'h'")


@pytest.mark.parametrize(
    "annotation",
    [Struct | Model, Struct | Other, Annotated[str, pydantic.Field(pattern="(")]],
    ids=["two libraries", "no tag", "no pattern"],
)
def test_a_type_refused_by_a_library_is_refused_with_its_reason(annotation: Any) -> None:
    with pytest.raises(HandlerError, match=r"handler 'h' takes .*\(.+\): annotate aioshard.Record, a pydantic model"):
        payload_of(annotation, "handler 'h'")


def test_a_deferred_type_is_built_at_once() -> None:
    assert read(Deferred, b'{"it": 7}') == Deferred(it=7)


def fails_with(error: Exception) -> Any:
    def decode(_: Record) -> object:
        raise error

    return decoded_by(decode, is_async=False)


def test_an_exception_in_a_decoder_function_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="orders/3/41 was not decoded: LookupError: no schema 7") as refused:
        fails_with(LookupError("no schema 7")).read(record(b""))

    assert isinstance(refused.value.__cause__, LookupError)


def test_a_decoder_exception_without_a_message_names_the_record() -> None:
    with pytest.raises(DecodeError, match=r"^orders/3/41 was not decoded: AssertionError$"):
        fails_with(AssertionError()).read(record(b""))


@pytest.mark.parametrize(
    "decode",
    [
        lambda of: Model.model_validate_json(of.value),
        lambda of: msgspec.json.decode(of.value, type=Struct),
        lambda of: msgspec.json.decode(b'"4711"', type=Color) if of else None,
    ],
    ids=["pydantic", "msgspec", "an enum"],
)
def test_a_validation_error_in_a_decoder_hides_the_value_too(decode: Any) -> None:
    with pytest.raises(DecodeError, match="orders/3/41 was not decoded: ValidationError: ") as refused:
        decoded_by(decode, is_async=False).read(record(b'{"customer": 4711, "total": "4711"}'))

    assert "4711" not in text_of(refused.value)


class Exotic(BaseException):
    """As libraries raise to get past `except Exception`."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, Exotic, MemoryError])
async def test_errors_that_are_not_about_the_record_are_unchanged(error: type[BaseException]) -> None:
    def decode(_: Record) -> object:
        raise error

    async def decode_slowly(_: Record) -> object:
        raise error

    with pytest.raises(error):
        decoded_by(decode, is_async=False).read(record(b""))
    with pytest.raises(error):
        await decoded_by(decode_slowly, is_async=True).read(record(b""))


async def test_transient_errors_in_an_async_decoder_are_unchanged() -> None:
    async def decode(_: Record) -> object:
        raise ConnectionError("no registry")

    with pytest.raises(ConnectionError, match="no registry"):
        await decoded_by(decode, is_async=True).read(record(b""))


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Model, "Model"),
        (None, "None"),
        (Optional[Model], "Model | None"),  # noqa: UP045
        (Annotated[Model | int, "both"], "Model | int"),
        (dict[str, list[Struct]], "dict[str, list[Struct]]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Page[Model], "Page[Model]"),
        (Of[Model], "Of[Model]"),
        (CustomerId, "CustomerId"),
        (MayBeModel, "MayBeModel"),
        (Literal["a", 1], "Literal['a', 1]"),
        (Callable[[int], str], "Callable[[int], str]"),
        (Any, "Any"),
        ("Missing", "Missing"),
    ],
    ids=str,
)
def test_a_type_is_shown_as_it_is_written(annotation: Any, expected: str) -> None:
    assert shown(annotation) == expected


@pytest.mark.parametrize("error", [ConnectionError("no registry"), TimeoutError(), DecodeError("magic byte 3")])
def test_transient_and_explicit_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        fails_with(error).read(record(b""))

    assert raised.value is error


async def test_an_async_decoder_is_awaited() -> None:
    async def decode(of: Record) -> int:
        return int(of.value or b"")

    payload = decoded_by(decode, is_async=True)

    assert payload.is_async
    assert await payload.read(record(b"7")) == 7
    with pytest.raises(DecodeError, match="ValueError"):
        await payload.read(record(b"x"))


# Messages ------------------------------------------------------------------------------


class Name(enum.StrEnum):
    TRACE = "trace"


@pytest.mark.parametrize(
    ("headers", "stored"),
    [
        ({"id": b"1"}, (("id", b"1"),)),
        ({"id": "1", "trace": None}, (("id", b"1"), ("trace", None))),
        ([(b"trace-id", b"1"), ["x", "å"]], (("trace-id", b"1"), ("x", "å".encode()))),
        ([("å".encode(), bytearray(b"1"))], (("å", b"1"),)),
        ([(Name.TRACE, Name.TRACE)], (("trace", b"trace"),)),
        ((pair for pair in [("a", b""), ("a", b"2")]), (("a", b""), ("a", b"2"))),
        ((), ()),
    ],
)
def test_headers_are_stored_as_they_are_meant(headers: Any, stored: object) -> None:
    """A mapping is not its names, and a name in bytes, as in ASGI and httpx, is not its `repr`."""
    built = message("invoices", b"", headers=headers)
    assert built.headers == stored
    assert {type(part) for header in built.headers for part in header} <= {str, bytes, type(None)}
    assert unwritable(built) is None
    assert encoded_headers(built.headers) == stored


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": "no topic"},
        {"topic": b"orders"},
        {"partition": "1"},
        {"key": "text"},
        {"value": "text"},
        {"headers": ["id"]},
        {"headers": None},
        {"headers": ((b"trace", b"1"),)},
        {"headers": (("trace", "1"),)},
        {"headers": (("x-\ud83d", b"1"),)},
        {"timestamp": float("inf")},
        {"timestamp": float("nan")},
        {"timestamp": "now"},
    ],
)
def test_a_message_that_cannot_be_written_is_recognized(changes: dict[str, Any]) -> None:
    good = Message("orders", b"1", b"k", (("trace", None),), 1, 1.5)
    assert unwritable(good) is None
    assert unwritable(good._replace(**changes))
