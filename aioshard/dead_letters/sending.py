"""Sends the records of dead letters back to their topics."""

from collections.abc import Mapping, Sequence

from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.results import Result, Work
from aioshard.errors import AuthorizationError, MessageRefusedError, MessagesRefusedError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Message
from aioshard.serde import side_records
from aioshard.serde.side_records import DeadLetterRecord


class ToTopic:
    """Publishes dead letters as the original records. Used by one run.

    Invariants:
        * The record of a dead letter is visible if and only if the dead letter is done.
    """

    action = "send"
    """For the audit log."""
    verb = "sent back"
    """For messages: dead letters were …"""
    most_records = 1000
    """Maximum number to send in one transaction."""
    most_bytes = 32 * 1024 * 1024

    def __init__(self, administration: KafkaAdmin, ledger: Ledger, *, keep_time: bool = False) -> None:
        """Create a destination.

        Args:
            administration: Describes the topics.
            ledger: Sends the records.
            keep_time: Whether records keep their timestamps; otherwise they get the current time.
        """
        self._administration = administration
        self._ledger = ledger
        self._keep_time = keep_time
        self._partitions: dict[str, frozenset[int]] = {}

    async def process(self, work: Sequence[Work], result: Result) -> None:
        """Send records, those of one partition in this order, and report which ones are done.

        Raises:
            AuthorizationError: This user may not write to a topic. Nothing was sent.
            TransportError: A topic does not exist, or the transaction failed. Nothing was sent, unless nobody can tell.
        """
        for topic in {item.record.topic for item in work} - self._partitions.keys():
            self._partitions[topic] = await self._administration.partitions(topic)
        remaining = list(work)
        while remaining:
            messages = [self._message(item) for item in remaining]
            try:
                await self._ledger.store([place for item in remaining for place in item.places], messages)
            except MessagesRefusedError as error:
                remaining = _without(remaining, error.refused, result)
            else:
                result.finish(remaining)
                return

    def _message(self, item: Work) -> Message:
        record = item.record
        # To the original partition: another partitioner may have been used for the key.
        partition = record.partition if record.partition in self._partitions[record.topic] else None
        timestamp = record.timestamp if self._keep_time and record.timestamp >= 0 else None
        letter = item.letter
        return side_records.replay(
            DeadLetterRecord(record, letter.failure), letter.at, partition=partition, timestamp=timestamp
        )


def _without(work: Sequence[Work], refused: Mapping[int, MessageRefusedError], result: Result) -> list[Work]:
    """Report records that the brokers refuse, and return the others.

    Raises:
        AuthorizationError: This user may not write to a topic: that concerns more than these records.
    """
    for index, error in refused.items():
        if isinstance(error.__cause__, AuthorizationError):
            raise error.__cause__
        result.fail(work[index], str(error))
    return [item for index, item in enumerate(work) if index not in refused]
