"""One client's view of a cluster: whom it asks, and who waits for what. With virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import ConnectionLostError
from aioshard.kafka.wire.metadata import Leader
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import METADATA
from aioshard.kafka.wire.start import connect
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster

ORDERS = TopicPartition("orders", 0)


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

    async def test(model: ModelCluster, cluster: Cluster) -> None:
        assert set(cluster.metadata.brokers) == {1}
        new = model.add_broker()
        model.network.names["kafka"] = [model.addresses[new]]
        model.stop(1)
        async with asyncio.timeout(5):
            await cluster.look_up(["orders"])
        assert set(cluster.metadata.brokers) == {1, new}

    scenario(test)


def test_a_broker_that_names_no_brokers_is_followed_by_another() -> None:
    """It may be cut off from the controller, and be the only one with an open connection."""

    async def test(model: ModelCluster, cluster: Cluster) -> None:
        await asyncio.sleep(1)  # the connections that the start has begun are open
        for node in (2, 3):
            for session in model.brokers[node].open_sessions:
                session.close()
        model.brokers[1].on(METADATA, lambda request: request.reply())
        model.logs[ORDERS].lead(2)
        await asyncio.sleep(1)
        await cluster.look_up(["orders"])
        assert cluster.metadata.leader(ORDERS) == Leader(2, 1)

    scenario(test, brokers=3)


def test_a_broker_that_is_behind_is_followed_by_another() -> None:
    """It is the only one with an open connection, and does not know a topic that the others know."""

    async def test(model: ModelCluster, cluster: Cluster) -> None:
        await asyncio.sleep(1)  # the connections that the start has begun are open
        for node in (2, 3):
            for session in model.brokers[node].open_sessions:
                session.close()

        def forget(request: Received) -> None:
            known = model.topic_ids.pop("orders")
            model.describe(request)
            model.topic_ids["orders"] = known

        model.brokers[1].on(METADATA, forget)
        for _ in range(400):
            cluster.request_refresh()
            await asyncio.sleep(0.1)
            assert cluster.metadata.missing == set()
        assert cluster.metadata.leader(ORDERS) is not None

    scenario(test, brokers=3)


def test_topics_that_are_not_followed_any_more_are_not_looked_up() -> None:
    async def test(model: ModelCluster, cluster: Cluster) -> None:
        model.create("sales")
        await asyncio.sleep(1)
        cluster.follow_only(["sales"])
        await asyncio.sleep(1)
        cluster.request_refresh()
        await asyncio.sleep(1)
        last = model.brokers[1].received(METADATA)[-1]
        assert [topic.name for topic in last.values.topics] == ["sales"]
        assert cluster.metadata.topics == {"sales"}

    scenario(test)


def test_an_update_before_the_wait_for_it_is_not_missed() -> None:

    async def test(_: ModelCluster, cluster: Cluster) -> None:
        await asyncio.sleep(1)  # the look-up that the start has begun is over
        version = cluster.metadata.version
        await cluster.look_up(["orders"])
        async with asyncio.timeout(1):
            await cluster.updated_after(version)

    scenario(test)


@pytest.mark.parametrize("create", [False, True])
def test_a_look_up_creates_topics_only_if_it_is_told_to(create: bool) -> None:
    async def test(model: ModelCluster, cluster: Cluster) -> None:
        await asyncio.sleep(1)  # the look-up that the start has begun is over
        await cluster.look_up(["orders"], create=create)
        *others, last = model.brokers[1].received(METADATA)
        assert last.values.create_topics is create
        assert not any(request.values.create_topics for request in others)

    scenario(test)


def test_a_connection_that_cannot_be_opened_makes_the_cluster_look_for_other_leaders() -> None:
    async def test(model: ModelCluster, cluster: Cluster) -> None:
        await cluster.connect_to(2, purpose=Purpose.PRODUCE)
        model.stop(2)
        model.logs[ORDERS].lead(1)
        await asyncio.sleep(1)
        looked_up = len(model.brokers[1].received(METADATA)) + len(model.brokers[3].received(METADATA))
        with pytest.raises(ConnectionLostError):
            await cluster.connect_to(2, purpose=Purpose.PRODUCE)
        await asyncio.sleep(1)
        assert len(model.brokers[1].received(METADATA)) + len(model.brokers[3].received(METADATA)) > looked_up

    scenario(test, brokers=3)
