"""One client for many concurrent callers: connected once, replaced when it is lost."""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from aioshard.errors import ClientLostError, TransportError
from aioshard.kafka.translate import reason

__all__ = ["ClosableClient", "SharedClient"]


class ClosableClient(Protocol):
    """A connected client."""

    @property
    def lost(self) -> BaseException | None:
        """Why the client is no longer usable; None while it is."""

    async def tear_down(self) -> None:
        """End every task and connection."""


C = TypeVar("C", bound=ClosableClient)


class SharedClient(Generic[C]):
    """Holds a client, connects it on demand, and reconnects after it was lost or dropped.

    Owned by one port, used from one event loop. Background tasks connect and tear down; `close` ends both.

    Invariants:
        * Only one connection attempt at a time. If it fails, its waiters get the error and do not retry.
    """

    def __init__(self, what: str, connect: Callable[[], Awaitable[C]]) -> None:
        """Start without a client.

        Args:
            what: The client's name in messages, such as "producer".
            connect: Returns a connected client.
        """
        self.client: C | None = None
        self.closed = False
        self._what = what
        self._connect = connect
        self._connecting: asyncio.Task[None] | None = None
        self._failure: TransportError | None = None
        self._failed_at = 0.0
        self._endings: set[asyncio.Task[None]] = set()

    async def get(self, since: float) -> C:
        """Return the client; connect it first if there is none.

        Args:
            since: When the caller first needed it, by `time.monotonic`. A connection attempt that failed later counts
                as the caller's own.

        Raises:
            ClientLostError: This object is closed, or the client could not be created.
            TransportError: The client could not connect.
        """
        while True:
            if self.closed:
                raise self.closed_error()
            client = self.client
            if client is not None:
                if client.lost is None:
                    return client
                self.drop(client)
            if self._failure is not None and self._failed_at >= since:
                raise copy.copy(self._failure)
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect_once(), name=f"connect the {self._what}")
            await asyncio.wait([self._connecting])

    async def _connect_once(self) -> None:
        try:
            self.client = await self._connect()
        except Exception as error:  # noqa: BLE001 - callers that wait get any error
            told = f"the Kafka {self._what} could not be started: {reason(error)}"
            self._failure = error if isinstance(error, TransportError) else ClientLostError(told)
            self._failed_at = time.monotonic()
        finally:
            self._connecting = None

    def drop(self, client: C) -> None:
        """Close a client; the next caller reconnects."""
        if client is self.client:
            self.client = None
        ending = asyncio.create_task(client.tear_down(), name=f"close a {self._what}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def closed_error(self) -> ClientLostError:
        """Return the error to raise after `close`."""
        return ClientLostError(f"the Kafka {self._what} is closed")

    async def close(self) -> None:
        """Close the client and wait for it, at most 2 s; nothing connects afterwards."""
        self.closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self.client is not None:
            self.drop(self.client)
        if self._endings:
            await asyncio.wait(self._endings)
