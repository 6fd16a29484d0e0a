"""Checks of `consume`, with the messages that users read when the decorator is applied."""

import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aioshard.context import BatchContext, Context
from aioshard.core.adaptive import Adaptive
from aioshard.core.batching import Batch
from aioshard.core.pace import RateLimit
from aioshard.core.recourse import DeadLetter, Park
from aioshard.core.retry import Retry
from aioshard.errors import HandlerError, SettingsError
from aioshard.records import TOPIC_NAME, Record
from aioshard.serde.annotations import alternatives, shown

__all__ = [
    "Signature",
    "check_assign",
    "check_batch",
    "check_decode",
    "check_failing",
    "check_linger",
    "check_middleware",
    "check_pace",
    "check_signature",
    "check_source",
    "check_ways_back",
    "check_workers",
    "is_async",
    "name_of",
]


_LISTS = (list, Sequence, Collection, Iterable)
"""Accepted annotations for a list of records."""


def check_batch(batch: object) -> None:
    """Reject a value that is not a `Batch`."""
    if batch is not None and not isinstance(batch, Batch):
        raise HandlerError(
            f"batch={batch!r} was refused: expected Batch(max_records=…, linger=…, max_bytes=…), or None"
        )


def check_linger(name: str, batch: Batch | None, stuck_after: float) -> None:
    """Reject a handler whose records would count as stuck while they wait for their batch to fill."""
    if batch is not None and batch.linger >= stuck_after:
        raise HandlerError(
            f"handler {name!r} lets batches wait for linger={batch.linger:g} s, and a record that is in hand for "
            f"stuck_after={stuck_after:g} s counts as stuck: give it less linger, or raise stuck_after"
        )


def check_assign(
    assign: Mapping[str, Sequence[int]] | None, handlers: Iterable[tuple[str, Iterable[str], str | None, object]]
) -> None:
    """Reject a manual assignment that does not match the handlers.

    Args:
        assign: The setting; None if the group assigns, which passes every check.
        handlers: Name, topics, pattern and `on_failure` of each.

    Raises:
        SettingsError: A topic has partitions but no handler, or a handler but no partitions; or a handler uses an
            option that needs a group.
    """
    if assign is None:
        return
    handled: set[str] = set()
    for name, topics, pattern, policy in handlers:
        handled.update(topics)
        if pattern is not None:
            raise SettingsError(
                f"handler {name!r} has pattern={pattern!r}, and assign gives the partitions by hand: a topic that "
                "appears would have none; name its topics, or leave assign out so that the group assigns"
            )
        if isinstance(policy, Park):
            raise SettingsError(
                f"handler {name!r} has on_failure=Park({policy.topic!r}), and assign gives the partitions by hand: "
                "parked records are told apart by the generation of the group in which they were parked, and nobody "
                "joins it; use DeadLetter, or leave assign out so that the group assigns"
            )
        for topic in sorted(set(topics) - assign.keys()):
            raise SettingsError(
                f"handler {name!r} consumes topic {topic!r}, and assign gives it no partition of that: nothing of it "
                f"would ever be read; add {topic!r} to assign, or leave the topic out of this app"
            )
    for topic in sorted(assign.keys() - handled):
        raise SettingsError(
            f"assign gives partitions of topic {topic!r}, which no handler consumes: leave it out of assign, or "
            f"register a handler with @app.consume({topic!r})"
        )


def check_pace(rate_limit: object, key_rate_limit: object, shard_by: object, batch: object) -> None:
    """Reject values that are not rate limits, and limits per key for handlers without keys."""
    for name, limit in (("rate_limit", rate_limit), ("key_rate_limit", key_rate_limit)):
        if limit is not None and not isinstance(limit, RateLimit):
            raise HandlerError(f"{name}={limit!r} was refused: expected RateLimit(per_second, burst), or None")
    if key_rate_limit is not None and shard_by == "record":
        raise HandlerError(
            "key_rate_limit was given and shard_by='record', which has no keys: limit the handler with rate_limit, or "
            "shard by what is to be limited"
        )
    if key_rate_limit is not None and batch is not None:
        raise HandlerError(
            "key_rate_limit and batch were both given, and a batch has records of many keys: limit the handler with "
            "rate_limit, which counts batches, or take one record at a time"
        )


def check_failing(timeout: object, retry: object, on_failure: object) -> None:
    """Reject an invalid timeout, retry or failure policy."""
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < float("inf")):  # type: ignore[operator]
        raise HandlerError(f"timeout={timeout!r} was refused: a number of seconds above 0, or None, was expected")
    if on_failure not in ("halt", "skip") and not isinstance(on_failure, DeadLetter | Park):
        raise HandlerError(
            f"on_failure={on_failure!r} is not known: use 'halt', 'skip', DeadLetter('topic') or Park('topic')"
        )
    if retry is not None and not isinstance(retry, Retry):
        raise HandlerError(f"retry={retry!r} was refused: expected Retry(attempts=…), or None for Retry()")


def check_ways_back(on_failure: object, topics: tuple[str, ...], pattern: str | None) -> None:
    """Reject a policy that sends records back to a topic of the same handler."""
    if not isinstance(on_failure, DeadLetter | Park):
        return
    if on_failure.topic in topics:
        raise HandlerError(
            f"on_failure={on_failure!r} sends failed records to the topic that they come from, where they would fail "
            "again and again: give another topic"
        )
    if pattern is not None and re.fullmatch(pattern, on_failure.topic):
        raise HandlerError(
            f"on_failure={on_failure!r} sends failed records to a topic that pattern={pattern!r} matches, so that the "
            "handler would get them again and again: narrow the pattern, or give another topic"
        )


def check_source(topics: tuple[object, ...], pattern: str | None) -> None:
    """Reject sources that name no topic, or an invalid one."""
    if not topics and pattern is None:
        message = "consume() was given neither a topic nor a pattern: name at least one topic"
        raise HandlerError(message)
    for topic in topics:
        if callable(topic):
            message = "consume needs a topic: write @app.consume('orders'), not @app.consume"
            raise HandlerError(message)
        if not isinstance(topic, str) or not TOPIC_NAME.fullmatch(topic):
            message = f"{topic!r} is no topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-' were expected"
            raise HandlerError(message)
    if len(set(topics)) != len(topics):
        message = f"a topic is named twice in consume({', '.join(map(repr, topics))})"
        raise HandlerError(message)
    if pattern is not None:
        try:
            re.compile(f"(?:{pattern})")  # as it is combined with the topics and patterns of other handlers
        except re.error as error:
            message = f"pattern={pattern!r} is no regular expression that can stand beside others: {error}"
            raise HandlerError(message) from error


def check_workers(shards: int | None, concurrency: int | Adaptive | None) -> int:
    """Return the initial number of workers; reject contradictory options."""
    if shards is not None and concurrency is not None:
        message = (
            f"shards={shards} and concurrency={concurrency} were both given: a fixed shard has one worker, so leave "
            "concurrency out, or leave shards out for shards on demand"
        )
        raise HandlerError(message)
    workers = concurrency.beginning if isinstance(concurrency, Adaptive) else concurrency
    for name, value in (("shards", shards), ("concurrency", workers)):
        if value is not None and (type(value) is not int or value < 1):
            message = f"{name}={value!r} was refused: a whole number of at least 1 was expected"
            raise HandlerError(message)
    return shards or workers or 64


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function returns a coroutine."""
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages; for a partial that of its function, for an object that of its class."""
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    return getattr(plain, "__name__", type(plain).__name__)


def check_decode(decode: object, batch: object) -> None:
    """Reject values that are not decoders, and async decoders for batches."""
    if decode is None:
        return
    expected = "expected a function that takes a Record and gives what the handler takes"
    if not callable(decode):
        raise HandlerError(f"decode={decode!r} was refused: {expected}")
    name = name_of(decode)
    if inspect.isgeneratorfunction(decode) or inspect.isasyncgenfunction(decode):
        raise HandlerError(f"decode={name} was refused, because it yields: {expected}")
    with contextlib.suppress(ValueError):  # some built-in functions have no signature
        try:
            inspect.signature(decode).bind(None)
        except TypeError as error:
            raise HandlerError(f"decode={name} was refused ({error}): {expected}") from None
    if batch is not None and is_async(decode):
        raise HandlerError(
            "decode=… is an async function and batch=… was given: the records of a batch are decoded in one go, so "
            "give a plain function, or take list[Record] and decode in the handler"
        )


def check_middleware(around: object) -> None:
    """Reject values that are not middleware."""
    name = name_of(around) if callable(around) else around
    if not callable(around) or not is_async(around):
        raise HandlerError(f"middleware {name!r} was refused: expected an 'async def' of (record, context, call_next)")
    try:
        inspect.signature(around).bind(None, None, None)
    except TypeError as error:
        raise HandlerError(
            f"middleware {name!r} was refused ({error}): expected an 'async def' of (record, context, call_next)"
        ) from None


class Signature(NamedTuple):
    """The parameters of a handler."""

    takes_context: bool
    payload: Any
    """Annotation of the record or, with batches, of the list's elements."""


def check_signature(function: Callable[..., Any], *, batched: bool = False, decoded: bool = False) -> Signature:
    """Return the parameters of a handler; reject a function that cannot be called with a record or list of records.

    Args:
        function: The handler.
        batched: Whether it takes lists.
        decoded: Whether a function decodes, so that the annotation does not matter.

    Raises:
        HandlerError: The function cannot be called this way.
    """
    name = name_of(function)
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        message = f"handler {name!r} yields: it must be an 'async def' (or 'def') without yield"
        raise HandlerError(message)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise HandlerError(f"handler {name!r} was refused ({error}): decorate a function of your own") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    surplus = [p.name for p in required if p not in positional[:2]]
    if not positional or surplus:
        found = ", ".join(str(p) for p in parameters) or "no parameter"
        expected = (
            "the list of records and, optionally, a BatchContext"
            if batched
            else "the record and, optionally, a Context"
        )
        message = f"handler {name!r} takes ({found}); expected are {expected}"
        raise HandlerError(message)
    payload = _payload(positional[0], function, name, batched=batched, decoded=decoded)
    wanted = BatchContext if batched else Context
    if len(positional) == 1:
        return Signature(takes_context=False, payload=payload)
    annotation = _annotation(positional[1], function)
    return Signature(_takes_context(positional[1], annotation, name, wanted), payload)


def _annotation(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Resolve the annotation of a parameter: Any if there is none, and the text itself if a name in it is unknown."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(plain)
    scope = getattr(plain, "__globals__", None) or getattr(getattr(plain, "__call__", None), "__globals__", {})  # noqa: B004
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=scope, include_extras=True)["it"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return annotation  # a name that exists for type checkers only


def _payload(
    parameter: inspect.Parameter, function: Callable[..., Any], name: str, *, batched: bool, decoded: bool
) -> Any:
    """Return the annotation of a handler's first parameter."""
    annotation = _annotation(parameter, function)
    if annotation in (Any, object):
        return Any
    if annotation in (Context, BatchContext):
        first = "the list of records" if batched else "the record"
        message = (
            f"handler {name!r} takes {parameter.name}: {shown(annotation)} first: give it {first} first, then a context"
        )
        raise HandlerError(message)
    if isinstance(annotation, str):
        return _unresolved(annotation, parameter.name, name, batched=batched, decoded=decoded)
    while typing.get_origin(annotation) is typing.Annotated and batched:
        annotation = typing.get_args(annotation)[0]
    origin = typing.get_origin(annotation) or annotation
    is_list = origin in _LISTS
    if batched and not is_list:
        message = (
            f"handler {name!r} takes {parameter.name}: {shown(annotation)} and was given batch=…, so it is called with "
            f"a list: annotate {parameter.name}: {_list_of(annotation)}, or leave batch out"
        )
        raise HandlerError(message)
    if is_list and not batched and not decoded and set(typing.get_args(annotation)) <= {Record, Any}:
        message = (
            f"handler {name!r} takes {parameter.name}: {annotation} and consume() was given no batch, so it is called "
            "with one record at a time: add batch=Batch(), or annotate it with Record"
        )
        raise HandlerError(message)
    return next(iter(typing.get_args(annotation)), Any) if batched else annotation


def _list_of(annotation: Any) -> str:
    """Suggest a list annotation in place of one that is not a list."""
    for one in alternatives(annotation):
        if typing.get_origin(one) in _LISTS:
            return shown(one)
    of_several = typing.get_origin(annotation) in (tuple, set, frozenset)
    return f"list[{shown(typing.get_args(annotation)[0] if of_several else annotation)}]"


def _unresolved(annotation: str, parameter: str, name: str, *, batched: bool, decoded: bool) -> Any:
    """Handle an annotation with a name that does not exist at run time."""
    inner = annotation.partition("[")[2].removesuffix("]") if batched else annotation
    if decoded or inner in ("Record", "aioshard.Record", "Any", ""):
        return Any
    raise HandlerError(
        f"handler {name!r} takes {parameter}: {annotation}, and no such name is there when the handler is registered, "
        "so nothing can be decoded to it: import or define it in the module, outside 'if TYPE_CHECKING' and functions"
    )


def _takes_context(
    parameter: inspect.Parameter, annotation: Any, name: str, wanted: type[Context] | type[BatchContext]
) -> bool:
    names = (wanted, wanted.__name__, f"aioshard.{wanted.__name__}")
    is_wanted = annotation in names or wanted in typing.get_args(annotation)
    other = Context if wanted is BatchContext else BatchContext
    if annotation in (other, other.__name__, f"aioshard.{other.__name__}") or other in typing.get_args(annotation):
        batched = wanted is BatchContext
        why = "takes batches, which have no single record" if batched else "takes one record at a time"
        message = (
            f"handler {name!r} takes {parameter.name}: {other.__name__} and {why}: annotate it with {wanted.__name__}"
        )
        raise HandlerError(message)
    if parameter.default is not parameter.empty:
        return is_wanted  # otherwise it is the user's own parameter, as in `async def h(record, cache=cache)`
    if not is_wanted and not isinstance(annotation, str) and annotation not in (Any, object):
        message = (
            f"handler {name!r} takes {parameter.name}: {shown(annotation)} as its second parameter; a "
            f"{wanted.__name__} was expected there: annotate it so, or give a parameter of your own a default"
        )
        raise HandlerError(message)
    return True
