"""One client for many who need it at the same time: connected once, replaced when it is lost."""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from aioshard.errors import ClientLostError, TransportError
from aioshard.kafka.translate import reason

__all__ = ["ClosableClient", "SharedClient"]


class ClosableClient(Protocol):
    """A client that is connected."""

    @property
    def lost(self) -> BaseException | None:
        """Why it is of no use any more; None while it is."""

    async def tear_down(self) -> None:
        """End every task and connection."""


C = TypeVar("C", bound=ClosableClient)


class SharedClient(Generic[C]):
    """Holds a client, connects it when somebody needs it, and again after it was lost or dropped.

    Owned by one port, used from one event loop. Its tasks connect and tear down; `close` ends both.

    Invariants:
        * One attempt to connect at a time. Who was waiting when it failed is told how, and does not try again.
    """

    def __init__(self, what: str, connect: Callable[[], Awaitable[C]]) -> None:
        """Hold no client yet.

        Args:
            what: A word for it in messages, such as "producer".
            connect: Gives a client that is connected.
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
        """The client; connects it when there is none.

        Args:
            since: When the caller began to need it, as `time.monotonic` says: an attempt that failed later is its own.

        Raises:
            ClientLostError: It is closed, or could not be made.
            TransportError: It could not be connected.
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what those who wait are told
            told = f"the Kafka {self._what} could not be started: {reason(error)}"
            self._failure = error if isinstance(error, TransportError) else ClientLostError(told)
            self._failed_at = time.monotonic()
        finally:
            self._connecting = None

    def drop(self, client: C) -> None:
        """Close a client; whoever needs one next connects."""
        if client is self.client:
            self.client = None
        ending = asyncio.create_task(client.tear_down(), name=f"close a {self._what}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def closed_error(self) -> ClientLostError:
        """What is raised after `close`."""
        return ClientLostError(f"the Kafka {self._what} is closed")

    async def close(self) -> None:
        """Close the client and wait until it is, for 2 s at most; nothing connects any more."""
        self.closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self.client is not None:
            self.drop(self.client)
        if self._endings:
            await asyncio.wait(self._endings)
