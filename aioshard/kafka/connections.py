"""Connection handling shared by consumer, producer and reader, on private attributes of aiokafka's client.

The canary tests list each private attribute. `client` is always an `AIOKafkaClient`.
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
"""Requests that brokers answer without delay. Joins wait for members, fetches for records, commits for replicas."""

_HUNG_PAUSE = 1.0
"""Seconds to leave a broker alone after a connection attempt timed out: other brokers come first."""
CLOSE_GRACE = 1.0
"""Seconds to wait until cancelled tasks and closed connections end."""


def is_connected(client: Any) -> bool:
    """Whether a connection to any broker is open."""
    return any(connection.connected() for connection in client._conns.values())


def refuse_useless_connections(client: Any, patience: float = 10.0) -> None:
    """Make the client fail fast, as with a broker that is down, instead of using a broken connection.

    * A broker that is just starting may report no API versions. The client would keep the connection and fail every
      request on it, silently, until the connection has been idle for minutes.
    * The client notices a lost connection only a few event loop iterations later. Until then, uvloop rejects writes
      with a `RuntimeError`, which the client treats as a bug: its heartbeat, commit or sender task ends, and
      everything else with it.
    * A hanging broker would block a metadata look-up or heartbeat for the full request time-out. The client also
      opens only one connection at a time, so the broker would block new connections to every other broker. With
      this patch, the client opens one connection at a time per broker. It leaves a hanging broker alone for a
      moment, and does not ask it for coordinators while another broker is connected.

    Call it before the client connects.

    Args:
        client: The client.
        patience: Seconds to wait for the response to a request that brokers answer without delay. Opening a
            connection may take as long, but no longer than `CONNECT_TIMEOUT`.
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
    """Return a broker with an open connection, or any broker if there is none."""
    nodes = [
        node
        for (node, group), connection in client._conns.items()
        if group is ConnectionGroup.DEFAULT and node != "bootstrap" and connection.connected()
    ]
    return random.choice(nodes) if nodes else any_node()  # noqa: S311 - no secret


def _sending_in_time(connection: Any, patience: float) -> Callable[..., Awaitable[Any]]:
    """Wrap `send`: close the connection if a request that brokers answer without delay times out."""
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
    """A stream writer that rejects writes to a lost connection with an `OSError`, on any event loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.transport = writer.transport
        self.drain = writer.drain
        self.close = writer.close

    def write(self, data: bytes) -> None:
        """Send the data, or buffer it until it can be sent.

        Raises:
            ConnectionResetError: The connection is lost or closed.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is lost")
        self._writer.write(data)


def pace_look_ups(client: Any, pause: float) -> None:
    """Leave at least *pause* seconds between two metadata look-ups that the client requests.

    While a partition has no leader, aiokafka's producer asks again without a pause: 2,000 times a second for a
    deleted topic, with a log line each time.
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
    """End *tasks*, the client's own task and every connection, in any state.

    Use this instead of aiokafka's `close` and `stop`. They cancel a task, await it, and mistake a cancellation of
    their caller for the end of that task. The cancellation gets lost, so a command keeps running after SIGINT.

    Cancels and closes everything before the first await, so that nothing stays behind even after a second
    cancellation. Takes at most twice `CLOSE_GRACE`.
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
        client._md_update_fut.set_result(False)  # Nobody else will set it; its waiters would wait forever.
    await end_tasks(ending)
    if closing:
        await asyncio.wait([closed for closed, _ in closing], timeout=CLOSE_GRACE)
    for closed, transport in closing:
        if not closed.done() and transport is not None:
            transport.abort()


async def start_administrator(admin: Any) -> None:
    """Connect an `AIOKafkaAdminClient`, with the same connection handling as all other clients."""
    refuse_useless_connections(admin._client)
    await admin.start()


async def close_administrator(admin: Any) -> None:
    """End an `AIOKafkaAdminClient`; see `close_client`."""
    admin._closed = True
    await close_client(admin._client, ())


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they end, with any result, for at most `CLOSE_GRACE`."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if not ending:
        return
    done, _ = await asyncio.wait(ending, timeout=CLOSE_GRACE)
    for task in done:
        if not task.cancelled():
            task.exception()  # Retrieve it, so that the event loop does not log it.
