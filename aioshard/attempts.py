"""Run one attempt of a handler: its context, payload, middleware and threads."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Self

import anyio.to_thread
from typing_extensions import TypeVar

from aioshard.engine.current_record import begin_thread
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Attempt, Handler
from aioshard.engine.outgoing import RunMessages
from aioshard.engine.shards import DeliveryBatch
from aioshard.engine.stack import ThreadRun
from aioshard.errors import BatchError, HandlerError, StateError
from aioshard.ports import Message, Partitioner, Publish
from aioshard.records import Record
from aioshard.serde.payloads import decoded_by, message, payload_of

State = TypeVar("State", default=Any)
"""The value that the app's `resources` yield."""
CallNext = Callable[[Any, Any], Awaitable[object]]
"""Runs the handler for a record, or a list of them, in a context."""
Middleware = Callable[[Any, Any, CallNext], Awaitable[object]]
"""A function that runs around the handler; see `Router.middleware`."""

# The context --------------------------------------------------------------------------


async def _no_app(outgoing: Message) -> int:
    raise StateError(
        f"a message for topic {outgoing.topic!r} was not published: this Context belongs to no running app"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt(Generic[State]):
    """Shared part of `Context` and `BatchContext`."""

    attempt: int
    """Counted from 1; the same for all records of a batch."""
    deadline: float | None
    """Event loop time at which the attempt times out; None without a timeout."""
    revoked: asyncio.Event = dataclasses.field(repr=False)
    """Set when a partition of the attempt's records is being revoked: finish soon, or the run is cancelled."""
    replay: bool
    """True in a backfill on Spark."""
    state: State = dataclasses.field(repr=False)
    """The value that the app's `resources` yielded; None without resources."""
    publisher: Publish = dataclasses.field(default=_no_app, repr=False)
    """Publishes the messages of `publish`."""

    def __copy__(self) -> Self:
        return dataclasses.replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields that a worker process can use; it sets the deadline itself."""
        names = {"record", "records", "attempt", "replay"} & {field.name for field in dataclasses.fields(self)}
        return _context_in_process, (type(self), {name: getattr(self, name) for name in names})

    async def publish(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | None = None,
        headers: Iterable[tuple[str, bytes | str | None]] = (),
        partition: int | None = None,
        partitioner: Partitioner = "key",
    ) -> int:
        """Publish as `App.publish` does; return the offset once the brokers have acknowledged.

        The handler's input is complete only after the handler has returned, so its messages are stored before the
        offsets of its input are committed. After a crash they may be published twice.

        With `processing_guarantee="exactly_once"`, return -1 immediately: the message becomes visible together with
        the offsets, or is dropped if this run fails.

        Raises:
            TransportError: The message was not acknowledged, or is too large.
            StateError: With `exactly_once`, the run has ended.
        """
        return await self.publisher(
            message(topic, value, key=key, headers=headers, partition=partition, partitioner=partitioner)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context(_Attempt[State]):
    """Information about an attempt: declare it as the handler's second parameter.

    `Context[Pool]` tells a type checker what the app's `resources` yield, and so the type of `state`. In a worker
    process, `state`, `revoked` and `publish` raise `StateError`, and `deadline` is in `time.monotonic()`.

    Example:
        >>> async def on_order(record: Record, context: Context) -> None:
        ...     if context.attempt > 1:
        ...         print("again:", context.idempotency_key)
    """

    record: Record

    @property
    def idempotency_key(self) -> str:
        """`topic/partition/offset`: the same for every delivery of the record."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext(_Attempt[State]):
    """Information about an attempt of a batch: declare it as the batch handler's second parameter.

    Example:
        >>> async def on_numbers(numbers: list[int], context: BatchContext) -> None:
        ...     rows = [
        ...         (context.idempotency_key(record), number)
        ...         for record, number in zip(context.records, numbers, strict=True)
        ...     ]
    """

    records: Sequence[Record] = ()
    """The records of the batch, in the order of the handler's list: use them for keys, and in `BatchError`."""

    def idempotency_key(self, record: Record) -> str:
        """Return `topic/partition/offset` of a record: the same for every delivery, in any batch.

        A batch as a whole has no key: the next attempt may combine the record with others.
        """
        return f"{record.topic}/{record.partition}/{record.offset}"


def _absent(_: Context) -> Any:
    raise StateError(
        "context.state, context.revoked and context.publish belong to the process of the app, and the handler runs in "
        "a worker process: use attempt, deadline, idempotency_key and replay, or run it in a thread"
    )


_IN_PROCESS: dict[str, Any] = {
    "__slots__": (),
    **dict.fromkeys(("state", "revoked", "publish"), property(_absent)),
}
"""Replaces, in a worker process, the parts of a context that stay in the process of the app."""


@functools.cache
def _kind_in_process(kind: type) -> type:
    return type(kind.__name__, (kind,), _IN_PROCESS)


def _context_in_process(kind: type, values: dict[str, object]) -> Any:
    context: Any = object.__new__(_kind_in_process(kind))
    for name, value in values.items():
        object.__setattr__(context, name, value)
    return context


# Attempts -----------------------------------------------------------------------------


class Provided(NamedTuple):
    """Values from the app that attempts use."""

    state: Callable[[], Any]
    """Returns the value that the app's `resources` yielded."""
    publish: Publish
    """Publishes the messages of handlers."""
    replay: bool = False
    """Value of `Context.replay`."""
    exactly_once: bool = False
    """Whether the messages of a run become visible with its completion."""
    around: Callable[[Publish], Publish] = lambda publish: publish
    """Wraps the function that accepts these messages."""


class InProcesses(NamedTuple):
    """How the attempts of a handler run in worker processes."""

    number: int
    """How many processes there are."""
    run: Callable[..., Awaitable[object]]
    """Runs one attempt: as a `CallNext`, with its *timeout* in seconds."""


def with_attempts(handler: Handler, provided: Provided, processes: InProcesses | None = None) -> Handler:
    """Return the handler with the functions that run its attempts, for one start of the app.

    Args:
        handler: The handler as registered.
        provided: Values from the app.
        processes: For a handler that runs in worker processes; without it, attempts run in a thread, one at a time.
    """
    middleware = [function for level in handler.middleware for function in level]
    wants_context = handler.takes_context or bool(middleware) or handler.publish_to is not None
    if handler.run_in == "process":  # further runs would wait for a process, and a drain for those runs
        handler = handler._replace(concurrency=min(handler.concurrency, processes.number if processes else 1))
    threads = None if handler.run_in == "loop" else anyio.CapacityLimiter(handler.concurrency)
    read = None if handler.payload is None else handler.payload.read
    if threads is None and read is None and not wants_context and handler.batch is None:
        return handler._replace(call=handler.function)
    if processes is None:
        call = _call_of(handler, read, threads)
    else:
        call, read = functools.partial(processes.run, timeout=handler.timeout), None
    for layer in reversed(middleware):
        call = _with_middleware(layer, call)
    if handler.publish_to is not None:
        call = _publishing_result(call, handler.publish_to)
    context_of = provided if wants_context else None
    if handler.batch is None:
        invoke = _record_attempt(call, handler.timeout, context_of)
    else:
        invoke = _batch_attempt(call, _call_of(handler, None, threads), handler.timeout, context_of)
    if processes is not None:
        handler = handler._replace(timeout=None)  # applied by `call`: the wait for a process does not count
    return handler._replace(
        invoke=invoke,
        read=None if handler.batch is None or middleware else read,
    )


def _record_attempt(call: CallNext, timeout: float | None, provided: Provided | None) -> Attempt:
    if provided is None:
        return lambda delivery: call(delivery.record, None)

    def attempt(delivery: Delivery, publish: Publish) -> Awaitable[object]:
        context = Context(
            record=delivery.record,
            attempt=delivery.failures + 1,
            deadline=_deadline(timeout),
            revoked=delivery.epoch.revoked,
            replay=provided.replay,
            state=provided.state(),
            publisher=publish,
        )
        return call(delivery.record, context)

    return _publishing(attempt, provided)


def _batch_attempt(call: CallNext, call_decoded: CallNext, timeout: float | None, provided: Provided | None) -> Attempt:
    def attempt(batch: DeliveryBatch, publish: Publish) -> Awaitable[object]:
        context = None
        if provided is not None:
            context = BatchContext(
                records=tuple(batch.records),
                attempt=batch.deliveries[0].failures + 1,
                deadline=_deadline(timeout),
                revoked=batch.revoked,
                replay=provided.replay,
                state=provided.state(),
                publisher=publish,
            )
        return call_decoded(batch.payloads, context) if batch.payloads is not None else call(batch.records, context)

    return _publishing(attempt, provided)


def _publishing(attempt: Callable[[Any, Publish], Awaitable[object]], provided: Provided | None) -> Attempt:
    """Return attempts that publish immediately or, with exactly-once processing, together with their completion."""
    if provided is None:
        return lambda argument: attempt(argument, _no_app)
    if not provided.exactly_once:
        return lambda argument: attempt(argument, provided.publish)

    async def run(argument: Delivery | DeliveryBatch) -> object:
        deliveries = argument.deliveries if isinstance(argument, DeliveryBatch) else [argument]
        for delivery in deliveries:
            delivery.outgoing = ()
        own = RunMessages()
        try:
            result = await attempt(argument, provided.around(own.publish))
        except BatchError as error:
            if own.messages and len(deliveries) > 1:
                raise HandlerError(
                    "the handler raised BatchError after it had published: with exactly-once processing, none of its "
                    "messages is published, so all records of the batch run again"
                ) from error
            raise
        finally:
            messages = own.end()
        deliveries[0].outgoing = messages
        return result

    return run


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def _call_of(handler: Handler, read: Callable[[Record], Any] | None, threads: anyio.CapacityLimiter | None) -> CallNext:
    """Return a function that calls the handler, in a thread if necessary, with records decoded by *read*."""
    function, takes_context = handler.function, handler.takes_context

    def run(argument: Any, context: Any) -> Any:
        return function(argument, context) if takes_context else function(argument)

    def in_thread(call: Callable[[Any, Any], Any]) -> CallNext:
        if threads is None:
            return call
        return lambda argument, context: run_in_thread(functools.partial(call, argument, context), threads)

    if read is None:
        return in_thread(run)
    decode = read
    if handler.payload is not None and handler.payload.is_async:
        bare = in_thread(run)

        async def await_and_run(argument: Any, context: Any) -> object:
            return await bare(await decode(argument), context)

        return await_and_run

    if handler.batch is None:
        return in_thread(lambda argument, context: run(decode(argument), context))
    return in_thread(lambda argument, context: run([decode(record) for record in argument], context))


def _with_middleware(layer: Middleware, call: CallNext) -> CallNext:
    async def wrapped(argument: Any, context: Any) -> object:
        coroutine: Any = None

        def call_next(argument: Any, context: Any) -> Any:
            nonlocal coroutine
            coroutine = call(argument, context)
            return coroutine

        result = await layer(argument, context, call_next)
        if getattr(coroutine, "cr_frame", None) is None:  # the coroutine has finished
            return result
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            coroutine.close()
        # Otherwise the record would complete unprocessed.
        raise HandlerError(
            f"middleware {getattr(layer, '__name__', type(layer).__name__)!r} returned before the handler had ended: "
            "await the result of call_next, as in 'return await call_next(record, context)'"
        )

    return wrapped


def _publishing_result(call: CallNext, topic: str) -> CallNext:
    """Return a function that publishes what *call* returns, before its record is complete.

    It is the outermost layer, so publishing belongs to the attempt: if it fails, the attempt has failed.
    """

    async def run(record: Record, context: Context) -> object:
        result: Any = await call(record, context)
        is_list = isinstance(result, list | tuple) and all(isinstance(output, Message) for output in result)
        for output in result if is_list else [result]:
            if output is not None:
                outgoing = output if isinstance(output, Message) else message(topic, output, key=record.key)
                await context.publisher(outgoing)
        return result

    return run


# Processes ----------------------------------------------------------------------------


def call_in_process(  # noqa: PLR0917 - `functools.partial` passes them by position
    function: Callable[..., object],
    takes_context: bool,
    is_batch: bool,
    timeout: float | None,
    payload_type: Any,
    decode: Callable[[Record], object] | None,
) -> Callable[[Any, Any], object]:
    """Return the function that runs a handler in a worker process, with a record or a list, and a context."""
    payload = payload_of(payload_type, "its handler") if decode is None else decoded_by(decode, is_async=False)

    def call(argument: Any, context: Any) -> object:
        if context is not None:
            object.__setattr__(context, "deadline", None if timeout is None else time.monotonic() + timeout)
        if payload is not None:
            argument = [*map(payload.read, argument)] if is_batch else payload.read(argument)
        return _checked(function(argument, context) if takes_context else function(argument))

    return call


# Threads ------------------------------------------------------------------------------


async def run_in_thread(call: Callable[[], object], limiter: anyio.CapacityLimiter) -> object:
    """Run a plain function in a thread; a cancelled run ends when the thread does, not before (I4)."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    # The first to arrive, thread or cancellation, decides whether the function runs: `setdefault` is atomic.
    first: dict[str, str] = {}
    thread = ThreadRun()

    def work() -> object:
        if first.setdefault("came", "thread") != "thread":
            return None
        thread.ident = threading.get_ident()
        begin_thread()
        try:
            return _checked(call())
        finally:
            thread.ident = None
            with contextlib.suppress(RuntimeError):  # the event loop was closed, so no task is waiting
                loop.call_soon_threadsafe(ended.set)

    try:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except asyncio.CancelledError:
        if first.setdefault("came", "cancellation") == "thread":
            # The thread cannot be stopped. Its shard key stays occupied until the thread ends, so this run must too.
            await ended.wait()
        raise


def _checked(result: object) -> object:
    """Return the result of a plain function; fail the attempt if it is an awaitable: none of its code has run."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise HandlerError(
        f"the handler is a plain function and returned {type(result).__name__}, which is never awaited: declare "
        "it, and every function that wraps it, with 'async def'"
    )
