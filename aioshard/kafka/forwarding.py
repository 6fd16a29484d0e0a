"""Forward a chosen port on 127.0.0.1 to another one."""

import asyncio
import contextlib
import os

from aioshard.errors import TransportError

__all__ = ["Forwarder"]

_CHUNK = 256 * 1024


class Forwarder:
    """Accepts connections on a port and forwards each one, byte for byte, to a target.

    Owned by one event loop. Connections that arrive before the target is known wait for it.
    """

    def __init__(self, port: int) -> None:
        """Make a forwarder; does not listen yet.

        Args:
            port: The port on 127.0.0.1 to listen on; 0 picks a free one.
        """
        self.port = port
        """The port, once `open` has returned."""
        self._target: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start listening.

        Raises:
            TransportError: The port is in use, or this user may not listen on it.
        """
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=_CHUNK)
        except OSError as error:
            # Python adds the address to the system's error text, but our message already contains it.
            why = os.strerror(error.errno) if error.errno else str(error)
            raise TransportError(
                f"port {self.port} of 127.0.0.1 cannot be listened on ({why}): "
                "choose another one, or none for a free one"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def forward_to(self, address: str) -> None:
        """Set the target of all connections, as `host:port`."""
        host, _, port = address.rpartition(":")
        self._target.set_result((host, int(port)))

    async def close(self) -> None:
        """Stop listening and close all connections."""
        self._target.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._forward(reader, writer), name=f"forward from port {self.port}")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Either end may close at any time; that ends the connection and is not an error.
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*await asyncio.shield(self._target), limit=_CHUNK)
            with contextlib.closing(far_writer):
                ways = [
                    asyncio.create_task(_copy(reader, far_writer), name=f"to port {self.port}"),
                    asyncio.create_task(_copy(far_reader, writer), name=f"from port {self.port}"),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
