"""Dead letters are decoded as their handlers do, and faults name each field."""

import asyncio
import json
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel

from aioshard import App, Record
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.decoding import Decoded, decode, value_as_object
from aioshard.schema_registry import Avro, SchemaRegistry
from aioshard.schema_registry.framing import framed
from aioshard.schema_registry.registries import Registries
from aioshard.serde.side_records import Coordinates
from tests.support.dead_letters import failure, record
from tests.support.fake_registry import FakeRegistry


class Line(BaseModel):
    price: int


class Order(BaseModel):
    total: int
    lines: list[Line] = []


class Refund(msgspec.Struct):
    total: int


def broken(_: Record) -> object:
    raise RuntimeError("no schema registry")


async def decode_later(record: Record) -> int:
    await asyncio.sleep(0)
    return int(record.value or b"")


app = App("billing")


@app.consume("orders")
async def on_order(order: Order) -> None: ...


@app.consume("refunds")
async def on_refund(refund: Refund) -> None: ...


@app.consume("raw")
async def on_raw(record: Record) -> None: ...


@app.consume("broken", decode=broken)
async def on_broken(value: object) -> None: ...


@app.consume("later", decode=decode_later)
async def on_later(value: int) -> None: ...


REGISTRY = SchemaRegistry("mock://decoding")


@app.consume("avro")
async def on_avro(order: Annotated[Order, Avro(REGISTRY)]) -> None: ...


def letter(topic: str, value: bytes | None) -> StoredDeadLetter:
    return StoredDeadLetter(Coordinates("t.dlt", 0, 1), record(1, topic=topic, value=value), failure(), done=False)


def decode_one(topic: str, value: bytes | None) -> Decoded:
    (found,) = asyncio.run(decode(app, [letter(topic, value)]))
    return found


def test_a_value_is_decoded_into_the_type_of_the_handler() -> None:
    found = decode_one("orders", b'{"total": "7"}')

    assert found == ("on_order", "Order", {"total": 7, "lines": []}, ())
    assert decode_one("refunds", b'{"total": 7}').value == {"total": 7}
    assert decode_one("later", b"17").value == 17


def test_every_fault_names_its_field() -> None:
    found = decode_one("orders", b'{"total": "x", "lines": [{"price": 1}, {"price": []}, {}]}')

    assert found.value is None
    assert [location for location, _ in found.faults] == ["total", "lines.1.price", "lines.2.price"]
    assert found.faults[0].message == "Input should be a valid integer, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("topic", "value", "location"),
    [("refunds", b'{"total": "x"}', "total"), ("refunds", b"{", ""), ("orders", b"{", ""), ("orders", None, "")],
)
def test_a_fault_of_the_whole_value_has_no_location(topic: str, value: bytes | None, location: str) -> None:
    (fault,) = decode_one(topic, value).faults

    assert fault.location == location
    assert fault.message


def test_a_value_with_a_schema_registry_is_decoded_although_the_app_does_not_run() -> None:
    fields = [{"name": "total", "type": "string"}]
    schema = json.dumps({"type": "record", "name": "Order", "fields": fields})
    writer = Avro(REGISTRY, schema=schema, auto_register=True)
    number, text = (asyncio.run(Registries().encode(writer, "avro", {"total": total})) for total in ("7", "x"))

    assert decode_one("avro", number) == ("on_avro", "Order", {"total": 7, "lines": []}, ())
    assert [location for location, _ in decode_one("avro", text).faults] == ["total"]
    assert "0x78" in decode_one("avro", b"x").faults[0].message


@pytest.mark.parametrize("status", [200, 503])
def test_a_schema_registry_is_asked_once_for_all_dead_letters(status: int) -> None:
    """One that does not answer would take its timeout for each of them."""

    async def test() -> None:
        schema = {"type": "record", "name": "Order", "fields": [{"name": "total", "type": "int"}]}
        async with FakeRegistry({7: json.dumps(schema)}) as fake:
            fake.status = status
            other = App("billing")

            @other.consume("avro")
            async def on_order(order: Annotated[Order, Avro(SchemaRegistry(fake.url))]) -> None: ...

            found = await decode(other, [letter("avro", framed(7, b"\x0e"))] * 3)

            assert fake.requests.total() == 1
            if status == 200:
                assert [shown.value for shown in found] == [{"total": 7, "lines": []}] * 3
            else:
                assert ["503" in shown.faults[0].message for shown in found] == [True] * 3

    asyncio.run(test())


def test_an_error_of_the_decoder_itself_is_shown() -> None:
    (fault,) = decode_one("broken", b"v").faults

    assert "RuntimeError: no schema registry" in fault.message


@pytest.mark.parametrize(("topic", "handler"), [("raw", "on_raw"), ("unknown", None)])
def test_a_value_that_no_handler_decodes_is_shown_as_it_is(topic: str, handler: str | None) -> None:
    assert decode_one(topic, b"text") == (handler, None, "text", ())


class Circle:
    def __repr__(self) -> str:
        raise RecursionError


@pytest.mark.parametrize(
    ("value", "shown"),
    [("text", "text"), (b"\xff", {"base64": "/w=="}), ({1}, [1]), (object, "<class 'object'>"), (None, None)],
)
def test_any_result_can_be_shown(value: object, shown: object) -> None:
    assert value_as_object(value) == shown


def test_a_result_that_fails_to_show_itself_is_no_error() -> None:
    assert value_as_object(Circle()).startswith("it cannot be shown")


def test_hidden_payloads_show_positions_and_classes_only() -> None:
    secret = StoredDeadLetter(
        Coordinates("t.dlt", 0, 1),
        record(1, topic="orders", key=b"secret", value=b'{"total": "secret"}', headers=(("secret", b"secret"),)),
        failure(message="secret"),
        done=False,
    )
    (found,) = asyncio.run(decode(app, [secret]))

    shown: Any = secret.as_object(payload=False)
    faults: Any = found.as_object(payload=False)

    assert "secret" not in repr(shown) + repr(faults)
    assert shown["hidden"] is True
    assert shown["error"] == "ValueError"
    assert faults["faults"] == [{"location": "total", "message": None}]
