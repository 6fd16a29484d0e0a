"""`aioshard asyncapi`: what an app reads and writes, as an AsyncAPI document."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.loading import load_app_with_handlers
from aioshard.core.recourse import DeadLetter
from aioshard.handlers import Registration
from aioshard.serde.payloads import read_by_msgspec

__all__ = ["command", "document"]

_VERSION = "3.0.0"
_BINDING = "0.5.0"
_SCHEMAS = "#/components/schemas/"
_BYTES = "application/octet-stream"


@click.command()
@options.target
@options.app_dir
@click.option("--title", metavar="TEXT", help="Title of the document.  [default: the group id]")
@click.option("--api-version", metavar="VERSION", default="0.1.0", show_default=True, help="Version of the document.")
def command(target: str, *, app_dir: str, title: str | None, api_version: str) -> None:
    """Print what an app reads and writes as an AsyncAPI document.

    AsyncAPI 3.0 in JSON: a channel for each topic, a receive operation for each handler, and the schema of its payload.
    """
    app = load_app_with_handlers(target, app_dir)
    click.echo(json.dumps(document(app, title or app.group_id, api_version), indent=2))


def document(app: App, title: str, version: str) -> dict[str, Any]:
    """What an app reads and writes, in the form of AsyncAPI 3.0.

    Args:
        app: With its handlers.
        title: Of the document.
        version: Of the document.
    """
    schemas: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for handler in app.handlers:
        messages[handler.name] = _message(handler, schemas)
        for topic in _channels(handler):
            channels[topic] = _channel(topic, handler.name, is_pattern=topic == handler.pattern)
            operations[_name(handler, topic)] = _receive(app.group_id, handler, topic)
        if isinstance(handler.on_failure, DeadLetter):
            topic = handler.on_failure.topic
            channels.setdefault(topic, _channel(topic, is_pattern=False))["messages"][handler.name] = _ref(handler.name)
            operations[f"{handler.name}-dead-letter"] = {
                "action": "send",
                "channel": {"$ref": f"#/channels/{_escaped(topic)}"},
                "summary": f"Records that {handler.name} has failed for, as they were.",
            }
    found = {
        "asyncapi": _VERSION,
        "info": {"title": title, "version": version},
        "servers": _servers(app.settings.bootstrap_servers),
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }
    return {name: part for name, part in found.items() if part}


def _servers(bootstrap_servers: str | None) -> dict[str, Any]:
    hosts = [host.strip() for host in (bootstrap_servers or "").split(",") if host.strip()]
    return {f"kafka-{number}": {"host": host, "protocol": "kafka"} for number, host in enumerate(hosts, start=1)}


def _channels(handler: Registration) -> Iterator[str]:
    yield from handler.topics
    if handler.pattern is not None:
        yield handler.pattern


def _channel(topic: str, message: str | None = None, *, is_pattern: bool) -> dict[str, Any]:
    messages = {} if message is None else {message: _ref(message)}
    if is_pattern:
        return {"address": None, "description": f"Every topic whose whole name matches {topic}", "messages": messages}
    bindings = {"kafka": {"topic": topic, "bindingVersion": _BINDING}}
    return {"address": topic, "messages": messages, "bindings": bindings}


def _name(handler: Registration, topic: str) -> str:
    alone = len(handler.topics) + (handler.pattern is not None) == 1
    return handler.name if alone else f"{handler.name}-{topic}"


def _receive(group_id: str, handler: Registration, topic: str) -> dict[str, Any]:
    description = inspect.getdoc(handler.function)
    group = {"type": "string", "enum": [group_id]}
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{_escaped(topic)}"},
        **({"description": description} if description else {}),
        "bindings": {"kafka": {"groupId": group, "bindingVersion": _BINDING}},
    }


def _ref(message: str) -> dict[str, str]:
    return {"$ref": f"#/components/messages/{message}"}


def _escaped(name: str) -> str:
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# Payloads -----------------------------------------------------------------------------


def _message(handler: Registration, schemas: dict[str, Any]) -> dict[str, Any]:
    """The message of a handler; the schemas that it needs go into *schemas*."""
    payload = None if handler.payload is None else handler.payload.type
    if payload is None or payload is bytes:
        return {"name": handler.name, "contentType": _BYTES, "payload": {}}
    if payload is str:
        return {"name": handler.name, "contentType": "text/plain", "payload": {"type": "string"}}
    return {"name": handler.name, "contentType": "application/json", "payload": _schema(payload, schemas)}


def _schema(annotation: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if read_by_msgspec(annotation):
        import msgspec  # noqa: PLC0415 - a struct is there, so it is

        (found,), more = msgspec.json.schema_components([annotation], ref_template=_SCHEMAS + "{name}")
        schemas.update(more)
        return found
    from pydantic import TypeAdapter  # noqa: PLC0415 - pydantic is imported on use

    schema = TypeAdapter(annotation).json_schema(ref_template=_SCHEMAS + "{model}")
    schemas.update(schema.pop("$defs", {}))
    title = schema.get("title")
    if schema.get("type") == "object" and title and title not in schemas:
        schemas[title] = schema
        return {"$ref": _SCHEMAS + title}
    return schema
