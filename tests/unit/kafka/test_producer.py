"""The producer's sequence numbers: a message is stored once, or its caller learns that it was not."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiokafka.protocol.transaction import InitProducerIdRequest

from aioshard.errors import TransportError
from aioshard.kafka.aiokafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.settings import Settings
from aioshard.testing import run

NOT_LEADER, OUT_OF_ORDER, INVALID_RECORD = 6, 45, 87


class Sent(NamedTuple):
    """A batch as the broker sees it."""

    producer: int
    sequence: int
    messages: int


class Broker:
    """Leads the only partition of each topic; refuses a batch with what `refuse` returns, or 0."""

    lost = None
    updated_at = 0.0
    cluster = SimpleNamespace(available_partitions_for_topic=lambda _: {0})

    def __init__(self) -> None:
        self.refuse: Callable[[bytes], int] = lambda _: 0
        self.sent: list[Sent] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.ids = 7

    partition_count = staticmethod(lambda _: 1)
    leader = staticmethod(lambda _: 1)
    get_random_node = staticmethod(lambda: 1)

    async def look_up(self, *_: str) -> bool:
        return True

    async def tear_down(self) -> None:
        """There is nothing to end."""

    async def send(self, _: int, request: Any) -> Any:
        if isinstance(request, InitProducerIdRequest):
            self.ids += 1
            return SimpleNamespace(error_code=0, producer_id=self.ids, producer_epoch=0)
        [(topic, [(number, data)])] = request._topics
        producer, _, sequence, count = struct.unpack_from(">qhii", data, 43)
        self.sent.append(Sent(producer, sequence, count))
        assert len(self.sent) < 20, "it is sent again and again"
        await self.answers.wait()
        return SimpleNamespace(topics=[(topic, [(number, self.refuse(data), 0, -1)])])


def scenario(test: Callable[[Broker, KafkaProducer], Awaitable[None]]) -> None:
    async def live() -> None:
        broker, producer = Broker(), KafkaProducer(Settings(bootstrap_servers="127.0.0.1:9"))
        producer._client, producer._identity = broker, (7, 0)  # type: ignore[assignment]
        await test(broker, producer)
        await producer.close()

    run(live())


def test_a_refused_batch_is_resent_unchanged_after_a_pause() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.refuse = lambda _: NOT_LEADER if len(broker.sent) in (2, 4) else 0
        await producer.publish(Message("orders", b"0"))
        await producer.publish(Message("orders", b"1"))
        began = asyncio.get_running_loop().time()
        await producer.publish(Message("orders", b"2"))
        assert asyncio.get_running_loop().time() - began >= 0.09
        assert broker.sent == [Sent(7, 0, 1), Sent(7, 1, 1), Sent(7, 1, 1), Sent(7, 2, 1), Sent(7, 2, 1)]

    scenario(test)


def test_an_abandoned_batch_retires_its_producer_id() -> None:
    """The broker may have stored it, and would take the next message with its number for a copy."""

    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.refuse = lambda _: NOT_LEADER if len(broker.sent) == 1 else 0
        broker.answers.clear()
        given_up = asyncio.create_task(producer.publish(Message("orders", b"0")))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.01)
        broker.answers.set()
        await producer.publish(Message("orders", b"1"))
        assert broker.sent == [Sent(7, 0, 1), Sent(8, 0, 1)]

    scenario(test)


def test_a_refused_producer_id_is_not_reused() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.refuse = lambda _: OUT_OF_ORDER if len(broker.sent) == 1 else 0
        with pytest.raises(TransportError):
            await producer.publish(Message("orders", b"0"))
        await producer.publish(Message("orders", b"1"))
        assert broker.sent == [Sent(7, 0, 1), Sent(8, 0, 1)]

    scenario(test)


def test_one_bad_message_of_a_batch_fails_alone() -> None:
    async def test(broker: Broker, producer: KafkaProducer) -> None:
        broker.refuse = lambda data: INVALID_RECORD if b"bad" in data else 0
        values = (b"0", b"bad", b"2")
        results = await asyncio.gather(
            *(producer.publish(Message("orders", value)) for value in values), return_exceptions=True
        )
        assert [type(result) for result in results] == [int, TransportError, int]
        assert broker.sent == [Sent(7, 0, 3), Sent(7, 0, 1), Sent(7, 1, 1), Sent(7, 1, 1)]

    scenario(test)
