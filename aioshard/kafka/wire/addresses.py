"""The addresses behind a broker's name, tried side by side, so that a silent one never uses up the time."""

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from aioshard.kafka.wire.errors import ConnectionLostError, WireError

STAGGER: Final = 0.25
"""Seconds after which the next address is tried too, at most (RFC 8305 recommends them)."""

T = TypeVar("T")


class Address(NamedTuple):
    """One of the addresses behind a name."""

    family: int
    host: str
    port: int


class Addresses:
    """The addresses behind one broker's name, in the order in which to try them.

    All of them are tried within the first half of the time for a connection: a broker that ended refuses immediately,
    but an address that is no longer used answers nothing at all (KIP-302, KAFKA-15817). The next connection begins with
    the address that answered, or after the one that failed.
    """

    def __init__(self, host: str, port: int) -> None:
        """Remember the name; it is resolved for each connection."""
        self._host = host
        self._port = port
        self._found: list[Address] = []
        """The addresses in the order of the resolver."""
        self._preferred: Address | None = None
        """The address to begin with, once the order of the resolver has not proved good."""

    async def first(self, attempt: Callable[[Address], Awaitable[T]], discard: Callable[[T], None], limit: float) -> T:
        """Return the result of the first address that succeeds.

        Args:
            attempt: Tries one address. Cancelled when another one succeeds.
            discard: Called with a result that came too late.
            limit: Seconds for everything.

        Raises:
            WireError: No address succeeded. The cause is the most telling failure; `TimeoutError` after silence.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit
        order = await self._resolve(limit)
        untried = list(order)
        stagger = min(STAGGER, limit / 2 / len(order))
        running: dict[asyncio.Task[T], Address] = {}
        failures: dict[Address, Exception] = {}
        try:
            while (untried or running) and (left := deadline - clock()) > 0:
                if untried:
                    address = untried.pop(0)
                    name = f"try {address.host}:{address.port}"
                    running[asyncio.create_task(_awaited(attempt, address), name=name)] = address
                patience = min(stagger, left) if untried else left
                await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:
                    address = running.pop(task)
                    try:
                        result = task.result()
                    except (OSError, WireError) as error:
                        failures[address] = error
                        continue
                    if address != order[0]:
                        self._preferred = address
                    try:
                        await _end(running, discard)
                    except asyncio.CancelledError:
                        discard(result)
                        raise
                    return result
            for address in (*running.values(), *untried):
                failures[address] = TimeoutError(f"no answer within {limit:g} s")
        finally:
            await _end(running, discard)
        self.failed(order[0])
        raise self._error(failures)

    def failed(self, address: Address) -> None:
        """Begin with the address after this one next time."""
        if address in self._found:
            following = self._found.index(address) + 1
            self._preferred = self._found[following % len(self._found)]

    async def _resolve(self, limit: float) -> list[Address]:
        """Return all addresses in the order in which to try them."""
        try:
            version = ipaddress.ip_address(self._host).version
        except ValueError:
            self._found = await self._look_up(limit)
        else:
            # The resolver works in a thread, and handlers may occupy all threads.
            family = socket.AF_INET if version == 4 else socket.AF_INET6  # noqa: PLR2004 - IPv4
            self._found = [Address(family, self._host, self._port)]
        found = self._found
        begin = found.index(self._preferred) if self._preferred in found else 0
        return found[begin:] + found[:begin]

    async def _look_up(self, limit: float) -> list[Address]:
        loop = asyncio.get_running_loop()
        name = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(limit):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            raise ConnectionLostError(f"{name}: the name was not resolved within {limit:g} s") from error
        except (OSError, UnicodeError) as error:  # the latter for a label that is too long
            raise ConnectionLostError(f"{name}: {_text(error)}") from error
        addresses = list(dict.fromkeys(Address(family, *place[:2]) for family, _, _, _, place in found))
        if not addresses:
            raise ConnectionLostError(f"{name}: the name has no address")
        return addresses

    def _error(self, failures: Mapping[Address, Exception]) -> WireError:
        """Return the error of a name none of whose addresses succeeded."""
        telling = min(failures.values(), key=_rank)
        if isinstance(telling, WireError) and (len(failures) == 1 or not telling.retriable):
            return telling
        if len(failures) == 1:
            details = _text(telling)
        else:
            details = "; ".join(f"{address.host}: {_text(error)}" for address, error in failures.items())
        lost = ConnectionLostError(f"{self._host}:{self._port}: {details}")
        lost.__cause__ = telling
        return lost


async def _awaited(attempt: Callable[[Address], Awaitable[T]], address: Address) -> T:
    return await attempt(address)


async def _end(running: dict[asyncio.Task[T], Address], discard: Callable[[T], None]) -> None:
    """Cancel attempts that are too late, and discard what they have opened nevertheless."""
    tasks = list(running)
    running.clear()

    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    for task in tasks:
        task.cancel()
        task.add_done_callback(ended)
    if tasks:
        await asyncio.wait(tasks)


def _rank(error: Exception) -> int:
    """Order failures by how much they tell: a broker that answers, TLS, a refusal, silence."""
    if isinstance(error, WireError) and not error.retriable:
        return 0
    if isinstance(error, ssl.SSLError):
        return 1
    return 3 if isinstance(error, TimeoutError) else 2


def _text(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({getattr(error, 'verify_message', '') or error.reason or error})"
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text leaves out the reason
    if isinstance(error, ConnectionError) and not error.args:
        return "the connection was closed during the TLS handshake"  # as asyncio says it
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
