"""Simulated brokers for the producer: they check sequence numbers as Kafka does, and answer as a test says."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aioshard.errors import TransportError
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.wire.requests import INIT_PRODUCER_ID, METADATA, PRODUCE
from aioshard.ports import Message
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster
from tests.support.model_producers import Batch as ProducedBatch

NOT_LEADER, INVALID_RECORD = 6, 87


class Batch(ProducedBatch):
    """A batch that the producer has sent to a partition."""

    def __init__(self, partition: TopicPartition, data: bytes) -> None:
        super().__init__(data)
        self.partition = partition


class LostError(Exception):
    """An answer is not sent: the connection is lost instead."""


Answer = Callable[["Broker", Batch], tuple[int, int] | None]
"""Returns the error code and the offset of a batch; None to leave it out; raises `LostError`."""


def stored(broker: "Broker", batch: Batch) -> tuple[int, int]:
    """Answer as a broker without faults."""
    return broker.model.logs[batch.partition].produce(batch.data)


class Broker:
    """All brokers of a model cluster, as the producer sees them.

    Attributes:
        model: The cluster.
        sent: Every batch, in the order of their arrival.
        requests: The batches of each request.
        asked: The node of each request.
        answer: Answers a batch that its leader got.
        answers: While it is not set, nothing is answered.
        throttle: Milliseconds for which the next answers tell the client to send nothing.
        visible: How many partitions of a topic the metadata name; None for all.
        names_leaders: Whether an answer with an error names the leader (KIP-951).
        identity: The next producer id and its epoch.
    """

    def __init__(self, model: ModelCluster, identity: tuple[int, int]) -> None:
        self.model = model
        self.sent: list[Batch] = []
        self.requests: list[list[Batch]] = []
        self.asked: list[int] = []
        self.answer: Answer = stored
        self.answers = asyncio.Event()
        self.answers.set()
        self.throttle: list[int] = []
        self.visible: int | None = None
        self.names_leaders = False
        self.identity = identity
        self._answering: set[asyncio.Task[None]] = set()
        for node in model.brokers:
            self._attend(node)

    def _attend(self, node: int) -> None:
        broker = self.model.brokers[node]
        broker.on(PRODUCE, lambda request: self._begin(node, request))
        broker.on(INIT_PRODUCER_ID, self.identify)
        broker.on(METADATA, self._describe)

    def add_broker(self) -> int:
        """Add a broker, and return its node id."""
        node = self.model.add_broker()
        self._attend(node)
        return node

    def identify(self, request: Received) -> None:
        """Issue a producer id."""
        assert request.values.transactional_id is None
        assert (request.values.producer_id, request.values.epoch) == (-1, -1)
        producer_id, epoch = self.identity
        self.identity = (producer_id + 1, 0)
        request.reply(producer_id=producer_id, epoch=epoch)

    def _describe(self, request: Received) -> None:
        logs = self.model.logs
        if self.visible is not None:
            self.model.logs = {name: log for name, log in logs.items() if name.partition < self.visible}
        self.model.describe(request)
        self.model.logs = logs

    def _begin(self, node: int, request: Received) -> None:
        batches = [
            Batch(TopicPartition(topic.topic, part.partition), part.records)
            for topic in request.values.topics
            for part in topic.partitions
        ]
        self.sent += batches
        self.requests.append(batches)
        self.asked.append(node)
        values = request.values
        assert (values.acks, values.timeout_ms, values.transactional_id) == (-1, 10_000, None)
        assert len(self.requests) < 2000, "it is sent again and again"
        task = asyncio.get_running_loop().create_task(self._answer(node, request, batches))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, node: int, request: Received, batches: list[Batch]) -> None:
        await self.answers.wait()
        try:
            parts = [(batch, self._part(node, batch)) for batch in batches]
        except LostError:
            request.cut()
            return
        topics = [
            {"topic": batch.partition.topic, "partitions": [part]} for batch, part in parts if part is not None
        ]  # fmt: skip
        nodes = self.model.brokers if self.names_leaders else ()
        endpoints = [{"node": node, "host": f"kafka-{node}", "port": 9092} for node in nodes]
        throttle_ms = self.throttle.pop(0) if self.throttle else 0
        request.reply(topics=topics, throttle_ms=throttle_ms, endpoints=endpoints or None)

    def _part(self, node: int, batch: Batch) -> dict[str, Any] | None:
        log = self.model.logs.get(batch.partition)
        answered: tuple[int, int] | None
        if log is None:
            answered = 3, -1
        elif log.leader != node:
            answered = NOT_LEADER, -1
        else:
            answered = self.answer(self, batch)
        if answered is None:
            return None
        code, offset = answered
        part: dict[str, Any] = {"partition": batch.partition.partition, "error": code, "offset": offset}
        if code and self.names_leaders and log is not None:
            part["leader"] = {"node": log.leader, "epoch": log.epoch}
        return part

    def numbers(self, partition: int = 0) -> list[tuple[int, int, int, int]]:
        """Return producer id, epoch, first number and size of each batch of a partition, for any topic."""
        return [
            (batch.producer_id, batch.epoch, batch.sequence, len(batch.values))
            for batch in self.sent
            if batch.partition.partition == partition
        ]

    def log(self, partition: int = 0, topic: str = "orders") -> list[bytes]:
        return self.model.logs[TopicPartition(topic, partition)].visible

    async def close(self) -> None:
        """Forget the requests that wait for their answers."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self.model.close()


def answering(*codes: int, stores: Collection[int] = (), then: Answer = stored) -> Answer:
    """Answer the first batches with these codes: 0 as a broker without faults, others without storing the batch.

    Args:
        codes: One for each batch.
        stores: The positions of answers whose batch is stored all the same.
        then: Answers later batches.
    """
    due = list(enumerate(codes))

    def answer(broker: Broker, batch: Batch) -> tuple[int, int] | None:
        if not due:
            return then(broker, batch)
        position, code = due.pop(0)
        if code == 0:
            return stored(broker, batch)
        if position in stores:
            stored(broker, batch)
        return code, -1

    return answer


def scenario(
    test: Callable[[Broker, KafkaProducer], Awaitable[None]],
    *,
    partitions: int = 1,
    brokers: int = 1,
    identity: tuple[int, int] = (7, 0),
    prepare: Callable[[ModelCluster], object] = lambda _: None,
    seed: int | None = None,
) -> None:
    """Run a test in virtual time, with a producer that is connected to simulated brokers.

    It has a producer id, and knows topic "orders", whose partitions the first broker leads.
    """

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, brokers)
        prepare(model)
        for log in model.create("orders", partitions):
            log.leader = 1
        broker = Broker(model, identity)
        producer = KafkaProducer(model.settings)
        try:
            await _warm_up(broker, producer)
            await test(broker, producer)
        finally:
            await producer.close()
            await broker.close()

    run_on_network(live, seed=seed)


async def _warm_up(broker: Broker, producer: KafkaProducer) -> None:
    """Let the producer connect and look up its topic, with a message that leaves nothing behind."""
    broker.answer = answering(INVALID_RECORD)
    with contextlib.suppress(TransportError):
        await producer.publish(Message("orders", b"warm-up", partition=0))
    await asyncio.sleep(0.2)  # the pause before the next look-up
    broker.sent.clear()
    broker.requests.clear()
    broker.asked.clear()
    broker.answer = stored
