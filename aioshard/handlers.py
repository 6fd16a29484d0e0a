"""The decorator: handlers and their options, checked when they are applied."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread

from aioshard.core.retry import Retry
from aioshard.core.sharding import ShardBy, shard_key_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.runtime import HandlerSpec
from aioshard.errors import HandlerError, NotBuiltError
from aioshard.records import TOPIC_NAME, Record

__all__ = ["Context", "Handlers", "Registration"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a handler may know beside the record: declare it as the second parameter.

    Example:
        >>> async def on_order(record: Record, context: Context) -> None:
        ...     if context.attempt > 1:
        ...         print("again:", context.idempotency_key)
    """

    record: Record
    attempt: int
    """Counted from 1."""
    deadline: float | None
    """Loop time at which the attempt times out; None without a time-out."""
    revoked: asyncio.Event
    """Set when the partition is being taken away: end soon, or the run is cancelled."""
    replay: bool
    """True where history is processed on Spark."""
    state: Any
    """What the app's `resources` yielded; None without."""

    @property
    def idempotency_key(self) -> str:
        """`topic/partition/offset`: the same for every delivery of the record."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """A handler with its options, after they were checked."""

    function: Callable[..., Any]
    name: str
    topics: tuple[str, ...]
    pattern: str | None
    shard_by: ShardBy
    shards: int | None
    concurrency: int
    retry: Retry
    on_failure: Literal["halt"]
    takes_context: bool
    is_async: bool

    def spec(self, state: Callable[[], Any]) -> HandlerSpec:
        """The handler as the engine runs it.

        Args:
            state: Gives what the app's `resources` yielded.
        """
        one_topic = len(self.topics) == 1 and self.pattern is None
        return HandlerSpec(
            name=self.name,
            topics=self.topics,
            pattern=self.pattern,
            shard_key=shard_key_of(self.shard_by, one_topic=one_topic),
            sure_key=not callable(self.shard_by),
            shards=self.shards,
            concurrency=self.concurrency,
            retry=self.retry,
            call=self.function if self.is_async and not self.takes_context else None,
            invoke=self._invoke(state),
        )

    def _invoke(self, state: Callable[[], Any]) -> Callable[[Delivery], Awaitable[object]]:
        function = self.function

        def arguments(delivery: Delivery) -> tuple[Any, ...]:
            if not self.takes_context:
                return (delivery.record,)
            epoch = delivery.epoch
            record, attempt = delivery.record, delivery.failures + 1
            return (record, Context(record, attempt, None, epoch.revoked, False, state()))  # noqa: FBT003

        if self.is_async:
            return lambda delivery: function(*arguments(delivery))
        limiter = anyio.CapacityLimiter(self.concurrency)
        return lambda delivery: _run_in_thread(functools.partial(function, *arguments(delivery)), limiter)


async def _run_in_thread(call: Callable[[], object], limiter: anyio.CapacityLimiter) -> None:
    """Run a plain function in a thread; a cancelled run ends when the thread does, not before (I4)."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    # Who comes first, the thread or a cancellation, decides whether the function runs: `setdefault` is atomic.
    first: dict[str, str] = {}

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def work() -> None:
        if first.setdefault("came", "thread") == "thread":
            try:
                _refuse_awaitable(call())
            finally:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    loop.call_soon_threadsafe(end)

    try:
        await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except asyncio.CancelledError:
        if first.setdefault("came", "cancellation") == "thread":
            # The thread cannot be stopped. Its shard key stays occupied until it ends, so this run does too.
            await asyncio.wait([ended])
        raise


def _refuse_awaitable(result: object) -> None:
    """Fail the attempt when a plain function only made a coroutine: nothing of it has run."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        message = (
            f"the handler is a plain function and returned {type(result).__name__}, which nobody awaits: declare it, "
            "and every function that wraps it, with 'async def'"
        )
        raise HandlerError(message)


class Handlers:
    """A set of handlers, for a module of its own; `App.include` takes it over.

    Example:
        >>> handlers = Handlers()
        >>> @handlers.consume("orders", concurrency=256)
        ... async def on_order(record: Record) -> None: ...
        >>> [registration.name for registration in handlers]
        ['on_order']
    """

    def __init__(self) -> None:
        self._registrations: list[Registration] = []

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._registrations)

    def consume(
        self,
        *topics: str,
        pattern: str | None = None,
        shard_by: ShardBy = "key",
        shards: int | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        on_failure: Literal["halt"] = "halt",
        batch: object = None,
        decode: Callable[[Record], object] | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function for the records of *topics*.

        The function takes the record and, optionally, a `Context`. `async def` runs on the event loop, a
        plain `def` in a thread of its own limiter with *concurrency* threads.

        Args:
            topics: Names; each belongs to one handler of the app.
            pattern: A regular expression that whole topic names must match, instead of or beside names.
            shard_by: What must stay in order: `"key"`, `"partition"`, `"record"` (nothing), or a function
                of the record. Records for which it is None, or that have no key, ask for no order.
            shards: None makes shards on demand, served by *concurrency* workers. A number makes that many
                fixed shards, each a bounded queue with one worker: for local caches, or to spare a back end.
            concurrency: Workers, 64 by default; with *shards* it must not be given.
            timeout: Not available yet.
            retry: When and how often a failed record is tried again; `Retry()` by default.
            on_failure: `"halt"`: a record whose attempts are used up keeps its shard; nothing is committed
                past it.
            batch: Not available yet.
            decode: Not available yet.

        Returns:
            The function unchanged, so that it stays callable in tests.

        Raises:
            HandlerError: If the function or an option cannot work. Nothing was registered.
        """
        _refuse_unbuilt(timeout=timeout, on_failure=on_failure, batch=batch, decode=decode)
        _check_source(topics, pattern)
        workers = _check_workers(shards, concurrency)
        shard_key_of(shard_by, one_topic=True)

        def register(function: F) -> F:
            if not callable(function):
                message = f"consume() decorates a function, not {function!r}"
                raise HandlerError(message)
            takes_context = _check_signature(function)
            registration = Registration(
                function=function,
                name=getattr(function, "__name__", type(function).__name__),
                topics=tuple(topics),
                pattern=pattern,
                shard_by=shard_by,
                shards=shards,
                concurrency=workers,
                retry=retry if retry is not None else Retry(),
                on_failure=on_failure,
                takes_context=takes_context,
                is_async=_is_async(function),
            )
            self._add(registration)
            return function

        return register

    def _add(self, registration: Registration) -> None:
        for other in self._registrations:
            _check_overlap(other, registration)
        self._registrations.append(registration)


def _refuse_unbuilt(*, timeout: object, on_failure: object, batch: object, decode: object) -> None:
    if timeout is not None:
        raise NotBuiltError(f"timeout={timeout!r}", "bound the handler's own awaits with asyncio.timeout()")
    if batch is not None:
        raise NotBuiltError(f"batch={batch!r}", "take one record at a time")
    if decode is not None:
        raise NotBuiltError("decode=…", "decode record.value in the handler")
    if on_failure != "halt":
        raise NotBuiltError(f"on_failure={on_failure!r}", "only 'halt' is; catch what you want to skip in the handler")


def _check_source(topics: tuple[str, ...], pattern: str | None) -> None:
    if not topics and pattern is None:
        message = "consume() was given neither a topic nor a pattern: name at least one topic"
        raise HandlerError(message)
    for topic in topics:
        if callable(topic):
            message = "consume needs a topic: write @app.consume('orders'), not @app.consume"
            raise HandlerError(message)
        if not TOPIC_NAME.fullmatch(str(topic)):
            message = f"{topic!r} is no topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-' were expected"
            raise HandlerError(message)
    if len(set(topics)) != len(topics):
        message = f"a topic is named twice in consume({', '.join(map(repr, topics))})"
        raise HandlerError(message)
    if pattern is not None:
        try:
            re.compile(f"(?:{pattern})")  # as it is used beside the topics and patterns of other handlers
        except re.error as error:
            message = f"pattern={pattern!r} is no regular expression that can stand beside others: {error}"
            raise HandlerError(message) from error


def _check_workers(shards: int | None, concurrency: int | None) -> int:
    if shards is not None and concurrency is not None:
        message = (
            f"shards={shards} and concurrency={concurrency} were both given: a fixed shard has one worker, so leave "
            "concurrency out, or leave shards out for shards on demand"
        )
        raise HandlerError(message)
    for name, value in (("shards", shards), ("concurrency", concurrency)):
        if value is not None and (type(value) is not int or value < 1):
            message = f"{name}={value!r} was refused: a whole number of at least 1 was expected"
            raise HandlerError(message)
    return shards or concurrency or 64


def _is_async(function: Callable[..., Any]) -> bool:
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def _check_signature(function: Callable[..., Any]) -> bool:
    """Whether the function takes a context; refuses what cannot be called with a record."""
    name = getattr(function, "__name__", repr(function))
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        message = f"handler {name!r} yields: it must be an 'async def' (or 'def') without yield"
        raise HandlerError(message)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    surplus = [p.name for p in required if p not in positional[:2]]
    if not positional or surplus:
        found = ", ".join(str(p) for p in parameters) or "no parameter"
        message = f"handler {name!r} takes ({found}); expected are the record and, optionally, a Context"
        raise HandlerError(message)
    annotations = _annotations(function)
    _check_payload(positional[0].name, annotations, name)
    return len(positional) > 1 and _takes_context(positional[1], annotations, name)


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}  # a name that exists for type checkers only


def _check_payload(parameter: str, annotations: dict[str, Any], name: str) -> None:
    annotation = annotations.get(parameter, Record)
    if annotation not in (Record, Any, object):
        option = f"the annotation {parameter}: {_shown(annotation)} of handler {name!r}"
        raise NotBuiltError(option, "annotate the first parameter with aioshard.Record and decode its value")


def _takes_context(parameter: inspect.Parameter, annotations: dict[str, Any], name: str) -> bool:
    annotation = annotations.get(parameter.name, parameter.annotation)
    wanted = annotation in (Context, "Context", "aioshard.Context") or Context in typing.get_args(annotation)
    if parameter.default is not parameter.empty:
        return wanted  # else it is the user's own, as in `async def h(record, cache=cache)`
    if not wanted and annotations.get(parameter.name, Any) not in (Any, object):
        message = (
            f"handler {name!r} takes {parameter.name}: {_shown(annotation)} as its second parameter; a Context was "
            "expected there: annotate it so, or give a parameter of your own a default"
        )
        raise HandlerError(message)
    return True


def _shown(annotation: object) -> object:
    return getattr(annotation, "__name__", annotation)


def _check_overlap(one: Registration, other: Registration) -> None:
    common = set(one.topics) & set(other.topics)
    for first, second in ((one, other), (other, one)):
        if first.pattern is not None:
            common |= {topic for topic in second.topics if re.fullmatch(first.pattern, topic)}
    if common or (one.pattern is not None and one.pattern == other.pattern):
        what = f"topic {min(common)!r}" if common else f"pattern {one.pattern!r}"
        message = f"{what} belongs to handler {one.name!r} and was given to {other.name!r} too: a topic has one handler"
        raise HandlerError(message)
