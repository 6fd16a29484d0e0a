"""The Produce request, and the meaning of its answers for a batch and for the caller."""

import asyncio
from typing import Any

import pytest

from aioshard.errors import AuthorizationError, MessageTooLargeError
from aioshard.kafka.batches import BatchBuilder, Identity
from aioshard.kafka.produce import (
    NotSentError,
    Verdict,
    learn_leaders,
    no_partition,
    not_encoded,
    produce,
    refused,
    verdict,
)
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import IncompleteResponseError, UnsupportedVersionError, WireError
from aioshard.kafka.wire.metadata import Leader
from aioshard.kafka.wire.requests import PRODUCE
from aioshard.kafka.wire.start import connect
from aioshard.ports import Message
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster

ORDERS = TopicPartition("orders", 0)
MESSAGE = Message("orders", b"value", b"key")


def batch() -> bytes:
    builder = BatchBuilder(Identity(7, 0), 0)
    builder.add(MESSAGE, 0)
    return builder.build()


def exchange(leader: dict[str, int] | None = None, **options: Any) -> tuple[Received, set[TopicPartition], Leader]:
    """Send one batch; return the request, the partitions whose leader is news, and the leader."""

    async def live(network: MemoryNetwork) -> tuple[Received, set[TopicPartition], Leader]:
        model = ModelCluster(network, 2)
        model.create("orders")
        part = {"partition": 0, "error": 6, "offset": -1} | ({"leader": leader} if leader else {})
        topics = [{"topic": "orders", "partitions": [part]}]
        endpoints = [{"node": node, "host": f"kafka-{node}", "port": 9092} for node in (1, 2, 3)]
        model.brokers[1].on(PRODUCE, lambda request: request.reply(topics=topics, endpoints=endpoints))
        cluster = await connect(model.settings, ["orders"])
        try:
            response = await produce(cluster, 1, {ORDERS: batch()}, **options)
            moved = learn_leaders(cluster, response)
            known = cluster.metadata.leader(ORDERS)
            assert known is not None
            return model.brokers[1].received(PRODUCE)[-1], moved, known
        finally:
            await cluster.close()
            await model.close()

    return run_on_network(live)


# The request ------------------------------------------------------------------------------


def test_a_request_has_its_batches_and_waits_for_all_replicas() -> None:
    request, *_ = exchange()
    values = request.values
    assert request.version == PRODUCE.highest
    assert (values.transactional_id, values.acks, values.timeout_ms) == (None, -1, 10_000)
    assert [
        (topic.topic, [(part.partition, part.records) for part in topic.partitions]) for topic in values.topics
    ] == [("orders", [(0, batch())])]


def test_a_request_of_a_transaction_has_its_id_and_an_older_version() -> None:
    request, *_ = exchange(transactional_id="billing-0", newest=11)
    assert request.version == 11
    assert request.values.transactional_id == "billing-0"


def test_a_connection_that_cannot_be_opened_has_sent_nothing() -> None:
    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network)
        model.create("orders")
        cluster = await connect(model.settings, ["orders"])
        model.stop(1)
        await asyncio.sleep(0.01)  # the client has seen that its connection is gone
        try:
            with pytest.raises(NotSentError) as caught:
                await produce(cluster, 1, {ORDERS: batch()})
            assert verdict(caught.value) is Verdict.AGAIN
        finally:
            await cluster.close()
            await model.close()

    run_on_network(live)


def test_a_leader_is_news_if_its_epoch_is_newer() -> None:
    _, moved, leader = exchange({"node": 3, "epoch": 9})
    assert (moved, leader) == ({ORDERS}, Leader(3, 9)), "also a broker that joined a moment ago"
    _, moved, leader = exchange({"node": 2, "epoch": 0})
    assert (moved, leader.node) == (set(), 1)
    assert exchange()[1] == set()


# Its answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (None, Verdict.STORED),
        (NotSentError("refused"), Verdict.AGAIN),
        (UnsupportedVersionError("too old"), Verdict.REFUSED),
        (IncompleteResponseError("left out"), Verdict.IN_DOUBT),
        (WireError("lost"), Verdict.IN_DOUBT),
        (error_for(46), Verdict.STORED),
        (error_for(19), Verdict.AGAIN),
        (error_for(6), Verdict.IN_DOUBT),
        (error_for(-1), Verdict.SUSPECT),
        (error_for(999), Verdict.SUSPECT),
        (error_for(29), Verdict.REFUSED),
        (error_for(87), Verdict.MESSAGE_REFUSED),
        (error_for(45), Verdict.GAP),
        (error_for(47), Verdict.FENCED),
    ],
)
def test_an_answer_has_a_meaning(error: WireError | None, meaning: Verdict) -> None:
    assert verdict(error) is meaning


@pytest.mark.parametrize(
    ("code", "type_", "is_retriable"),
    [
        (10, MessageTooLargeError, False),
        (29, AuthorizationError, False),
        (87, Exception, False),
        (19, Exception, True),
    ],
)
def test_a_refusal_is_retriable_unless_it_would_come_again(code: int, type_: type, is_retriable: bool) -> None:
    error = refused(error_for(code), MESSAGE)
    assert isinstance(error, type_)
    assert "'orders'" in str(error)
    assert error.retriable is is_retriable

    in_doubt = refused(error_for(code), MESSAGE, is_in_doubt=True)
    assert type(in_doubt) is type(error)
    assert in_doubt.retriable
    assert "may have stored" in str(in_doubt)


def test_the_errors_of_a_message_that_cannot_be_sent_are_final() -> None:
    assert not not_encoded(MESSAGE).retriable
    assert "cannot be encoded (odd)" in str(not_encoded(MESSAGE, ValueError("odd.")))
    missing = no_partition(MESSAGE._replace(partition=3), 3)
    assert not missing.retriable
    assert "partitions 0 to 2 and not 3" in str(missing)
