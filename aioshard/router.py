"""The decorator `consume`: handlers and their options, checked when they are registered."""

import difflib
import functools
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Concatenate, Never, TypeVar, get_args

from aioshard.attempts import Middleware, call_in_process
from aioshard.core.options import (
    Adaptive,
    Batch,
    DeadLetter,
    Limit,
    OnFailure,
    Park,
    Retry,
    is_positive,
    is_topic,
    is_whole,
)
from aioshard.core.sharding import ShardBy, shard_key_of
from aioshard.dependencies import Overrides, dependencies_of, injected_names
from aioshard.engine.handler import Handler, Keep, RunIn
from aioshard.errors import HandlerError
from aioshard.functions import (
    Signature,
    check_arguments,
    is_async,
    name_of,
    parameters_of,
    payload_type,
    result_type,
    signature_of,
)
from aioshard.records import Record
from aioshard.schema_registry.registries import RegistryInput, RegistryOutput
from aioshard.serde.payloads import decoded_by, payload_of

F = TypeVar("F", bound=Callable[Concatenate[Any, ...], Any])
M = TypeVar("M", bound=Middleware)

_CONCURRENCY = 64
"""The default number of workers of a handler."""


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
        concurrency: int | Adaptive | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        on_failure: OnFailure = "halt",
        batch: Batch | None = None,
        limit: Limit | None = None,
        decode: Callable[[Record], object] | None = None,
        run_in: RunIn | None = None,
        publish_to: str | None = None,
        keep: Keep = "all",
        max_age: float | None = None,
        **unknown: Never,
    ) -> Callable[[F], F]:
        """Register the decorated function for the records of *topics*.

        The function takes the record and, optionally, a `Context` and dependencies: parameters that are marked with
        `Depends` of fast-depends or FastAPI. If you annotate its first parameter with another type, it takes the
        decoded value: a pydantic model, a dataclass, a TypedDict, a msgspec struct or any type that pydantic supports,
        from JSON, or `bytes` or `str` unchanged. `X | None` accepts tombstones, as None. An `async def` runs on the
        event loop, a plain `def` in a thread, up to *concurrency* threads per handler, or with `run_in="process"` in a
        worker process. With *batch* it takes a list of records and, optionally, a `BatchContext`.

        Args:
            topics: Topic names; each topic belongs to one handler of the app.
            pattern: A regular expression that whole topic names must match, instead of or in addition to names.
            shard_by: The scope in which records stay in order: `"key"`, `"partition"`, `"record"` (no order), or a
                function of the record. Records for which it returns None, or that have no key, have no order.
            shards: None creates shards on demand, served by *concurrency* workers. A number creates that many
                fixed shards, each a bounded queue with one worker: for local caches, or to protect a back end.
            shard_queue_size: Capacity of each fixed shard's queue, in records; by default an equal share of
                `max_buffered_records`. A partition whose next record belongs to a full queue waits.
            concurrency: Workers, 64 by default; not allowed with *shards*. Each has one record or batch in flight, from
                its start until its result is published. `Adaptive(minimum, maximum)` follows what the back end bears.
            timeout: Seconds that an attempt may take. After that the handler is cancelled and the attempt has failed. A
                handler that swallows the cancellation is reported, and its shard halts when it returns.
            retry: When and how often to retry a failed record; `Retry()` by default.
            on_failure: Decides what happens once retries are exhausted. `"halt"`: the record blocks its shard, and
                nothing is committed past it, until `App.retry_now` or `App.skip` releases it. `"skip"`: it is complete,
                and counted. `DeadLetter(...)`, `Park(...)`: it goes to another topic; see there.
            batch: Passes lists of records to the handler; *concurrency* is then the number of concurrent batches.
            limit: Limits how many runs start per second; every handler with an equal `Limit` shares it. A batch is one
                run. A record that waits for it holds no worker.
            decode: Converts a `Record` into the handler's argument, regardless of annotations: a function, or without
                *batch* an async function. Its exceptions become `DecodeError`, except `OSError`, which may be
                transient.
            run_in: `"process"` runs a CPU-bound plain `def` in the app's worker processes, on all cores; the setting
                `processes` is their number, and the maximum number of concurrent runs; a record whose result is being
                published keeps no process. The function, its payload's type and *decode* must be importable by name. A
                run that exceeds *timeout* really ends: its process is killed and replaced. By default `"loop"` for an
                `async def`, and `"thread"` for a `def`.
            publish_to: Topic for the function's return value, which is published with the key of the record before the
                record is complete; see `App.publish` for the types. None publishes nothing; of a list of
                `aioshard.message`, each goes to its own topic, with its own key. Not allowed with *batch*.
            keep: `"latest"` runs only the newest of the waiting records of a key; the others of its partition are
                complete as superseded. For states and prices: a record says all that matters about its key. Records
                without a key all run. Needs *shard_by* to be `"key"` or a function; not allowed with *shards*.
            max_age: Seconds since its timestamp after which a record does not start any more: it is complete as
                expired or, with `on_failure=DeadLetter(...)`, becomes a dead letter.
            unknown: Refused.

        Returns:
            The unchanged function, so that you can call it in tests.

        Raises:
            HandlerError: If the function or an option is invalid. Nothing was registered.
        """
        if unknown:
            raise HandlerError(_unknown_option(next(iter(unknown)), Router.consume.__kwdefaults__ or ()))
        _check_options(
            topics=topics,
            shard_by=shard_by,
            shards=shards,
            shard_queue_size=shard_queue_size,
            concurrency=concurrency,
            timeout=timeout,
            retry=retry,
            batch=batch,
            limit=limit,
            decode=decode,
            publish_to=publish_to,
            keep=keep,
            max_age=max_age,
        )
        adaptive = None
        workers = shards or _CONCURRENCY
        if isinstance(concurrency, Adaptive):
            adaptive = concurrency
            workers = concurrency.maximum
        elif concurrency is not None:
            workers = concurrency
        _check_source(topics, pattern)
        _check_failure_policy(on_failure, topics, pattern)
        if decode is not None:
            _check_decode(decode, batch)

        def register(function: F) -> F:
            if not callable(function):
                raise HandlerError(f"consume() decorates a function, not {function!r}")
            name = name_of(function)
            is_batch = batch is not None
            signature = _signature_of(function, batch)
            argument = signature.argument
            argument_type = payload_type(function, argument, is_batch=is_batch, decoded=decode is not None)
            dependencies = dependencies_of(
                function, argument.annotation, signature.context, is_batch=is_batch, overrides={}
            )
            checked_run_in = _checked_run_in(run_in, function, decode)
            owner = f"handler {name!r}"
            taken = None
            if decode is None:
                taken = RegistryInput.of(argument_type, owner)
                payload = payload_of(argument_type, owner) if taken is None else taken.payload
            else:
                payload = decoded_by(decode, is_async=is_async(decode))
            output = None
            if publish_to is not None:
                output = RegistryOutput.of(result_type(function), f"the result of {owner}")
            handler = Handler(
                name=name,
                topics=tuple(dict.fromkeys(topics)),
                pattern=pattern,
                shard_by=shard_by,
                shards=shards,
                shard_queue_size=shard_queue_size,
                concurrency=workers,
                adaptive=adaptive,
                timeout=None if timeout is None else float(timeout),
                retry=Retry() if retry is None else retry,
                on_failure=on_failure,
                batch=batch,
                limit=limit,
                function=function,
                takes_context=signature.context is not None,
                dependencies=dependencies,
                run_in=checked_run_in,
                payload=payload,
                decode=decode,
                publish_to=publish_to,
                middleware=(self._middleware,),
                keep=keep,
                max_age=None if max_age is None else float(max_age),
                taken=taken,
                output=output,
            )
            if run_in == "process":
                _check_not_adaptive(handler)
                _check_not_injected(handler)
                _check_no_registry(handler)
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
        check_arguments(f"middleware {name!r} was refused ({{error}}): {expected}", function, 3)
        self._check_open(f"middleware {name!r}")
        self._middleware.append(middleware)
        return middleware

    def _completed(self, handler: Handler) -> Handler:
        """Return a handler with the options that depend on the app."""
        return handler

    def _check_open(self, what: str) -> None:
        """Raise if registration is closed: in a running app."""

    def _add(self, handler: Handler) -> None:
        self._check_open(f"handler {handler.name!r}")
        handler = self._completed(handler)
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
    if name == "rate_limit":
        return (
            "consume() has no option 'rate_limit' any more: instead of rate_limit=RateLimit(100, burst=10), write "
            "limit=Limit('name', per_second=100, burst=10), with a name that no other limit of the app has"
        )
    close = difflib.get_close_matches(name, options, n=1)
    advice = f"did you mean {close[0]!r}? The options are" if close else "the options are"
    return f"consume() has no option {name!r}: {advice} {', '.join(options)}"


_DECODES = "a function that takes a Record and returns the handler's argument"


def _check_options(
    *,
    topics: tuple[str, ...],
    shard_by: ShardBy,
    shards: int | None,
    shard_queue_size: int | None,
    concurrency: int | Adaptive | None,
    timeout: float | None,
    retry: Retry | None,
    batch: Batch | None,
    limit: Limit | None,
    decode: Callable[[Record], object] | None,
    publish_to: str | None,
    keep: Keep,
    max_age: float | None,
) -> None:
    """Refuse options that are invalid or contradict each other; None leaves an option out."""
    expected = "Batch(max_records=…, linger=…, max_bytes=…), or None"
    _check_option("batch", batch, isinstance(batch, Batch), expected)
    _check_option("limit", limit, isinstance(limit, Limit), "Limit('name', per_second=…, burst=…), or None")
    _check_option("retry", retry, isinstance(retry, Retry), "Retry(attempts=…), or None for Retry()")
    _check_option("timeout", timeout, is_positive(timeout), "a number of seconds above 0, or None")
    _check_option("shards", shards, is_whole(shards), "a whole number of at least 1")
    has_queue = shards is not None and is_whole(shard_queue_size)
    expected = "a whole number of at least 1, and shards as well: shards on demand have no queue"
    _check_option("shard_queue_size", shard_queue_size, has_queue, expected)
    is_concurrency = isinstance(concurrency, Adaptive) or is_whole(concurrency)
    expected = "a whole number of at least 1, or Adaptive(minimum, maximum)"
    _check_option("concurrency", concurrency, is_concurrency, expected)
    _check_option("decode", decode, callable(decode), _DECODES)
    is_other_topic = batch is None and publish_to not in topics and is_topic(publish_to)
    expected = (
        "a topic that the handler does not consume; a batch has no key, so its handler publishes with context.publish"
    )
    _check_option("publish_to", publish_to, is_other_topic, expected)
    shard_key_of(shard_by, one_topic=True)
    _check_option("keep", keep, keep in get_args(Keep), "'all' or 'latest'")
    _check_option("max_age", max_age, is_positive(max_age), "a number of seconds above 0, or None")
    if shards is not None and concurrency is not None:
        raise HandlerError(
            f"shards={shards} and concurrency={concurrency} were both given: a fixed shard has one worker, so leave "
            "concurrency out, or leave shards out for shards on demand"
        )
    if keep == "latest":
        _check_latest(shard_by, shards)
    if limit is not None and limit.per == "key":
        _check_key_limit(limit, shard_by, shards, batch)


def _check_latest(shard_by: ShardBy, shards: int | None) -> None:
    """Refuse shards in which a newer record says nothing about an older one: the older one would be lost."""
    if shards is not None:
        raise HandlerError(
            f"keep='latest' and shards={shards} were both given: a fixed shard has records of several keys, so leave "
            "shards out for shards on demand"
        )
    if shard_by in ("partition", "record"):
        raise HandlerError(
            f"keep='latest' and shard_by={shard_by!r} were both given: a newer record replaces an older one of the "
            "same shard key, so use shard_by='key' or a function of the record"
        )


def _check_key_limit(limit: Limit, shard_by: ShardBy, shards: int | None, batch: Batch | None) -> None:
    """Refuse a limit for each key where a run that waits for its key would hold back other keys."""
    refused = f"limit=Limit({limit.name!r}, …, per='key')"
    if shards is not None:
        raise HandlerError(
            f"{refused} and shards={shards} were both given: a fixed shard has many keys in order, so a key that waits "
            "for its limit would hold back the others; leave shards out, or use per='process' or per='group'"
        )
    if shard_by in ("partition", "record"):
        raise HandlerError(
            f"{refused} and shard_by={shard_by!r} were both given: the limit counts the runs of each shard key, so use "
            "shard_by='key' or a function of the record; or use per='process' or per='group'"
        )
    if batch is not None:
        raise HandlerError(
            f"{refused} and batch=… were both given: a batch is one run with records of many keys; leave batch out, or "
            "use per='process' or per='group'"
        )


def _check_option(name: str, value: object, is_valid: bool, expected: str) -> None:
    if value is not None and not is_valid:
        raise HandlerError(f"{name}={value!r} was refused: expected {expected}")


def _check_source(topics: tuple[object, ...], pattern: str | None) -> None:
    """Refuse sources that name no topic, or an invalid one."""
    if not topics and pattern is None:
        raise HandlerError(
            "consume() was given neither a topic nor a pattern: name at least one topic, such as @app.consume('orders')"
        )
    for topic in topics:
        if callable(topic):
            raise HandlerError("consume needs a topic: write @app.consume('orders'), not @app.consume")
        if not is_topic(topic):
            several = "" if isinstance(topic, str) else "; write several topics as @app.consume('orders', 'refunds')"
            raise HandlerError(
                f"{topic!r} is not a topic name: expected 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'{several}"
            )
    if pattern is not None:
        try:
            re.compile(f"(?:{pattern})")  # as it is combined with the topics and patterns of other handlers
        except re.error as error:
            raise HandlerError(
                f"pattern={pattern!r} is not a regular expression that can be combined with others: {error}"
            ) from error


def with_side_topic(handler: Handler, group_id: str) -> Handler:
    """Return a handler whose topic of parked records has a name, if it parks.

    Raises:
        HandlerError: The name derives from the group, and is not valid or is a topic that the handler consumes.
    """
    if not isinstance(handler.on_failure, Park):
        return handler
    policy = handler.on_failure.in_group(group_id)
    _check_failure_policy(policy, handler.topics, handler.pattern)
    return handler._replace(on_failure=policy)


def _check_failure_policy(on_failure: object, topics: tuple[str, ...], pattern: str | None) -> None:
    """Refuse an unknown policy, and one that sends records back to a topic of the same handler."""
    if on_failure in ("halt", "skip"):
        return
    if not isinstance(on_failure, DeadLetter | Park):
        raise HandlerError(f"on_failure={on_failure!r} is not known: use 'halt', 'skip', Park() or DeadLetter('topic')")
    if not on_failure.topic:  # the app knows its group, and checks the name that derives from it
        return
    is_consumed = on_failure.topic in topics or (pattern is not None and re.fullmatch(pattern, on_failure.topic))
    if is_consumed:
        raise HandlerError(
            f"on_failure={on_failure!r} sends failed records to a topic that the handler itself consumes, where they "
            "would fail again and again: use another topic, or narrow the pattern"
        )


def _check_decode(decode: Callable[[Record], object], batch: object) -> None:
    """Refuse functions that do not take a record, and async ones for batches."""
    check_arguments(f"decode={name_of(decode)} was refused ({{error}}): expected {_DECODES}", decode, 1)
    if batch is not None and is_async(decode):
        raise HandlerError(
            "decode=… is an async function and batch=… was given: the records of a batch are decoded in one step, so "
            "use a plain function, or take list[Record] and decode in the handler"
        )


def _checked_run_in(
    run_in: RunIn | None, function: Callable[..., Any], decode: Callable[[Record], object] | None
) -> RunIn:
    """Return where a handler runs; refuse a choice that does not suit it or its decode function."""
    name = name_of(function)
    choices: Sequence[RunIn]
    if is_async(function):
        kind = "an 'async def'"
        choices = ("loop",)
    else:
        kind = "a plain 'def'"
        choices = ("thread", "process")
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
    function = handler.function
    kind = Any if handler.payload is None else handler.payload.type
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


def _check_not_adaptive(handler: Handler) -> None:
    """Refuse an adaptive concurrency for a handler that runs in worker processes."""
    if handler.adaptive is not None:
        raise HandlerError(
            f"handler {handler.name!r} was given run_in='process' and concurrency={handler.adaptive}: the worker "
            "processes limit its runs, and they compute instead of waiting for a back end; set processes=, or leave "
            "run_in out"
        )


def _check_not_injected(handler: Handler) -> None:
    """Refuse dependencies of a handler that runs in worker processes."""
    if handler.dependencies is not None:
        names = ", ".join(name_of(dependency.function) for dependency in handler.dependencies.calls)
        raise HandlerError(
            f"handler {handler.name!r} was given run_in='process' and depends on {names}: dependencies belong to the "
            "process of the app, and a run that is killed could not close them; open what it needs in the handler, or "
            "use run_in='thread'"
        )


def _check_no_registry(handler: Handler) -> None:
    """Refuse values with a schema registry for a handler that runs in worker processes."""
    if handler.taken is not None:
        raise HandlerError(
            f"handler {handler.name!r} was given run_in='process' and takes values with a schema registry: the app has "
            "the client of the registry, and worker processes decode records themselves; use run_in='thread'"
        )


def overridden(handler: Handler, overrides: Overrides) -> Handler:
    """Return the handler with other functions instead of some of its dependencies.

    Raises:
        HandlerError: A function in *overrides* cannot be called.
    """
    if handler.dependencies is None:
        return handler
    signature = _signature_of(handler.function, handler.batch)
    dependencies = dependencies_of(
        handler.function,
        signature.argument.annotation,
        signature.context,
        is_batch=handler.batch is not None,
        overrides=overrides,
    )
    return handler._replace(dependencies=dependencies)


def _signature_of(function: Callable[..., Any], batch: Batch | None) -> Signature:
    """Return how a handler is called.

    Raises:
        HandlerError: The function cannot be called with a record or, with *batch*, a list of records.
    """
    parameters = parameters_of(function)
    injected = injected_names(function, parameters)
    return signature_of(function, parameters, injected=injected, is_batch=batch is not None)


# Several handlers ---------------------------------------------------------------------


def _check_conflicts(handler: Handler, others: Iterable[Handler]) -> None:
    """Refuse a handler that conflicts with others."""
    for other in others:
        _check_overlap(other, handler)
        _check_same_limit(other, handler)
        _check_parking(other, handler)
        _check_parking(handler, other)


def _check_overlap(first: Handler, other: Handler) -> None:
    common = {topic for topic in first.topics if other.takes(topic)}
    common |= {topic for topic in other.topics if first.takes(topic)}
    if common:
        shared = f"topic {min(common)!r}"
    elif first.pattern is not None and first.pattern == other.pattern:
        shared = f"pattern {first.pattern!r}"
    else:
        return
    raise HandlerError(
        f"{shared} belongs to handler {first.name!r} and was given to {other.name!r} too: a topic has one handler; "
        "call both functions in it, or give one of them to an app with another group id"
    )


def _check_same_limit(first: Handler, other: Handler) -> None:
    """Refuse two limits with one name."""
    if first.limit is None or other.limit is None or first.limit.name != other.limit.name:
        return
    if first.limit != other.limit:
        raise HandlerError(
            f"handler {other.name!r} has limit={other.limit!r}, and handler {first.name!r} has limit={first.limit!r}: "
            "handlers share a limit by its name, so give both the same Limit, or two different names"
        )


def _check_parking(handler: Handler, other: Handler) -> None:
    """Refuse another handler that reads the topic of parked records, or writes dead letters to it."""
    if not isinstance(handler.on_failure, Park):
        return
    topic = handler.on_failure.topic
    writes_dead_letters = isinstance(other.on_failure, DeadLetter) and other.on_failure.topic == topic
    if writes_dead_letters or other.takes(topic):
        raise HandlerError(
            f"handler {handler.name!r} parks its records in topic {topic!r}, which handler {other.name!r} uses too: "
            "name a topic that contains only parked records"
        )
