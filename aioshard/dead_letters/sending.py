"""Sends dead letters back to the topics that their records came from."""

import asyncio
import dataclasses
from collections.abc import Sequence

from aioshard.dead_letters.letters import Finished, Letter
from aioshard.errors import AuthorizationError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Producer
from aioshard.serde import side_records
from aioshard.serde.side_records import DeadLetterRecord


@dataclasses.dataclass(slots=True)
class ToTopic:
    """Publishes dead letters as the original records. Used by one command.

    Invariants:
        * A dead letter is done only when the brokers have acknowledged its record.
    """

    verb = "sent back"
    """For messages: dead letters were …"""
    most_records = 1000
    """Maximum number to replay together; if the command is killed, the next run replays them again."""
    most_bytes = 32 * 1024 * 1024

    administration: KafkaAdmin
    """Describes the topics."""
    producer: Producer
    """Idempotent; closed by the caller."""
    keep_time: bool
    """Whether records keep their timestamps."""

    async def process(self, letters: Sequence[Letter], finished: Finished) -> None:
        """Send dead letters, those of one partition in this order, until each is acknowledged.

        Raises:
            TransportError: A topic does not exist, or some were not acknowledged, for a transient reason or one that
                concerns all.
        """
        partitions = {
            topic: await self.administration.partitions(topic)
            for topic in {letter.original.topic for letter in letters}
        }

        async def send(letter: Letter) -> None:
            original = letter.original
            # To the original partition: another partitioner may have been used for the key.
            partition = original.partition if original.partition in partitions[original.topic] else None
            timestamp = original.timestamp if self.keep_time and original.timestamp >= 0 else None
            dead = DeadLetterRecord(original, letter.failure)
            await self.producer.publish(side_records.replay(dead, letter.at, partition=partition, timestamp=timestamp))
            finished(letter, None)

        answers = await asyncio.gather(*map(send, letters), return_exceptions=True)
        for letter, answer in zip(letters, answers, strict=True):
            if answer is None:
                continue
            if getattr(answer, "retriable", True) or isinstance(answer, AuthorizationError):
                raise answer
            finished(letter, str(answer))
