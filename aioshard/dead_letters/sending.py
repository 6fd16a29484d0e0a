"""Sends the records of dead letters back to their topics."""

from collections.abc import Mapping

from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.results import Chunk, WorkItem, positions_of
from aioshard.errors import AuthorizationError, MessageRefusedError, MessagesRefusedError
from aioshard.ports import Message
from aioshard.serde import side_records
from aioshard.serde.side_records import DeadLetterRecord


class SendBack:
    """Publishes dead letters as the original records. Used by one run.

    Invariants:
        * The record of a dead letter is visible if and only if the dead letter is done.
    """

    name = "send"
    verb = "sent back"
    most_records = 1000
    most_bytes = 32 * 1024 * 1024

    def __init__(self, *, keep_time: bool = False) -> None:
        """Begin a run.

        Args:
            keep_time: Whether records keep their timestamps; otherwise they get the current time.
        """
        self._keep_time = keep_time
        self._partitions: dict[str, frozenset[int]] = {}
        """Those of each topic that got a record."""

    async def apply(self, chunk: Chunk, ledger: Ledger) -> None:
        """Send the records of a chunk in one transaction, those of one partition in this order.

        Raises:
            AuthorizationError: This user may not write to a topic. Nothing was sent.
            TransportError: A topic does not exist, or the transaction failed. Nothing was sent, unless nobody can tell.
        """
        for topic in {item.record.topic for item in chunk.items} - self._partitions.keys():
            self._partitions[topic] = await ledger.topic.administration.partitions(topic)
        remaining = chunk.items
        while remaining:
            messages = [self._message(item) for item in remaining]
            try:
                await ledger.store(positions_of(remaining), messages)
            except MessagesRefusedError as error:
                _check_access(error.refused)
                for index, refused in error.refused.items():
                    chunk.fail(remaining[index], str(refused))
                remaining = [item for index, item in enumerate(remaining) if index not in error.refused]
            else:
                chunk.finish(remaining)
                return

    def _message(self, item: WorkItem) -> Message:
        record = item.record
        # To the original partition: another partitioner may have been used for the key.
        partition = record.partition if record.partition in self._partitions[record.topic] else None
        timestamp = record.timestamp if self._keep_time and record.timestamp >= 0 else None
        dead_letter = item.dead_letter
        return side_records.replay(
            DeadLetterRecord(record, dead_letter.failure), dead_letter.at, partition=partition, timestamp=timestamp
        )


def _check_access(refused: Mapping[int, MessageRefusedError]) -> None:
    """Raise the error of a topic to which this user may not write: that concerns more than some records.

    Raises:
        AuthorizationError: There is such a topic.
    """
    for error in refused.values():
        if isinstance(error.__cause__, AuthorizationError):
            raise error.__cause__
