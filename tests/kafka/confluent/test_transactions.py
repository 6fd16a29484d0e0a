"""Errors of every transaction call: all or nothing is visible, and the next transaction works."""

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import ClientLostError, CommitError, CommitRefusedError, TransportError
from aioshard.kafka.confluent import transactions as module
from aioshard.kafka.confluent.transactions import Transactions
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from tests.support.kafka_libs import PROJECT

OFFSETS = {TopicPartition("orders", 0): Committed(1, "")}
CALLS = ("begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction")
RETRIABLE = KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, "loading", retriable=True)
ABORTABLE = KafkaError(KafkaError.UNKNOWN_MEMBER_ID, "gone", txn_requires_abort=True)
FATAL = KafkaError(KafkaError._FENCED, "fenced", fatal=True)


class Broker:
    """The brokers: visible messages, and the errors of the next calls, by name."""

    def __init__(self) -> None:
        self.visible: list[bytes] = []
        self.commits_undecided = True
        self.errors: dict[str, list[KafkaError]] = {}
        self.clients = 0
        self.undecided: list[bytes] | None = None
        self.newest: FakeProducer | None = None
        """The client that began last; former ones are fenced."""
        self.hangs: threading.Event | None = None
        """The next call that sends offsets returns when this is set."""
        self.refuses: dict[str, KafkaError] = {}
        """Errors of delivery reports, by topic."""
        self.produced: list[tuple[bytes, dict[str, Any]]] = []
        """Values and options of messages."""
        self.sent: list[tuple[list[tuple[str, int, int, str | None]], object]] = []
        """Offsets with their metadata, and the group metadata they were sent with."""
        self.full = 0
        """How many messages the client's queue refuses."""
        self.polls = 0

    def answer(self, name: str) -> None:
        if self.errors.get(name):
            raise KafkaException(self.errors[name].pop(0))


class FakeProducer:
    """Stands in for `confluent_kafka.Producer`, with the states of its transactions."""

    def __init__(self, broker: Broker, options: dict[str, Any]) -> None:
        self.broker = broker
        self.on_delivery = options["on_delivery"]
        self.state = "new"
        self.messages: list[bytes] = []
        self.reports: list[Callable[[], object]] = []
        broker.clients += 1

    def init_transactions(self, _: float) -> None:
        self.broker.answer("init_transactions")
        if self.broker.undecided is not None and self.broker.commits_undecided:
            self.broker.visible += self.broker.undecided
        self.broker.undecided = None
        self.broker.newest = self
        self.state = "ready"

    def begin_transaction(self) -> None:
        assert self.state == "ready"
        self.broker.answer("begin_transaction")
        self.state, self.messages = "open", []

    def produce(self, topic: str, value: bytes, _key: bytes | None, **options: Any) -> None:
        assert self.state == "open"
        self.broker.answer("produce")
        if self.broker.full:
            self.broker.full -= 1
            raise BufferError("Local: Queue full")
        self.broker.produced.append((value, options))
        self.messages.append(value)
        if topic in self.broker.refuses:
            message = SimpleNamespace(topic=lambda: topic)
            self.reports.append(lambda: self.on_delivery(self.broker.refuses[topic], message))

    def list_topics(self, topic: str, _: float) -> object:
        self.broker.answer("list_topics")
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=dict.fromkeys(range(3)))})

    def poll(self, _: float) -> None:
        self.broker.polls += 1

    def send_offsets_to_transaction(self, places: list[Any], group_metadata: object, _: float) -> None:
        assert self.state == "open"
        hangs, self.broker.hangs = self.broker.hangs, None
        if hangs is not None:
            hangs.wait(10)
        if self.broker.newest is not self:
            raise KafkaException(FATAL)
        self.broker.answer("send_offsets_to_transaction")
        offsets = [(place.topic, place.partition, place.offset, place.metadata) for place in places]
        self.broker.sent.append((offsets, group_metadata))

    def commit_transaction(self, _: float) -> None:
        assert self.state in {"open", "committing"}
        self.report_deliveries()
        self.state = "committing"
        self.broker.undecided = self.messages
        self.broker.answer("commit_transaction")
        self.broker.visible += self.messages
        self.state, self.broker.undecided = "ready", None

    def report_deliveries(self) -> None:
        """As librdkafka does before it commits; a message that was not stored makes it refuse the commit."""
        reports, self.reports = self.reports, []
        for report in reports:
            report()
        if reports:
            raise KafkaException(ABORTABLE)

    def abort_transaction(self, _: float) -> None:
        if self.state == "committing" and not self.broker.errors.get("may abort"):
            raise KafkaException(KafkaError(KafkaError._STATE, "it is being committed"))
        self.broker.answer("abort_transaction")
        self.state, self.broker.undecided = "ready", None


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    made = Broker()
    clock = itertools.count()
    monkeypatch.setattr(module, "Producer", lambda options: FakeProducer(made, options))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    return made


@pytest.fixture
def transactions(broker: Broker) -> Transactions:  # noqa: ARG001 - it stands in for the brokers
    return Transactions({}, "billing-1", "billing", timeout=10)


async def commit(transactions: Transactions, value: bytes) -> None:
    await transactions.commit([Message("out", value)], OFFSETS, b"")


@pytest.mark.parametrize("call", ["init_transactions", "send_offsets_to_transaction", "commit_transaction"])
async def test_a_transient_error_delays_a_transaction(broker: Broker, transactions: Transactions, call: str) -> None:
    broker.errors = {call: [RETRIABLE, RETRIABLE]}
    await commit(transactions, b"1")
    assert (broker.visible, broker.clients) == ([b"1"], 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [ABORTABLE, FATAL])
async def test_nothing_of_a_refused_transaction_is_visible(
    broker: Broker, transactions: Transactions, call: str, error: KafkaError
) -> None:
    broker.errors = {call: [error], "may abort": [error]}
    with pytest.raises(TransportError):
        await commit(transactions, b"1")
    await commit(transactions, b"2")
    assert broker.visible == [b"2"]


async def test_a_member_that_has_left_is_refused(broker: Broker, transactions: Transactions) -> None:
    broker.errors = {"send_offsets_to_transaction": [ABORTABLE]}
    with pytest.raises(CommitRefusedError):
        await commit(transactions, b"1")


@pytest.mark.parametrize("commits", [True, False])
async def test_an_undecided_transaction_is_settled_first(
    broker: Broker, transactions: Transactions, commits: bool
) -> None:
    broker.errors, broker.commits_undecided = {"commit_transaction": [RETRIABLE] * 100}, commits
    with pytest.raises(TransportError):
        await commit(transactions, b"1")
    broker.errors = {}
    await transactions.settle()
    assert (broker.visible, broker.undecided) == ([b"1"] if commits else [], None)
    await commit(transactions, b"2")
    assert broker.visible[-1] == b"2"


async def test_a_client_that_cannot_abort_is_replaced(broker: Broker, transactions: Transactions) -> None:
    broker.errors = {"send_offsets_to_transaction": [ABORTABLE], "abort_transaction": [FATAL]}
    with pytest.raises(TransportError):
        await commit(transactions, b"1")
    await transactions.settle()
    assert (broker.visible, broker.clients) == ([], 2)


async def test_a_client_that_hangs_is_replaced(
    broker: Broker, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka waits without a limit for a coordinator that was restarted."""
    monkeypatch.setattr(module, "_SLICE", 0.01)
    hangs = broker.hangs = threading.Event()
    with pytest.raises(CommitError, match="does not return"):
        await commit(transactions, b"1")
    await commit(transactions, b"2")
    hangs.set()
    await asyncio.sleep(0.05)
    await commit(transactions, b"3")
    assert (broker.visible, broker.clients) == ([b"2", b"3"], 2)


@pytest.mark.chaos
async def test_a_transaction_succeeds_after_the_coordinator_of_the_group_was_away() -> None:
    """On librdkafka's mock cluster: the client would wait without a limit, even when the coordinator is back."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kafka.confluent.coordinator_away", stdout=asyncio.subprocess.PIPE, cwd=PROJECT
    )
    output, _ = await process.communicate()
    assert (process.returncode, json.loads(output)) == (0, [1, 3])


async def test_a_client_abandoned_while_hanging_is_replaced_too(
    broker: Broker, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 0.01)
    hangs = broker.hangs = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await commit(transactions, b"1")
    with pytest.raises(CommitError, match="does not return"):
        await transactions.settle()
    await commit(transactions, b"2")
    hangs.set()
    assert (broker.visible, broker.clients) == ([b"2"], 2)


async def test_brokers_without_transactions_are_named(broker: Broker, transactions: Transactions) -> None:
    broker.errors = {"init_transactions": [FATAL]}
    with pytest.raises(TransportError):
        await transactions.settle()


async def test_closed_transactions_refuse_commits(transactions: Transactions) -> None:
    await transactions.close()
    assert not transactions._producer.thread.is_alive()
    with pytest.raises(ClientLostError):
        await transactions.settle()


async def test_closing_ends_retries(
    broker: Broker, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would keep the process alive."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: transactions._producer.stop())
    monkeypatch.setattr(module, "time", clock)
    broker.errors = {
        "commit_transaction": [RETRIABLE] * 100,
        "may abort": [RETRIABLE],
        "abort_transaction": [RETRIABLE] * 100,
    }
    with pytest.raises(TransportError):
        await commit(transactions, b"1")
    assert [len(broker.errors[call]) for call in ("commit_transaction", "abort_transaction")] == [98, 99]


# Messages and offsets -------------------------------------------------------------------


async def test_keyless_and_round_robin_messages_take_turns(broker: Broker, transactions: Transactions) -> None:
    rest = [Message("out", b"", key=b"k", partitioner="round_robin"), Message("out", b"", key=b"k")]
    for _ in range(2):
        await transactions.commit([Message("out", b""), *rest, Message("other", b"")], OFFSETS, b"")
    turns = [options.get("partition") for _, options in broker.produced]
    assert turns == [0, 1, None, 0, 2, 0, None, 1]


async def test_a_topic_without_known_partitions_fails_the_transaction(
    broker: Broker, transactions: Transactions
) -> None:
    broker.errors["list_topics"] = [RETRIABLE]
    with pytest.raises(CommitError):
        await transactions.commit([Message("out", b"1")], OFFSETS, b"")
    assert broker.visible == []
    await transactions.commit([Message("out", b"1")], OFFSETS, b"")
    assert broker.visible == [b"1"]


async def test_a_message_keeps_all_its_fields(broker: Broker, transactions: Transactions) -> None:
    headers = (("of", b"1"), ("of", None))
    message = Message("out", b"1", key=b"k", headers=headers, partition=0, timestamp=1.5)
    await transactions.commit([message, Message("out", b"2", key=b"k")], OFFSETS, b"")
    assert broker.produced == [
        (b"1", {"headers": list(headers), "partition": 0, "timestamp": 1500}),
        (b"2", {"headers": []}),
    ]


async def test_offsets_are_sent_with_their_metadata_and_the_membership(
    broker: Broker, transactions: Transactions
) -> None:
    offsets = {TopicPartition("orders", 0): Committed(7, "done"), TopicPartition("orders", 1): Committed(3, "")}
    await transactions.commit([], offsets, b"member")
    assert broker.sent == [([("orders", 0, 7, "done"), ("orders", 1, 3, None)], b"member")]


async def test_a_full_queue_of_the_client_delays_a_message(broker: Broker, transactions: Transactions) -> None:
    broker.full = 3
    await commit(transactions, b"1")
    assert (broker.visible, broker.polls) == ([b"1"], 3)


async def test_a_queue_that_stays_full_fails_the_transaction(broker: Broker, transactions: Transactions) -> None:
    broker.full = 100
    with pytest.raises(CommitError, match="Queue full"):
        await commit(transactions, b"1")
    broker.full = 0
    await commit(transactions, b"2")
    assert broker.visible == [b"2"]


# Committed offsets ------------------------------------------------------------------------


# Delivery reports -------------------------------------------------------------------------


async def test_an_unstored_message_is_named(broker: Broker, transactions: Transactions) -> None:
    broker.refuses = {"out": KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not allowed")}
    with pytest.raises(CommitError, match=r"message was not stored: out: .*not allowed"):
        await commit(transactions, b"1")
    broker.refuses = {}
    await commit(transactions, b"2")
    assert broker.visible == [b"2"]


async def test_the_error_of_an_earlier_transaction_is_not_repeated(broker: Broker, transactions: Transactions) -> None:
    broker.refuses = {"out": KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not allowed")}
    with pytest.raises(CommitError):
        await commit(transactions, b"1")
    broker.refuses, broker.errors = {}, {"send_offsets_to_transaction": [ABORTABLE]}
    with pytest.raises(CommitRefusedError):
        await commit(transactions, b"2")


@pytest.mark.parametrize("code", [KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT])
async def test_a_message_purged_by_an_abort_is_not_the_error(
    broker: Broker, transactions: Transactions, code: int
) -> None:
    broker.refuses = {"out": KafkaError(code, "purged")}
    with pytest.raises(CommitRefusedError):
        await commit(transactions, b"1")
