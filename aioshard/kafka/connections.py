"""What consumer, producer and reader share of aiokafka's client underneath: its connections and look-ups, in private.

Each attribute stands in the table of the canary tests. `client` is an `AIOKafkaClient` throughout.
"""
# ruff: noqa: SLF001 - see above; the canary tests say when one of them changes

import asyncio
import contextlib
import functools
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.kafka.connecting import CONNECT_TIMEOUT

__all__ = [
    "CLOSE_GRACE",
    "close_administrator",
    "close_client",
    "end_tasks",
    "is_connected",
    "pace_look_ups",
    "refuse_useless_connections",
    "start_administrator",
]

logger = logging.getLogger("aioshard.kafka.connections")

_ANSWERED_AT_ONCE = (
    FindCoordinatorRequest,
    HeartbeatRequest,
    LeaveGroupRequest,
    MetadataRequest,
    OffsetFetchRequest,
)
"""Not those that wait: joins for other members, fetches for records, commits for replicas."""

_HUNG_PAUSE = 1.0
"""Seconds for which a broker that has taken no connection is not tried again: others come first."""
CLOSE_GRACE = 1.0
"""Seconds for tasks and connections to end once they were told to."""


def is_connected(client: Any) -> bool:
    """Whether a connection to any broker is open."""
    return any(connection.connected() for connection in client._conns.values())


def refuse_useless_connections(client: Any, patience: float = 10.0) -> None:
    """Make the client fail at once, as with a broker that is away, where it would use a connection that is no good.

    * A broker that is just starting may name no versions. The client would keep the connection and fail with every
      request on it, silently and until the connection has been idle for minutes.
    * A connection that was lost is seen as such a few turns of the loop later. In between uvloop refuses what is sent
      with a `RuntimeError`, which the client takes for a fault in the program: its heartbeat, a commit or its sender
      ends with it, and all else with them.
    * A broker that hangs would hold up a look-up or a heartbeat for the full time-out of requests, and, as the client
      makes one connection at a time, each new connection to any broker. Here it makes one to each broker at a time. A
      broker that hangs is left alone for a moment, and not asked for coordinators while another one is connected.

    Call it before the client connects.

    Args:
        client: The client.
        patience: Seconds for the answer to a request that brokers answer at once. To make a connection may take as
            long, but not longer than `CONNECT_TIMEOUT`.
    """
    any_connection, any_bootstrap = client._get_conn, client.bootstrap
    client._get_conn_lock_value = contextlib.nullcontext()
    connecting: defaultdict[tuple[Any, Any], asyncio.Lock] = defaultdict(asyncio.Lock)
    hung_at: dict[tuple[Any, Any], float] = {}

    async def usable_connection(node: Any, *, group: Any = ConnectionGroup.DEFAULT, no_hint: bool = False) -> Any:
        clock = asyncio.get_running_loop().time
        async with connecting[node, group]:
            if clock() < hung_at.get((node, group), -_HUNG_PAUSE) + _HUNG_PAUSE:
                return None
            try:
                async with asyncio.timeout(min(patience, CONNECT_TIMEOUT)):
                    connection = await any_connection(node, group=group, no_hint=no_hint)
            except (RuntimeError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    hung_at[node, group] = clock()
                logger.info("the connection to broker %s was not made: %s", node, str(error) or "no answer in time")
                client.force_metadata_update()
                return None
        if connection is None:
            return None
        if not connection._versions:
            client._conns.pop((node, group), None)
            connection.close(reason=CloseReason.OUT_OF_SYNC)
            return None
        if not isinstance(connection._writer, _Writer):
            connection._writer = _Writer(connection._writer)
            connection.send = _sending_in_time(connection, patience)
        return connection

    async def bootstrap() -> None:
        try:
            await any_bootstrap()
        except RuntimeError as error:
            raise KafkaConnectionError(f"the connection was lost while it was being made: {error}") from error

    client._get_conn, client.bootstrap = usable_connection, bootstrap
    client.get_random_node = functools.partial(_connected_node, client, client.get_random_node)


def _connected_node(client: Any, any_node: Callable[[], Any]) -> Any:
    """A broker to which a connection is open; else any."""
    nodes = [
        node
        for (node, group), connection in client._conns.items()
        if group is ConnectionGroup.DEFAULT and node != "bootstrap" and connection.connected()
    ]
    return random.choice(nodes) if nodes else any_node()  # noqa: S311 - no secret


def _sending_in_time(connection: Any, patience: float) -> Callable[..., Awaitable[Any]]:
    """How a connection sends: it counts as lost when a request that brokers answer at once is not answered."""
    send_any = connection.send

    async def in_time(answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(patience):
                return await answer
        except TimeoutError:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise

    def send(request: Any, expect_response: bool = True) -> Awaitable[Any]:
        answer: Awaitable[Any] = send_any(request, expect_response)
        return in_time(answer) if isinstance(request, _ANSWERED_AT_ONCE) else answer

    return send


class _Writer:
    """What a connection writes with: refuses with an `OSError`, on any event loop, what could not be sent any more."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.transport = writer.transport
        self.drain = writer.drain
        self.close = writer.close

    def write(self, data: bytes) -> None:
        """Send, or hold until it can be sent.

        Raises:
            ConnectionResetError: The connection is lost or closed.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is lost")
        self._writer.write(data)


def pace_look_ups(client: Any, pause: float) -> None:
    """Leave at least *pause* seconds between two look-ups of topics that the client asks for.

    aiokafka's producer asks again at once while a partition has no leader: 2,000 times a second for a topic that was
    deleted, each with a line in the log.
    """
    loop = asyncio.get_running_loop()
    due = 0.0

    def wake() -> None:
        if not client._md_update_waiter.done():
            client._md_update_waiter.set_result(None)

    def force_metadata_update() -> asyncio.Future[bool]:
        nonlocal due
        if client._sync_task is not None and client._sync_task.done():
            nobody_asks: asyncio.Future[bool] = loop.create_future()
            nobody_asks.set_result(False)
            return nobody_asks
        if client._md_update_fut is None:
            client._md_update_fut = loop.create_future()
            when = max(loop.time(), due)
            due = when + pause
            if when > loop.time():
                loop.call_at(when, wake)
            else:
                wake()
        return asyncio.shield(client._md_update_fut)

    client.force_metadata_update = force_metadata_update


async def close_client(client: Any, tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """End *tasks*, the client's own and every connection, whatever state they are in.

    Used instead of aiokafka's own `close` and `stop` everywhere: those cancel a task of theirs, await it, and take a
    cancellation of who called them for the end of that task. It is lost then, and a command goes on after SIGINT.

    Everything is told to end before the first await, so that even a second cancellation leaves nothing. Takes at most
    twice `CLOSE_GRACE`.
    """
    ending = [task for task in (client._sync_task, *tasks) if task is not None]
    for task in ending:
        task.cancel()
    closing = []
    for connection in list(client._conns.values()):
        transport = connection._writer and connection._writer.transport
        closed = connection.close(reason=CloseReason.SHUTDOWN)
        if closed is not None:
            closing.append((closed, transport))
    client._conns.clear()
    if client._md_update_fut is not None and not client._md_update_fut.done():
        client._md_update_fut.set_result(False)  # Noone else will: who waits for it would wait for ever.
    await end_tasks(ending)
    if closing:
        await asyncio.wait([closed for closed, _ in closing], timeout=CLOSE_GRACE)
    for closed, transport in closing:
        if not closed.done() and transport is not None:
            transport.abort()


async def start_administrator(admin: Any) -> None:
    """Connect an `AIOKafkaAdminClient`, with connections as those of all other clients."""
    refuse_useless_connections(admin._client)
    await admin.start()


async def close_administrator(admin: Any) -> None:
    """End an `AIOKafkaAdminClient`; see `close_client`."""
    admin._closed = True
    await close_client(admin._client, ())


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they end with; for `CLOSE_GRACE` at most."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if not ending:
        return
    done, _ = await asyncio.wait(ending, timeout=CLOSE_GRACE)
    for task in done:
        if not task.cancelled():
            task.exception()  # Retrieved, so that the loop does not complain about it.
