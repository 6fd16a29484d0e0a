"""The cluster of three brokers and its proxies inject exactly the chosen faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import KafkaConnectionError, NotCoordinatorForGroupError
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest

from tests.support.proxies import METADATA, OFFSET_FETCH, Request
from tests.support.three_brokers import NODES, ThreeBrokers


@asynccontextmanager
async def connected(
    brokers: ThreeBrokers, node: int = 1, client_id: str = "asking", patience: int = 4_000
) -> AsyncIterator[AIOKafkaConnection]:
    """A connection through a proxy, on which a request is given up after *patience* milliseconds."""
    port = brokers.nodes[node].ports.proxy
    connection = await create_conn("127.0.0.1", port, client_id=client_id, request_timeout_ms=patience)
    try:
        yield connection
    finally:
        connection.close()


@pytest.mark.chaos
async def test_a_coordinator_moves_between_nodes_without_stopping_any(
    brokers: ThreeBrokers, topic: str, group: str
) -> None:
    await brokers.create_topic(topic)
    first = await brokers.coordinator_of(group)
    async with AIOKafkaConsumer(
        bootstrap_servers=brokers.bootstrap, group_id=group, enable_auto_commit=False
    ) as member:
        member.assign([TopicPartition(topic, 0)])
        await member.commit({TopicPartition(topic, 0): 7})

    moved = [await brokers.move_coordinator(group) for _ in NODES]

    assert moved[-1] == first
    assert set(moved) == set(NODES)
    assert await brokers.move_coordinator(group, moved[0]) == await brokers.coordinator_of(group) == moved[0]
    assert all(broker.answers for broker in brokers.nodes.values())
    assert await brokers.committed(group, topic) == {0: 7}
    for number in range(4):  # of each partition of offsets; the hash of its name may be negative
        await brokers.move_coordinator(f"{group}-{number}")


@pytest.mark.chaos
async def test_a_partition_has_no_leader_until_its_only_replica_restarts(brokers: ThreeBrokers, topic: str) -> None:
    await brokers.create_topic(topic, assignment={0: [2], 1: [3]})

    await brokers.stop(2)

    assert [await brokers.leader_of(topic, partition) for partition in range(2)] == [None, 3]
    await brokers.produce(topic, [(None, b"x")], partition=1)
    await brokers.start(2)
    await brokers.until_led(topic, 0, by=2)


async def test_leaders_and_replicas_move_and_nothing_is_lost(brokers: ThreeBrokers, topic: str) -> None:
    await brokers.create_topic(topic, assignment={0: [1, 2]})
    await brokers.produce(topic, [(None, b"a")])

    assert await brokers.move_leader(topic, 0, to=2) == 2
    await brokers.reassign(topic, 0, [3, 1])
    assert await brokers.move_leader(topic) in (1, 3)
    await brokers.add_partitions(topic, 4)

    assert [record.value for record in await brokers.read(topic)] == [b"a"]
    assert {await brokers.leader_of(topic, partition) for partition in range(4)} <= set(NODES)


@pytest.mark.chaos
async def test_another_node_leads_when_one_is_killed_or_hangs(brokers: ThreeBrokers, topic: str) -> None:
    await brokers.create_topic(topic, assignment={0: [1, 2, 3], 1: [2, 3, 1]})
    await brokers.produce(topic, [(None, b"a")], partition=0)

    await brokers.freeze(1)
    await brokers.until_fenced(1)
    await brokers.until_led(topic, 0, by=2)
    await brokers.thaw(1)
    await brokers.kill(3)
    await brokers.until_fenced(3)

    await brokers.produce(topic, [(None, b"b")], partition=0)
    assert [record.value for record in await brokers.read(topic)] == [b"a", b"b"]


@pytest.mark.chaos
async def test_a_client_that_bootstraps_through_the_proxies_stays_behind_them(
    brokers: ThreeBrokers, topic: str
) -> None:
    await brokers.create_topic(topic, assignment={0: [1], 1: [2], 2: [3]})
    await brokers.produce(topic, [(None, b"x")] * 3)
    everything = brokers.proxies.delay(0.01, client_id="behind")
    reader = AIOKafkaConsumer(
        topic, bootstrap_servers=brokers.proxied_bootstrap, client_id="behind", auto_offset_reset="earliest"
    )

    async with asyncio.timeout(30), reader:
        assert [(await reader.getone()).value for _ in range(3)] == [b"x"] * 3

    assert {request.node for request in everything.requests} == set(NODES)


async def test_a_held_request_arrives_when_it_is_released(brokers: ThreeBrokers, group: str) -> None:
    """The coordinator has moved meanwhile; other clients and other requests of that one pass."""
    node = await brokers.coordinator_of(group)
    held = brokers.proxies.hold(api_key=OFFSET_FETCH, client_id="successor*")

    async with connected(brokers, node, "successor-1") as successor, connected(brokers, node, "other") as other:
        asked = asyncio.create_task(successor.send(OffsetFetchRequest(group, None)))
        async with asyncio.timeout(10):
            await held.met.wait()
        assert (await other.send(OffsetFetchRequest(group, None))).error_code == 0
        await brokers.move_coordinator(group)
        assert not asked.done()
        held.lift()
        assert (await asked).error_code == NotCoordinatorForGroupError.errno

    assert [(request.node, request.client_id) for request in held.requests] == [(node, "successor-1")]


async def test_a_stranded_request_arrives_when_its_client_has_sent_it_again(brokers: ThreeBrokers, group: str) -> None:
    stranded = brokers.proxies.strand(api_key=OFFSET_FETCH, client_id="asking")
    async with connected(brokers) as asking, connected(brokers, client_id="other") as other:
        first = asyncio.create_task(asking.send(OffsetFetchRequest(group, None)))
        with pytest.raises(KafkaConnectionError):
            await first
        assert stranded.met.is_set()
        await other.send(MetadataRequest([]))
    async with connected(brokers) as asking:
        await asking.send(OffsetFetchRequest(group, None))
    async with asyncio.timeout(10):
        answer = await stranded.arrive()

    (request,) = stranded.requests
    assert int.from_bytes(answer[:4]) == request.correlation_id


async def test_a_black_hole_answers_nothing_and_closes_its_connections_at_the_end(brokers: ThreeBrokers) -> None:
    async with connected(brokers, patience=1_000) as asking, connected(brokers, client_id="other") as other:
        hole = brokers.proxies.swallow(client_id="asking")
        with pytest.raises(TimeoutError):
            await asking.send(MetadataRequest([]))
        assert [request.api_key for request in hole.requests] == [METADATA]
        assert asking.connected()
        await other.send(MetadataRequest([]))

        hole.lift()

        async with asyncio.timeout(10):
            while asking.connected():  # noqa: ASYNC110  (a connection sends no event)
                await asyncio.sleep(0.01)
    async with connected(brokers) as asking:
        await asking.send(MetadataRequest([]))


async def test_a_cut_off_node_refuses_connections_while_the_others_accept_them(brokers: ThreeBrokers) -> None:
    async with connected(brokers, node=2) as asking:
        cut = brokers.proxies.cut(node=2)
        with pytest.raises(KafkaConnectionError):
            await asking.send(MetadataRequest([]))
        with pytest.raises(KafkaConnectionError):
            async with connected(brokers, node=2):
                pass
    async with connected(brokers, node=3) as asking:
        await asking.send(MetadataRequest([]))
    cut.lift()
    async with connected(brokers, node=2) as asking:
        await asking.send(MetadataRequest([]))


async def test_responses_can_be_delayed_changed_or_lost(brokers: ThreeBrokers) -> None:
    def losing(request: Request, answer: bytes) -> None:
        assert request.api_key == METADATA
        assert len(answer) > 8

    loop = asyncio.get_running_loop()
    async with connected(brokers) as asking:
        late = brokers.proxies.delay(0.2, api_key=METADATA)
        began = loop.time()
        await asyncio.gather(*(asking.send(MetadataRequest([])) for _ in range(4)))
        assert 0.2 <= loop.time() - began < 0.6  # each of them late, not one after the other
        late.lift()
        brokers.proxies.answer(losing, api_key=METADATA, client_id="asking")
        with pytest.raises(KafkaConnectionError):
            await asking.send(MetadataRequest([]))


@pytest.mark.chaos
async def test_a_cluster_left_broken_by_a_test_is_repaired_for_the_next(brokers: ThreeBrokers, topic: str) -> None:
    await brokers.create_topic(topic, assignment={0: [1, 2, 3]})
    await brokers.kill(1)
    await brokers.freeze(2)
    brokers.proxies.cut()

    await brokers.__aexit__()
    await brokers.__aenter__()

    assert all(broker.answers for broker in brokers.nodes.values())
    async with connected(brokers, node=1) as asking:
        await asking.send(MetadataRequest([]))
