"""HTTP to a local process over its Unix socket: one request, one response, with a timeout."""

import asyncio
from typing import NamedTuple

try:
    import h11
except ImportError as error:
    from aioshard.errors import MissingExtraError

    raise MissingExtraError("asking workers", "web") from error

__all__ = ["NoAnswerError", "WorkerAnswer", "ask_worker"]

_LARGEST = 256 * 1024 * 1024


class NoAnswerError(Exception):
    """No HTTP response arrived in time; the message says what happened."""


class WorkerAnswer(NamedTuple):
    """The response of a worker."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


async def ask_worker(
    path: str,
    target: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    within: float = 2.0,
) -> WorkerAnswer:
    """Send a request to the process that listens on a Unix socket.

    Args:
        path: Path of the socket.
        target: Request target, with a leading slash.
        method: HTTP method.
        headers: Headers in addition to those that HTTP requires.
        body: Request body.
        within: Timeout in seconds for the whole exchange.

    Raises:
        NoAnswerError: No complete response arrived.
    """
    try:
        async with asyncio.timeout(within):
            return await _ask(path, target, method, headers or {}, body)
    except TimeoutError:
        raise NoAnswerError(f"no answer within {within:g} s") from None
    except OSError as error:
        raise NoAnswerError(error.strerror or type(error).__name__) from None
    except RuntimeError:
        # uvloop raises this for a connection that was lost before everything was written.
        raise NoAnswerError("the connection was lost") from None
    except h11.RemoteProtocolError as error:
        raise NoAnswerError(f"something that is no HTTP: {error}") from None


async def _ask(path: str, target: str, method: str, headers: dict[str, str], body: bytes) -> WorkerAnswer:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        connection = h11.Connection(h11.CLIENT)
        sent = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **headers}
        for event in (
            h11.Request(method=method, target=target, headers=list(sent.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        return await _answer(connection, reader)
    finally:
        writer.transport.abort()


async def _answer(connection: h11.Connection, reader: asyncio.StreamReader) -> WorkerAnswer:
    response: h11.Response | None = None
    received = bytearray()
    while True:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(64 * 1024))
            case h11.Response():
                response = event
            case h11.Data():
                received += event.data
                if len(received) > _LARGEST:
                    raise NoAnswerError("an answer without end")
            case h11.EndOfMessage() if response is not None:
                found = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
                return WorkerAnswer(response.status_code, found, bytes(received))
            case h11.InformationalResponse():
                pass
            case _:
                raise NoAnswerError("the connection was closed")
