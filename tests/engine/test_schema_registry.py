"""Values with a schema registry: what a handler gets, what is published, and what happens while nothing answers."""

import asyncio
import base64
import dataclasses
import datetime as dt
import json
import logging
import uuid
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pytest
from fast_depends import Depends
from google.protobuf import struct_pb2
from google.protobuf.wrappers_pb2 import Int64Value, StringValue
from pydantic import BaseModel
from typing_extensions import TypedDict

from aioshard import App, Batch, CallNext, Context, DeadLetter, Message, Park, Record, Retry
from aioshard.errors import HandlerError, MessageError, RegistryUnavailableError
from aioshard.schema_registry import Avro, JsonSchema, Protobuf, SchemaRegistry
from aioshard.schema_registry.client import RegistryClient
from aioshard.schema_registry.framing import framed, joined_indexes
from aioshard.testing import TestClient, run
from aioshard.web.health import findings as findings_of
from tests.support.fake_registry import FakeRegistry

ORDER = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "item", "type": "string"}, {"name": "total", "type": "int"}],
    }
)
OPTIONAL = json.dumps({"type": "record", "name": "Optional", "fields": [{"name": "item", "type": ["null", "int"]}]})
VALUE = {"item": "tea", "total": 7}
ENCODED = b"\x06tea\x0e"
"""`VALUE` in Avro."""


class Model(BaseModel):
    item: str
    total: int


@dataclasses.dataclass
class Dataclass:
    item: str
    total: int


class Dictionary(TypedDict):
    item: str
    total: int


class Struct(msgspec.Struct):
    item: str
    total: int


@pytest.fixture
def registry() -> SchemaRegistry:
    """A registry in memory that no other test uses."""
    return SchemaRegistry(f"mock://{uuid.uuid4().hex}")


def headers_of(record: Record) -> dict[str, str]:
    return {name: (content or b"").decode() for name, content in record.headers}


# What handlers get ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Model, Dataclass, Dictionary, Struct, dict[str, Any]], ids=str)
def test_avro_becomes_the_annotated_type(registry: SchemaRegistry, kind: Any) -> None:
    app = App("billing")
    got: list[Any] = []

    @app.consume("orders")
    async def on_order(order: Annotated[kind, Avro(registry)]) -> None:
        got.append(order)

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", VALUE, format=Avro(registry, schema=ORDER, auto_register=True))
            await client.settle()

    run(test())

    assert got == [VALUE if kind in (Dictionary, dict[str, Any]) else kind(**VALUE)]


def test_logical_types_of_avro_arrive_as_objects(registry: SchemaRegistry) -> None:
    schema = {
        "type": "record",
        "name": "Payment",
        "fields": [
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        ],
    }

    class Payment(BaseModel):
        at: dt.datetime
        amount: Decimal

    sent = Payment(at=dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC), amount=Decimal("12.50"))
    app = App("billing")
    got: list[Payment] = []

    @app.consume("payments")
    async def on_payment(payment: Annotated[Payment, Avro(registry)]) -> None:
        got.append(payment)

    async def test() -> None:
        async with TestClient(app) as client:
            written = Avro(registry, schema=json.dumps(schema), auto_register=True)
            await client.publish("payments", sent, format=written)
            await client.settle()

    run(test())

    assert got == [sent]


def test_a_reader_schema_fills_in_defaults(registry: SchemaRegistry) -> None:
    newer = json.loads(ORDER)
    newer["fields"].append({"name": "currency", "type": "string", "default": "EUR"})
    app = App("billing")
    got: list[dict[str, Any]] = []

    @app.consume("orders")
    async def on_order(order: Annotated[dict[str, Any], Avro(registry, schema=json.dumps(newer))]) -> None:
        got.append(order)

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", VALUE, format=Avro(registry, schema=ORDER, auto_register=True))
            await client.settle()

    run(test())

    assert got == [{**VALUE, "currency": "EUR"}]


def test_json_needs_no_registry_to_be_read() -> None:
    app = App("billing")
    got: list[Model] = []

    @app.consume("orders")
    async def on_order(order: Annotated[Model, JsonSchema(SchemaRegistry("http://127.0.0.1:1"))]) -> None:
        got.append(order)

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", framed(7, json.dumps(VALUE).encode()))
            await client.settle()

    run(test())

    assert got == [Model(**VALUE)]


def test_protobuf_becomes_the_generated_class(registry: SchemaRegistry) -> None:
    app = App("billing")
    got: list[Any] = []

    @app.consume("numbers", on_failure=DeadLetter("numbers.dlt"))
    async def on_number(number: Annotated[Int64Value, Protobuf(registry)] | None) -> None:
        got.append(number)

    written = Protobuf(registry, auto_register=True)

    async def test() -> Sequence[Record]:
        async with TestClient(app) as client:
            await client.publish("numbers", Int64Value(value=41), key="a", format=written)
            await client.publish("numbers", None, key="a")
            await client.publish("numbers", StringValue(value="x"), key="a", format=written)  # another message
            await client.settle()
            return client.records("numbers.dlt")

    (letter,) = run(test())

    assert got == [Int64Value(value=41), None]
    assert "google.protobuf.StringValue" in headers_of(letter)["aioshard.message"]


@pytest.mark.parametrize("with_middleware", [False, True])
def test_batches_are_decoded_although_no_schema_is_known_at_first(
    registry: SchemaRegistry, with_middleware: bool
) -> None:
    app = App("billing")
    got: list[int] = []
    sizes: list[int] = []

    @app.consume("orders", batch=Batch(max_records=50), concurrency=1, on_failure=DeadLetter("orders.dlt"))
    async def on_orders(orders: list[Annotated[Model, Avro(registry)]]) -> None:
        sizes.append(len(orders))
        got.extend(order.total for order in orders)

    if with_middleware:

        @app.middleware
        async def passed_on(records: Any, context: Any, call_next: CallNext) -> object:
            return await call_next(records, context)

    async def test() -> int:
        async with TestClient(app) as client:
            written = Avro(registry, schema=ORDER, auto_register=True)
            for total in range(50):
                await client.publish("orders", {"item": "tea", "total": total}, partition=0, format=written)
            await client.settle()
            before = len(sizes)
            await client.publish("orders", b"no schema", partition=0)
            await client.publish("orders", {"item": "tea", "total": 50}, partition=0, format=written)
            await client.settle()
            assert len(client.records("orders.dlt")) == 1
            return before

    before = run(test())

    assert sorted(got) == list(range(51))
    assert before <= 3, sizes  # no record ran in a batch of its own


def test_plain_handlers_and_middleware_that_replaces_the_record(registry: SchemaRegistry) -> None:
    app = App("billing")
    got: list[Model] = []

    @app.consume("orders")
    def on_order(order: Annotated[Model, Avro(registry)]) -> None:  # in a thread
        got.append(order)

    @app.middleware
    async def claim_check(record: Record, context: Context, call_next: CallNext) -> object:
        return await call_next(record._replace(value=framed(1, ENCODED)), context)

    async def test() -> None:
        async with TestClient(app) as client:
            written = Avro(registry, schema=ORDER, auto_register=True)
            await client.app.running_engine().registries.encode(written, "orders", VALUE)
            await client.publish("orders", b"s3://bucket/object")
            await client.settle()

    run(test())

    assert got == [Model(**VALUE)]


def test_dependencies_take_the_decoded_value(registry: SchemaRegistry) -> None:
    app = App("billing")
    got: list[tuple[int, int]] = []

    def doubled(order: Model) -> int:
        return 2 * order.total

    @app.consume("orders")
    async def on_order(order: Annotated[Model, Avro(registry)], twice: Annotated[int, Depends(doubled)]) -> None:
        got.append((order.total, twice))

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", VALUE, format=Avro(registry, schema=ORDER, auto_register=True))
            await client.settle()

    run(test())

    assert got == [(7, 14)]


# Payload errors ------------------------------------------------------------------------


async def letters_of(fake: FakeRegistry, *values: bytes) -> list[dict[str, str]]:
    """Publish values for a handler that retries forever; return the headers of their dead letters."""
    app = App("billing")
    registry = SchemaRegistry(fake.url)

    @app.consume("orders", on_failure=DeadLetter("orders.dlt"), retry=Retry(attempts=1000))
    async def on_order(order: Annotated[Model, Avro(registry)]) -> None: ...

    async with TestClient(app) as client:
        for value in values:
            await client.publish("orders", value, partition=0)
        await client.settle()
        letters = client.records("orders.dlt")
        assert sorted(letter.value or b"" for letter in letters) == sorted(values)
        return [headers_of(letter) for letter in letters]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'{"item": "tea"}', "0x7b"),
        (b"", "empty"),
        (b"\0\0\0", "3 bytes"),
        (framed(1, ENCODED[:2]), "schema 1"),
        (framed(1, b"\x06tea"), "schema 1"),
        (framed(9, ENCODED), "40403"),
        (framed(2, ENCODED), "not an Avro schema"),
    ],
    ids=["JSON", "empty", "short", "cut off", "ends early", "unknown schema", "no Avro"],
)
async def test_what_cannot_be_decoded_fails_once_and_says_why(value: bytes, said: str) -> None:
    async with FakeRegistry({1: ORDER, 2: '{"type": "nothing"}'}) as fake:
        (headers,) = await letters_of(fake, value)

    assert headers["aioshard.error"] == "DecodeError"
    assert headers["aioshard.attempts"] == "1"
    assert said in headers["aioshard.message"]


async def test_dead_letters_name_schema_and_subject() -> None:
    async with FakeRegistry({1: ORDER}) as fake:
        headers = await letters_of(fake, framed(9, ENCODED), b"no schema")

    assert [letter.get("aioshard.schema_id") for letter in headers] == ["9", None]
    assert [letter["aioshard.subject"] for letter in headers] == ["orders-value", "orders-value"]


async def test_a_failing_handler_also_leads_to_dead_letters_that_name_the_schema(registry: SchemaRegistry) -> None:
    app = App("billing")

    @app.consume("orders", on_failure=DeadLetter("orders.dlt"), retry=Retry(attempts=1))
    async def on_order(order: Annotated[Model, Avro(registry, subject="shop.Order")]) -> None:
        raise ValueError(order.total)

    written = Avro(registry, schema=ORDER, subject="shop.Order", auto_register=True)
    async with TestClient(app) as client:
        await client.publish("orders", VALUE, format=written)
        await client.settle()
        (letter,) = client.records("orders.dlt")

    assert headers_of(letter)["aioshard.schema_id"] == "1"
    assert headers_of(letter)["aioshard.subject"] == "shop.Order"


async def test_a_header_may_name_the_schema_by_its_guid() -> None:
    app = App("billing")
    got: list[Model] = []
    guid = uuid.uuid4()
    header = {"__value_schema_id": b"\1" + guid.bytes}
    async with FakeRegistry() as fake:
        fake.by_guid[str(guid)] = ORDER

        @app.consume("orders", on_failure=DeadLetter("orders.dlt"))
        async def on_order(order: Annotated[Model, Avro(SchemaRegistry(fake.url))]) -> None:
            got.append(order)

        async with TestClient(app) as client:
            await client.publish("orders", ENCODED, headers=header)
            await client.publish("orders", ENCODED[:2], headers=header)
            await client.settle()
            (letter,) = client.records("orders.dlt")

    assert got == [Model(**VALUE)]
    assert dict(letter.headers)["aioshard.schema_id"] == str(guid).encode()


async def test_a_schema_with_rules_is_refused() -> None:
    rules = {"domainRules": [{"name": "encrypt", "kind": "TRANSFORM", "mode": "WRITEREAD", "type": "ENCRYPT"}]}
    async with FakeRegistry({1: ORDER}, ruleSet=rules) as fake:
        (headers,) = await letters_of(fake, framed(1, ENCODED))

    assert "has rules" in headers["aioshard.message"]


async def test_a_nested_message_is_not_read_as_the_one_around_it() -> None:
    app = App("billing")
    got: list[struct_pb2.Struct] = []
    schema = base64.b64encode(struct_pb2.Struct.DESCRIPTOR.file.serialized_pb).decode()
    async with FakeRegistry({1: schema}, schemaType="PROTOBUF") as fake:

        @app.consume("structs", on_failure=DeadLetter("structs.dlt"))
        async def on_struct(struct: Annotated[struct_pb2.Struct, Protobuf(SchemaRegistry(fake.url))]) -> None:
            got.append(struct)

        async with TestClient(app) as client:
            await client.publish("structs", framed(1, joined_indexes((0,))))
            await client.publish("structs", framed(1, joined_indexes((0, 0))))
            await client.settle()
            letters = client.records("structs.dlt")

    assert (len(got), len(letters)) == (1, 1)


async def test_a_schema_of_another_format_is_refused() -> None:
    async with FakeRegistry({1: "{}"}, schemaType="JSON") as fake:
        (headers,) = await letters_of(fake, framed(1, ENCODED))

    assert "JSON" in headers["aioshard.message"]


# A registry that does not answer --------------------------------------------------------


BROKEN: list[tuple[int, Any]] = [
    (500, {"error_code": 50001, "message": "out of order"}),
    (503, b"<html>no upstream</html>"),
    (429, {"error_code": 42901, "message": "slow down"}),
    (401, {"error_code": 40101, "message": "who are you"}),
    (403, b"forbidden"),
    (404, b"<html>there is no such page</html>"),
    (404, {"message": "HTTP 404 Not Found", "error_code": 404}),
    (201, b"not JSON"),
]


@pytest.mark.parametrize(("status", "body"), BROKEN, ids=[f"{n} {status}" for n, (status, _) in enumerate(BROKEN)])
async def test_records_wait_for_the_registry_and_use_no_attempt(status: int, body: Any) -> None:
    await check_waiting(status, body, None)


async def test_batches_wait_for_the_registry_and_use_no_attempt() -> None:
    await check_waiting(503, b"", Batch(linger=0.0))


async def check_waiting(status: int, body: Any, batch: Batch | None) -> None:
    """Check that a record whose schema the registry does not return waits, that this is explained, and that it ends."""
    app = App("billing")
    attempts: list[int] = []
    async with FakeRegistry({1: ORDER}) as fake:
        fake.status = status
        fake.body = body
        registry = SchemaRegistry(fake.url)
        options: dict[str, Any] = {"on_failure": DeadLetter("orders.dlt"), "retry": Retry(attempts=1)}
        if batch is None:

            @app.consume("orders", **options)
            async def on_order(order: Annotated[Model, Avro(registry)], context: Context) -> None:
                attempts.append(context.attempt * order.total)

        else:

            @app.consume("orders", **options, batch=batch)
            async def on_orders(orders: list[Annotated[Model, Avro(registry)]], context: Any) -> None:
                attempts.append(context.attempt * orders[0].total)

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED))
            await fake.requested(2)
            findings = [finding for finding in app.diagnose().findings if finding.kind == "schema registry"]
            trouble = app.statistics().trouble
            told = findings_of(app.statistics(), app.diagnose())
            heads = [partition.head for partition in app.diagnose().partitions if partition.head is not None]
            fake.status = 200
            await client.settle(timeout=10.0)
            recovered = app.statistics().trouble
            letters = client.records("orders.dlt")

    assert attempts == [7]
    assert not letters
    assert [fake.url in finding.sentence for finding in findings] == [True]
    assert fake.url in (trouble or "")
    assert any(fake.url in sentence for sentence in told)
    assert [fake.url in head.reason for head in heads] == [True]
    assert recovered is None


def test_a_record_that_waits_for_the_registry_is_explained(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("billing")
    done: list[Model] = []

    @app.consume("orders")
    async def on_order(order: Annotated[Model, Avro(registry)]) -> None:
        done.append(order)

    async def away(client: RegistryClient, _: object) -> object:
        raise client._fail("is away")

    async def test() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", VALUE, format=Avro(registry, schema=ORDER, auto_register=True))
            with monkeypatch.context() as patched:
                patched.setattr(RegistryClient, "request", away)
                await asyncio.sleep(0.1)  # virtual; the next try is 0.2 s after the first one
                (head,) = [partition.head for partition in app.diagnose().partitions if partition.head is not None]
                readable = app.explain()
            await client.settle()

        assert (head.state, head.attempt) == ("retrying", 1)
        assert f"the schema registry at {registry.address} is away" in head.reason
        assert "schema registry" in (head.what_to_do or "")
        assert readable.count("does not count as an attempt") == 1

    run(test())

    assert done == [Model(**VALUE)]


async def test_batches_stay_as_large_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    app = App("billing")
    runs: list[tuple[int, int]] = []
    async with FakeRegistry({1: ORDER}) as fake:
        fake.status = 503

        @app.consume("orders", batch=Batch(max_records=50), concurrency=1)
        async def on_orders(orders: list[Annotated[Model, Avro(SchemaRegistry(fake.url))]], context: Any) -> None:
            runs.append((context.attempt, len(orders)))

        async with TestClient(app) as client:
            for _ in range(50):
                await client.publish("orders", framed(1, ENCODED), partition=0)
            await fake.requested(3)
            fake.status = 200
            await client.settle(timeout=10.0)

    assert runs == [(1, 50)]
    events = {getattr(line, "event", "") for line in caplog.records}
    assert events >= {"postponed", "registry_unavailable", "registry_available"}
    assert "retry" not in events


async def test_a_registry_that_hangs_does_not_use_up_the_timeout_of_the_handler() -> None:
    app = App("billing")
    attempts: list[int] = []
    async with FakeRegistry({1: ORDER}) as fake:
        fake.held.clear()
        registry = SchemaRegistry(fake.url)

        @app.consume("orders", timeout=0.1, on_failure=DeadLetter("orders.dlt"), retry=Retry(attempts=1))
        async def on_order(order: Annotated[Model, Avro(registry)], context: Context) -> None:
            assert context.deadline is not None
            assert context.deadline > asyncio.get_running_loop().time()
            await asyncio.sleep(0.05)
            attempts.append(context.attempt * order.total)

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED))
            await fake.waiting.wait()
            await asyncio.sleep(0.5)  # five timeouts
            explained = app.explain()
            fake.held.set()
            await client.settle()
            letters = client.records("orders.dlt")

    assert attempts == [7]
    assert not letters
    assert fake.url in explained


async def test_a_request_has_a_timeout() -> None:
    async with FakeRegistry({1: ORDER}) as fake:
        fake.held.clear()
        app = App("billing")

        @app.consume("orders")
        async def on_order(order: Annotated[Model, Avro(SchemaRegistry(fake.url, timeout=0.05))]) -> None: ...

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED))
            await fake.requested(2)
            assert "within 0.05 s" in (app.statistics().trouble or "")
            fake.held.set()
            await client.settle(timeout=10.0)


async def test_a_schema_is_requested_once_for_all_records_that_wait_for_it() -> None:
    app = App("billing")
    got: list[Model] = []
    async with FakeRegistry({1: ORDER, 2: ORDER}) as fake:
        fake.held.clear()

        @app.consume("orders", shard_by="record")
        async def on_order(order: Annotated[Model, Avro(SchemaRegistry(fake.url))]) -> None:
            got.append(order)

        async with TestClient(app) as client:
            for _ in range(20):
                await client.publish("orders", framed(1, ENCODED))
            await fake.waiting.wait()
            fake.held.set()
            await client.settle()
            await client.publish("orders", framed(1, ENCODED))
            await client.settle()

    assert len(got) == 21
    assert fake.requests == {"/schemas/ids/1": 1}


async def test_other_records_run_while_one_waits_for_the_registry() -> None:
    app = App("billing")
    got: list[Model] = []
    known_done = asyncio.Event()
    async with FakeRegistry({1: ORDER, 2: ORDER}) as fake:

        @app.consume("orders", concurrency=2)
        async def on_order(order: Annotated[Model, Avro(SchemaRegistry(fake.url))]) -> None:
            got.append(order)
            if len(got) == 11:
                known_done.set()

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED), key="a", partition=0)
            await client.settle()
            fake.status = 503
            for key in range(10):
                await client.publish("orders", framed(2, ENCODED), key=f"new {key}", partition=0)
            for number in range(10):
                await client.publish("orders", framed(1, ENCODED), key=f"known {number}", partition=0)
            await known_done.wait()
            fake.status = 200
            await client.settle(timeout=20.0)

    assert len(got) == 21


async def test_a_partition_can_be_revoked_while_its_record_waits() -> None:
    app = App("billing", rebalance_timeout=30.0)
    got: list[Model] = []
    async with FakeRegistry({1: ORDER}) as fake:
        fake.held.clear()

        @app.consume("orders")
        async def on_order(order: Annotated[Model, Avro(SchemaRegistry(fake.url))]) -> None:
            got.append(order)

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED), partition=0)
            await client.publish("orders", framed(1, ENCODED), partition=1)
            await fake.waiting.wait()
            revoking = asyncio.ensure_future(client.revoke("orders", 0))  # perhaps of the record that requests it
            await asyncio.sleep(0)
            fake.held.set()
            await revoking
            await client.assign("orders", 0)
            await client.settle()

    assert len(got) >= 2


async def test_neither_logs_nor_explanations_contain_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with FakeRegistry({1: ORDER}) as fake:
        fake.status = 500
        app = App("billing")
        registry = SchemaRegistry(fake.url.replace("//", "//user:s%40cret@"))

        @app.consume("orders")
        async def on_order(order: Annotated[Model, Avro(registry)]) -> None: ...

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED))
            await fake.requested(2)
            told = [caplog.text, app.explain(), repr(registry), repr(app.handlers), str(app.statistics())]
            fake.status = 200
            await client.settle(timeout=10.0)

    assert fake.logins == {"Basic dXNlcjpzQGNyZXQ="}
    assert not [text for text in told if "cret" in text or "dXNlc" in text]


async def test_a_parked_key_waits_too() -> None:
    app = App("billing")
    tried: list[int] = []
    async with FakeRegistry({1: ORDER}) as fake:
        fake.status = 503
        registry = SchemaRegistry(fake.url)

        @app.consume("orders", on_failure=Park("orders.parked", delay=0.1), retry=Retry(attempts=1))
        async def on_order(order: Annotated[Model, Avro(registry)]) -> None:
            tried.append(order.total)

        async with TestClient(app) as client:
            await client.publish("orders", framed(1, ENCODED), key="a")
            await fake.requested(2)
            fake.status = 200
            await client.settle(timeout=10.0)
            assert not client.records("orders.parked")

    assert tried == [7]


# Publishing ----------------------------------------------------------------------------


def test_results_are_published_with_the_latest_schema(registry: SchemaRegistry) -> None:
    app = App("billing")

    @app.consume("orders", publish_to="copies")
    async def on_order(order: Annotated[Model, Avro(registry)]) -> Annotated[Model, Avro(registry)] | None:
        return None if order.total == 0 else order

    async def test() -> Sequence[Record]:
        async with TestClient(app) as client:
            written = Avro(registry, schema=ORDER, auto_register=True)
            await client.publish("copies", VALUE, format=written)
            for total in (7, 0):
                await client.publish("orders", {"item": "tea", "total": total}, key="a", format=written)
            await client.settle()
            return client.records("copies")[1:]

    (copy,) = run(test())

    assert (copy.key, copy.value) == (b"a", framed(1, ENCODED))


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_handlers_publish_in_a_format(registry: SchemaRegistry, guarantee: Any) -> None:
    app = App("billing", processing_guarantee=guarantee)

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        written = Avro(registry, schema=ORDER, auto_register=True)
        await context.publish("copies", Struct("tea", 7), key="a", format=written)
        await context.publish("copies", None, key="b", format=written)
        await app.publish("others", Dataclass("tea", 7), format=written)

    async def test() -> tuple[Sequence[Record], Sequence[Record]]:
        async with TestClient(app) as client:
            await client.publish("orders", b"")
            await client.settle()
            return client.records("copies"), client.records("others")

    copies, others = run(test())

    assert {(copy.key, copy.value) for copy in copies} == {(b"a", framed(1, ENCODED)), (b"b", None)}
    assert [other.value for other in others] == [framed(2, ENCODED)]


def test_messages_in_a_result_keep_their_own_values(registry: SchemaRegistry) -> None:
    app = App("billing")

    @app.consume("orders", publish_to="copies")
    async def on_order(
        _: Record,
    ) -> Annotated[list[Message], JsonSchema(registry, schema="{}", auto_register=True)]:
        return [Message("others", b"raw")]

    async def test() -> Sequence[Record]:
        async with TestClient(app) as client:
            await client.publish("orders", b"")
            await client.settle()
            return client.records("others")

    (other,) = run(test())

    assert other.value == b"raw"


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [
        ({}, VALUE, "error 404"),
        ({"schema": ORDER}, VALUE, "error 404"),
        ({"schema": ORDER, "auto_register": True}, {"item": "tea", "total": "secret"}, "total"),
        ({"schema": OPTIONAL, "auto_register": True}, {"item": "secret"}, "item: expected int"),
        ({"schema": "no schema", "auto_register": True}, VALUE, "not an Avro schema"),
    ],
    ids=["no subject", "not registered", "no match", "no match in a union", "no schema"],
)
def test_a_value_that_does_not_fit_is_refused_without_showing_it(
    registry: SchemaRegistry, form: dict[str, Any], value: Any, said: str
) -> None:
    app = App("billing")

    async def test() -> None:
        async with TestClient(app):
            await app.publish("copies", value, format=Avro(registry, **form))

    with pytest.raises(MessageError) as refused:
        run(test())

    assert said.lower() in str(refused.value).lower()
    assert "secret" not in str(refused.value)


async def test_a_handler_runs_once_although_the_schema_of_its_results_is_not_known_at_first() -> None:
    app = App("billing")
    ran: list[int] = []
    async with FakeRegistry() as fake:
        fake.status = 503
        registry = SchemaRegistry(fake.url)

        @app.consume("orders", publish_to="copies", retry=Retry(attempts=1), on_failure="skip")
        async def on_order(record: Record) -> Annotated[dict[str, int], JsonSchema(registry)]:
            ran.append(record.offset)
            return {"total": 7}

        async with TestClient(app) as client:
            await client.publish("orders", b"")
            await fake.requested(2)
            before = list(ran)
            fake.body = {"id": 5, "version": 1, "subject": "copies-value", "schemaType": "JSON", "schema": "{}"}
            fake.status = 299  # any other status than 200 sends the body
            await client.settle(timeout=10.0)
            (copy,) = client.records("copies")

    assert (before, ran) == ([], [0])
    assert copy.value == framed(5, b'{"total":7}')


async def test_publishing_outside_a_handler_raises_while_the_registry_does_not_answer() -> None:
    app = App("billing")
    async with TestClient(app):
        with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1"):
            await app.publish("copies", VALUE, format=JsonSchema(SchemaRegistry("http://127.0.0.1:1")))


async def test_clients_are_closed_with_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def close(client: RegistryClient) -> None:
        closed.append(client.address)
        await original(client)

    original = RegistryClient.close
    monkeypatch.setattr(RegistryClient, "close", close)
    app = App("billing")

    @app.consume("orders", publish_to="copies")
    async def on_order(
        order: Annotated[Model, Avro(SchemaRegistry("http://one"))],
    ) -> Annotated[Model, Avro(SchemaRegistry("http://one"))]:
        return order

    @app.consume("others")
    async def on_other(order: Annotated[Model, Avro(SchemaRegistry("http://two"))]) -> None: ...

    async with TestClient(app):
        assert closed == []

    assert sorted(closed) == ["http://one", "http://two"]


# Refused -------------------------------------------------------------------------------


def test_worker_processes_are_refused(registry: SchemaRegistry) -> None:
    app = App("billing")

    with pytest.raises(HandlerError, match="run_in='thread'"):

        @app.consume("orders", run_in="process")
        def on_order(order: Annotated[int, Avro(registry)]) -> None: ...


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[int, Avro],
        list[Annotated[int, Avro(SchemaRegistry("mock://one"))]],
        Annotated[int, Avro(SchemaRegistry("mock://one")), JsonSchema(SchemaRegistry("mock://one"))],
        Annotated[int, Protobuf(SchemaRegistry("mock://one"))],
        Annotated[Int64Value | StringValue, Protobuf(SchemaRegistry("mock://one"))],
        Annotated[None, Protobuf(SchemaRegistry("mock://one"))],
    ],
    ids=["class", "part", "two", "not generated", "two classes", "None"],
)
def test_annotations_that_cannot_work_are_refused(annotation: Any) -> None:
    app = App("billing")

    with pytest.raises(HandlerError):

        @app.consume("orders")
        async def on_order(order: annotation) -> None: ...


def test_an_option_that_the_client_does_not_know_is_refused_at_the_start() -> None:
    app = App("billing")

    @app.consume("orders")
    async def on_order(order: Annotated[int, Avro(SchemaRegistry("http://r:1", options={"colour": 1}))]) -> None: ...

    async def test() -> None:
        async with TestClient(app):
            pass

    with pytest.raises(HandlerError, match="colour"):
        run(test())
