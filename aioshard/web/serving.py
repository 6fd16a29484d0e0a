"""A small server that runs an ASGI application in a thread with its own event loop."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator

from aioshard.engine.tasks import finish
from aioshard.errors import AioshardError, MissingExtraError

try:
    import uvicorn
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

    from aioshard.web.answers import SAFE
except ImportError as error:
    raise MissingExtraError("the health server", "web") from error

__all__ = ["PortError", "serve_in_thread"]

logger = logging.getLogger("aioshard.web")

_BACKLOG = 128
_STOPS_WITHIN = 1
"""Seconds that requests in flight get when the server stops."""
_ENDS_WITHIN = 5.0
"""Seconds after which a thread that does not end is abandoned: a request may hang in a user's collector."""


class PortError(AioshardError):
    """The address of the health server cannot be used."""


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: they belong to the process that runs the app."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _OwnNames:
    """Accepts only `localhost`, the given name and IP addresses in the header `Host`, against DNS rebinding.

    Another site can point its own name at this machine and read the responses. It cannot do that with an IP address,
    so every address is accepted: a proxy in the pod may forward the pod's own address.
    """

    def __init__(self, application: ASGIApp, host: str) -> None:
        self._application = application
        self._names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, or refuse it with 403."""
        application = self._application
        # A browser always sends the header; a probe using HTTP 1.0 may not.
        asked = [value.decode("latin-1").lower() for name, value in scope.get("headers", ()) if name == b"host"]
        if not all(map(self._is_own, asked)):
            sentence = "host not allowed: use http://localhost, or listen on another address with --host"
            application = JSONResponse({"error": sentence}, status_code=403, headers=SAFE)
        await application(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


@contextlib.asynccontextmanager
async def serve_in_thread(
    application: ASGIApp, *, host: str, port: int, uds: str | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Serve an application in a thread while the context is open, independently of the caller's event loop.

    On a loopback address, requests for names other than `localhost`, *host* and IP addresses are refused.

    Args:
        application: Runs in the event loop of that thread, not in the caller's; without a lifespan.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        uds: Path of a Unix socket to listen on, in place of host and port. Only this user may connect.

    Yields:
        The address and port of the server, or the path and 0; it accepts connections from here on.

    Raises:
        PortError: The address is in use or does not belong to this host.
    """
    listener = _listen(host, port) if uds is None else _listen_on_path(uds)
    if uds is None and ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        application = _OwnNames(application, host)
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=_STOPS_WITHIN
    )
    server = _Server(config)
    # A daemon: a terminating process must not wait for a request that hangs.
    thread = threading.Thread(target=_run, args=(server, listener), name="health server", daemon=True)
    try:
        bound = (uds, 0) if uds is not None else listener.getsockname()[:2]
        thread.start()
        yield bound
    finally:
        server.should_exit = True
        await finish(_until_ended(thread), "health server ends")
        if not thread.is_alive():  # otherwise its event loop still uses it
            listener.close()
        if uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(uds)  # noqa: PTH108 - same path as bound


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        asyncio.run(_serve(server, listener))
    except BaseException as error:
        logger.critical("the health server has ended, and no probe is answered any more", exc_info=error)


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    await server.serve(sockets=[listener])
    # The server leaves connections of abandoned requests open.
    for connection in tuple(server.server_state.connections):
        if (transport := connection.transport) is not None:
            transport.abort()
    await asyncio.sleep(0)


async def _until_ended(thread: threading.Thread) -> None:
    if thread.ident is not None:
        await asyncio.to_thread(thread.join, _ENDS_WITHIN)
    if thread.is_alive():
        logger.warning("the health server has not ended within %g s: a request hangs", _ENDS_WITHIN)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Listen before the server runs, so that an early probe waits for its response.
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Connections inherit it: asyncio sets it only if the protocol is given explicitly, and without it a body that
        # follows its headers waits 40 ms for the peer.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise PortError(
            f"the health server cannot listen on {host}:{port}: {_reason(error)}; "
            "choose another --health-port (0 takes a free one) or --host"
        ) from None
    return listener


def _reason(error: OSError) -> str:
    """Return the system's message alone: Python appends the address, which our message already contains."""
    system = error.errno if not isinstance(error, socket.gaierror) else None
    return os.strerror(system) if system else error.strerror or str(error)


def _listen_on_path(path: str) -> socket.socket:
    """Bind a Unix socket; remove one left behind by a dead process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left(path)
        listener.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # noqa: PTH101 - before anybody can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortError(
            f"the health server cannot listen on the socket {path}: {error.strerror or error}; "
            "give a path of at most 100 characters in a directory that exists, which no other process listens on"
        ) from None
    return listener


def _remove_left(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116
            return  # not ours to remove: binding will report it
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # noqa: PTH108
