"""The decorator: handlers and their options, checked when they are applied."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aioshard.attempts import Attempts, Middleware, Provided
from aioshard.checks import (
    check_batch,
    check_decode,
    check_failing,
    check_middleware,
    check_pace,
    check_signature,
    check_source,
    check_ways_back,
    check_workers,
    is_async,
    name_of,
)
from aioshard.context import BatchContext, Context
from aioshard.core.adaptive import Adaptive
from aioshard.core.batching import Batch
from aioshard.core.pace import RateLimit
from aioshard.core.recourse import DeadLetter, OnFailure, Park
from aioshard.core.retry import Retry
from aioshard.core.sharding import ShardBy, shard_key_of
from aioshard.engine.handler import Batched, HandlerSpec
from aioshard.errors import HandlerError
from aioshard.records import Record, is_subscribed
from aioshard.serde.payloads import Payload, decoded_by, payload_of

__all__ = ["BatchContext", "Context", "Handlers", "Registration"]

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=Middleware)


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
    """To begin with, where it is adaptive."""
    adaptive: Adaptive | None
    retry: Retry
    timeout: float | None
    on_failure: OnFailure
    batch: Batch | None
    rate_limit: RateLimit | None
    key_rate_limit: RateLimit | None
    takes_context: bool
    is_async: bool
    payload: Payload | None
    """What becomes of a record before the handler gets it; None where it takes the record itself."""
    decode: Callable[[Record], object] | None
    """What makes it, where a function of the user's does."""
    around: tuple[Sequence[Middleware], ...]
    """The middleware of the app, and of the set of handlers that it is from; those may grow until the app starts."""

    def takes(self, topic: str) -> bool:
        """Whether the records of *topic* are this handler's."""
        return is_subscribed(topic, self.topics, self.pattern)

    def spec(self, provided: Provided) -> HandlerSpec:
        """The handler as the engine runs it."""
        one_topic = len(self.topics) == 1 and self.pattern is None
        threads = None if self.is_async else anyio.CapacityLimiter(self.concurrency)
        around = [layer for level in self.around for layer in level]
        attempts = Attempts(
            self.function, self.takes_context, self.payload, self.timeout, threads, around=around, provided=provided
        )
        batched = None
        if self.batch is not None:
            batched = Batched(self.batch, attempts.for_batch(), attempts.read_ahead)
        return HandlerSpec(
            name=self.name,
            topics=self.topics,
            pattern=self.pattern,
            shard_key=shard_key_of(self.shard_by, one_topic=one_topic),
            sure_key=not callable(self.shard_by),
            shards=self.shards,
            concurrency=self.concurrency,
            adaptive=self.adaptive,
            timeout=self.timeout,
            retry=self.retry,
            on_failure=self.on_failure,
            call=self.function if batched is None and attempts.is_plain else None,
            invoke=attempts.for_record() if batched is None else None,
            batched=batched,
            resized=None if threads is None else functools.partial(_resize, threads),
            rate_limit=self.rate_limit,
            key_rate_limit=self.key_rate_limit,
        )


def _resize(threads: anyio.CapacityLimiter, concurrency: int) -> None:
    threads.total_tokens = concurrency


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
        self._around: list[Middleware] = []

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._registrations)

    def consume(
        self,
        *topics: str,
        pattern: str | None = None,
        shard_by: ShardBy = "key",
        shards: int | None = None,
        concurrency: int | Adaptive | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        on_failure: OnFailure = "halt",
        batch: Batch | None = None,
        rate_limit: RateLimit | None = None,
        key_rate_limit: RateLimit | None = None,
        decode: Callable[[Record], object] | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function for the records of *topics*.

        The function takes the record and, optionally, a `Context`. With a parameter annotated otherwise it takes what
        the value says: a pydantic model, a dataclass, a TypedDict, a msgspec struct or any type of pydantic's, from
        JSON, or `bytes` or `str` as it is. `X | None` takes tombstones, as None. `async def` runs on the event loop, a
        plain `def` in a thread of its own limiter with *concurrency* threads. With *batch* it takes a list of records
        and, optionally, a `BatchContext`.

        Args:
            topics: Names; each belongs to one handler of the app.
            pattern: A regular expression that whole topic names must match, instead of or beside names.
            shard_by: What must stay in order: `"key"`, `"partition"`, `"record"` (nothing), or a function
                of the record. Records for which it is None, or that have no key, ask for no order.
            shards: None makes shards on demand, served by *concurrency* workers. A number makes that many
                fixed shards, each a bounded queue with one worker: for local caches, or to spare a back end.
            concurrency: Workers, 64 by default; with *shards* it must not be given. `Adaptive(1, 512)` finds out how
                many the back end bears, and goes on doing so.
            timeout: Seconds that an attempt may take. Then the handler is cancelled and the attempt has failed. A
                handler that swallows the cancellation is reported, and its shard halts when it returns.
            retry: When and how often a failed record is tried again; `Retry()` by default.
            on_failure: What happens to a record whose attempts are used up. `"halt"`: it keeps its shard, and nothing
                is committed past it, until `App.retry_now` or `App.skip` releases it. `"skip"`: it is complete,
                and counted. `DeadLetter(...)`, `Park(...)`: it goes to another topic; see there.
            batch: Gives the handler lists of records; *concurrency* is then the number of batches at the same time.
            rate_limit: How many runs of the handler may start in a time, in this process; a batch is one run.
            key_rate_limit: The same for each shard key: its later records wait, other keys do not. With *shards* it is
                for each shard; records without a key have none.
            decode: Makes of a `Record` what the handler takes, whatever its annotation: a function, or without *batch*
                an async function. What it raises is a `DecodeError`, but for an `OSError`, which may pass.

        Returns:
            The function unchanged, so that it stays callable in tests.

        Raises:
            HandlerError: If the function or an option cannot work. Nothing was registered.
        """
        check_batch(batch)
        check_decode(decode, batch)
        check_pace(rate_limit, key_rate_limit, shard_by, batch)
        check_failing(timeout, retry, on_failure)
        check_source(topics, pattern)
        check_ways_back(on_failure, topics, pattern)
        workers = check_workers(shards, concurrency)
        shard_key_of(shard_by, one_topic=True)

        def register(function: F) -> F:
            if not callable(function):
                message = f"consume() decorates a function, not {function!r}"
                raise HandlerError(message)
            signature = check_signature(function, batched=batch is not None, decoded=decode is not None)
            name = name_of(function)
            if decode is None:
                payload = payload_of(signature.payload, f"handler {name!r}")
            else:
                payload = decoded_by(decode, is_async=is_async(decode))
            registration = Registration(
                function=function,
                name=name,
                topics=tuple(topics),
                pattern=pattern,
                shard_by=shard_by,
                shards=shards,
                concurrency=workers,
                adaptive=concurrency if isinstance(concurrency, Adaptive) else None,
                timeout=None if timeout is None else float(timeout),
                retry=retry if retry is not None else Retry(),
                on_failure=on_failure,
                batch=batch,
                rate_limit=rate_limit,
                key_rate_limit=key_rate_limit,
                takes_context=signature.takes_context,
                is_async=is_async(function),
                payload=payload,
                decode=decode,
                around=(self._around,),
            )
            self._add(registration)
            return function

        return register

    def middleware(self, around: M) -> M:
        """Register the decorated function to run around every attempt of every handler of this set.

        It takes the record (with batches the list of records), the context, and `call_next(record, context)`, which
        runs the handler and may be given another record or context. What it raises is the attempt's failure; an attempt
        whose exception it keeps to itself has succeeded. What was registered first is outermost, and that of an app is
        around that of the sets which it includes. Let `CancelledError` pass.

        Raises:
            HandlerError: It is no async function of three parameters.

        Example:
            >>> handlers = Handlers()
            >>> @handlers.middleware
            ... async def named(record: Record, context: Context, call_next: Callable[..., Any]) -> object:
            ...     try:
            ...         return await call_next(record, context)
            ...     finally:
            ...         print("was run:", context.idempotency_key)
        """
        check_middleware(around)
        self._refuse_late(f"middleware {name_of(around)!r}")
        self._around.append(around)
        return around

    def _refuse_late(self, what: str) -> None:
        """Raise where nothing more can be registered: in an app that runs."""

    def _add(self, registration: Registration) -> None:
        self._refuse_late(f"handler {registration.name!r}")
        for other in self._registrations:
            _check_overlap(other, registration)
            _check_parking(other, registration)
            _check_parking(registration, other)
        self._registrations.append(registration)


def _check_overlap(one: Registration, other: Registration) -> None:
    common = set(one.topics) & set(other.topics)
    for first, second in ((one, other), (other, one)):
        if first.pattern is not None:
            common |= {topic for topic in second.topics if re.fullmatch(first.pattern, topic)}
    if common or (one.pattern is not None and one.pattern == other.pattern):
        what = f"topic {min(common)!r}" if common else f"pattern {one.pattern!r}"
        message = f"{what} belongs to handler {one.name!r} and was given to {other.name!r} too: a topic has one handler"
        raise HandlerError(message)


def _check_parking(one: Registration, other: Registration) -> None:
    """Refuse that another handler reads, or writes dead letters to, the topic in which one parks."""
    if not isinstance(one.on_failure, Park):
        return
    topic = one.on_failure.topic
    if other.takes(topic):
        use = "consumed"
    elif isinstance(other.on_failure, DeadLetter) and other.on_failure.topic == topic:
        use = "used for dead letters"
    else:
        return
    raise HandlerError(
        f"handler {one.name!r} parks its records in topic {topic!r}, which is {use} by handler {other.name!r}: a topic "
        "of parked records is for those alone, so name another one"
    )
