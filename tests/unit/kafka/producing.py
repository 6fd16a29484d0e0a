"""A simulated broker for the producer: it checks sequence numbers as Kafka does, and answers as a test says."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiokafka.errors import NodeNotReadyError
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatch

from aioshard.kafka.aiokafka.producer import KafkaProducer
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.testing import run

OUT_OF_ORDER, INVALID_EPOCH = 45, 47
_CACHED = 5
"""How many batches of a producer a broker knows per partition."""
_MOST_SEQUENCE = 2**31


@dataclass
class Batch:
    """A batch as the broker reads it."""

    partition: TopicPartition
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        header = DefaultRecordBatch(bytearray(self.data))
        self.producer: int = header.producer_id
        self.epoch: int = header.producer_epoch
        self.sequence: int = header.base_sequence
        records = list(header)
        self.values: list[bytes] = [record.value for record in records]
        self.timestamps: list[int] = [record.timestamp for record in records]

    @property
    def last(self) -> int:
        return (self.sequence + len(self.values) - 1) % _MOST_SEQUENCE


@dataclass
class _Producer:
    """The state that the leader of a partition has of a producer."""

    epoch: int
    last: int = -1
    known: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_CACHED))


class Log:
    """The log of a partition."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self._producers: dict[int, _Producer] = {}

    def append(self, batch: Batch) -> tuple[int, int]:
        """Store a batch; return the error code and the offset, as Kafka's `ProducerAppendInfo` decides."""
        producer = self._producers.get(batch.producer)
        if producer is not None:
            if batch.epoch < producer.epoch:
                return INVALID_EPOCH, -1
            if batch.epoch > producer.epoch:
                producer = None
                if batch.sequence != 0:
                    return OUT_OF_ORDER, -1
            else:
                for first, last, offset in producer.known:
                    if (first, last) == (batch.sequence, batch.last):
                        return 0, offset
                if batch.sequence != (producer.last + 1) % _MOST_SEQUENCE:
                    return OUT_OF_ORDER, -1
        if producer is None:  # a broker accepts any number of a producer that it does not know
            producer = self._producers[batch.producer] = _Producer(batch.epoch)
        offset = len(self.values)
        producer.last = batch.last
        producer.known.append((batch.sequence, batch.last, offset))
        self.values += batch.values
        return 0, offset


Answer = Callable[["Broker", Batch], tuple[int, int] | None]
"""Returns the error code and the offset of a batch; None to leave it out; raises if the connection is lost."""


def stored(broker: "Broker", batch: Batch) -> tuple[int, int]:
    """Answer as a broker without faults."""
    return broker.logs[batch.partition].append(batch)


class Broker:
    """Leads all partitions of all topics.

    Attributes:
        sent: Every batch, in the order of their arrival.
        requests: The batches of each request.
        answer: Answers a batch.
        answers: While it is not set, nothing is answered.
        throttle: Milliseconds for which the next answers tell the client to send nothing.
        is_ready: Whether a connection can be made.
    """

    lost = None

    def __init__(self, partitions: int = 1) -> None:
        self.count = partitions
        self.led: Mapping[TopicPartition, int | None] = {}
        self.logs: defaultdict[TopicPartition, Log] = defaultdict(Log)
        self.sent: list[Batch] = []
        self.requests: list[list[Batch]] = []
        self.answer: Answer = stored
        self.answers = asyncio.Event()
        self.answers.set()
        self.throttle: list[int] = []
        self.is_ready = True
        self.ids = 7
        self.updated_at = 0.0
        self.clock: Callable[[], float] = lambda: 0.0
        self.cluster = SimpleNamespace(available_partitions_for_topic=lambda _: set(range(self.count)))

    def partition_count(self, _: str) -> int:
        return self.count

    def leader(self, partition: TopicPartition) -> int | None:
        return self.led.get(partition, 1)

    def get_random_node(self) -> int:
        return 1

    def forget(self, _: str) -> None: ...

    def may_not_see(self, _: str) -> bool:
        return False

    async def look_up(self, *_: str) -> bool:
        self.updated_at = self.clock()
        return True

    async def tear_down(self) -> None:
        """Do nothing."""

    async def send(self, _: int, request: Any) -> Any:
        if isinstance(request, InitProducerIdRequest):
            self.ids += 1
            return SimpleNamespace(error_code=0, producer_id=self.ids, producer_epoch=0)
        if not self.is_ready:
            raise NodeNotReadyError
        batches = [
            Batch(TopicPartition(topic, number), data) for topic, parts in request._topics for number, data in parts
        ]
        self.sent += batches
        self.requests.append(batches)
        assert len(self.requests) < 2000, "it is sent again and again"
        await self.answers.wait()
        await asyncio.sleep(0)
        topics = []
        for batch in batches:
            answered = self.answer(self, batch)
            if answered is not None:
                topics.append((batch.partition.topic, [(batch.partition.partition, *answered, -1)]))
        return SimpleNamespace(topics=topics, throttle_time_ms=self.throttle.pop(0) if self.throttle else 0)

    def numbers(self, partition: int = 0) -> list[tuple[int, int, int, int]]:
        """Return producer id, epoch, first number and size of each batch of a partition, for any topic."""
        return [
            (batch.producer, batch.epoch, batch.sequence, len(batch.values))
            for batch in self.sent
            if batch.partition.partition == partition
        ]

    def log(self, partition: int = 0, topic: str = "orders") -> list[bytes]:
        return self.logs[TopicPartition(topic, partition)].values


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
    identity: tuple[int, int] = (7, 0),
    seed: int | None = None,
) -> None:
    """Run a test in virtual time, with a producer that is connected to a simulated broker."""

    async def live() -> None:
        broker = Broker(partitions)
        producer = KafkaProducer(Settings(bootstrap_servers="127.0.0.1:9"))
        producer._client = broker  # type: ignore[assignment]
        producer._identity = identity
        try:
            await test(broker, producer)
        finally:
            await producer.close()

    run(live(), seed=seed)
