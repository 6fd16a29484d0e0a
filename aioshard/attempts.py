"""From a handler as its user wrote it to what runs one attempt of it: payloads, contexts, threads, middleware."""

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
"""What runs around it; see `Handlers.middleware`."""


class Provided(NamedTuple):
    """What attempts are given by the app."""

    state: Callable[[], Any]
    """Gives what the app's `resources` yielded."""
    publish: Publish
    """Publishes what handlers send."""
    replay: bool = False
    """What `Context.replay` says."""


class Attempts(NamedTuple):
    """What runs one attempt of a handler.

    `for_record` and `for_batch` are called once; what they give is called for each attempt.
    """

    function: Callable[..., Any]
    takes_context: bool
    payload: Payload | None
    timeout: float | None
    """Seconds, for `Context.deadline`."""
    threads: anyio.CapacityLimiter | None
    """For a plain function; None where it is awaited."""
    around: Sequence[Middleware]
    """The outermost first."""
    provided: Provided

    @property
    def is_plain(self) -> bool:
        """Whether an attempt is nothing but a call of the function with the record."""
        return self.threads is None and not self.takes_context and self.payload is None and not self.around

    def for_record(self) -> Callable[[Delivery], Awaitable[object]]:
        """What runs an attempt of one record."""
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
        """What runs an attempt of a batch."""
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
        """What makes the payloads of a batch before its attempt, where no middleware may change the records first."""
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
        """What runs the function for what *read* makes of a record, in its thread where it has one."""
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
        if getattr(made, "cr_frame", None) is not None:  # it has not come to its end
            _refuse_unawaited(layer, made)
        return result

    return surrounded


def _refuse_unawaited(layer: Middleware, made: Coroutine[Any, Any, object]) -> None:
    """Fail the attempt when a middleware is over before the handler: else it would be complete, and nothing done."""
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
    # Who comes first, the thread or a cancellation, decides whether the function runs: `setdefault` is atomic.
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
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    loop.call_soon_threadsafe(end)
        return result

    try:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
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
