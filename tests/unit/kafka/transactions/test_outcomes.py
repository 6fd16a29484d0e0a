"""How a transaction has ended whose commit was not answered, and how the outcomes are counted."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioshard.errors import CommitError, TransportError
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.answers import Meaning
from aioshard.kafka.transactions.coordinator import Answer, Coordinator
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.outcomes import KnownOffsets, TransactionOutcome
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.requests import END_TXN, INIT_PRODUCER_ID, TXN_OFFSET_COMMIT
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Committed, TransactionCounts
from aioshard.records import TopicPartition

ORDERS, PAYMENTS = TopicPartition("orders", 0), TopicPartition("payments", 0)
MEMBER = Member(4, "us")


class Brokers:
    """The coordinators and the stored offsets; a commit is executed or not, as the test says."""

    def __init__(self) -> None:
        self.stored: dict[TopicPartition, CommittedOffset] = {}
        self.sent: list[Api] = []
        self.answers_end: Callable[[], Answer] | None = None
        """The answer to the next commits; None if they are executed and answered."""
        self.executes = True
        self.epoch = 0
        self.deleted: frozenset[str] = frozenset()
        self.unknown: frozenset[str] = frozenset()
        """Topics that the coordinator of the group does not know."""
        self._pending: dict[TopicPartition, CommittedOffset] = {}

    @property
    def metadata(self) -> SimpleNamespace:
        return SimpleNamespace(missing=self.deleted)

    async def look_up(self, topics: Collection[str]) -> None:
        assert topics

    def offers(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Remember the offsets of the next transaction, which are stored with its commit."""
        self._pending = dict(offsets)

    async def ask(self, call: Any, request: Request, codes: Any, error_in: Any) -> Answer:  # noqa: ARG002
        self.sent.append(request.api)
        await asyncio.sleep(0)
        if request.api is INIT_PRODUCER_ID:
            self.epoch += 1
        if request.api is END_TXN:
            if self.executes:
                self.stored |= self._pending
            if self.answers_end is not None:
                return self.answers_end()
        named = {topic["topic"] for topic in request.values.get("topics", ())}
        if request.api is TXN_OFFSET_COMMIT and named & self.unknown:
            codes = {name: 3 if name in self.unknown else 0 for name in named}
            parts = [
                SimpleNamespace(topic=name, partitions=[SimpleNamespace(partition=0, error=code)])
                for name, code in codes.items()
            ]
            return Answer(SimpleNamespace(topics=parts), error_for(3), Meaning.UNKNOWN_TOPIC, is_in_doubt=False)
        response = SimpleNamespace(producer_id=7, epoch=self.epoch, error=0)
        return Answer(response, None, Meaning.DONE, is_in_doubt=False)

    async def features(self) -> Mapping[str, int]:
        return {"transaction.version": 2}

    async def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, CommittedOffset]:
        return {name: self.stored[name] for name in partitions if name in self.stored}


def unanswered() -> Answer:
    raise CommitError("no answer in time")


def hanging() -> Answer:
    """The task that waits is cancelled."""
    raise asyncio.CancelledError


class Client:
    """A client with its brokers."""

    def __init__(self) -> None:
        self.brokers = Brokers()
        self.transactions = Transactions(
            cast("Cluster", self.brokers),
            TransactionalId("billing:one"),
            cast("GroupOffsets", self.brokers),
            "billing",
            timeout=5.0,
        )
        coordinator = cast("Coordinator", self.brokers)
        self.transactions._coordinator = self.transactions._group = coordinator

    async def commit(self, **offsets: tuple[int, str]) -> None:
        values = {
            {"orders": ORDERS, "payments": PAYMENTS}[topic]: CommittedOffset(offset, -1, text)
            for topic, (offset, text) in offsets.items()
        }
        self.brokers.offers(values)
        await self.transactions.commit([], values, MEMBER)

    @property
    def counts(self) -> TransactionCounts:
        return self.transactions.counts


async def test_answers_are_counted() -> None:
    client = Client()
    await client.commit(orders=(1, ""))
    await client.commit(orders=(2, ""))
    client.brokers.executes = False
    client.brokers.answers_end = lambda: Answer(None, error_for(48), Meaning.ENDED, is_in_doubt=False)
    with pytest.raises(CommitError):
        await client.commit(orders=(3, ""))
    await client.transactions.settle()
    assert client.counts == TransactionCounts(committed=2, aborted=1, epochs=2)
    assert client.brokers.sent[:3] == [INIT_PRODUCER_ID, TXN_OFFSET_COMMIT, END_TXN]


async def test_offsets_that_have_changed_show_a_commit() -> None:
    client = Client()
    await client.commit(orders=(1, "first"))
    client.brokers.answers_end = unanswered
    await client.commit(orders=(1, "second"))
    await client.commit(orders=(2, ""), payments=(1, ""))
    assert client.counts == TransactionCounts(committed=1, decided_committed=2, epochs=3)


async def test_offsets_that_have_not_changed_show_an_abort() -> None:
    client = Client()
    await client.commit(orders=(1, ""))
    client.brokers.answers_end, client.brokers.executes = unanswered, False
    with pytest.raises(CommitError, match="no answer in time"):
        await client.commit(orders=(2, ""))
    assert client.counts == TransactionCounts(committed=1, decided_aborted=1, epochs=2)


@pytest.mark.parametrize("executes", [True, False])
async def test_a_transaction_that_changes_no_offset_leaves_its_outcome_unknown(*, executes: bool) -> None:
    """It has published only messages of parked records, say: only their topics show the outcome."""
    client = Client()
    client.transactions.learn({ORDERS: Committed(1, "text"), PAYMENTS: None})
    client.brokers.stored = {ORDERS: CommittedOffset(1, -1, "text")}
    client.brokers.answers_end, client.brokers.executes = unanswered, executes
    with pytest.raises(CommitError, match="nobody can tell"):
        await client.commit(orders=(1, "text"))
    assert client.counts == TransactionCounts(undecided=1, epochs=2)


@pytest.mark.parametrize("answer", [None, unanswered])
async def test_an_offset_that_one_transaction_has_stored_does_not_show_the_next(
    answer: Callable[[], Answer] | None,
) -> None:
    client = Client()
    client.transactions.learn({ORDERS: None})
    client.brokers.answers_end = answer
    await client.commit(orders=(2, "text"))
    client.brokers.answers_end, client.brokers.executes = unanswered, False
    with pytest.raises(CommitError, match="nobody can tell"):
        await client.commit(orders=(2, "text"))
    assert client.counts.undecided == 1


async def test_the_first_offset_of_a_partition_shows_a_commit_or_an_abort() -> None:
    client = Client()
    client.transactions.learn({ORDERS: None})
    client.brokers.answers_end, client.brokers.executes = unanswered, False
    with pytest.raises(CommitError, match="no answer in time"):
        await client.commit(orders=(1, ""))
    client.brokers.executes = True
    await client.commit(orders=(1, ""))
    assert client.counts == TransactionCounts(decided_aborted=1, decided_committed=1, epochs=3)


async def test_an_offset_that_another_owner_has_made_the_same_does_not_show_a_commit() -> None:
    """It owns one of the partitions by now; the outputs of the other one are still to be published."""
    client = Client()
    client.transactions.learn({ORDERS: None, PAYMENTS: None})
    client.brokers.answers_end, client.brokers.executes = unanswered, False
    client.brokers.stored[ORDERS] = CommittedOffset(2, -1, "")
    with pytest.raises(CommitError):
        await client.commit(orders=(2, ""), payments=(3, ""))
    assert client.counts.decided_committed == 0


async def test_an_offset_that_moved_on_and_one_as_we_made_it_leave_the_outcome_unknown() -> None:
    client = Client()
    client.transactions.learn({ORDERS: None, PAYMENTS: None})
    client.brokers.answers_end, client.brokers.executes = unanswered, False
    client.brokers.stored |= {ORDERS: CommittedOffset(2, -1, ""), PAYMENTS: CommittedOffset(9, -1, "")}
    with pytest.raises(CommitError, match="nobody can tell"):
        await client.commit(orders=(2, ""), payments=(3, ""))


async def test_a_deleted_topic_does_not_hold_back_the_others() -> None:
    client = Client()
    client.brokers.unknown = client.brokers.deleted = frozenset({"orders"})
    await client.commit(orders=(2, ""), payments=(3, ""))
    assert client.counts.committed == 1


async def test_nothing_is_committed_while_a_coordinator_does_not_know_a_topic_that_exists() -> None:
    """Its outputs would be visible without its offset, and again after a crash."""
    client = Client()
    client.brokers.unknown = frozenset({"orders"})
    with pytest.raises(CommitError):
        await client.commit(orders=(2, ""), payments=(3, ""))
    assert client.counts.committed == 0
    assert client.counts.aborted == 1


def test_a_transaction_without_offsets_leaves_its_outcome_unknown() -> None:
    """Those of deleted topics are left out; its messages may be visible or not."""
    known = KnownOffsets()
    known.learn({ORDERS: Committed(1, "")})
    assert known.outcome({}, {}) is TransactionOutcome.UNKNOWN


async def test_a_client_that_is_closed_during_a_commit_does_not_know_its_outcome() -> None:
    client = Client()
    client.brokers.answers_end = hanging
    with pytest.raises(TransportError):
        await client.commit(orders=(1, ""))
    assert client.counts == TransactionCounts(undecided=1, epochs=1)
