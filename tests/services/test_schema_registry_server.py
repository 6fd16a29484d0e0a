"""A real schema registry, with confluent-kafka's own serializers as independent writers and readers."""

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from confluent_kafka.schema_registry import AsyncSchemaRegistryClient, Schema, SchemaReference
from confluent_kafka.schema_registry.avro import AsyncAvroDeserializer, AsyncAvroSerializer
from confluent_kafka.schema_registry.json_schema import AsyncJSONSerializer
from confluent_kafka.schema_registry.protobuf import AsyncProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.wrappers_pb2 import Int64Value, StringValue
from pydantic import BaseModel

from aioshard import App, DeadLetter, Record
from aioshard.errors import MessageError
from aioshard.schema_registry import Avro, JsonSchema, Protobuf, SchemaRegistry
from aioshard.schema_registry.framing import schema_named_in
from aioshard.testing import TestClient
from tests.support.schema_registry import SchemaRegistryServer

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "item", "type": "string"}, {"name": "total", "type": "int"}],
}
VALUE = {"item": "tea", "total": 7}
PROTO = (
    'syntax = "proto3"; package google.protobuf; message Other { int32 a = 1; } message Int64Value { int64 value = 1; }'
)


class Order(BaseModel):
    item: str
    total: int


class Served:
    """A topic with a name of its own, and the registry, for aioshard and for confluent-kafka."""

    def __init__(self, url: str) -> None:
        self.registry = SchemaRegistry(url)
        self.client = AsyncSchemaRegistryClient.new_client({"url": url})
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.subject = f"{self.topic}-value"

    @property
    def context(self) -> SerializationContext:
        return SerializationContext(self.topic, MessageField.VALUE)

    async def register(self, schema: Any, kind: str = "AVRO", **more: Any) -> int:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return await self.client.register_schema(self.subject, Schema(text, kind, **more))

    async def read(self, annotation: Any, *values: bytes | None) -> tuple[list[Any], Sequence[Record]]:
        """Return what a handler gets for some values, and its dead letters."""
        app = App(f"group-{self.topic}")
        got: list[Any] = []

        @app.consume(self.topic, on_failure=DeadLetter(f"{self.topic}.dlt"))
        async def on_value(value: annotation) -> None:
            got.append(value)

        async with TestClient(app) as client:
            for value in values:
                await client.publish(self.topic, value, key="a")
            await client.settle(timeout=20.0)
            return got, client.records(f"{self.topic}.dlt")

    async def published(self, form: Any, value: Any) -> bytes:
        app = App(f"group-{self.topic}")
        async with TestClient(app) as client:
            await app.publish(self.topic, value, format=form)
            (record,) = client.records(self.topic)
            return record.value or b""


@pytest.fixture
async def served(registry_server: SchemaRegistryServer) -> Any:
    made = Served(registry_server.url)
    yield made
    await made.client.aclose()


async def test_avro_of_another_writer_is_read(served: Served) -> None:
    write: Any = await AsyncAvroSerializer(served.client, json.dumps(ORDER))
    value = await write(VALUE, served.context)

    got, letters = await served.read(Annotated[Order, Avro(served.registry)] | None, value, None)

    assert (got, letters) == ([Order(**VALUE), None], [])


@pytest.mark.parametrize("directly", [False, True])
async def test_a_schema_that_refers_to_others_is_read(served: Served, directly: bool) -> None:
    item = {"type": "record", "name": "Item", "namespace": "shop", "fields": [{"name": "sku", "type": "string"}]}
    line = {
        "type": "record",
        "name": "Line",
        "namespace": "shop",
        "fields": [{"name": "item", "type": "shop.Item"}, {"name": "count", "type": "int"}],
    }
    order = {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [{"name": "line", "type": "shop.Line"}],
    }
    sent: dict[str, Any] = {"line": {"item": {"sku": "b"}, "count": 2}}
    if directly:
        order["fields"] = [{"name": "gift", "type": "shop.Item"}, *order["fields"]]
        sent["gift"] = {"sku": "a"}
    items = f"{served.topic}-item"
    lines = f"{served.topic}-line"
    to_item = SchemaReference("shop.Item", items, 1)
    await served.client.register_schema(items, Schema(json.dumps(item), "AVRO"))
    await served.client.register_schema(lines, Schema(json.dumps(line), "AVRO", references=[to_item]))
    to_line = SchemaReference("shop.Line", lines, 1)
    referring = Schema(json.dumps(order), "AVRO", references=[to_item, to_line] if directly else [to_line])
    write: Any = await AsyncAvroSerializer(served.client, referring)
    value = await write(sent, served.context)

    got, letters = await served.read(Annotated[dict[str, Any], Avro(served.registry)], value)

    assert (got, letters) == ([sent], [])


async def test_json_of_another_writer_is_read(served: Served) -> None:
    schema = {"title": "Order", **Order.model_json_schema()}
    write: Any = await AsyncJSONSerializer(json.dumps(schema), served.client)
    value = await write(VALUE, served.context)

    got, letters = await served.read(Annotated[Order, JsonSchema(served.registry)], value)

    assert (got, letters) == ([Order(**VALUE)], [])


async def test_protobuf_of_another_writer_is_read_and_other_messages_are_refused(served: Served) -> None:
    write: Any = await AsyncProtobufSerializer(Int64Value, served.client, {"use.deprecated.format": False})
    other: Any = await AsyncProtobufSerializer(StringValue, served.client, {"use.deprecated.format": False})
    values = [await write(Int64Value(value=41), served.context), await other(StringValue(value="x"), served.context)]

    got, letters = await served.read(Annotated[Int64Value, Protobuf(served.registry)], *values)

    assert got == [Int64Value(value=41)]
    assert [letter.value for letter in letters] == values[1:]


async def test_protobuf_of_a_schema_that_is_a_text_is_written_and_read(served: Served) -> None:
    await served.register(PROTO, "PROTOBUF")

    value = await served.published(Protobuf(served.registry), Int64Value(value=41))
    got, letters = await served.read(Annotated[Int64Value, Protobuf(served.registry)], value)

    assert value[5:8] == b"\2\2\x08"  # the second message of the schema
    assert (got, letters) == ([Int64Value(value=41)], [])


@pytest.mark.parametrize("registered", [False, True])
async def test_another_reader_reads_what_is_published(served: Served, registered: bool) -> None:
    form = Avro(served.registry, schema=json.dumps(ORDER), auto_register=True)
    if registered:
        await served.register(ORDER)
        form = Avro(served.registry, schema=json.dumps(ORDER, indent=2))  # looked up, however it is written

    value = await served.published(form, Order(**VALUE))
    latest = await served.published(Avro(served.registry), Order(**VALUE))
    read: Any = await AsyncAvroDeserializer(served.client)

    assert await read(value, served.context) == VALUE
    assert latest == value


async def test_nothing_is_registered_unless_it_is_allowed(served: Served) -> None:
    with pytest.raises(MessageError, match="40401"):
        await served.published(Avro(served.registry, schema=json.dumps(ORDER)), VALUE)

    assert served.subject not in await served.client.get_subjects()


async def test_a_schema_that_breaks_compatibility_is_refused(served: Served) -> None:
    await served.register(ORDER)
    await served.client.set_compatibility(served.subject, "BACKWARD")
    narrower = {**ORDER, "fields": [{"name": "number", "type": "int"}]}

    with pytest.raises(MessageError, match="ncompatible"):
        await served.published(Avro(served.registry, schema=json.dumps(narrower), auto_register=True), {"number": 1})


async def test_an_unknown_schema_is_a_payload_error(served: Served) -> None:
    got, (letter,) = await served.read(Annotated[Order, Avro(served.registry)], b"\0\0\x0f\xff\xff\x02")

    assert got == []
    assert "40403" in (dict(letter.headers)["aioshard.message"] or b"").decode()
    assert schema_named_in(letter) == 0x0FFFFF
