"""Exactly-once processing on the in-memory broker: which messages are published with a completion."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioshard import App, Batch, BatchContext, BatchError, Context, DeadLetter, Limit, Park, Record, Retry
from aioshard.attempts import Provided, with_attempts
from aioshard.engine import outgoing
from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.shards import DeliveryBatch
from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    MessageError,
    MessageRefusedError,
    MessagesRefusedError,
    MessageTooLargeError,
    NotDrainedError,
    SettingsError,
    StateError,
)
from aioshard.observe import TransactionStatistics
from aioshard.ports import Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, TestClient, run
from tests.engine.deliveries import crowd, make_epoch, unsent
from tests.engine.live_apps import engine_of

EXACTLY_ONCE: dict[str, Any] = {
    "processing_guarantee": "exactly_once",
    "auto_offset_reset": "earliest",
    "commit_interval": 0.01,
}
ONCE_MORE = Retry(attempts=2, initial=0.001)


def make_app(**settings: Any) -> App:
    return App("billing", **EXACTLY_ONCE | settings)


@contextlib.asynccontextmanager
async def without_interval(app: App) -> AsyncIterator[TestClient]:
    """Run an app whose transactions need a reason; the interval is no longer the short one of `TestClient`."""
    async with TestClient(app) as client:
        committer = engine_of(app).committer
        committer._interval, committer._last = 3600.0, asyncio.get_running_loop().time()
        yield client


def transactions_of(app: App) -> TransactionStatistics:
    transactions = app.statistics().transactions
    assert transactions is not None
    return transactions


async def until_complete(app: App, records: int) -> None:
    await until(lambda: sum(handler.processed for handler in app.statistics().handlers) == records)


async def until_committed(client: TestClient, offset: int) -> None:
    await until(lambda: client.committed("orders", 0) == offset)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)


def values(client: TestClient, topic: str) -> Counter[bytes | None]:
    return Counter(record.value for record in client.records(topic))


async def test_messages_of_a_failed_attempt_are_dropped() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE_MORE)
    async def on_order(_: Record, context: Context) -> None:
        assert await context.publish("out", b"%d" % context.attempt) == -1
        if context.attempt == 1:
            raise ValueError("again")

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_committed(client, 1)
        assert values(client, "out") == {b"2": 1}


async def test_a_dead_letter_replaces_the_messages_of_its_handler() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE_MORE, on_failure=DeadLetter("dead"))
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")
        raise ValueError("always")

    async with TestClient(app) as client:
        await client.publish("orders", b"poison", partition=0)
        await until_committed(client, 1)
        assert (values(client, "out"), values(client, "dead")) == ({}, {b"poison": 1})


async def test_a_dead_letter_too_large_for_a_transaction_keeps_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the largest size, and its dead letter has headers besides."""
    monkeypatch.setattr(outgoing, "MOST_MESSAGE_BYTES", 5_000)
    app = make_app()

    @app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter("dead"))
    async def on_order(_: Record) -> None:
        raise ValueError("always")

    client = TestClient(app)
    with pytest.raises(NotDrainedError) as error:  # noqa: PT012 - leaving the client raises
        async with client:
            await client.publish("orders", b"x" * 5_000, partition=0)
            await until(lambda: "at most 5000 bytes" in app.explain())
            await client.publish("orders", b"small", key=b"k", partition=1)
            await until(lambda: client.committed("orders", 1) == 1)
    assert list(error.value.unrecovered) == ["orders/0/0"]
    assert (values(client, "dead"), client.committed("orders", 0)) == ({b"small": 1}, 0)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_brokers_decide_a_transaction_that_fails_or_times_out(is_stored: bool) -> None:
    app = make_app()
    runs = 0

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitError("cut"), applied=is_stored)
        for number in range(5):
            await client.publish("orders", b"%d" % number, partition=0)
        await until_committed(client, 5)
        assert values(client, "out") == {b"%d" % number: 1 for number in range(5)}
        assert is_stored or runs > 5
        assert app.statistics().commit_failures == 1
        await until(lambda: [one.committed for one in app.statistics().partitions if one.partition == 0] == [5])


async def test_a_refused_transaction_is_resent_without_rerunning_handlers() -> None:
    """As in each rebalance: it was made for the generation before, and the partitions stay."""
    app = make_app()
    runs: Counter[bytes | None] = Counter()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        runs[record.value] += 1
        await context.publish("out", record.value, key=b"k")

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitRefusedError("the group has rebalanced"))
        client.broker.fail_next_commit(CommitRefusedError("the group has rebalanced"))
        for number in range(50):
            await client.publish("orders", b"%d" % number, partition=0, key=b"k")
            await asyncio.sleep(0.001)
        await until_committed(client, 50)
        assert [record.value for record in client.records("out")] == [b"%d" % number for number in range(50)]
        assert set(runs.values()) == {1}
        assert app.statistics().partitions[0].epoch == 1


async def test_messages_are_visible_only_with_the_offsets() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_complete(app, 1)
        await asyncio.sleep(0.02)
        assert (client.records("out"), client.committed("orders", 0)) == ([], 0)
        crowd(engine_of(app).buffer)
        await client.settle()
        assert client.records("out")


async def test_completions_do_not_make_a_transaction_early() -> None:
    app = make_app(commit_records=1)

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")

    async with without_interval(app) as client:
        for _ in range(3):
            await client.publish("orders", b"", partition=0)
        await until_complete(app, 3)
        await asyncio.sleep(0.15)
        assert not client.records("out")


async def test_a_message_after_the_end_of_the_run_is_refused() -> None:
    app = make_app()
    contexts: list[Context] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        contexts.append(context)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await client.settle()
        with pytest.raises(StateError):
            await contexts[0].publish("out", b"")


async def test_a_message_too_large_for_a_request_fails_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of its topic is for the brokers to know."""
    monkeypatch.setattr(outgoing, "MOST_MESSAGE_BYTES", 2_000_000)
    app = make_app()
    refused: list[Exception] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"x" * 1_500_000)
        try:
            await context.publish("out", b"x" * 2_000_001)
        except MessageTooLargeError as error:
            refused.append(error)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await client.settle()
        assert values(client, "out") == {b"x" * 1_500_000: 1}
    assert len(refused) == 1


async def test_revoked_partitions_publish_before_they_are_released() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_complete(app, 1)
        assert not client.records("out")
        await client.revoke("orders", 0)
        assert (len(client.records("out")), client.committed("orders", 0)) == (1, 1)


async def test_a_parked_record_publishes_together_with_its_removal() -> None:
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=0.01))
    async def on_order(_: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        await context.publish("out", b"%d" % runs)
        if runs < 3:
            raise ValueError("not yet")

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_committed(client, 1)
        await until(lambda: bool(client.records("out")))
        assert values(client, "out") == {b"3": 1}
        assert [record.value is None for record in client.records("parked")] == [False, False, True]


async def test_a_record_is_not_parked_if_its_transaction_fails() -> None:
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=60))
    async def on_order(record: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        await context.publish("out", record.value)
        if runs == 1:
            raise ValueError("not yet")

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitError("cut"))
        await client.publish("orders", b"", partition=0)
        await until_committed(client, 1)
        assert (client.records("parked"), len(client.records("out")), runs) == ([], 1, 2)


async def test_parked_records_are_replayed_one_by_one() -> None:
    """Those of a batch would complete one after the other, each with its own tombstone."""
    app = make_app()
    is_broken, batches = True, []

    @app.consume(
        "orders",
        shard_by="key",
        batch=Batch(max_records=4, linger=0.02),
        retry=Retry(attempts=1),
        on_failure=Park("parked", delay=0.1),
    )
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        if is_broken:
            raise BatchError({order: ValueError("not yet") for order in orders})
        batches.append([order.value for order in orders])
        for order in orders:
            await context.publish("out", order.value)

    async with TestClient(app) as client:
        for number in range(4):
            await client.publish("orders", b"%d" % number, key=b"%d" % number, partition=0)
        await until_committed(client, 4)
        is_broken = False
        await until(lambda: len(client.records("out")) == 4)
        assert sorted(batches) == [[b"%d" % number] for number in range(4)]
        await client.settle()
        assert values(client, "out") == {b"%d" % number: 1 for number in range(4)}
        assert Counter(record.value is None for record in client.records("parked"))[True] == 4


async def test_a_parked_record_is_not_read_before_its_transaction_has_ended() -> None:
    """It waits without an error: where it is stored is not known yet."""
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=0.01))
    async def on_order(_: Record) -> None:
        nonlocal runs
        runs += 1
        raise ValueError("not yet")

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until(lambda: runs == 1)
        await asyncio.sleep(0.05)
        parking = engine_of(app).handlers[0].parking
        assert parking is not None
        assert [entry.stored_at for parked in parking.partitions for entry in parked.keys] == [-1]
        assert (runs, parking.trouble) == (1, None)


async def test_outputs_that_fill_the_buffer_do_not_wait_for_the_interval() -> None:
    app = make_app(max_buffered_bytes=40_000)

    @app.consume("orders", concurrency=4)
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"x" * 5_000)

    async with without_interval(app) as client:
        for _ in range(40):
            await client.publish("orders", b"x" * 1_000, partition=0)
        await until(lambda: len(client.records("out")) >= 30)
        await until(lambda: transactions_of(app).messages == len(client.records("out")))
        assert app.statistics().commits >= 4


async def test_outputs_count_in_the_buffer_until_their_transaction_has_ended() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"x" * 5_000)

    async with without_interval(app) as client:
        await client.publish("orders", b"", partition=0)
        await until_complete(app, 1)
        await asyncio.sleep(0.02)
        assert app.statistics().buffered_bytes > 5_000
        assert app.statistics().buffered_records == 0
        crowd(engine_of(app).buffer)
        await client.settle()
        assert app.statistics().buffered_bytes == 0


async def test_transactions_are_counted() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        client.broker.fail_next_commit(CommitRefusedError("fenced"))
        client.broker.fail_next_commit(CommitError("cut"))
        await client.publish("orders", b"", partition=0)
        await until(lambda: bool(client.records("out")))
        await client.settle()
        statistics = app.statistics()
        assert statistics.commit_failures == 2
        transactions = transactions_of(app)
        assert (transactions.fenced, transactions.messages, transactions.open_seconds) == (1, 1, None)
        assert (transactions.committed, transactions.aborted) == (statistics.commits, 2)


async def test_the_transactions_of_a_lost_client_stay_counted() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        await client.publish("orders", b"1", partition=0)
        await until_committed(client, 1)
        client.broker.fail_next_commit(CommitError("no answer"), applied=True)
        await client.publish("orders", b"2", partition=0)
        await until_committed(client, 2)
        await client.settle()
        before = transactions_of(app)
        assert (before.aborted, before.decided_committed) == (0, 1)
        client.transports[-1].kill()
        await client.publish("orders", b"3", partition=0)
        await until_committed(client, 3)
        await client.settle()
        after = transactions_of(app)
    assert len(client.transports) == 2
    assert after.committed > before.committed > 0
    assert after.decided_committed == 1


async def test_only_epochs_of_a_failed_transaction_restart() -> None:
    """The failure may be known only when the partition has begun again already, or is somebody else's."""
    app = make_app()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async with TestClient(app) as client:
        for partition in range(3):
            await client.publish("orders", b"", partition=partition)
        await client.settle()
        rebalance = engine_of(app).rebalance
        ended, gone, failed = (rebalance.partitions[TopicPartition("orders", partition)] for partition in range(3))
        rebalance.restart({ended: {}}, "first")
        await until(lambda: rebalance.all_resumed)
        newer = rebalance.partitions[ended.topic_partition]
        await client.revoke("orders", 1)
        await until(lambda: rebalance.all_resumed)
        assert rebalance.partitions[ended.topic_partition] is newer
        newer.send_later(unsent([Message("out", b"newer")]))

        rebalance.restart({ended: {}, gone: {}, failed: {}}, "late")

        assigned = client.transports[-1]._assigned
        assert (assigned[failed.topic_partition].paused, assigned[newer.topic_partition].paused) == (True, False)
        assert rebalance.partitions[ended.topic_partition] is newer
        assert newer.is_open
        assert failed.gate is Gate.ENDED
        await until(lambda: rebalance.all_resumed)
        assert rebalance.partitions[ended.topic_partition] is newer
        assert rebalance.partitions[failed.topic_partition] is not failed
        await until(lambda: values(client, "out")[b"newer"] == 1)
        await client.publish("orders", b"read on", partition=0)
        await until(lambda: values(client, "out")[b"read on"] == 1)


@pytest.mark.parametrize("limit", [None, Limit("pace", 1_000_000.0)])
async def test_a_batch_has_records_of_one_partition(limit: Limit | None) -> None:
    """If one of several began again alone, the messages of the batch would be lost or doubled."""
    app = make_app()
    batches: list[set[int]] = []

    @app.consume("orders", shard_by="key", limit=limit, batch=Batch(max_records=8, linger=0.05))
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        batches.append({order.partition for order in orders})
        for order in orders:
            await context.publish("out", order.value)

    async with TestClient(app) as client:
        for number in range(12):
            await client.publish("orders", b"%d" % number, key=b"%d" % number, partition=number % 2)
        await client.settle()
        assert values(client, "out") == {b"%d" % number: 1 for number in range(12)}
        assert all(len(partitions) == 1 for partitions in batches)
        assert len(batches) < 12


async def test_a_batch_that_has_published_fails_as_a_whole() -> None:
    app = make_app()
    named = False

    @app.consume("orders", batch=Batch(max_records=4, linger=0.05), retry=Retry(attempts=3, initial=0.001))
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        nonlocal named
        for order in orders:
            await context.publish("out", order.value)
        if not named:
            named = True
            raise BatchError({orders[0]: ValueError("again")})

    async with TestClient(app) as client:
        for number in range(4):
            await client.publish("orders", b"%d" % number, partition=0)
        await client.settle()
        assert values(client, "out") == {b"%d" % number: 1 for number in range(4)}


async def test_messages_of_an_earlier_attempt_do_not_leak_into_another_batch() -> None:
    """That attempt was cancelled and returned all the same, so its messages were there already."""
    app = make_app()
    is_broken = False

    @app.consume("orders", batch=Batch(max_records=4))
    async def on_orders(orders: list[Record], context: BatchContext) -> None:
        for order in orders:
            await context.publish("out", b"%d" % order.offset)
        if is_broken:
            raise ValueError("again")

    (handler,) = app
    attempt: Any = with_attempts(
        handler, Provided(lambda: None, InMemoryProducer(InMemoryBroker()).publish, exactly_once=True)
    ).invoke
    _, deliveries = make_epoch([b"a", b"b"])

    async def attempted(*members: Delivery) -> list[list[bytes | None]]:
        batch = DeliveryBatch(4, 0.0)
        for delivery in members:
            batch.add(delivery, 1 << 20)
        with contextlib.suppress(ValueError):
            await attempt(batch)
        return [[message.value for message in delivery.outgoing] for delivery in deliveries]

    first, second = deliveries
    assert await attempted(first, second) == [[b"0", b"1"], []]
    assert await attempted(second, first) == [[], [b"1", b"0"]]
    is_broken = True
    assert await attempted(first, second) == [[], []]
    is_broken = False
    assert await attempted(second) == [[], [b"1"]]
    assert not second.batch_offsets, "it has run alone since"


async def test_a_backfill_publishes_at_once() -> None:
    """It commits nothing for the group, so that no transaction could make its messages visible."""
    app = make_app()
    offsets: list[int] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        offsets.append(await context.publish("out", b""))

    broker = InMemoryBroker(partitions=1)
    broker.publish("orders", b"")
    async with app.started(lambda: InMemoryTransport(broker, "billing"), lambda: InMemoryProducer(broker), replay=True):
        await until(lambda: offsets == [0])
        assert app.statistics().transactions is None
    assert len(broker.records("out")) == 1


async def test_messages_of_a_timed_out_attempt_are_not_sent_with_its_dead_letter() -> None:
    """It returned although it was cancelled, so it halts; the operator skips it."""
    app = make_app()

    @app.consume("orders", timeout=0.01)
    async def on_order(_: Record, context: Context) -> None:
        await context.publish("out", b"")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        async with asyncio.timeout(5):
            while not app.statistics().handlers[0].halted:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.01)
        app.skip("orders", 0, 0)
        await until_committed(client, 1)
        assert not client.records("out")


NOWHERE = 77
"""A partition that no topic has: only a transaction shows it."""


async def publish_with_poison(client: TestClient, *, keys: int = 3) -> None:
    """Publish ten records to each of two partitions; the message of 0/5 cannot be written."""
    for number in range(10):
        for partition in range(2):
            value = b"poison" if (partition, number) == (0, 5) else b"%d-%d" % (partition, number)
            await client.publish("orders", value, key=f"{partition}-{number % keys}", partition=partition)


def where(record: Record) -> int | None:
    return NOWHERE if record.value == b"poison" else None


@pytest.mark.parametrize("policy", ["skip", DeadLetter("dead", breaker=None), Park("parked", delay=3600.0)])
async def test_a_run_fails_if_its_message_cannot_be_written(policy: Any) -> None:
    app = make_app()
    runs: Counter[bytes | None] = Counter()

    @app.consume("orders", retry=ONCE_MORE, on_failure=policy)
    async def on_order(record: Record, context: Context) -> None:
        runs[record.value] += 1
        await context.publish("out", record.value, partition=where(record))

    async with TestClient(app) as client:
        await publish_with_poison(client, keys=10)
        await until(lambda: (client.committed("orders", 0), client.committed("orders", 1)) == (10, 10))
        await until(lambda: app.statistics().trouble is None)
        (handler,) = app.statistics().handlers
        good = {b"%d-%d" % (partition, number): 1 for partition in range(2) for number in range(10)}
        del good[b"0-5"]
        assert values(client, "out") == good
        assert (handler.skipped + handler.dead_lettered + handler.parked, handler.retried) == (1, 0)
        assert runs[b"poison"] == 1
        for letter in client.records("dead"):
            assert dict(letter.headers)["aioshard.error"] == b"MessageRefusedError"


async def test_a_run_fails_at_once_if_its_dead_letter_was_in_a_transaction_that_failed() -> None:
    app = make_app()
    runs: Counter[bytes | None] = Counter()

    @app.consume("orders", retry=ONCE_MORE, on_failure=DeadLetter("dead", breaker=None))
    async def on_order(record: Record, context: Context) -> None:
        runs[record.value] += 1
        if record.value == b"poison":
            client.broker.fail_next_commit(CommitError("the coordinator is away"))
        await context.publish("out", record.value, partition=where(record))

    async with TestClient(app) as client:
        client.broker.fail_next_commit(MessagesRefusedError({0: MessageRefusedError("too large")}))
        await client.publish("orders", b"poison", partition=0)
        await until_committed(client, 1)
        assert (runs[b"poison"], values(client, "dead")) == (1, {b"poison": 1})


async def test_a_run_whose_message_cannot_be_written_halts_until_it_can() -> None:
    app = make_app()
    reached: list[int] = []

    @app.consume("orders", retry=ONCE_MORE)
    async def on_order(record: Record, context: Context) -> None:
        reached.append(record.offset)
        await context.publish("out", record.value, partition=where(record))

    async with TestClient(app) as client:
        await publish_with_poison(client)
        await until(lambda: app.statistics().handlers[0].halted == 1)
        await until(lambda: client.committed("orders", 1) == 10)
        await until(lambda: (client.committed("orders", 0), values(client, "out")[b"0-9"]) == (5, 1))
        assert values(client, "out")[b"0-8"] == 0, "it has the key of the halted record"
        explained = app.explain()
        assert "MessageRefusedError" in explained
        assert f"out/{NOWHERE}" in explained
        client.broker.add_partitions("out", NOWHERE)
        app.retry_now("orders", 0, 5)
        await until_committed(client, 10)
        assert values(client, "out")[b"poison"] == values(client, "out")[b"0-8"] == 1


async def test_a_dead_letter_that_cannot_be_written_keeps_only_its_record() -> None:
    app = make_app()

    @app.consume("orders", retry=ONCE_MORE, on_failure=DeadLetter("dead", breaker=None))
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)
        if record.value == b"poison":
            raise ValueError("no such order")

    async with TestClient(app) as client:
        client.broker.fail_publishes("dead", AuthorizationError("may not write to topic 'dead'"))
        await publish_with_poison(client)
        await until(lambda: (client.committed("orders", 0), client.committed("orders", 1)) == (5, 10))
        await until(lambda: values(client, "out")[b"0-9"] == 1)
        await until(lambda: "may not write to topic 'dead'" in app.explain())
        client.broker.fail_publishes("dead", None)
        await until_committed(client, 10)
        (letter,) = client.records("dead")
        headers = dict(letter.headers)
        assert (headers["aioshard.error"], headers["aioshard.attempts"]) == (b"ValueError", b"2")
        assert max(values(client, "out").values()) == 1


async def test_only_the_bad_record_of_a_batch_fails_if_a_message_cannot_be_written() -> None:
    app = make_app()

    @app.consume(
        "orders", retry=Retry(attempts=3, initial=0.001), on_failure=DeadLetter("dead", breaker=None), batch=Batch(10)
    )
    async def on_orders(records: list[Record], context: BatchContext) -> None:
        for record in records:
            await context.publish("out", record.value, partition=where(record))

    async with TestClient(app) as client:
        await publish_with_poison(client)
        await until(lambda: (client.committed("orders", 0), client.committed("orders", 1)) == (10, 10))
        assert (len(values(client, "out")), max(values(client, "out").values())) == (19, 1)
        assert values(client, "dead") == {b"poison": 1}


async def test_a_parked_record_whose_message_cannot_be_written_is_parked_again() -> None:
    app = make_app()

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=0.3, attempts=2))
    async def on_order(record: Record, context: Context) -> None:
        if not client.records("parked"):
            raise ValueError("not yet")
        await context.publish("out", record.value, partition=NOWHERE)

    async with TestClient(app) as client:
        await client.publish("orders", b"poison", partition=0)
        await until(lambda: (work := app.workload()) is not None and [key.retries for key in work.parked] == [2])
        assert not client.records("out")


async def test_a_parked_record_runs_again_after_its_message_was_refused() -> None:
    """Its run fails once for that, not for as long as we own the partition."""
    app = make_app()
    runs = 0

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=0.2))
    async def on_order(record: Record, context: Context) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("not yet")
        await context.publish("out", record.value, partition=NOWHERE if runs == 2 else 0)

    async with TestClient(app) as client:
        await client.publish("orders", b"order", partition=0)
        await until(lambda: len(client.records("out")) == 1)
        assert runs == 3


def test_a_partition_that_begins_again_and_again_is_stuck_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    """Its records complete each time, so that nothing of an epoch is ever old."""
    app = make_app(stuck_after=10.0)

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(12):
                client.broker.fail_next_commit(CommitError("the coordinator is away"))
            await client.publish("orders", b"", partition=0)
            await asyncio.sleep(5.0)
            samples = []
            while client.committed("orders", 0) != 1:
                samples.append((app.statistics().trouble is not None, app.diagnose().partitions[:1]))
                await asyncio.sleep(0.25)
            assert all(in_trouble for in_trouble, _ in samples)
            seen = [partition for _, partitions in samples[-30:] for partition in partitions]
            assert {partition.verdict for partition in seen} == {"stuck"}
            (finding,) = seen[-1].findings
            assert finding.kind == "commit"
            assert finding.since is not None
            assert finding.since > 10.0
            assert "the coordinator is away" in finding.sentence
            await asyncio.sleep(2.0)
            assert app.statistics().trouble is None

    run(test())
    events = [getattr(record, "event", None) for record in caplog.records]
    assert (events.count("stuck"), events.count("advances_again")) == (1, 1)


def test_a_transaction_whose_answer_was_lost_is_no_trouble_once_it_is_known_to_be_committed() -> None:
    app = make_app(stuck_after=10.0)

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async def test() -> None:
        async with TestClient(app) as client:
            client.fail_next_commit(CommitError("the answer was lost"), applied=True)
            await client.publish("orders", b"1", partition=0)
            await until(lambda: app.statistics().commit_failures > 0)
            await asyncio.sleep(30.0)
            assert app.statistics().trouble is None
            assert app.diagnose().partitions[0].verdict == "up to date"
            assert values(client, "out") == {b"1": 1}

    run(test())


def test_transactions_of_a_parked_record_that_fail_for_ever_are_named() -> None:
    """Their offset was committed before, so the committed offset says nothing of their outcome."""
    app = make_app(stuck_after=5.0)
    runs: list[int] = []

    @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=1.0))
    async def on_order(record: Record, context: Context) -> None:
        runs.append(record.offset)
        if len(runs) == 1:
            raise ValueError("the first run")
        await context.publish("out", record.value)

    async def test() -> None:
        async with TestClient(app, broker=InMemoryBroker(partitions=1)) as client:
            await client.publish("orders", b"x", key=b"k", partition=0)
            await until(lambda: client.committed("orders", 0) == 1)
            for _ in range(400):
                client.fail_next_commit(CommitError("the coordinator is away"))
            await asyncio.sleep(30.0)
            assert app.statistics().trouble is not None
            assert app.diagnose().partitions[0].verdict == "stuck"
            assert len(runs) < 30, "each failure waits longer"

    run(test())


def test_a_failed_transaction_is_no_trouble_of_a_member_that_lost_the_partition() -> None:
    app = make_app()

    @app.consume("orders")
    async def on_order(record: Record, context: Context) -> None:
        await context.publish("out", record.value)

    async def test() -> None:
        async with TestClient(app) as client:
            client.broker.group(app.group_id)
            for _ in range(5):
                client.fail_next_commit(CommitError("the coordinator is away"))
            await client.publish("orders", b"1", partition=0)
            await until(lambda: app.statistics().trouble is not None)
            await client.revoke("orders", 0)
            await until(lambda: app.statistics().trouble is None)

    run(test())


def test_a_record_that_halts_after_a_failed_transaction_is_named() -> None:
    app = make_app(stuck_after=10.0)
    runs: list[int] = []

    @app.consume("orders", retry=Retry(attempts=1))
    async def on_order(record: Record, context: Context) -> None:
        runs.append(record.offset)
        await context.publish("out", record.value)
        if len(runs) > 2:
            raise ValueError("only now")

    async def test() -> None:
        async with TestClient(app) as client:
            for _ in range(2):
                client.fail_next_commit(CommitError("the coordinator is away"))
            await client.publish("orders", b"1", partition=0)
            await until(lambda: app.statistics().handlers[0].halted == 1)
            await asyncio.sleep(20.0)
            partition = app.diagnose().partitions[0]
            assert partition.verdict == "stuck"
            assert "only now" in partition.sentence
            assert [finding.kind for finding in partition.findings] == []
            app.skip("orders", 0, 0)
            await until_committed(client, 1)

    run(test())


@pytest.mark.parametrize("partition", [-1, 2**31, "0", 1.5])
async def test_publishing_to_an_impossible_partition_fails_the_attempt(partition: Any) -> None:
    app = make_app()
    refused: list[Exception] = []

    @app.consume("orders")
    async def on_order(_: Record, context: Context) -> None:
        try:
            await context.publish("out", b"", partition=partition)
        except MessageError as error:
            refused.append(error)

    async with TestClient(app) as client:
        await client.publish("orders", b"", partition=0)
        await client.settle()
    assert len(refused) == 1


@pytest.mark.parametrize("name", ["x\ud800", b"bytes", 5, None])
async def test_a_message_with_an_impossible_header_name_fails_the_attempt(name: Any) -> None:
    """Confluent-kafka would crash the process."""
    app = make_app()

    @app.consume("orders", publish_to="out", on_failure="skip", retry=ONCE_MORE)
    async def on_order(record: Record) -> Message:
        return Message("out", record.value, headers=((name, b""),) if record.value == b"bad" else ())

    async with TestClient(app) as client:
        await client.publish("orders", b"good", partition=0)
        await client.publish("orders", b"bad", partition=0)
        await until_committed(client, 2)
        assert values(client, "out") == {b"good": 1}
        assert app.statistics().handlers[0].skipped == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"assign": {"orders": [0]}},
        {"transaction_timeout": 25, "drain_timeout": 20, "commit_timeout": 5},
        {"rebalance_timeout": 33, "drain_timeout": 20, "commit_timeout": 5, "heartbeat_interval": 3},
    ],
)
def test_settings_that_rule_out_exactly_once_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        make_app(**settings)


def test_the_default_commit_interval_is_shorter_with_exactly_once() -> None:
    without = {name: value for name, value in EXACTLY_ONCE.items() if name != "commit_interval"}
    assert App("billing", **without).settings.commit_interval == 0.1
    assert App("billing").settings.commit_interval == 1.0


# Seeks


class Counting:
    """An app that publishes the offset of each record, and whose transactions need a reason."""

    def __init__(self) -> None:
        self.app = make_app(drain_timeout=4.0)
        self.ran: list[int] = []
        self.released = asyncio.Event()

        @self.app.consume("orders")
        async def on_order(record: Record, context: Context) -> None:
            self.ran.append(record.offset)
            if record.value == b"hang":
                await self.released.wait()
            await context.publish("out", b"%d" % record.offset, key=record.key)

    @contextlib.asynccontextmanager
    async def with_unpublished_outputs(self) -> AsyncIterator[TestClient]:
        """Run the app until ten outputs are visible and the next ten are not yet."""
        async with without_interval(self.app) as client:
            await self.order(client, 10)
            await self.app.seek("orders", 0, 10)  # any seek commits what is finished
            await self.order(client, 10)
            await until(lambda: len(self.ran) == 20)
            assert values(client, "out") == self.outputs(10)
            yield client

    async def order(self, client: TestClient, count: int) -> None:
        ran = len(self.ran) + count
        for _ in range(count):
            await client.publish("orders", b"", key=b"k", partition=0)
        await until(lambda: len(self.ran) >= ran)

    @staticmethod
    def outputs(count: int) -> Counter[bytes | None]:
        return Counter(b"%d" % number for number in range(count))


async def test_a_seek_that_would_skip_unpublished_outputs_is_given_up() -> None:
    counting = Counting()
    async with counting.with_unpublished_outputs() as client:
        client.fail_next_commit(CommitError("the transaction failed"))
        with pytest.raises(StateError, match=r"did not move to offset 20: .*the transaction failed"):
            await counting.app.seek("orders", 0, 20)
        await until(lambda: len(counting.ran) == 30)
        assert await counting.app.seek("orders", 0, 20) == 20
        await counting.order(client, 1)

    assert values(client, "out") == counting.outputs(21)
    assert client.committed("orders", 0) == 21


async def test_a_seek_ends_with_its_client_if_it_would_skip_unpublished_outputs() -> None:
    counting = Counting()
    async with counting.with_unpublished_outputs() as client:
        await client.publish("orders", b"hang", partition=0)
        await until(lambda: 20 in counting.ran)
        seeking = asyncio.create_task(counting.app.seek("orders", 0, 21))
        await until(lambda: bool(engine_of(counting.app).rebalance.seeks))
        client.transports[-1].kill()
        with pytest.raises(StateError, match="did not move to offset 21"):
            await seeking
        counting.released.set()
        await until(lambda: len(counting.ran) == 32)

    assert values(client, "out") == counting.outputs(21)
    assert client.committed("orders", 0) == 21


async def test_a_seek_back_needs_no_outputs_of_records_that_run_again() -> None:
    counting = Counting()
    async with counting.with_unpublished_outputs() as client:
        client.fail_next_commit(CommitError("the transaction failed"))
        assert await counting.app.seek("orders", 0, 5) == 5
        await until(lambda: len(counting.ran) == 35)

    assert values(client, "out") == counting.outputs(20) + Counter(b"%d" % number for number in range(5, 10))


async def test_a_seek_waits_for_a_transaction_whose_outcome_is_open() -> None:
    counting = Counting()
    async with counting.with_unpublished_outputs() as client:
        client.fail_next_commit(CommitRefusedError("not now"))
        assert await counting.app.seek("orders", 0, 20) == 20

    assert values(client, "out") == counting.outputs(20)
