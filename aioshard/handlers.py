"""The decorator: handlers and their options, checked when they are registered."""

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
    """A handler with its checked options."""

    function: Callable[..., Any]
    name: str
    topics: tuple[str, ...]
    pattern: str | None
    shard_by: ShardBy
    shards: int | None
    concurrency: int
    """The initial value if it is adaptive."""
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
    """Conversion of a record for the handler; None if it takes the record itself."""
    decode: Callable[[Record], object] | None
    """The user's function for this conversion, if there is one."""
    around: tuple[Sequence[Middleware], ...]
    """Middleware of the app and of the set that the handler comes from; both may grow until the app starts."""

    def takes(self, topic: str) -> bool:
        """Whether this handler takes the records of *topic*."""
        return is_subscribed(topic, self.topics, self.pattern)

    def spec(self, provided: Provided) -> HandlerSpec:
        """Return the handler in the form that the engine runs."""
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
    """A set of handlers in a separate module; add it to an app with `App.include`.

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

        The function takes the record and, optionally, a `Context`. If you annotate its parameter with another type, it
        takes the decoded value: a pydantic model, a dataclass, a TypedDict, a msgspec struct or any type that pydantic
        supports, from JSON, or `bytes` or `str` unchanged. `X | None` accepts tombstones, as None. An `async def` runs
        on the event loop, a plain `def` in a thread, up to *concurrency* threads per handler. With *batch* it takes a
        list of records and, optionally, a `BatchContext`.

        Args:
            topics: Topic names; each topic belongs to one handler of the app.
            pattern: A regular expression that whole topic names must match, instead of or in addition to names.
            shard_by: The scope in which records stay in order: `"key"`, `"partition"`, `"record"` (no order), or a
                function of the record. Records for which it returns None, or that have no key, have no order.
            shards: None creates shards on demand, served by *concurrency* workers. A number creates that many
                fixed shards, each a bounded queue with one worker: for local caches, or to protect a back end.
            concurrency: Workers, 64 by default; not allowed with *shards*. `Adaptive(1, 512)` continuously adapts it
                to the capacity of the back end.
            timeout: Seconds that an attempt may take. After that the handler is cancelled and the attempt has failed. A
                handler that swallows the cancellation is reported, and its shard halts when it returns.
            retry: When and how often to retry a failed record; `Retry()` by default.
            on_failure: Decides what happens once retries are exhausted. `"halt"`: the record blocks its shard, and
                nothing is committed past it, until `App.retry_now` or `App.skip` releases it. `"skip"`: it is complete,
                and counted. `DeadLetter(...)`, `Park(...)`: it goes to another topic; see there.
            batch: Passes lists of records to the handler; *concurrency* is then the number of concurrent batches.
            rate_limit: Limits the starts of the handler per second, in this process; a batch is one start.
            key_rate_limit: The same for each shard key: later records of the key wait, other keys do not. With *shards*
                it applies to each shard; records without a key are not limited.
            decode: Converts a `Record` into the handler's argument, regardless of annotations: a function, or without
                *batch* an async function. Its exceptions become `DecodeError`, except `OSError`, which may be
                transient.

        Returns:
            The unchanged function, so that you can call it in tests.

        Raises:
            HandlerError: If the function or an option is invalid. Nothing was registered.
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
        runs the handler and accepts a replaced record or context. An exception that it raises fails the attempt; if it
        swallows one, the attempt has succeeded. The first registered middleware is outermost, and that of an app runs
        around that of the sets it includes. Let `CancelledError` pass.

        Raises:
            HandlerError: It is not an async function of three parameters.

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
        """Raise if registration is closed: in a running app."""

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
    """Reject another handler that reads, or writes dead letters to, the topic of parked records of this one."""
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
