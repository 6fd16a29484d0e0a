"""Keep the connections of aiokafka's consumer usable, and close them."""

import asyncio
import contextlib
import functools
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiokafka import errors as kafka
from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

logger = logging.getLogger("aioshard.kafka.aiokafka.connections")

CONNECT_TIMEOUT = 3.0
"""Seconds for a broker to accept a connection, authenticate us and answer."""

_ANSWERED_IMMEDIATELY = (
    FindCoordinatorRequest,
    HeartbeatRequest,
    LeaveGroupRequest,
    MetadataRequest,
)
"""Requests that brokers answer without delay. Joins wait for members, fetches for records, commits for replicas."""

_HUNG_PAUSE = 1.0
"""Seconds to leave a broker alone after a connection attempt timed out: other brokers come first."""
CLOSE_GRACE = 1.0
"""Seconds to wait until cancelled tasks and closed connections end."""


def refuse_useless_connections(client: Any, patience: float = 10.0) -> None:
    """Make the client fail fast, as with a broker that is down, instead of using a broken connection.

    * A broker that is just starting may report no API versions. The client would keep the connection and fail every
      request on it, silently, until the connection has been idle for minutes.
    * The client notices a lost connection only a few event loop iterations later. Until then, uvloop rejects writes
      with a `RuntimeError`, which the client treats as a bug: its heartbeat, commit or sender task ends, and
      everything else with it.
    * A client that was torn down would connect again for a request that was waiting.
    * A hanging broker would block a metadata look-up or heartbeat for the full request timeout. The client also
      opens only one connection at a time, so the broker would block new connections to every other broker. With
      this patch, the client opens one connection at a time per broker. It leaves a hanging broker alone for a
      moment, and does not ask it for coordinators while another broker is connected.

    Call it before the client connects.

    Args:
        client: The client.
        patience: Seconds to wait for the response to a request that brokers answer without delay. Opening a
            connection may take as long, but no longer than `CONNECT_TIMEOUT`.
    """
    any_connection = client._get_conn
    client._get_conn_lock_value = contextlib.nullcontext()
    connecting: defaultdict[tuple[Any, Any], asyncio.Lock] = defaultdict(asyncio.Lock)
    hung_at: dict[tuple[Any, Any], float] = {}

    async def usable_connection(node: Any, *, group: Any = ConnectionGroup.DEFAULT, no_hint: bool = False) -> Any:
        clock = asyncio.get_running_loop().time
        async with connecting[node, group]:
            ended = client._sync_task is not None and client._sync_task.done()
            if ended or clock() < hung_at.get((node, group), -_HUNG_PAUSE) + _HUNG_PAUSE:
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
        if "send" not in vars(connection):
            connection.send = _sending_in_time(connection, patience)
        return connection

    client._get_conn = usable_connection
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
    """Wrap `send`: close a connection that was lost, or whose broker leaves a quick request unanswered."""
    send_any = connection.send

    async def in_time(response: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(patience):
                return await response
        except TimeoutError:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise

    def send(request: Any, expect_response: bool = True) -> Awaitable[Any]:
        try:
            response: Awaitable[Any] = send_any(request, expect_response)
        except (kafka.KafkaError, NotImplementedError):
            raise  # Also RuntimeErrors: the broker does not support the request, for example.
        except RuntimeError as error:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise kafka.KafkaConnectionError(f"the connection is lost: {error}") from error
        return in_time(response) if isinstance(request, _ANSWERED_IMMEDIATELY) else response

    return send


async def close_client(client: Any, tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """End *tasks*, the client's own task and every connection, in any state.

    Use this instead of aiokafka's `close` and `stop`. They cancel a task, await it, and mistake a cancellation of
    their caller for the end of that task. The cancellation gets lost, so a command keeps running after SIGINT.

    Cancels and closes everything before the first await, so that nothing stays behind even after a second
    cancellation. Takes at most twice `CLOSE_GRACE`.
    """
    closing = []
    for connection in list(client._conns.values()):
        transport = connection._writer and connection._writer.transport
        if (closed := connection.close(reason=CloseReason.SHUTDOWN)) is not None:
            closing.append((closed, transport))
    client._conns.clear()
    if client._md_update_fut is not None and not client._md_update_fut.done():
        client._md_update_fut.set_result(False)  # Nobody else will set it; its waiters would wait forever.
    await end_tasks(task for task in (client._sync_task, *tasks) if task is not None)
    if closing:
        await asyncio.wait([closed for closed, _ in closing], timeout=CLOSE_GRACE)
    for closed, transport in closing:
        if not closed.done() and transport is not None:
            transport.abort()


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
