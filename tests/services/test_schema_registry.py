"""Decoders on the async client of a schema registry: decoded payloads and retries."""

import asyncio
from typing import Any

from confluent_kafka.schema_registry import AsyncSchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import AsyncProtobufDeserializer, AsyncProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from aioshard import App, DeadLetter, Record, Retry
from aioshard.testing import TestClient, run


def order_class() -> Any:
    """The output of protoc for `message Order { string item = 1; }`."""
    file = descriptor_pb2.FileDescriptorProto(name="aioshard_test_order.proto", package="shop", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    message = file.message_type.add(name="Order")
    message.field.add(name="item", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


Order = order_class()
PLAIN = {"use.deprecated.format": False}
CONTEXT = SerializationContext("orders", MessageField.VALUE)


class Protobuf:
    """Reads with a registry that does not answer at first."""

    def __init__(self, registry: AsyncSchemaRegistryClient, away: int) -> None:
        self._registry = registry
        self._read: Any = None
        self.away = away
        self.asked = 0

    async def __call__(self, record: Record) -> Any:
        self.asked += 1
        if self.asked <= self.away:
            await asyncio.sleep(0.01)
            raise ConnectionError("the registry does not answer")
        if self._read is None:
            self._read = await AsyncProtobufDeserializer(Order, PLAIN, self._registry)
        return await self._read(record.value, CONTEXT)


def test_protobuf_is_decoded_after_a_schema_registry_outage() -> None:
    registry = AsyncSchemaRegistryClient.new_client({"url": "mock://orders"})
    decode = Protobuf(registry, away=2)
    app = App("billing")
    read: list[str] = []

    @app.consume("orders", decode=decode, retry=Retry(attempts=4), on_failure=DeadLetter("orders.dlt"))
    async def on_order(order: Any) -> None:
        read.append(order.item)

    async def test() -> None:
        write: Any = await AsyncProtobufSerializer(Order, registry, PLAIN)
        async with TestClient(app) as client:
            await client.publish("orders", await write(Order(item="one"), CONTEXT), key="k")
            await client.settle(60.0)
            assert decode.asked == 3
            await client.publish("orders", b"junk", key="k")
            await client.publish("orders", await write(Order(item="two"), CONTEXT), key="k")
            await client.settle(60.0)
            (letter,) = client.records("orders.dlt")
            assert letter.value == b"junk"
            assert dict(letter.headers)["aioshard.attempts"] == b"1"

    run(test())
    assert read == ["one", "two"]
    assert decode.asked == 5
