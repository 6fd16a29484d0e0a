"""A transaction of unknown outcome is decided by its offsets, and written again only if it was aborted."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import pytest

from aioshard.errors import ClientLostError, CommitError, MessageRefusedError, MessagesRefusedError, TakenOverError
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.standalone import StandaloneTransactions
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition

AT = TopicPartition("orders.dlt", 0)
OFFSETS = {AT: Committed(7, "done")}
MESSAGES = [Message("orders", b"1")]


class Brokers:
    """Stands in for transactions and offsets; each commit ends as it is scripted."""

    def __init__(self, *ends: str) -> None:
        self.visible: list[Message] = []
        self.stored: dict[TopicPartition, CommittedOffset] = {AT: CommittedOffset(3, -1, "")}
        self.id = TransactionalId("g:all")
        self._ends = list(ends)

    async def commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, CommittedOffset], _: Member
    ) -> None:
        end = self._ends.pop(0)
        if "stored" in end:
            self.visible += messages
            self.stored = dict(offsets)
        if "fenced" in end:
            self.id.fence()
        if "refused" in end:
            raise MessagesRefusedError({0: MessageRefusedError("no")})
        if "error" in end:
            raise CommitError("the brokers do not answer")

    def learn(self, _: Mapping[TopicPartition, Committed | None]) -> None:
        """Know enough already."""

    async def settle(self) -> None:
        if self.id.is_fenced:
            raise ClientLostError("fenced")

    async def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, CommittedOffset]:
        return {name: self.stored[name] for name in partitions}


def commit(brokers: Brokers) -> None:
    transactions = StandaloneTransactions(
        cast("Transactions", brokers), brokers.id, cast("GroupOffsets", brokers), "g", 5.0
    )
    transactions.learn({name: Committed(stored.offset, stored.metadata) for name, stored in brokers.stored.items()})
    asyncio.run(transactions.commit(MESSAGES, OFFSETS))


@pytest.mark.parametrize(
    "ends",
    [
        ["stored"],
        ["stored with an error"],
        ["error", "stored"],
        ["error", "stored with an error"],
        ["error", "error", "stored"],
    ],
)
def test_messages_are_visible_once_whatever_the_answers_are(ends: list[str]) -> None:
    brokers = Brokers(*ends)

    commit(brokers)

    assert brokers.visible == MESSAGES
    assert brokers.stored[AT] == (7, -1, "done")


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        (["error", "error", "error"], CommitError),
        (["refused"], MessagesRefusedError),
        (["fenced with an error"], TakenOverError),
        (["error", "fenced with an error"], TakenOverError),
    ],
)
def test_an_error_means_that_nothing_is_visible(ends: list[str], error: type[Exception]) -> None:
    brokers = Brokers(*ends)

    with pytest.raises(error):
        commit(brokers)

    assert brokers.visible == []


def test_a_transaction_that_changes_no_offset_is_not_taken_for_committed() -> None:
    """As if finished dead letters are sent again: the offsets are the same before and after."""
    brokers = Brokers("error", "stored")
    brokers.stored = {name: CommittedOffset(offset, -1, text) for name, (offset, text) in OFFSETS.items()}

    with pytest.raises(CommitError):
        commit(brokers)

    assert brokers.visible == []
