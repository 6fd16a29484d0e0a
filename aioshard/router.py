"""The decorator `consume`: handlers and their options, checked when they are registered."""

import difflib
import functools
import inspect
import pickle
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, Never, TypeVar, get_args, get_origin, get_type_hints

from aioshard.attempts import BatchContext, Context, Middleware, call_in_process
from aioshard.core.options import Batch, DeadLetter, OnFailure, Park, RateLimit, Retry, is_positive, is_topic, is_whole
from aioshard.core.sharding import ShardBy, shard_key_of
from aioshard.engine.handler import Handler, RunIn
from aioshard.errors import HandlerError
from aioshard.records import Record
from aioshard.serde.payloads import alternatives, decoded_by, payload_of, shown

F = TypeVar(
    "F", bound=Callable[[Any], Any] | Callable[[Any, Context[Any]], Any] | Callable[[Any, BatchContext[Any]], Any]
)
M = TypeVar("M", bound=Middleware)

_LISTS = (list, Sequence, Collection, Iterable)
"""Accepted annotations for a list of records."""


class Router:
    """Handlers of a separate module; add them to an app with `App.include_router`.

    Example:
        >>> router = Router()
        >>> @router.consume("orders", concurrency=256)
        ... async def on_order(record: Record) -> None: ...
        >>> [handler.name for handler in router]
        ['on_order']
    """

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._middleware: list[Middleware] = []

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers)

    def consume(
        self,
        *topics: str,
        pattern: str | None = None,
        shard_by: ShardBy = "key",
        shards: int | None = None,
        shard_queue_size: int | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        on_failure: OnFailure = "halt",
        batch: Batch | None = None,
        rate_limit: RateLimit | None = None,
        decode: Callable[[Record], object] | None = None,
        run_in: RunIn | None = None,
        publish_to: str | None = None,
        **unknown: Never,
    ) -> Callable[[F], F]:
        """Register the decorated function for the records of *topics*.

        The function takes the record and, optionally, a `Context`. If you annotate its parameter with another type, it
        takes the decoded value: a pydantic model, a dataclass, a TypedDict, a msgspec struct or any type that pydantic
        supports, from JSON, or `bytes` or `str` unchanged. `X | None` accepts tombstones, as None. An `async def` runs
        on the event loop, a plain `def` in a thread, up to *concurrency* threads per handler, or with
        `run_in="process"` in a worker process. With *batch* it takes a list of records and, optionally, a
        `BatchContext`.

        Args:
            topics: Topic names; each topic belongs to one handler of the app.
            pattern: A regular expression that whole topic names must match, instead of or in addition to names.
            shard_by: The scope in which records stay in order: `"key"`, `"partition"`, `"record"` (no order), or a
                function of the record. Records for which it returns None, or that have no key, have no order.
            shards: None creates shards on demand, served by *concurrency* workers. A number creates that many
                fixed shards, each a bounded queue with one worker: for local caches, or to protect a back end.
            shard_queue_size: Capacity of each fixed shard's queue, in records; by default an equal share of
                `max_buffered_records`. A partition whose next record belongs to a full queue waits.
            concurrency: Workers, 64 by default; not allowed with *shards*.
            timeout: Seconds that an attempt may take. After that the handler is cancelled and the attempt has failed. A
                handler that swallows the cancellation is reported, and its shard halts when it returns.
            retry: When and how often to retry a failed record; `Retry()` by default.
            on_failure: Decides what happens once retries are exhausted. `"halt"`: the record blocks its shard, and
                nothing is committed past it, until `App.retry_now` or `App.skip` releases it. `"skip"`: it is complete,
                and counted. `DeadLetter(...)`, `Park(...)`: it goes to another topic; see there.
            batch: Passes lists of records to the handler; *concurrency* is then the number of concurrent batches.
            rate_limit: Limits the starts of the handler per second, in this process; a batch is one start.
            decode: Converts a `Record` into the handler's argument, regardless of annotations: a function, or without
                *batch* an async function. Its exceptions become `DecodeError`, except `OSError`, which may be
                transient.
            run_in: `"process"` runs a CPU-bound plain `def` in the app's worker processes, on all cores; the setting
                `processes` is their number, and the maximum number of concurrent runs. The function, its payload's
                type and *decode* must be importable by name. A run that exceeds *timeout* really ends: its process is
                killed and replaced. By default `"loop"` for an `async def`, and `"thread"` for a `def`.
            publish_to: Topic for the function's return value, which is published with the key of the record before the
                record is complete; see `App.publish` for the types. None publishes nothing; of a list of
                `aioshard.message`, each goes to its own topic, with its own key. Not allowed with *batch*.
            unknown: Refused.

        Returns:
            The unchanged function, so that you can call it in tests.

        Raises:
            HandlerError: If the function or an option is invalid. Nothing was registered.
        """
        if unknown:
            raise HandlerError(_unknown_option(next(iter(unknown)), Router.consume.__kwdefaults__ or ()))
        workers = _check_options(
            shards=shards,
            shard_queue_size=shard_queue_size,
            concurrency=concurrency,
            timeout=timeout,
            retry=retry,
            batch=batch,
            rate_limit=rate_limit,
            shard_by=shard_by,
            decode=decode,
            publish_to=publish_to,
            topics=topics,
        )
        _check_source(topics, pattern)
        _check_failure_policy(on_failure, topics, pattern)
        if decode is not None:
            _check_decode(decode, batch)

        def register(function: F) -> F:
            if not callable(function):
                raise HandlerError(f"consume() decorates a function, not {function!r}")
            name = name_of(function)
            annotation, takes_context = _parameters(function, batch, decoded=decode is not None)
            handler = Handler(
                name=name,
                topics=tuple(dict.fromkeys(topics)),
                pattern=pattern,
                shard_by=shard_by,
                shards=shards,
                shard_queue_size=shard_queue_size,
                concurrency=workers,
                timeout=None if timeout is None else float(timeout),
                retry=Retry() if retry is None else retry,
                on_failure=on_failure,
                batch=batch,
                rate_limit=rate_limit,
                function=function,
                takes_context=takes_context,
                run_in=_checked_run_in(run_in, function, decode),
                payload=payload_of(annotation, f"handler {name!r}")
                if decode is None
                else decoded_by(decode, is_async=is_async(decode)),
                decode=decode,
                publish_to=publish_to,
                middleware=(self._middleware,),
            )
            if run_in == "process":
                process_call(handler, registers=True)
            self._add(handler)
            return function

        return register

    def middleware(self, middleware: M) -> M:
        """Register the decorated function to run around every attempt of every handler of this router or app.

        It takes the record (with batches the list of records), the context, and `call_next(record, context)`, which
        runs the handler and accepts a replaced record or context. An exception that it raises fails the attempt; if it
        swallows one, the attempt has succeeded. The first registered middleware is outermost, and the
        middleware of an app runs outside that of the routers it includes. Let `CancelledError` pass.

        Raises:
            HandlerError: It is not an async function of three parameters.

        Example:
            >>> from aioshard import CallNext, Context
            >>> router = Router()
            >>> @router.middleware
            ... async def named(record: Record, context: Context, call_next: CallNext) -> object:
            ...     try:
            ...         return await call_next(record, context)
            ...     finally:
            ...         print("was run:", context.idempotency_key)
        """
        function: Any = middleware
        name = name_of(function)
        expected = "expected an 'async def' of (record, context, call_next)"
        if not callable(function) or not is_async(function):
            raise HandlerError(f"middleware {name!r} was refused: {expected}")
        _check_arguments(f"middleware {name!r} was refused ({{error}}): {expected}", function, 3)
        self._check_open(f"middleware {name!r}")
        self._middleware.append(middleware)
        return middleware

    def _check_open(self, what: str) -> None:
        """Raise if registration is closed: in a running app."""

    def _add(self, handler: Handler) -> None:
        self._check_open(f"handler {handler.name!r}")
        _check_conflicts(handler, self._handlers)
        self._handlers.append(handler)

    def _with_topics(self, handler: Handler, topics: tuple[str, ...]) -> Handler:
        """Return the handler with other topics, checked as by `consume`."""
        if not topics and handler.pattern is None:
            raise HandlerError(f"handler {handler.name!r} would have no topic left: pause it with pause_handler")
        _check_source(topics, handler.pattern)
        _check_failure_policy(handler.on_failure, topics, handler.pattern)
        if handler.publish_to in topics:
            raise HandlerError(f"handler {handler.name!r} publishes to topic {handler.publish_to!r}: it cannot read it")
        changed = handler._replace(topics=topics)
        _check_conflicts(changed, [other for other in self if other is not handler])
        return changed


# Options ------------------------------------------------------------------------------


def _unknown_option(name: str, options: Collection[str]) -> str:
    close = difflib.get_close_matches(name, options, n=1)
    advice = f"did you mean {close[0]!r}? The options are" if close else "the options are"
    return f"consume() has no option {name!r}: {advice} {', '.join(options)}"


_DECODES = "a function that takes a Record and returns the handler's argument"


def _check_options(*, shard_by: ShardBy, topics: tuple[str, ...], **options: Any) -> int:
    """Reject options that are invalid or contradict each other; return the number of workers."""
    shards, concurrency = options["shards"], options["concurrency"]
    for name, is_valid, expected in (
        ("batch", lambda value: isinstance(value, Batch), "Batch(max_records=…, linger=…, max_bytes=…), or None"),
        ("rate_limit", lambda value: isinstance(value, RateLimit), "RateLimit(per_second, burst), or None"),
        ("retry", lambda value: isinstance(value, Retry), "Retry(attempts=…), or None for Retry()"),
        ("timeout", is_positive, "a number of seconds above 0, or None"),
        ("shards", is_whole, "a whole number of at least 1"),
        (
            "shard_queue_size",
            lambda value: shards is not None and is_whole(value),
            "a whole number of at least 1, and shards as well: shards on demand have no queue",
        ),
        ("concurrency", is_whole, "a whole number of at least 1"),
        ("decode", callable, _DECODES),
        (
            "publish_to",
            lambda value: options["batch"] is None and value not in topics and is_topic(value),
            (
                "a topic that the handler does not consume; a batch has no key, so its handler publishes with "
                "context.publish"
            ),
        ),
    ):
        if options[name] is not None and not is_valid(options[name]):
            raise HandlerError(f"{name}={options[name]!r} was refused: expected {expected}")
    shard_key_of(shard_by, one_topic=True)
    if shards is not None and concurrency is not None:
        raise HandlerError(
            f"shards={shards} and concurrency={concurrency} were both given: a fixed shard has one worker, so leave "
            "concurrency out, or leave shards out for shards on demand"
        )
    return int(shards or concurrency or 64)


def _check_source(topics: tuple[object, ...], pattern: str | None) -> None:
    """Reject sources that name no topic, or an invalid one."""
    if not topics and pattern is None:
        raise HandlerError(
            "consume() was given neither a topic nor a pattern: name at least one topic, such as @app.consume('orders')"
        )
    for topic in topics:
        if callable(topic):
            raise HandlerError("consume needs a topic: write @app.consume('orders'), not @app.consume")
        if not is_topic(topic):
            raise HandlerError(
                f"{topic!r} is not a topic name: expected 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'"
                + ("" if isinstance(topic, str) else "; write several topics as @app.consume('orders', 'refunds')")
            )
    if pattern is not None:
        try:
            re.compile(f"(?:{pattern})")  # as it is combined with the topics and patterns of other handlers
        except re.error as error:
            raise HandlerError(
                f"pattern={pattern!r} is not a regular expression that can be combined with others: {error}"
            ) from error


def _check_failure_policy(on_failure: object, topics: tuple[str, ...], pattern: str | None) -> None:
    """Reject an unknown policy, and one that sends records back to a topic of the same handler."""
    if on_failure in ("halt", "skip"):
        return
    if not isinstance(on_failure, DeadLetter | Park):
        raise HandlerError(
            f"on_failure={on_failure!r} is not known: use 'halt', 'skip', DeadLetter('topic') or Park('topic')"
        )
    if on_failure.topic in topics or (pattern is not None and re.fullmatch(pattern, on_failure.topic)):
        raise HandlerError(
            f"on_failure={on_failure!r} sends failed records to a topic that the handler itself consumes, where they "
            "would fail again and again: use another topic, or narrow the pattern"
        )


def _check_decode(decode: Callable[[Record], object], batch: object) -> None:
    """Reject functions that do not take a record, and async ones for batches."""
    _check_arguments(f"decode={name_of(decode)} was refused ({{error}}): expected {_DECODES}", decode, 1)
    if batch is not None and is_async(decode):
        raise HandlerError(
            "decode=… is an async function and batch=… was given: the records of a batch are decoded in one step, so "
            "use a plain function, or take list[Record] and decode in the handler"
        )


def _checked_run_in(
    run_in: RunIn | None, function: Callable[..., Any], decode: Callable[[Record], object] | None
) -> RunIn:
    """Return where a handler runs; reject a choice that does not suit it or its decode function."""
    choices: Sequence[RunIn] = ("loop",) if is_async(function) else ("thread", "process")
    name, kind = name_of(function), "an 'async def'" if is_async(function) else "a plain 'def'"
    if run_in is not None and run_in not in choices:
        raise HandlerError(
            f"handler {name!r} is {kind} and was given run_in={run_in!r}: expected {' or '.join(map(repr, choices))}; "
            "an 'async def' runs in the 'loop', a plain 'def' in a 'thread' or a 'process'"
        )
    if run_in == "process" and sys.platform == "win32":
        raise HandlerError(f"handler {name!r} was given run_in='process', which needs Linux or macOS: use 'thread'")
    if run_in == "process" and decode is not None and is_async(decode):
        raise HandlerError(
            f"handler {name!r} was given run_in='process' and decode=… is an async function: the records are decoded "
            "in the process, so use a plain function"
        )
    return run_in or choices[0]


def process_call(handler: Handler, *, registers: bool = False) -> bytes:
    """Return a handler as it is sent to worker processes.

    Args:
        handler: The handler.
        registers: True while its decorator runs: until it returns, the module does not have the function's name.

    Raises:
        HandlerError: A worker process could not import it.
    """
    function, kind = handler.function, Any if handler.payload is None else handler.payload.type
    if registers and inspect.isfunction(function) and "<" not in function.__qualname__:
        function = process_call
    options = (handler.takes_context, handler.batch is not None, handler.timeout, kind, handler.decode)
    try:
        return pickle.dumps(functools.partial(call_in_process, function, *options))
    except Exception as error:
        raise HandlerError(
            f"handler {handler.name!r} was given run_in='process' and cannot be sent to a worker process ({error}): "
            "define the function, its payload's type and decode=… by 'def' and 'class' at the top level of a module"
        ) from error


def _check_arguments(message: str, function: Callable[..., Any], count: int) -> None:
    """Reject a function that cannot be called with *count* arguments; *message* contains `{error}`."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise HandlerError(message.format(error=error)) from None
    except ValueError:
        return  # some built-in functions have no signature


# Functions ----------------------------------------------------------------------------


def _plain(function: Any) -> Any:
    """Return the function that a partial wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling the function returns a coroutine."""
    plain = _plain(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for messages; for a partial that of its function, for an object that of its class."""
    plain = _plain(function)
    return getattr(plain, "__name__", type(plain).__name__)


def _parameters(function: Callable[..., Any], batch: Batch | None, *, decoded: bool) -> tuple[Any, bool]:
    """Return the type of a handler's payload (in a batch, of each element), and whether it takes a context.

    Raises:
        HandlerError: The function cannot be called with a record or, with *batch*, a list of records.
    """
    name = name_of(function)
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise HandlerError(
            f"handler {name!r} yields: it must be an 'async def' (or 'def') without yield; with publish_to=… it may "
            "return a list of messages"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise HandlerError(f"handler {name!r} was refused ({error}): decorate your own function") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first = "the record" if batch is None else "the list of records"
    context_type = Context if batch is None else BatchContext
    if not positional or any(p not in positional[:2] for p in required):
        given = ", ".join(map(str, parameters)) or "no parameter"
        raise HandlerError(
            f"handler {name!r} takes ({given}): expected {first} and, optionally, a {context_type.__name__}"
        )
    annotation = _annotation(positional[0], function)
    if _is_a(annotation, Context) or _is_a(annotation, BatchContext):
        raise HandlerError(f"handler {name!r} takes a {shown(annotation)} first: expected {first}, then a context")
    payload = _payload(f"handler {name!r} takes {positional[0].name}", annotation, batch, decoded=decoded)
    if len(positional) == 1:
        return payload, False
    second = positional[1]
    annotation = _annotation(second, function)
    if _is_a(annotation, context_type):
        return payload, True
    if second.default is not second.empty:
        return payload, False  # the user's own parameter, as in `async def h(record, cache=cache)`
    by_name = isinstance(annotation, str) and annotation.partition("[")[0].rpartition(".")[2] == context_type.__name__
    if not by_name and annotation not in (Any, object):
        raise HandlerError(
            f"handler {name!r} takes {second.name}: {shown(annotation)} as its second parameter: expected a "
            f"{context_type.__name__}; annotate it with {context_type.__name__}, or give your own parameter a default"
        )
    return payload, True


def _is_a(annotation: Any, kind: type) -> bool:
    """Return whether an annotation is this context type, possibly parametrized or in a union."""
    return any((get_origin(part) or part) is kind for part in alternatives(annotation))


def _annotation(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Resolve the annotation of a parameter: Any if there is none, and the text itself if a name in it is unknown."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    plain = inspect.unwrap(_plain(function))
    scope = getattr(plain, "__globals__", None) or getattr(getattr(plain, "__call__", None), "__globals__", {})  # noqa: B004
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder, globalns=scope, include_extras=True)["it"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return annotation  # a name that exists for type checkers only


def _payload(takes: str, annotation: Any, batch: Batch | None, *, decoded: bool) -> Any:
    """Return the type of the record or, with *batch*, of the elements of the list."""
    if annotation in (Any, object):
        return Any
    if isinstance(annotation, str):
        inner = annotation if batch is None else annotation.partition("[")[2].removesuffix("]")
        if decoded or inner in ("Record", "aioshard.Record", "Any", ""):
            return Any
        raise HandlerError(
            f"{takes}: {annotation}, and this name does not exist when the handler is registered, so nothing can be "
            "decoded to it: import or define it in the module, outside 'if TYPE_CHECKING' and functions"
        )
    while batch is not None and get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    is_list = (get_origin(annotation) or annotation) in _LISTS
    arguments = get_args(annotation)
    if batch is not None and not is_list:
        raise HandlerError(
            f"{takes}: {shown(annotation)} and was given batch=…, so it is called with a list: annotate it with "
            "list[…], or leave batch out"
        )
    if batch is None and is_list and not decoded and set(arguments) <= {Record, Any}:
        raise HandlerError(
            f"{takes}: {shown(annotation)} and consume() was given no batch, so it is called with one record at a "
            "time: add batch=Batch(), or annotate it with Record"
        )
    if batch is None:
        return annotation
    return arguments[0] if arguments else Any


# Several handlers ---------------------------------------------------------------------


def _check_conflicts(handler: Handler, others: Iterable[Handler]) -> None:
    """Reject a handler that conflicts with others."""
    for other in others:
        _check_overlap(other, handler)
        _check_parking(other, handler)
        _check_parking(handler, other)


def _check_overlap(first: Handler, other: Handler) -> None:
    common = {topic for topic in first.topics if other.takes(topic)} | {
        topic for topic in other.topics if first.takes(topic)
    }
    if common or (first.pattern is not None and first.pattern == other.pattern):
        what = f"topic {min(common)!r}" if common else f"pattern {first.pattern!r}"
        raise HandlerError(
            f"{what} belongs to handler {first.name!r} and was given to {other.name!r} too: a topic has one handler; "
            "call both functions in it, or give one of them to an app with another group id"
        )


def _check_parking(handler: Handler, other: Handler) -> None:
    """Reject another handler that reads the topic of parked records, or writes dead letters to it."""
    if not isinstance(handler.on_failure, Park):
        return
    topic = handler.on_failure.topic
    if other.takes(topic) or (isinstance(other.on_failure, DeadLetter) and other.on_failure.topic == topic):
        raise HandlerError(
            f"handler {handler.name!r} parks its records in topic {topic!r}, which handler {other.name!r} uses too: "
            "name a topic that contains only parked records"
        )
