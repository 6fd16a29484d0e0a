"""Users' functions: their kind, their name for messages, and what their signatures say."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from aioshard.attempts import BatchContext, Context
from aioshard.core.text import encodable
from aioshard.errors import HandlerError
from aioshard.records import Record
from aioshard.serde.payloads import alternatives, shown

_LISTS = (list, Sequence, Collection, Iterable)
"""Accepted annotations for a list of records."""
_NOT_DECODED = {"Record", "aioshard.Record", "Any", ""}
"""Names in annotations that cannot be resolved, but need no decoding either."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def plain(function: Any) -> Any:
    """Return the function that a partial wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling the function returns a coroutine."""
    return _is_kind(inspect.iscoroutinefunction, function)


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether calling the function returns a generator."""
    return _is_kind(inspect.isgeneratorfunction, function)


def is_async_generator(function: Callable[..., Any]) -> bool:
    """Return whether calling the function returns an async generator."""
    return _is_kind(inspect.isasyncgenfunction, function)


def _is_kind(check: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    called = plain(function)
    if isinstance(called, type):
        return False  # calling a class returns an object, even if the object has an async `__call__`
    return check(called) or check(getattr(called, "__call__", None))  # noqa: B004


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages; for a partial that of its function, for an object that of its class."""
    called = plain(function)
    return encodable(str(getattr(called, "__name__", type(called).__name__)))


def annotation_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Resolve the annotation of a parameter: Any if there is none, and the text itself if a name in it is unknown."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder, globalns=_globals_of(function), include_extras=True)["it"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return annotation  # a name that exists for type checkers only


def unmarked(annotation: Any) -> Any:
    """Return an annotation without the metadata of `Annotated`, at any depth; one that was not resolved stays.

    Example:
        >>> unmarked(list[Annotated[int, "a number"]])
        list[int]
    """
    if isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder)["it"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return annotation


def _globals_of(function: Callable[..., Any]) -> Any:
    """Return the names that the annotations of a function can use."""
    called = inspect.unwrap(plain(function))
    if isinstance(called, type):
        module = sys.modules.get(called.__module__)
        own = {} if module is None else vars(module)
        constructor: Any = getattr(called, "__init__", None)
        return own | getattr(constructor, "__globals__", {})
    return getattr(called, "__globals__", None) or getattr(getattr(called, "__call__", None), "__globals__", {})  # noqa: B004


def result_type(function: Any) -> Any:
    """Return the annotation of a function's result; Any without one, or if it exists for type checkers only."""
    called = plain(function)
    if not inspect.isroutine(called):
        called = type(called).__call__
    try:
        return get_type_hints(inspect.unwrap(called), include_extras=True).get("return", Any)
    except (NameError, TypeError, AttributeError):
        return Any


def is_a(annotation: Any, kind: type) -> bool:
    """Return whether an annotation is a type, possibly parametrized, in a union, or a name that is not defined yet."""
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] == kind.__name__
    return any((get_origin(part) or part) is kind for part in alternatives(annotation))


# Signatures of handlers ---------------------------------------------------------------


_WRAPS = "; a function that wraps a handler needs @functools.wraps(handler), which shows the handler's parameters"


class Signature(NamedTuple):
    """The parameters of a handler for its input and its context; those for dependencies are not among them."""

    argument: inspect.Parameter
    """The first parameter, with a resolved annotation."""
    context: str | None
    """Name of the parameter for the context; None if the handler takes none."""


def parameters_of(handler: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return all parameters of a handler.

    Raises:
        HandlerError: The handler yields, or is a built-in function without a signature.
    """
    name = name_of(handler)
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise HandlerError(
            f"handler {name!r} yields: it must be an 'async def' (or 'def') without yield; with publish_to=… it may "
            "return a list of messages"
        )
    try:
        return list(inspect.signature(handler).parameters.values())
    except ValueError as error:
        raise HandlerError(f"handler {name!r} was refused ({error}): decorate your own function") from None


def signature_of(
    handler: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    *,
    injected: Collection[str],
    is_batch: bool,
) -> Signature:
    """Return the parameters of a handler that aioshard fills by position.

    Args:
        handler: The handler.
        parameters: All its parameters.
        injected: Names of those that dependencies fill.
        is_batch: Whether it is called with a list of records.

    Raises:
        HandlerError: It cannot be called with its input and, optionally, a context.
    """
    name = name_of(handler)
    first = "the list of records" if is_batch else "the record"
    context_type = BatchContext if is_batch else Context

    # 1. The input comes first.
    if parameters and parameters[0].name in injected:
        raise HandlerError(f"handler {name!r} takes a dependency first: expected {first}, then dependencies")

    # 2. Nothing else is required but a context.
    own = [parameter for parameter in parameters if parameter.name not in injected]
    filled = _filled_by_position(own)
    if not filled or _requires_others(own, filled):
        given = ", ".join(map(str, parameters)) or "no parameter"
        hint = "" if filled else _WRAPS
        raise HandlerError(
            f"handler {name!r} takes ({given}): expected {first} and, optionally, a {context_type.__name__} and "
            f"dependencies, as in Annotated[…, Depends(…)]{hint}"
        )

    # 3. The input is not a context.
    argument = filled[0].replace(annotation=annotation_of(filled[0], handler))
    if is_a(argument.annotation, Context) or is_a(argument.annotation, BatchContext):
        shows = shown(argument.annotation)
        raise HandlerError(f"handler {name!r} takes a {shows} first: expected {first}, then a context")

    # 4. The second parameter, if any, is a context, or the user's own with a default.
    context = None
    if len(filled) > 1 and _takes_context(handler, filled[1], context_type):
        context = filled[1].name
    return Signature(argument, context)


def _filled_by_position(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters for the input and the context, as far as there are any."""
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    return positional[:2]


def _requires_others(parameters: Iterable[inspect.Parameter], filled: Collection[inspect.Parameter]) -> bool:
    """Return whether a handler cannot be called with *filled* alone."""
    return any(_is_required(parameter) and parameter not in filled for parameter in parameters)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in _VARIADIC


def _takes_context(handler: Callable[..., Any], second: inspect.Parameter, context_type: type) -> bool:
    """Return whether the second parameter takes the context; one with a default may be the user's own.

    Raises:
        HandlerError: It takes something that aioshard does not have.
    """
    annotation = annotation_of(second, handler)
    if is_a(annotation, context_type):
        return True
    if second.default is not second.empty:
        return False  # as in `async def h(record, cache=cache)`
    if annotation in (Any, object):
        return True
    raise HandlerError(
        f"handler {name_of(handler)!r} takes {second.name}: {shown(annotation)} as its second parameter: expected a "
        f"{context_type.__name__}; annotate it with {context_type.__name__} or Annotated[…, Depends(…)], or give "
        "your own parameter a default"
    )


def payload_type(handler: Callable[..., Any], argument: inspect.Parameter, *, is_batch: bool, decoded: bool) -> Any:
    """Return the type of the record that a handler takes, or of the elements of its list.

    Args:
        handler: The handler.
        argument: Its first parameter, with a resolved annotation.
        is_batch: Whether it is called with a list of records.
        decoded: Whether a function of the user decodes the records, regardless of annotations.

    Raises:
        HandlerError: The annotation is unknown, or names a list without a batch, or no list with one.
    """
    takes = f"handler {name_of(handler)!r} takes {argument.name}"
    annotation = argument.annotation
    if annotation in (Any, object):
        return Any
    if isinstance(annotation, str):
        name = annotation.partition("[")[2].removesuffix("]") if is_batch else annotation
        if decoded or name in _NOT_DECODED:
            return Any
        raise HandlerError(
            f"{takes}: {annotation}, and this name does not exist when the handler is registered, so nothing can be "
            "decoded to it: import or define it in the module, outside 'if TYPE_CHECKING' and functions"
        )
    if is_batch:
        return _element_type(takes, annotation)
    if not decoded and _is_list(annotation) and set(get_args(annotation)) <= {Record, Any}:
        raise HandlerError(
            f"{takes}: {shown(annotation)} and consume() was given no batch, so it is called with one record at a "
            "time: add batch=Batch(), or annotate it with Record"
        )
    return annotation


def _element_type(takes: str, annotation: Any) -> Any:
    """Return the type of the elements of an annotated list; *takes* names the parameter, for messages."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if not _is_list(annotation):
        raise HandlerError(
            f"{takes}: {shown(annotation)} and was given batch=…, so it is called with a list: annotate it with "
            "list[…], or leave batch out"
        )
    arguments = get_args(annotation)
    return arguments[0] if arguments else Any


def _is_list(annotation: Any) -> bool:
    return (get_origin(annotation) or annotation) in _LISTS


def check_arguments(message: str, function: Callable[..., Any], count: int) -> None:
    """Refuse a function that cannot be called with *count* arguments; *message* contains `{error}`.

    Raises:
        HandlerError: It takes more or fewer arguments.
    """
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise HandlerError(message.format(error=error)) from None
    except ValueError:
        return  # some built-in functions have no signature
