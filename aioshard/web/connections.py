"""Connections of the health server: bounded in number, and closed if the client keeps them waiting.

The server lives in the process of the app. Without a bound, clients that open connections and send nothing take all
file descriptors, and then the Kafka client cannot connect any more.
"""

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

if TYPE_CHECKING:
    import uvicorn

MOST_CONNECTIONS = 64
"""Connections open at the same time."""
BACKLOG = 100
"""Connections that the system holds until they are accepted; asyncio may accept all of them at once."""
CLIENT_TIMEOUT = 10.0
"""Seconds within which a client must send its whole request, or read enough of a response to continue it."""
_CHECK_INTERVAL = 1.0


class Connection(H11Protocol):
    """A connection that knows since when it waits for its client."""

    waits_since = 0.0
    """Loop time at which it began to wait for its client, if it does."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; if there are too many, end the one that has waited longest for its client."""
        super().connection_made(transport)
        self.waits_since = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self.waits_since = self.loop.time()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.waits_since = self.loop.time()
        super().on_response_complete()

    @property
    def waits_for_client(self) -> bool:
        """Whether the client must send or read something before anything can happen."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete:
            return True
        return cycle.more_body or self.flow.write_paused

    def waits_too_long(self, now: float) -> bool:
        """Whether the client has had enough time, by loop time *now*."""
        return self.waits_for_client and now - self.waits_since > CLIENT_TIMEOUT

    def end(self) -> None:
        """Close the connection at once, without sending the rest of a response."""
        self.connections.discard(self)  # not only when the transport reports it: others may arrive before
        self.transport.abort()

    def _make_room(self) -> None:
        # A request that is being answered is worth more than a connection on which nothing happens.
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and connection.waits_for_client and connection is not self
        ]
        min(waiting, key=lambda connection: connection.waits_since, default=self).end()


async def end_waiting(server: "uvicorn.Server") -> None:
    """End connections whose clients take too long, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_CHECK_INTERVAL)
        for connection in tuple(server.server_state.connections):
            if isinstance(connection, Connection) and connection.waits_too_long(loop.time()):
                connection.end()
