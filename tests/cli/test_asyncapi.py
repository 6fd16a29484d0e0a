"""`aioshard asyncapi`: the document that an app is, as others read it."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from pydantic_asyncapi.v3 import AsyncAPI

from aioshard import App, Batch, DeadLetter, Handlers, Record
from aioshard.cli.asyncapi import document

MODULE = '''
from pydantic import BaseModel
from aioshard import App, DeadLetter

app = App("billing", bootstrap_servers="one:9092,two:9092")

class Item(BaseModel):
    name: str

class Order(BaseModel):
    """What somebody has bought."""
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


def described(handlers: Handlers) -> dict[str, Any]:
    app = App("billing", bootstrap_servers="localhost:9092")
    app.include(handlers)
    found = json.loads(json.dumps(document(app, "Billing", "1.2.3")))
    AsyncAPI.model_validate(found)
    resolve(found, found)
    return dict(found)


def resolve(node: Any, root: dict[str, Any]) -> None:
    """Each reference leads somewhere."""
    if isinstance(node, dict):
        if "$ref" in node:
            place: Any = root
            for part in node["$ref"].removeprefix("#/").split("/"):
                place = place[part.replace("~1", "/").replace("~0", "~")]
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
    AsyncAPI.model_validate(found)
    resolve(found, found)
    assert found["asyncapi"] == "3.0.0"
    assert found["info"] == {"title": "Shop", "version": "2.0.0"}
    assert [server["host"] for server in found["servers"].values()] == ["one:9092", "two:9092"]
    assert found["operations"]["on_order"]["action"] == "receive"
    assert found["operations"]["on_order"]["description"] == "Writes the invoice."
    assert found["operations"]["on_order"]["bindings"]["kafka"]["groupId"]["enum"] == ["billing"]
    assert found["operations"]["on_order-dead-letter"]["channel"] == {"$ref": "#/channels/orders.dlt"}
    assert found["components"]["messages"]["on_order"]["payload"] == {"$ref": "#/components/schemas/Order"}
    assert found["components"]["schemas"]["Order"]["properties"]["items"]["items"] == {
        "$ref": "#/components/schemas/Item"
    }


async def test_an_app_without_handlers_is_refused(
    aioshard: Callable[..., Awaitable[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_asyncapi.py").write_text('from aioshard import App\napp = App("bare")\n')
    monkeypatch.chdir(tmp_path)

    ended = await aioshard("asyncapi", "bare_asyncapi:app")

    assert ended.code == 2
    assert "has no handlers" in ended.errors


def test_every_form_of_payload_has_its_message() -> None:
    handlers = Handlers()

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
    assert messages["on_refunds"]["payload"] == {"$ref": "#/components/schemas/Refund"}
    click = messages["on_click"]["payload"]["anyOf"]
    assert {"type": "null"} in click
    assert {"$ref": "#/components/schemas/Click"} in click
    assert len(messages["on_visit"]["payload"]["anyOf"]) == 2
    assert messages["on_avro"]["payload"] == {}


def test_several_topics_and_patterns_have_a_channel_each() -> None:
    handlers = Handlers()

    @handlers.consume("a", "b", pattern=r"c/.*", on_failure=DeadLetter("all.dlt"))
    async def handle(order: Order) -> None: ...

    @handlers.consume("d", on_failure=DeadLetter("all.dlt"))
    async def other(order: Order) -> None: ...

    found = described(handlers)

    assert list(found["channels"]) == ["a", "b", r"c/.*", "all.dlt", "d"]
    assert found["channels"][r"c/.*"]["address"] is None
    assert set(found["channels"]["all.dlt"]["messages"]) == {"handle", "other"}
    assert list(found["operations"]) == [
        "handle-a",
        "handle-b",
        r"handle-c/.*",
        "handle-dead-letter",
        "other",
        "other-dead-letter",
    ]
