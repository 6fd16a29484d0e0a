"""`aioshard asyncapi`: the AsyncAPI document of an app."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import pytest
from google.protobuf.wrappers_pb2 import Int64Value
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field
from pydantic_asyncapi.v3 import AsyncAPI

from aioshard import App, Batch, DeadLetter, Record, Router
from aioshard.asyncapi import document
from aioshard.ports import Message
from aioshard.schema_registry import Avro, JsonSchema, Protobuf, SchemaRegistry

MODULE = '''
from pydantic import BaseModel
from aioshard import App, DeadLetter

app = App("billing", bootstrap_servers="one:9092,two:9092")

class Item(BaseModel):
    name: str

class Order(BaseModel):
    """A purchased item."""
    items: list[Item]

@app.consume("orders", on_failure=DeadLetter("orders.dlt"))
async def on_order(order: Order) -> None:
    """Writes the invoice."""
'''


class Item(BaseModel):
    name: str


class Order(BaseModel):
    items: list[Item]


@dataclass
class Refund:
    total: int


class Click(msgspec.Struct):
    page: str


class View(msgspec.Struct, tag=True):
    page: str


class Leave(msgspec.Struct, tag=True):
    page: str


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]


class Lines(RootModel[list[Item]]): ...


class Titled(BaseModel):
    model_config = ConfigDict(title="Any title/~ at all")
    name: str


class Tree(BaseModel):
    children: "list[Tree]"


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Elsewhere:
    """Stands for a module in which types have the same names."""

    class Order(BaseModel):
        number: int

    class Item(msgspec.Struct):
        number: int


def described(handlers: Router) -> dict[str, Any]:
    app = App("billing", bootstrap_servers="localhost:9092")
    app.include_router(handlers)
    found = json.loads(json.dumps(document(app, "Billing", "1.2.3")))
    AsyncAPI.model_validate(without_bindings(found))
    resolve(found, found)
    for name in (*found["components"]["messages"], *found["components"].get("schemas", ())):
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)
    return dict(found)


def without_bindings(found: dict[str, Any]) -> dict[str, Any]:
    """Return a document without the bindings of Kafka messages, which the models of AsyncAPI lack."""
    found = json.loads(json.dumps(found))
    for message in found["components"]["messages"].values():
        message.pop("bindings", None)
    return found


def resolve(node: Any, root: dict[str, Any]) -> None:
    """Each reference leads somewhere."""
    if isinstance(node, dict):
        if "$ref" in node:
            target: Any = root
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part.replace("~1", "/").replace("~0", "~")]
        for child in node.values():
            resolve(child, root)
    elif isinstance(node, list):
        for child in node:
            resolve(child, root)


async def test_the_command_prints_a_document(
    aioshard: Callable[..., Awaitable[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_asyncapi.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    ended = await aioshard("asyncapi", "shop_asyncapi:app", "--title", "Shop", "--api-version", "2.0.0")

    assert ended.code == 0
    found = json.loads(ended.output)
    AsyncAPI.model_validate(without_bindings(found))
    resolve(found, found)
    assert found["asyncapi"] == "3.0.0"
    assert found["info"] == {"title": "Shop", "version": "2.0.0"}
    assert [server["host"] for server in found["servers"].values()] == ["one:9092", "two:9092"]
    assert found["operations"]["on_order"]["action"] == "receive"
    assert found["operations"]["on_order"]["description"] == "Writes the invoice."
    assert found["operations"]["on_order"]["bindings"]["kafka"]["groupId"]["enum"] == ["billing"]
    assert found["operations"]["on_order-dead-letter"]["channel"] == {"$ref": "#/channels/orders.dlt"}
    payload = found["components"]["messages"]["on_order"]["payload"]
    assert payload["description"] == "A purchased item."
    assert payload["properties"]["items"]["items"] == {"$ref": "#/components/schemas/on_order.Item"}
    assert set(found["components"]["schemas"]["on_order.Item"]["properties"]) == {"name"}


async def test_the_default_title_is_the_group(
    aioshard: Callable[..., Awaitable[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_untitled.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    ended = await aioshard("asyncapi", "shop_untitled:app")

    assert json.loads(ended.output)["info"] == {"title": "billing", "version": "0.1.0"}


async def test_an_app_without_handlers_is_refused(
    aioshard: Callable[..., Awaitable[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_asyncapi.py").write_text('from aioshard import App\napp = App("bare")\n')
    monkeypatch.chdir(tmp_path)

    ended = await aioshard("asyncapi", "bare_asyncapi:app")

    assert ended.code == 2
    assert "has no handlers" in ended.errors


def test_every_form_of_payload_has_its_message() -> None:
    handlers = Router()

    @handlers.consume("raw")
    async def on_raw(record: Record) -> None: ...

    @handlers.consume("text")
    async def on_text(text: str) -> None: ...

    @handlers.consume("refunds", batch=Batch())
    async def on_refunds(refunds: list[Refund]) -> None: ...

    @handlers.consume("clicks")
    async def on_click(click: Click | None) -> None: ...

    @handlers.consume("visits")
    async def on_visit(visit: View | Leave) -> None: ...

    @handlers.consume("avro", decode=lambda record: record.value)
    async def on_avro(order: Order) -> None: ...

    messages = described(handlers)["components"]["messages"]

    assert messages["on_raw"] == {"name": "on_raw", "contentType": "application/octet-stream", "payload": {}}
    assert messages["on_text"]["payload"] == {"type": "string"}
    assert set(messages["on_refunds"]["payload"]["properties"]) == {"total"}
    click = messages["on_click"]["payload"]["anyOf"]
    assert {"type": "null"} in click
    assert {"$ref": "#/components/schemas/on_click.Click"} in click
    assert len(messages["on_visit"]["payload"]["anyOf"]) == 2
    assert messages["on_avro"]["payload"] == {}


def test_several_topics_and_patterns_have_a_channel_each() -> None:
    handlers = Router()

    @handlers.consume("a", "b", pattern=r"c/.*", on_failure=DeadLetter("all.dlt"))
    async def handle(order: Order) -> None: ...

    @handlers.consume("d", on_failure=DeadLetter("all.dlt"))
    async def other(order: Order) -> None: ...

    found = described(handlers)

    assert list(found["channels"]) == ["a", "b", r"c/.*", "all.dlt", "d"]
    assert found["channels"][r"c/.*"]["address"] is None
    assert found["channels"]["all.dlt"]["address"] == "all.dlt"
    assert set(found["channels"]["all.dlt"]["messages"]) == {"handle", "other"}
    assert list(found["operations"]) == [
        "handle-a",
        "handle-b",
        r"handle-c/.*",
        "handle-dead-letter",
        "other",
        "other-dead-letter",
    ]


def properties(found: dict[str, Any], handler: str) -> set[str]:
    """The fields of the payload of a handler."""
    payload = found["components"]["messages"][handler]["payload"]
    if "$ref" in payload:
        payload = found["components"]["schemas"][payload["$ref"].removeprefix("#/components/schemas/")]
    return set(payload["properties"])


async def takes_order(order: Order) -> None:
    """Of one module."""


async def takes_another(order: Elsewhere.Order) -> None: ...


async def takes_struct(item: Elsewhere.Item) -> None: ...


async def takes_titled(titled: Titled) -> None: ...


async def takes_page(page: Page[Item]) -> None: ...


async def takes_lines(lines: Lines) -> None: ...


async def takes_tree(tree: Tree) -> None: ...


async def takes_pet(pet: Annotated[Cat | Dog, Field(discriminator="kind")]) -> None: ...


async def takes_visits(visits: dict[str, View | Leave]) -> None: ...


def test_a_discriminator_is_a_property_name() -> None:
    """Unlike in OpenAPI, whose form both libraries give."""
    handlers = Router()
    handlers.consume("pets")(takes_pet)
    handlers.consume("visits")(takes_visits)

    messages = described(handlers)["components"]["messages"]

    assert messages["takes_pet"]["payload"]["discriminator"] == "kind"
    assert len(messages["takes_pet"]["payload"]["oneOf"]) == 2
    assert messages["takes_visits"]["payload"]["additionalProperties"]["discriminator"] == "type"


def test_types_of_the_same_name_stay_apart() -> None:
    handlers = Router()
    for handler in (takes_order, takes_another, takes_struct, takes_titled, takes_page, takes_lines, takes_tree):
        handlers.consume(handler.__name__)(handler)

    found = described(handlers)

    assert properties(found, "takes_order") == {"items"}
    assert properties(found, "takes_another") == {"number"}
    assert properties(found, "takes_struct") == {"number"}
    assert properties(found, "takes_titled") == {"name"}
    assert properties(found, "takes_page") == {"items"}
    assert properties(found, "takes_tree") == {"children"}
    lines = found["components"]["messages"]["takes_lines"]["payload"]
    assert lines["items"] == {"$ref": "#/components/schemas/takes_lines.Item"}


def test_handlers_get_unique_operation_names() -> None:
    handlers = Router()
    handlers.consume("a")(takes_order)
    handlers.consume("b")(partial(takes_order))
    handlers.consume("c")(lambda _: None)

    found = described(handlers)

    assert list(found["operations"]) == ["takes_order", "takes_order-2", "lambda"]
    assert list(found["components"]["messages"]) == ["takes_order", "takes_order-2", "lambda"]
    assert [*found["channels"]["b"]["messages"]] == ["takes_order-2"]
    assert {found["operations"][name]["description"] for name in ("takes_order", "takes_order-2")} == {"Of one module."}


@pytest.mark.parametrize("order", [1, -1], ids=["written first", "read first"])
def test_dead_letters_read_by_a_handler_share_its_channel(order: int) -> None:
    handlers = Router()

    async def writes(order: Order) -> None: ...

    async def reads(record: Record) -> None: ...

    registrations: list[tuple[Any, Any]] = [
        (handlers.consume("orders", on_failure=DeadLetter("orders.dlt")), writes),
        (handlers.consume("orders.dlt"), reads),
    ]
    for register, handler in registrations[::order]:
        register(handler)

    found = described(handlers)

    assert set(found["channels"]["orders.dlt"]["messages"]) == {"writes", "reads"}
    actions = {
        name: (operation["action"], operation["channel"]["$ref"]) for name, operation in found["operations"].items()
    }
    assert actions == {
        "writes": ("receive", "#/channels/orders"),
        "writes-dead-letter": ("send", "#/channels/orders.dlt"),
        "reads": ("receive", "#/channels/orders.dlt"),
    }


def test_bytes_and_text_are_not_json_even_with_tombstones() -> None:
    handlers = Router()

    @handlers.consume("raw")
    async def on_raw(value: bytes | None) -> None: ...

    @handlers.consume("text")
    async def on_text(value: str | None) -> None: ...

    messages = described(handlers)["components"]["messages"]

    assert messages["on_raw"]["contentType"] == "application/octet-stream"
    assert messages["on_text"] == {"name": "on_text", "contentType": "text/plain", "payload": {"type": "string"}}


def test_a_type_without_a_schema_says_why_and_keeps_the_others() -> None:
    handlers = Router()

    @handlers.consume("unknown")
    async def on_unknown(unknown: dict[str, Callable[[], int]]) -> None: ...

    handlers.consume("orders")(takes_order)

    found = described(handlers)

    assert found["components"]["messages"]["on_unknown"]["payload"] == {}
    assert found["components"]["messages"]["on_unknown"]["description"].startswith(
        "dict[str, Callable[[], int]] has no JSON schema: "
    )
    assert properties(found, "takes_order") == {"items"}


def test_patterns_are_escaped_in_references() -> None:
    handlers = Router()

    @handlers.consume(pattern="a~/.*")
    async def on_any(record: Record) -> None: ...

    found = described(handlers)

    assert found["operations"]["on_any"]["channel"] == {"$ref": "#/channels/a~0~1.*"}


def test_an_app_without_servers_lists_none() -> None:
    app = App("billing")
    app.consume("orders")(takes_order)

    assert "servers" not in document(app, "Billing", "1")


def outputs_of(*functions: Callable[..., Any]) -> dict[str, Any]:
    """The messages of handlers that publish what they return to topic `<name>s`."""
    handlers = Router()
    for function in functions:
        handlers.consume(function.__name__, publish_to=f"{function.__name__}s")(function)
    found = described(handlers)
    for function in functions:
        name = f"{function.__name__}-output"
        channel = found["channels"][f"{function.__name__}s"]
        assert channel["messages"] == {name: {"$ref": f"#/components/messages/{name}"}}
        assert found["operations"][name]["action"] == "send"
    return {function.__name__: found["components"]["messages"][f"{function.__name__}-output"] for function in functions}


def test_what_a_handler_publishes_is_an_output() -> None:
    async def model(_: Record) -> Order: ...  # type: ignore[empty-body]
    async def optional(_: Record) -> Refund | None: ...
    async def text(_: Record) -> str: ...  # type: ignore[empty-body]
    async def several(_: Record) -> list[Message]: ...  # type: ignore[empty-body]
    async def either(_: Record) -> Item | Refund: ...  # type: ignore[empty-body]
    async def unknown(_: Record): ...  # type: ignore[no-untyped-def]  # noqa: ANN202

    found = outputs_of(model, optional, text, several, either, unknown)

    assert found["model"]["payload"]["properties"].keys() == {"items"}
    assert found["optional"]["payload"]["properties"].keys() == {"total"}
    assert found["text"]["contentType"] == "text/plain"
    assert found["several"]["payload"] == {}
    assert len(found["either"]["payload"]["anyOf"]) == 2
    assert found["unknown"]["payload"] == {}


def test_an_output_has_the_schema_of_what_is_written() -> None:
    class Rounded(BaseModel):
        cents: int

        @computed_field
        def euros(self) -> float:
            return self.cents / 100

    async def total(_: Record) -> "Rounded": ...  # type: ignore[empty-body]

    total.__annotations__["return"] = Rounded

    assert outputs_of(total)["total"]["payload"]["properties"].keys() == {"cents", "euros"}


def test_messages_name_their_format_and_subject() -> None:
    registry = SchemaRegistry("https://key:secret@registry:8081")
    avro = {"type": "record", "name": "Item", "fields": [{"name": "name", "type": "string"}]}

    handlers = Router()

    @handlers.consume("items", "goods")
    async def on_item(_: Annotated[Item, Avro(registry)]) -> None: ...

    @handlers.consume("written", publish_to="copies")
    async def on_written(
        _: Annotated[Item, Avro(registry, schema=json.dumps(avro), subject="shop.Item")],
    ) -> Annotated[Item, JsonSchema(registry)] | None: ...

    @handlers.consume(pattern="numbers-.*")
    async def on_number(_: Annotated[Int64Value, Protobuf(registry)]) -> None: ...

    found = described(handlers)["components"]["messages"]

    assert found["on_item"]["contentType"] == "avro/binary"
    assert found["on_item"]["x-schema-registry"] == {
        "url": "https://registry:8081",
        "type": "AVRO",
        "subjects": ["items-value", "goods-value"],
    }
    assert found["on_item"]["payload"]["properties"].keys() == {"name"}
    assert found["on_written"]["payload"]["schema"] == avro
    assert found["on_written"]["x-schema-registry"]["subjects"] == ["shop.Item"]
    assert "schemaLookupStrategy" not in found["on_written"]["bindings"]["kafka"]
    assert found["on_written-output"]["contentType"] == "application/json"
    assert found["on_written-output"]["x-schema-registry"]["subjects"] == ["copies-value"]
    assert found["on_number"]["payload"] == {}
    assert found["on_number"]["bindings"]["kafka"]["schemaLookupStrategy"] == "TopicNameStrategy"
    assert "secret" not in json.dumps(found)
