"""The producer's sequence numbers, requests and refusals: a message is stored once, or its caller learns that not."""

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import pytest

from aioshard.errors import AuthorizationError, ClientLostError, MessageTooLargeError, SettingsError, TransportError
from aioshard.kafka import batches, partitioning
from aioshard.kafka import producer as producing
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.wire.cluster import QUICK_TIMEOUT
from aioshard.kafka.wire.requests import INIT_PRODUCER_ID, METADATA, PRODUCE
from aioshard.ports import UNKNOWN_OFFSET, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.model_broker import Received
from tests.unit.kafka.producing import Batch, Broker, LostError, answering, scenario, stored

UNKNOWN, TOO_LARGE, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER, DUPLICATE = -1, 10, 19, 45, 46
NOT_LEADER, TOPIC_DENIED, INVALID_EPOCH, FENCED_LEADER_EPOCH, INVALID_RECORD = 6, 29, 47, 74, 87
ORDERS = TopicPartition("orders", 0)
IN_DOUBT = [3, 5, 6, 7, 13, 20, 56, 999]
"""Codes after which a batch may be stored; 999 is unknown."""
REFUSALS = [2, 10, 17, 18, 29, 31, 32, 43, 44, 45, 47, 59, 76, 87, 999]


def publish(producer: KafkaProducer, *values: bytes, partition: int = 0) -> list[asyncio.Task[int]]:
    return [
        asyncio.create_task(producer.publish(Message("orders", value, partition=partition)), name=str(value))
        for value in values
    ]


async def ends(calls: Sequence[Awaitable[int]]) -> list[int | BaseException]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def look_up(producer: KafkaProducer) -> None:
    """Do what the client does now and then."""
    assert producer._cluster is not None
    await producer._cluster.look_up(["orders"])


def look_ups(broker: Broker) -> list[Received]:
    """The look-ups of topics, in the order of their arrival at each broker."""
    return [request for model in broker.model.brokers.values() for request in model.received(METADATA)]


def lost(broker: Broker, batch: Batch) -> tuple[int, int]:
    """Store a batch and lose the answer."""
    stored(broker, batch)
    raise LostError


# Retries ---------------------------------------------------------------------------------


def test_a_batch_in_doubt_is_resent_unchanged_after_a_pause() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(0, NOT_LEADER, 0, NOT_LEADER)
        await producer.publish(Message("orders", b"0"))
        await producer.publish(Message("orders", b"1"))
        began = asyncio.get_running_loop().time()
        await producer.publish(Message("orders", b"2"))
        assert asyncio.get_running_loop().time() - began >= 0.09
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 1, 1), (7, 0, 1, 1), (7, 0, 2, 1), (7, 0, 2, 1)]
        assert broker.sent[1].data == broker.sent[2].data

    scenario(test)


def test_a_retry_has_the_same_bytes_even_if_a_caller_has_given_up() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(NOT_LEADER)
        broker.answers.clear()
        given_up, waiting = publish(producer, b"0", b"1")
        await asyncio.sleep(0.01)
        given_up.cancel()
        broker.answers.set()
        assert await waiting == 1
        assert broker.sent[0].data == broker.sent[1].data
        assert broker.log() == [b"0", b"1"]

    scenario(test)


@pytest.mark.parametrize("code", [UNKNOWN, 2, *IN_DOUBT])
def test_an_uncertain_answer_is_asked_again(code: int) -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(code, stores=[0])
        assert await producer.publish(Message("orders", b"0")) == 0
        assert await producer.publish(Message("orders", b"1")) == 1
        assert broker.log() == [b"0", b"1"]
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 0, 1), (7, 0, 1, 1)]

    scenario(test)


def test_a_batch_that_an_answer_leaves_out_is_in_doubt() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        def leave_out(broker: Broker, batch: Batch) -> None:
            stored(broker, batch)
            broker.answer = answering(INVALID_RECORD)

        broker.answer = leave_out
        with pytest.raises(TransportError) as caught:
            await producer.publish(Message("orders", b"0"))
        assert caught.value.retriable
        assert await producer.publish(Message("orders", b"1")) == 1
        assert broker.log() == [b"0", b"1"]

    scenario(test)


def test_lost_answers_are_asked_again_and_again() -> None:
    """Unlike an error that a broker cannot name."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        left = [lost] * 5

        def answer(broker: Broker, batch: Batch) -> tuple[int, int]:
            return left.pop()(broker, batch) if left else stored(broker, batch)

        broker.answer = answer
        assert await producer.publish(Message("orders", b"0")) == 0
        assert broker.numbers() == [(7, 0, 0, 1)] * 6

    scenario(test)


# Batches in doubt ------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("first", [None, UNKNOWN, *IN_DOUBT])
def test_numbers_of_a_batch_in_doubt_are_not_used_again(first: int | None, refusal: int) -> None:
    """The broker has stored it, and would take the next message with its numbers for a copy."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        assert await producer.publish(Message("orders", b"0")) == 0
        again = answering(refusal, refusal)

        def answer(broker: Broker, batch: Batch) -> tuple[int, int] | None:
            broker.answer = again
            return lost(broker, batch) if first is None else answering(first, stores=[0])(broker, batch)

        broker.answer = answer
        with pytest.raises(TransportError) as caught:
            await producer.publish(Message("orders", b"1"))
        assert caught.value.retriable, "it may have been stored"
        broker.answer = stored
        assert await producer.publish(Message("orders", b"2")) == 2
        assert broker.log() == [b"0", b"1", b"2"]

    scenario(test)


def test_the_type_of_a_refusal_says_its_reason_even_in_doubt() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(NOT_LEADER, TOO_LARGE, NOT_LEADER, TOPIC_DENIED)
        with pytest.raises(MessageTooLargeError) as large:
            await producer.publish(Message("orders", b"0"))
        with pytest.raises(AuthorizationError) as denied:
            await producer.publish(Message("orders", b"1"))
        assert large.value.retriable
        assert denied.value.retriable

    scenario(test)


def test_a_batch_in_doubt_is_not_split() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(NOT_LEADER, TOO_LARGE, stores=[0])
        refused = await ends(publish(producer, b"0", b"1"))
        assert [type(error) for error in refused] == [MessageTooLargeError] * 2
        assert await producer.publish(Message("orders", b"2")) == 2
        assert broker.numbers() == [(7, 0, 0, 2), (7, 0, 0, 2), (7, 1, 0, 1)]

    scenario(test)


def test_numbers_of_a_refused_first_attempt_are_used_again() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(0, INVALID_RECORD, NOT_ENOUGH_REPLICAS, INVALID_RECORD)
        await producer.publish(Message("orders", b"0"))
        for value in (b"1", b"2"):
            with pytest.raises(TransportError) as caught:
                await producer.publish(Message("orders", value))
            assert not caught.value.retriable
        assert await producer.publish(Message("orders", b"3")) == 1
        assert broker.numbers()[-1] == (7, 0, 1, 1)

    scenario(test)


def test_a_late_copy_of_an_abandoned_batch_is_refused() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        broker.answer = answering(NOT_LEADER)
        broker.answers.clear()
        [given_up] = publish(producer, b"1")
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.01)
        broker.answers.set()
        [late] = broker.requests[1]
        assert await producer.publish(Message("orders", b"1 again")) == 1
        assert await producer.publish(Message("orders", b"2")) == 2
        assert stored(broker, late)[0] == INVALID_EPOCH
        assert broker.log() == [b"0", b"1 again", b"2"]
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 1, 1), (7, 1, 0, 1), (7, 1, 1, 1)]

    scenario(test)


def test_a_new_epoch_leaves_batches_of_other_partitions_alone() -> None:
    """One is in doubt and keeps its bytes; a quiet one keeps its numbers; none is doubled."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        for partition in range(3):
            await producer.publish(Message("orders", b"0", partition=partition))
        answers = {0: answering(NOT_LEADER, NOT_LEADER, stores=[0]), 1: answering(OUT_OF_ORDER)}

        def answer(broker: Broker, batch: Batch) -> tuple[int, int] | None:
            return answers.get(batch.partition.partition, stored)(broker, batch)

        broker.answer = answer
        calls = [*publish(producer, b"1", partition=0), *publish(producer, b"1", partition=1)]
        assert await ends(calls) == [1, 1]
        for partition in range(3):
            await producer.publish(Message("orders", b"2", partition=partition))
        assert broker.log(0) == broker.log(1) == [b"0", b"1", b"2"]
        assert broker.log(2) == [b"0", b"2"]
        assert {batch.data for batch in broker.sent if batch.values == [b"1"] and batch.partition.partition == 0} == {
            broker.sent[3].data
        }
        assert broker.numbers(1) == [(7, 0, 0, 1), (7, 0, 1, 1), (7, 1, 0, 1), (7, 1, 1, 1)]
        assert broker.numbers(2) == [(7, 0, 0, 1), (7, 0, 1, 1)]

    scenario(test, partitions=3)


def test_a_batch_that_was_never_sent_uses_no_numbers() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        broker.model.stop(1)
        await asyncio.sleep(0.01)  # the client has seen that its connections are gone
        with pytest.raises(TransportError) as caught:
            await producer.publish(Message("orders", b"1"))
        assert caught.value.retriable
        broker.model.start(1)
        assert await producer.publish(Message("orders", b"2")) == 1
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 1, 1)]

    scenario(test)


def test_a_broken_client_leaves_its_batches_in_doubt() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))

        cluster: Any = producer._cluster
        ask = cluster.ask

        async def broken(*arguments: Any, **options: Any) -> None:
            await ask(*arguments, **options)
            raise ZeroDivisionError

        cluster.ask = broken
        with pytest.raises(ClientLostError):
            await producer.publish(Message("orders", b"1"))
        assert broker.log() == [b"0", b"1"]
        assert await producer.publish(Message("orders", b"2")) == 2
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 1, 1), (7, 1, 0, 1)]

    scenario(test)


# Sequence numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("code", [OUT_OF_ORDER, 59])
def test_after_a_gap_a_batch_is_sent_in_a_new_epoch(code: int) -> None:
    """The broker has forgotten the producer, or messages. Nothing is stored, so nothing can be doubled."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(0, code)
        await producer.publish(Message("orders", b"0"))
        assert await ends(publish(producer, b"1", b"2")) == [1, 2]
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 1, 2), (7, 1, 0, 2)]

    scenario(test)


def test_a_batch_is_not_renewed_again_and_again() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(OUT_OF_ORDER, OUT_OF_ORDER)
        with pytest.raises(TransportError) as caught:
            await producer.publish(Message("orders", b"0"))
        assert caught.value.retriable
        assert await producer.publish(Message("orders", b"1")) == 0
        assert broker.numbers() == [(7, 0, 0, 1), (7, 1, 0, 1), (7, 2, 0, 1)]

    scenario(test)


@pytest.mark.parametrize("code", [INVALID_EPOCH, 49, 90])
def test_a_producer_id_that_others_use_is_replaced(code: int) -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(0, 0, code)
        await producer.publish(Message("orders", b"0", partition=0))
        await producer.publish(Message("orders", b"0", partition=1))
        assert await producer.publish(Message("orders", b"1", partition=0)) == 1
        assert broker.numbers(0) == [(7, 0, 0, 1), (7, 0, 1, 1), (8, 0, 0, 1)]
        # Another partition keeps its id: a new one would not fence late copies of its batches.
        await producer.publish(Message("orders", b"1", partition=1))
        assert broker.numbers(1) == [(7, 0, 0, 1), (7, 0, 1, 1)]

    scenario(test, partitions=2)


def test_after_the_last_epoch_comes_a_new_producer_id() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(NOT_LEADER, INVALID_RECORD, stores=[0])
        with pytest.raises(TransportError):
            await producer.publish(Message("orders", b"0"))
        assert await producer.publish(Message("orders", b"1")) == 1
        assert broker.numbers() == [(7, 32767, 0, 1), (7, 32767, 0, 1), (8, 0, 0, 1)]

    scenario(test, identity=(7, 32767))


def test_numbers_begin_again_after_the_last_one() -> None:
    """Inside a batch, as the broker counts."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        name = TopicPartition("orders", 0)
        producer._partitions[name] = producing._Partition(name, identity=producer._identity, sequence=2**31 - 2)
        assert await ends(publish(producer, b"0", b"1", b"2")) == [0, 1, 2]
        broker.answer = answering(NOT_LEADER, stores=[0])
        assert await producer.publish(Message("orders", b"3")) == 3
        assert broker.numbers() == [(7, 0, 2**31 - 2, 3), (7, 0, 1, 1), (7, 0, 1, 1)]

    scenario(test)


def test_the_offset_of_a_forgotten_duplicate_is_unknown() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(DUPLICATE, stores=[0])
        assert await ends(publish(producer, b"0", b"1")) == [UNKNOWN_OFFSET, UNKNOWN_OFFSET]
        assert await producer.publish(Message("orders", b"2")) == 2

    scenario(test)


# Refused batches -------------------------------------------------------------------------


def refusing(broker: Broker, batch: Batch) -> tuple[int, int]:
    return (INVALID_RECORD, -1) if any(b"bad" in value for value in batch.values) else stored(broker, batch)


def test_one_bad_message_of_a_batch_fails_alone() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = refusing
        values = [b"%d" % number for number in range(500)]
        values[123] = values[400] = b"bad"
        results = await ends(publish(producer, *values))
        assert [number for number, end in enumerate(results) if isinstance(end, TransportError)] == [123, 400]
        assert broker.log() == [value for value in values if value != b"bad"]
        assert len(broker.sent) <= 1 + 2 * 2 * 9, "each half is searched, not each message"

    scenario(test)


def test_a_batch_that_is_too_large_as_a_whole_is_halved() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        def answer(broker: Broker, batch: Batch) -> tuple[int, int]:
            return (TOO_LARGE, -1) if len(batch.values) > 3 else stored(broker, batch)

        broker.answer = answer
        assert await ends(publish(producer, *(b"%d" % number for number in range(10)))) == list(range(10))
        assert [size for *_, size in broker.numbers()] == [10, 5, 3, 2, 5, 3, 2]

    scenario(test)


def test_a_message_that_cannot_be_encoded_fails_alone() -> None:
    """Even as the first one of a batch, before one of more than a batch."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        bad = Message("orders", b"bad", headers=((b"trace", b"1"),), partition=0)  # type: ignore[arg-type]
        for values in ([b"0", bytes(100_000)], [bytes(100_000), b"0"], []):
            for position in range(len(values) + 1):
                calls: list[Awaitable[int]] = [*publish(producer, *values)]
                calls.insert(position, asyncio.create_task(producer.publish(bad)))
                refused = (await ends(calls))[position]
                assert isinstance(refused, TransportError)
                assert not refused.retriable
        assert len(broker.log()) == 3 * 2 * 2

    scenario(test)


# Requests --------------------------------------------------------------------------------


def test_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers close the connection on a larger one, and it would be sent again and again."""
    monkeypatch.setattr(producing, "REQUEST_BYTES", 10_000)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        calls = [call for number in range(50) for call in publish(producer, bytes(1000), partition=number)]
        calls += publish(producer, bytes(9000), partition=50)
        calls += publish(producer, bytes(9000), partition=51)
        calls += publish(producer, bytes(12_000), partition=52)
        await asyncio.gather(*calls)
        sizes = [[len(batch.data) for batch in request] for request in broker.requests]
        assert all(sum(request) <= 10_000 or len(request) == 1 for request in sizes)
        assert len(sizes) <= 10

    scenario(test, partitions=53)


def test_partitions_without_room_in_a_request_come_first_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "REQUEST_BYTES", 2_500)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        def busy(partition: int) -> None:
            if len(broker.requests) < 20:
                sent = producer.send(Message("orders", bytes(1000), partition=partition))
                sent.add_done_callback(lambda _: busy(partition))

        for partition in range(5):
            busy(partition)
        while len(broker.requests) < 20:  # noqa: ASYNC110 - each step is one of the broker
            await asyncio.sleep(0.001)
        served = [{batch.partition.partition for batch in request} for request in broker.requests]
        for begin in range(15):
            assert set().union(*served[begin : begin + 4]) == set(range(5)), "none starves"

    scenario(test, partitions=5)


def test_nothing_is_sent_to_a_broker_that_throttles() -> None:
    """It reads nothing for that long, and a request would only time out and be repeated."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        loop = asyncio.get_running_loop()
        broker.model.logs[TopicPartition("orders", 1)].leader = 2
        await look_up(producer)
        broker.throttle = [12_000]
        await producer.publish(Message("orders", b"0", partition=0))
        began = loop.time()
        [waiting] = publish(producer, b"1", partition=0)
        await producer.publish(Message("orders", b"0", partition=1))
        assert loop.time() - began < 1, "other brokers do not throttle"
        assert await waiting == 1
        assert 11.9 <= loop.time() - began < 12.1, "it does not wait twice"
        assert len(broker.requests) == 3

    scenario(test, partitions=2, brokers=2)


def test_a_message_that_is_given_up_while_the_broker_throttles_is_not_sent() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.throttle = [12_000]
        await producer.publish(Message("orders", b"0"))
        [call] = publish(producer, b"1")
        await asyncio.sleep(1)
        call.cancel()
        assert await producer.publish(Message("orders", b"2")) == 1
        assert broker.log() == [b"0", b"2"]

    scenario(test)


def test_each_message_is_given_up_when_it_has_waited_for_30_seconds() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        loop = asyncio.get_running_loop()
        ended: list[float] = []
        broker.throttle = [95_000]
        await producer.publish(Message("orders", b"0"))
        began = loop.time()
        for number in range(4):
            call = producer.send(Message("orders", b"%d" % number))
            call.add_done_callback(lambda call: ended.append(loop.time() - began) if call.exception() else None)
            await asyncio.sleep(10)
        await asyncio.sleep(40)
        assert ended == pytest.approx([30, 40, 50, 60], abs=0.01)
        assert await producer.publish(Message("orders", b"taken")) == 1

    scenario(test)


def test_a_throttled_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new client would only add load."""
    monkeypatch.setattr(producing, "_QUIET", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.throttle = [60_000]
        await producer.publish(Message("orders", b"0"))
        cluster = producer._cluster
        [call] = publish(producer, b"1")
        await asyncio.sleep(1)
        assert producer.trouble is not None
        assert "quota" in producer.trouble
        with pytest.raises(TransportError, match="quota"):
            await call
        assert producer._cluster is cluster

    scenario(test)


# Brokers ---------------------------------------------------------------------------------


def test_a_batch_moves_with_its_leader() -> None:
    """The old leader does not name the new one; a look-up does."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        broker.model.logs[ORDERS].lead(2)
        assert await ends(publish(producer, b"1", b"2")) == [1, 2]
        assert broker.asked == [1, 1, 2]
        assert broker.sent[1].data == broker.sent[2].data

    scenario(test, brokers=2)


def test_a_batch_is_sent_immediately_to_the_leader_that_an_answer_names() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        broker.names_leaders = True
        broker.model.logs[ORDERS].lead(2)
        looked_up = len(look_ups(broker))
        began = asyncio.get_running_loop().time()
        assert await producer.publish(Message("orders", b"1")) == 1
        assert asyncio.get_running_loop().time() - began < 0.05
        assert broker.asked == [1, 1, 2]
        assert broker.sent[1].data == broker.sent[2].data
        assert len(look_ups(broker)) == looked_up

    scenario(test, brokers=2)


def test_a_leader_that_is_not_news_does_not_end_the_pause() -> None:
    """Two brokers that each name the other would be asked again and again."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.names_leaders = True
        broker.answer = answering(NOT_LEADER, NOT_LEADER, NOT_LEADER)
        began = asyncio.get_running_loop().time()
        await producer.publish(Message("orders", b"0"))
        assert asyncio.get_running_loop().time() - began > 0.19
        assert len(broker.requests) == 4

    scenario(test)


def test_a_broker_that_a_leader_hint_introduces_is_found() -> None:
    """It has joined since the last look-up."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        broker.names_leaders = True
        new = broker.add_broker()
        broker.model.logs[ORDERS].lead(new)
        looked_up = len(look_ups(broker))
        assert await producer.publish(Message("orders", b"1")) == 1
        assert broker.asked == [1, 1, new]
        assert len(look_ups(broker)) == looked_up

    scenario(test)


def test_a_broker_that_hangs_delays_no_messages_for_others() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.model.logs[TopicPartition("orders", 1)].leader = 2
        await look_up(producer)
        for partition in range(2):
            await producer.publish(Message("orders", b"0", partition=partition))
        broker.model.brokers[2].silent = True
        began = asyncio.get_running_loop().time()
        [hanging] = publish(producer, b"1", partition=1)
        await ends(publish(producer, b"1", partition=0))
        await producer.publish(Message("orders", b"2", partition=0))
        assert asyncio.get_running_loop().time() - began < 0.1
        # Nor a look-up, which a new topic needs.
        broker.model.create("refunds")
        await producer.publish(Message("refunds", b"0"))
        assert asyncio.get_running_loop().time() - began < QUICK_TIMEOUT + 0.5
        broker.model.brokers[2].silent = False
        assert await hanging == 1
        assert asyncio.get_running_loop().time() - began >= 10

    scenario(test, partitions=2, brokers=2)


def test_a_slow_request_delays_no_look_up() -> None:
    """Its broker answers the requests of one connection one after another."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answers.clear()
        [slow] = publish(producer, b"0")
        sent = await broker.model.brokers[1].arrival(PRODUCE, 2)
        await look_up(producer)
        assert look_ups(broker)[-1].session is not sent.session
        assert not slow.done()
        broker.answers.set()
        assert await slow == 0

    scenario(test)


def test_a_producer_id_comes_from_any_broker() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.model.brokers[1].on(INIT_PRODUCER_ID, lambda _: None)
        broker.answer = answering(INVALID_EPOCH, INVALID_EPOCH)  # both times, a new id is needed
        began = asyncio.get_running_loop().time()
        await ends(publish(producer, b"0"))
        assert await producer.publish(Message("orders", b"1")) == 0
        assert asyncio.get_running_loop().time() - began < 2 * 3.5
        assert {number[0] for number in broker.numbers()} == {7, 8, 9}

    scenario(test, brokers=2)


def test_a_broker_without_a_version_that_we_speak_is_named() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        with pytest.raises(TransportError, match="kafka-1:9092 speaks no version of Produce"):
            await producer.publish(Message("orders", b"0"))
        assert not broker.sent

    scenario(test, prepare=lambda model: model.brokers[1].versions.update({PRODUCE: (0, 2)}))


def test_a_producer_id_is_requested_again_while_the_coordinator_loads() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        def load(request: Received) -> None:
            broker.model.brokers[1].on(INIT_PRODUCER_ID, broker.identify)
            request.reply(error=14)

        broker.model.brokers[1].on(INIT_PRODUCER_ID, load)
        broker.answer = answering(INVALID_EPOCH)
        assert await producer.publish(Message("orders", b"0")) == 0
        assert broker.numbers() == [(7, 0, 0, 1), (8, 0, 0, 1)]

    scenario(test)


def test_a_refused_producer_id_fails_the_messages() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.model.brokers[1].on(INIT_PRODUCER_ID, lambda request: request.reply(error=31))
        broker.answer = answering(INVALID_EPOCH)
        with pytest.raises(AuthorizationError, match="IDEMPOTENT_WRITE"):
            await producer.publish(Message("orders", b"0"))

    scenario(test)


def test_only_its_own_look_ups_create_topics() -> None:
    """Those that keep the metadata up to date would create topics that were just deleted."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        before = len(look_ups(broker))
        broker.model.create("refunds")
        await producer.publish(Message("refunds", b"0"))
        assert producer._cluster is not None
        created = len(look_ups(broker))
        producer._cluster.request_refresh()
        await broker.model.brokers[1].arrival(METADATA, created + 1)
        flags = [request.values.create_topics for request in look_ups(broker)[before:]]
        assert flags == [True] * (created - before) + [False]

    scenario(test)


def test_a_topic_that_this_user_may_not_see_fails_its_messages() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.model.denied.add("refunds")
        with pytest.raises(AuthorizationError, match="write to topic 'refunds'"):
            await producer.publish(Message("refunds", b"0"))
        broker.model.denied.clear()
        broker.model.create("refunds")
        assert await producer.publish(Message("refunds", b"0")) == 0

    scenario(test)


def test_an_old_answer_without_the_topic_does_not_make_it_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        known = broker.model.topic_ids.pop("orders")
        broker.answer = answering(NOT_LEADER)
        [call] = publish(producer, b"0")
        await broker.model.brokers[1].arrival(METADATA, len(look_ups(broker)) + 1)
        broker.model.topic_ids["orders"] = known
        assert await call == 0

    scenario(test)


def test_a_refusal_on_opening_a_connection_proves_that_nothing_was_sent() -> None:
    """For example, because the password was changed. The message waits, and its numbers stay its own."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        model = broker.model.brokers[1]
        versions = model.versions.pop(METADATA)
        model.received(PRODUCE)[-1].session.close()
        [call] = publish(producer, b"1")
        await asyncio.sleep(5)
        assert not call.done()
        model.versions[METADATA] = versions
        assert await call == 1
        assert broker.numbers() == [(7, 0, 0, 1), (7, 0, 1, 1)]

    scenario(test)


def test_a_deleted_topic_is_missing_although_it_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        broker.model.delete("orders")
        for _ in range(2):
            with pytest.raises(TransportError, match="topic 'orders' does not exist"):
                await producer.publish(Message("orders", b"1"))
        broker.model.create("orders")
        await producer.publish(Message("orders", b"2"))

    scenario(test)


def test_numbers_continue_after_the_brokers_have_called_a_topic_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts may do that. Numbers that begin again would make the next message pass for a duplicate."""
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        known = broker.model.topic_ids.pop("orders")
        broker.answer = lambda _broker, _batch: (FENCED_LEADER_EPOCH, -1)
        with pytest.raises(TransportError, match="topic 'orders' does not exist"):
            await producer.publish(Message("orders", b"1"))
        broker.model.topic_ids["orders"] = known
        broker.answer = stored
        assert await producer.publish(Message("orders", b"2")) == 1
        assert broker.numbers()[-1] == (7, 0, 1, 1)

    scenario(test)


def test_a_topic_that_is_being_created_for_too_long_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        def create(request: Received) -> None:
            topics = [{"error": 5, "name": topic.name} for topic in request.values.topics]
            request.reply(brokers=[{"node": 1, "host": "kafka-1", "port": 9092}], controller=1, topics=topics)

        broker.model.brokers[1].on(METADATA, create)
        with pytest.raises(TransportError, match="topic 'refunds' does not exist"):
            await producer.publish(Message("refunds", b"0"))

    scenario(test)


def test_messages_without_a_key_avoid_partitions_without_a_leader() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.model.logs[TopicPartition("orders", 1)].lead(None)
        await look_up(producer)
        await asyncio.gather(*(producer.publish(Message("orders", b"0")) for _ in range(10)))
        assert (len(broker.log(0)), len(broker.log(1)), len(broker.log(2))) == (5, 0, 5)

    scenario(test, partitions=3)


def test_files_that_have_become_useless_since_the_start_fail_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(_: Broker, producer: KafkaProducer) -> None:
        async def connect(_: Settings) -> None:
            raise SettingsError("ssl_cafile='ca.pem' cannot be used")

        monkeypatch.setattr(producing, "connect", connect)
        producer._drop_cluster()
        with pytest.raises(TransportError, match=r"ssl_cafile='ca\.pem' cannot be used") as caught:
            await producer.publish(Message("orders", b"0"))
        assert type(caught.value) is TransportError, "the client has not failed"
        assert caught.value.retriable, "they may be replaced again"

    scenario(test)


def test_closing_does_not_wait_for_a_connection_attempt() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        producer._drop_cluster()
        broker.model.network.silent.add(broker.model.addresses[1])
        [call] = publish(producer, b"0")
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        await producer.close()
        assert asyncio.get_running_loop().time() - began < 0.1
        assert [type(end) for end in await ends([call])] == [ClientLostError]

    scenario(test)


def test_a_client_that_was_dropped_a_moment_ago_is_closed_too() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0"))
        producer._drop_cluster()
        await producer.close()
        await asyncio.sleep(0.01)
        assert not broker.model.brokers[1].open_sessions

    scenario(test)


# Acceptance ------------------------------------------------------------------------------


def test_a_message_has_the_time_of_its_acceptance() -> None:
    """Even after an outage, and when it is encoded again."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = answering(OUT_OF_ORDER)
        accepted = []
        calls = []
        for value, ago in ((b"0", 20.0), (b"1", 10.0)):
            before = time.time()
            calls.append(producer.send(Message("orders", value)))
            accepted.append((before - ago, time.time() - ago))
            producer._topics["orders"][-1].since -= ago
        await asyncio.gather(*calls)
        first, second = broker.sent
        for batch in (first, second):
            for timestamp, (earliest, latest) in zip(batch.timestamps, accepted, strict=True):
                assert int(earliest * 1000) - 1 <= timestamp <= latest * 1000 + 1

    scenario(test)


def test_a_partition_that_a_broker_does_not_know_yet_is_waited_for() -> None:
    """Messages for other partitions do not wait behind it."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0", partition=0))
        [waiting] = publish(producer, b"new", partition=1)
        await asyncio.sleep(0.5)
        await producer.publish(Message("orders", b"1", partition=0))
        assert not waiting.done()
        broker.model.extend("orders")
        assert await waiting == 0
        assert broker.log(1) == [b"new"]

    scenario(test)


def test_keys_keep_their_partitions_while_a_broker_reports_fewer() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        keys = [b"key-%d" % number for number in range(20)]

        async def publish_all() -> None:
            calls = [asyncio.create_task(producer.publish(Message("orders", key, key))) for key in keys]
            await asyncio.sleep(0.3)
            assert not any(call.done() for call in calls) or broker.visible is None
            broker.visible = None
            await asyncio.gather(*calls)

        await publish_all()
        broker.visible = 1
        producer._drop_cluster()  # a new client does not know them from before
        await publish_all()
        placed = {(value, number) for number in range(4) for value in broker.log(number)}
        assert len(placed) == len(keys)

    scenario(test, partitions=4)


def test_a_topic_may_have_fewer_partitions_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was created again."""
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.0)
    monkeypatch.setattr(partitioning, "TOPIC_TIMEOUT", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        await producer.publish(Message("orders", b"0", b"key"))
        broker.model.delete("orders")
        broker.model.create("orders")
        await look_up(producer)
        await producer.publish(Message("orders", b"1", b"key"))
        assert broker.log(0)[-1:] == [b"1"]

    scenario(test, partitions=4)


def test_a_topic_without_an_id_may_have_fewer_partitions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "TOPIC_TIMEOUT", 0.0)
    monkeypatch.setattr(partitioning, "TOPIC_TIMEOUT", 0.0)

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.model.delete("orders")
        broker.model.create("orders")
        [waiting] = publish(producer, b"0", partition=3)
        await asyncio.sleep(1)
        await producer.publish(Message("orders", b"1", b"key"))
        assert broker.log(0)[-1:] == [b"1"]
        assert not waiting.done()
        waiting.cancel()

    scenario(test, partitions=4, prepare=lambda model: model.without_ids.add("orders"))


def test_a_missing_codec_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batches._HAS_CODEC, "lz4", lambda: False)
    with pytest.raises(SettingsError, match="lz4"):
        KafkaProducer(Settings(bootstrap_servers="127.0.0.1:9"), "lz4")


# Everything at once ----------------------------------------------------------------------


class Chaos:
    """Answers as brokers do in bad times: with lost answers, late copies and any code."""

    NOT_STORED = (2, 10, 16, 17, 19, 29, 31, 32, 44, 45, 51, 59, 74, 76, 87)
    PERHAPS = (-1, 3, 5, 6, 7, 13, 20, 56, 100, 999)

    def __init__(self) -> None:
        self.late: list[Batch] = []
        """Requests that are still on their way although their connection is closed."""

    def __call__(self, broker: Broker, batch: Batch) -> tuple[int, int]:
        while self.late and random.random() < 0.3:
            stored(broker, self.late.pop(random.randrange(len(self.late))))
        match random.randrange(12):
            case 0:
                return lost(broker, batch)
            case 1:
                self.late.append(batch)
                raise LostError
            case 2:
                stored(broker, batch)
                return random.choice(self.PERHAPS), -1
            case 3:
                return random.choice(self.PERHAPS), -1
            case 4:
                return random.choice(self.NOT_STORED), -1
            case 5:
                code, _ = stored(broker, batch)
                return code or DUPLICATE, -1
            case _:
                return stored(broker, batch)


def assert_exact(log: Sequence[bytes], ended: Mapping[int, int | BaseException]) -> None:
    """Check the log of a partition against what the callers heard, by number of the message."""
    numbers = [int(value) for value in log]
    assert numbers == sorted(set(numbers)), "each once, in the order of the calls"
    for number, end in ended.items():
        if isinstance(end, int):
            assert number in numbers, "it was acknowledged"
            assert end in (UNKNOWN_OFFSET, numbers.index(number))
        elif isinstance(end, TransportError) and not end.retriable:
            assert number not in numbers, "it was refused for good"


@pytest.mark.parametrize("seed", range(150))
def test_nothing_is_lost_doubled_or_reordered(seed: int) -> None:
    """Callers never publish a message again here, so each is stored at most once, in the order of the calls."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.answer = chaos = Chaos()
        calls: tuple[dict[int, asyncio.Future[int]], ...] = ({}, {})
        for number in range(120):
            partition = random.randrange(2)
            calls[partition][number] = producer.send(Message("orders", b"%d" % number, partition=partition))
            if random.random() < 0.3:
                await asyncio.sleep(random.choice([0, 0.05, 0.2]))
            if random.random() < 0.1:
                random.choice(list(calls[partition].values())).cancel()
        await asyncio.wait([*calls[0].values(), *calls[1].values()], timeout=20)
        broker.answer = stored
        for partition in range(2):
            ended = dict(zip(calls[partition], await ends(list(calls[partition].values())), strict=True))
            await producer.publish(Message("orders", b"1000", partition=partition))
            for batch in chaos.late:
                stored(broker, batch)
            assert_exact(broker.log(partition), ended)

    scenario(test, partitions=2, seed=seed)
