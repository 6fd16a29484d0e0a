"""Each service that we support is used from end to end in its versions; another one is refused, with the reason."""

import pytest

from aioshard.errors import ConnectError
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.offsets import READ_COMMITTED, log_ranges
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.wire.requests import (
    ALL,
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    HEARTBEAT,
    JOIN_GROUP,
    METADATA,
    PRODUCE,
    SYNC_GROUP,
)
from aioshard.kafka.wire.start import connect
from aioshard.ports import Allowance, FetchedBatch, Message
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_cluster import ModelCluster
from tests.unit.kafka.producing import Broker, scenario
from tests.unit.kafka.wire.services import EVENT_HUBS, USABLE, Ranges

ORDERS = TopicPartition("orders", 0)
OPTIONAL = {CONSUMER_GROUP_DESCRIBE, CONSUMER_GROUP_HEARTBEAT, JOIN_GROUP, SYNC_GROUP, HEARTBEAT}
"""Requests for one group protocol, which not every broker has, or which aiokafka sends for members of the other one."""

each_usable = pytest.mark.parametrize("ranges", USABLE.values(), ids=USABLE)


def offer(model: ModelCluster, ranges: Ranges) -> None:
    for broker in model.brokers.values():
        broker.versions = {api: ranges[api.name] for api in ALL if api.name in ranges}


@each_usable
def test_every_request_has_a_common_version(ranges: Ranges) -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        offer(model, ranges)
        cluster = await connect(model.settings)
        try:
            lacking = [api.name for api in ALL if not await cluster.supports(1, api, api.lowest)]
        finally:
            await cluster.close()
        assert set(lacking) <= {api.name for api in OPTIONAL}

    run_on_network(live)


@each_usable
def test_records_are_read(ranges: Ranges) -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        offer(model, ranges)
        (log,) = model.create("orders")
        log.append(b"a", b"b")
        cluster = await connect(model.settings, ["orders"])
        fetcher = Fetcher(cluster, read_committed=True, max_bytes=1 << 20, max_wait=0.5)
        fetcher.start()
        try:
            ((start, end, _),) = (await log_ranges(cluster, [ORDERS], READ_COMMITTED, 1.0)).values()
            assert (start, end) == (0, 2)
            fetcher.add([ORDERS])
            fetcher.seek(ORDERS, start)
            fetcher.resume([ORDERS])
            values: list[bytes | None] = []
            while len(values) < end:
                await fetcher.readable.wait()
                for batch in fetcher.take(lambda _: Allowance(10, 1 << 20)).new:
                    assert isinstance(batch, FetchedBatch)
                    values += [record.value for record in batch.records]
            assert values == [b"a", b"b"]
        finally:
            await fetcher.close()
            await cluster.close()
            await model.close()

    run_on_network(live)


@each_usable
def test_messages_are_published(ranges: Ranges) -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        assert await producer.publish(Message("orders", b"0")) == 0
        assert await producer.publish(Message("orders", b"1")) == 1
        assert broker.log() == [b"0", b"1"]
        sent = broker.model.brokers[1].received(PRODUCE)[-1]
        assert sent.version == min(PRODUCE.highest, ranges["Produce"][1])

    scenario(test, prepare=lambda model: offer(model, ranges))


def test_a_service_with_the_metadata_of_kafka_1_is_refused_with_the_reason() -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        offer(model, EVENT_HUBS)
        with pytest.raises(
            ConnectError, match=r"^kafka-1:9092 speaks no .* 0 to 5\. aioshard supports Kafka 2\.8 and newer"
        ):
            await connect(model.settings)

    run_on_network(live)


def test_a_cluster_that_names_no_brokers_is_not_said_to_close_connections() -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        model.brokers[1].on(METADATA, lambda request: request.reply())
        with pytest.raises(ConnectError, match="the brokers of the cluster are missing"):
            await connect(model.settings)

    run_on_network(live)
