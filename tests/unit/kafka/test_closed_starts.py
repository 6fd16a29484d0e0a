"""A client that is closed while it starts joins nothing and leaves nothing open."""

import asyncio
from typing import Any

import pytest

from aioshard.errors import ClientLostError
from aioshard.kafka.group.transport import MemberTransport
from aioshard.kafka.wire.requests import FIND_COORDINATOR
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received, hold
from tests.support.model_cluster import ModelCluster


def test_a_client_that_is_closed_while_it_looks_for_its_group_does_not_join() -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 1)
        model.create("orders")
        held: list[Received] = []
        model.brokers[1].on(FIND_COORDINATOR, hold(held))
        settings = model.settings.model_copy(update={"assign": {"orders": [0]}})
        transport: Any = MemberTransport(settings, "billing")
        starting = asyncio.create_task(transport.start(["orders"], None, Listener()))
        await model.brokers[1].arrival(FIND_COORDINATOR)
        await transport.close()
        with pytest.raises(ClientLostError):
            await starting
        assert [task for task in asyncio.all_tasks() if "fetch" in task.get_name()] == []
        await model.close()

    run_on_network(live)


class Listener:
    """Nobody is informed."""

    def assigned(self, *_: Any) -> None:
        raise AssertionError("it was closed")
