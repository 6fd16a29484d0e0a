"""Dead letters on their way back to the topics that they came from."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import click

from aioshard.cli.letters import Letter, Outcome
from aioshard.errors import AuthorizationError, MessageTooLargeError, TransportError
from aioshard.kafka.administration import Administration
from aioshard.ports import Producer
from aioshard.serde.side_records import Coordinates, DeadLetterRecord, replay

__all__ = ["Timestamps", "ToTopic"]

Timestamps = Literal["original", "now"]

_DECIDES_ON_AGE = ("cleanup.policy", "retention.ms", "message.timestamp.type")


class ToTopic:
    """Publishes dead letters as the records that they were; implements `Destination`. Used by one command.

    Invariants:
        * A dead letter is done when the brokers have acknowledged its record, and not before.
    """

    verb = "sent back"
    most_records = 1000
    most_bytes = 32 * 1024 * 1024

    def __init__(self, administration: Administration, producer: Producer, timestamps: Timestamps | None) -> None:
        """Make a destination.

        Args:
            administration: Tells which topics there are, and how long they keep records.
            producer: Idempotent; whoever gives it closes it.
            timestamps: None is the original ones, unless the topic would delete records of that age at once.
        """
        self._administration = administration
        self._producer = producer
        self._timestamps = timestamps
        self._partitions: dict[str, frozenset[int]] = {}
        self._retention: dict[str, float | None] = {}

    async def check(self, letters: Sequence[Letter]) -> None:
        """Refuse what cannot arrive, before any of it is sent.

        Raises:
            TransportError: A topic does not exist, or would delete records of that age before anybody reads them.
        """
        by_topic: dict[str, list[Letter]] = defaultdict(list)
        for letter in letters:
            by_topic[letter.original.topic].append(letter)
        for topic, own in by_topic.items():
            if topic not in self._partitions:
                self._partitions[topic] = await self._administration.partitions(topic)
                self._retention[topic] = await self._kept_for(topic) if self._timestamps is None else None
            self._check_age(topic, own)

    async def _kept_for(self, topic: str) -> float | None:
        """Seconds after which the topic deletes a record, counted from its timestamp; None is never."""
        try:
            settings = await self._administration.topic_settings(topic, _DECIDES_ON_AGE)
        except TransportError as error:
            click.echo(
                f"Whether topic {topic!r} keeps records of this age is not known: {error}. What is older than its "
                "retention.ms would be deleted unread; --timestamp now sends with the time of now",
                err=True,
            )
            return None
        retention = float(settings.get("retention.ms", "-1")) / 1000
        by_age = "delete" in settings.get("cleanup.policy", "delete") and retention >= 0
        return retention if by_age and settings.get("message.timestamp.type") != "LogAppendTime" else None

    def _check_age(self, topic: str, letters: Sequence[Letter]) -> None:
        retention = self._retention[topic]
        if retention is None:
            return
        oldest = time.time() - retention
        old = [letter for letter in letters if letter.original.timestamp < oldest]
        if old:
            raise TransportError(
                f"topic {topic!r} deletes records {retention:,.0f} s after their timestamp (retention.ms), and "
                f"{len(old)} of these dead letters are older, such as {old[0].at}: they could be gone before anybody "
                "reads them. --timestamp now sends them with the time of now, which handlers then see; --timestamp "
                "original sends them as they are"
            )

    async def process(self, letters: Sequence[Letter], outcome: Outcome) -> None:
        """Send dead letters that were checked, and wait until each is acknowledged.

        Args:
            letters: No two of the same record. Those of one partition are stored in this order.
            outcome: Gets each as it is known.

        Raises:
            TransportError: Some were not acknowledged, for a reason that passes, or that holds for the others too.
        """
        answers = await asyncio.gather(*(self._send(letter, outcome) for letter in letters), return_exceptions=True)
        for letter, answer in zip(letters, answers, strict=True):
            if answer is None:
                continue
            if not _is_about_one(answer):
                raise answer
            outcome.failed[Coordinates.of(letter.original)] = str(answer)

    async def _send(self, letter: Letter, outcome: Outcome) -> None:
        original = letter.original
        # Where it was before, because a producer of another kind may place the key elsewhere than ours would.
        partition = original.partition if original.partition in self._partitions[original.topic] else None
        timestamp = None if self._timestamps == "now" or original.timestamp < 0 else original.timestamp
        dead = DeadLetterRecord(original, letter.failure)
        await self._producer.publish(replay(dead, letter.at, partition=partition, timestamp=timestamp))
        outcome.done.append(letter)


def _is_about_one(error: BaseException) -> bool:
    """Whether an error says something of one record, and nothing of the others."""
    if isinstance(error, MessageTooLargeError):
        return True
    return isinstance(error, TransportError) and not error.retriable and not isinstance(error, AuthorizationError)
