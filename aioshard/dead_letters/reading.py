"""Reads a dead-letter topic: all dead letters in order, one of them, or figures about those that match filters."""

import asyncio
import contextlib
import dataclasses
import heapq
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

from aioshard.dead_letters.dead_letter import Position, StoredDeadLetter
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.progress import ReplayProgress, progress_group, sending_group
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.side_topics import TopicReader, opened_topic
from aioshard.ports import Committed, LogRange
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import Coordinates, read_dead_letter
from aioshard.settings import Settings

_AT_ONCE = 200
"""Records that are decoded before other tasks run: they take a few milliseconds."""


class DeadLetterTopic:
    """An open dead-letter topic, read by one task at a time.

    Example:
        ```python
        async with DeadLetterTopic.opened(settings, "orders.dlt") as topic:
            await topic.fetch_progress()
            survey = await topic.survey(Filters(error="AttemptTimeoutError"), newest=50)
        ```
    """

    def __init__(self, administration: KafkaAdmin, reader: TopicReader) -> None:
        """Read a topic with open clients; see `opened`."""
        self.dead_letters_read = 0
        self.others_read = 0
        """Number of other records read."""
        self.administration = administration
        self.topic_id: uuid.UUID | None = None
        """The id of the topic when the progress was fetched last; None before that, and from brokers without ids."""
        self.progress = {number: ReplayProgress() for number in reader.ranges}
        """Which ones are done, by partition."""
        self.plain_commits: Mapping[TopicPartition, Committed | None] = {}
        """The offsets of `progress_group`, as they were fetched."""
        self.transactional_commits: Mapping[TopicPartition, Committed | None] = {}
        """Those of `sending_group`."""
        self._reader = reader

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, settings: Settings, topic: str, partitions: Collection[int] = ()
    ) -> AsyncIterator["DeadLetterTopic"]:
        """Connect to a topic.

        Args:
            settings: The brokers.
            topic: Its name.
            partitions: The partitions to read; empty means all.

        Raises:
            UnknownPartitionError: It has no such partition.
            TransportError: The topic does not exist, or no broker answers.
        """
        async with opened_topic(settings, topic, partitions) as (administration, reader):
            yield cls(administration, reader)

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._reader.topic

    @property
    def ranges(self) -> Mapping[int, LogRange]:
        """Start and end of each partition when the topic was opened: later dead letters are not read."""
        return self._reader.ranges

    @property
    def records_read(self) -> int:
        """Number of all records read."""
        return self.dead_letters_read + self.others_read

    @property
    def offsets(self) -> int:
        """Number of offsets in the ranges: at least that of the records."""
        return sum(log.end - log.start for log in self.ranges.values())

    async def fetch_progress(self, *, wait: bool = False) -> None:
        """Fetch which dead letters are done, and the id of the topic.

        Progress beyond the end belongs to a deleted topic.

        Args:
            wait: Whether to wait for a transaction of another run that may still store more; it takes up to
                `transaction_timeout` if that run was killed. Otherwise the dead letters of the transaction are due.

        Raises:
            AuthorizationError: This user may not read with a group that stores the progress.
            TransportError: The brokers did not answer.
        """
        self.topic_id = await self.administration.topic_id(self.name)
        partitions = [TopicPartition(self.name, number) for number in self.ranges]
        group_commits = self.administration.group_commits
        self.plain_commits = await group_commits(progress_group(self.name), partitions)
        self.transactional_commits = await group_commits(sending_group(self.name), partitions, stable=wait)
        for at in partitions:
            end = self.ranges[at.partition].end
            stored = (self.plain_commits[at], self.transactional_commits[at])
            commits = [committed for committed in stored if committed is not None and committed.offset <= end]
            self.progress[at.partition] = ReplayProgress(*commits)

    def is_done(self, position: Position) -> bool:
        """Return whether a dead letter is done, according to the progress as it was fetched or stored last."""
        partition, offset = position
        return self.progress[partition].is_done(offset)

    async def dead_letters(
        self,
        filters: Filters = EVERYTHING,
        start: Mapping[int, int] | None = None,
        end: Mapping[int, int] | None = None,
    ) -> AsyncIterator[StoredDeadLetter]:
        """Yield the dead letters that match, in offset order for each partition.

        Args:
            filters: Which ones.
            start: Offsets to begin at, for partitions that are not read from their start.
            end: Offsets to stop before, for partitions that are not read to their end.

        Raises:
            TransportError: The records cannot be read.
        """
        number = 0
        async for records in self._reader.read(start, end):
            for record in records:
                dead_letter = self._decoded(record)
                if dead_letter is not None and dead_letter.matches(filters):
                    yield dead_letter
                number += 1
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _decoded(self, record: Record) -> StoredDeadLetter | None:
        dead_letter = read_dead_letter(record)
        if dead_letter is None:
            self.others_read += 1
            return None
        self.dead_letters_read += 1
        done = self.is_done((record.partition, record.offset))
        original, failure, schema_id, subject = dead_letter
        return StoredDeadLetter(Coordinates.of(record), original, failure, done, schema_id, subject)

    async def dead_letter(self, partition: int, offset: int) -> StoredDeadLetter | None:
        """Return one dead letter; None if this position holds another record, or none.

        Raises:
            TransportError: It cannot be read.
        """
        end = {number: offset + 1 if number == partition else 0 for number in self.ranges}
        async for dead_letter in self.dead_letters(start={partition: offset}, end=end):
            if dead_letter.at == (self.name, partition, offset):
                return dead_letter
        return None

    async def survey(self, filters: Filters = EVERYTHING, *, newest: int | None = 0) -> "Survey":
        """Read the topic from its start to its end, and return figures about the dead letters that match.

        Args:
            filters: Which ones.
            newest: How many of the newest ones to keep; None keeps all of them.

        Raises:
            TransportError: The records cannot be read.
        """
        survey = Survey(newest, dead_letters=-self.dead_letters_read, others=-self.others_read)
        async for dead_letter in self.dead_letters(filters):
            survey.add(dead_letter)
        survey.dead_letters += self.dead_letters_read
        survey.others += self.others_read
        return survey


@dataclasses.dataclass(slots=True)
class Survey:
    """Figures about the dead letters that match filters."""

    limit: int | None = 0
    """How many of the newest ones to keep; None keeps all."""
    selected: int = 0
    """Number of those that match."""
    done: int = 0
    """Number of those that match and are done."""
    dead_letters: int = 0
    """Number of all."""
    others: int = 0
    """Number of other records in the topic."""
    first_failed_at: float | None = None
    last_failed_at: float | None = None
    """Seconds since the epoch; None if none matches."""
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    handlers: Counter[str] = dataclasses.field(default_factory=Counter)
    topics: Counter[str] = dataclasses.field(default_factory=Counter)
    _newest: list[tuple[float, int, StoredDeadLetter]] = dataclasses.field(default_factory=list)
    """A heap."""

    def add(self, dead_letter: StoredDeadLetter) -> None:
        """Count a dead letter that matches."""
        failed_at = dead_letter.failure.failed_at
        self.selected += 1
        self.done += dead_letter.done
        self.errors[dead_letter.failure.error] += 1
        self.handlers[dead_letter.failure.handler] += 1
        self.topics[dead_letter.original.topic] += 1
        self.first_failed_at = failed_at if self.first_failed_at is None else min(failed_at, self.first_failed_at)
        self.last_failed_at = failed_at if self.last_failed_at is None else max(failed_at, self.last_failed_at)
        heapq.heappush(self._newest, (failed_at, self.selected, dead_letter))
        if self.limit is not None and len(self._newest) > self.limit:
            heapq.heappop(self._newest)

    @property
    def newest(self) -> list[StoredDeadLetter]:
        """The newest ones, the latest last."""
        return [dead_letter for _, _, dead_letter in sorted(self._newest)]

    def as_object(self, *, progress_known: bool = True) -> dict[str, Any]:
        """Return the figures for JSON.

        Args:
            progress_known: Whether it is known which ones are done.
        """
        return {
            "selected": self.selected,
            "dead_letters": self.dead_letters,
            "replayed": self.done if progress_known else None,
            "first_failed_at": self.first_failed_at,
            "last_failed_at": self.last_failed_at,
            "errors": self.errors,
            "handlers": self.handlers,
            "topics": self.topics,
            "other_records": self.others,
        }
