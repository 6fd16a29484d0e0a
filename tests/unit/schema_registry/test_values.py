"""The bytes and headers that name a schema, the address of a registry, and the messages of a Protobuf schema."""

import base64
import uuid
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from aioshard.errors import HandlerError, SettingsError
from aioshard.records import Record
from aioshard.schema_registry import Avro, JsonSchema, Protobuf, SchemaRegistry
from aioshard.schema_registry.framing import (
    Frame,
    FramingError,
    frame_of,
    framed,
    joined_indexes,
    schema_named_in,
    split_indexes,
)
from aioshard.schema_registry.protobuf import message_names, position_of

REGISTRY = SchemaRegistry("mock://values")


def record(value: bytes | None, *headers: tuple[str, bytes | None]) -> Record:
    return Record("orders", 0, 41, None, value, headers, 0.0)


@given(st.integers(0, 2**32 - 1), st.binary(max_size=20))
def test_a_framed_value_names_its_schema(schema: int, content: bytes) -> None:
    assert frame_of(record(framed(schema, content))) == Frame(schema, content)


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_and_nothing_else_is_raised(value: bytes) -> None:
    try:
        found = frame_of(record(value))
    except FramingError:
        assert schema_named_in(record(value)) is None
    else:
        assert framed(int(found.schema), found.content) == value


def test_a_header_names_the_schema() -> None:
    guid = uuid.uuid4()
    by_guid = record(b"abc", ("trace", b"1"), ("__value_schema_id", b"\1" + guid.bytes + b"\0"))
    by_number = record(b"abc", ("__value_schema_id", b"\0\0\0\0\7"))

    assert frame_of(by_guid) == Frame(str(guid), b"abc", b"\0")
    assert frame_of(by_number) == Frame(7, b"abc", b"")
    with pytest.raises(FramingError, match="__value_schema_id"):
        frame_of(record(b"abc", ("__value_schema_id", b"\5xyz")))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.binary(max_size=5))
def test_positions_of_messages(indexes: list[int], content: bytes) -> None:
    assert split_indexes(joined_indexes(tuple(indexes)) + content) == (tuple(indexes), content)


@given(st.binary(max_size=12))
def test_broken_positions_are_refused(content: bytes) -> None:
    try:
        indexes, rest = split_indexes(content)
    except FramingError:
        return
    assert content.endswith(rest)
    assert indexes


def test_messages_of_a_schema() -> None:
    text = """
        syntax = "proto3"; // message No {
        package shop.v1;
        option (note) = "message Neither {";
        message Order { message Item { string message = 1; } oneof kind { string a = 2; } map<string, Item> b = 3; }
        enum Color { RED = 0; }
        service Shop { rpc Get (Order) returns (Order) {} }
        message  Paid{}
    """

    assert message_names(text) == ["shop.v1.Order", "shop.v1.Paid"]
    assert message_names("message Order {}") == ["Order"]


def test_messages_of_a_descriptor() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="orders.proto", package="shop")
    file.message_type.add(name="Order")
    file.message_type.add(name="Paid")

    assert message_names(base64.b64encode(file.SerializeToString()).decode()) == ["shop.Order", "shop.Paid"]


def test_position_of_a_nested_message() -> None:
    fields: Any = struct_pb2.Struct.DESCRIPTOR.nested_types_by_name["FieldsEntry"]

    assert position_of(fields) == ("google.protobuf.Struct", (0,))


@pytest.mark.parametrize(
    ("url", "auth", "expected"),
    [
        ("https://registry:8081", None, {"url": "https://registry:8081"}),
        (
            "https://a%40b:s%3Acret@registry:8081/path",
            None,
            {"url": "https://registry:8081/path", "basic.auth.user.info": "a@b:s:cret"},
        ),
        (
            "http://one, http://two",
            ("user", "secret"),
            {"url": "http://one,http://two", "basic.auth.user.info": "user:secret"},
        ),
    ],
    ids=["plain", "in the url", "several"],
)
def test_logins_are_not_part_of_the_url(url: str, auth: tuple[str, str] | None, expected: dict[str, Any]) -> None:
    registry = SchemaRegistry(url, auth, timeout=3.0, options={"cache.capacity": 7})

    assert registry.config() == {"timeout": 3.0, "max.retries": 0, "cache.capacity": 7, **expected}
    assert "cret" not in f"{registry} {registry!r} {registry.address} {Avro(registry)!r}"


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": ""},
        {"url": "registry:8081"},
        {"url": "ftp://user:secret@registry"},
        {"url": "http://[secret"},
        {"url": "http://"},
        {"url": "http://registry", "auth": "user:secret"},
        {"url": "http://registry", "timeout": 0},
        {"url": "http://registry", "timeout": "1"},
    ],
    ids=str,
)
def test_invalid_registries_are_refused_without_a_password_in_the_message(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        SchemaRegistry(**arguments)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Avro("http://registry"),  # type: ignore[arg-type]
        lambda: Avro(REGISTRY, schema={}),  # type: ignore[arg-type]
        lambda: Avro(REGISTRY, subject=" "),
        lambda: JsonSchema(REGISTRY, auto_register=True),
        lambda: Protobuf(REGISTRY, schema="message A {}"),
    ],
    ids=["no registry", "schema", "subject", "nothing to register", "schema of protobuf"],
)
def test_invalid_formats_are_refused(make: Any) -> None:
    with pytest.raises(HandlerError):
        make()
