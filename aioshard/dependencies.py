"""Dependencies of handlers: the marker `Depends` in their signatures, read once, when a handler is registered.

Two libraries have such markers: fast-depends (the library behind FastStream) and FastAPI. Only their markers are used:
the design says why aioshard calls dependencies itself.
"""

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from aioshard.attempts import BatchContext, Context
from aioshard.engine.handler import FIRST_RESULT, Dependencies, Dependency, Kind
from aioshard.errors import HandlerError
from aioshard.functions import annotation_of, is_a, is_async, is_async_generator, is_generator, name_of, unmarked
from aioshard.records import Record
from aioshard.serde.payloads import alternatives, shown

Overrides = Mapping[Callable[..., Any], Callable[..., Any]]
"""Dependencies, each with the function that replaces it."""

_ARGUMENT, _RECORD, _CONTEXT = range(FIRST_RESULT)

_MARKERS = {("fast_depends", "Dependant"), ("fastapi", "Depends")}
"""Package and class of the markers that inject."""
_FOREIGN_MODULES = ("dishka.", "fast_depends.", "fastapi.params")
_FOREIGN_NAMES = {"Depends", "Dependency", "Inject", "Injected", "Provide"}
"""Modules and names of the classes of markers that only their own framework understands."""
_CALLS: Mapping[Kind, Callable[[Any], Any]] = {
    "async": lambda function: function,
    "plain": lambda function: function,
    "async generator": contextlib.asynccontextmanager,
    "generator": contextlib.contextmanager,
}
_UNSUPPORTED = {"cast_result": False, "max_concurrency": None}
"""Options of markers that would change the result, with the values at which they do not."""


class Marker(NamedTuple):
    """A dependency as a signature names it."""

    function: Any
    """Anything that was given to `Depends`; not checked yet."""
    use_cache: bool


def marker_of(parameter: inspect.Parameter, annotation: Any, owner: str) -> Marker | None:
    """Return the marker of a parameter, in its annotation or as its default; None if it has none.

    Args:
        parameter: The parameter.
        annotation: Its resolved annotation.
        owner: The function that has it, for messages.

    Raises:
        HandlerError: It has several markers, or one that only another framework understands.
    """
    while type(annotation).__name__ == "TypeAliasType":
        annotation = annotation.__value__
    is_annotated = get_origin(annotation) is Annotated
    candidates = [*(annotation.__metadata__ if is_annotated else ()), parameter.default]
    for candidate in candidates:
        if _is_foreign(candidate):
            raise HandlerError(
                f"{owner} has {candidate!r} at its parameter {parameter.name}, which aioshard does not understand: "
                "expected Depends(…) of fast_depends or fastapi; call other containers in a middleware"
            )
    markers = [candidate for candidate in candidates if _is_marker(candidate)]
    if not markers:
        _check_overlooked(parameter, annotation, owner)
        return None
    if len(markers) > 1:
        raise HandlerError(f"{owner} has {len(markers)} markers at its parameter {parameter.name}: expected one")
    (marker,) = markers
    for option, without in _UNSUPPORTED.items():
        if getattr(marker, option, without) != without:
            raise HandlerError(
                f"{owner} has a marker with {option}= at its parameter {parameter.name}, which aioshard does not "
                "support: leave it out"
            )
    inferred = get_args(annotation)[0] if is_annotated else annotation
    return Marker(inferred if marker.dependency is None else marker.dependency, marker.use_cache)


def injected_names(handler: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> set[str]:
    """Return the names of the parameters of a handler that dependencies fill.

    Raises:
        HandlerError: As for `marker_of`.
    """
    owner = f"handler {name_of(handler)!r}"
    return {
        parameter.name
        for parameter in parameters
        if marker_of(parameter, annotation_of(parameter, handler), owner) is not None
    }


def _check_overlooked(parameter: inspect.Parameter, annotation: Any, owner: str) -> None:
    """Refuse a marker that is not at the outside of an annotation, or in one that cannot be resolved."""
    if isinstance(annotation, str) and "Depends(" in annotation:
        raise HandlerError(
            f"{owner} takes {parameter}, and a name in it does not exist when the handler is registered: import or "
            "define it in the module, outside 'if TYPE_CHECKING' and functions"
        )
    if any(map(_contains_marker, get_args(annotation))):
        raise HandlerError(
            f"{owner} has a marker within another type at its parameter {parameter.name}: expected Annotated[…, "
            "Depends(…)] on the outside, as in Annotated[Session | None, Depends(…)]"
        )


def _contains_marker(part: Any) -> bool:
    return _is_marker(part) or any(map(_contains_marker, get_args(part)))


def _is_marker(value: object) -> bool:
    return any((base.__module__.partition(".")[0], base.__name__) in _MARKERS for base in type(value).__mro__)


def _is_foreign(value: object) -> bool:
    """Return whether a value is a marker, but none that aioshard understands."""
    if type(value).__name__ == "Security":
        return True  # FastAPI's scopes belong to a request
    return not _is_marker(value) and any(
        base.__module__.startswith(_FOREIGN_MODULES) or base.__name__ in _FOREIGN_NAMES for base in type(value).__mro__
    )


def dependencies_of(
    function: Callable[..., Any], argument: Any, context: str | None, *, is_batch: bool, overrides: Overrides
) -> Dependencies | None:
    """Return the calls that the signature of a handler asks for; None if it has no markers.

    Args:
        function: The handler.
        argument: The annotation of its first parameter.
        context: The name of its parameter for the context, if it has one.
        is_batch: Whether it takes lists.
        overrides: Dependencies that are replaced.

    Raises:
        HandlerError: A marker is not understood, or a dependency cannot be called.
    """
    plan = _Plan(argument, is_batch=is_batch, overrides=overrides)
    arguments: dict[str, int] = {}
    for parameter in inspect.signature(function).parameters.values():
        marker = marker_of(parameter, annotation_of(parameter, function), _shown_path((function,)))
        if marker is not None:
            arguments[parameter.name] = plan.call(marker, (function,))
        elif parameter.name == context:
            arguments[parameter.name] = _CONTEXT
        else:
            continue
        _check_named(parameter, (function,))
    return Dependencies(tuple(plan.calls), arguments) if plan.calls else None


class _Plan:
    """Collects the calls of one handler in the order in which an attempt makes them.

    A *path* is the handler, its dependency, the dependency of that one, and so on down to the current function.
    """

    def __init__(self, argument: Any, *, is_batch: bool, overrides: Overrides) -> None:
        self.calls: list[Dependency] = []
        self._shared: dict[Callable[..., Any], int] = {}
        """The number of the result that all parameters with the same function share."""
        self._argument = argument
        self._is_batch = is_batch
        self._overrides = overrides

    def call(self, marker: Marker, path: tuple[Callable[..., Any], ...]) -> int:
        """Return the number of the result of a dependency; add its call, unless another parameter shares it."""
        _check_callable(marker.function, path)
        function = self._overrides.get(marker.function, marker.function)
        _check_callable(function, path)
        if function in path:
            raise HandlerError(f"{_shown_path((*path, function))} depends on itself: remove one of these markers")
        path = (*path, function)
        kind = _kind_of(function, path)
        if marker.use_cache and function in self._shared:
            return self._shared[function]
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise HandlerError(f"{_shown_path(path)} was refused ({error}): depend on your own function") from None
        arguments = self._arguments(parameters, path)
        number = FIRST_RESULT + len(self.calls)
        self.calls.append(Dependency(function, kind, _CALLS[kind](function), arguments))
        if marker.use_cache:
            self._shared[function] = number
        return number

    def _arguments(
        self, parameters: Iterable[inspect.Parameter], path: tuple[Callable[..., Any], ...]
    ) -> dict[str, int]:
        """Return the number of the value for each parameter of a dependency that does not keep its own default."""
        numbers: dict[str, int] = {}
        for parameter in parameters:
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                continue
            annotation = annotation_of(parameter, path[-1])
            marker = marker_of(parameter, annotation, _shown_path(path))
            number = self._given(annotation) if marker is None else self.call(marker, path)
            if number is not None:
                _check_named(parameter, path)
                numbers[parameter.name] = number
            elif parameter.default is parameter.empty:
                raise HandlerError(self._unknown(parameter, annotation, path))
        return numbers

    def _given(self, annotation: Any) -> int | None:
        """Return the number of the context, the record or the handler's argument if the annotation names one."""
        if is_a(annotation, BatchContext if self._is_batch else Context):
            return _CONTEXT
        if self._is_batch and any(get_args(part) == (Record,) for part in alternatives(annotation)):
            return _RECORD
        if not self._is_batch and is_a(annotation, Record):
            return _RECORD
        if annotation not in (Any, object) and unmarked(annotation) == unmarked(self._argument):
            return _ARGUMENT  # whatever else is said of the type, such as a format of a schema registry
        return None

    def _unknown(self, parameter: inspect.Parameter, annotation: Any, path: tuple[Callable[..., Any], ...]) -> str:
        """Return why nothing can be given to a parameter."""
        known = ["list[Record]", "BatchContext"] if self._is_batch else ["Record", "Context"]
        if self._argument not in (Any, object, Record, list[Record]):
            known.append(shown(self._argument))
        reason = ""
        if isinstance(annotation, str):
            reason = ", and a name in it does not exist when the handler is registered"
        return (
            f"{_shown_path(path)} takes {parameter}{reason}: annotate it with {', '.join(known)} or "
            "Annotated[…, Depends(…)], or give it a default"
        )


# Checks -------------------------------------------------------------------------------


def _shown_path(path: tuple[Callable[..., Any], ...]) -> str:
    handler, *dependencies = map(name_of, path)
    return " → ".join([f"handler {handler!r}", *dependencies])


def _check_named(parameter: inspect.Parameter, path: tuple[Callable[..., Any], ...]) -> None:
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise HandlerError(
            f"{_shown_path(path)} takes {parameter.name} by position only, but values are injected by name: move the "
            "'/' in front of it"
        )


def _check_callable(function: Any, path: tuple[Callable[..., Any], ...]) -> None:
    if not callable(function) or function in (Any, inspect.Parameter.empty):
        raise HandlerError(
            f"{_shown_path(path)} depends on {function!r}: expected a function or a class, as in Depends(get_session), "
            "without calling it"
        )
    if not isinstance(function, Hashable):
        raise HandlerError(
            f"{_shown_path(path)} depends on a {type(function).__name__}, which has no hash: depend on a function"
        )


def _kind_of(function: Callable[..., Any], path: tuple[Callable[..., Any], ...]) -> Kind:
    """Return how a dependency is called.

    Raises:
        HandlerError: It is decorated as a context manager, which would be injected instead of its value.
    """
    if is_async_generator(function):
        return "async generator"
    if is_generator(function):
        return "generator"
    if is_async(function):
        return "async"
    decorated = inspect.unwrap(function)
    if inspect.isgeneratorfunction(decorated) or inspect.isasyncgenfunction(decorated):
        raise HandlerError(
            f"{_shown_path(path)} is a generator that is decorated as a context manager: remove the decorator, because "
            "Depends(…) opens and closes generators itself"
        )
    return "plain"
