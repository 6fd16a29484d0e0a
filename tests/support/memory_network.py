"""A network without sockets, for event loops with virtual time: names, addresses, silence and refusals."""

import asyncio
import errno
import random
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioshard.testing import VirtualTimeLoop

T = TypeVar("T")

LATENCY = 0.001
"""Virtual seconds that bytes take."""


class MemoryNetwork:
    """Names, their addresses, and who listens there.

    Attributes:
        names: The addresses of each name.
        listeners: Makes the other side of a connection, by address. Nobody listens elsewhere: a connection is refused.
        silent: Addresses that answer nothing, not even with a refusal.
        attempts: The addresses of all attempts to connect, in order.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.listeners: dict[str, Callable[[], asyncio.Protocol]] = {}
        self.silent: set[str] = set()
        self.attempts: list[str] = []

    def add(self, name: str, *listeners: Callable[[], asyncio.Protocol] | None) -> list[str]:
        """Gives a name an address for each listener, silent ones for None, and returns the addresses."""
        begin = len(self.listeners) + len(self.silent) + 1
        addresses = [f"10.0.0.{begin + index}" for index in range(len(listeners))]
        for address, listener in zip(addresses, listeners, strict=True):
            if listener is None:
                self.silent.add(address)
            else:
                self.listeners[address] = listener
        self.names[name] = addresses
        return addresses


class NetworkLoop(VirtualTimeLoop):
    """An event loop with virtual time whose connections go through a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, *, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self.network = network

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        await asyncio.sleep(LATENCY)
        if host not in self.network.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.network.names[host]
        ]  # fmt: skip

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # noqa: ARG002
        self.network.attempts.append(host)
        if host in self.network.silent:
            await self.create_future()
        await asyncio.sleep(LATENCY)
        if host not in self.network.listeners:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")
        ours, theirs = MemoryTransport(self), MemoryTransport(self)
        ours.connect(protocol_factory(), theirs)
        theirs.connect(self.network.listeners[host](), ours)
        return ours, ours.protocol


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    protocol: asyncio.Protocol

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._closing = False
        self._sent: deque[bytes | None] = deque()  # timers that are due together have no order

    def connect(self, protocol: asyncio.Protocol, other: "MemoryTransport") -> None:
        """Joins it with the other end."""
        self.protocol = protocol
        self._other = other
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002 - as the base class
        return default

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if not self._closing:
            self._send(bytes(data))

    def _send(self, data: bytes | None) -> None:
        self._sent.append(data)
        self._loop.call_later(LATENCY, self._deliver)

    def _deliver(self) -> None:
        data = self._sent.popleft()
        if data is None:
            self._other.close()
        elif not self._other.is_closing():
            self._other.protocol.data_received(data)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self.protocol.connection_lost, None)
            self._send(None)

    def abort(self) -> None:
        self.close()


def run_on_network(
    main: Callable[[MemoryNetwork], Coroutine[Any, Any, T]], *, seed: int | None = None
) -> T:  # fmt: skip
    """Runs a test on a new network; nothing may be left when it returns."""
    network = MemoryNetwork()
    state = random.getstate()
    random.seed(seed or 0)
    try:
        with asyncio.Runner(loop_factory=lambda: NetworkLoop(network, seed=seed)) as runner:
            result = runner.run(main(network))
            left = asyncio.all_tasks(runner.get_loop())
            assert not left, left
    finally:
        random.setstate(state)
    return result
