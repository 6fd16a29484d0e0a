"""The transport's part in a transaction: the membership of its commit, and the waits of a revocation."""

import asyncio
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from aioshard.errors import ClientLostError, CommitRefusedError, TransportError
from aioshard.kafka.confluent.consumer import Change
from aioshard.kafka.confluent.transport import ConfluentTransport
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Allowance, Committed, Membership, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings

ORDERS = TopicPartition("orders", 0)
MESSAGES = [Message("out", b"")]


def metadata_of(member_id: str, generation: int) -> bytes:
    return b"CGMDv2:" + struct.pack("=i", generation) + b"billing\0" + member_id.encode() + b"\0\1"


class FakeConsumer:
    """Stands in for the `ConsumerThread`."""

    def __init__(self) -> None:
        self.metadata = metadata_of("us", 4)
        self.released = asyncio.Event()

    async def call(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def group_metadata(self) -> bytes:
        return self.metadata

    def end_revocation(self) -> None:
        self.released.set()


class FakeTransactions:
    """Stands in for `Transactions`; one that is undecided ends when the test says so."""

    def __init__(self) -> None:
        self.committed: list[tuple[Sequence[Message], object]] = []
        self.decided = asyncio.Event()
        self.error: TransportError | None = None
        self.waits = 0

    async def commit(
        self, messages: Sequence[Message], _: Mapping[TopicPartition, Committed], metadata: object
    ) -> None:
        self.committed.append((messages, metadata))

    async def settle(self) -> None:
        self.waits += 1
        await self.decided.wait()
        if self.error is not None:
            raise self.error


class FakeOffsets:
    """The group's offsets: an answer or an error for each query, in turn."""

    def __init__(self, transactions: FakeTransactions, *answers: CommittedOffset | WireError) -> None:
        self.transactions = transactions
        self.answers = list(answers)

    async def committed(self, partitions: Collection[TopicPartition]) -> Any:
        assert self.transactions.decided.is_set(), "an open transaction may still change them"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(partitions, answer)


class FakeListener:
    """The engine."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def assigned(self, _: Collection[TopicPartition], __: Membership) -> None:
        self.calls.append("assigned")

    async def revoked(self, _: Collection[TopicPartition]) -> None:
        self.calls.append("revoked")

    def lost(self, _: Collection[TopicPartition]) -> None:
        self.calls.append("lost")


class Member:
    """A member with one partition, in generation 4."""

    def __init__(self, **settings: Any) -> None:
        made = Settings(
            bootstrap_servers="127.0.0.1:9",
            client="confluent",
            processing_guarantee="exactly_once",
            commit_timeout=0.2,
            **settings,
        )
        self.transport = ConfluentTransport(made, "billing", "billing:1")
        real: Any = self.transport._transactions
        real._producer.stop()
        self.consumer, self.transactions, self.listener = FakeConsumer(), FakeTransactions(), FakeListener()
        transport: Any = self.transport
        transport._consumer, transport._transactions = self.consumer, self.transactions
        transport._listener, transport._membership = self.listener, Membership("us", 4)
        transport._is_started = True
        transport._buffer.add([ORDERS])

    async def commit(self) -> None:
        transport: Any = self.transport
        await transport._commit_as_member({ORDERS: Committed(1, "")}, self.transport.membership(), MESSAGES)

    def answers(self, *answers: CommittedOffset | WireError) -> None:
        self.transport._offsets = FakeOffsets(self.transactions, *answers)  # type: ignore[assignment]

    def revoke(self, *, lost: bool = False) -> "asyncio.Task[None]":
        return asyncio.create_task(self.transport._on_revoked([ORDERS], lost))

    @property
    def has_partition(self) -> bool:
        return ORDERS in self.transport._buffer


async def test_a_transaction_carries_the_metadata_of_its_membership() -> None:
    member = Member()
    await member.commit()
    assert member.transactions.committed == [(MESSAGES, metadata_of("us", 4))]


@pytest.mark.parametrize("now", [("us", 5), ("another", 4), ("", -1)])
async def test_a_transaction_of_an_old_generation_is_not_sent(now: tuple[str, int]) -> None:
    """The brokers would accept it: they know the client's new generation, and not that the offsets are older."""
    member = Member()
    member.consumer.metadata = metadata_of(*now)
    with pytest.raises(CommitRefusedError):
        await member.commit()
    assert member.transactions.committed == []


async def test_under_kip_848_only_the_member_counts() -> None:
    """The member epoch rises without an assignment, and brokers accept the latest one only."""
    member = Member(group_protocol="consumer")
    member.consumer.metadata = metadata_of("us", 5)
    await member.commit()
    assert member.transactions.committed == [(MESSAGES, metadata_of("us", 5))]
    member.consumer.metadata = metadata_of("another", 5)
    with pytest.raises(CommitRefusedError):
        await member.commit()
    assert len(member.transactions.committed) == 1


async def test_a_transaction_is_not_sent_once_its_partition_is_gone() -> None:
    """It was revoked while the client's thread was asked for the metadata."""
    member = Member()
    member.transport._buffer.remove([ORDERS])
    with pytest.raises(CommitRefusedError, match="not assigned to us"):
        await member.commit()
    assert member.transactions.committed == []


async def test_partitions_are_released_once_no_transaction_is_undecided() -> None:
    member = Member()
    revoking = member.revoke()
    await asyncio.sleep(0.02)
    assert (member.listener.calls, member.transactions.waits) == (["revoked"], 1)
    assert member.has_partition
    assert not member.consumer.released.is_set()
    member.transactions.decided.set()
    await revoking
    assert member.consumer.released.is_set()
    assert not member.has_partition
    assert member.transport._failure is None


@pytest.mark.parametrize("error", [None, TransportError("the brokers do not answer")])
async def test_a_member_whose_transaction_stays_undecided_ends(error: TransportError | None) -> None:
    """It cannot keep the group waiting; a new client with its id makes the brokers decide."""
    member = Member()
    if error is not None:
        member.transactions.error = error
        member.transactions.decided.set()
    await asyncio.wait_for(member.revoke(), 2)
    assert member.consumer.released.is_set()
    assert member.transport._failure is not None
    with pytest.raises(TransportError):
        await member.transport.poll(lambda _: Allowance(1, 1), 0)


async def test_a_member_whose_metadata_nobody_keeps_up_to_date_ends() -> None:
    member = Member()
    member.transport._cluster.start()
    for task in asyncio.all_tasks():
        if task.get_name() == "metadata of a Kafka cluster":
            task.cancel()
    await asyncio.sleep(0.01)
    with pytest.raises(ClientLostError):
        await member.transport.poll(lambda _: Allowance(1, 1), 0)


async def test_a_partition_being_released_is_not_fetched() -> None:
    member = Member()
    buffer = member.transport._buffer
    buffer.seek(ORDERS, 0)
    buffer.resume([ORDERS])
    assert buffer.changes(0.0) == [Change(ORDERS, 0)]
    revoking = member.revoke()
    await asyncio.sleep(0.02)
    assert buffer.changes(0.0) == [Change(ORDERS, None)]
    member.transactions.decided.set()
    await revoking


async def test_a_revocation_during_close_does_not_block_the_thread() -> None:
    member = Member()
    member.transport._closed = True
    await member.revoke()
    assert member.listener.calls == []
    assert member.consumer.released.is_set()


async def test_lost_partitions_are_released_at_once() -> None:
    """They are not ours any more: the brokers refuse what comes later."""
    member = Member()
    await asyncio.wait_for(member.revoke(lost=True), 2)
    assert member.listener.calls == ["lost"]
    assert member.consumer.released.is_set()
    assert member.transport.membership().generation == -1


# Committed offsets ----------------------------------------------------------------------


async def test_offsets_are_read_once_no_own_transaction_is_undecided() -> None:
    member = Member()
    member.answers(CommittedOffset(7, -1, ""))
    reading = asyncio.create_task(member.transport.committed([ORDERS]))
    await asyncio.sleep(0.02)
    assert not reading.done()
    member.transactions.decided.set()
    assert await reading == {ORDERS: Committed(7, "")}


async def test_an_offset_in_a_pending_transaction_is_not_returned() -> None:
    """It is reported immediately: such a transaction may last for minutes."""
    member = Member()
    member.answers(error_for(88))
    member.transactions.decided.set()
    with pytest.raises(TransportError, match=r"orders/0.*transaction of the group is still open") as raised:
        await member.transport.committed([ORDERS])
    assert raised.value.retriable


async def test_a_partition_error_does_not_mean_a_missing_offset() -> None:
    member = Member()
    member.answers(error_for(29, "orders"))
    member.transactions.decided.set()
    with pytest.raises(TransportError, match="do not allow this user"):
        await member.transport.committed([ORDERS])


async def test_offset_fetches_are_retried_after_a_transient_error() -> None:
    member = Member()
    member.answers(error_for(16), CommittedOffset(7, -1, ""))
    member.transactions.decided.set()
    assert await member.transport.committed([ORDERS]) == {ORDERS: Committed(7, "")}
