"""Build the function that runs one attempt of a handler: payloads, contexts, threads, middleware."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, cast

import anyio
import anyio.to_thread

from aioshard.context import BatchContext, Context
from aioshard.engine.batches.delivery_batch import DeliveryBatch
from aioshard.engine.epoch import Delivery
from aioshard.engine.failing.recourse import Publish
from aioshard.engine.insight.stack import ThreadRun
from aioshard.errors import HandlerError
from aioshard.records import Record
from aioshard.serde.payloads import Payload

__all__ = ["Attempts", "Call", "Middleware", "Provided", "run_in_thread"]

Call = Callable[[Any, Any], Awaitable[object]]
"""Runs the handler for a record, or a list of them, in a context."""
Middleware = Callable[[Any, Any, Call], Awaitable[object]]
"""A function that runs around the handler; see `Handlers.middleware`."""


class Provided(NamedTuple):
    """Values from the app that attempts use."""

    state: Callable[[], Any]
    """Returns the value that the app's `resources` yielded."""
    publish: Publish
    """Publishes the messages of handlers."""
    replay: bool = False
    """Value of `Context.replay`."""


class Attempts(NamedTuple):
    """Builds the functions that run one attempt of a handler.

    `for_record` and `for_batch` are called once; the functions they return are called for each attempt.
    """

    function: Callable[..., Any]
    takes_context: bool
    payload: Payload | None
    timeout: float | None
    """Seconds, for `Context.deadline`."""
    threads: anyio.CapacityLimiter | None
    """For a plain function; None if it is awaited."""
    around: Sequence[Middleware]
    """Outermost first."""
    provided: Provided

    @property
    def is_plain(self) -> bool:
        """Whether an attempt only calls the function with the record."""
        return self.threads is None and not self.takes_context and self.payload is None and not self.around

    def for_record(self) -> Callable[[Delivery], Awaitable[object]]:
        """Return the function that runs an attempt of one record."""
        call = self._surrounded(self._call(None if self.payload is None else self.payload.read))
        if not self._wants_context:
            return lambda delivery: call(delivery.record, None)
        state, publish, replay = self.provided

        def attempt(delivery: Delivery) -> Awaitable[object]:
            record, attempt = delivery.record, delivery.failures + 1
            revoked = delivery.epoch.revoked
            return call(record, Context(record, attempt, self._deadline(), revoked, replay, state(), publish))

        return attempt

    def for_batch(self) -> Callable[[DeliveryBatch], Awaitable[object]]:
        """Return the function that runs an attempt of a batch."""
        payload = self.payload
        each = None if payload is None else _for_each(payload.read)
        call = self._surrounded(self._call(each))
        decoded = self._call(None)
        state, publish, replay = self.provided

        def attempt(batch: DeliveryBatch) -> Awaitable[object]:
            context = None
            if self._wants_context:
                attempt = batch.deliveries[0].failures + 1
                deadline, revoked = self._deadline(), batch.revoked
                context = BatchContext(attempt, deadline, revoked, replay, state(), publish, tuple(batch.records))
            if batch.payloads is not None:
                return decoded(batch.payloads, context)
            return call(batch.records, context)

        return attempt

    @property
    def read_ahead(self) -> Callable[[Record], Any] | None:
        """The function that decodes a batch before its attempt; None if nothing is decoded or middleware runs."""
        return None if self.payload is None or self.around else self.payload.read

    @property
    def _wants_context(self) -> bool:
        return self.takes_context or bool(self.around)

    def _deadline(self) -> float | None:
        return None if self.timeout is None else asyncio.get_running_loop().time() + self.timeout

    def _surrounded(self, call: Call) -> Call:
        for layer in reversed(self.around):
            call = _around(layer, call)
        return call

    def _call(self, read: Callable[[Any], Any] | None) -> Call:
        """Return a call of the function with the result of *read*, in a thread if it needs one."""
        function, threads, takes_context = self.function, self.threads, self.takes_context

        def run(given: Any, context: Any) -> Any:
            payload = given if read is None else read(given)
            return function(payload, context) if takes_context else function(payload)

        if read is not None and self.payload is not None and self.payload.is_async:
            decode = read
            bare = self._call(None)

            async def decoded(given: Any, context: Any) -> object:
                return await bare(await decode(given), context)

            return decoded
        if threads is None:
            return run
        return lambda given, context: run_in_thread(functools.partial(run, given, context), threads)


def _around(layer: Middleware, call: Call) -> Call:
    async def surrounded(given: Any, context: Any) -> object:
        made: Any = None

        def call_next(given: Any, context: Any) -> Awaitable[object]:
            nonlocal made
            made = call(given, context)
            return cast("Awaitable[object]", made)

        result = await layer(given, context, call_next)
        if getattr(made, "cr_frame", None) is not None:  # the coroutine has not finished
            _refuse_unawaited(layer, made)
        return result

    return surrounded


def _refuse_unawaited(layer: Middleware, made: Coroutine[Any, Any, object]) -> None:
    """Fail the attempt if a middleware ends before the handler; otherwise the record would complete unprocessed."""
    if inspect.getcoroutinestate(made) == inspect.CORO_CREATED:
        made.close()
    name = getattr(layer, "__name__", type(layer).__name__)
    raise HandlerError(
        f"middleware {name!r} returned before the handler had ended: await what call_next gives, as in "
        "'return await call_next(record, context)'"
    )


def _for_each(read: Callable[[Record], Any]) -> Callable[[Sequence[Record]], list[Any]]:
    return lambda records: [read(record) for record in records]


# Threads ------------------------------------------------------------------------------


async def run_in_thread(call: Callable[[], object], limiter: anyio.CapacityLimiter) -> object:
    """Run a plain function in a thread; a cancelled run ends when the thread does, not before (I4)."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    # The first to arrive, thread or cancellation, decides whether the function runs: `setdefault` is atomic.
    first: dict[str, str] = {}
    thread = ThreadRun()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def work() -> object:
        result = None
        if first.setdefault("came", "thread") == "thread":
            thread.begins()
            try:
                result = call()
                _refuse_awaitable(result)
            finally:
                thread.ends()
                with contextlib.suppress(RuntimeError):  # the event loop was closed, so no task is waiting
                    loop.call_soon_threadsafe(end)
        return result

    try:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except asyncio.CancelledError:
        if first.setdefault("came", "cancellation") == "thread":
            # The thread cannot be stopped. Its shard key stays occupied until the thread ends, so this run must too.
            await asyncio.wait([ended])
        raise


def _refuse_awaitable(result: object) -> None:
    """Fail the attempt if a plain function returned an awaitable: none of its code has run."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        message = (
            f"the handler is a plain function and returned {type(result).__name__}, which nobody awaits: declare it, "
            "and every function that wraps it, with 'async def'"
        )
        raise HandlerError(message)
