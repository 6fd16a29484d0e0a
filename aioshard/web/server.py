"""A small server that runs an ASGI application in a thread with its own event loop; headers and error pages."""

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping

import anyio.to_thread
import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from aioshard.engine.tasks import finish
from aioshard.errors import PortError
from aioshard.web.connections import BACKLOG, Connection, end_waiting

logger = logging.getLogger("aioshard.web")

SAFE = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every response: it must not be cached, and pages of other sites must not get it."""

_SHUTDOWN_TIMEOUT = 1
"""Seconds that requests in flight get when the server stops."""
_THREAD_TIMEOUT = 5.0
"""Seconds after which a thread that does not end is abandoned: a request may hang in a user's collector."""


class Json(JSONResponse):
    """JSON of any text; also of lone surrogates, which file names and messages of exceptions may contain."""

    def render(self, content: object) -> bytes:
        """Return the body; a lone surrogate becomes its escape sequence, which is valid in JSON."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


async def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette calls it only for these
    sentence = "this path does not exist" if error.status_code == 404 else "this path does not support that method"  # noqa: PLR2004
    return Json({"error": sentence}, error.status_code, {**SAFE, **(error.headers or {})})


NOT_FOUND = {404: _not_found, 405: _not_found}
"""Exception handlers of an application, for unknown paths and methods."""


def routes_in_threads(answers: Mapping[str, Callable[[Request], Response]], *, threads: int) -> list[BaseRoute]:
    """Return a route for each path, whose response is computed in a worker thread.

    The threads are dedicated: those of the application may all be busy when you need a diagnosis.

    Args:
        answers: Computes the response of each path.
        threads: Number of responses computed at the same time.
    """
    limiter = anyio.CapacityLimiter(threads)

    async def endpoint(compute: Callable[[Request], Response], request: Request) -> Response:
        return await anyio.to_thread.run_sync(compute, request, limiter=limiter)

    return [Route(path, functools.partial(endpoint, compute)) for path, compute in answers.items()]


@contextlib.asynccontextmanager
async def serve_in_thread(application: ASGIApp, *, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
    """Serve an application in a thread while the context is open, independently of the caller's event loop.

    On a loopback address, only requests for *host*, `localhost`, `127.0.0.1` and `[::1]` are accepted, against DNS
    rebinding: another site could point its own name at this machine and read the responses.

    Args:
        application: Runs in the event loop of that thread, not in the caller's; without a lifespan.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.

    Yields:
        The address and port of the server; it accepts connections from here on.

    Raises:
        PortError: The address is in use or does not belong to this host.
    """
    listener = _listen(host, port)
    bound = listener.getsockname()[:2]
    if ipaddress.ip_address(bound[0]).is_loopback:
        application = TrustedHostMiddleware(
            application, [host, bound[0], "localhost", "127.0.0.1", "[::1]"], www_redirect=False
        )
    server = uvicorn.Server(
        uvicorn.Config(
            application,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
            http=Connection,
            backlog=BACKLOG,
        )
    )
    # A daemon thread: a process that exits must not wait for a request that hangs.
    thread = threading.Thread(target=_run, args=(server, listener), name="health server", daemon=True)
    thread.start()
    try:
        yield bound
    finally:
        server.should_exit = True
        await finish(asyncio.to_thread(thread.join, _THREAD_TIMEOUT), "health server ends")
        if thread.is_alive():
            logger.warning("the health server did not stop within %g s: a request hangs", _THREAD_TIMEOUT)
        else:  # otherwise its event loop still uses the socket
            listener.close()


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        asyncio.run(_serve(server, listener))
    except BaseException as error:
        logger.critical("the health server has failed; probes are not answered", exc_info=error)


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    ending = asyncio.create_task(end_waiting(server), name="health server ends connections")
    try:
        await server.serve(sockets=[listener])
    finally:
        ending.cancel()
    # The server leaves connections of abandoned requests open.
    for connection in tuple(server.server_state.connections):
        if (transport := connection.transport) is not None:
            transport.abort()
    await asyncio.sleep(0)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Listen before the server runs, so that an early probe waits for its response.
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # Connections inherit it: asyncio sets it only if the protocol is given explicitly, and without it a body that
        # follows its headers waits 40 ms for the peer.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        # Python appends the address to the system's message.
        system = None if isinstance(error, socket.gaierror) else error.errno
        reason = os.strerror(system) if system else error.strerror or str(error)
        raise PortError(
            f"the health server cannot listen on {host}:{port}: {reason}; "
            "choose another --health-port (0 takes a free one) or --host"
        ) from None
    return listener
