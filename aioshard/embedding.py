"""Run an app inside a web server: its lifespan, and stopping the server when the app has failed."""

import asyncio
import contextlib
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from aioshard.errors import HandlerError

__all__ = ["Lifespan", "embedded"]

logger = logging.getLogger("aioshard.app")

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]
"""A lifespan of FastAPI and Starlette: called with the ASGI application, entered at startup, left at shutdown."""


def embedded(
    app: AbstractAsyncContextManager[Any],
    lifespan: Callable[[Any], Any] | None,
    failing: Callable[[], asyncio.Future[None]] | None,
) -> Lifespan:
    """Return a lifespan in which *app* runs.

    Args:
        app: Entered within *lifespan*, so that the resources opened there are available to its handlers until the last
            one has ended.
        lifespan: The user's own lifespan; the server receives the value that it yields.
        failing: Returns a future that fails with the app; given if the server should stop in that case.

    Raises:
        HandlerError: *lifespan* is not a valid lifespan.
    """
    own = None if lifespan is None else _checked(lifespan)

    @contextlib.asynccontextmanager
    async def within(asgi_app: Any) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            state = None if own is None else await stack.enter_async_context(own(asgi_app))
            await stack.enter_async_context(app)
            if failing is not None:
                stack.enter_context(_stopping_server(failing()))
            yield state

    return within


def _checked(lifespan: Any) -> Lifespan:
    if inspect.isasyncgenfunction(lifespan):
        return contextlib.asynccontextmanager(lifespan)  # FastAPI accepts these too
    if not callable(lifespan) or inspect.iscoroutinefunction(lifespan):
        raise HandlerError(
            f"embed({lifespan!r}): a lifespan was expected, a function of the ASGI application that is decorated with "
            "@contextlib.asynccontextmanager"
        )
    found: Lifespan = lifespan
    return found


@contextlib.contextmanager
def _stopping_server(failed: asyncio.Future[None]) -> Iterator[None]:
    """Stop the server if the app fails while the context is open, but not while the server is already stopping."""
    failed.add_done_callback(_stop_server)
    try:
        yield
    finally:
        failed.remove_done_callback(_stop_server)


def _stop_server(_: asyncio.Future[None]) -> None:
    """Send SIGTERM to this process, as an operator would: every server handles it as a graceful shutdown."""
    if signal.getsignal(signal.SIGTERM) in {signal.SIG_DFL, None}:
        # SIGTERM would kill the process with requests in flight: in a test, or if a thread runs the server.
        logger.error("the server is not stopped: nothing in this process handles SIGTERM")
        return
    logger.error("the server is told to stop (SIGTERM), because the app has failed")
    os.kill(os.getpid(), signal.SIGTERM)
