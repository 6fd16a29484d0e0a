"""Dead letters for tests: made, written to a broker, or read from memory."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, cast

from aioshard import Settings
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.side_topics import TopicReader
from aioshard.ports import LogRange, Message
from aioshard.records import Record
from aioshard.serde.side_records import Failure, dead_letter

DEADLINE = 60.0
FAILED_AT = 1_700_000_000.0


def record(number: int, *, topic: str = "orders", **fields: Any) -> Record:
    """A record whose value is its offset."""
    made = Record(topic, 0, number, b"alice", b"%d" % number, (("trace", b"7"),), 1.6e9 + number)
    return made._replace(**fields)


def failure(number: int = 0, **fields: Any) -> Failure:
    made = Failure("billing", "on_order", 5, "ValueError", "no such customer", FAILED_AT + number)
    return made._replace(**fields)


async def write(bootstrap: str, messages: Iterable[Message]) -> None:
    """Publish messages, those of a partition in this order."""
    producer = KafkaProducer(Settings(bootstrap_servers=bootstrap))
    try:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*map(producer.publish, messages))
    finally:
        await producer.close()


class ReaderInMemory:
    """Returns records as a `TopicReader` does, and counts them."""

    def __init__(self, topic: str, partitions: Mapping[int, Sequence[Record]]) -> None:
        self.topic = topic
        self.returned = 0
        self._partitions = partitions
        self.ranges = {
            number: LogRange(records[0].offset, records[-1].offset + 1) if records else LogRange(0, 0)
            for number, records in partitions.items()
        }

    async def read(
        self, start: Mapping[int, int] | None = None, end: Mapping[int, int] | None = None
    ) -> AsyncIterator[list[Record]]:
        for number, records in self._partitions.items():
            begin = (start or {}).get(number, 0)
            stop = (end or {}).get(number, self.ranges[number].end)
            chosen = [record for record in records if begin <= record.offset < stop]
            for first in range(0, len(chosen), 3):
                chunk = chosen[first : first + 3]
                self.returned += len(chunk)
                yield chunk


def stored(message: Message, partition: int, offset: int) -> Record:
    """A message as a broker stores it."""
    return Record(message.topic, partition, offset, message.key, message.value, message.headers, message.timestamp or 0)


def dead_letters_in_memory(
    topic: str, partitions: Mapping[int, Sequence[tuple[int, Record, Failure]]]
) -> tuple[DeadLetterTopic, ReaderInMemory]:
    """A topic with dead letters at these offsets, whose progress is unknown, and its reader."""
    reader = ReaderInMemory(
        topic,
        {
            number: [stored(dead_letter(topic, original, why), number, offset) for offset, original, why in letters]
            for number, letters in partitions.items()
        },
    )
    return DeadLetterTopic(cast("KafkaAdmin", None), cast("TopicReader", reader)), reader
