"""JSON schemas of the types that handlers take, under names that no two of them share."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aioshard.serde.annotations import read_by_msgspec, shown

__all__ = ["schemas_of", "unique"]

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
