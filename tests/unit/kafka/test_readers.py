"""Clients reading faulty responses: an omission never means empty or done."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.protocol.metadata import MetadataResponse_v5
from aiokafka.protocol.produce import ProduceResponse_v7

from aioshard.kafka.aiokafka.client import BareClient
from aioshard.kafka.aiokafka.producer import KafkaProducer
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
BOTH = {ONE: Committed(5, ""), TWO: Committed(7, "")}
BROKERS = [(1, "localhost", 9092, None)]


class Client:
    """Answers each request of a kind with the same answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def get_random_node(self) -> int:
        return 1

    async def coordinator_lookup(self, *_: object) -> int:
        return 1

    async def send(self, _node: int, request: Any, **_group: object) -> Any:
        name = type(request).__name__
        self.asked.append(name)
        return self.answers[name]


# Topics --------------------------------------------------------------------------------


def topics(*found: tuple[int, str, bool, list[Any]]) -> MetadataResponse_v5:
    return MetadataResponse_v5(0, BROKERS, None, 1, list(found))


@pytest.mark.parametrize("creates_topics", [True, False])
async def test_only_producer_lookups_create_topics(creates_topics: bool) -> None:
    asked: list[Any] = []

    class Connection:
        async def send(self, request: Any) -> Any:
            asked.append(request)
            return topics((0, "orders", False, [(0, 0, 1, [], [], [])]))

    async def connection(_: int) -> Connection:
        return Connection()

    made: Any = object.__new__(BareClient)
    made._topics, made._creates_topics, made._get_conn = set(), creates_topics, connection
    made.cluster = SimpleNamespace(brokers=lambda: [SimpleNamespace(nodeId=1)], update_metadata=lambda _: None)
    assert await made.look_up("orders")
    assert [(request._topics, request._allow_auto_topic_creation) for request in asked] == [
        (["orders"], creates_topics)
    ]


# Publishing -------------------------------------------------------------------------------


async def test_a_batch_omitted_in_a_produce_response_is_resent() -> None:
    """With the same sequence numbers, so it is stored once in any case."""
    sent: list[Any] = []

    class Leader(Client):
        lost = None
        updated_at = 0.0

        async def send(self, _node: int, request: Any, **_group: object) -> Any:
            parts = dict(request._topics)["orders"]
            sent.append(parts)
            return ProduceResponse_v7([("orders", [(parts[0][0], 0, 5, -1, 0)])], 0)

        async def look_up(self, *_topics: str) -> bool:
            return True

        async def tear_down(self) -> None:
            return

        partition_count = staticmethod(lambda _topic: 2)
        leader = staticmethod(lambda _partition: 1)

    producer = KafkaProducer(Settings(bootstrap_servers="localhost:9092"))
    producer._client, producer._identity = cast(Any, Leader()), (7, 0)

    offsets = await asyncio.gather(*(producer.publish(Message("orders", b"v", partition=number)) for number in (0, 1)))

    assert offsets == [5, 5]
    assert sent[1:] == [[sent[0][1]]]
    await producer.close()
