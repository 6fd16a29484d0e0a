"""Run one attempt of a handler: its context, payload, middleware and threads."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Self, cast

import anyio.to_thread
from typing_extensions import TypeVar

from aioshard.engine.current_record import begin_thread
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Attempt, Dependencies, Dependency, Handler
from aioshard.engine.lease import Lease
from aioshard.engine.outgoing import RunMessages
from aioshard.engine.pacing import ProcessSlots
from aioshard.engine.shards import DeliveryBatch
from aioshard.engine.stack import ThreadRun
from aioshard.engine.unawaited import AwaitedCall
from aioshard.engine.worker import AWAIT_IT, SERVING, refuse_awaitable
from aioshard.errors import BatchError, HandlerError, StateError
from aioshard.ports import Message, Partitioner, Publish
from aioshard.records import Record
from aioshard.schema_registry.formats import RegistryFormat
from aioshard.schema_registry.framing import SchemaId
from aioshard.schema_registry.registries import Reader, Registries, RegistryOutput
from aioshard.serde.payloads import Headers, decoded_by, message, payload_of

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

    def publish(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
        partitioner: Partitioner = "key",
        format: RegistryFormat | None = None,  # noqa: A002 - the name that users expect
    ) -> Coroutine[Any, Any, int]:
        """Publish as `App.publish` does; return the offset once the brokers have acknowledged.

        The handler's input is complete only after the handler has returned, so its messages are stored before the
        offsets of its input are committed. After a crash they may be published twice.

        With `processing_guarantee="exactly_once"`, return -1 immediately: the message becomes visible together with
        the offsets, or is dropped if this run fails.

        Await it: a run that drops the call without awaiting it fails.

        Raises:
            MessageError: The value cannot be encoded as JSON or in *format*, or the message is otherwise invalid.
            RegistryUnavailableError: The schema registry of *format* does not answer.
            TransportError: The message was not acknowledged, or is too large.
            StateError: With `exactly_once`, the run has ended.
        """
        content = value if format is None else None
        outgoing = message(topic, content, key=key, headers=headers, partition=partition, partitioner=partitioner)
        call = AwaitedCall("context.publish", topic)
        if format is not None:
            return self._publish_encoded(call, outgoing, value, format)
        return self._publish(call, outgoing)

    async def _publish(self, call: AwaitedCall, outgoing: Message) -> int:
        call.begin()
        return await self.publisher(outgoing)

    async def _publish_encoded(
        self, call: AwaitedCall, outgoing: Message, value: object, value_format: RegistryFormat
    ) -> int:
        call.begin()
        worker = SERVING.get(None)
        if worker is None or worker.registries is None:
            return await _no_app(outgoing)
        # Not a field of the context: each field costs 0.15 µs per record.
        content = await worker.registries.encode(value_format, outgoing.topic, value)
        return await self.publisher(outgoing._replace(value=content))


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


# The fields are frozen, so calling the class takes 2 µs longer than these, for each record.
_new_context: Any = object.__new__
_set_record: Any = Context.__dict__["record"].__set__
_set_attempt: Any = _Attempt.__dict__["attempt"].__set__
_set_deadline: Any = _Attempt.__dict__["deadline"].__set__
_set_revoked: Any = _Attempt.__dict__["revoked"].__set__
_set_replay: Any = _Attempt.__dict__["replay"].__set__
_set_state: Any = _Attempt.__dict__["state"].__set__
_set_publisher: Any = _Attempt.__dict__["publisher"].__set__


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

Layer = Callable[[CallNext], CallNext]
"""Wraps the call of a handler in another one."""


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
    registries: Registries | None = None
    """The schema registries of the app."""


class InProcesses(NamedTuple):
    """How the attempts of a handler run in worker processes."""

    number: int
    """How many processes there are."""
    run: Callable[..., Awaitable[object]]
    """Runs one attempt: as a `CallNext`, with its *timeout* in seconds, and *until_ours*; see `Processes.run`."""


def with_attempts(handler: Handler, provided: Provided, processes: InProcesses | None = None) -> Handler:
    """Return the handler with the functions that run its attempts, for one start of the app.

    Args:
        handler: The handler as registered.
        provided: Values from the app.
        processes: For a handler that runs in worker processes; without it, attempts run in a thread, one at a time.
    """
    if handler.run_in == "process":
        handler = _limited_by_processes(handler, processes)
    if _is_bare(handler):
        return handler._replace(call=handler.function)

    # 1. The schemas of its records, which are loaded when the first one arrives.
    reader = None
    if handler.taken is not None and handler.payload is not None and provided.registries is not None:
        reader = provided.registries.reader(handler.taken)
        handler = handler._replace(payload=handler.payload._replace(read=reader.read))

    # 2. The call of the function: here, in a thread, or in a worker process, which decodes the records itself.
    threads = None if handler.run_in == "loop" else anyio.CapacityLimiter(handler.concurrency)
    read = None if handler.payload is None else handler.payload.read
    call = _call_of(handler, read, threads) if processes is None else _call_in_processes(handler, processes)

    if reader is not None:
        call = _with_schemas(reader, call, is_batch=handler.batch is not None)

    # 3. The layers around it, from the inside to the outside.
    for layer in _layers(handler, provided):
        call = layer(call)

    # 4. The attempt, which creates the context if anything needs it.
    with_context = provided if _wants_context(handler) else None
    if handler.batch is None:
        invoke = _record_attempt(call, handler.timeout, with_context)
    else:
        call_decoded = _call_of(handler, None, threads)
        invoke = _batch_attempt(call, call_decoded, handler.timeout, with_context)

    # 5. The process, for which the attempt holds a slot. `call` applies the timeout: the wait for it does not count.
    if processes is not None:
        return handler._replace(invoke=_attempt_in_processes(invoke, handler), timeout=None, read=None)

    # 6. Batches are decoded before the attempt, unless a middleware expects the records.
    decodes_before = handler.batch is not None and not any(handler.middleware)
    return handler._replace(invoke=invoke, read=read if decodes_before else None)


def _is_bare(handler: Handler) -> bool:
    """Return whether the worker can call the function itself: it takes the record, on the event loop."""
    return (
        handler.run_in == "loop" and handler.payload is None and handler.batch is None and not _wants_context(handler)
    )


def _wants_context(handler: Handler) -> bool:
    """Return whether the function, or a layer around it, takes the context."""
    return (
        handler.takes_context
        or handler.dependencies is not None
        or handler.publish_to is not None
        or any(handler.middleware)
    )


def _layers(handler: Handler, provided: Provided) -> list[Layer]:
    """Return what runs around the call of a handler's function, from the inside to the outside.

    Publishing is outermost, so it belongs to the attempt: if it fails, the attempt has failed.
    """
    middleware = [function for level in handler.middleware for function in level]
    layers: list[Layer] = []
    if middleware:
        layers.append(_with_checked_result)
    layers += [functools.partial(_with_middleware, function) for function in reversed(middleware)]
    if handler.publish_to is not None:
        layers.append(functools.partial(_publishing_result, handler.publish_to, handler.output, provided.registries))
    return layers


def _limited_by_processes(handler: Handler, processes: InProcesses | None) -> Handler:
    """Return the handler with no more runs than there are processes: a further one would wait, and delay a drain.

    More workers than processes are of use only if an attempt outlasts its run: it publishes, or has a middleware.
    """
    # 1. Attempts run one at a time, in a thread.
    if processes is None:
        return handler._replace(concurrency=1)
    number = processes.number
    outlasts_run = handler.publish_to is not None or any(handler.middleware)
    # 2. There are more workers, and a worker is of use while another one's run has ended but not its attempt.
    if outlasts_run and handler.shards is None and handler.concurrency > number:
        return handler._replace(slots=ProcessSlots(number))
    # 3. More workers would only wait.
    return handler._replace(concurrency=min(handler.concurrency, number))


def _record_attempt(call: CallNext, timeout: float | None, provided: Provided | None) -> Attempt:
    if provided is None:
        return lambda delivery: call(delivery.record, None)

    def attempt(delivery: Delivery, publish: Publish) -> Awaitable[object]:
        context = _new_context(Context)
        _set_record(context, delivery.record)
        _set_attempt(context, delivery.failures + 1)
        _set_deadline(context, _deadline(timeout))
        _set_revoked(context, delivery.epoch.revoked)
        _set_replay(context, provided.replay)
        _set_state(context, provided.state())
        _set_publisher(context, publish)
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
        if batch.payloads is not None:
            return call_decoded(batch.payloads, context)
        return call(batch.records, context)

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
            if delivery.batch_offsets:
                delivery.batch_offsets = ()
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
        if len(deliveries) > 1:
            deliveries[0].batch_offsets = [delivery.record.offset for delivery in deliveries]
        return result

    return run


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def _call_of(handler: Handler, read: Callable[[Record], Any] | None, threads: anyio.CapacityLimiter | None) -> CallNext:
    """Return a function that calls the handler, in a thread if necessary, with records decoded by *read*."""
    if handler.dependencies is not None:
        return _InjectedHandler(handler, handler.dependencies, read, threads).call_next
    function = handler.function

    def without_context(argument: Any, _context: Any) -> Any:
        return function(argument)

    run: Callable[[Any, Any], Any] = function if handler.takes_context else without_context

    def in_thread(call: Callable[[Any, Any], Any]) -> CallNext:
        if threads is None:
            return call
        return lambda argument, context: run_in_thread(lambda: _checked(call(argument, context)), threads)

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


def _with_checked_result(call: CallNext) -> CallNext:
    """Return a function that refuses an awaitable as the result, which a middleware might drop."""

    async def run(argument: Any, context: Any) -> object:
        result = await call(argument, context)
        if result is not None:
            refuse_awaitable(result, AWAIT_IT)
        return result

    return run


def _with_middleware(function: Middleware, call: CallNext) -> CallNext:
    async def wrapped(argument: Any, context: Any) -> object:
        coroutines: list[Any] = []

        def call_next(argument: Any, context: Any) -> Any:
            coroutine = call(argument, context)
            coroutines.append(coroutine)
            return coroutine

        try:
            result = await function(argument, context, call_next)
        except BaseException:
            await _outlast(functools.partial(_have_ended, coroutines))
            raise
        if all(getattr(coroutine, "cr_frame", None) is None for coroutine in coroutines):  # they have finished
            return result
        for coroutine in coroutines:
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
        await _outlast(functools.partial(_have_ended, coroutines))
        # Otherwise the record would complete unprocessed.
        name = getattr(function, "__name__", type(function).__name__)
        raise HandlerError(
            f"middleware {name!r} returned before the handler had ended: "
            "await the result of call_next, as in 'return await call_next(record, context)'"
        )

    return wrapped


def _publishing_result(
    topic: str, output: RegistryOutput | None, registries: Registries | None, call: CallNext
) -> CallNext:
    """Return a function that publishes what *call* returns, before its record is complete."""

    async def run(record: Record, context: Context) -> object:
        result: Any = await call(record, context)
        if result is not None:
            refuse_awaitable(result, AWAIT_IT)
        for outgoing in _outgoing_of(result, topic, record):
            await context.publisher(outgoing)
        return result

    if output is None or registries is None:
        return run
    return _with_output_schema(topic, output, registries, call)


def _with_output_schema(topic: str, output: RegistryOutput, registries: Registries, call: CallNext) -> CallNext:
    """Return the same for a handler whose results are encoded with a schema registry."""

    async def run(record: Record, context: Context) -> object:
        # First, so that a registry that does not answer does not repeat what the handler has done.
        if not registries.is_prepared(output, topic):
            context = await _after_waiting(registries.prepare(output, topic), f"the schema of topic {topic}", context)
        result: Any = await call(record, context)
        if result is not None:
            refuse_awaitable(result, AWAIT_IT)
        content = result
        if result is not None and not _names_topics(result):
            content = await registries.encode(output.format, topic, result)
        for outgoing in _outgoing_of(content, topic, record):
            await context.publisher(outgoing)
        return result

    return run


def _outgoing_of(result: Any, topic: str, record: Record) -> Sequence[Message]:
    """Return the messages to publish for the result of a handler."""
    # 1. There is nothing to publish.
    if result is None:
        return ()
    # 2. It chose topics and keys itself.
    if _names_topics(result):
        return (result,) if isinstance(result, Message) else result
    # 3. It returned a value, which may be a list.
    return (message(topic, result, key=record.key),)


def _names_topics(result: Any) -> bool:
    """Return whether a handler returned messages, each with its own topic, instead of a value."""
    if isinstance(result, Message):
        return True
    return isinstance(result, list | tuple) and all(isinstance(output, Message) for output in result)


# Schemas --------------------------------------------------------------------------------


def _with_schemas(reader: Reader, call: CallNext, *, is_batch: bool) -> CallNext:
    """Return a function that loads the schemas of records first, if they are not known yet.

    Innermost, because a middleware may replace the record.
    """

    def run(argument: Any, context: Any) -> Awaitable[object]:
        if not is_batch:
            schema = reader.missing(argument)
            return call(argument, context) if schema is None else load_and_call([schema], argument, context)
        missing = [schema for record in argument if (schema := reader.missing(record)) is not None]
        return load_and_call(missing, argument, context) if missing else call(argument, context)

    async def load_and_call(schemas: list[SchemaId], argument: Any, context: Any) -> object:
        named = ", ".join(map(str, dict.fromkeys(schemas)))
        context = await _after_waiting(reader.load(schemas), f"schema {named} of {reader.address}", context)
        return await call(argument, context)

    return run


async def _after_waiting(loading: Awaitable[object], what: str, context: Any) -> Any:
    """Wait for a schema registry; return the context with a deadline that does not count the wait.

    Args:
        loading: Awaited once.
        what: The awaited thing in words, for explanations.
        context: The context of the attempt; None if the handler takes none.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    with SERVING.get().waiting_for(what):
        await loading
    if context is None or context.deadline is None:
        return context
    return dataclasses.replace(context, deadline=context.deadline + clock() - began)


# Dependencies -------------------------------------------------------------------------


class _InjectedHandler:
    """Calls a handler with its dependencies, which are open meanwhile."""

    def __init__(
        self,
        handler: Handler,
        dependencies: Dependencies,
        read: Callable[[Record], Any] | None,
        threads: anyio.CapacityLimiter | None,
    ) -> None:
        """Prepare the calls of `call_next`.

        Args:
            handler: The handler.
            dependencies: Its dependencies.
            read: Decodes a record; None if the argument needs no decoding.
            threads: Limits the threads of a plain handler; None for one that runs on the event loop.
        """
        self._function = handler.function
        self._dependencies = dependencies
        self._read = read
        self._is_batch = handler.batch is not None
        self._is_decoded = read is None and handler.payload is not None
        """Whether the argument is not the record, or the records, but decoded already."""
        self._decodes_async = read is not None and handler.payload is not None and handler.payload.is_async
        self._is_async = threads is None
        self._threads = anyio.CapacityLimiter(handler.concurrency) if threads is None else threads

    @property
    def call_next(self) -> CallNext:
        """The function that runs an attempt."""
        if self._is_async or self._decodes_async or not self._dependencies.are_plain:
            return self._run
        return self._run_in_thread

    def _run_in_thread(self, argument: Any, context: Any) -> Awaitable[object]:
        return run_in_thread(functools.partial(self._run_in_this_thread, argument, context), self._threads)

    def _run_in_this_thread(self, argument: Any, context: Any) -> object:
        """Run a plain handler with its plain dependencies: some connections work only in the thread that opens them."""
        values = [self._decode(argument), self._records(argument, context), context]
        result: object = None
        partly_failed: BatchError | None = None
        with contextlib.ExitStack() as stack:
            for dependency in self._dependencies.calls:
                values.append(_opened(dependency, values, stack))
            try:
                result = self._call_plain(values)
            except BatchError as error:
                partly_failed = self._after_closing(error)
        if partly_failed is not None:
            raise partly_failed
        return result

    async def _run(self, argument: Any, context: Any) -> object:
        """Run a handler or dependencies on the event loop, and plain functions in threads."""
        values = [await self._decode_on_loop(argument), self._records(argument, context), context]
        result: object = None
        partly_failed: BatchError | None = None
        async with contextlib.AsyncExitStack() as stack:
            for dependency in self._dependencies.calls:
                values.append(await _opened_on_loop(dependency, values, stack, self._threads))
            try:
                result = await self._call(values)
            except BatchError as error:
                partly_failed = self._after_closing(error)
        if partly_failed is not None:
            raise partly_failed
        return result

    def _after_closing(self, error: BatchError) -> BatchError:
        """Return the error of a batch, to be raised when dependencies are closed; raise that of a single record now.

        The records that a `BatchError` does not name are complete: a dependency that rolled back would lose them.
        """
        if not self._is_batch:
            raise error
        return error

    async def _call(self, values: Sequence[Any]) -> object:
        if not self._is_async:
            return await run_in_thread(lambda: self._call_plain(values), self._threads)
        result = await self._function(values[0], **_taken(self._dependencies.arguments, values))
        if result is not None:
            refuse_awaitable(result, AWAIT_IT)  # here, so that dependencies see the error
        return cast("object", result)

    def _call_plain(self, values: Sequence[Any]) -> object:
        return _checked(self._function(values[0], **_taken(self._dependencies.arguments, values)))

    def _records(self, argument: Any, context: Any) -> Any:
        return list(context.records) if self._is_decoded else argument

    async def _decode_on_loop(self, argument: Any) -> Any:
        if self._decodes_async:
            return await self._decode(argument)
        if self._is_async or self._read is None:
            return self._decode(argument)
        return await run_in_thread(lambda: self._decode(argument), self._threads)

    def _decode(self, argument: Any) -> Any:
        if self._read is None:
            return argument
        if self._is_batch:
            return [self._read(record) for record in argument]
        return self._read(argument)


def _taken(arguments: Mapping[str, int], values: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a handler or a dependency; see `Dependency.arguments`."""
    return {name: values[number] for name, number in arguments.items()}


def _opened(dependency: Dependency, values: Sequence[Any], stack: contextlib.ExitStack) -> Any:
    """Call a plain dependency in this thread; return its value, which is closed with *stack*."""
    arguments = _taken(dependency.arguments, values)
    if dependency.kind == "plain":
        return _plain_value(dependency, arguments)
    manager = dependency.call(**arguments)
    value = manager.__enter__()

    def close(*error: Any) -> bool:
        manager.__exit__(*error)
        return False  # a dependency sees the error, but cannot swallow it: the record would be complete

    stack.push(close)
    return value


async def _opened_on_loop(
    dependency: Dependency, values: Sequence[Any], stack: contextlib.AsyncExitStack, threads: anyio.CapacityLimiter
) -> Any:
    """Call a dependency on the event loop, or in a thread if it is plain; its value is closed with *stack*."""
    arguments = _taken(dependency.arguments, values)
    match dependency.kind:
        case "async":
            return await dependency.call(**arguments)
        case "plain":
            return await run_in_thread(functools.partial(_plain_value, dependency, arguments), threads)
        case "generator":
            return await _opened_in_thread(dependency.call(**arguments), stack, threads)
    manager = dependency.call(**arguments)
    value = await manager.__aenter__()

    async def close(*error: Any) -> bool:
        await manager.__aexit__(*error)
        return False  # as in `_opened`

    stack.push_async_exit(close)
    return value


async def _opened_in_thread(
    manager: contextlib.AbstractContextManager[Any], stack: contextlib.AsyncExitStack, threads: anyio.CapacityLimiter
) -> Any:
    """Open a plain generator in a thread; it is closed with *stack*, even if the attempt is cancelled meanwhile."""
    opened: list[Any] = []

    async def close(*error: Any) -> bool:
        if opened:
            await run_to_end(functools.partial(manager.__exit__, *error), threads)
        return False  # as in `_opened`

    stack.push_async_exit(close)  # first: a cancelled attempt waits for the thread, which may open it nevertheless
    await run_in_thread(lambda: opened.append(manager.__enter__()), threads)
    return opened[0]


def _plain_value(dependency: Dependency, arguments: Mapping[str, Any]) -> Any:
    value = dependency.call(**arguments)
    if inspect.iscoroutine(value):
        value.close()
        name = getattr(dependency.function, "__name__", type(dependency.function).__name__)
        raise HandlerError(
            f"dependency {name!r} returned a coroutine, which is never awaited: declare it, and every function that "
            "wraps it, with 'async def'"
        )
    return value


# Processes ----------------------------------------------------------------------------


def _attempt_in_processes(attempt: Attempt, handler: Handler) -> Attempt:
    """Return attempts that hold a slot from their start, at most until they end."""
    slots = handler.slots
    if slots is None:
        return attempt

    async def run(argument: Any) -> object:
        worker = SERVING.get(None)
        slots.take(worker)
        try:
            return await attempt(argument)
        finally:
            slots.release(worker)

    return run


def _call_in_processes(handler: Handler, processes: InProcesses) -> CallNext:
    """Return a function that calls the handler in a process, and releases the slot as soon as that has returned."""
    slots = handler.slots
    timeout = handler.timeout

    async def run(argument: Any, context: Any) -> object:
        worker = SERVING.get()
        try:
            return await processes.run(argument, context, timeout=timeout, until_ours=worker.lease.wait)
        finally:
            if slots is not None:
                slots.release(worker)

    return run


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

    def decoded(argument: Any) -> Any:
        if payload is None:
            return argument
        if is_batch:
            return [payload.read(record) for record in argument]
        return payload.read(argument)

    def call(argument: Any, context: Any) -> object:
        if context is not None:
            deadline = None if timeout is None else time.monotonic() + timeout
            object.__setattr__(context, "deadline", deadline)
        argument = decoded(argument)
        if takes_context:
            return _checked(function(argument, context))
        return _checked(function(argument))

    return call


# Runs that cannot be stopped ------------------------------------------------------------

_CHECK_INTERVAL = 0.02
"""Seconds between checks of a handler that still runs in a task of its middleware: nothing signals its end."""


async def _outlast(is_over: Callable[[], bool], ended: asyncio.Event | None = None) -> None:
    """Wait until a run is over, so that no other run of its shard key begins (I4).

    A revoked partition may cancel an attempt that its timeout has cancelled already. So no cancellation ends the wait,
    nor does one of anyio, which is repeated in each iteration of the event loop. Only the end of the app does.

    Args:
        is_over: Returns whether the run has ended.
        ended: Is set when it ends; without it, this function checks repeatedly.
    """
    worker = SERVING.get(None)
    with anyio.CancelScope(shield=True):
        while not is_over() and (worker is None or not worker.abandoned):
            try:
                if ended is None:
                    await asyncio.sleep(_CHECK_INTERVAL)
                else:
                    await ended.wait()
            except asyncio.CancelledError:
                if worker is None:
                    raise


def _have_ended(coroutines: Iterable[Any]) -> bool:
    """Return whether none of these coroutines runs; one that never started does not."""
    return not any(
        inspect.iscoroutine(coroutine)
        and inspect.getcoroutinestate(coroutine) in {inspect.CORO_RUNNING, inspect.CORO_SUSPENDED}
        for coroutine in coroutines
    )


# Threads ------------------------------------------------------------------------------


_NOT_OURS: Final = object()
"""Result of a thread that has called nothing, because other members may own our partitions."""


async def run_in_thread(call: Callable[[], object], limiter: anyio.CapacityLimiter) -> object:
    """Run a plain function in a thread; a cancelled run ends when the thread does, not before (I4).

    The event loop may be blocked before the thread begins. So the thread itself looks whether our partitions are still
    ours, and the run waits if they are not.
    """
    worker = SERVING.get(None)
    lease = None if worker is None else worker.lease
    while True:
        result = await _in_thread(call, limiter, lease)
        if result is not _NOT_OURS or lease is None:
            return result
        await lease.wait()


async def _in_thread(call: Callable[[], object], limiter: anyio.CapacityLimiter, lease: Lease | None) -> object:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    # The first to arrive, thread or cancellation, decides whether the function runs: `setdefault` is atomic.
    first: dict[str, str] = {}
    thread = ThreadRun()

    def work() -> object:
        if lease is not None and not lease.is_held:
            return _NOT_OURS
        if first.setdefault("came", "thread") != "thread":
            return None
        thread.ident = threading.get_ident()
        begin_thread()
        try:
            return call()
        finally:
            thread.ident = None
            with contextlib.suppress(RuntimeError):  # the event loop was closed, so no task is waiting
                loop.call_soon_threadsafe(ended.set)

    try:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except asyncio.CancelledError:
        if first.setdefault("came", "cancellation") == "thread":
            # The thread cannot be stopped. Its shard key stays occupied until the thread ends, so this run must too.
            await _outlast(ended.is_set, ended)
        raise


async def run_to_end(call: Callable[[], object], limiter: anyio.CapacityLimiter) -> None:
    """Run a plain function in a thread even if the task is cancelled before the thread begins."""
    begun = False
    cancelled: asyncio.CancelledError | None = None

    def work() -> None:
        nonlocal begun
        begun = True
        call()

    with anyio.CancelScope(shield=True):
        while not begun:
            try:
                await _in_thread(work, limiter, None)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def _checked(result: object) -> object:
    """Return the result of a plain function, unless it is an awaitable."""
    refuse_awaitable(result, "declare it, and every function that wraps it, with 'async def'")
    return result
