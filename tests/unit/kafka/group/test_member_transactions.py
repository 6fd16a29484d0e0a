"""The part of a member's transport in transactions: the membership of a commit, and what waits for one to end."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import pytest

from aioshard.errors import (
    ClientLostError,
    CommitError,
    CommitRefusedError,
    TransportError,
)
from aioshard.kafka.group.member import NO_PARTITIONS, Assigned, Lost, Ownership, Revoked
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Committed, Membership, Message
from aioshard.records import TopicPartition
from tests.unit.kafka.group.lone_transport import BOTH, FIRST, SECOND, Alone

MESSAGES = [Message("out", b"")]
OFFSETS = {FIRST: Committed(7, "finished: 9")}
PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])
EPOCH_OF_ALL = 3
"""The newest leader epoch that was read of each partition."""


class FakeTransactions:
    """Stands in for `Transactions`: a running transaction ends when the test says so."""

    hang = None

    def __init__(self) -> None:
        self.sent: list[tuple[Sequence[Message], Mapping[TopicPartition, CommittedOffset], Member]] = []
        self.refusal: WireError | None = None
        """The answer to each commit."""
        self.ended = asyncio.Event()
        self.error: TransportError | None = None
        """The reason why nobody can tell how the running transaction has ended."""
        self.failure: TransportError | None = None
        self.waits = 0
        self.learned: list[Mapping[TopicPartition, Committed | None]] = []
        self.closed = False

    async def commit(
        self, messages: Sequence[Message], offsets: Mapping[TopicPartition, CommittedOffset], member: Member
    ) -> None:
        self.sent.append((messages, offsets, member))
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal

    async def settle(self) -> None:
        self.waits += 1
        await self.ended.wait()
        if self.error is not None:
            raise self.error

    def learn(self, committed: Mapping[TopicPartition, Committed | None]) -> None:
        self.learned.append(committed)

    async def close(self) -> None:
        self.closed = True


class FakeOffsets:
    """The committed offsets of the group, which must not be read while a transaction may change them."""

    def __init__(self, transactions: FakeTransactions, *answers: CommittedOffset | WireError) -> None:
        self.transactions = transactions
        self.answers = list(answers)

    async def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, CommittedOffset]:
        assert self.transactions.ended.is_set(), "the running transaction may still change them"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(partitions, answer)


class Transacting(Alone):
    """A member whose commits are transactions."""

    def __init__(self, protocol: Any = "consumer", **settings: Any) -> None:
        super().__init__(
            protocol,
            transactional=TransactionalId("billing:one"),
            processing_guarantee="exactly_once",
            **settings,
        )
        assert self._transactions is not None
        self.transactions = FakeTransactions()
        self._transactions = cast("Transactions", self.transactions)
        mock.patch.object(self._fetcher, "newest_epoch", return_value=EPOCH_OF_ALL).start()

    async def begin_to_commit(self, membership: Membership) -> "asyncio.Task[None]":
        """Begin a commit, and let it do only what it does without waiting."""
        committing = asyncio.create_task(self.commit(OFFSETS, membership, MESSAGES), name="commit")
        await asyncio.sleep(0)
        return committing

    def stores(self, *answers: CommittedOffset | WireError) -> None:
        self._queries._offsets = cast("GroupOffsets", FakeOffsets(self.transactions, *answers))

    async def close(self) -> None:
        self.engine.drained.set()
        await super().close()


# The membership of a commit ---------------------------------------------------------------


@PROTOCOLS
async def test_the_membership_of_a_transaction_is_that_of_the_moment_of_its_offsets(protocol: str) -> None:
    """Its messages and offsets were chosen then: a newer generation must not carry them."""
    transport = Transacting(protocol, group_instance_id="same")
    membership = await transport.assign()
    committing = await transport.begin_to_commit(membership)
    transport.driver.ownership = Ownership(1, "one", 6, BOTH, 10.0)
    await committing
    stored = {FIRST: CommittedOffset(7, EPOCH_OF_ALL, "finished: 9")}
    assert transport.transactions.sent == [(MESSAGES, stored, Member(5, "one", "same"))]
    await transport.close()


@PROTOCOLS
@pytest.mark.parametrize("code", [22, 25, 27, 82, 113])
async def test_a_transaction_that_the_group_refuses_is_not_sent_under_a_newer_generation(
    protocol: str, code: int
) -> None:
    """A plain commit may be sent again; of this one only the engine knows what is still to be committed."""
    transport = Transacting(protocol)
    membership = await transport.assign()
    transport.transactions.refusal = error_for(code)
    committing = await transport.begin_to_commit(membership)
    transport.driver.ownership = Ownership(1, "one", 6, BOTH, 10.0)
    with pytest.raises(CommitRefusedError):
        await committing
    assert len(transport.transactions.sent) == 1
    assert transport.driver.refused == [code], "the driver asks the group for news"
    await transport.close()


async def test_a_transaction_that_fails_for_another_reason_may_have_been_committed() -> None:
    transport = Transacting()
    membership = await transport.assign()
    transport.transactions.refusal = error_for(47)
    with pytest.raises(CommitError) as raised:
        await (await transport.begin_to_commit(membership))
    assert not isinstance(raised.value, CommitRefusedError)
    await transport.close()


@pytest.mark.parametrize(
    "now",
    [
        Ownership(2, "one", 7, BOTH, 20.0),
        Ownership(1, "one", 6, frozenset({SECOND}), 10.0),
        Ownership(1, "one", 5, BOTH, 0.0),
    ],
    ids=["another life", "without the partition", "beyond its time"],
)
async def test_a_transaction_is_not_sent_for_what_is_not_ours_now(now: Ownership) -> None:
    transport = Transacting("classic")
    membership = await transport.assign()
    transport.driver.ownership = now
    with pytest.raises(CommitRefusedError):
        await transport.commit(OFFSETS, membership, MESSAGES)
    assert transport.transactions.sent == []
    await transport.close()


# Revocations ------------------------------------------------------------------------------


@PROTOCOLS
async def test_partitions_are_released_once_the_running_transaction_has_ended(protocol: str) -> None:
    transport = Transacting(protocol)
    await transport.assign()
    transport.engine.drained.set()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    assert transport.transactions.waits == 1
    assert transport.driver.let_go == []
    assert FIRST in transport._fetcher
    transport.transactions.ended.set()
    await transport.tell()
    assert transport.driver.let_go == [(1, frozenset({FIRST}))]
    assert FIRST not in transport._fetcher
    await transport.close()


async def test_a_running_transaction_ends_after_the_engine_has_drained() -> None:
    """Its last commit is one more transaction."""
    transport = Transacting()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    assert transport.transactions.waits == 0
    transport.engine.drained.set()
    await transport.tell()
    assert transport.transactions.waits == 1
    await transport.close()


@pytest.mark.parametrize("error", [None, TransportError("the brokers do not answer")])
async def test_a_transaction_that_does_not_end_holds_back_partitions_only_for_a_while(
    error: TransportError | None,
) -> None:
    """The group waits for us. The next owner finds the offsets unstable until the transaction has ended."""
    transport = Transacting(commit_timeout=0.05)
    await transport.assign()
    transport.engine.drained.set()
    if error is not None:
        transport.transactions.error = error
        transport.transactions.ended.set()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    async with asyncio.timeout(10):
        while not transport.driver.let_go:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)
    assert FIRST not in transport._fetcher
    assert SECOND in transport._fetcher
    await transport.close()


async def test_lost_partitions_do_not_wait_for_a_transaction() -> None:
    """They are not ours any more, so the brokers refuse it."""
    transport = Transacting()
    await transport.assign()
    own = transport.driver.ownership
    transport.engine.drained.set()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    transport.driver.begin_another_life()
    await transport.tell(Lost(1, BOTH, "the session is over"), Assigned(1, NO_PARTITIONS, own))
    assert transport.engine.told[-1] == ("lost", BOTH)
    transport.transactions.ended.set()
    await transport.tell()
    assert transport.driver.let_go == [], "a later life has not released anything"
    await transport.close()


# Committed offsets ------------------------------------------------------------------------


async def test_offsets_are_read_once_no_transaction_of_ours_may_change_them() -> None:
    transport = Transacting()
    transport.stores(CommittedOffset(7, 1, "text"))
    reading = asyncio.create_task(transport.committed([FIRST]), name="read")
    await transport.tell()
    assert not reading.done()
    transport.transactions.ended.set()
    assert await reading == {FIRST: Committed(7, "text")}
    assert transport.transactions.learned == [{FIRST: Committed(7, "text")}]
    await transport.close()


async def test_an_offset_in_a_pending_transaction_is_not_returned() -> None:
    """It is reported immediately: such a transaction may last for minutes."""
    transport = Transacting()
    transport.stores(error_for(88))
    transport.transactions.ended.set()
    with pytest.raises(TransportError, match=r"orders/0.*transaction of the group is still open") as raised:
        await transport.committed([FIRST])
    assert raised.value.retriable
    await transport.close()


async def test_no_offset_is_returned_while_nobody_can_tell_how_a_transaction_has_ended() -> None:
    transport = Transacting()
    transport.stores(CommittedOffset(7, 1, "text"))
    transport.transactions.error = CommitError("nobody can tell")
    transport.transactions.ended.set()
    with pytest.raises(CommitError):
        await transport.committed([FIRST])
    await transport.close()


# The end ----------------------------------------------------------------------------------


async def test_a_client_whose_transactional_id_was_fenced_ends() -> None:
    """It can publish nothing any more; another client begins at what the group has committed."""
    transport = Transacting()
    await transport.assign()
    fenced = ClientLostError("fenced")
    transport.transactions.failure = fenced
    assert await transport.failure() is fenced
    await transport.close()


async def test_closing_ends_the_transactions() -> None:
    transport = Transacting()
    await transport.assign()
    await transport.close()
    assert transport.transactions.closed
    with pytest.raises(ClientLostError):
        await transport.committed([FIRST])
