"""Errors of every transaction call: all or nothing is visible, and the next transaction works."""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import (
    AuthorizationError,
    ClientLostError,
    CommitError,
    CommitRefusedError,
    MessagesRefusedError,
    TransportError,
)
from aioshard.kafka.confluent import transactions as module
from aioshard.kafka.confluent.transactions import Transactions
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from tests.support.paths import PROJECT

OFFSETS = {TopicPartition("orders", 0): Committed(1, "")}
REQUESTS = ("AddPartitionsToTxn", "AddOffsetsToTxn", "Produce", "TxnOffsetCommit", "EndTxn")
CALLS = ("begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction")
RETRIABLE = KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, "loading", retriable=True)
ABORTABLE = KafkaError(KafkaError.UNKNOWN_MEMBER_ID, "gone", txn_requires_abort=True)
FATAL = KafkaError(KafkaError._FENCED, "fenced", fatal=True)
TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large", txn_requires_abort=True)
DENIED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "not allowed", txn_requires_abort=True)
POISON = b"poison"


class Broker:
    """The brokers: visible messages, and the errors of the next calls, by name."""

    def __init__(self) -> None:
        self.visible: list[bytes] = []
        self.commits_undecided = True
        self.errors: dict[str, list[KafkaError]] = {}
        self.clients = 0
        self.undecided: list[bytes] | None = None
        self.epoch = 0
        """Of the client that began last; former ones are fenced."""
        self.transaction: list[bytes] = []
        """The messages of that client's current transaction."""
        self.hangs: threading.Event | None = None
        """The next call that sends offsets returns when this is set."""
        self.hanging = threading.Event()
        """Set once that call waits."""
        self.refuses: dict[str, KafkaError] = {}
        """Errors of delivery reports, by topic."""
        self.forbids: dict[str, KafkaError] = {}
        """Errors for which a transaction with a message for a topic is aborted; no call names the topic."""
        self.flushes = 0
        self.largest: dict[str, int] = {}
        """Most messages in a batch, by topic; a value of `POISON` is always too large."""
        self.partitions: dict[str, int] = {}
        """Number of partitions of topics that do not have three."""
        self.produced: list[tuple[bytes, dict[str, Any]]] = []
        """Values and options of messages."""
        self.sent: list[tuple[list[tuple[str, int, int, str | None]], object]] = []
        """Offsets with their metadata, and the group metadata they were sent with."""
        self.full = 0
        """How many messages the client's queue refuses."""
        self.polls = 0
        self.destroyed_in: list[threading.Thread] = []
        """Where each client that is gone was destroyed."""
        self.lost: set[str] = set()
        """Names of requests that reach the brokers only later: the client loses the connection and sends them again."""
        self.late: list[tuple[int, str]] = []
        """The first copies of these, with their epochs."""
        self.before_offsets: Callable[[], None] = lambda: None
        """Happens in each transaction after its messages have been written."""
        self.hangs_in_init: threading.Event | None = None
        self.log_text = "TxnCoordinator/1: {} (v1, 42 bytes)"

    def late_requests_arrive(self) -> None:
        """Let the current transaction end as an earlier EndTxn says, if the epoch is the same."""
        for epoch, request in self.late:
            if epoch != self.epoch:
                continue
            if request == "EndTxn(commit)":
                self.visible += self.transaction
            self.transaction.clear()
        self.late = []

    def answer(self, name: str) -> None:
        if self.errors.get(name):
            raise KafkaException(self.errors[name].pop(0))


class FakeProducer:
    """Stands in for `confluent_kafka.Producer`, with the states of its transactions."""

    def __init__(self, broker: Broker, options: dict[str, Any]) -> None:
        self.broker = broker
        self.logger = options["logger"]
        self.lines: list[str] = []
        assert options["delivery.report.only.error"]
        self.on_delivery = options["on_delivery"]
        self.state = "new"
        self.epoch = 0
        self.messages: list[bytes] = []
        self.batches: dict[str, list[tuple[bytes, Callable[[KafkaError, object], object]]]] = {}
        self.cause: KafkaError | None = None
        """Why the open transaction must be aborted."""
        self.reports: list[Callable[[], object]] = []
        broker.clients += 1

    def request(self, name: str, detail: str = "") -> None:
        """Log a request and its answer, as librdkafka does; if it gets lost, it is sent again."""
        if name in self.broker.lost:
            self.broker.lost.remove(name)
            self.broker.late.append((self.epoch, name + detail))
            self.lines.append(f"Sent {name}Request")
        self.lines += [f"Sent {name}Request", f"Received {name}Response"]

    def __del__(self) -> None:
        self.broker.destroyed_in.append(threading.current_thread())

    def init_transactions(self, _: float) -> None:
        hangs, self.broker.hangs_in_init = self.broker.hangs_in_init, None
        if hangs is not None:
            hangs.wait(10)
        self.broker.answer("init_transactions")
        if self.broker.undecided is not None and self.broker.commits_undecided:
            self.broker.visible += self.broker.undecided
        self.broker.undecided = None
        self.broker.epoch += 1
        self.epoch = self.broker.epoch
        self.state = "ready"

    def begin_transaction(self) -> None:
        if self.state != "ready":
            raise KafkaException(self.cause or KafkaError(KafkaError._STATE, "a transaction is open"))
        self.broker.answer("begin_transaction")
        self.state, self.messages = "open", []
        self.broker.transaction = self.messages
        self.batches = {}

    def produce(self, topic: str, value: bytes, _key: bytes | None, **options: Any) -> None:
        assert self.state == "open"
        self.broker.answer("produce")
        if self.broker.full:
            self.broker.full -= 1
            raise BufferError("Local: Queue full")
        self.request("AddPartitionsToTxn")
        self.request("Produce")
        self.broker.produced.append((value, options))
        self.messages.append(value)
        stored = SimpleNamespace(topic=lambda: topic, key=lambda: _key, value=lambda: value)
        on_delivery = self.on_delivery

        def report(error: KafkaError, _: object) -> object:
            return on_delivery(error, stored)

        self.batches.setdefault(topic, []).append((value, report))
        if topic in self.broker.refuses:
            self.reports.append(lambda: report(self.broker.refuses[topic], None))
        if topic in self.broker.forbids:
            self.cause = self.broker.forbids[topic]

    def list_topics(self, topic: str, _: float) -> object:
        self.broker.answer("list_topics")
        count = self.broker.partitions.get(topic, 3)
        missing = None if count else KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, "unknown topic")
        found = SimpleNamespace(partitions=dict.fromkeys(range(count)), error=missing)
        return SimpleNamespace(topics={topic: found})

    def flush(self, _: float) -> int:
        """Send the batches, and report what was not stored."""
        self.broker.flushes += 1
        batches, self.batches = self.batches, {}
        for topic, batch in batches.items():
            largest = self.broker.largest.get(topic)
            if largest is not None and (len(batch) > largest or POISON in [value for value, _ in batch]):
                self.cause = TOO_LARGE
                self.reports += [partial(report, TOO_LARGE, None) for _, report in batch]
        reports, self.reports = self.reports, []
        for report in reports:
            report()
        if reports:
            self.cause = self.cause or ABORTABLE
        return 0

    def poll(self, _: float) -> None:
        self.broker.polls += 1
        self.broker.answer("poll")
        for line in self.lines:
            self.logger.log(logging.DEBUG, "%s [%s] %s", "SEND", "client", self.broker.log_text.format(line))
        self.lines = []

    def send_offsets_to_transaction(self, offsets: list[Any], group_metadata: object, _: float) -> None:
        assert self.state == "open"
        self.broker.before_offsets()
        hangs, self.broker.hangs = self.broker.hangs, None
        if hangs is not None:
            self.broker.hanging.set()
            hangs.wait(10)
        if self.broker.epoch != self.epoch:
            raise KafkaException(FATAL)
        self.broker.answer("send_offsets_to_transaction")
        self.request("AddOffsetsToTxn")
        self.request("TxnOffsetCommit")
        offsets = [(offset.topic, offset.partition, offset.offset, offset.metadata) for offset in offsets]
        self.broker.sent.append((offsets, group_metadata))

    def commit_transaction(self, _: float) -> None:
        assert self.state in {"open", "committing"}
        self.report_deliveries()
        self.state = "committing"
        self.broker.undecided = self.messages
        self.broker.answer("commit_transaction")
        self.request("EndTxn", "(commit)")
        self.broker.visible += self.messages
        self.state, self.broker.undecided = "ready", None

    def report_deliveries(self) -> None:
        """As librdkafka does before it commits; a message that was not stored makes it refuse the commit."""
        self.flush(0.0)
        if self.cause is not None:
            raise KafkaException(self.cause)

    def abort_transaction(self, _: float) -> None:
        if self.state == "committing" and not self.broker.errors.get("may abort"):
            raise KafkaException(KafkaError(KafkaError._STATE, "it is being committed"))
        self.broker.answer("abort_transaction")
        self.request("EndTxn", "(abort)")
        self.state, self.broker.undecided = "ready", None
        self.cause = None


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


async def test_a_call_that_hangs_is_named(
    broker: Broker, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = broker.hangs = threading.Event()
    committing = asyncio.ensure_future(commit(transactions, b"1"))
    await asyncio.to_thread(broker.hanging.wait, 10)
    assert transactions.hang is None, "it may still return in time"
    monkeypatch.setattr(module, "_LATE", 0.0)
    assert "send_offsets_to_transaction" in str(transactions.hang)
    hangs.set()
    await committing
    assert transactions.hang is None


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
    hangs = broker.hangs = threading.Event()
    abandoned = asyncio.ensure_future(commit(transactions, b"1"))
    await asyncio.to_thread(broker.hanging.wait, 10)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    monkeypatch.setattr(module, "_SLICE", 0.01)
    with pytest.raises(CommitError, match="does not return"):
        await transactions.settle()
    await commit(transactions, b"2")
    hangs.set()
    assert (broker.visible, broker.clients) == ([b"2"], 2)


async def test_an_abandoned_commit_that_waits_for_its_turn_is_not_sent(
    broker: Broker, transactions: Transactions
) -> None:
    hangs = broker.hangs = threading.Event()
    first, second = (asyncio.create_task(commit(transactions, value), name="commit") for value in (b"1", b"2"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    hangs.set()
    await first
    await transactions.settle()
    assert broker.visible == [b"1"]


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


# Late requests --------------------------------------------------------------------------


async def test_a_client_whose_requests_were_all_answered_is_kept(broker: Broker, transactions: Transactions) -> None:
    for value in (b"1", b"2", b"3"):
        await commit(transactions, value)
    assert (broker.visible, broker.clients) == ([b"1", b"2", b"3"], 1)


@pytest.mark.parametrize("request_", REQUESTS)
async def test_a_client_that_has_sent_a_request_twice_is_replaced(
    broker: Broker, transactions: Transactions, request_: str
) -> None:
    broker.lost = {request_}
    await commit(transactions, b"1")
    assert len(broker.destroyed_in) == 1
    await commit(transactions, b"2")
    await commit(transactions, b"3")
    assert (broker.visible, broker.clients) == ([b"1", b"2", b"3"], 2)


async def test_a_client_that_logs_other_texts_is_replaced(broker: Broker, transactions: Transactions) -> None:
    """Another version of librdkafka: slow, and exact."""
    broker.log_text = "Request {} to TxnCoordinator/1"
    await commit(transactions, b"1")
    await commit(transactions, b"2")
    assert (broker.visible, broker.clients) == ([b"1", b"2"], 2)


async def test_a_client_whose_log_does_not_show_the_end_of_a_transaction_is_replaced(
    broker: Broker, transactions: Transactions
) -> None:
    await commit(transactions, b"1")
    broker.log_text = "nothing to do with {}"
    await commit(transactions, b"2")
    assert (broker.clients, len(broker.destroyed_in)) == (1, 1)


async def test_a_late_commit_does_not_publish_the_next_transaction(broker: Broker, transactions: Transactions) -> None:
    """The next one is refused, so its messages are sent again."""
    broker.lost = {"EndTxn"}
    await commit(transactions, b"1")
    await transactions.settle()
    broker.errors = {"send_offsets_to_transaction": [ABORTABLE]}
    broker.before_offsets = broker.late_requests_arrive
    with pytest.raises(CommitRefusedError):
        await commit(transactions, b"2")
    await commit(transactions, b"2")
    assert broker.visible == [b"1", b"2"]


@pytest.mark.parametrize("abort", [[], [RETRIABLE], [FATAL]], ids=["answered", "repeated", "in doubt"])
async def test_a_late_abort_does_not_drop_the_next_transaction(
    broker: Broker, transactions: Transactions, abort: list[KafkaError]
) -> None:
    """A refused transaction is aborted, and its messages are in the next one."""
    broker.errors = {"send_offsets_to_transaction": [ABORTABLE], "abort_transaction": list(abort)}
    broker.lost = {"EndTxn"}
    with pytest.raises(CommitRefusedError):
        await commit(transactions, b"1")
    broker.before_offsets = broker.late_requests_arrive
    await commit(transactions, b"1")
    assert broker.visible == [b"1"]


@pytest.mark.parametrize("call", ["init_transactions", "produce", "send_offsets_to_transaction", "commit_transaction"])
@pytest.mark.parametrize("abort", [[], [FATAL]], ids=["aborted", "in doubt"])
async def test_a_client_that_fails_is_destroyed_at_once_and_in_its_thread(
    broker: Broker, transactions: Transactions, call: str, abort: list[KafkaError]
) -> None:
    """The event loop still has the exception, and would have to wait for the threads of the client."""
    broker.errors = {call: [FATAL], "abort_transaction": abort}
    with pytest.raises(TransportError) as raised:
        await commit(transactions, b"1")
    assert broker.destroyed_in == [transactions._producer.thread]
    assert isinstance(raised.value.__cause__, KafkaException)


async def test_a_client_that_begins_after_it_was_replaced_commits_nothing(
    broker: Broker, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epoch is the newest one, so the brokers would let it."""
    monkeypatch.setattr(module, "_SLICE", 0.01)
    hangs = broker.hangs_in_init = threading.Event()
    with pytest.raises(CommitError, match="does not return"):
        await commit(transactions, b"1")
    replaced = broker.clients
    await commit(transactions, b"2")
    hangs.set()
    await asyncio.sleep(0.05)
    assert (replaced, broker.visible) == (1, [b"2"])


@pytest.fixture
def idle(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Transactions:  # noqa: ARG001 - it stands in for the brokers
    """Their client counts as idle as soon as it has no call."""
    monkeypatch.setattr(module, "_IDLE", 0.001)
    return Transactions({}, "billing-1", "billing", timeout=10)


async def test_the_log_of_an_idle_client_is_read(broker: Broker, idle: Transactions) -> None:
    """It would grow without limit."""
    await commit(idle, b"1")
    before = broker.polls
    async with asyncio.timeout(10):
        while broker.polls == before:  # noqa: ASYNC110 - a thread sends no event
            await asyncio.sleep(0.001)


async def test_an_idle_client_that_fails_is_replaced(broker: Broker, idle: Transactions) -> None:
    await commit(idle, b"1")
    broker.errors = {"poll": [FATAL]}
    async with asyncio.timeout(10):
        while not broker.destroyed_in:  # noqa: ASYNC110 - a thread sends no event
            await asyncio.sleep(0.001)
    await commit(idle, b"2")
    assert (broker.visible, broker.clients) == ([b"1", b"2"], 2)


@pytest.mark.usefixtures("broker")
async def test_the_log_of_the_client_is_passed_on_without_its_requests(
    transactions: Transactions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await commit(transactions, b"1")
    client: Any = transactions._producer._producer
    client.logger.log(logging.WARNING, "%s [%s] %s", "FAIL", "client", "Disconnected")
    assert [record.getMessage() for record in caplog.records] == ["FAIL [client] Disconnected"]


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
        (b"2", {}),
    ]


async def test_a_header_name_that_is_not_utf_8_never_reaches_the_client(
    broker: Broker, transactions: Transactions
) -> None:
    await transactions.commit([Message("out", b"", headers=(("a\udcff", b"1"),))], OFFSETS, b"")

    ((_, options),) = broker.produced
    assert options["headers"] == [("a\\xff", b"1")]


async def test_offsets_are_sent_with_their_metadata_and_the_membership(
    broker: Broker, transactions: Transactions
) -> None:
    offsets = {TopicPartition("orders", 0): Committed(7, "done"), TopicPartition("orders", 1): Committed(3, "")}
    await transactions.commit([], offsets, b"member")
    assert broker.sent == [([("orders", 0, 7, "done"), ("orders", 1, 3, None)], b"member")]


async def test_a_full_queue_of_the_client_delays_a_message(broker: Broker, transactions: Transactions) -> None:
    broker.full = 3
    await commit(transactions, b"1")
    assert (broker.visible, broker.polls) == ([b"1"], 3 + 1)


async def test_a_queue_that_stays_full_fails_the_transaction(broker: Broker, transactions: Transactions) -> None:
    broker.full = 100
    with pytest.raises(CommitError, match="Queue full"):
        await commit(transactions, b"1")
    broker.full = 0
    await commit(transactions, b"2")
    assert broker.visible == [b"2"]


# Committed offsets ------------------------------------------------------------------------


# Delivery reports -------------------------------------------------------------------------


async def refused(transactions: Transactions, *messages: Message) -> list[int]:
    """Indices of the messages that are refused."""
    with pytest.raises(MessagesRefusedError) as error:
        await transactions.commit(messages, OFFSETS, b"")
    return list(error.value.refused)


async def test_an_unstored_message_is_named(broker: Broker, transactions: Transactions) -> None:
    broker.refuses = {"out": KafkaError(KafkaError._MSG_TIMED_OUT, "timed out")}
    with pytest.raises(CommitError, match=r"topic 'out' was not stored: .*timed out"):
        await commit(transactions, b"1")
    broker.refuses = {}
    await commit(transactions, b"2")
    assert broker.visible == [b"2"]


async def test_a_message_that_is_reported_as_refused_is_found(broker: Broker, transactions: Transactions) -> None:
    broker.refuses = {"bad": DENIED}
    assert await refused(transactions, Message("out", b"1"), Message("bad", b"2"), Message("out", b"3")) == [1]
    await commit(transactions, b"4")
    assert broker.visible == [b"4"]


async def test_a_topic_that_aborts_a_transaction_is_found_by_trying_each(
    broker: Broker, transactions: Transactions
) -> None:
    broker.forbids = {"bad": DENIED}
    messages = [Message(topic, b"") for topic in ("out", "bad", "other", "bad")]
    assert await refused(transactions, *messages) == [1, 3]
    await commit(transactions, b"4")
    assert broker.visible == [b"4"]


async def test_offsets_that_may_not_be_written_are_no_refused_message(
    broker: Broker, transactions: Transactions
) -> None:
    broker.errors = {"send_offsets_to_transaction": [DENIED]}
    with pytest.raises(AuthorizationError, match="orders"):
        await commit(transactions, b"1")


async def test_a_batch_that_is_too_large_is_written_in_smaller_ones(broker: Broker, transactions: Transactions) -> None:
    broker.largest = {"out": 3}
    messages = [Message("out", b"%d" % number) for number in range(20)]
    rounds = 0
    while not broker.visible:
        with contextlib.suppress(MessagesRefusedError):
            await transactions.commit(messages, OFFSETS, b"")
        rounds += 1
        assert rounds < 10
    assert broker.visible == [message.value for message in messages]


async def test_a_message_that_is_too_large_is_found_among_others(broker: Broker, transactions: Transactions) -> None:
    broker.largest = {"out": 1000}
    messages = [Message("out", b"%d" % number) for number in range(20)]
    messages[13] = Message("out", POISON)
    found: list[int] = []
    for _ in range(10):
        found = found or await refused(transactions, *messages)
    assert found == [13]
    del messages[13]
    await transactions.commit(messages, OFFSETS, b"")
    assert len(broker.visible) == 19


async def test_a_message_is_found_among_thousands_with_few_batches(broker: Broker, transactions: Transactions) -> None:
    """Awaiting a batch for each of them would take longer than a transaction may."""
    broker.largest = {"out": 100_000}
    messages = [Message("out", b"%d" % number) for number in range(3_000)]
    messages[1_234] = Message("out", POISON)
    found: list[int] = []
    most = 0
    for _ in range(20):
        if not found:
            broker.flushes = 0
            found = await refused(transactions, *messages)
            most = max(most, broker.flushes)
    assert found == [1_234]
    assert most < 100


@pytest.mark.parametrize("message", [Message("missing", b""), Message("out", b"", partition=3)])
async def test_a_missing_topic_or_partition_is_found_before_the_transaction(
    broker: Broker, transactions: Transactions, message: Message
) -> None:
    broker.partitions = {"missing": 0}
    assert await refused(transactions, Message("out", b""), message) == [1]
    assert broker.produced == []
    broker.partitions = {"out": 4}
    await transactions.commit([message], OFFSETS, b"")
    assert broker.visible == [b""]


async def test_the_error_of_an_earlier_transaction_is_not_repeated(broker: Broker, transactions: Transactions) -> None:
    broker.refuses = {"out": DENIED}
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
