"""Transactions of a program that commits offsets of a group without being a member of it."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self

from aioshard.errors import TakenOverError, TransportError
from aioshard.kafka.errors import commit_error
from aioshard.kafka.offsets import NO_MEMBER, GroupOffsets
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import connect
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings


class StandaloneTransactions:
    """Commits messages together with offsets of one group; one program at a time can.

    Invariants:
        * After `take_over`, no transaction of an earlier program with the same group is open or can be committed.
    """

    def __init__(self, transactions: Transactions, transactional: TransactionalId, group_id: str) -> None:
        """Use open transactions; see `opened`."""
        self._transactions = transactions
        self._id = transactional
        self._group_id = group_id

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, settings: Settings, group_id: str) -> AsyncIterator[Self]:
        """Connect; nothing is taken over yet.

        Args:
            settings: The brokers; `transaction_timeout` limits each call.
            group_id: The group, and the prefix of the transactional id.

        Raises:
            TransportError: No broker answers, or a broker refuses the connection.
        """
        cluster = await connect(settings)
        try:
            transactional = TransactionalId(f"{group_id}:all")
            offsets = GroupOffsets(cluster, group_id)
            transactions = Transactions(cluster, transactional, offsets, group_id, timeout=settings.transaction_timeout)
            try:
                yield cls(transactions, transactional, group_id)
            finally:
                await transactions.close()
        finally:
            await cluster.close()

    async def take_over(self) -> None:
        """End the transaction of an earlier program with the same group, which can commit nothing more.

        Raises:
            AuthorizationError: This user may not use the transactional id.
            TransportError: The brokers do not answer, or do not allow transactions.
        """
        await self._transactions.settle()

    def learn(self, committed: Mapping[TopicPartition, Committed | None]) -> None:
        """Note what the group has committed, once it was taken over: it decides transactions of unknown outcome."""
        self._transactions.learn(committed)

    async def commit(self, messages: Sequence[Message], offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit messages and offsets in one transaction, and wait until it has ended.

        Raises:
            MessagesRefusedError: Some messages can never be written. Nothing is visible or stored.
            TakenOverError: Another program has taken over. The offsets that it finds tell whether this transaction was
                committed before.
            AuthorizationError: This user may not read with the group or a topic. Nothing is visible or stored.
            CommitError: The transaction failed, or nobody can tell its outcome.
        """
        commits = {name: CommittedOffset(offset, -1, metadata) for name, (offset, metadata) in offsets.items()}
        try:
            await self._transactions.commit(messages, commits, NO_MEMBER)
        except WireError as error:
            raise commit_error(error.cause, offsets, self._group_id) from error
        except TransportError as error:
            await self._raise_if_taken_over(error)
            raise

    async def _raise_if_taken_over(self, error: TransportError) -> None:
        """Ask for a new epoch, which the brokers refuse if another program has one."""
        with contextlib.suppress(TransportError):
            await self._transactions.settle()
        if self._id.is_fenced:
            raise TakenOverError(f"another program has taken over group {self._group_id!r}") from error
