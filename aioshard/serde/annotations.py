"""Interpret the annotations of handlers that say how a value is decoded."""

import typing
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any

__all__ = ["alternatives", "is_constrained", "raw_type", "read_by_msgspec", "shown"]


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, with unions, `Annotated`, aliases and `NewType` resolved.

    Example:
        >>> alternatives(typing.Annotated[int, "a number"] | None)
        [<class 'int'>, <class 'NoneType'>]
    """
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return [found for one in typing.get_args(annotation) for found in alternatives(one)]
    if _is_alias(origin or annotation):
        return alternatives((origin or annotation).__value__)
    if isinstance(annotation, typing.NewType):
        return alternatives(annotation.__supertype__)
    return [NoneType if annotation is None else annotation]


def raw_type(annotation: Any) -> Any:
    """Return the one of `bytes`, `bytearray`, `memoryview` and `str` that is annotated; None if JSON is decoded.

    Example:
        >>> raw_type(str | None), raw_type(str | int)
        (<class 'str'>, None)
    """
    wanted = [one for one in alternatives(annotation) if one is not NoneType]
    return wanted[0] if len(wanted) == 1 and wanted[0] in (bytes, bytearray, memoryview, str) else None


def is_constrained(annotation: Any) -> bool:
    """Whether the annotation adds a constraint to a type, such as the maximum length of a text."""
    if _is_alias(annotation):
        return is_constrained(annotation.__value__)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, UnionType):
        return any(map(is_constrained, typing.get_args(annotation)))
    return origin is typing.Annotated


def read_by_msgspec(annotation: Any) -> bool:
    """Whether msgspec decodes this type: the annotation contains a msgspec struct or constraint."""
    return any(
        hasattr(one, "__struct_fields__") or (type(one).__module__, type(one).__name__) == ("msgspec", "Meta")
        for one in _mentioned(annotation, frozenset())
    )


def shown(annotation: Any) -> str:
    """Format a type as users write it.

    Example:
        >>> shown(dict[str, typing.Optional[int]])
        'dict[str, int | None]'
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, NoneType):
        return "None"
    if origin is typing.Annotated:
        return shown(arguments[0])
    if origin in (typing.Union, UnionType):
        return " | ".join(map(shown, arguments))
    if origin is None:
        return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")
    if origin in (typing.Literal, Callable) or not arguments:
        return str(annotation).replace("typing.", "").replace("collections.abc.", "")
    return f"{shown(origin)}[{', '.join('...' if one is ... else shown(one) for one in arguments)}]"


def _is_alias(annotation: Any) -> bool:
    """Whether it was defined by `type X = …`, or by the backport for older Pythons."""
    return type(annotation).__name__ == "TypeAliasType"


def _mentioned(annotation: Any, seen: frozenset[int]) -> Iterator[Any]:
    """Iterate over the classes that an annotation mentions, at any depth."""
    if id(annotation) in seen:
        return  # an alias may be recursive
    seen |= {id(annotation)}
    if _is_alias(annotation):
        yield from _mentioned(annotation.__value__, seen)
        return
    yield typing.get_origin(annotation) or annotation
    for one in typing.get_args(annotation):
        yield from _mentioned(one, seen)
