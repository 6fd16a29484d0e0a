"""The connections of one client: one for each broker and purpose.

Each is opened when it is first needed, and by one caller for all. A broker that hangs or refuses delays only those who
ask it.
"""

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from aioshard.kafka.wire.addresses import Addresses
from aioshard.kafka.wire.connection import CLOSE_GRACE, Connection
from aioshard.kafka.wire.errors import ConnectionLostError, WireError
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.requests import FETCH, FIND_COORDINATOR, LEAVE_GROUP, METADATA, OFFSET_FETCH

logger = logging.getLogger("aioshard.kafka.wire")

CONNECT_TIMEOUT: Final = 3.0
"""Seconds for a broker to accept a connection, report its versions and log us in."""
IDLE_TIMEOUT: Final = 540.0
"""Seconds after which an unused connection is closed. Brokers do the same after 10 minutes by default, and a request
that is sent at that moment may or may not have arrived."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds to leave a broker alone after a failed attempt to connect; they double with each."""
_PAUSE_JITTER = 0.2
_RENEWAL = (0.85, 0.95)
"""The part of its lifetime after which a connection is replaced: not of all connections at the same time."""
_LAST_USE = 0.98
"""The part of its lifetime after which nothing is sent any more: the request must arrive before the end."""
_RENEWAL_PAUSE = 0.03
"""The part of its lifetime after which a failed renewal is repeated, so that there are five attempts at most."""

Target = int | tuple[str, int]
"""A broker: its node id, or its name and port."""


class Purpose(Enum):
    """The purpose of a connection to a broker.

    A broker answers the requests of a connection one after another, so a request that it holds delays all others
    behind it. Use the same purpose for requests that must not overtake each other.
    """

    GENERAL = "general"
    """Metadata, coordinators, offsets of logs, and other requests that brokers answer without delay."""
    FETCH = "fetch"
    """Fetches, which wait for records. Send one at a time."""
    COMMIT = "commit"
    """Commits, which wait for replicas. Send one at a time."""
    GROUP = "group"
    """Queries of a coordinator about a group: its committed offsets, which wait for replicas, and its members."""
    JOIN = "join"
    """Joins and syncs, which wait for other members. A cancelled one closes the connection."""
    HEARTBEAT = "heartbeat"
    """Heartbeats and the leave."""
    PRODUCE = "produce"
    """Records to write, which wait for replicas."""
    TRANSACTION = "transaction"
    """Requests to the coordinator of a transaction. Send one at a time."""


# Limits -----------------------------------------------------------------------------------

_QUICK, _SLOW = 10.0, 30.0
_LIMITS: Final[Mapping[Api, float]] = {
    METADATA: _QUICK,
    FIND_COORDINATOR: _QUICK,
    OFFSET_FETCH: _QUICK,
    LEAVE_GROUP: _QUICK,
}
_FETCH_MARGIN: Final = 20.0


def limit_of(request: Request) -> float:
    """Return the seconds that a broker may take for a request, from the moment when it is first in line.

    These are the requests that brokers answer without delay: 10 s. A fetch may also take as long as it says. All others
    have 30 s, Kafka's own default, unless their callers know better: a join and a sync may take a rebalance timeout,
    and a heartbeat must be answered well within the session.
    """
    if request.api is FETCH:
        return float(request.values["max_wait_ms"]) / 1000 + _FETCH_MARGIN
    return _LIMITS.get(request.api, _SLOW)


# Pool -------------------------------------------------------------------------------------


class ConnectionPool:
    """The connections of one client, in one event loop.

    Invariants:
        * At most one connection for a broker and a purpose takes new requests.
        * A broker that hangs delays no request to another one.
        * After `close`, no task, timer or socket is left.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        *,
        connect_timeout: float = CONNECT_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
        """Create it; connections are opened when they are needed.

        Args:
            options: TLS and credentials.
            connect_timeout: Seconds to open a connection.
            idle_timeout: Seconds after which an unused connection is closed.
        """
        self._options = options
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._nodes: dict[int, tuple[str, int]] = {}
        self._endpoints: dict[tuple[str, int], _Endpoint] = {}
        self._links: dict[tuple[Target, Purpose], _Link] = {}
        self._closed = False

    async def ask(
        self, target: Target, request: Request, *, purpose: Purpose = Purpose.GENERAL, timeout: float | None = None
    ) -> Any:
        """Send a request to a broker, and return the response.

        It may first wait for a connection, for earlier requests of the same purpose, and for the end of a throttle.

        Args:
            target: The broker.
            request: The request.
            purpose: The connection to use.
            timeout: Seconds for the response once the request is first in line; `limit_of` by default.

        Raises:
            ConnectionLostError: The connection was lost or not opened, or the address of the node is unknown.
            RequestTimedOutError: The response is overdue, and the connection was closed.
            UnsupportedVersionError: The broker speaks no version of the request that we speak.
            AuthenticationFailedError: The broker rejected the credentials.
            BrokerError: The broker refused the connection with another error code.
        """
        connection = await self.connection(target, purpose=purpose)
        limit = limit_of(request) if timeout is None else timeout
        return await connection.ask(request, limit, held=purpose is Purpose.JOIN)

    async def connection(self, target: Target, *, purpose: Purpose = Purpose.GENERAL) -> Connection:
        """Return the open connection to a broker; open it first if there is none.

        Raises:
            WireError: As for `ask`.
        """
        link = self._links.get((target, purpose))
        if link is None:
            if self._closed:
                raise ConnectionLostError("the connections are closed")
            endpoint = self._endpoint(target)
            link = _Link(endpoint, purpose, self._options, self._connect_timeout, self._idle_timeout)
            self._links[target, purpose] = link
        return await link.connection()

    def know(self, nodes: Mapping[int, tuple[str, int]]) -> None:
        """Learn the addresses of brokers by node id; connections to a changed address are replaced.

        Requests in flight to the old address may still be answered. The connection to a bootstrap server that is a
        broker under the same address is that broker's from now on.
        """
        for node, address in nodes.items():
            before = self._nodes.get(node)
            if before == address:
                continue
            self._nodes[node] = address
            if before is None:
                self._adopt(node, address)
            else:
                self._endpoints.pop(before, None)
                self._move(node)

    def _adopt(self, node: int, address: tuple[str, int]) -> None:
        """Use the connections to a bootstrap server for the broker that it is."""
        for purpose in Purpose:
            link = self._links.pop((address, purpose), None)
            if link is not None:
                self._links[node, purpose] = link

    def _move(self, node: int) -> None:
        """Connect to the new address of a broker from now on."""
        for purpose in Purpose:
            link = self._links.get((node, purpose))
            if link is not None:
                link.move(self._endpoint(node))

    def is_connected(self, target: Target) -> bool:
        """Whether a connection to the broker is open."""
        return any(
            (link := self._links.get((target, purpose))) is not None and link.is_connected for purpose in Purpose
        )

    def is_resting(self, target: Target) -> bool:
        """Whether the broker is left alone for a moment, because the last attempt to connect failed: ask another."""
        address = self._address(target)
        endpoint = None if address is None else self._endpoints.get(address)
        return endpoint is not None and endpoint.rests_for() > 0

    async def close(self) -> None:
        """Close all connections; requests in flight fail. It takes at most `CLOSE_GRACE`.

        Everything is closed or cancelled before the first suspension, so a cancelled call leaves nothing open either.
        """
        self._closed = True
        ending: set[asyncio.Future[Any]] = set()
        connections: list[Connection] = []
        for link in self._links.values():
            if (opening := link.end()) is not None:
                ending.add(opening)
            connections += link.connections
        ending.update(connection.ended for connection in connections)
        try:
            if ending:
                await asyncio.wait(ending, timeout=CLOSE_GRACE)
        finally:
            for connection in connections:
                connection.abort()

    def _address(self, target: Target) -> tuple[str, int] | None:
        return self._nodes.get(target) if isinstance(target, int) else target

    def _endpoint(self, target: Target) -> "_Endpoint":
        address = self._address(target)
        if address is None:
            raise ConnectionLostError(f"the address of broker {target} is unknown")
        if address not in self._endpoints:
            self._endpoints[address] = _Endpoint(*address)
        return self._endpoints[address]


class _Endpoint:
    """A name and port: the addresses behind it, and when to try it again."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.addresses = Addresses(host, port)
        self._failures = 0
        self._rests_until = -math.inf

    def rests_for(self) -> float:
        """Return the seconds until it may be tried again."""
        return max(self._rests_until - asyncio.get_running_loop().time(), 0.0)

    def failed(self) -> None:
        """Leave it alone for a while."""
        pause = min(_FIRST_PAUSE * 2.0 ** min(self._failures, 10), _LONGEST_PAUSE)
        pause *= random.uniform(1 - _PAUSE_JITTER, 1 + _PAUSE_JITTER)  # noqa: S311 - no secret
        self._failures += 1
        self._rests_until = asyncio.get_running_loop().time() + pause

    def succeeded(self) -> None:
        """Begin with the shortest pause after the next failure."""
        self._failures = 0


class _Link:
    """The connection to one broker for one purpose, and the attempt to open it."""

    def __init__(
        self,
        endpoint: _Endpoint,
        purpose: Purpose,
        options: ConnectionOptions,
        connect_timeout: float,
        idle_timeout: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._purpose = purpose
        self._options = options
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._current: Connection | None = None
        self._opening: asyncio.Task[Connection | WireError] | None = None
        self._renew_at = math.inf
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ended = False
        self.connections: set[Connection] = set()
        """All that have a socket: the current one, and those that wait for their last responses."""

    @property
    def is_connected(self) -> bool:
        """Whether the current connection is open."""
        return self._current is not None and self._current.is_open

    async def connection(self) -> Connection:
        """Return an open connection. The first caller opens it, and the others wait for the same attempt.

        Raises:
            WireError: It was not opened.
        """
        while True:
            if self._ended:
                raise ConnectionLostError("the connections are closed")
            if (usable := self._usable()) is not None:
                return usable
            opening = self._opening or self._begin()
            await asyncio.wait((opening,))  # a cancelled waiter leaves the attempt to the others
            if opening.cancelled():
                continue  # the broker has moved, or the pool is closed
            outcome = opening.result()
            if isinstance(outcome, WireError):
                raise outcome.with_traceback(None)
            return self._usable() or outcome

    def _usable(self) -> Connection | None:
        """Return the current connection if requests may be sent on it; begin to replace it near the end of its life."""
        current = self._current
        if current is None or not current.is_open:
            return None
        now = self._loop.time()
        if now < self._renew_at:
            return current
        last_use = current.logged_in_at + _LAST_USE * current.lifetime
        if now >= last_use:
            self._set_current(None)
            return None
        if self._opening is None:
            self._renew_at = min(now + _RENEWAL_PAUSE * current.lifetime, last_use)  # when to try again if it fails
            self._begin()
        return current

    def _begin(self) -> "asyncio.Task[Connection | WireError]":
        """Begin to open a connection."""
        name = f"connect to {self._endpoint.host}:{self._endpoint.port} ({self._purpose.value})"
        self._opening = asyncio.create_task(self._open(self._endpoint), name=name)
        return self._opening

    async def _open(self, endpoint: _Endpoint) -> "Connection | WireError":
        """Open a connection, or return why not: nobody may be waiting for an exception."""
        try:
            if (pause := endpoint.rests_for()) > 0:
                await asyncio.sleep(pause)
            connection = await Connection.open(
                endpoint.host,
                endpoint.port,
                self._options,
                timeout=self._connect_timeout,
                addresses=endpoint.addresses,
            )
        except WireError as error:
            endpoint.failed()
            logger.info("no connection to a broker: %s", error)
            return error
        finally:
            if self._opening is asyncio.current_task():
                self._opening = None
        endpoint.succeeded()
        self.connections.add(connection)
        connection.ended.add_done_callback(lambda _: self.connections.discard(connection))
        self._set_current(connection)
        return connection

    def _set_current(self, connection: Connection | None) -> None:
        """Use another connection from now on; the old one waits for its last responses."""
        if self._current is not None:
            self._current.retire()
        self._current = connection
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if connection is not None:
            part = random.uniform(*_RENEWAL)  # noqa: S311 - no secret
            self._renew_at = connection.logged_in_at + part * connection.lifetime
            self._idle_timer = self._loop.call_at(connection.last_used + self._idle_timeout, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self._current is None or not self._current.is_open:
            return
        now = self._loop.time()
        due = self._current.last_used + self._idle_timeout
        if self._current.is_busy:
            due = now + self._idle_timeout
        if now < due:
            self._idle_timer = self._loop.call_at(due, self._close_if_idle)
        else:
            logger.debug("closing the idle connection to %s", self._current.address)
            self._current.close()
            self._current = None

    def move(self, endpoint: _Endpoint) -> None:
        """Connect to another address from now on."""
        self._endpoint = endpoint
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._set_current(None)

    def end(self) -> "asyncio.Task[Connection | WireError] | None":
        """Close everything for good; return the attempt that is being cancelled, if there is one."""
        self._ended = True
        self._set_current(None)
        for connection in self.connections:
            connection.close()
        if self._opening is not None:
            self._opening.cancel()
        return self._opening
