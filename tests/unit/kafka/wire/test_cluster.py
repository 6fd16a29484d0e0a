"""One client's view of a cluster: whom it asks, and who waits for what. With virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.start import connect
from aioshard.settings import Settings
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_cluster import ModelCluster


def scenario(test: Callable[[ModelCluster, Cluster], Awaitable[None]], *, brokers: int = 1) -> None:
    """Runs a test with a client that knows the brokers, and their bootstrap server by another name."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, brokers)
        model.create("orders")
        network.names["kafka"] = [model.addresses[1]]
        cluster = await connect(Settings(bootstrap_servers="kafka:9092"), ["orders"])
        try:
            await test(model, cluster)
        finally:
            await cluster.close()
            await model.close()

    run_on_network(live)


def test_brokers_that_have_replaced_all_others_are_found_by_the_name_of_the_bootstrap_server() -> None:
    """Checklist 2."""

    async def test(model: ModelCluster, cluster: Cluster) -> None:
        assert set(cluster.metadata.brokers) == {1}
        new = model.add_broker()
        model.network.names["kafka"] = [model.addresses[new]]
        model.stop(1)
        async with asyncio.timeout(5):
            await cluster.look_up(["orders"])
        assert set(cluster.metadata.brokers) == {1, new}

    scenario(test)


def test_an_update_before_the_wait_for_it_is_not_missed() -> None:
    """Checklist 18."""

    async def test(_: ModelCluster, cluster: Cluster) -> None:
        await asyncio.sleep(1)  # the look-up that the start has begun is over
        version = cluster.metadata.version
        await cluster.look_up(["orders"])
        async with asyncio.timeout(1):
            await cluster.updated_after(version)

    scenario(test)
