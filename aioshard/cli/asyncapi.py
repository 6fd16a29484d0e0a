"""`aioshard asyncapi`: what an app reads and writes, as an AsyncAPI document."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.loading import load_app_with_handlers
from aioshard.core.recourse import DeadLetter
from aioshard.handlers import Registration
from aioshard.serde.annotations import raw_type, read_by_msgspec, shown

__all__ = ["command", "document", "schemas_of", "unique"]

_REF = "#/components/schemas/{name}"
_REF_BESIDE = "#/components/schemas/{name}-struct"
_NO_NAME = re.compile(r"[^a-zA-Z0-9._-]+")
"""What a name in the components of a document may not have."""


def unique(names: Iterable[str]) -> list[str]:
    """The same names, with a number where one was there before, and without what may not be in one.

    Example:
        >>> unique(["on_order", "<lambda>", "on_order"])
        ['on_order', 'lambda', 'on_order-2']
    """
    found: list[str] = []
    for name in names:
        plain = _NO_NAME.sub("_", name).strip("_") or "handler"
        number, candidate = 1, plain
        while candidate in found:
            number += 1
            candidate = f"{plain}-{number}"
        found.append(candidate)
    return found


def schemas_of(types: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any] | str], dict[str, Any]]:
    """The schemas of types, and those that they refer to.

    Args:
        types: By any name; None has no schema.

    Returns:
        The schema by the same name, or a sentence that says why there is none; and the others by their own names. Types
        of the same name from several modules have names that differ.
    """
    wanted = {name: annotation for name, annotation in types.items() if annotation is not None}
    found: dict[str, dict[str, Any] | str] = {}
    structs: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, annotation in wanted.items():
        by_msgspec = read_by_msgspec(annotation)
        why = _why_none(annotation, _of_structs if by_msgspec else _of_others)
        if why is not None:
            found[name] = why
        else:
            (structs if by_msgspec else others)[name] = annotation
    mine, schemas = _of_others(others)
    theirs, more = _of_structs(structs)
    if schemas.keys() & more.keys():
        theirs, more = _of_structs(structs, _REF_BESIDE)
        more = {f"{name}-struct": schema for name, schema in more.items()}
    return found | _named_discriminators({**mine, **theirs}), _named_discriminators({**schemas, **more})


def _named_discriminators(node: Any) -> Any:
    """The same schemas with discriminators as AsyncAPI has them: the name of the property, and nothing beside it."""
    if isinstance(node, list):
        return [_named_discriminators(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: _named_discriminators(one) for name, one in node.items()}
    match found.get("discriminator"):
        case {"propertyName": str(name)}:
            found["discriminator"] = name
    return found


def _why_none(annotation: Any, schemas: Callable[[dict[str, Any]], object]) -> str | None:
    try:
        schemas({"it": annotation})
    except Exception as error:  # noqa: BLE001 - both libraries, and the user's own types, raise what they like
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return f"There is no JSON schema for {shown(annotation)}: {first}."
    return None


def _of_others(types: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if not types:
        return {}, {}
    from pydantic import TypeAdapter  # noqa: PLC0415 - pydantic is imported on use

    adapters = [(name, "validation", TypeAdapter(annotation)) for name, annotation in types.items()]
    found, rest = TypeAdapter.json_schemas(adapters, ref_template=_REF.replace("{name}", "{model}"))  # type: ignore[arg-type]
    return {name: schema for (name, _), schema in found.items()}, rest.get("$defs", {})


def _of_structs(types: dict[str, Any], template: str = _REF) -> tuple[dict[str, Any], dict[str, Any]]:
    if not types:
        return {}, {}
    import msgspec  # noqa: PLC0415 - a struct is there, so it is

    found, more = msgspec.json.schema_components(types.values(), ref_template=template)
    return dict(zip(types, found, strict=True)), more


_VERSION = "3.0.0"
_BINDING = "0.5.0"
_JSON = "application/json"
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

    A handler whose type no schema can be made for has one that allows everything, and says why in its message.

    Args:
        app: With its handlers.
        title: Of the document.
        version: Of the document.
    """
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    handlers = dict(zip(unique([handler.name for handler in app.handlers]), app.handlers, strict=True))
    payloads, schemas = schemas_of({name: _json_type(handler) for name, handler in handlers.items()})
    for name, handler in handlers.items():
        for topic, is_pattern in _channels(handler):
            _add(channels, topic, name, is_pattern=is_pattern)
            operations[_operation(name, handler, topic)] = _receive(app.group_id, handler, topic)
        if isinstance(handler.on_failure, DeadLetter):
            topic = handler.on_failure.topic
            _add(channels, topic, name, is_pattern=False)
            operations[f"{name}-dead-letter"] = {
                "action": "send",
                "channel": {"$ref": f"#/channels/{_escaped(topic)}"},
                "summary": f"Records that {handler.name} has failed for, as they were.",
            }
    messages = {name: _message(handler, payloads.get(name)) for name, handler in handlers.items()}
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


def _channels(handler: Registration) -> Iterator[tuple[str, bool]]:
    """What a handler reads from: names, and whether it is a pattern of them."""
    for topic in handler.topics:
        yield topic, False
    if handler.pattern is not None:
        yield handler.pattern, True


def _add(channels: dict[str, Any], topic: str, message: str, *, is_pattern: bool) -> None:
    """Note that a message is in a topic; others may be there already, as dead letters that another handler reads."""
    if is_pattern:
        found: dict[str, Any] = {
            "address": None,
            "description": f"Every topic whose whole name matches {topic}",
            "messages": {},
        }
    else:
        bindings = {"kafka": {"topic": topic, "bindingVersion": _BINDING}}
        found = {"address": topic, "messages": {}, "bindings": bindings}
    channels.setdefault(topic, found)["messages"][message] = {"$ref": f"#/components/messages/{message}"}


def _operation(name: str, handler: Registration, topic: str) -> str:
    alone = len(handler.topics) + (handler.pattern is not None) == 1
    return name if alone else f"{name}-{topic}"


def _receive(group_id: str, handler: Registration, topic: str) -> dict[str, Any]:
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
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# Payloads -----------------------------------------------------------------------------


def _json_type(handler: Registration) -> Any:
    """What the values of a handler are read as JSON for; None where they are not."""
    annotation = None if handler.payload is None else handler.payload.type
    return None if annotation is None or raw_type(annotation) is not None else annotation


def _message(handler: Registration, payload: dict[str, Any] | str | None) -> dict[str, Any]:
    """The message of a handler.

    Args:
        handler: That takes it.
        payload: The schema where it is JSON, or why there is none.
    """
    if isinstance(payload, str):
        return {"name": handler.name, "contentType": _JSON, "description": payload, "payload": {}}
    if payload is not None:
        return {"name": handler.name, "contentType": _JSON, "payload": payload}
    if handler.payload is not None and raw_type(handler.payload.type) is str:
        return {"name": handler.name, "contentType": "text/plain", "payload": {"type": "string"}}
    return {"name": handler.name, "contentType": _BYTES, "payload": {}}
