"""The inputs and outputs of an app as an AsyncAPI document."""

import functools
import inspect
import json
import re
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args

from aioshard.app import App
from aioshard.core.options import DeadLetter
from aioshard.engine.handler import Handler
from aioshard.functions import result_type
from aioshard.ports import Message
from aioshard.schema_registry.formats import RegistryFormat
from aioshard.serde.payloads import alternatives, raw_type, read_by_msgspec, shown

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


def schema_of(
    annotation: Any, name: str, *, mode: Literal["validation", "serialization"] = "validation"
) -> tuple[Any, dict[str, Any]]:
    """Return the schema of a type, and the schemas that it refers to, whose names begin with *name*.

    Args:
        annotation: The type.
        name: Distinguishes the schemas from those of other messages.
        mode: Whether values are read or written.
    """
    reference = f"#/components/schemas/{name}."
    if read_by_msgspec(annotation):
        import msgspec  # noqa: PLC0415 - a struct needs it

        (schema,), definitions = msgspec.json.schema_components([annotation], ref_template=reference + "{name}")
    else:
        from pydantic import TypeAdapter  # noqa: PLC0415 - pydantic is imported on use

        schema = TypeAdapter(annotation).json_schema(ref_template=reference + "{model}", mode=mode)
        definitions = schema.pop("$defs", {})
    return schema, {f"{name}.{model}": definition for model, definition in definitions.items()}


def _with_named_discriminator(node: dict[str, Any]) -> dict[str, Any]:
    """Return an object with its discriminator in the form of AsyncAPI: only the name of the property."""
    match node:
        case {"discriminator": {"propertyName": str(name)}}:
            return {**node, "discriminator": name}
    return node


_BINDING = "0.5.0"
_AVRO = "application/vnd.apache.avro+json;version=1.9.0"


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
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for name, handler in zip(unique(handler.name for handler in app.handlers), app.handlers, strict=True):
        messages[name], definitions = _message(handler, name)
        schemas |= definitions
        topics = [*handler.topics, *([] if handler.pattern is None else [handler.pattern])]
        for topic in topics:
            _add(channels, topic, name, is_pattern=topic == handler.pattern)
            operations[name if len(topics) == 1 else f"{name}-{topic}"] = _receive(app.group_id, handler, topic)
        if handler.publish_to is not None:
            output = f"{name}-output"
            messages[output], definitions = _output(handler, output)
            schemas |= definitions
            _add(channels, handler.publish_to, output, is_pattern=False)
            operations[output] = _send(handler.publish_to, f"Results of {handler.name}.")
        if isinstance(handler.on_failure, DeadLetter):
            topic = handler.on_failure.topic
            _add(channels, topic, name, is_pattern=False)
            operations[f"{name}-dead-letter"] = _send(topic, f"Records that {handler.name} failed to process.")
    hosts = [host.strip() for host in (app.settings.bootstrap_servers or "").split(",") if host.strip()]
    content = {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "servers": {
            f"kafka-{number}": {"host": host, "protocol": "kafka"} for number, host in enumerate(hosts, start=1)
        },
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }
    content = json.loads(json.dumps(content), object_hook=_with_named_discriminator)
    return {name: part for name, part in content.items() if part}


def _add(channels: dict[str, Any], topic: str, message: str, *, is_pattern: bool) -> None:
    """Add a message to a topic, which may have others, such as dead letters that another handler reads."""
    channel: dict[str, Any]
    if is_pattern:
        channel = {"address": None, "description": f"Every topic whose whole name matches {topic}", "messages": {}}
    else:
        binding = {"kafka": {"topic": topic, "bindingVersion": _BINDING}}
        channel = {"address": topic, "messages": {}, "bindings": binding}
    channels.setdefault(topic, channel)["messages"][message] = {"$ref": f"#/components/messages/{message}"}


def _receive(group_id: str, handler: Handler, topic: str) -> dict[str, Any]:
    function = handler.function
    description = inspect.getdoc(function.func if isinstance(function, functools.partial) else function)
    return {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{_escaped(topic)}"},
        **({"description": description} if description else {}),
        "bindings": {"kafka": {"groupId": {"type": "string", "enum": [group_id]}, "bindingVersion": _BINDING}},
    }


def _send(topic: str, summary: str) -> dict[str, Any]:
    return {"action": "send", "channel": {"$ref": f"#/channels/{_escaped(topic)}"}, "summary": summary}


def _escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# Payloads -----------------------------------------------------------------------------


def _message(handler: Handler, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message of a handler, and the schemas that it refers to."""
    annotation = None if handler.payload is None else handler.payload.type
    if handler.taken is None:
        return _message_of(annotation, handler.name, name, mode="validation")
    topics = [*handler.topics, *([] if handler.pattern is None else ["TOPIC"])]
    return _registered(handler.taken.format, topics, _message_of(annotation, handler.name, name, mode="validation"))


def _output(handler: Handler, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message that a handler publishes as its result, and the schemas that it refers to."""
    results = [kind for kind in alternatives(result_type(handler.function)) if kind is not types.NoneType]
    # Several `Message`s, or none of a known type: each has a value of its own.
    annotation = Union[tuple(results)] if results else Any  # noqa: UP007 - the types are known only now
    if annotation is Any or _makes_messages(annotation):
        return {"name": f"result of {handler.name}", "payload": {}}, {}
    message = _message_of(annotation, f"result of {handler.name}", name, mode="serialization")
    if handler.output is None or handler.publish_to is None:
        return message
    return _registered(handler.output.format, [handler.publish_to], message)


def _registered(
    form: RegistryFormat, topics: Iterable[str], described: tuple[dict[str, Any], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a message whose values have schemas in a registry, and the schemas that it refers to.

    Args:
        form: The format of its values.
        topics: The topics that it is in.
        described: The message and the schemas of the type that its values are converted to.
    """
    message, definitions = described
    subjects = list(dict.fromkeys(form.subject_of(topic) for topic in topics))
    binding = {
        "schemaIdLocation": "payload",
        "schemaIdPayloadEncoding": "confluent",
        "schemaLookupStrategy": "TopicNameStrategy",
        "bindingVersion": _BINDING,
    }
    if form.subject is not None:
        del binding["schemaLookupStrategy"]
    named = "subject" if len(subjects) == 1 else "subjects"
    message |= {
        "contentType": form.content_type,
        "description": f"{form.title}: {named} {', '.join(subjects)} of the schema registry at {form.registry.address}",
        "bindings": {"kafka": binding},
        "x-schema-registry": {"url": form.registry.address, "type": form.type, "subjects": subjects},
    }
    if form.type == "PROTOBUF":
        message["payload"] = {}
    elif form.type == "AVRO" and form.schema is not None:
        message["payload"] = {"schemaFormat": _AVRO, "schema": json.loads(form.schema)}
        definitions = {}
    return message, definitions


def _makes_messages(annotation: Any) -> bool:
    """Return whether a result is a `Message`, or a list of them."""
    return annotation is Message or Message in get_args(annotation)


def _message_of(
    annotation: Any, title: str, name: str, *, mode: Literal["validation", "serialization"]
) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = None if annotation is None else raw_type(annotation)
    if raw is str:
        return {"name": title, "contentType": "text/plain", "payload": {"type": "string"}}, {}
    if annotation is None or raw is not None:
        return {"name": title, "contentType": "application/octet-stream", "payload": {}}, {}
    message = {"name": title, "contentType": "application/json", "payload": {}}
    try:
        message["payload"], definitions = schema_of(annotation, name, mode=mode)
    except Exception as error:  # noqa: BLE001 - both libraries and the user's own types may raise anything
        message["description"] = f"{shown(annotation)} has no JSON schema: {str(error).strip().splitlines()[0]}"
        return message, {}
    return message, definitions
