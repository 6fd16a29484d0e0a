"""The messages of a Protobuf schema, as a registry returns it: a text, or the descriptor of a file in base64."""

import base64
import binascii
import re
from typing import Any

_TOKEN = re.compile(
    r"""
    (?P<skipped> //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )
    | \bpackage\s+(?P<package>[\w.]+)\s*;
    | \bmessage\s+(?P<message>\w+)\s*\{
    | (?P<begin>\{)
    | (?P<end>\})
    """,
    re.DOTALL | re.VERBOSE,
)


def message_names(schema: str) -> list[str]:
    """Return the full names of the messages that are not nested, in order.

    Example:
        >>> message_names('package shop; message Order { message Item {} } /* message No {} */ message Paid {}')
        ['shop.Order', 'shop.Paid']
    """
    described = _descriptor_of(schema)
    if described is not None:
        package = f"{described.package}." if described.package else ""
        return [f"{package}{message.name}" for message in described.message_type]
    package = ""
    names = []
    depth = 0
    for token in _TOKEN.finditer(schema):
        kind = token.lastgroup
        if kind == "package":
            package = f"{token['package']}."
        elif kind == "message":
            if depth == 0:
                names.append(token["message"])
            depth += 1
        elif kind == "begin":
            depth += 1
        elif kind == "end":
            depth -= 1
    return [f"{package}{name}" for name in names]


def _descriptor_of(schema: str) -> Any:
    """Decode the descriptor of a file; None if the schema is a text."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto  # noqa: PLC0415 - imported on use
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    try:
        return FileDescriptorProto.FromString(base64.b64decode(schema, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None


def position_of(descriptor: Any) -> tuple[str, tuple[int, ...]]:
    """Return the full name of the outermost message around one, and the positions of the nested ones below it."""
    nested: list[int] = []
    while descriptor.containing_type is not None:
        nested.insert(0, descriptor.containing_type.nested_types.index(descriptor))
        descriptor = descriptor.containing_type
    return descriptor.full_name, tuple(nested)


def schema_of(descriptor: Any) -> str:
    """Return the schema of the file that defines a message, in the form that registries accept: its descriptor."""
    return base64.b64encode(descriptor.file.serialized_pb).decode()


def imports_of(descriptor: Any) -> list[str]:
    """Return the files that the file of a message imports, without those of Protobuf itself, which registries know."""
    names = [imported.name for imported in descriptor.file.dependencies]
    return [name for name in names if not name.startswith("google/protobuf/")]
