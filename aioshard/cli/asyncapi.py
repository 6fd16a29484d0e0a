"""`aioshard asyncapi`: the topics and payloads of an app as an AsyncAPI document."""

import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.loading import load_app
from aioshard.cli.output import print_json
from aioshard.core.on_failure import DeadLetter
from aioshard.engine.handler import Handler
from aioshard.serde.payloads import raw_type, read_by_msgspec, shown

_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9._-]+")
"""Characters that are not allowed in a name in the components of a document."""


def unique(names: Iterable[str]) -> list[str]:
    """Return valid, distinct names: invalid characters are replaced, and repeated names get their position.

    Example:
        >>> unique(["on_order", "<lambda>", "on_order"])
        ['on_order', 'lambda', 'on_order-3']
    """
    plain = [_INVALID_CHARACTERS.sub("_", name).strip("_") or "handler" for name in names]
    return [name if name not in plain[:index] else f"{name}-{index + 1}" for index, name in enumerate(plain)]


def schema_of(annotation: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the schema of a type, and the schemas that it refers to, whose names begin with *name*."""
    reference = f"#/components/schemas/{name}."
    if read_by_msgspec(annotation):
        import msgspec  # noqa: PLC0415 - a struct needs it

        (schema,), definitions = msgspec.json.schema_components([annotation], ref_template=reference + "{name}")
    else:
        from pydantic import TypeAdapter  # noqa: PLC0415 - pydantic is imported on use

        schema = TypeAdapter(annotation).json_schema(ref_template=reference + "{model}")
        definitions = schema.pop("$defs", {})
    named = {f"{name}.{model}": _named_discriminators(definition) for model, definition in definitions.items()}
    return _named_discriminators(schema), named


def _named_discriminators(node: Any) -> Any:
    """Return the schemas with discriminators in the form of AsyncAPI: only the name of the property."""
    if isinstance(node, list):
        return [_named_discriminators(child) for child in node]
    if not isinstance(node, dict):
        return node
    result = {name: _named_discriminators(child) for name, child in node.items()}
    match result.get("discriminator"):
        case {"propertyName": str(name)}:
            result["discriminator"] = name
    return result


_VERSION = "3.0.0"
_BINDING = "0.5.0"


@click.command()
@options.target
@options.app_dir
@click.option("--title", metavar="TEXT", help="Title of the document.  [default: the group id]")
@click.option("--api-version", metavar="VERSION", default="0.1.0", show_default=True, help="Version of the document.")
def command(target: str, *, app_dir: str, title: str | None, api_version: str) -> None:
    """Print the topics and payloads of an app as an AsyncAPI document.

    AsyncAPI 3.0 in JSON: a channel for each topic, a receive operation for each handler, and the schema of its payload.
    """
    app = load_app(target, app_dir)
    app.check()
    print_json(document(app, title or app.group_id, api_version), indent=2)


def document(app: App, title: str, version: str) -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document of an app.

    The message of a type without a schema allows any payload and gives the reason.

    Args:
        app: The app, with its handlers.
        title: Title of the document.
        version: Version of the document.
    """
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    handlers = dict(zip(unique([handler.name for handler in app.handlers]), app.handlers, strict=True))
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for name, handler in handlers.items():
        messages[name], definitions = _message(handler, name)
        schemas |= definitions
        topics = [*handler.topics, *([] if handler.pattern is None else [handler.pattern])]
        for topic in topics:
            _add(channels, topic, name, is_pattern=topic == handler.pattern)
            operations[name if len(topics) == 1 else f"{name}-{topic}"] = _receive(app.group_id, handler, topic)
        if isinstance(handler.on_failure, DeadLetter):
            topic = handler.on_failure.topic
            _add(channels, topic, name, is_pattern=False)
            operations[f"{name}-dead-letter"] = {
                "action": "send",
                "channel": {"$ref": f"#/channels/{_escaped(topic)}"},
                "summary": f"Records that {handler.name} failed to process.",
            }
    content = {
        "asyncapi": _VERSION,
        "info": {"title": title, "version": version},
        "servers": _servers(app.settings.bootstrap_servers),
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }
    return {name: part for name, part in content.items() if part}


def _servers(bootstrap_servers: str | None) -> dict[str, Any]:
    hosts = [host.strip() for host in (bootstrap_servers or "").split(",") if host.strip()]
    return {f"kafka-{number}": {"host": host, "protocol": "kafka"} for number, host in enumerate(hosts, start=1)}


def _add(channels: dict[str, Any], topic: str, message: str, *, is_pattern: bool) -> None:
    """Add a message to a topic, which may have others, such as dead letters that another handler reads."""
    if is_pattern:
        channel: dict[str, Any] = {
            "address": None,
            "description": f"Every topic whose whole name matches {topic}",
            "messages": {},
        }
    else:
        channel = {
            "address": topic,
            "messages": {},
            "bindings": {"kafka": {"topic": topic, "bindingVersion": _BINDING}},
        }
    channels.setdefault(topic, channel)["messages"][message] = {"$ref": f"#/components/messages/{message}"}


def _receive(group_id: str, handler: Handler, topic: str) -> dict[str, Any]:
    function: Any = handler.function
    while isinstance(function, functools.partial):
        function = function.func
    description = inspect.getdoc(function)
    group = {"type": "string", "enum": [group_id]}
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{_escaped(topic)}"},
        **({"description": description} if description else {}),
        "bindings": {"kafka": {"groupId": group, "bindingVersion": _BINDING}},
    }


def _escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# Payloads -----------------------------------------------------------------------------


def _message(handler: Handler, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message of a handler, and the schemas that it refers to."""
    annotation = None if handler.payload is None else handler.payload.type
    raw = None if annotation is None else raw_type(annotation)
    if raw is str:
        return {"name": handler.name, "contentType": "text/plain", "payload": {"type": "string"}}, {}
    if annotation is None or raw is not None:
        return {"name": handler.name, "contentType": "application/octet-stream", "payload": {}}, {}
    message = {"name": handler.name, "contentType": "application/json", "payload": {}}
    try:
        message["payload"], definitions = schema_of(annotation, name)
    except Exception as error:  # noqa: BLE001 - both libraries and the user's own types may raise anything
        message["description"] = f"{shown(annotation)} has no JSON schema: {str(error).strip().splitlines()[0]}"
        return message, {}
    return message, definitions
