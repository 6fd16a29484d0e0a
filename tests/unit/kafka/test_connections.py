"""Connections of one client to several brokers, one of which hangs; without a broker."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.group import HeartbeatRequest

from aioshard.kafka.aiokafka.connections import CONNECT_TIMEOUT, close_client, refuse_useless_connections
from aioshard.testing import run

PATIENCE = 4.0
HUNG = 1


class Connection:
    """One that answers never."""

    def __init__(self) -> None:
        self._versions = {1: 1}
        self.closed = False
        self.failure: Exception | None = None

    def send(self, request: Any, expect_response: bool = True) -> "asyncio.Future[None]":  # noqa: ARG002 - as theirs
        if self.failure is not None:
            raise self.failure
        return asyncio.get_running_loop().create_future()

    def close(self, reason: object) -> None:  # noqa: ARG002 - as theirs
        self.closed = True

    def connected(self) -> bool:
        return not self.closed


class Client(SimpleNamespace):
    """Makes connections as aiokafka's does: under its lock, in 50 ms, and never to the broker that hangs."""

    def __init__(self) -> None:
        super().__init__(_conns={}, _sync_task=None, bootstrap=None, get_random_node=lambda: HUNG)
        self._get_conn_lock_value: Any = asyncio.Lock()
        self.looked_up = 0
        refuse_useless_connections(self, PATIENCE)

    def force_metadata_update(self) -> None:
        self.looked_up += 1

    async def _get_conn(self, node: int, *, group: Any = None, no_hint: bool = False) -> Connection:  # noqa: ARG002
        if (node, group) not in self._conns:
            async with self._get_conn_lock_value:
                await asyncio.sleep(1_000 if node == HUNG else 0.05)
                self._conns[node, group] = Connection()
        found: Connection = self._conns[node, group]
        return found


def scenario(test: Callable[[Client], Awaitable[None]]) -> None:
    async def live() -> None:
        await test(Client())

    run(live())


def test_a_hanging_broker_does_not_delay_connections_to_others() -> None:
    async def test(client: Client) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        hanging = asyncio.create_task(client._get_conn(HUNG))
        await asyncio.sleep(0)
        assert all(await asyncio.gather(client._get_conn(2), client._get_conn(3)))
        assert now() - began < 0.2
        assert await hanging is None
        assert now() - began == pytest.approx(CONNECT_TIMEOUT)
        assert client.looked_up == 1
        assert await client._get_conn(HUNG) is None, "left alone for a moment"
        assert now() - began == pytest.approx(CONNECT_TIMEOUT)
        assert client.get_random_node() in (2, 3)

    scenario(test)


def test_concurrent_callers_share_a_connection() -> None:
    async def test(client: Client) -> None:
        one, two = await asyncio.gather(client._get_conn(2), client._get_conn(2))
        assert one is two

    scenario(test)


def test_only_an_unanswered_heartbeat_closes_the_connection() -> None:
    """A commit waits for replicas, and has the deadline of who sends it."""

    async def test(client: Client) -> None:
        connection = await client._get_conn(2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * PATIENCE):
                await connection.send(OffsetCommitRequest("billing", 1, "me", -1, []))
        assert connection.connected()
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await connection.send(HeartbeatRequest("billing", 1, "me"))
        assert asyncio.get_running_loop().time() - began == pytest.approx(PATIENCE)
        assert not connection.connected()

    scenario(test)


@pytest.mark.parametrize(
    ("failure", "raised", "connected"),
    [
        (RuntimeError("the handler is closed"), kafka.KafkaConnectionError, False),
        (kafka.IncompatibleBrokerVersion("not supported"), kafka.IncompatibleBrokerVersion, True),
        (NotImplementedError("no such version"), NotImplementedError, True),
    ],
    ids=["lost, as uvloop reports it", "unknown request", "unknown version"],
)
def test_an_unsupported_request_is_not_a_lost_connection(
    failure: Exception, raised: type[Exception], connected: bool
) -> None:
    """aiokafka's own errors are RuntimeErrors too."""

    async def test(client: Client) -> None:
        connection = await client._get_conn(2)
        connection.failure = failure
        with pytest.raises(raised) as error:
            connection.send(HeartbeatRequest("billing", 1, "me"))
        assert type(error.value) is raised
        assert connection.connected() is connected

    scenario(test)


def test_a_starting_broker_without_api_versions_is_retried() -> None:
    async def test(client: Client) -> None:
        connection = await client._get_conn(2)
        connection._versions = {}
        assert await client._get_conn(2) is None
        assert connection.closed
        assert await client._get_conn(2) not in (None, connection)

    scenario(test)


def test_a_closed_client_does_not_reconnect_or_block() -> None:
    async def test(client: Client) -> None:
        client._sync_task = asyncio.create_task(asyncio.sleep(1_000))
        client._md_update_fut = asyncio.get_running_loop().create_future()
        await close_client(client, ())
        assert client._md_update_fut.done()
        assert await client._get_conn(2) is None

    scenario(test)
