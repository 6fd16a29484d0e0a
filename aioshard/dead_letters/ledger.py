"""Stores which dead letters of a topic are done: for one run at a time, in the transaction that sends their records."""

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Self

from aioshard.dead_letters.dead_letter import Position
from aioshard.dead_letters.progress import progress_group, sending_group
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.errors import TakenOverError, TransportError
from aioshard.kafka.transactions.standalone import StandaloneTransactions
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings


class Ledger:
    """Which dead letters are done; while it is open, this run is the only one that can add to it.

    Invariants:
        * The records of a transaction are visible if and only if their dead letters are stored as done.
        * A run that another one has replaced stores nothing any more.
    """

    def __init__(self, topic: DeadLetterTopic, transactions: StandaloneTransactions) -> None:
        """Write with open transactions; see `opened`."""
        self.topic = topic
        self._transactions = transactions
        self._uncopied = {
            at.partition
            for at, committed in topic.transactional_commits.items()
            if committed != topic.plain_commits[at]
        }
        """Partitions whose progress is not copied to the group whose offsets brokers keep for years."""

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, settings: Settings, topic: DeadLetterTopic) -> AsyncIterator[Self]:
        """Fence any other run, then fetch the progress of *topic*.

        Raises:
            AuthorizationError: This user may not read with a group that stores the progress, or may not use the
                transactional id.
            TransportError: The brokers do not answer.
        """
        async with StandaloneTransactions.opened(settings, sending_group(topic.name)) as transactions:
            await transactions.take_over()
            await topic.fetch_progress(wait=True)
            transactions.learn(topic.transactional_commits)
            ledger = cls(topic, transactions)
            await ledger.copy()
            yield ledger

    async def store(self, done: Collection[Position], messages: Sequence[Message] = ()) -> None:
        """Publish messages, and store that dead letters are done, in one transaction; `copy` it afterwards.

        Raises:
            MessagesRefusedError: Some messages can never be written. Nothing has changed.
            TakenOverError: Another run has taken over; it continues from what was stored before.
            TransportError: Nothing has changed, unless nobody can tell. Or the finished dead letters are too scattered
                for brokers to store all their offsets: with messages, nothing has changed; without, the lowest ones
                that fit are stored.
        """
        if not done:
            return
        offsets: dict[int, list[int]] = {}
        for partition, offset in done:
            offsets.setdefault(partition, []).append(offset)
        following = {number: self.topic.progress[number].after(finished) for number, finished in offsets.items()}
        scattered = [number for number, progress in following.items() if not progress.fits]
        if scattered and messages:
            raise self._too_scattered(scattered)
        commits = {TopicPartition(self.topic.name, number): later.commit() for number, later in following.items()}
        try:
            await self._transactions.commit(messages, commits)
        except TakenOverError as error:
            raise TakenOverError(
                f"another run on {self.topic.name} has begun: this one has ended, and that one continues from here"
            ) from error
        self.topic.progress.update(following)
        self._uncopied |= following.keys()
        if scattered:
            raise self._too_scattered(scattered)

    def _too_scattered(self, partitions: Sequence[int]) -> TransportError:
        return TransportError(
            f"the finished dead letters of {self.topic.name}/{partitions[0]} are too scattered: brokers cannot store "
            "all their offsets. Replay the oldest ones first, with --until and no other filter",
            retriable=False,
        )

    async def copy(self) -> None:
        """Copy what was stored to the group whose offsets brokers keep for years.

        Raises:
            TransportError: It was not copied. The next run does it.
        """
        topic = self.topic
        commits = {TopicPartition(topic.name, number): topic.progress[number].commit() for number in self._uncopied}
        if commits:
            await topic.administration.commit_without_member(progress_group(topic.name), commits, retry=True)
        self._uncopied.clear()
