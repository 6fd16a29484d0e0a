"""Transactions of a program that commits offsets of a group without being a member of it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final, Self

from aioshard.errors import CommitError, MessagesRefusedError, TakenOverError, TransportError
from aioshard.kafka.errors import denied
from aioshard.kafka.offsets import NO_MEMBER, GroupOffsets
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import connect
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.transactions")

_ATTEMPTS: Final = 3
"""How often a transaction is written that is aborted for a transient reason."""
_PAUSE: Final = 0.2
"""Seconds until a query is repeated."""


class StandaloneTransactions:
    """Commits messages together with offsets of one group; one program at a time can.

    Invariants:
        * After `take_over`, no transaction of an earlier program with the same group is open or can be committed.
    """

    def __init__(
        self,
        transactions: Transactions,
        transactional: TransactionalId,
        offsets: GroupOffsets,
        group_id: str,
        patience: float,
    ) -> None:
        """Use open transactions; see `opened`."""
        self._transactions = transactions
        self._id = transactional
        self._offsets = offsets
        self._group_id = group_id
        self._patience = patience
        """Seconds to wait for the offsets of the group."""
        self._known: dict[TopicPartition, Committed | None] = {}
        """The latest commits of the group: a transaction that does not change it leaves no trace of its outcome."""

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
                yield cls(transactions, transactional, offsets, group_id, settings.transaction_timeout)
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
        self._known = dict(committed)

    async def commit(self, messages: Sequence[Message], offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit messages and offsets in one transaction, and wait until it has ended.

        A transaction that was aborted for a transient reason is written again.

        Raises:
            MessagesRefusedError: Some messages can never be written. Nothing is visible or stored.
            TakenOverError: Another program has taken over. The offsets that it finds tell whether this transaction was
                committed before.
            AuthorizationError: This user may not read with the group or a topic. Nothing is visible or stored.
            CommitError: The transaction failed, or nobody can tell its outcome.
        """
        commits = {name: CommittedOffset(offset, -1, metadata) for name, (offset, metadata) in offsets.items()}
        for attempt in range(_ATTEMPTS):
            try:
                await self._transactions.commit(messages, commits, NO_MEMBER)
            except MessagesRefusedError:
                raise
            except WireError as error:
                raise self._refused(error) from error
            except TransportError as error:
                await self._settle(error)
                if all(self._known.get(name) == committed for name, committed in offsets.items()):
                    raise
                # Messages and offsets are visible together, or not at all.
                if await self._committed(offsets) == offsets:
                    break
                if attempt == _ATTEMPTS - 1:
                    raise
                logger.info("a transaction of %s is written again: %s", self._id, error)
            else:
                break
        self._known |= offsets

    async def _settle(self, failed: TransportError) -> None:
        """Wait until nothing of a failed transaction can happen any more.

        Raises:
            TakenOverError: Another program has taken over.
            TransportError: The brokers do not answer.
        """
        try:
            await self._transactions.settle()
        except TransportError:
            if self._id.is_fenced:
                raise TakenOverError(f"another program has taken over group {self._group_id!r}") from failed
            raise

    async def _committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Fetch what the group has committed.

        Raises:
            TransportError: The brokers do not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    stored = await self._offsets.committed(partitions)
            except TimeoutError:
                raise CommitError(
                    f"nobody can tell whether a transaction was committed: the brokers did not return the offsets of "
                    f"group {self._group_id!r} within {self._patience:g} s"
                ) from None
            except WireError as error:
                if not error.retriable:
                    raise self._refused(error) from error
                await asyncio.sleep(_PAUSE)
            else:
                return {name: Committed(found.offset, found.metadata) for name, found in stored.items()}

    def _refused(self, error: WireError) -> TransportError:
        return denied(error.cause, self._group_id) or CommitError(
            f"the brokers refused to store or return the offsets of group {self._group_id!r}: {error.cause.reason}",
            retriable=error.retriable,
        )
