"""A steady load: records of an idempotent producer that survives broker failures."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Message, Producer

TICK = 0.05
FLUSH_TIMEOUT = 120.0


class Load:
    """Sends records at a steady rate to all partitions in turn while it is entered; used with `async with`.

    Args:
        bootstrap: Address of the brokers.
        topic: An existing one.
        partitions: How many it has.
        produced: See below.
        rate: Records in a second.
        key: The key of the n-th record of a partition.

    Attributes:
        produced: The key of each record that was acknowledged, by partition and offset. It lacks those that the leader
            had already when they were sent again: it does not tell their offsets.
        sent: How many records were sent.
        partitions: How many the topic has; may grow.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        partitions: int,
        produced: dict[tuple[int, int], str],
        *,
        rate: float,
        key: Callable[[int, int], bytes],
    ) -> None:
        self.produced = produced
        self.partitions = partitions
        self.sent = 0
        self._topic = topic
        self._rate = rate
        self._key = key
        self._failures: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "delivery.timeout.ms": 600_000,
                "socket.timeout.ms": 5_000,
                "topic.metadata.refresh.interval.ms": 1_000,
                "log_level": 0,
            }
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="load")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, and wait until all that was sent is acknowledged.

        Raises:
            AssertionError: Records were given up.
        """
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if kind is not None:
            self._producer.purge()
        left = await asyncio.to_thread(self._producer.flush, FLUSH_TIMEOUT)
        if kind is None:
            assert not left, f"{left} records were not acknowledged"
            assert not self._failures, self._failures

    async def _run(self) -> None:
        numbers = ((number, partition) for number in itertools.count() for partition in range(self.partitions))
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            due = int((loop.time() - began) * self._rate)
            for number, partition in itertools.islice(numbers, max(due - self.sent, 0)):
                key = self._key(partition, number)
                self._producer.produce(self._topic, b"%d" % number, key, partition, on_delivery=self._acknowledged)
                self.sent += 1
            self._producer.poll(0)
            await asyncio.sleep(TICK)

    def _acknowledged(self, error: Any, message: Message) -> None:
        partition, offset, key = message.partition(), message.offset(), message.key()
        if error is not None:
            self._failures.append(str(error))
        elif partition is not None and offset is not None:
            self.produced[partition, offset] = bytes(key or b"").decode()

    async def until_known(self, partitions: int) -> None:
        """Send to that number of partitions as soon as the producer knows them."""
        known = 0
        while known < partitions:
            found = await asyncio.to_thread(self._producer.list_topics, self._topic, 5)
            known = len(found.topics[self._topic].partitions)
        self.partitions = partitions
