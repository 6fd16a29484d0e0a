"""An app within a web server: its lifespan, and stopping the server when the app has failed."""

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
"""What FastAPI and Starlette take: called with the ASGI application, entered at start-up, left at shutdown."""


def embedded(
    app: AbstractAsyncContextManager[Any],
    lifespan: Callable[[Any], Any] | None,
    failing: Callable[[], asyncio.Future[None]] | None,
) -> Lifespan:
    """A lifespan in which *app* runs.

    Args:
        app: Entered within *lifespan*, so that its handlers have what that opens until the last of them has ended.
        lifespan: The user's own; what it yields goes to the server.
        failing: Gives what ends with an error when the app has failed, where the server is to be stopped then.

    Raises:
        HandlerError: *lifespan* cannot be one.
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
        return contextlib.asynccontextmanager(lifespan)  # FastAPI takes these too
    if not callable(lifespan) or inspect.iscoroutinefunction(lifespan):
        raise HandlerError(
            f"embed({lifespan!r}): a lifespan was expected, a function of the ASGI application that is decorated with "
            "@contextlib.asynccontextmanager"
        )
    found: Lifespan = lifespan
    return found


@contextlib.contextmanager
def _stopping_server(failed: asyncio.Future[None]) -> Iterator[None]:
    """While the context is open, a failure of the app stops the server; not while the server stops already."""
    failed.add_done_callback(_stop_server)
    try:
        yield
    finally:
        failed.remove_done_callback(_stop_server)


def _stop_server(_: asyncio.Future[None]) -> None:
    """What an operator would do: SIGTERM to this process, which every server takes as the wish to stop in order."""
    if signal.getsignal(signal.SIGTERM) in {signal.SIG_DFL, None}:
        # It would end the process on the spot, with requests in progress: in a test, or where a thread serves.
        logger.error("the server is not stopped: nothing in this process handles SIGTERM")
        return
    logger.error("the server is told to stop (SIGTERM), because the app has failed")
    os.kill(os.getpid(), signal.SIGTERM)
